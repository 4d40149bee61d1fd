"use strict";
// Sliders replace sizes in formulas; charts, tables and the sentence follow.
regard.define("curves", (section, data, charts) => {
  const OPERATIONS = {
    "+": (a, b) => a + b,
    "-": (a, b) => a - b,
    "*": (a, b) => a * b,
    min: Math.min,
    max: Math.max,
    ceil_div: (a, b) => (a - (a % b)) / b + (a % b > 0 ? 1 : 0), // exact, unlike a / b
    floor_div: (a, b) => (a - (a % b)) / b - (a % b < 0 ? 1 : 0),
    power_of_two: (a) => { let power = 1; while (power < a) power *= 2; return power; },
  };

  // A formula of plan/formula.py: a number, a size's name, or an operation and its operands.
  function evaluate(formula, sizes) {
    if (typeof formula === "number") return formula;
    if (typeof formula === "string") return sizes[formula];
    const [operation, ...operands] = formula;
    const values = operands.map((each) => evaluate(each, sizes));
    if (values.length === 1) return OPERATIONS[operation](values[0]);
    return values.reduce((left, right) => OPERATIONS[operation](left, right));
  }

  // A cost of the layers that are alike, for the values of the sliders.
  function costOf(part, name, chosen) {
    const stored = part.stored[chosen.storage] ?? Object.values(part.stored)[0];
    if (!(name in stored.costs)) return 0;
    const sizes = { ...stored.sizes };
    for (const [size, slider] of Object.entries(part.follows)) sizes[size] = chosen[slider];
    return part.count * evaluate(data.formulas[stored.costs[name]], sizes);
  }

  const sum = (values) => values.reduce((left, right) => left + right, 0);
  const cacheBytes = (line, chosen) =>
    sum(line.parts.map((part) => costOf(part, "cache_bytes", chosen)));
  const decodeSeconds = (line, chosen) => {
    const device = data.devices[chosen.device];
    return sum(line.parts.map((part) => Math.max(
      costOf(part, "visible_decode_flops", chosen) / device.flops,
      costOf(part, "decode_bytes", chosen) / device.bandwidth,
    )));
  };
  const FIGURES = {
    cache_bytes: { value: cacheBytes, text: regard.bytes },
    decode_seconds: { value: decodeSeconds, text: regard.seconds },
  };

  // The most tokens whose cache fits the memory; null if every number does.
  function largestContext(line, chosen) {
    const fits = (context) => cacheBytes(line, { ...chosen, context }) <= chosen.memory;
    if (fits(data.most)) return null;
    let [fitting, missing] = [0, data.most]; // it fits at the first, if at 1, not at the second
    while (missing - fitting > 1) {
      const middle = Math.floor((fitting + missing) / 2);
      [fitting, missing] = fits(middle) ? [middle, missing] : [fitting, middle];
    }
    return fitting;
  }

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
  const fitting = (slider) =>
    slider.values.filter((value) => !slider.divides || chosen[slider.divides] % value === 0);
  const textOf = (slider) => slider.texts[slider.values.indexOf(chosen[slider.name])];
  const nameOf = (line) =>
    line.name.replace(/\{(\w+)\}/g, (whole, slider) => chosen[slider] ?? whole);
  const largestText = (value) => (value === null ? data.unlimited : regard.count(value));

  // Every slider shows its value; one that must divide another keeps to the divisors.
  function showControls() {
    for (const slider of data.sliders) {
      const values = fitting(slider);
      if (!values.includes(chosen[slider.name])) {
        chosen[slider.name] = values.filter((value) => value <= chosen[slider.name]).at(-1);
      }
      const input = inputs[slider.name];
      input.max = values.length - 1;
      input.value = values.indexOf(chosen[slider.name]);
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
    for (const each of section.querySelectorAll("[data-name]")) {
      each.textContent = nameOf(data.lines[each.dataset.name]);
    }
    const first = cacheBytes(data.lines[0], chosen);
    for (const cell of section.querySelectorAll("td[data-figure]")) {
      const { figure, line, context } = cell.dataset;
      if (figure === "largest") {
        const value = largestContext(data.lines[line], chosen);
        write(cell, value, largestText(value));
      } else if (figure === "share") {
        const share = first ? (cacheBytes(data.lines[line], chosen) / first).toFixed(2) : "";
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

  // What screen readers hear and everyone reads: the first line beside those that this slider
  // changes, or beside the smallest if it changes all.
  function sentence(changed, slider) {
    const sizes = data.lines.map((line) => cacheBytes(line, chosen));
    const follow = data.lines.map((line, at) => at).filter((at) => at > 0 &&
      data.lines[at].parts.some((part) => Object.values(part.follows).includes(slider)));
    const least = sizes.indexOf(Math.min(...sizes));
    const all = follow.length === 0 || follow.length === data.lines.length - 1;
    const told = [...new Set([0, ...(all ? [least] : follow)])].slice(0, 4);
    const kept = told.map((at) => `${regard.bytes(sizes[at])} with ${nameOf(data.lines[at])}` +
      (all && at === least ? " (the least)" : ""));
    const held = told.map((at) => largestText(largestContext(data.lines[at], chosen)));
    return `${changed}Cache at ${regard.count(chosen.context)} tokens: ${kept.join("; ")}. ` +
      `Largest context in ${regard.bytes(chosen.memory)}: ${held.join("; ")} tokens.`;
  }

  // The values of a curve of every line: of a figure, by context.
  function curvesOf(name) {
    const contexts = [...new Set([...data.contexts, chosen.context])];
    return data.lines.map((line) => new Map(
      contexts.map((context) => [context, FIGURES[name].value(line, { ...chosen, context })]),
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
      columns[`text${at}`] = points.map((value) => `${nameOf(line)}: ${FIGURES[name].text(value)}`);
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
  function show(changed = "", slider = "") {
    showControls();
    const figures = {};
    for (const name of Object.keys(FIGURES)) {
      if (name === "cache_bytes" || data.devices.length) figures[name] = curvesOf(name);
    }
    showTables(figures);
    for (const [name, figure] of drawn) showChart(name, figure, figures[name]);
    regard.say(live, sentence(changed, slider));
  }

  for (const slider of data.sliders) {
    inputs[slider.name].addEventListener("input", (event) => {
      chosen[slider.name] = fitting(slider)[event.target.value];
      show(`${slider.label}: ${textOf(slider)}. `, slider.name);
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
