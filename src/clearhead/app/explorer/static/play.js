// Play: the forward pass as a walk in scenes, drawn with the numbers of this model and this text; tokens at the bottom, the answer at the top.
// A scene is one row of PLAY_SCENES: the step whose formula and shape stand next to it, the paths of its numbers, a sentence, and how it is drawn.

import { css, signedColour } from "./colour.js";
import { el, figure, percent, replace, roving, signed } from "./dom.js";
import { glossed } from "./glossary.js";
import { paintAt } from "./heatmap.js";
import { patchGrid, patchImage, readsImage } from "./image.js";
import { distributionOf, plainOf } from "./sampling.js";
import { askedOf, columnOf, leadingHead } from "./selection.js";
import { LensTables, unpack } from "./source.js";
import { PlayStage } from "./stage.js";

const PLAY_SECONDS = 5; // of one scene
const PLAY_MOVES = 0.75; // share of a scene in which something moves; then it stands still to be read
const PLAY_NUMBERS = 14; // numbers of a vector that are drawn
const PLAY_ROWS = 8; // choices in a list

// Time: shares of a scene, between 0 and 1 ------------------------------------------------------------------

const playEase = (t) => { const x = Math.min(Math.max(t, 0), 1); return x * x * (3 - 2 * x); };
const playPhase = (t, from, to) => playEase((t - from) / (to - from));
/** How far the one numbered `i` of `count` is, where one begins after the other. */
const playTurn = (t, i, count, together = 4) => playEase((t * (count + together) - i) / together);
const playBetween = (from, to, t) => from + (to - from) * t;

// The data of a run, asked for scene by scene ---------------------------------------------------------------

class PlayData {
  constructor(app, run, changed) {
    [this.app, this.run, this.model, this.changed, this.asked] = [app, run, app.store.get("model"), changed, askedOf(app, run)];
    this.bodies = new Map();
    this.errors = new Map(); // by path: why it cannot be had
    this.position = app.store.get("position");
    this.column = columnOf(run, this.position);
    this.read = run.source || run.tokens;
    this.image = readsImage(run) ? patchImage(run.picture, run.tokens.labels, "") : null;
    const kinds = this.model.attentions.filter((entry) => entry.pattern !== false);
    this.kinds = ["encoder", "self", "cross"].filter((kind) => kinds.some((entry) => entry.kind === kind) && !(kind === "self" && run.source));
    this.steps = [];
  }

  /** The head of one kind of attention whose numbers are shown: the one that the path names, or the first that is there. */
  head(kind) {
    const leads = leadingHead(this.app);
    const own = (name) => (/^[a-z]/.test(name) ? name.split(".")[0] : "self");
    const reader = kind === "encoder" ? this.read.labels.length - 1 : this.position;
    const first = `${kind === "self" ? "" : `${kind}.`}${this.model.attentions.find((entry) => entry.kind === kind && entry.pattern !== false).layer}.0`;
    const wanted = `${leads && own(leads) === kind ? leads : first}/${reader}`;
    if (this.app.source.has(`run/${this.run.run}/stops/${wanted}`)) return wanted;
    return this.app.source.list(`run/${this.run.run}/stops/`).find((path) => own(path) === kind) || wanted;
  }

  /** The body of a path where it is there; it is asked for once, and null until it comes or where it cannot be had. */
  got(path) {
    if (!this.bodies.has(path)) {
      this.bodies.set(path, null);
      this.app.source.get(`run/${this.run.run}/${path}`).then((body) => { this.bodies.set(path, body); this.changed(); }, (error) => { this.errors.set(path, error.message); this.changed(); });
    }
    return this.bodies.get(path);
  }

  /** The first step of the pass whose name has one of these endings. */
  step(endings) {
    for (const ending of endings) {
      const found = this.steps.find((step) => step.name === ending || step.name.endsWith(`.${ending}`));
      if (found) return found;
    }
    return null;
  }

  /** The numbers of a step as rows: {rows, columns, at(row): values}; null until they are there. */
  numbers(step) {
    const body = step && this.got(`step/${step.name}`);
    if (!body) return null;
    body.unpacked ||= unpack(body.values);
    const { shape, values } = body.unpacked;
    const [rows, columns] = shape.length > 1 ? shape : [1, shape[0]];
    return { rows, columns, most: values.reduce((best, value) => Math.max(best, Math.abs(value)), 1e-9), at: (row) => values.subarray(Math.min(row, rows - 1) * columns, (Math.min(row, rows - 1) + 1) * columns) };
  }

  /** Which tokens are on the stage: all, or the last one and those that `weights` prefers, in the order of the text. */
  tokens(labels, stage, weights = null, always = labels.length - 1) {
    const fit = Math.max(4, Math.floor((stage.width - 40) / (stage.narrow ? 52 : 66)));
    const all = labels.map((_, place) => place);
    const wanted = labels.length <= fit ? all : weights ? [always, ...all.filter((place) => place !== always).sort((a, b) => weights[b] - weights[a])].slice(0, fit).sort((a, b) => a - b) : all.slice(0, fit);
    const room = (stage.width - 40) / wanted.length;
    return wanted.map((place, number) => ({ place, label: labels[place], x: 20 + room * (number + 0.5), room }));
  }
}

// How scenes are drawn: (stage, data, t), with t from 0 to 1 ------------------------------------------------

function playTokens(stage, data, t) {
  if (data.image) return playPatches(stage, data, t);
  const shown = data.tokens(data.read.labels, stage);
  const words = Array.from(data.read.text || data.read.labels.join("")).slice(0, stage.narrow ? 40 : 96).join("");
  stage.text(words, stage.width / 2, 40, { size: stage.narrow ? 12 : 15, most: stage.width - 20 });
  shown.forEach(({ place, label, x, room }, number) => {
    const here = playTurn(t, number, shown.length);
    const y = playBetween(64, stage.height * 0.55, here);
    stage.chip(label, x, y, room, { alpha: here });
    if (data.read.ids.length) stage.text(String(data.read.ids[place]), x, y + 30, { colour: stage.looks.soft, alpha: playPhase(here, 0.6, 1), size: 12 });
  });
  if (shown.length < data.read.labels.length) stage.text(`… and ${data.read.labels.length - shown.length} more`, stage.width / 2, stage.height * 0.55 + 64, { family: "sans", colour: stage.looks.soft, alpha: playPhase(t, 0.8, 1) });
  return null;
}

function playPatches(stage, data, t) {
  const { canvas } = data.image;
  const grid = patchGrid(data.run.tokens.labels);
  const gap = 10 * playPhase(t, 0.15, 0.7);
  const side = Math.min(stage.width - 60 - 10 * grid.columns, stage.height - 60 - 10 * grid.rows);
  const [wide, high] = [side / grid.columns, side / grid.rows];
  const [left, top] = [(stage.width - side - gap * (grid.columns - 1)) / 2, 24];
  stage.context.imageSmoothingEnabled = false;
  for (let row = 0; row < grid.rows; row++) for (let column = 0; column < grid.columns; column++) stage.context.drawImage(canvas, (column * canvas.width) / grid.columns, (row * canvas.height) / grid.rows, canvas.width / grid.columns, canvas.height / grid.rows, left + column * (wide + gap), top + row * (high + gap), wide, high);
  stage.text(`${grid.rows} × ${grid.columns} patches, read row by row`, stage.width / 2, stage.height - 18, { family: "sans", colour: stage.looks.soft, alpha: playPhase(t, 0.6, 0.9) });
  return null;
}

/** Each token with its vector above it; `before` are the vectors that it has had, which give way. */
function playVectors(stage, data, t, step, before = null, added = null) {
  const labels = data.read.labels;
  const shown = data.tokens(labels, stage);
  const [now, old, more] = [step, before, added].map((one) => data.numbers(one));
  const cell = Math.min(15, (stage.floor - 70) / PLAY_NUMBERS);
  shown.forEach(({ place, label, x, room }, number) => {
    stage.chip(label, x, stage.floor, room);
    if (!now || place >= now.rows) return;
    const width = Math.min(30, room * 0.42);
    const bottom = stage.floor - 22;
    const most = now.most * 0.6;
    if (!old || !more) return stage.vector(now.at(place).subarray(0, PLAY_NUMBERS), x, bottom, most, { cell, width, count: PLAY_NUMBERS * playTurn(t, number, shown.length) });
    const joined = playPhase(t, 0.45, 0.85);
    if (joined < 1) {
      stage.vector(old.at(place).subarray(0, PLAY_NUMBERS), x - (width / 2 + 1) * (1 - joined), bottom, most, { cell, width: width * 0.9, alpha: 1 - joined * 0.5 });
      stage.vector(more.at(place).subarray(0, PLAY_NUMBERS), x + playBetween(room, (width / 2 + 1) * (1 - joined), playPhase(t, 0, 0.4)), bottom, most, { cell, width: width * 0.9, alpha: playPhase(t, 0, 0.4) * (1 - joined * 0.5) });
    }
    stage.vector(now.at(place).subarray(0, PLAY_NUMBERS), x, bottom, most, { cell, width, alpha: joined });
    return null;
  });
  const first = now?.at(shown[0].place);
  if (first) stage.text(`“${shown[0].label}” begins ${Array.from(first.subarray(0, stage.narrow ? 2 : 4), (value) => figure(value)).join(", ")} …`, 20, 20, { align: "left", size: 12, colour: stage.looks.soft, alpha: playPhase(t, 0.7, 1), most: stage.width - 40 });
}

/** Positions: a second vector that is added, an angle by which queries and keys turn, or a penalty on distance. */
function playPositions(stage, data, t) {
  const placed = data.step(["embedding.placed"]);
  if (placed) return playVectors(stage, data, t, placed, data.step(["embedding.typed", "front.class_token", "front.tokens"]), data.step(["positions.table"]));
  const shown = data.tokens(data.read.labels, stage);
  const radius = Math.min(26, shown[0].room * 0.4);
  shown.forEach(({ place, label, x, room }, number) => {
    stage.chip(label, x, stage.floor, room);
    const y = stage.height * 0.5;
    const angle = place * playTurn(t, number, shown.length); // of the fastest pair of a query: one radian a token
    stage.box(x - radius, y - radius, 2 * radius, 2 * radius, null, { radius, stroke: stage.looks.line });
    stage.line(x, y, x + radius * Math.cos(angle), y - radius * Math.sin(angle), 3, stage.looks.accent);
    stage.text(String(place), x, y - radius - 14, { size: 12, colour: stage.looks.soft });
  });
  return null;
}

/** One head at one reader: what it computes for each token that it may look at. */
function playStops(data, kind) {
  const body = data.got(`stops/${data.head(kind)}`);
  if (!body) return null;
  const of = (name) => body.stops.find((stop) => stop.stop === name);
  return { ...body, shares: of("softmax").values, products: of("q·k")?.values, scaled: of("scale")?.values, masked: of("mask")?.values, mix: of("mix")?.values };
}

/** The keys at the bottom, the query that reads them at the top: {shown, top}. */
function playKeys(stage, data, body) {
  const shown = data.tokens(body.columns, stage, body.shares, body.columns.length > body.reader ? body.reader : 0);
  const top = { x: stage.width - 70, y: 26 };
  const most = Math.max(...body.shares, 1e-9);
  stage.chip(body.label, top.x, top.y, 120, { here: true });
  stage.text(`head ${body.head}, query of`, top.x - 66, top.y, { align: "right", family: "sans", colour: stage.looks.soft, size: 12 });
  return { shown, top, most };
}

function playScores(stage, data, t, kind) {
  const body = playStops(data, kind);
  if (!body) return;
  const { shown, top } = playKeys(stage, data, body);
  const values = body.products || body.shares;
  const most = Math.max(...shown.map(({ place }) => Math.abs(values[place] ?? 0)), 1e-9);
  const high = stage.floor - 150;
  shown.forEach(({ place, label, x, room }, number) => {
    const here = playTurn(t, number, shown.length);
    stage.chip(label, x, stage.floor, room, { here: place === body.reader && kind !== "cross" });
    stage.curve(x, stage.floor - 16, top.x, top.y + 16, 1.2, stage.looks.line, 1, here);
    const value = values[place] ?? 0;
    const tall = (high * Math.abs(value)) / most * here;
    stage.box(x - 9, stage.floor - 20 - tall, 18, tall, css(signedColour(value < 0 ? -0.8 : 0.8)), { radius: 3, alpha: 0.9 });
    stage.text(figure(value), x, stage.floor - 32 - tall, { size: 12, alpha: playPhase(here, 0.6, 1) });
  });
}

/** Scores become shares: scaled, masked, then softmax; a bar of each token changes from one to the next. */
function playSoftmax(stage, data, t, kind) {
  const body = playStops(data, kind);
  if (!body) return;
  const { shown } = playKeys(stage, data, body);
  const high = stage.floor - (stage.narrow ? 140 : 120);
  const levels = [body.products || body.shares, body.scaled || body.shares, body.masked || body.shares, body.shares];
  const names = ["q · k", "scaled", "masked", "softmax: shares of 1"];
  const at = Math.min(3, t * 3.6);
  const [from, part] = [Math.min(2, Math.floor(at)), Math.min(1, at - Math.min(2, Math.floor(at)))];
  const scale = (values) => Math.max(...shown.map(({ place }) => Math.abs(values[place] ?? 0)), 1e-9);
  const [first, second] = [levels[from], levels[from + 1]];
  stage.text(names[part > 0.5 ? from + 1 : from], 20, stage.narrow ? 56 : 26, { align: "left", family: "sans", weight: 700, size: 15 });
  shown.forEach(({ place, label, x, room }) => {
    const value = (part > 0.5 ? second : first)[place];
    const tall = Math.abs(playBetween(high * Math.abs(first[place] ?? 0) / scale(first), high * Math.abs(second[place] ?? 0) / scale(second), playEase(part)));
    stage.chip(label, x, stage.floor, room, { here: place === body.reader && kind !== "cross", share: from === 2 ? playEase(part) * body.shares[place] / Math.max(...body.shares) : null });
    stage.box(x - 11, stage.floor - 20 - tall, 22, tall, value === null ? stage.looks.line : from === 2 && part > 0.5 ? stage.looks.accent : css(signedColour((value ?? 0) < 0 ? -0.7 : 0.7)), { radius: 3 });
    stage.text(value === null ? "hidden" : from === 2 && part > 0.5 ? percent(value) : figure(value), x, stage.floor - 32 - tall, { size: 12 });
  });
}

function playValues(stage, data, t, kind) {
  const body = playStops(data, kind);
  if (!body) return;
  const { shown, top, most } = playKeys(stage, data, body);
  shown.forEach(({ place, label, x, room }, number) => {
    const share = body.shares[place];
    stage.chip(label, x, stage.floor, room, { share: share / most });
    stage.curve(x, stage.floor - 42, top.x, top.y + 16, 1 + 16 * share, stage.looks.accent, 0.25 + 0.7 * share / most, playTurn(t, number, shown.length));
    stage.text(percent(share), x, stage.floor - 27, { size: 12, alpha: playTurn(t, number, shown.length) });
  });
}

/** All heads at once, layers from bottom to top; each a small picture of where it looks. */
function playHeads(stage, data, t, kind) {
  const body = data.got(`thumbnails/${kind}`);
  if (!body) return;
  const key = document.documentElement.dataset.theme || "";
  if (body.sheetOf !== key) {
    const { shape, values } = unpack(body.pattern);
    const [layers, heads, height, width] = shape;
    body.sheet = el("canvas", { width: heads * width, height: layers * height });
    for (let layer = 0; layer < layers; layer++) for (let head = 0; head < heads; head++) {
      const start = (layer * heads + head) * height * width;
      const own = values.subarray(start, start + height * width);
      paintAt(body.sheet.getContext("2d"), head * width, layer * height, own, height, width, 0, Math.max(...own, 1e-6));
    }
    [body.sheetOf, body.size] = [key, shape];
  }
  const [layers, heads, height, width] = body.size;
  const side = Math.min((stage.width - 90) / heads, (stage.height - 40) / layers);
  const left = (stage.width - side * heads) / 2 + 20;
  const named = data.head(kind).split("/")[0];
  stage.context.imageSmoothingEnabled = false;
  for (let layer = 0; layer < layers; layer++) {
    const here = playTurn(t, layer, layers, 2);
    const y = stage.height - 18 - side * (layer + 1);
    stage.text(stage.narrow ? String(body.layers[layer]) : `layer ${body.layers[layer]}`, left - 10, y + side / 2, { align: "right", family: "sans", size: 12, colour: stage.looks.soft, alpha: here });
    stage.context.globalAlpha = here;
    for (let head = 0; head < body.heads[layer]; head++) {
      stage.context.drawImage(body.sheet, head * width, layer * height, width, height, left + head * side + 2, y + 2, side - 4, side - 4);
      const name = `${kind === "self" ? "" : `${kind}.`}${body.layers[layer]}.${head}`;
      stage.box(left + head * side + 2, y + 2, side - 4, side - 4, null, { radius: 2, stroke: name === named ? stage.looks.accent : stage.looks.line, line: name === named ? 3 : 1, alpha: here });
    }
    stage.context.globalAlpha = 1;
  }
}

/** A feed-forward at one token: its vector, the neurons that it makes, and the vector that they make together. */
function playFeedforward(stage, data, t) {
  const [reads, fired, gives] = ["feedforward_residual.before", "feedforward.activated", "feedforward.down"].map((name) => data.numbers(data.step([`0.${name}`])));
  if (!fired) return;
  const row = Math.min(data.run.tokens.labels.length - 1, data.position, fired.rows - 1);
  const across = (numbers, y, tall, part, signedOnes) => {
    const values = Array.from(numbers.at(row)).slice(0, stage.narrow ? 24 : 48);
    const most = Math.max(...values.map(Math.abs), 1e-9);
    const wide = (stage.width - 60) / values.length;
    values.forEach((value, i) => {
      const high = tall * (signedOnes ? 1 : Math.max(0.06, Math.abs(value) / most));
      stage.box(30 + wide * i + 1, y - high / 2, wide - 2, high, css(signedColour((0.9 * value) / most)), { radius: 2, alpha: playTurn(part, i, values.length, 12) });
    });
  };
  const [low, middle, high] = [stage.floor - 8, stage.height * 0.46, 34];
  const named = (words, y, alpha) => stage.text(words, 30, y, { align: "left", family: "sans", size: 12, colour: stage.looks.soft, alpha });
  if (reads) across(reads, low, 18, Math.min(1, t * 3.5), true);
  named(`what “${data.run.tokens.labels[row]}” holds now, after the norm`, low - 20, playPhase(t, 0, 0.1));
  across(fired, middle, stage.height * 0.34, playPhase(t, 0.25, 0.7) * 1.2, false);
  named("neurons: tall ones fire", middle - stage.height * 0.17 - 14, playPhase(t, 0.3, 0.4));
  if (gives) across(gives, high, 18, playPhase(t, 0.65, 1) * 1.2, true);
  named("what is added to the stream", high + 22, playPhase(t, 0.7, 0.8));
}

/** The stream: what attention and feed-forwards of each layer have added to the score of the answer so far. */
function playStream(stage, data, t) {
  const body = data.got(`contributions?${data.asked}`);
  if (!body) return;
  const levels = [{ name: "embedding", value: 0 }];
  for (const term of body.terms) {
    const name = term.layer === null ? (term.kind === "embedding" ? "embedding" : "output layer") : `${term.kind === "encoder" ? "encoder " : ""}${term.layer} ${term.kind === "feedforward" ? "feed-forward" : term.kind === "cross" ? "cross-attention" : "attention"}`;
    const level = levels.find((one) => one.name === name) || levels[levels.push({ name, value: 0, order: term.layer === null ? 1e6 : 3 * term.layer + (term.kind === "feedforward" ? 2 : term.kind === "cross" ? 1 : 0) }) - 1];
    level.value += term.value;
  }
  levels.sort((a, b) => (a.order ?? -1) - (b.order ?? -1));
  let sum = 0;
  for (const level of levels) level.sum = sum += level.value;
  const [low, high] = [Math.min(0, ...levels.map((one) => one.sum)), Math.max(0, ...levels.map((one) => one.sum))];
  const left = stage.narrow ? 120 : 190;
  const x = (value) => left + ((value - low) / (high - low || 1)) * (stage.width - left - 90);
  const step = (stage.height - 50) / levels.length;
  const y = (number) => stage.height - 26 - step * (number + 0.5);
  levels.forEach((one, number) => {
    const here = playTurn(t, number, levels.length, 2);
    const before = number ? levels[number - 1] : { sum: 0 };
    if (number) stage.curve(x(before.sum), y(number - 1), x(one.sum), y(number), 4, stage.looks.accent, 0.9, here);
    if (step >= 11 || number % Math.ceil(11 / step) === 0) {
      stage.text(one.name, left - 14, y(number), { align: "right", family: "sans", size: Math.min(13, Math.max(9, step)), colour: stage.looks.soft, alpha: here, most: left - 10 });
      stage.text(signed(one.value), x(one.sum) + 12, y(number), { align: "left", size: Math.min(12, Math.max(9, step)), alpha: here, colour: stage.looks.ink });
    }
    stage.box(x(one.sum) - 4, y(number) - 4, 8, 8, one.value < 0 ? stage.looks.wrong : stage.looks.accent, { alpha: here });
  });
  stage.text(`logit of “${body.choice}”${body.centred ? ", above the mean of all" : ""}: ${figure(body.logit)}`, stage.width - 20, 16, { align: "right", weight: 700, alpha: playPhase(t, 0.8, 1), most: stage.width - 40 });
}

/** What the model would say after each layer. */
function playLayers(stage, data, t) {
  const live = data.app.source.live;
  const body = data.got(live ? `lens?first=${data.column}` : "lens");
  if (!body) return;
  body.tables ||= new LensTables(data.run.columns).add(live ? data.column : 0, body);
  const count = body.tables.layers.length;
  const rows = body.tables.layers.map((name, layer) => {
    const best = body.tables.top(layer, data.column)[0];
    return { label: `${stage.narrow ? name.replace("block ", "") : name}  ${best.label}`, share: best.p * playTurn(t, layer, count, 2), number: percent(best.p), alpha: playTurn(t, layer, count, 2), here: best.label === body.tables.chosen(data.column) };
  }).reverse();
  stage.bars(rows, { top: 12, high: (stage.height - 20) / count, left: stage.narrow ? 120 : 210 });
}

/** The scores of the likeliest choices; then, from `t` on, their probabilities under the sampling that is set. */
function playChoices(stage, data, t, drawn) {
  const body = data.got(`next?position=${data.column}`);
  if (!body) return;
  const { logits, order, probabilities } = plainOf(body);
  const options = data.app.store.get("sampling");
  const result = drawn ? distributionOf(logits, options) : null;
  const ids = order.slice(0, PLAY_ROWS);
  const name = (id) => body.labels[body.top.indexOf(id)] ?? `id ${id}`;
  const [least, most] = [logits[ids.at(-1)], logits[ids[0]]];
  const widest = drawn ? Math.max(...ids.map((id) => Math.max(result.probabilities[id], probabilities[id])), 1e-9) : 1;
  stage.bars(ids.map((id, row) => {
    const here = playTurn(t, row, ids.length);
    if (!drawn) return { label: name(id), share: here * (0.08 + 0.92 * (logits[id] - least) / (most - least || 1)), number: figure(logits[id]), alpha: here, colour: css(signedColour(0.75)) };
    const p = playBetween(probabilities[id], result.probabilities[id], playPhase(t, 0.3, 0.7));
    const gone = result.gone[id] ? playPhase(t, 0.3, 0.7) : 0;
    return { label: name(id), share: (p / widest) * playPhase(t, 0, 0.25), number: gone > 0.5 ? `removed by ${result.gone[id]}` : percent(p), alpha: 1 - 0.65 * gone, here: id === order[0] };
  }));
}

function playVector(stage, data, t) {
  const step = data.step(["pooled", "norm"]);
  const numbers = data.numbers(step);
  if (!numbers) return;
  const values = Array.from(numbers.at(0));
  const wide = (stage.width - 40) / values.length;
  const most = Math.max(...values.map(Math.abs), 1e-9);
  values.forEach((value, i) => stage.box(20 + wide * i, stage.height / 2 - (value > 0 ? (150 * value) / most : 0) * playTurn(t, i, values.length, 12), wide - 1, ((150 * Math.abs(value)) / most) * playTurn(t, i, values.length, 12), css(signedColour((0.9 * value) / most)), { radius: 1 }));
}

// The scenes ------------------------------------------------------------------------------------------------

const PLAY_EMBEDDED = ["front.tokens", "front.class_token", "front.project"];
const playSentence = (text) => text[0].toUpperCase() + text.slice(1);
const playQuoted = (text) => `“${text}”`;
const playAttention = (kind) => ({ encoder: "Encoder: ", cross: "Cross-attention: ", self: "" })[kind];
const playPart = (head) => { const [, own, layer] = head.match(/^(?:(encoder|cross)\.)?(\d+)\./); return `${own === "encoder" ? "encoder." : ""}blocks.${layer}.${own === "cross" ? "cross" : "attention"}`; };

/** By what the scores are multiplied before anything else, in words; nothing where they stay as they are. */
function playScale({ products, scaled }) {
  const at = products && scaled ? products.findIndex((value) => Math.abs(value) > 1e-3) : -1;
  const scale = at < 0 ? 1 : scaled[at] / products[at];
  return Math.abs(scale - 1) < 1e-3 ? "" : `Each score is multiplied by ${figure(scale)}, so that long vectors do not drown the rest; `;
}

/** The largest share as softmax makes it of its score: e^s, and what it is divided by. */
function playShare({ masked, scaled, shares, columns }) {
  const [most, place] = shares.reduce((best, share, at) => (share > best[0] ? [share, at] : best), [-1, 0]);
  const power = Math.exp((masked || scaled || [])[place]);
  const worked = power > 1e-3 && power < 1e6 ? `: e^${figure(Math.log(power))} = ${figure(power)}, of ${figure(power / most)} in all, is ${percent(most)}` : ` gets ${percent(most)}`;
  return `${playQuoted(columns[place])}${worked}.`;
}

/**
 * One row a scene: `title`; `steps`, endings of the step whose formula and shape are shown; `words(data)`, a sentence with the numbers of
 * this text; `draw(stage, data, t)`; `when(data)` says whether this model has it. A row of `kinds` is there for each kind of attention.
 */
const PLAY_SCENES = [
  { id: "tokens", title: (data) => (data.image ? "Patches" : "Tokens"), steps: ["ids", "front.patches", "pixels", "tokenize"], draw: playTokens, words: (data) => (data.image ? `The image is cut into ${data.run.tokens.special.filter((mark) => !mark).length} patches. To the model a patch is what a word is to a model of text.` : `The text is cut into ${data.read.labels.length} tokens, and each token is looked up as a number. The model sees nothing but these numbers.`) },
  { id: "embeddings", title: "Embeddings", steps: PLAY_EMBEDDED, draw: (stage, data, t) => playVectors(stage, data, t, data.step(PLAY_EMBEDDED)), words: (data) => `Each ${data.image ? "patch" : "token"} becomes a vector of ${data.model.d_model} numbers; the first ${PLAY_NUMBERS} are drawn, blue above zero and red below. ${data.image ? "They are made from its pixels." : "They were learned in training."}` },
  { id: "positions", title: "Positions", steps: ["embedding.placed", "q_rotated", "biased"], draw: playPositions, words: (data) => ({ placed: "A second vector, one for each position, is added to the first: now order counts.", q_rotated: "Queries and keys turn by an angle that grows with the position: the score of two tokens then depends on how far apart they are.", biased: "Scores fall with the distance between two tokens: near ones count more." })[data.step(["embedding.placed", "q_rotated", "biased"]).name.split(".").at(-1)] },
  { id: "scores", kinds: true, title: "Queries · keys", steps: ["scores"], draw: playScores, words: (data, kind, body) => `${playQuoted(body.label)} asks with its query; every token answers with its key. The product of the two says how well they fit${body.products ? `: ${figure(body.products[body.shares.indexOf(Math.max(...body.shares))])} for ${playQuoted(body.columns[body.shares.indexOf(Math.max(...body.shares))])}` : ""}.` },
  { id: "softmax", kinds: true, title: "Scale, mask, softmax", steps: ["pattern"], draw: playSoftmax, words: (data, kind, body) => playSentence(`${playScale(body)}${kind === "self" && data.model.family === "decoder" ? "what comes later is hidden, and " : ""}softmax makes shares of them that add up to 1: a score s becomes e^s, divided by the sum of all of these. ${playShare(body)}`) },
  { id: "values", kinds: true, title: "Values", steps: ["z"], draw: playValues, words: (data, kind, body) => `Each token also has a value: what it passes on. The head takes the sum of all values, each times its share, to ${playQuoted(body.label)}.` },
  { id: "heads", kinds: true, title: "Heads", steps: ["out"], draw: playHeads, words: (data, kind) => `This happens in ${data.model.attentions.filter((entry) => entry.kind === kind).reduce((sum, entry) => sum + entry.heads, 0)} heads, each with its own queries, keys and values. A small picture is where one head looks; the outlined one was shown before.` },
  { id: "feedforward", title: "Feed-forward", steps: ["0.feedforward.activated"], draw: playFeedforward, words: (data) => `Between attentions each token is worked on by itself: its vector is widened to ${data.step(["0.feedforward.activated"]).shape.at(-1)} neurons, few of which fire, and made narrow again.` },
  { id: "stream", title: "Residual stream", steps: ["0.attention_residual.add", "0.feedforward_residual.add"], when: (data) => data.run.task !== "embed", draw: playStream, words: () => "Nothing replaces the vector of a token: every layer adds to it. From bottom to top: what each part adds to the score of the answer." },
  { id: "layers", title: "Layers", steps: ["norm"], when: (data) => data.run.task !== "embed", draw: playLayers, words: (data) => `${data.model.layers} layers do this one after the other. Read after each of them, the model would say this; its last word is at the top.` },
  { id: "logits", title: "Logits", steps: ["head.out"], when: (data) => data.run.task !== "embed", draw: (stage, data, t) => playChoices(stage, data, t, false), words: (data) => `The last vector is compared with every ${data.run.task === "next" || data.run.task === "fill" ? "token of the vocabulary" : "class"}: a score, or logit, for each.` },
  { id: "sampling", title: (data) => (["next", "fill"].includes(data.run.task) ? "Sampling" : "Probabilities"), steps: ["head.probabilities"], when: (data) => data.run.task !== "embed", draw: (stage, data, t) => playChoices(stage, data, t, true), words: (data) => `Softmax makes probabilities of the logits. ${data.run.task === "next" ? "Temperature, top-k and top-p, beside the answer, decide how boldly one of them is drawn; it is written down, and all begins again with one token more." : "The largest one is the answer."}` },
  { id: "vector", title: "The vector", steps: ["pooled", "norm"], when: (data) => data.run.task === "embed", draw: playVector, words: () => "This model answers with a vector: texts that mean alike get vectors that lie close together." },
];

/** The scenes that this model has, one for each kind of attention where a row says so: {id, title, step, words, draw}. */
function playScenes(data) {
  const pairs = PLAY_SCENES.flatMap((row) => (row.kinds ? data.kinds.map((kind) => [row, kind]) : [[row, null]]));
  const first = pairs.findIndex(([, kind]) => kind);
  const order = pairs.map((pair, place) => [pair, pair[1] ? first + data.kinds.indexOf(pair[1]) / 10 + place / 1e4 : place]).sort((a, b) => a[1] - b[1]); // one kind of attention after the other
  return order.map(([[row, kind]]) => {
    const step = data.step(kind ? row.steps.map((name) => `${playPart(data.head(kind).split("/")[0])}.${name}`) : row.steps);
    const title = typeof row.title === "function" ? row.title(data) : `${kind && data.kinds.length > 1 ? playAttention(kind) : ""}${row.title}`;
    const body = () => (kind && row.id !== "heads" ? playStops(data, kind) : {});
    return { id: kind ? `${row.id}-${kind}` : row.id, title, step, there: Boolean(step) && (!row.when || row.when(data)), words: () => (body() ? row.words(data, kind, body()) : data.errors.get(`stops/${data.head(kind)}`) || "…"), draw: (stage, t) => row.draw(stage, data, t, kind) };
  }).filter((scene) => scene.there);
}

export const playSection = {
  id: "play",
  title: "Play",
  hint: "The forward pass as a walk in scenes, with the numbers of this model and this text. Space plays and pauses, arrow keys step.",

  mount(root, app) {
    const still = matchMedia("(prefers-reduced-motion: reduce)");
    const canvas = el("canvas", { id: "play-stage", role: "img", tabindex: "0", "aria-label": "The stage", "aria-describedby": "play-words" });
    const title = el("h3", { id: "play-scene" });
    const formula = el("p", { class: "formula mono", id: "play-formula" });
    const shapes = el("p", { class: "soft mono", id: "play-shapes" });
    const words = el("p", { id: "play-words", "aria-live": "polite" });
    const button = (id, text, act, more = {}) => el("button", { type: "button", id, onclick: act, ...more }, text);
    const back = button("play-back", "Back", () => go(at - 1, true));
    const play = button("play-play", "Play", () => (playing ? pause() : start()), { class: "primary" });
    const next = button("play-next", "Next", () => go(at + 1, true));
    const scrub = el("input", { type: "range", id: "play-scrub", min: 0, max: 100, value: 0, step: 1, oninput: () => { pause(); [at, t] = [Math.min(Math.floor(scrub.value / 100), scenes.length - 1), 0]; t = Math.min(1, Number(scrub.value) / 100 - at); show(); } });
    const list = el("ol", { class: "play-scenes", "aria-label": "Scenes" });
    const problem = el("p", { role: "alert", class: "problem" });
    replace(root, problem, el("div", { class: "play-panes" }, el("div", { class: "play-box" }, canvas, el("label", { class: "hidden-words", for: "play-scrub" }, "Place in the walk"), scrub, el("div", { class: "row play-buttons" }, back, play, next)), el("div", { class: "play-side" }, title, words, formula, shapes)), list);
    roving(list, "button");
    const stage = new PlayStage(canvas);
    let data = null;
    let scenes = [];
    let [at, t, playing] = [0, 0, false];
    let [frame, last] = [0, 0];
    let wanted = false; // to play as soon as the scenes are there
    let stamps = []; // of the frames of this second
    const seen = () => root.offsetParent !== null;

    /** Draw now; the share of a scene in which nothing moves is for reading. */
    function draw() {
      if (!scenes.length || !seen()) return;
      stage.clear();
      scenes[at].draw(stage, still.matches ? 1 : Math.min(1, t / PLAY_MOVES));
    }

    /** What stands beside the stage. */
    function show() {
      const scene = scenes[at];
      if (!scene) return;
      if (title.dataset.scene !== scene.id) {
        replace(title, `${at + 1}. ${scene.title}`);
        title.dataset.scene = scene.id;
        replace(formula, scene.step.formula);
        replace(shapes, `${scene.step.symbols}  =  ${scene.step.shape.join(" × ")}`);
        canvas.setAttribute("aria-label", `Scene ${at + 1} of ${scenes.length}: ${scene.title}`);
        list.querySelectorAll("button").forEach((one, number) => one.setAttribute("aria-pressed", String(number === at)));
        list.querySelectorAll("button")[at].scrollIntoView({ block: "nearest", inline: "nearest" });
        [back.disabled, next.disabled] = [at === 0, at === scenes.length - 1];
      }
      const said = scene.words();
      if (words.textContent !== said) replace(words, glossed(said));
      scrub.value = Math.round(100 * (at + t));
      draw();
    }

    function go(to, whole = false) {
      at = Math.min(Math.max(to, 0), scenes.length - 1);
      t = whole && !playing ? 1 : 0;
      show();
    }

    function tick(now) {
      if (!playing || !seen()) return pause();
      stamps = [...stamps.filter((stamp) => now - stamp < 1000), now];
      if (stamps.length > 2) canvas.dataset.fps = ((1000 * (stamps.length - 1)) / (now - stamps[0])).toFixed(1);
      t += Math.min(now - last, 100) / (1000 * PLAY_SECONDS);
      last = now;
      if (t >= 1) {
        if (at === scenes.length - 1) { t = 1; show(); return pause(); }
        [at, t] = [at + 1, 0];
        show();
      } else {
        if (!still.matches) draw();
        const place = Math.round(100 * (at + t));
        if (Number(scrub.value) !== place) scrub.value = place; // it is drawn anew only where it moves
      }
      frame = requestAnimationFrame(tick);
      return null;
    }

    function start() {
      if (!scenes.length) { wanted = true; return null; }
      if (at === scenes.length - 1 && t >= 1) [at, t] = [0, 0];
      [playing, last, stamps] = [true, performance.now(), []];
      play.textContent = "Pause";
      show();
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(tick);
      return null;
    }

    function pause() {
      playing = false;
      play.textContent = "Play";
      cancelAnimationFrame(frame);
    }

    /** The scenes of the run that is shown; their numbers come as they are asked for. */
    async function load() {
      const run = app.store.get("run");
      if (!run || !seen() || (data && data.run === run && data.position === app.store.get("position") && data.asked === askedOf(app, run))) return;
      const own = new PlayData(app, run, () => { if (data === own) show(); });
      data = own;
      problem.textContent = "";
      if (!scenes.length) replace(words, "Every step of the forward pass is being computed…");
      const trace = await app.source.get(`run/${run.run}/trace`).catch((error) => { if (data === own && !error.dropped) problem.textContent = error.message; return null; });
      if (data !== own) return;
      if (!trace) { data = null; return; }
      own.steps = trace.steps;
      scenes = playScenes(own);
      delete title.dataset.scene;
      scrub.max = 100 * scenes.length;
      replace(list, scenes.map((scene, number) => el("li", {}, el("button", { type: "button", "data-scene": scene.id, "aria-pressed": "false", onclick: () => go(number, true) }, scene.title))));
      stage.fit();
      go(Math.min(at, scenes.length - 1), true);
      if (wanted) { wanted = false; [at, t] = [0, 0]; start(); }
    }

    root.addEventListener("keydown", (event) => {
      if (event.target.closest("input, select, textarea, ol") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === " " && event.target.tagName !== "BUTTON") { event.preventDefault(); if (playing) pause(); else start(); }
      else if (event.key === "ArrowRight" || event.key === "ArrowLeft") { event.preventDefault(); go(at + (event.key === "ArrowRight" ? 1 : -1), true); }
    });
    new ResizeObserver(() => { if (seen()) { stage.fit(); draw(); } }).observe(canvas);
    for (const key of ["run", "position", "target", "foil", "leading", "view"]) app.store.listen(key, load);
    app.store.listen("sampling", () => show());
    app.store.listen("theme", () => { stage.fit(); draw(); });
    app.play = () => { app.open("play"); [at, t] = [0, 0]; start(); canvas.focus({ preventScroll: true }); };
  },
};
