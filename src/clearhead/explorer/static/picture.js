// Any picture as a file: a drawing as SVG, pixels as PNG.

import { el } from "./dom.js";

const PICTURE_RULES = ["fill", "stroke", "stroke-width", "font-family", "font-size", "font-weight", "opacity", "text-anchor"];

function saveBlob(blob, name) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 5000);
}

/** A drawing that looks the same without this page's style sheet. */
function standalone(drawing) {
  const copy = drawing.cloneNode(true);
  const before = [drawing, ...drawing.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, place) => {
    const looks = getComputedStyle(before[place]);
    for (const rule of PICTURE_RULES) node.setAttribute(rule, looks.getPropertyValue(rule));
  });
  const box = drawing.getBoundingClientRect();
  copy.setAttribute("width", Math.round(box.width));
  copy.setAttribute("height", Math.round(box.height));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

function pngOfDrawing(text, width, height, name) {
  const image = new Image();
  image.addEventListener("load", () => {
    const canvas = el("canvas", { width: 2 * width, height: 2 * height });
    const context = canvas.getContext("2d");
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--card");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => saveBlob(blob, name));
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

/** Buttons that save what `getNode()` gives, an svg element, as SVG or as PNG. */
export function saveButtons(getNode, name) {
  const drawing = () => {
    const node = getNode();
    const box = node.getBoundingClientRect();
    return [standalone(node), Math.round(box.width), Math.round(box.height)];
  };
  const asSvg = () => saveBlob(new Blob([drawing()[0]], { type: "image/svg+xml" }), `${name}.svg`);
  const asPng = () => pngOfDrawing(...drawing(), `${name}.png`);
  return el("p", { class: "save" }, el("button", { type: "button", onclick: asSvg, "aria-label": `Save ${name} as SVG` }, "SVG"), el("button", { type: "button", onclick: asPng, "aria-label": `Save ${name} as PNG` }, "PNG"));
}
