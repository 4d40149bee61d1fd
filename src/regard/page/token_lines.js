"use strict";
// The tokens of the prompt in two columns, queries and keys, and lines from the chosen query to its
// keys, as strong as the weights.
//
// tokens.view()      -> { queries: [row, ...], keys: [token, ...], before: how many keys above }
// tokens.queryName(row), tokens.keyName(key) -> text
// tokens.weight(row, key) -> from 0 to 1; tokens.weightBefore(row) of all keys above
// tokens.chosen()    -> [row, key]
// tokens.threshold() -> the smallest weight that has a line
// tokens.choose(row, key): what the pointer or the keyboard is on; either may be undefined
regard.tokenLines = (host, tokens) => {
  const HEIGHT = 24; // CSS pixels of a token
  const { element, svg } = regard;
  const columns = { query: element("div", { class: "tokens queries", role: "group" }),
                    key: element("div", { class: "tokens keys", role: "group" }) };
  const drawing = svg("svg", { "aria-hidden": "true", preserveAspectRatio: "none" });
  columns.query.setAttribute("aria-label", "Queries: arrow keys move");
  columns.key.setAttribute("aria-label", "Keys: arrow keys move");
  host.replaceChildren(columns.query, drawing, columns.key);

  function draw() {
    const view = tokens.view();
    const [row, key] = tokens.chosen();
    fill("query", view.queries, row, tokens.queryName);
    fill("key", view.keys, key, tokens.keyName);
    const rest = element("div", { class: "rest" }, restOf(view, row));
    columns.key.prepend(rest);
    columns.query.prepend(element("div", { class: "rest" }, "query"));
    connect(view, row, key);
  }

  function restOf(view, row) {
    if (view.before === 0) return "key";
    return `${view.before} before: ${tokens.weightBefore(row).toFixed(2)}`;
  }

  // Buttons are replaced only when other tokens come into view, so that the focus stays.
  function fill(kind, shown, chosen, name) {
    const column = columns[kind];
    const wanted = shown.join();
    column.querySelector(".rest")?.remove();
    if (column.dataset.shown !== wanted) {
      const focused = column.contains(document.activeElement);
      column.replaceChildren(...shown.map((at) => button(kind, at, name(at))));
      column.dataset.shown = wanted;
      if (focused) column.querySelector(`[data-at="${chosen}"]`)?.focus();
    }
    for (const each of column.children) {
      const at = Number(each.dataset.at);
      each.tabIndex = at === chosen || (!shown.includes(chosen) && at === shown[0]) ? 0 : -1;
      each.setAttribute("aria-pressed", String(at === chosen));
    }
  }

  function button(kind, at, name) {
    const choose = () => {
      if (tokens.chosen()[kind === "query" ? 0 : 1] === at) return;
      if (kind === "query") tokens.choose(at, undefined);
      else tokens.choose(undefined, at);
    };
    const made = element(
      "button",
      { type: "button", "data-at": at, onclick: choose, onfocus: choose, onpointerenter: choose,
        onkeydown: (event) => pressed(event, kind, at) },
      element("bdi", {}, name),
    );
    return made;
  }

  function pressed(event, kind, at) {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    if (kind === "query") tokens.choose(at + step, undefined);
    else tokens.choose(undefined, at + step);
    const chosen = tokens.chosen()[kind === "query" ? 0 : 1];
    columns[kind].querySelector(`[data-at="${chosen}"]`)?.focus();
  }

  function connect(view, row, key) {
    const most = 1 + Math.max(view.queries.length, view.keys.length);
    drawing.setAttribute("viewBox", `0 0 100 ${most * HEIGHT}`);
    drawing.style.height = `${most * HEIGHT}px`;
    const middle = (at) => (at + 1.5) * HEIGHT; // the first line holds the headings
    const from = middle(view.queries.indexOf(row));
    const shown = (weight) => weight > 0 && weight >= tokens.threshold();
    const before = view.before ? tokens.weightBefore(row) : 0;
    const lines = shown(before) ? [line(from, HEIGHT / 2, before, "before")] : [];
    if (!view.queries.includes(row)) return drawing.replaceChildren();
    view.keys.forEach((each, at) => {
      const weight = tokens.weight(row, each);
      columns.key.querySelector(`[data-at="${each}"]`).style.setProperty("--weight", weight);
      if (shown(weight)) lines.push(line(from, middle(at), weight, each === key ? "chosen" : ""));
    });
    drawing.replaceChildren(...lines);
  }

  function line(from, to, weight, kind) {
    return svg("path", {
      d: `M0 ${from}C50 ${from} 50 ${to} 100 ${to}`,
      class: kind,
      "stroke-opacity": Math.max(0.06, Math.sqrt(weight)).toFixed(3),
      "stroke-width": (0.75 + 5 * weight).toFixed(2),
    });
  }

  return { draw };
};
