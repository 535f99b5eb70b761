// One head, or all of them rolled into one, large: the weights as a heat map, where the chosen row looks, lines from token to token.

import { amountColour, css, inkOn } from "./colour.js";
import { el, percent, replace, svg, tokenText } from "./dom.js";
import { glossed } from "./glossary.js";
import { heatmap, scaleBar } from "./heatmap.js";
import { patchImage, readsImage, soundImage } from "./image.js";
import { saveButtons, saveMapButtons } from "./picture.js";

const ATTENTION_LINES = 400; // of the view with two columns
const ATTENTION_ALL = 14; // tokens of which all have a line's end, chosen or not
const ATTENTION_CHIPS = 96; // tokens that are all shown as chips; of more, those that are looked at most
const ATTENTION_MOST = 32;

/** Lines from the tokens that look, on the left, to those that are looked at: the strongest ones. Where there are many tokens and one of them is chosen, only what it looks at is drawn. */
function attentionLines(matrix, rows, columns, chosen, room, drawnAs = matrix) {
  const step = 22;
  const width = Math.max(240, Math.min(460, room || 460));
  const links = [];
  for (let row = 0; row < rows.length; row++) {
    if (chosen >= 0 && row !== chosen) continue;
    for (let column = 0; column < columns.length; column++) {
      const weight = matrix[row * columns.length + column];
      if (weight > 0.02) links.push({ weight, drawn: drawnAs[row * columns.length + column], row, column });
    }
  }
  links.sort((a, b) => b.weight - a.weight);
  const short = chosen >= 0 && Math.max(rows.length, columns.length) > ATTENTION_ALL;
  const places = (labels, shown) => { const kept = labels.map((_, place) => place).filter(shown); return { kept, at: new Map(kept.map((place, number) => [place, number])) }; };
  const looked = new Set(links.map((link) => link.column));
  const [left, right] = [places(rows, (place) => !short || place === chosen), places(columns, (place) => !short || looked.has(place))];
  const most = Math.max(left.kept.length, right.kept.length, 1);
  const y = (side, place) => side.at.get(place) * step + 17 + (step * (most - side.kept.length)) / 2;
  const letters = Math.max(6, Math.floor(width / 460 * 16));
  const [near, far] = [width * 0.27, width * 0.65];
  const words = (labels, side, x, anchor, said = () => "") => side.kept.map((place) => svg("text", { x, y: y(side, place), "text-anchor": anchor, class: "mono" }, labels[place].length > letters ? `${labels[place].slice(0, letters - 1)}…` : labels[place], said(place)));
  const share = (column) => { const link = chosen >= 0 && links.find((one) => one.column === column); return link ? svg("tspan", { class: "lines-share", dx: 6 }, percent(link.weight)) : ""; };
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${most * step + 8}`, width, height: most * step + 8, class: "chart lines", role: "img", "aria-label": "Lines from each token to those that it looks at; thicker is more" },
    links.slice(0, ATTENTION_LINES).map(({ drawn: weight, row, column }) => svg("line", { x1: near + 6, y1: y(left, row) - 4, x2: far - 6, y2: y(right, column) - 4, class: "link", "stroke-linecap": "round", "stroke-opacity": chosen >= 0 ? Math.min(1, 0.45 + weight) : Math.min(1, 0.12 + weight), "stroke-width": 1 + 6 * weight })),
    words(rows, left, near, "end"),
    words(columns, right, far, "start", share),
  );
}

const SINK_SHARE = 0.4; // of all attention, on the first token, from which it is a sink
const SINK_DIMMED = 0.25; // of its colour, that stays

/** Attention with the first column drawn faint where much of it rests there; the same matrix where that is not so. */
export function dimFirst(matrix, rows, columns) {
  let sink = 0;
  for (let row = 1; row < rows; row++) sink += matrix[row * columns] / Math.max(rows - 1, 1);
  return columns < 3 || sink < SINK_SHARE ? matrix : matrix.map((weight, place) => (place % columns || place === 0 ? weight : SINK_DIMMED * weight));
}

const ENLARGED_SCALES = { one: "0 to 1", most: "0 to the largest", log: "0.0001 to 1, logarithmic" };

/** Weights as shares of a scale between 0 and 1. */
function onScale(matrix, scale) {
  if (scale === "one") return matrix;
  const most = scale === "most" ? matrix.reduce((best, weight) => Math.max(best, weight), 1e-12) : 1;
  return matrix.map((weight) => (scale === "most" ? weight / most : 1 + Math.log10(Math.max(weight, 1e-4)) / 4));
}

/**
 * Put one matrix into a node, large: a heat map, where the chosen row looks, lines from token to token. Pointing previews a row, choosing
 * one calls `onPin(row)`. Returns {redraw, choose(row)}.
 */
export function enlarged(node, { name, title, words, matrix, rows, columns, scale }, run, from, onPin, looks = { scale: "one", zoom: 1, whole: false }) {
  const faint = readsImage(run) || run.sound || name.startsWith("cross") ? matrix : dimFirst(matrix, rows.length, columns.length);
  const drawnAs = looks.whole ? matrix : faint;
  const chips = el("ul", { class: "chips looks", "aria-label": "Tokens; darker ones are looked at more" });
  const lines = el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Lines from token to token" });
  const hears = run.sound && columns[0].startsWith(run.source.labels[0]); // the keys are moments of a sound
  const patched = run.picture && columns.length === run.tokens.labels.length;
  const image = patched ? patchImage(run.picture, columns, "Where on the image the chosen place looks") : hears ? soundImage(run.sound, columns.length, "When in the sound the chosen token looks: the spectrogram, warmer where it looks more") : null;
  const few = rows.length <= 48 && columns.length <= 64;
  const some = columns.length > ATTENTION_CHIPS;
  const heading = el("span", { id: "attention-row", class: "mono", dir: "auto" });
  let picture = null;
  let row = -1;
  let pinned = from;
  let waiting = 0;

  /** The columns with most weight, in the order of the text. */
  function strongest(weights) {
    const order = Array.from(weights.keys()).sort((a, b) => weights[b] - weights[a]);
    return order.slice(0, ATTENTION_MOST).sort((a, b) => a - b);
  }

  function look(place) {
    row = place;
    const weights = place >= 0 ? matrix.subarray(place * columns.length, (place + 1) * columns.length) : null;
    const tints = weights && drawnAs.subarray(place * columns.length, (place + 1) * columns.length);
    const most = weights ? Math.max(...tints, 1e-9) : 1;
    const columnsShown = some && weights ? strongest(weights) : null;
    chips.childNodes.forEach((chip, place) => {
      const column = columnsShown ? columnsShown[place] : place;
      const colour = weights ? amountColour(tints[column] / most) : null;
      if (columnsShown) chip.replaceChild(tokenText(columns[column]), chip.firstChild);
      chip.style.background = colour ? css(colour) : "";
      chip.style.color = colour ? inkOn(colour) : "";
      chip.lastChild.textContent = weights ? percent(weights[column]) : "";
    });
    if (image) image.draw(weights, place);
    heading.textContent = place >= 0 ? rows[place] : "all tokens";
    if (few) replace(lines, (picture = attentionLines(matrix, rows, columns, place, lines.clientWidth, drawnAs)));
  }

  /** Keep a row: the chips, the lines, the heading and the list all speak of it. */
  function choose(place) {
    pinned = place;
    query.value = String(place);
    if (place !== row) look(place);
  }

  const hover = (at) => {
    const shown = at < 0 ? pinned : at;
    if (shown === row) return;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => look(shown));
  };
  const pin = (place) => {
    choose(place);
    onPin(place);
  };
  const room = looks.zoom * Math.max(220, Math.min(760, (node.clientWidth || 760) * (node.clientWidth > 700 ? 0.55 : 1) - 110));
  const map = heatmap({
    values: matrix,
    painted: onScale(drawnAs, looks.scale),
    rows,
    columns,
    room,
    name: `${title}: rows look at columns. Arrow keys move from cell to cell.`,
    onCell: hover,
    onPin: pin,
    describe: (at, column, weight) => `${rows[at]} looks at ${columns[column]}: ${weight.toFixed(3)}`,
  });
  replace(chips, columns.slice(0, some ? ATTENTION_MOST : ATTENTION_CHIPS).map((label, column) => el("li", { class: "chip", "data-token": column }, tokenText(label), el("small", {}, ""))));
  const query = el("select", { id: "attention-query", onchange: () => pin(Number(query.value)) }, el("option", { value: -1 }, "all tokens"), rows.map((label, place) => el("option", { value: place }, `${place}  ${label}`)));
  if (image) image.canvas.addEventListener("click", (event) => { const place = image.at(event); if (place >= 0) pin(place); });
  const again = (change) => enlarged(node, { name, title, words, matrix, rows, columns, scale }, run, pinned, onPin, Object.assign(looks, change));
  const redraw = (change) => Object.assign(handle, again(change));
  const scales = el("select", { id: "attention-scale", onchange: () => redraw({ scale: scales.value }) }, Object.entries(ENLARGED_SCALES).map(([value, text]) => el("option", { value, selected: value === looks.scale }, text)));
  const zoom = el("select", { id: "attention-zoom", onchange: () => redraw({ zoom: Number(zoom.value) }) }, [1, 2, 4].map((value) => el("option", { value, selected: value === looks.zoom }, `× ${value}`)));
  const highest = looks.scale === "most" ? Number(drawnAs.reduce((best, weight) => Math.max(best, weight), 0).toPrecision(3)) : 1;
  const handle = { redraw: () => redraw({}), choose };
  const file = name === "rollout" ? "rollout" : `head-${name}`;
  replace(
    node,
    el("h3", { id: "attention-head", "data-head": name }, title),
    el("p", { class: "soft" }, glossed(words)),
    faint === matrix ? null : el("p", { class: "soft", id: "attention-sink" }, "Attention to the first token is drawn faint: it is where heads rest that have nothing to look for. ", el("button", { type: "button", class: "in-words", "aria-pressed": String(looks.whole), onclick: () => redraw({ whole: !looks.whole }) }, looks.whole ? "Draw it faint" : "Draw it in full")),
    el("div", { class: "row toolbar" }, el("div", {}, el("label", { for: "attention-query" }, "Where does this token look?"), query), el("div", {}, el("label", { for: "attention-scale" }, "Scale"), scales), el("div", {}, el("label", { for: "attention-zoom" }, "Zoom"), zoom)),
    el(
      "div",
      { class: "large-panes" },
      el("div", { class: "map-pane" }, map.root, scaleBar(looks.scale === "log" ? `${scale}, logarithmic` : scale, looks.scale === "log" ? 1e-4 : 0, highest), saveMapButtons(() => ({ canvas: map.canvas, rows, columns, title, scale }), file)),
      el("div", { class: "grow" }, el("h4", {}, "Where ", heading, " looks"), image ? el("div", {}, image.canvas, el("p", { class: "soft" }, hears ? "The spectrogram: time goes right, pitch goes up. Warmer moments are looked at more." : "Warmer patches are looked at more; choose a patch to see where it looks.")) : null, some ? el("p", { class: "soft" }, `The ${ATTENTION_MOST} tokens that it looks at most, in the order of the text:`) : null, chips, few ? el("details", { open: true }, el("summary", {}, "From token to token"), lines, saveButtons(() => picture, `${file}-lines`)) : null),
    ),
  );
  choose(from);
  return handle;
}
