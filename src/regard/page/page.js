"use strict";
// What sections of a page share. A section's script calls regard.define; text becomes HTML by
// regard.element alone, which never reads it as HTML.
const regard = (() => {
  const setups = new Map();
  const themed = [];
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // The set-up of every section with this script: (section, data, charts) => {}, maybe async.
  // charts: for each chart's id a promise of Bokeh's view.
  function define(name, setup) {
    setups.set(name, setup);
  }

  // Afterwards <html> has the attribute data-ready.
  function start() {
    const running = [];
    for (const section of document.querySelectorAll("section[data-script]")) {
      const setup = setups.get(section.dataset.script);
      const script = section.querySelector('script[type="application/json"]');
      if (!setup || !script) continue;
      const { data, charts } = JSON.parse(script.textContent);
      const drawn = {};
      for (const [id, item] of Object.entries(charts)) {
        drawn[id] = Bokeh.embed.embed_item(item, id).then((views) => [...views][0]);
      }
      running.push(setup(section, data, drawn));
    }
    Promise.all(running).then(() => root.setAttribute("data-ready", ""));
    chooseTheme();
    addEventListener("beforeprint", () => {
      for (const each of document.querySelectorAll("details")) each.open = true;
    });
  }

  // An element with these attributes and children; a child that is text stays text.
  // An attribute that is a function listens: { onclick: () => ... }.
  function element(tag, attributes, ...children) {
    return filled(document.createElement(tag), attributes, children);
  }
  function svg(tag, attributes, ...children) {
    return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  }
  function filled(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (typeof value === "function") made.addEventListener(name.slice(2), value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value != null) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  // Say a sentence in an aria-live element once nothing has changed for half a second.
  const waiting = new WeakMap();
  function say(live, sentence) {
    clearTimeout(waiting.get(live));
    waiting.set(live, setTimeout(() => { live.textContent = sentence; }, 400));
  }

  // The present value of a colour of page.css, as "--ink"; canvases need it.
  function colour(name) {
    const probe = element("span", { style: `color: var(${name})`, hidden: true });
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

  // Call `draw` at once, and again whenever light becomes dark or dark light.
  function onTheme(draw) {
    themed.push(draw);
    draw();
  }

  function chooseTheme() {
    const button = document.getElementById("theme");
    const show = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      for (const draw of themed) draw();
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      show();
    });
    dark.addEventListener("change", show);
    button.textContent = isDark() ? "Light" : "Dark";
  }

  // Figures for reading: three digits and a unit, as readable.py writes them.
  const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
  function digits(value) {
    const places = value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
    const [whole, rest] = value.toFixed(places).split(".");
    const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",");
    return rest ? `${grouped}.${rest}` : grouped;
  }
  const count = (value) => digits(Math.round(value));
  function bytes(value) {
    let at = 0;
    for (; at < BYTES.length - 1 && value >= 1024; at += 1) value /= 1024;
    return `${digits(value)} ${BYTES[at]}`;
  }
  function seconds(value) {
    const [unit, name] = SECONDS.find(([least]) => value >= least) ?? SECONDS.at(-1);
    return `${digits(value / unit)} ${name}`;
  }

  return { define, start, element, svg, say, colour, onTheme, isDark, count, bytes, seconds };
})();
