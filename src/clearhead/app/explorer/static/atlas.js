// The atlas: parts of the model as one grid, layers down, heads across; and the numbers that colour it.

import { css, inkOn } from "./colour.js";
import { el, figure, percent, points } from "./dom.js";
import { askedOf, columnOf } from "./selection.js";

/** What the grid can be coloured by; numbers of both signs are `signed`. */
export const ATLAS_COLOURS = {
  pattern: { title: "attention pattern" },
  role: { title: "role" },
  direct: { title: "direct contribution", unit: "logits", signed: true },
  off: { title: "effect of turning off", unit: "bits (KL divergence)" },
  patch: { title: "patch score", unit: "share that comes back", signed: true },
  entropy: { title: "entropy", unit: "bits" },
};

/** Colours of roles that readers who see no red or green can tell apart; the letters in the cells say the same. */
const ATLAS_ROLES = [[86, 180, 233], [230, 159, 0], [0, 158, 115], [204, 121, 167], [240, 228, 66], [213, 94, 0], [0, 114, 178], [153, 153, 153]];

/** Tasks whose answer changes when a part is off. */
export const ATLAS_ASKED = ["next", "fill", "classify", "tag"];

/** A head's name: "3.2", "cross.1.0". */
export function atlasName(kind, layer, number) {
  return `${kind === "self" ? "" : `${kind}.`}${layer}.${number}`;
}

/** Where the arrow keys lead within a table of buttons; one of them is in the order of tabs. */
function atlasMove(event) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const cell = event.target.closest("td");
  if (!step || !cell) return;
  event.preventDefault();
  const row = cell.parentElement.parentElement.children[cell.parentElement.sectionRowIndex + step[0]];
  const next = row && row.children[cell.cellIndex + step[1]]?.querySelector("button");
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

/**
 * A grid of buttons: `rows` are {title, names}, null where a row has no such part; `columns` are the headings. `make(name)` gives the
 * button's attributes and children, `first` the one that the tab key reaches. Returns {root, buttons} with the buttons by name.
 */
export function partGrid({ rows: given, columns, make, first, corner = "layer" }) {
  const rows = corner === "layer" ? [...given].reverse() : given; // layers go from bottom to top
  const buttons = new Map();
  const cell = (name) => {
    if (name === null) return el("td", {});
    const [attributes, ...children] = make(name);
    buttons.set(name, el("button", { type: "button", tabindex: "-1", ...attributes }, children));
    return el("td", {}, buttons.get(name));
  };
  const heading = el("tr", {}, el("th", { scope: "col" }, el("span", { class: "hidden-words" }, corner)), columns.map((title) => el("th", { scope: "col" }, title)));
  const body = rows.map(({ title, names }) => el("tr", {}, el("th", { scope: "row" }, title), names.map(cell)));
  const root = el("table", { class: `heads${columns.length > 18 ? " tiny" : columns.length > 8 ? " many" : columns.length > 5 ? " crowded" : ""}`, style: { "--columns": columns.length }, onkeydown: atlasMove }, el("thead", {}, heading), el("tbody", {}, body));
  const reached = buttons.get(first) || buttons.get(given.flatMap(({ names }) => names).find((name) => name !== null));
  if (reached) reached.tabIndex = 0;
  return { root, buttons };
}

/** Paint a cell: a colour with the ink that reads on it, and a text where there is room for one. */
export function paintCell(node, colour, text = "") {
  node.style.backgroundImage = colour ? "none" : "";
  node.style.backgroundColor = colour ? css(colour) : "";
  node.style.color = colour ? inkOn(colour) : "";
  node.textContent = text;
}

/** The colour of each role, most frequent first. */
export function roleColours(names) {
  return new Map(names.map((name, place) => [name, ATLAS_ROLES[Math.min(place, ATLAS_ROLES.length - 1)]]));
}

/** Where the effects of single parts can be had: live everywhere, in a file where they were recorded; null: nowhere. */
export function effectsAt(app, run) {
  const wanted = columnOf(run, app.store.get("position"));
  if (!ATLAS_ASKED.includes(run.task)) return null;
  if (app.source.has(`run/${run.run}/effects/zero?position=${wanted}`)) return wanted;
  const there = app.source.list(`run/${run.run}/effects/zero?position=`).map(Number);
  return there.length ? there[0] : null;
}

/** What the model says without each part alone: {position, labels, before, parts}; null where nobody waits any more. */
export function effectsOf(app, run, position, tell, wanted) {
  return app.source.job(run.run, `effects/zero?position=${position}`, tell, wanted);
}

/** One part's effect in the rows of a table: {id, label, before, after}. */
export function effectRows(body, name) {
  return Object.entries(body.parts[name].after).map(([id, after]) => ({ id: Number(id), label: body.labels[id], before: body.before[id], after })).sort((a, b) => b.before - a.before);
}

/** Patch scores of heads by name, from the maps of `patch`. */
export function patchedHeads(body) {
  const found = new Map();
  for (const map of body.maps) {
    const kind = map.part === "cross heads" ? "cross" : map.stack === "encoder" ? "encoder" : "self";
    map.rows.forEach((layer, row) => map.columns.forEach((number, column) => { if (map.values[row][column] !== null) found.set(atlasName(kind, layer, number), map.values[row][column]); }));
  }
  return found;
}

/** The paths of what a colour needs, where it can be had; null where it does not apply. */
export function colourPath(app, run, colour) {
  const second = app.store.get("other");
  if (colour === "off") return effectsAt(app, run) === null ? null : `effects/zero?position=${effectsAt(app, run)}`;
  if (run.task === "embed" || (colour === "patch" && (!second || second.model !== run.model || [second, run].map((one) => (one.source || one.tokens).labels.length).reduce((a, b) => a - b)))) return null;
  const path = colour === "direct" ? `contributions?${askedOf(app, run)}` : `patch/${second?.run}/heads?${askedOf(app, run)}`;
  return app.source.has(`run/${run.run}/${path}`) ? path : null;
}

/** The number of each head for a colour: a map by name; null where nobody waits any more. */
export async function colourValues(app, run, colour, small, tell, wanted) {
  if (colour === "entropy") return new Map(small.layers.flatMap((layer, row) => small.entropy[row].map((bits, number) => [atlasName(small.kind, layer, number), bits])));
  const path = colourPath(app, run, colour);
  if (colour === "direct") return new Map((await app.source.get(`run/${run.run}/${path}`)).terms.filter((term) => term.head !== null).map((term) => [term.name, term.value]));
  const body = await app.source.job(run.run, path, tell, wanted);
  if (body === null) return null;
  return colour === "off" ? new Map(Object.entries(body.parts).map(([name, part]) => [name, part.kl])) : patchedHeads(body);
}

/** A bar that says how far a job is, with a button that ends it; `stopped()` is true then, until it begins again. */
export function jobProgress(words) {
  let stopped = false;
  const bar = el("progress", { max: 1, value: 0, "aria-label": words });
  const cancel = el("button", { type: "button", class: "cancel", onclick: () => { stopped = true; root.hidden = true; } }, "Cancel");
  const root = el("p", { class: "soft job", hidden: true }, `${words}… `, bar, " ", cancel);
  const tell = (done, total) => { root.hidden = stopped; bar.max = total || 1; bar.value = done; };
  return { root, tell, begin: () => { stopped = false; tell(0, 0); }, end: () => { root.hidden = true; }, stopped: () => stopped };
}

/** What the model says with and without, as a table. */
export function beforeAfter(rows, id) {
  const widest = Math.max(...rows.map((entry) => Math.max(entry.before, entry.after)), 1e-12);
  const bar = (value, kind) => el("div", { class: `bar ${kind}`, style: { width: `${(100 * value) / widest}%` } });
  const line = (entry) => {
    const change = entry.after - entry.before;
    return el(
      "tr",
      { "data-id": entry.id },
      el("th", { scope: "row", class: "mono token", dir: "auto" }, entry.label),
      el("td", { class: "number", "data-before": entry.before }, percent(entry.before)),
      el("td", { class: "number", "data-after": entry.after }, percent(entry.after)),
      el("td", { class: `number ${change < 0 ? "less" : "more"}` }, points(change)),
      el("td", { class: "fill" }, bar(entry.before, "before"), bar(entry.after, "after")),
    );
  };
  const head = el("tr", {}, ["choice", "before", "after", "change"].map((name, place) => el("th", { class: place ? "number" : null }, name)), el("th", {}, el("span", { class: "hidden-words" }, "bars")));
  return el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Before and after" }, el("table", { id }, el("thead", {}, head), el("tbody", {}, rows.map(line))));
}

/** A value as a cell shows it: few characters, and none where it is small beside the largest. */
export function cellText(value, most) {
  if (value === undefined || Math.abs(value) < 0.05 * most) return "";
  const text = (Math.abs(value) < 1 ? value.toFixed(2) : figure(value, 2)).replace("0.", ".").replace("-", "−");
  return text.length > 4 ? "" : text;
}
