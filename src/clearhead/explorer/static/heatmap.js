// Heat maps: pixels on a canvas, labels as text, one cell chosen by mouse, touch or arrow keys.

import { amountTable } from "./colour.js";
import { el } from "./dom.js";

/** Pixels of a matrix [rows, columns] of numbers between low and high, one pixel a cell; the browser enlarges them without smoothing. */
export function paint(canvas, values, rows, columns, low = 0, high = 1) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const table = amountTable();
  const scale = 255 / (high - low || 1);
  for (let i = 0; i < rows * columns; i++) {
    const shade = 3 * Math.max(0, Math.min(255, Math.round((values[i] - low) * scale)));
    image.data[4 * i] = table[shade];
    image.data[4 * i + 1] = table[shade + 1];
    image.data[4 * i + 2] = table[shade + 2];
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

/** The scale beside a heat map: what the darkest and the lightest stand for. */
export function scaleBar(name, low = 0, high = 1) {
  const canvas = el("canvas", { class: "scale", "aria-hidden": "true" });
  paint(canvas, Float32Array.from({ length: 64 }, (_, i) => low + ((high - low) * i) / 63), 1, 64, low, high);
  return el("p", { class: "scale-bar soft" }, `${name}: ${low} `, canvas, ` ${high}`);
}

/**
 * A heat map with labels on both sides. `onCell(row, column)` hears of the cell under the pointer or chosen by arrow keys, (-1, -1) when none is;
 * `describe(row, column)` is what a reader without sight hears; `room` is how many pixels wide the cells may be. Returns {root, repaint, choose, canvas}.
 */
export function heatmap({ values, rows, columns, low = 0, high = 1, name, onCell = () => {}, describe, cell, room = 760 }) {
  const height = rows.length;
  const width = columns.length;
  const least = width > 256 ? 3 : width > 128 ? 4 : 6;
  const side = cell || Math.max(least, Math.min(28, Math.floor(room / Math.max(width, 1))));
  const canvas = el("canvas", { class: "heat", tabindex: "0", role: "img", "aria-label": name });
  canvas.style.width = `${side * width}px`;
  canvas.style.height = `${side * height}px`;
  canvas.style.maxWidth = "none";
  const marker = el("div", { class: "cell-mark", hidden: true });
  const heard = el("p", { class: "cell-words soft", "aria-live": "polite" }, " ");
  const every = side >= 12 ? 1 : Math.ceil(12 / side);
  const down = el("div", { class: "labels-down", "aria-hidden": "true" }, rows.map((label, i) => (i % every ? null : el("span", { style: { top: `${i * side}px`, height: `${side * every}px` } }, label))));
  const across = el("div", { class: "labels-across", "aria-hidden": "true" }, columns.map((label, i) => (i % every ? null : el("span", { style: { left: `${i * side + side / 2}px` } }, label))));
  down.style.height = `${side * height}px`;
  across.style.width = `${side * width}px`;
  const stage = el("div", { class: "heat-stage" }, canvas, marker);
  const root = el("div", { class: "heat-map wide" }, el("div", { class: "heat-grid" }, el("div"), across, down, stage), heard);
  let at = [-1, -1];

  function choose(row, column) {
    at = [row, column];
    marker.hidden = row < 0;
    if (row >= 0) {
      marker.style.transform = `translate(${column * side}px, ${row * side}px)`;
      marker.style.width = marker.style.height = `${side}px`;
      const value = values[row * width + column];
      heard.textContent = describe ? describe(row, column, value) : `${rows[row]} → ${columns[column]}: ${value.toFixed(3)}`;
    }
    onCell(row, column);
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / side);
    const row = Math.floor((event.clientY - box.top) / side);
    if (row >= 0 && row < height && column >= 0 && column < width && (row !== at[0] || column !== at[1])) choose(row, column);
  });
  canvas.addEventListener("pointerleave", () => onCell(-1, -1));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(Math.min(Math.max(at[0] + step[0], 0), height - 1), Math.min(Math.max(at[1] + step[1], 0), width - 1));
  });
  const repaint = () => paint(canvas, values, height, width, low, high);
  repaint();
  return { root, repaint, choose, canvas };
}
