"use strict";
// A grid of cells on a canvas, with names at its sides, and a cursor that the pointer and the arrow
// keys move. Rows and columns are counted from the first of all, also where only some are in view.
//
// grid.room           -> CSS pixels for names, if not 76
// grid.view()            -> { row, rows, column, columns }: the first in view, and how many are
// grid.shade(row, column) -> a place in the colours, or -1 for a cell that is left empty
// grid.colours()         -> [[red, green, blue], ...]
// grid.rowName(row), grid.columnName(column) -> text
// grid.cursor()          -> [row, column]
// grid.moved(row, column): the cursor is to go there; the numbers may lie outside of the grid
regard.cells = (canvas, grid) => {
  const FONT = 11; // CSS pixels, as the sizes below
  const NAMES = grid.room ?? 76; // for the names at the side and above
  const STRIDES = [1, 2, 5, 10, 20, 50, 100, 200]; // every how many cells have their name shown
  const LARGEST = 34; // the largest cell
  const pixels = document.createElement("canvas"); // one pixel a cell
  let ink; // the colours of text and lines, by their names in page.css

  // Where things are, in CSS pixels: `left` and `top` of the cells, and the size of a cell.
  function places() {
    const view = grid.view();
    const width = canvas.parentElement.clientWidth;
    const size = Math.max(1, Math.min(LARGEST, (width - NAMES - 1) / view.columns));
    return { ...view, size, left: NAMES, top: NAMES, width, height: NAMES + size * view.rows + 1 };
  }

  function draw() {
    const at = places();
    const names = ["--ink", "--aside", "--paper", "--cursor"];
    ink = Object.fromEntries(names.map((name) => [name, regard.colour(name)]));
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(at.width * ratio);
    canvas.height = Math.round(at.height * ratio);
    canvas.style.height = `${at.height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    paint(context, at);
    if (at.size >= 8) separate(context, at);
    name(context, at);
    mark(context, at);
  }

  function paint(context, at) {
    const words = regard.words(grid.colours());
    const image = new ImageData(at.columns, at.rows);
    const cells = new Uint32Array(image.data.buffer); // red, green, blue and opacity in a word
    let place = 0;
    for (let row = at.row; row < at.row + at.rows; row += 1) {
      for (let column = at.column; column < at.column + at.columns; column += 1) {
        const shade = grid.shade(row, column);
        if (shade >= 0) cells[place] = words[shade];
        place += 1;
      }
    }
    pixels.width = at.columns;
    pixels.height = at.rows;
    pixels.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(pixels, at.left, at.top, at.columns * at.size, at.rows * at.size);
  }

  // Thin lines between cells that are large enough for them.
  function separate(context, at) {
    context.strokeStyle = ink["--paper"];
    context.beginPath();
    for (let column = 0; column <= at.columns; column += 1) {
      context.moveTo(at.left + column * at.size, at.top);
      context.lineTo(at.left + column * at.size, at.top + at.rows * at.size);
    }
    for (let row = 0; row <= at.rows; row += 1) {
      context.moveTo(at.left, at.top + row * at.size);
      context.lineTo(at.left + at.columns * at.size, at.top + row * at.size);
    }
    context.stroke();
  }

  // As many names as fit, and always those of the cursor.
  function name(context, at) {
    const every = STRIDES.find((stride) => stride * at.size >= FONT + 3) ?? 500;
    const [row, column] = grid.cursor();
    const near = (one, other) => one !== other && Math.abs(one - other) < every;
    for (let i = at.row; i < at.row + at.rows; i += 1) {
      if (i === row || (i % every === 0 && !near(i, row))) {
        write(context, at, grid.rowName(i), i === row, 0, at.top + (i - at.row + 0.5) * at.size);
      }
    }
    for (let j = at.column; j < at.column + at.columns; j += 1) {
      if (j === column || (j % every === 0 && !near(j, column))) {
        const x = at.left + (j - at.column + 0.5) * at.size;
        write(context, at, grid.columnName(j), j === column, x, 0);
      }
    }
  }

  // A name beside its row if x is 0, else upright above its column.
  function write(context, at, text, chosen, x, y) {
    context.save();
    context.font = `${chosen ? 700 : 400} ${FONT}px system-ui, sans-serif`;
    context.fillStyle = ink[chosen ? "--ink" : "--aside"];
    context.textBaseline = "middle";
    context.textAlign = x === 0 ? "right" : "left";
    context.translate(x || at.left - 5, y || at.top - 5);
    if (x !== 0) context.rotate(-Math.PI / 2);
    context.fillText(fitting(context, text), 0, 0);
    context.restore();
  }

  function fitting(context, text) {
    const room = NAMES - 8;
    if (context.measureText(text).width <= room) return text;
    const letters = [...text];
    while (letters.length && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
    return `${letters.join("")}…`;
  }

  // The cursor: a frame around its cell, and thin lines to the names.
  function mark(context, at) {
    const [row, column] = grid.cursor();
    const x = at.left + (column - at.column) * at.size;
    const y = at.top + (row - at.row) * at.size;
    const size = Math.max(at.size, 5);
    const shift = (size - at.size) / 2;
    context.strokeStyle = ink["--cursor"];
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(at.left - 3, y + at.size / 2);
    context.lineTo(x, y + at.size / 2);
    context.moveTo(x + at.size / 2, at.top - 3);
    context.lineTo(x + at.size / 2, y);
    context.stroke();
    context.lineWidth = 2;
    context.strokeRect(x - shift, y - shift, size, size);
  }

  const STEPS = {
    ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
    PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -Infinity], End: [0, Infinity],
  };

  function pressed(event) {
    const step = STEPS[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [row, column] = grid.cursor();
    grid.moved(row + step[0], column + step[1]);
  }

  function pointed(event) {
    const at = places();
    const frame = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - frame.top - at.top) / at.size);
    const column = Math.floor((event.clientX - frame.left - at.left) / at.size);
    if (row < 0 || column < 0 || row >= at.rows || column >= at.columns) return;
    grid.moved(at.row + row, at.column + column);
  }

  canvas.addEventListener("keydown", pressed);
  canvas.addEventListener("pointermove", pointed);
  canvas.addEventListener("pointerdown", pointed);
  new ResizeObserver(draw).observe(canvas.parentElement);
  return { draw };
};

// Colours from the weakest to the strongest, between those of --shade-0 ... --shade-4.
regard.shades = (number) => {
  const stops = [0, 1, 2, 3, 4].map((at) => {
    return regard.colour(`--shade-${at}`).match(/[\d.]+/g).slice(0, 3).map(Number);
  });
  return Array.from({ length: number }, (_, at) => {
    const place = (at / Math.max(number - 1, 1)) * (stops.length - 1);
    const below = Math.min(Math.floor(place), stops.length - 2);
    const mix = (one, other) => Math.round(one + (other - one) * (place - below));
    return stops[below].map((value, i) => mix(value, stops[below + 1][i]));
  });
};

// Opaque colours as words of an image, whose bytes are red, green, blue and opacity.
regard.words = (colours) => {
  const bytes = Uint8Array.from(colours.flatMap((colour) => [...colour, 255]));
  return new Uint32Array(bytes.buffer);
};

// Bytes that Python compressed with zlib and wrote as base64.
regard.unpacked = async (text) => {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};
