"use strict";
// Sliders choose among computed values; charts, tables and the sentence follow.
regard.define("curves", (section, data, charts) => {
  // The tables of a line with the chosen storage; if it has none, with its first.
  const tablesOf = (line) => line.stored[chosen.storage] ?? Object.values(line.stored)[0];
  const sum = (values) => values.reduce((left, right) => left + right, 0);
  const cacheBytes = (line, context = chosen.context) =>
    chosen.batch * tablesOf(line).cache_bytes[data.contexts.indexOf(context)];
  const decodeSeconds = (line, context = chosen.context) => {
    const [device, at] = [data.devices[chosen.device], data.contexts.indexOf(context)];
    return sum(tablesOf(line).parts.map((part) => Math.max(
      chosen.batch * part.flops[at] / device.flops,
      (part.fixed + chosen.batch * part.moved[at]) / device.bandwidth,
    )));
  };
  const FIGURES = {
    cache_bytes: { value: cacheBytes, text: regard.bytes },
    decode_seconds: { value: decodeSeconds, text: regard.seconds },
  };

  // The most tokens whose cache fits the memory; null if every number does.
  const largestContext = (line) =>
    tablesOf(line).largest[Math.floor(chosen.memory / chosen.batch)];

  const form = section.querySelector("form");
  const live = section.querySelector(".live");
  const inputs = Object.fromEntries(
    data.sliders.map((slider) => [slider.name, form.elements[slider.name]]),
  );
  const select = form.elements.device;
  const chosen = {};
  const start = () => {
    for (const slider of data.sliders) chosen[slider.name] = slider.start;
    chosen.device = 0;
  };
  const textOf = (slider) => slider.texts[slider.values.indexOf(chosen[slider.name])];
  const largestText = (value) => (value === null ? data.unlimited : regard.count(value));

  // Every slider shows its value.
  function showControls() {
    for (const slider of data.sliders) {
      const input = inputs[slider.name];
      input.value = slider.values.indexOf(chosen[slider.name]);
      input.setAttribute("aria-valuetext", textOf(slider));
      input.closest("div").querySelector("output").textContent = textOf(slider);
    }
    if (select) select.selectedIndex = chosen.device;
  }

  function write(cell, value, text) {
    if (cell.textContent !== text) cell.textContent = text;
    if (value === null) delete cell.dataset.value;
    else cell.dataset.value = value;
    cell.title = Number.isInteger(value) ? regard.count(value) : "";
  }

  // All figures of the tables, and the table's own words.
  function showTables(figures) {
    const first = cacheBytes(data.lines[0]);
    for (const cell of section.querySelectorAll("td[data-figure]")) {
      const { figure, line, context } = cell.dataset;
      if (figure === "largest") {
        const value = largestContext(data.lines[line]);
        write(cell, value, largestText(value));
      } else if (figure === "share") {
        const share = first ? (cacheBytes(data.lines[line]) / first).toFixed(2) : "";
        write(cell, null, share);
      } else {
        const at = context === undefined ? chosen.context : Number(context);
        const value = figures[figure][line].get(at);
        write(cell, value, FIGURES[figure].text(value));
      }
    }
    const heads = section.querySelectorAll('[data-table="summary"] thead th');
    heads[1].textContent = `cache at ${regard.count(chosen.context)} tokens`;
    heads[3].textContent = `tokens in ${regard.bytes(chosen.memory)}`;
    const at = `${regard.count(chosen.context)} tokens`;
    const captions = {
      cache_bytes: `Dotted: ${at}, and ${regard.bytes(chosen.memory)} of memory.`,
      decode_seconds: `On ${data.devices[chosen.device]?.name}. Dotted: ${at}.`,
    };
    for (const each of section.querySelectorAll("[data-caption]")) {
      each.textContent = captions[each.dataset.caption];
    }
    for (const row of section.querySelectorAll("details tr")) {
      const cell = row.querySelector("td[data-context]");
      row.classList.toggle("chosen", cell?.dataset.context === String(chosen.context));
    }
  }

  // What screen readers hear and everyone reads: the first line beside the smallest.
  function sentence(changed) {
    const sizes = data.lines.map((line) => cacheBytes(line));
    const least = sizes.indexOf(Math.min(...sizes));
    const told = [...new Set([0, least])];
    const kept = told.map((at) => `${regard.bytes(sizes[at])} with ${data.lines[at].name}` +
      (at === least ? " (the least)" : ""));
    const held = told.map((at) => largestText(largestContext(data.lines[at])));
    return `${changed}Cache at ${regard.count(chosen.context)} tokens: ${kept.join("; ")}. ` +
      `Largest context in ${regard.bytes(chosen.memory)}: ${held.join("; ")} tokens.`;
  }

  // The values of a curve of every line: of a figure, by context.
  function curvesOf(name) {
    return data.lines.map((line) => new Map(
      data.contexts.map((context) => [context, FIGURES[name].value(line, context)]),
    ));
  }

  // The range of an axis, to whole powers of four; it grows and never shrinks, so that curves move.
  function grow(range, values) {
    const shown = values.filter((value) => value > 0 && Number.isFinite(value));
    if (!shown.length) return;
    const power = (round, value) => 4 ** round(Math.log(value) / Math.log(4));
    const [least, most] = [Math.min(...shown), Math.max(...shown)];
    if (!range.grown || least < range.start) range.start = power(Math.floor, least * 0.8);
    if (!range.grown || most > range.end) range.end = power(Math.ceil, most * 1.25);
    range.grown = true;
  }

  function showChart(name, figure, values) {
    const model = (each) => figure.select(each)[0] ?? figure.document.get_model_by_name(each);
    const columns = { context: data.contexts };
    data.lines.forEach((line, at) => {
      const points = data.contexts.map((context) => values[at].get(context));
      columns[`line${at}`] = points.map((value) => (value > 0 ? value : NaN));
      columns[`text${at}`] = points.map((value) => `${line.name}: ${FIGURES[name].text(value)}`);
    });
    figure.document.get_model_by_name("source").data = columns;
    const all = values.flatMap((line) => data.contexts.map((context) => line.get(context)));
    grow(figure.y_range, name === "cache_bytes" ? [...all, chosen.memory] : all);
    place(model("at"), chosen.context);
    if (name === "cache_bytes") place(model("memory"), chosen.memory);
  }
  function place(span, location) {
    span.location = location;
    span.visible = true;
  }

  function colour(figure) {
    const [ink, line] = [regard.colour("--aside"), regard.colour("--line")];
    const paper = regard.colour("--paper"); // not null: what was drawn before would shine through
    figure.setv({
      background_fill_color: paper, border_fill_color: paper, border_line_color: null,
      outline_line_color: line,
    });
    for (const axis of [...figure.below, ...figure.left]) {
      axis.setv({
        axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null,
        major_label_text_color: ink, axis_label_text_color: ink,
        major_label_text_font_size: "12px", axis_label_text_font_size: "12px",
        axis_label_text_font_style: "normal",
      });
    }
    for (const each of figure.center) {
      if (each.type === "Grid") each.setv({ grid_line_color: line, grid_line_alpha: 0.6 });
      if (each.type === "Span") each.line_color = ink;
      if (each.type === "BoxAnnotation") each.setv({ fill_color: ink, fill_alpha: 0.08 });
    }
    for (const each of figure.renderers) {
      const shown = regard.colour(`--curve-${Number(each.name.match(/\d+/)[0]) % 8}`);
      each.glyph.line_color = shown;
      if ("fill_color" in each.glyph.properties) each.glyph.fill_color = shown;
    }
  }

  // The keyboard passes charts by: the tables below have the same figures.
  function passBy(root) {
    for (const each of root.querySelectorAll("*")) {
      if (each.tabIndex >= 0) each.tabIndex = -1;
      if (each.shadowRoot) passBy(each.shadowRoot);
    }
  }

  const drawn = new Map(); // figures by what they show, once Bokeh has drawn them
  function show(changed = "") {
    showControls();
    const figures = {};
    for (const name of Object.keys(FIGURES)) {
      if (name === "cache_bytes" || data.devices.length) figures[name] = curvesOf(name);
    }
    showTables(figures);
    for (const [name, figure] of drawn) showChart(name, figure, figures[name]);
    regard.say(live, sentence(changed));
  }

  for (const slider of data.sliders) {
    inputs[slider.name].addEventListener("input", (event) => {
      chosen[slider.name] = slider.values[event.target.value];
      show(`${slider.label}: ${textOf(slider)}. `);
    });
  }
  select?.addEventListener("change", () => {
    chosen.device = select.selectedIndex;
    show(`${select.selectedOptions[0].text}. `);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    start();
    for (const figure of drawn.values()) figure.y_range.grown = false;
    show("Reset. ");
  });
  for (const box of section.querySelectorAll("[data-show]")) {
    box.addEventListener("change", () => {
      for (const figure of drawn.values()) {
        for (const each of figure.renderers) {
          if (each.name.match(/\d+/)[0] === box.dataset.show) each.visible = box.checked;
        }
      }
    });
  }

  start();
  form.hidden = false;
  show();
  for (const [id, promise] of Object.entries(charts)) {
    promise.then((view) => {
      const name = id.replace(`${section.id}-`, "");
      const figure = view.model;
      drawn.set(name, figure);
      regard.onTheme(() => colour(figure));
      showChart(name, figure, curvesOf(name));
      const place = section.querySelector(`#${CSS.escape(id)}`);
      passBy(place);
      place.dataset.drawn = "yes";
    });
  }
});
