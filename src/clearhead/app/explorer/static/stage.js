// The stage of Play: a canvas, and what its scenes are drawn with.

import { amountColour, css, inkOn, paletteColour, signedColour } from "./colour.js";

const PLAY_NARROW = 560; // pixels of a stage on a phone

export class PlayStage {
  constructor(canvas) {
    [this.canvas, this.context] = [canvas, canvas.getContext("2d")];
    this.fit();
  }

  /** Take the room that there is, and the colours of the theme. */
  fit() {
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    this.width = this.canvas.clientWidth || 640;
    this.height = this.canvas.clientHeight || 400;
    this.narrow = this.width < PLAY_NARROW;
    Object.assign(this.canvas, { width: scale * this.width, height: scale * this.height });
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.looks = Object.fromEntries(["ink", "soft", "card", "paper", "line", "accent", "accent-ink", "accent-soft", "wrong", "mono", "sans"].map((name) => [name, paletteColour(`--${name}`)]));
    this.floor = this.height - 34; // where tokens stand
  }

  clear() {
    this.context.clearRect(0, 0, this.width, this.height);
  }

  text(words, x, y, { colour = this.looks.ink, size = 13, align = "center", family = "mono", alpha = 1, weight = 400, most = Infinity } = {}) {
    if (alpha < 0.02) return;
    const context = this.context;
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    context.font = `${weight} ${size}px ${this.looks[family]}`;
    context.textAlign = align;
    context.textBaseline = "middle";
    const count = Math.floor(most / (size * 0.61));
    context.fillText(words.length > count ? `${words.slice(0, Math.max(count - 1, 1))}…` : words, x, y);
    context.globalAlpha = 1;
  }

  box(x, y, width, height, fill, { stroke = null, radius = 5, alpha = 1, line = 1 } = {}) {
    if (alpha < 0.02 || width <= 0 || height <= 0) return;
    const context = this.context;
    context.globalAlpha = alpha;
    context.beginPath();
    context.roundRect(x, y, width, height, Math.min(radius, width / 2, height / 2));
    if (fill) { context.fillStyle = fill; context.fill(); }
    if (stroke) { context.strokeStyle = stroke; context.lineWidth = line; context.stroke(); }
    context.globalAlpha = 1;
  }

  /** A token: its label on a plate as wide as there is room; `share` between 0 and 1 tints it. */
  chip(label, x, y, room, { here = false, share = null, alpha = 1 } = {}) {
    const width = Math.min(room - 6, Math.max(26, 8.2 * label.length + 14));
    const colour = share === null ? null : amountColour(share);
    this.box(x - width / 2, y - 13, width, 26, colour ? css(colour) : this.looks.paper, { stroke: here ? this.looks.accent : this.looks.line, line: here ? 2 : 1, alpha });
    this.text(label, x, y + 0.5, { alpha, colour: colour ? inkOn(colour) : this.looks.ink, most: width - 6, weight: here ? 700 : 400 });
  }

  /** A vector as a column of cells that grows upward from `bottom`: blue above zero, red below; `count` of them are there. */
  vector(values, x, bottom, most, { cell = 11, width = 22, count = values.length, alpha = 1 } = {}) {
    this.context.globalAlpha = alpha;
    for (let i = 0; i < Math.min(values.length, Math.ceil(count)); i++) {
      this.context.fillStyle = css(signedColour((0.9 * values[i]) / (most || 1)));
      this.context.fillRect(x - width / 2, bottom - (i + 1) * cell, width, cell - 1);
    }
    this.context.globalAlpha = 1;
  }

  line(x1, y1, x2, y2, width, colour) {
    Object.assign(this.context, { strokeStyle: colour, lineWidth: width, lineCap: "round" });
    this.context.beginPath();
    this.context.moveTo(x1, y1);
    this.context.lineTo(x2, y2);
    this.context.stroke();
  }

  /** A curve from below to above; `upTo` is the share of it that is there. */
  curve(x1, y1, x2, y2, width, colour, alpha = 1, upTo = 1) {
    if (alpha < 0.02 || upTo <= 0) return;
    const context = this.context;
    const middle = (y1 + y2) / 2;
    context.globalAlpha = alpha;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.lineCap = "round";
    const long = Math.hypot(x2 - x1, y2 - y1) * 1.25 + 1;
    context.setLineDash(upTo < 1 ? [long * upTo, long * 2] : []);
    context.beginPath();
    context.moveTo(x1, y1);
    context.bezierCurveTo(x1, middle, x2, middle, x2, y2);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  /** Horizontal bars with a label before and a number behind each: rows are {label, share, number, alpha, here}. */
  bars(rows, { top = 24, high = Math.min(64, (this.height - 40) / rows.length), left = this.narrow ? 92 : 150, right = 86 } = {}) {
    const room = this.width - left - right;
    rows.forEach(({ label, share, number, alpha = 1, here = false, colour = this.looks.accent }, row) => {
      const y = top + high * (row + 0.5);
      this.text(label, left - 12, y, { align: "right", alpha, weight: here ? 700 : 400, most: left - 16 });
      this.box(left, y - high * 0.28, Math.max(1, room * share), high * 0.56, colour, { radius: 3, alpha: alpha * (here ? 1 : 0.75) });
      this.text(number, left + room * share + 8, y, { align: "left", alpha, colour: this.looks.soft, size: 12 });
    });
  }
}
