"use strict";
// All heads, a button each: layers down and heads across, or in the order of a statistic.
//
// all.data         -> what heads.py wrote
// all.canOpen(layer, head), all.open(layer, head)
// all.chosen()     -> [layer, head] of the map below, if there is one
// all.pair(layer, head) -> a promise of the weight of the chosen query and key
regard.overview = (page, all) => {
  const { element } = regard;
  const { statistics, thumbnails } = all.data;
  const layers = statistics[0].values.length;
  const heads = statistics[0].values[0].length;
  const [grid, shade, order] = ["heads-all", "heads-shade", "heads-order"].map(page);
  const buttons = []; // one for each head: { layer, head, button }
  const FEW = 16; // heads whose pictures leave room beside them on a wide screen
  const PAIR = { name: "weight of the chosen pair", unit: "", digits: 3 };
  let codes; // of the thumbnails, once they are unpacked

  function setUp() {
    shade.append(element("option", { value: "map" }, "its map"));
    order.append(element("option", { value: "layer" }, "layer and head"));
    statistics.forEach((each, at) => {
      shade.append(element("option", { value: at }, each.name));
      order.append(element("option", { value: at }, `${each.name}, largest first`));
    });
    if (all.data.maps.length) shade.append(element("option", { value: "pair" }, PAIR.name));
    for (let layer = 0; layer < layers; layer += 1) {
      for (let head = 0; head < heads; head += 1) buttons.push(cell(layer, head));
    }
    buttons[0].button.tabIndex = 0;
    grid.closest(".explore").classList.toggle("few", heads <= FEW);
    grid.setAttribute("aria-label", `${buttons.length} heads: arrow keys move, Enter opens a map`);
    grid.addEventListener("keydown", pressed);
    shade.addEventListener("change", paint);
    order.addEventListener("change", arrange);
    arrange();
    sortable(page("heads-table"));
    regard.unpacked(thumbnails.codes).then((bytes) => {
      codes = bytes;
      regard.onTheme(paint);
    });
  }

  function cell(layer, head) {
    const made = { layer, head };
    const tell = () => all.say(sentence(made));
    made.button = element("button", {
      type: "button",
      tabindex: -1,
      "aria-label": sentence(made),
      "aria-disabled": all.canOpen(layer, head) ? null : "true",
      onclick: () => all.open(layer, head),
      onfocus: () => { onlyStop(made); tell(); },
      onpointerenter: tell,
    });
    return made;
  }

  function sentence({ layer, head }) {
    const said = statistics.map((each) => `${each.name} ${figure(each, each.values[layer][head])}`);
    const closed = all.canOpen(layer, head) ? "" : "; its map was not asked for";
    return `Layer ${layer}, head ${head}: ${said.join(", ")}${closed}`;
  }

  function figure(statistic, value) {
    if (value === null) return "unknown";
    return `${value.toFixed(statistic.digits)} ${statistic.unit}`.trim();
  }

  // Tab stops at one head only; arrow keys go on from there.
  function onlyStop(chosen) {
    for (const each of buttons) each.button.tabIndex = each === chosen ? 0 : -1;
  }

  function arrange() {
    const statistic = statistics[order.value];
    const sorted = [...buttons];
    if (statistic) {
      const value = (each) => statistic.values[each.layer][each.head] ?? -Infinity;
      sorted.sort((one, other) => value(other) - value(one));
    }
    const wide = statistic ? "" : "2rem ";
    grid.style.gridTemplateColumns = `${wide}repeat(${heads}, ${size()})`;
    grid.replaceChildren(...(statistic ? sorted.map(named) : sorted.flatMap(ruled)));
    if (!statistic) grid.prepend(element("span", {}), ...numbers());
  }

  const size = () => (heads > FEW ? "1.6rem" : "clamp(1.5rem, calc((100vw - 8rem) / 9), 2.25rem)");
  const numbers = () => buttons.slice(0, heads).map(({ head }) => element("span", {}, `${head}`));

  function named({ button, layer, head }) {
    button.replaceChildren(element("span", {}, `${layer}.${head}`));
    return button;
  }

  // In the order of layers, each row begins with the layer's number.
  function ruled({ button, layer, head }) {
    button.replaceChildren();
    return head === 0 ? [element("span", {}, `${layer}`), button] : [button];
  }

  async function paint() {
    const scale = page("heads-scale");
    mark();
    if (shade.value === "map") {
      scale.replaceChildren("Each picture is a map: queries down, keys across; 0 ",
        element("i", {}), " 1, by square root.");
      return pictures();
    }
    const values = await valuesOf(shade.value);
    const known = values.filter((value) => value !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const statistic = statistics[shade.value] ?? PAIR;
    const colours = regard.shades(256);
    buttons.forEach(({ button }, at) => {
      const place = high > low ? (values[at] - low) / (high - low) : 0;
      button.style.backgroundImage = "none";
      button.style.backgroundColor = `rgb(${colours[Math.round(255 * place)]})`;
    });
    scale.replaceChildren(`${statistic.name}: ${figure(statistic, low)} `, element("i", {}),
      ` ${figure(statistic, high)}`);
  }

  function valuesOf(name) {
    if (name !== "pair") return buttons.map(({ layer, head }) => statistics[name].values[layer][head]);
    return Promise.all(buttons.map(({ layer, head }) => all.pair(layer, head)));
  }

  // One picture of all maps is the background of every button, each at its own place.
  function pictures() {
    const { rows, columns } = thumbnails;
    const words = regard.words(regard.shades(thumbnails.shades));
    const sheet = element("canvas", { width: columns * heads, height: rows * layers });
    const image = new ImageData(columns * heads, rows * layers);
    const cells = new Uint32Array(image.data.buffer);
    codes.forEach((code, at) => {
      const [column, row] = [at % columns, Math.floor(at / columns) % rows];
      const which = Math.floor(at / (columns * rows));
      const y = Math.floor(which / heads) * rows + row;
      const x = (which % heads) * columns + column;
      cells[y * columns * heads + x] = words[code];
    });
    sheet.getContext("2d").putImageData(image, 0, 0);
    grid.style.setProperty("--sheet", `url(${sheet.toDataURL()})`);
    for (const { button, layer, head } of buttons) {
      button.style.backgroundImage = "var(--sheet)";
      button.style.backgroundSize = `${100 * heads}% ${100 * layers}%`;
      button.style.backgroundPosition = `${part(head, heads)}% ${part(layer, layers)}%`;
    }
  }

  const part = (at, number) => (number > 1 ? (100 * at) / (number - 1) : 0);

  // The head of the map below is marked.
  function mark() {
    const [layer, head] = all.chosen();
    for (const each of buttons) {
      each.button.setAttribute("aria-pressed", String(each.layer === layer && each.head === head));
    }
  }

  function pressed(event) {
    const step = { ArrowUp: -heads, ArrowDown: heads, ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const shown = [...grid.querySelectorAll("button")];
    shown[shown.indexOf(document.activeElement) + step]?.focus();
  }

  // Each heading of the table becomes a button that sorts by its column, largest first.
  function sortable(details) {
    const headings = [...details.querySelectorAll("thead th")];
    headings.forEach((heading, column) => {
      const sort = () => {
        const falling = heading.getAttribute("aria-sort") !== "descending";
        for (const each of headings) each.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
        sortRows(details.querySelector("tbody"), column, falling);
      };
      heading.replaceChildren(element("button", { type: "button", onclick: sort },
        heading.textContent));
    });
  }

  function sortRows(body, column, falling) {
    const value = (row) => column === 0
      ? buttons.length - place(row) : Number(row.cells[column].textContent);
    const place = (row) => {
      const [layer, head] = row.cells[0].textContent.split(".").map(Number);
      return layer * heads + head;
    };
    const sign = falling ? -1 : 1;
    body.append(...[...body.rows].sort((one, other) => sign * (value(one) - value(other))));
  }

  setUp();
  const repaintPair = () => { if (shade.value === "pair") paint(); };
  return { mark, repaintPair };
};
