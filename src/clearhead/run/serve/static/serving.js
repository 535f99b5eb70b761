// The page of a server: it asks once a second what the server does, and draws it.

import { el, figure, replace, svg } from "./dom.js";

const EVERY = 1000; // milliseconds
const KEPT = 120; // points of the curve
const history = new Map(); // by model: {at, tokens} of the latest looks

const byId = (id) => document.getElementById(id);
const seconds = (value) => (value === null ? "–" : `${value.toFixed(2)} s`);
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** New tokens in a second between each two looks. */
function speeds(points) {
  return points.slice(1).map((point, place) => Math.max(0, (1000 * (point.tokens - points[place].tokens)) / (point.at - points[place].at)));
}

function tile(name, value, more) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, ` ${more}`) : null));
}

function curve(rates) {
  const most = Math.max(...rates, 1);
  const x = (place) => KEPT - rates.length + place;
  const line = rates.map((rate, place) => `L${x(place)} ${(38 - (36 * rate) / most).toFixed(2)}`).join("");
  const path = rates.length ? `M${x(0)} 40${line}L${x(rates.length - 1)} 40Z` : "";
  return svg("svg", { class: "speed", viewBox: `0 0 ${KEPT} 40`, preserveAspectRatio: "none", role: "img", "aria-label": "new tokens per second" }, svg("path", { d: path }));
}

function bar(group) {
  const total = group.used + group.kept + group.free;
  const part = (name) => el("span", { class: name, style: { width: `${(100 * group[name]) / total}%` } });
  return [
    el("div", { class: "blocks", role: "img", "aria-label": `${group.used} of ${total} blocks in use` }, part("used"), part("kept")),
    el("p", { class: "caption" }, `${group.name}: ${group.used} of ${figure(total)} blocks of ${group.tokens} tokens in use, ${group.kept} kept for prompts that begin alike`),
  ];
}

function table(caption, names, rows) {
  if (!rows.length) return null;
  const head = el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)));
  return [el("h3", {}, caption), el("div", { class: "scroll wide", tabindex: "0", role: "region", "aria-label": caption }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows)))];
}

const row = (...cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell)));

function draw(name, state, place) {
  const points = history.get(name) || [];
  points.push({ at: performance.now(), tokens: state.totals.new_tokens });
  history.set(name, points.slice(-KEPT - 1));
  const rates = speeds(history.get(name));
  const { counts, totals } = state;
  const going = [...state.running, ...state.waiting].map((job) => row(String(job.number), job.written || job.read ? "runs" : "waits", `${job.read > job.prompt ? job.prompt : job.read} / ${job.prompt}`, `${job.written} / ${job.most}`));
  const done = state.finished.map((job) => row(el("a", { href: `/open/${place}/${job.number}` }, `${job.number}: look inside`), `${job.prompt}`, `${job.written}`, seconds(job.first), seconds(job.seconds), job.reason));
  return el("section", { class: "model" },
    el("h2", {}, name, state.closed ? " (ends)" : state.well ? "" : " (does not move)"),
    el("dl", { class: "figures" },
      tile("run", figure(counts.running), `of ${figure(counts.most_running)}`),
      tile("wait", figure(counts.waiting), `of ${figure(counts.most_waiting)}`),
      tile("new tokens", figure(rates.length ? rates[rates.length - 1] : 0), "per second"),
      tile("tokens written", figure(totals.new_tokens)),
      tile("tokens read", figure(totals.prompt_tokens)),
      tile("found in the cache", share(totals.prefix_found, totals.prefix_asked)),
      tile("preempted", figure(totals.preempted))),
    el("h3", {}, "New tokens per second"), curve(rates),
    state.blocks.length ? [el("h3", {}, "Blocks"), state.blocks.map(bar)] : null,
    table("Now", ["request", "state", "read", "written"], going),
    table("Finished", ["request", "read", "written", "first token", "whole", "ended by"], done));
}

async function look() {
  const status = byId("status");
  try {
    const answer = await fetch("/page/state");
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const state = await answer.json();
    const focused = document.activeElement?.getAttribute?.("href");
    replace(byId("models"), Object.entries(state).map(([name, one], place) => draw(name, one, place)));
    if (focused) document.querySelector(`a[href="${CSS.escape(focused).replace(/\\\//g, "/")}"]`)?.focus();
    status.textContent = "";
    status.className = "";
  } catch (error) {
    status.textContent = error instanceof TypeError ? "the server does not answer" : error.message;
    status.className = "error";
  }
}

byId("address").textContent = `serves at ${location.origin}/v1`;
look();
setInterval(look, EVERY);
