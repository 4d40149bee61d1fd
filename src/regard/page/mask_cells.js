"use strict";
// A mask cell by cell: see mask_cells.py for what `data` holds.
regard.define("mask_cells", async (section, data) => {
  const page = (id) => section.querySelector(`#${id}`);
  const { element } = regard;
  const [rows, columns] = [data.queries.length, data.keys.length];
  const text = new TextDecoder();
  const rules = await Promise.all(data.rules.map(unpackedRule));
  const on = new Set(rules.keys()); // places of the rules that are switched on
  const cursor = [rows - 1, 0];
  let tree = data.tree; // of the rules that are on; null without one
  let shades = new Uint8Array(rows * columns); // 0 visible, 1 hidden, 2 + n hidden by rule n
  let colours;
  let map;

  async function unpackedRule({ code, visible, hidden }) {
    const cells = await regard.unpacked(visible);
    const lines = text.decode(await regard.unpacked(hidden)).split("\n");
    const line = new Uint32Array(cells.length); // of each hidden cell
    for (let cell = 0, number = 0; cell < cells.length; cell += 1) {
      line[cell] = number;
      if (!cells[cell]) number += 1;
    }
    return { code, allows: (cell) => cells[cell] === 1, hidden: (cell) => lines[line[cell]] };
  }

  const isRule = (node) => typeof node === "number";

  // The tree without the rules that are switched off; null if none is left.
  function reduced(node) {
    if (isRule(node)) return on.has(node) ? node : null;
    const [kind, ...parts] = node;
    const kept = parts.map(reduced).filter((part) => part !== null);
    if (kept.length === 0) return null;
    return kept.length === 1 && kind !== "~" ? kept[0] : [kind, ...kept];
  }

  function allows(node, cell) {
    if (isRule(node)) return rules[node].allows(cell);
    const [kind, ...parts] = node;
    if (kind === "~") return !allows(parts[0], cell);
    return kind === "&" ? parts.every((part) => allows(part, cell))
      : parts.some((part) => allows(part, cell));
  }

  // These two follow __repr__ and _reason of regard.masks.algebra, and the tests compare them.
  function code(node) {
    if (isRule(node)) return rules[node].code;
    const [kind, ...parts] = node;
    if (kind === "~") {
      const simple = isRule(parts[0]) || parts[0][0] === "~";
      return simple ? `~${code(parts[0])}` : `~(${code(parts[0])})`;
    }
    const bracketed = (part) => kind === "&" && part[0] === "|" ? `(${code(part)})` : code(part);
    return parts.map(bracketed).join(` ${kind} `);
  }

  function reason(node, cell) {
    if (isRule(node)) {
      const { code: name, allows: may, hidden } = rules[node];
      return may(cell) ? `${name} allows it` : `${name} hides ${hidden(cell)}`;
    }
    const [kind, ...parts] = node;
    if (kind === "~") {
      const verb = allows(node, cell) ? "allows" : "hides";
      return `${code(node)} ${verb} it, as ${reason(parts[0], cell)}`;
    }
    if (kind === "&") {
      const hiding = parts.filter((part) => !allows(part, cell));
      return hiding.map((part) => reason(part, cell)).join("; ") || "every rule allows it";
    }
    const allowing = parts.find((part) => allows(part, cell));
    if (allowing !== undefined) return reason(allowing, cell);
    return `no rule allows it: ${parts.map((part) => reason(part, cell)).join("; ")}`;
  }

  function sentence(row, column) {
    const cell = row * columns + column;
    const visible = tree === null || allows(tree, cell);
    const why = tree === null ? "no rule is switched on" : reason(tree, cell);
    const may = visible ? "may" : "may not";
    return `query ${data.queries[row]} ${may} attend to key ${data.keys[column]}: ${why}`;
  }

  // The rule that a hidden cell has its colour of: the first that hides it in an intersection.
  function hiding(node, cell) {
    if (isRule(node)) return node;
    const [kind, ...parts] = node;
    if (kind === "&") return hiding(parts.find((part) => !allows(part, cell)), cell);
    if (kind === "~" && isRule(parts[0])) return parts[0];
    return -1; // no rule alone hides it
  }

  function evaluate() {
    tree = reduced(data.tree);
    const each = (_, cell) => tree === null || allows(tree, cell) ? 0 : 2 + hiding(tree, cell);
    shades = shades.map(each);
    const shown = tree === null ? "Everything()" : code(tree);
    page("mask-code").replaceChildren(element("code", {}, shown), `: ${counted()}`);
    const used = new Set(shades);
    section.querySelectorAll(".rules i").forEach((swatch, place) => {
      swatch.style.visibility = used.has(2 + place) ? "visible" : "hidden";
    });
    refresh();
  }

  function counted() {
    const sums = data.queries.map((_, row) =>
      shades.subarray(row * columns, (row + 1) * columns).filter((shade) => shade === 0).length);
    const whole = sums.reduce((one, other) => one + other, 0);
    const empty = sums.filter((sum) => sum === 0).length;
    const masked = empty === 0 ? "no query is fully masked"
      : `${empty} of ${rows} queries fully masked`;
    return `${regard.count(whole)} of ${regard.count(rows * columns)} cells visible; ${masked}.`;
  }

  function refresh() {
    map.draw();
    page("mask-sentence").textContent = sentence(...cursor);
    regard.say(page("mask-spoken"), sentence(...cursor));
  }

  function moved(row, column) {
    cursor[0] = Math.min(Math.max(row, 0), rows - 1);
    cursor[1] = Math.min(Math.max(column, 0), columns - 1);
    refresh();
  }

  function switches() {
    rules.forEach(({ code: name }, place) => {
      const toggle = (event) => {
        if (event.target.checked) on.add(place);
        else on.delete(place);
        evaluate();
      };
      const colour = `background: var(--by-${place % 6})`;
      page("mask-rules").append(element("label", {},
        element("input", { type: "checkbox", checked: true, onchange: toggle }),
        element("i", { style: colour, title: "the colour of what it hides" }),
        element("code", {}, name)));
    });
  }

  function colourList() {
    const names = ["--visible", "--hidden", ...rules.map((_, place) => `--by-${place % 6}`)];
    return names.map((name) => regard.colour(name).match(/[\d.]+/g).slice(0, 3).map(Number));
  }

  colours = colourList();
  map = regard.cells(page("mask-cells"), {
    room: 34,
    view: () => ({ row: 0, rows, column: 0, columns }),
    shade: (row, column) => shades[row * columns + column],
    colours: () => colours,
    rowName: (row) => String(data.queries[row]),
    columnName: (column) => String(data.keys[column]),
    cursor: () => cursor,
    moved,
  });
  switches();
  evaluate();
  regard.onTheme(() => { colours = colourList(); refresh(); });
});
