"use strict";
// Charts take the colours of the page's theme. The keyboard passes them by: tables have the figures.
regard.define("charts", (section, data, charts) => {
  const SHOWN = { front: "--good", best: "--good", other: "--aside" };
  function colour(figure) {
    const [ink, line] = [regard.colour("--aside"), regard.colour("--line")];
    const paper = regard.colour("--paper"); // not null: what was drawn before would shine through
    figure.setv({
      background_fill_color: paper, border_fill_color: paper, border_line_color: null,
      outline_line_color: line,
    });
    for (const each of [...figure.below, ...figure.left]) {
      if (each.type === "Legend") {
        each.setv({ background_fill_color: paper, label_text_color: ink });
      } else {
        each.setv({
          axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null,
          major_label_text_color: ink, axis_label_text_color: ink,
          major_label_text_font_size: "12px", axis_label_text_font_size: "12px",
          axis_label_text_font_style: "normal",
        });
      }
    }
    for (const each of figure.center) {
      if (each.type === "Grid") each.setv({ grid_line_color: line, grid_line_alpha: 0.6 });
      if (each.type === "Span") each.line_color = ink;
      if (each.type === "BoxAnnotation") each.setv({ fill_color: ink, fill_alpha: 0.08 });
    }
    for (const each of figure.renderers) {
      const number = each.name.match(/\d+/);
      const shown = regard.colour(number ? `--curve-${Number(number[0]) % 8}` : SHOWN[each.name]);
      for (const name of ["line_color", "fill_color", "text_color"]) {
        if (name in each.glyph.properties) each.glyph[name] = shown;
      }
    }
  }

  function passBy(root) {
    for (const each of root.querySelectorAll("*")) {
      if (each.tabIndex >= 0) each.tabIndex = -1;
      if (each.shadowRoot) passBy(each.shadowRoot);
    }
  }

  for (const [id, promise] of Object.entries(charts)) {
    promise.then((view) => {
      regard.onTheme(() => colour(view.model));
      const place = section.querySelector(`#${CSS.escape(id)}`);
      passBy(place);
      place.dataset.drawn = "yes";
    });
  }
});
