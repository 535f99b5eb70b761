// Any picture as a file: a drawing as SVG, pixels as PNG.

import { amountColour, css, paletteColour } from "./colour.js";
import { el, svg } from "./dom.js";

const PICTURE_RULES = ["fill", "stroke", "stroke-width", "font-family", "font-size", "font-weight", "opacity", "stroke-opacity", "stroke-dasharray", "text-anchor", "paint-order"];

function saveBlob(blob, name) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 5000);
}

/** A copy of a drawing that looks the same without this page's style sheet. */
export function copyOf(drawing) {
  const copy = drawing.cloneNode(true);
  const before = [drawing, ...drawing.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, place) => {
    const looks = getComputedStyle(before[place]);
    for (const rule of PICTURE_RULES) node.setAttribute(rule, looks.getPropertyValue(rule));
    node.removeAttribute("style");
  });
  const box = drawing.getBoundingClientRect();
  copy.setAttribute("width", Math.round(box.width));
  copy.setAttribute("height", Math.round(box.height));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return copy;
}

export function pngOfDrawing(text, width, height, name) {
  const image = new Image();
  image.addEventListener("load", () => {
    const canvas = el("canvas", { width: 2 * width, height: 2 * height });
    const context = canvas.getContext("2d");
    context.fillStyle = paletteColour("--card");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => saveBlob(blob, name));
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

/** A drawing of a heat map with its labels, its scale and a title: pixels inside, text around them. */
function drawingOfMap({ canvas, rows, columns, title, scale }) {
  const side = Math.max(2, Math.min(18, Math.floor(1600 / Math.max(columns.length, rows.length))));
  const every = Math.ceil(10 / side);
  const [left, above] = [130, 120];
  const [wide, high] = [side * columns.length, side * rows.length];
  const [width, height] = [Math.max(left + wide + 90, 420), above + high + 60];
  const large = el("canvas", { width: wide, height: high });
  const context = large.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, 0, 0, wide, high);
  const [ink, paper] = ["--ink", "--card"].map(paletteColour);
  const words = (x, y, text, more = {}) => svg("text", { x, y, fill: ink, "font-family": "monospace", "font-size": 11, ...more }, text.length > 18 ? `${text.slice(0, 17)}…` : text);
  const across = (place) => `translate(${left + place * side + side / 2 + 4},${above - 6}) rotate(-55)`;
  const steps = Array.from({ length: 32 }, (_, i) => svg("rect", { x: left + 5 * i, y: above + high + 24, width: 5.2, height: 10, fill: css(amountColour(i / 31)) }));
  const drawing = svg(
    "svg",
    { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height },
    svg("rect", { width, height, fill: paper }),
    svg("text", { x: 12, y: 24, fill: ink, "font-family": "sans-serif", "font-size": 15, "font-weight": 600 }, title),
    svg("image", { x: left, y: above, width: wide, height: high, href: large.toDataURL() }),
    rows.map((label, place) => (place % every ? null : words(left - 6, above + place * side + side / 2 + 4, label, { "text-anchor": "end" }))),
    columns.map((label, place) => (place % every ? null : words(0, 0, label, { transform: across(place) }))),
    steps,
    words(left, above + high + 50, "0"),
    words(left + 153, above + high + 50, "1"),
    words(left + 172, above + high + 33, scale),
  );
  return [new XMLSerializer().serializeToString(drawing), width, height];
}

function saveRow(make, name) {
  const asSvg = () => saveBlob(new Blob([make()[0]], { type: "image/svg+xml" }), `${name}.svg`);
  const asPng = () => pngOfDrawing(...make(), `${name}.png`);
  return el("p", { class: "save" }, el("span", { class: "soft" }, "Save"), el("button", { type: "button", onclick: asSvg, "aria-label": `Save ${name} as SVG` }, "SVG"), el("button", { type: "button", onclick: asPng, "aria-label": `Save ${name} as PNG` }, "PNG"));
}

/** Buttons that save a heat map with its labels, as SVG or as PNG; `getMap()` gives {canvas, rows, columns, title, scale}. */
export function saveMapButtons(getMap, name) {
  return saveRow(() => drawingOfMap(getMap()), name);
}

/** Buttons that save what `getNode()` gives, an svg element, as SVG or as PNG. */
export function saveButtons(getNode, name) {
  const drawing = () => {
    const node = getNode();
    const box = node.getBoundingClientRect();
    return [new XMLSerializer().serializeToString(copyOf(node)), Math.round(box.width), Math.round(box.height)];
  };
  return saveRow(drawing, name);
}
