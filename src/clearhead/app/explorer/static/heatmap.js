// Heat maps: pixels on a canvas, labels as text, one cell chosen by mouse, touch or arrow keys.

import { amountTable, paletteColour, signedTable } from "./colour.js";
import { el } from "./dom.js";

const HEAT_LABELS = 64; // labels of an axis that are elements

/** Pixels of a matrix [rows, columns] of numbers between low and high, one pixel a cell; the browser enlarges them without smoothing. */
export function paint(canvas, values, rows, columns, low = 0, high = 1, signed = false) {
  canvas.width = columns;
  canvas.height = rows;
  paintAt(canvas.getContext("2d"), 0, 0, values, rows, columns, low, high, signed);
}

/** The same at a place of a larger canvas. */
export function paintAt(context, left, top, values, rows, columns, low, high, signed = false) {
  const image = context.createImageData(columns, rows);
  const table = signed ? signedTable() : amountTable();
  const scale = 255 / (high - low || 1);
  for (let i = 0; i < rows * columns; i++) {
    const shade = 3 * Math.max(0, Math.min(255, Math.round((values[i] - low) * scale)));
    image.data[4 * i] = table[shade];
    image.data[4 * i + 1] = table[shade + 1];
    image.data[4 * i + 2] = table[shade + 2];
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, left, top);
}

/** The scale beside a heat map: what the darkest and the lightest stand for. */
export function scaleBar(name, low = 0, high = 1, signed = false) {
  const canvas = el("canvas", { class: "scale", "aria-hidden": "true" });
  paint(canvas, Float32Array.from({ length: 64 }, (_, i) => low + ((high - low) * i) / 63), 1, 64, low, high, signed);
  return el("p", { class: "scale-bar soft" }, `${name}: ${low} `, canvas, ` ${high}`);
}

/** The labels of a long axis as pixels: hundreds of elements beside the cells would slow every frame. */
function paintLabels(canvas, labels, side, every, across) {
  const [long, deep, most] = [side * labels.length, across ? 88 : 128, across ? 12 : 18];
  const scale = Math.min(devicePixelRatio || 1, 2);
  const [width, height] = across ? [long, deep] : [deep, long];
  Object.assign(canvas, { width: scale * width, height: scale * height });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = `11px ${paletteColour("--mono")}`;
  context.fillStyle = paletteColour("--ink");
  context.textBaseline = "middle";
  context.textAlign = across ? "left" : "right";
  labels.forEach((label, i) => {
    if (i % every) return;
    const text = label.length > most ? `${label.slice(0, most - 1)}…` : label;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    if (across) context.translate(i * side + side / 2, deep - 4);
    else context.translate(deep - 6, i * side + (side * every) / 2);
    if (across) context.rotate(-Math.PI / 2);
    context.fillText(text, 0, 0);
  });
}

/**
 * A heat map with labels on both sides. `onCell(row, column)` hears of the cell under the pointer or chosen by arrow keys, (-1, -1) when none is, `onPin(row)` of a click and Enter;
 * `painted` are the values that give the colours, where they differ;
 * `upward` puts the first row at the bottom, as layers stand everywhere; `describe(row, column)` is what a reader without sight hears; `room` is how many pixels wide the cells may be. Returns {root, repaint, choose, canvas}.
 */
export function heatmap({ values, rows, columns, low = 0, high = 1, name, onCell = () => {}, describe, cell, room = 760, painted = values, onPin = () => {}, signed = false, upward = false }) {
  const height = rows.length;
  const width = columns.length;
  const flip = (row) => (upward ? height - 1 - row : row); // between the number of a row and its place from the top
  const least = width > 256 ? 3 : width > 128 ? 4 : 6;
  const side = cell || Math.max(least, Math.min(28, Math.floor(room / Math.max(width, 1))));
  const canvas = el("canvas", { class: "heat", tabindex: "0", role: "img", "aria-label": name });
  canvas.style.width = `${side * width}px`;
  canvas.style.height = `${side * height}px`;
  canvas.style.maxWidth = "none";
  const marker = el("div", { class: "cell-mark", hidden: true });
  const heard = el("p", { class: "cell-words soft", "aria-live": "polite" }, " ");
  const every = side >= 12 ? 1 : Math.ceil(12 / side);
  const long = (label, most) => (label.length > most ? "long" : null);
  const drawn = [rows, columns].map((labels) => (labels.length > HEAT_LABELS ? el("canvas", { class: "labels-drawn", "aria-hidden": "true" }) : null));
  const down = drawn[0] || el("div", { class: "labels-down", "aria-hidden": "true" }, rows.map((label, i) => (i % every ? null : el("span", { class: long(label, 16), style: { top: `${flip(i) * side}px`, height: `${side * every}px` } }, label))));
  const across = drawn[1] || el("div", { class: "labels-across", "aria-hidden": "true" }, columns.map((label, i) => (i % every ? null : el("span", { class: long(label, 12), style: { left: `${i * side + side / 2}px` } }, label))));
  if (!drawn[0]) down.style.height = `${side * height}px`;
  if (!drawn[1]) across.style.width = `${side * width}px`;
  const stage = el("div", { class: "heat-stage" }, canvas, marker);
  const root = el("div", { class: "heat-map wide" }, el("div", { class: "heat-grid" }, el("div"), across, down, stage), heard);
  let at = [-1, -1];

  function choose(row, column) {
    at = [row, column];
    marker.hidden = row < 0;
    if (row >= 0) {
      marker.style.transform = `translate(${column * side}px, ${flip(row) * side}px)`;
      marker.style.width = marker.style.height = `${side}px`;
      const value = values[row * width + column];
      heard.textContent = describe ? describe(row, column, value) : `${rows[row]} → ${columns[column]}: ${value.toFixed(3)}`;
    }
    onCell(row, column);
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / side);
    const row = flip(Math.floor((event.clientY - box.top) / side));
    if (row >= 0 && row < height && column >= 0 && column < width && (row !== at[0] || column !== at[1])) choose(row, column);
  });
  canvas.addEventListener("pointerleave", () => onCell(-1, -1));
  canvas.addEventListener("click", () => { if (at[0] >= 0) onPin(at[0]); });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && at[0] >= 0) onPin(at[0]);
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(Math.min(Math.max(at[0] + (upward ? -step[0] : step[0]), 0), height - 1), Math.min(Math.max(at[1] + step[1], 0), width - 1));
  });
  const repaint = () => {
    paint(canvas, upward ? Float32Array.from({ length: height * width }, (_, i) => painted[flip(Math.floor(i / width)) * width + (i % width)]) : painted, height, width, low, high, signed);
    drawn.forEach((labels, axis) => labels && paintLabels(labels, axis ? columns : upward ? [...rows].reverse() : rows, side, every, Boolean(axis)));
  };
  repaint();
  return { root, repaint, choose, canvas };
}
