// What a model reads that is no text: the pixels of an image with the grid of its patches, or a sound as a spectrogram; and how much each part counts.

import { el } from "./dom.js";
import { paint } from "./heatmap.js";
import { unpack } from "./source.js";

const IMAGE_SIDE = 336; // pixels of the larger side on the page
const IMAGE_HEAT = "255,122,0";
const IMAGE_SIGNED = ["205,60,60", "45,125,210"]; // against the answer, and for it, as everywhere on the page
const SOUND_SIZE = [720, 160]; // pixels of a spectrogram on the page
const SOUND_LEAST = 0.05; // share of the window that is shown at least

/** Whether a run read an image and nothing else: a prompt with an image has token ids too. */
export const readsImage = (run) => Boolean(run.picture) && !run.tokens.ids.length;

/** Where each label stands on the grid of patches: {rows, columns, places}, with null for what is no patch. */
export function patchGrid(labels) {
  const places = labels.map((label) => (/^\d+,\d+$/.test(label) ? label.split(",").map(Number) : null));
  const there = places.filter(Boolean);
  return { rows: 1 + Math.max(0, ...there.map(([row]) => row)), columns: 1 + Math.max(0, ...there.map(([, column]) => column)), places };
}

/** The pixels [channels, height, width], a pixel each, on a canvas that nobody sees. */
function imagePixels(picture) {
  const { shape, values } = unpack(picture);
  const [channels, height, width] = shape;
  const canvas = el("canvas", { width, height });
  const context = canvas.getContext("2d");
  const made = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    for (let channel = 0; channel < 3; channel++) made.data[4 * i + channel] = 255 * values[Math.min(channel, channels - 1) * width * height + i];
    made.data[4 * i + 3] = 255;
  }
  context.putImageData(made, 0, 0);
  return canvas;
}

/**
 * The image with the grid of its patches. `weights` by label, or null, are laid over it: the more, the warmer; `signed` ones in red and blue. `chosen` is outlined.
 * Returns {canvas, draw(weights, chosen, signed), at(event)}; `at` is the label's place under a pointer, or -1.
 */
export function patchImage(picture, labels, name) {
  const grid = patchGrid(labels);
  const pixels = imagePixels(picture);
  const scale = Math.max(1, Math.round(IMAGE_SIDE / Math.max(pixels.width, pixels.height)));
  const canvas = el("canvas", { class: "patches", role: "img", "aria-label": name, width: pixels.width * scale, height: pixels.height * scale });
  const [wide, high] = [canvas.width / grid.columns, canvas.height / grid.rows];

  function draw(weights, chosen, signed) {
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(pixels, 0, 0, canvas.width, canvas.height);
    const most = weights ? weights.reduce((best, weight, place) => (grid.places[place] ? Math.max(best, Math.abs(weight)) : best), 1e-9) : 1;
    grid.places.forEach((place, i) => {
      if (!place) return;
      const box = [place[1] * wide, place[0] * high, wide, high];
      if (weights) {
        context.fillStyle = `rgba(${signed ? IMAGE_SIGNED[Number(weights[i] >= 0)] : IMAGE_HEAT},${(0.85 * Math.abs(weights[i])) / most})`;
        context.fillRect(...box);
      }
      context.strokeStyle = "rgba(128,140,155,0.7)";
      context.lineWidth = 1;
      context.strokeRect(...box);
    });
    const place = chosen >= 0 ? grid.places[chosen] : null;
    if (place) {
      context.strokeStyle = "#e0303a";
      context.lineWidth = 4;
      context.strokeRect(place[1] * wide + 2, place[0] * high + 2, wide - 4, high - 4);
    }
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * grid.columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * grid.rows);
    return grid.places.findIndex((place) => place && place[0] === row && place[1] === column);
  }

  draw(null, -1);
  return { canvas, draw, at };
}

/** The share of a window after which nothing is heard: all bands are as quiet as they get. */
function soundEnd({ shape, values }) {
  const [bands, frames] = shape;
  const quiet = values.reduce((least, value) => Math.min(least, value), Infinity) + 0.02;
  const loud = (frame) => Array.from({ length: bands }, (_, band) => values[band * frames + frame]).some((value) => value > quiet);
  let last = frames - 1;
  while (last > 0 && !loud(last)) last--;
  return Math.min(1, Math.max(SOUND_LEAST, (1.05 * (last + 1)) / frames));
}

/**
 * A sound as a spectrogram [bands, frames]: time goes right, pitch goes up, and silence at the end is left out. `weights` of `count` equal parts of
 * the window are laid over it: the more, the warmer. Returns what `patchImage` returns; a part is not chosen by pointing.
 */
export function soundImage(sound, count, name) {
  const heard = unpack(sound);
  const [bands, frames] = heard.shape;
  const pixels = el("canvas", {});
  const end = soundEnd(heard);
  const [width, height] = SOUND_SIZE;
  const canvas = el("canvas", { class: "spectrogram", role: "img", "aria-label": name, width, height, "data-end": end });

  function draw(weights) {
    paint(pixels, heard.values, bands, frames);
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(pixels, 0, 0, frames * end, bands, 0, 0, width, height);
    canvas.dataset.most = "";
    if (!weights) return;
    const most = weights.reduce((best, weight) => Math.max(best, weight), 1e-9);
    const wide = width / (count * end);
    weights.forEach((weight, part) => {
      context.fillStyle = `rgba(${IMAGE_HEAT},${(0.85 * weight) / most})`;
      context.fillRect(part * wide, 0, Math.max(wide, 1), height);
    });
    canvas.dataset.most = String(weights.indexOf(most)); // for who cannot see it: the part that is looked at most
  }

  draw(null);
  return { canvas, draw, at: () => -1 };
}
