"use strict";
// All heads of a model, and the map of one: see heads.py for what `data` holds.
regard.define("heads", (section, data) => {
  const page = (id) => section.querySelector(`#${id}`);
  const state = { layer: 0, head: 0, row: 0, column: 0, first: 0, count: 0, threshold: 0, found: [] };
  const LISTED = 40; // tokens in each column of the lines
  const FIRST_VIEW = 256; // tokens in view at first
  const square = data.queries.join() === data.keys.join(); // the window moves over rows, too
  const unpacked = new Map(); // layer -> a promise of the codes of its heads
  const opened = new Map(); // "layer.head" -> its codes as [queries, keys]
  let codes = new Uint8Array(data.queries.length * data.keys.length); // of the map in view
  let map, lines, overview, changed;

  // Codes of one head as a full rectangle: heads.py wrote a column after the other, and of each
  // the queries that may see the key.
  async function codesOf(layer, head) {
    const name = `${layer}.${head}`;
    if (opened.has(name)) return opened.get(name);
    if (!unpacked.has(layer)) unpacked.set(layer, regard.unpacked(data.maps[layer]));
    const all = await unpacked.get(layer);
    const stored = all.length / data.heads.length;
    const [rows, columns] = [data.queries.length, data.keys.length];
    const full = new Uint8Array(rows * columns);
    let place = head * stored;
    for (let column = 0; column < columns; column += 1) {
      for (let row = 0; row < rows; row += 1) {
        if (visible(row, column)) full[row * columns + column] = all[place++];
      }
    }
    opened.set(name, full);
    return full;
  }

  const visible = (row, column) => !data.causal || data.keys[column] <= data.queries[row];
  const weight = (row, column) => codes[row * data.keys.length + column] / data.steps;
  const clamped = (value, low, high) => Math.min(Math.max(value, low), Math.max(low, high));

  // Spaces and line ends as signs, so that every token can be read.
  function shown(token) {
    const signs = { "\n": "↵", "\r": "↵", "\t": "⇥" };
    const text = data.tokens[token].replace(/[\n\r\t]/g, (each) => signs[each]);
    return text.trim() === "" ? text.replace(/ /g, "␣") || "(nothing)" : text.trim();
  }

  function figure(row, column) {
    if (!visible(row, column)) return "hidden, as the key comes after the query";
    const value = weight(row, column);
    if (value === 0) return `less than ${(0.5 / data.steps).toFixed(3)}`;
    return value.toFixed(3);
  }

  function sentence() {
    const { row, column } = state;
    const [query, key] = [data.queries[row], data.keys[column]];
    const where = `layer ${data.layers[state.layer]}, head ${data.heads[state.head]}`;
    return `query '${shown(query)}' -> key '${shown(key)}': ${figure(row, column)} `
      + `(tokens ${query} and ${key}; ${where})`;
  }

  // The part of the map in view: a window of columns, and of rows if they are the same tokens.
  function view() {
    const [column, columns] = [state.first, state.count];
    if (!square) return { row: 0, rows: data.queries.length, column, columns };
    return { row: column, rows: columns, column, columns };
  }

  // The tokens beside the lines: those in view, or the last of them before the query.
  function listed() {
    const { row, rows, column, columns } = view();
    const until = data.keys.findLastIndex((key) => key <= data.queries[state.row]) + 1;
    const start = clamped(until - LISTED, column, column + columns - LISTED);
    const keys = range(start, Math.min(start + LISTED, column + columns));
    const from = square ? start : clamped(state.row - LISTED / 2, row, row + rows - LISTED);
    return { queries: range(from, Math.min(from + LISTED, row + rows)), keys, before: start };
  }

  const range = (from, to) => Array.from({ length: to - from }, (_, at) => from + at);

  // Go to a cell: the window follows, and all that shows the cell is drawn again.
  function choose(row = state.row, column = state.column) {
    const before = state.row;
    state.row = clamped(row, 0, data.queries.length - 1);
    state.column = clamped(column, 0, data.keys.length - 1);
    follow(square && state.row !== before ? state.row : state.column);
    keepCursor();
  }

  // The chosen key, or the last that the query may see.
  function seen(row) {
    if (visible(clamped(row, 0, data.queries.length - 1), state.column)) return state.column;
    return data.keys.findLastIndex((key) => key <= data.queries[row]);
  }

  function follow(column) {
    state.first = clamped(state.first, column - state.count + 1, column);
  }

  // After the window has moved, the cursor is in it.
  function keepCursor() {
    state.first = clamped(state.first, 0, data.keys.length - state.count);
    const { row, rows, column, columns } = view();
    state.row = clamped(state.row, row, row + rows - 1);
    state.column = clamped(state.column, column, column + columns - 1);
    refresh();
  }

  function refresh() {
    cancelAnimationFrame(changed); // several changes of one moment are drawn once
    changed = requestAnimationFrame(draw);
  }

  function draw() {
    controls();
    map.draw();
    lines.draw();
    overview.repaintPair();
    page("map-sentence").textContent = sentence();
    regard.say(page("map-spoken"), sentence());
  }

  function controls() {
    const last = data.keys.length;
    const [first, count] = [page("heads-first"), page("heads-count")];
    count.max = Math.min(last, 1024);
    count.value = state.count;
    first.max = last - state.count;
    first.value = state.first;
    page("heads-first-out").textContent = data.keys[state.first];
    page("heads-count-out").textContent = state.count;
    page("heads-threshold-out").textContent = state.threshold.toFixed(2);
    page("heads-layer").value = state.layer;
    page("heads-head").value = state.head;
    page("heads-title").textContent =
      `Layer ${data.layers[state.layer]}, head ${data.heads[state.head]}`;
    page("heads-map").setAttribute("aria-label",
      `Map of ${page("heads-title").textContent}: arrow keys move from cell to cell`);
  }

  async function open(layer, head) {
    Object.assign(state, { layer, head });
    const found = await codesOf(layer, head);
    if (state.layer !== layer || state.head !== head) return; // another was opened meanwhile
    codes = found;
    overview.mark();
    draw();
  }

  // Matches may begin in one token and end in another.
  function find(text) {
    const starts = [];
    let length = 0;
    for (const token of data.tokens) {
      starts.push(length);
      length += token.length;
    }
    const whole = data.tokens.join("").toLowerCase();
    const found = new Set();
    const wanted = text.toLowerCase();
    for (let at = whole.indexOf(wanted); wanted && at >= 0; at = whole.indexOf(wanted, at + 1)) {
      found.add(starts.findLastIndex((start) => start <= at));
    }
    const known = new Set([...data.queries, ...data.keys]);
    state.found = [...found].filter((token) => known.has(token));
  }

  function goToFound(step) {
    const number = state.found.length;
    if (number === 0) return;
    const here = data.queries[state.row];
    const next = step === 0 ? state.found[0] : state.found.find((at) => at > here) ?? state.found[0];
    const nearest = (list) => Math.max(0, list.findLastIndex((at) => at <= next));
    state.first = nearest(data.keys) - Math.floor(state.count / 2);
    choose(nearest(data.queries), nearest(data.keys));
  }

  function searched(step) {
    const box = page("heads-find");
    find(box.value);
    goToFound(step);
    const at = state.found.indexOf(data.queries[state.row]) + 1;
    page("heads-found").textContent = !box.value ? "" : state.found.length
      ? `${at || 1} of ${state.found.length}` : "not in the text";
  }

  function listen() {
    const options = (id, numbers) => page(id).append(...numbers.map((number, at) =>
      regard.element("option", { value: at }, String(number))));
    options("heads-layer", data.layers);
    options("heads-head", data.heads);
    page("heads-layer").onchange = (event) => open(Number(event.target.value), state.head);
    page("heads-head").onchange = (event) => open(state.layer, Number(event.target.value));
    page("heads-first").oninput = (event) => { state.first = Number(event.target.value); keepCursor(); };
    page("heads-count").oninput = (event) => {
      state.count = Number(event.target.value);
      follow(square ? state.row : state.column);
      keepCursor();
    };
    page("heads-threshold").oninput = (event) => {
      state.threshold = Number(event.target.value);
      refresh();
    };
    page("heads-find").oninput = () => searched(0);
    page("heads-find").onkeydown = (event) => { if (event.key === "Enter") searched(1); };
  }

  function showMap() {
    state.count = Math.min(data.keys.length, FIRST_VIEW);
    state.row = data.queries.length - 1;
    state.column = data.keys.length - 1;
    follow(state.column);
    let colours;
    map = regard.cells(page("heads-map"), {
      view,
      shade: (row, column) => shade(row, column),
      colours: () => colours,
      rowName: (row) => shown(data.queries[row]),
      columnName: (column) => shown(data.keys[column]),
      cursor: () => [state.row, state.column],
      moved: choose,
    });
    lines = regard.tokenLines(page("heads-lines"), {
      view: listed,
      queryName: (row) => shown(data.queries[row]),
      keyName: (column) => shown(data.keys[column]),
      weight,
      weightBefore: (row) => range(0, listed().keys[0]).reduce((sum, at) => sum + weight(row, at), 0),
      chosen: () => [state.row, state.column],
      threshold: () => state.threshold,
      choose: (row, column) => choose(row, column ?? seen(row)),
    });
    listen();
    regard.onTheme(() => { colours = regard.shades(256); refresh(); });
    open(...(data.pairs.length ? stored(...data.pairs[0]) : [0, 0]));
  }

  function shade(row, column) {
    if (!visible(row, column)) return -1;
    const value = weight(row, column);
    return value < state.threshold ? 0 : Math.round(255 * Math.sqrt(value));
  }

  const stored = (layer, head) => [data.layers.indexOf(layer), data.heads.indexOf(head)];
  const named = (layer, head) =>
    !data.pairs.length || data.pairs.some(([at, of]) => at === layer && of === head);
  const canOpen = (layer, head) =>
    data.maps.length > 0 && Math.min(...stored(layer, head)) >= 0 && named(layer, head);

  async function pair(layer, head) {
    if (!canOpen(layer, head)) return null;
    const [at, of] = stored(layer, head);
    const found = await codesOf(at, of);
    return found[state.row * data.keys.length + state.column] / data.steps;
  }

  overview = regard.overview(page, {
    data,
    canOpen,
    open: (layer, head) => {
      if (!canOpen(layer, head)) return;
      open(...stored(layer, head)).then(() => page("heads-map").focus());
    },
    chosen: () => 
      data.maps.length ? [data.layers[state.layer], data.heads[state.head]] : [],
    pair,
    say: (text) => {
      page("heads-sentence").textContent = text;
      regard.say(page("heads-spoken"), text);
    },
  });
  if (data.maps.length) showMap();
  else for (const each of section.querySelectorAll(".one")) each.remove();
});
