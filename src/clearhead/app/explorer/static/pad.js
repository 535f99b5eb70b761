// A pad to draw on, for models of small pictures: with the pointer, or with the arrow keys and the space bar.

import { el } from "./dom.js";

const PAD_SIDE = 224; // pixels on the page
const PAD_PEN = 0.09; // of the side

/** A pad; `send(address)` gets the drawing as a data address. */
export function drawingPad(send) {
  const canvas = el("canvas", { class: "pad", width: PAD_SIDE, height: PAD_SIDE, tabindex: "0", role: "img", "aria-label": "A pad to draw a digit on: drag, or move the pen with the arrow keys and hold it down with the space bar" });
  const context = canvas.getContext("2d");
  let pen = null; // where it is; null: not down
  let place = [PAD_SIDE / 2, PAD_SIDE / 2];
  let down = false;

  function clear() {
    context.fillStyle = "#000";
    context.fillRect(0, 0, PAD_SIDE, PAD_SIDE);
  }

  function line(to) {
    context.strokeStyle = "#fff";
    context.lineCap = context.lineJoin = "round";
    context.lineWidth = PAD_PEN * PAD_SIDE;
    context.beginPath();
    context.moveTo(...(pen || to));
    context.lineTo(...to);
    context.stroke();
    pen = to;
  }

  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * PAD_SIDE, ((event.clientY - box.top) / box.height) * PAD_SIDE];
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); pen = null; line(at(event)); });
  canvas.addEventListener("pointermove", (event) => { if (pen) line(at(event)); });
  canvas.addEventListener("pointerup", () => { if (pen) { pen = null; send(canvas.toDataURL("image/png")); } });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [0, -8], ArrowDown: [0, 8], ArrowLeft: [-8, 0], ArrowRight: [8, 0] }[event.key];
    if (event.key === " ") {
      down = !down;
      pen = null;
      if (down) line(place);
      else send(canvas.toDataURL("image/png"));
    } else if (step) {
      place = place.map((value, axis) => Math.min(Math.max(value + step[axis], 0), PAD_SIDE));
      if (down) line(place);
    } else return;
    event.preventDefault();
  });
  clear();
  return el("div", { id: "input-pad" }, canvas, el("div", {}, el("button", { type: "button", onclick: clear }, "Clear"), el("p", { class: "soft" }, "By keys: arrows move the pen, space puts it down and lifts it.")));
}
