// Denoising: how a diffusion model writes. All new tokens begin as masks, and each step unmasks some of them.

import { amountColour, css, inkOn } from "./colour.js";
import { el, percent, replace, tokenText } from "./dom.js";
import { scaleBar } from "./heatmap.js";
import { asks, whenNear } from "./query.js";

const DENOISE_TOKENS = [8, 16, 32, 64];
const DENOISE_STEPS = [2, 4, 8, 16, 32, 64];
const DENOISE_PAUSE = 700; // milliseconds that a step is shown for
const DENOISE_MASK = "▒▒";
const DENOISE_BEFORE = 80; // characters of the text that are shown before the new tokens

export const denoiseSection = {
  id: "denoising",
  title: "Denoising",
  hint: "How this model writes on after your text: new tokens begin as masks, and each step keeps the tokens with the highest probability.",
  applies: (model, live, source, run) => model.denoises && (live || source.has(`run/${run?.run || "recorded"}/denoising`)),

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const choice = (id, label, numbers, chosen) => el("div", {}, el("label", { for: id }, label), el("select", { id, onchange: () => load() }, numbers.map((number) => el("option", { value: number, selected: number === chosen }, number))));
    const asked = el("div", { class: "row toolbar", hidden: !app.source.live }, choice("denoising-tokens", "New tokens", DENOISE_TOKENS, 16), choice("denoising-steps", "Steps of each block", DENOISE_STEPS, 8));
    const button = (id, words, onclick, more = {}) => el("button", { type: "button", id, onclick, ...more }, words);
    const back = button("denoising-back", "Previous", () => go(at - 1));
    const play = button("denoising-play", "Play", () => (timer ? pause() : start()), { class: "primary" });
    const next = button("denoising-next", "Next", () => go(at + 1));
    const place = el("span", { class: "soft", id: "denoising-place" });
    const text = el("p", { class: "denoise-text", id: "denoising-text" });
    const grid = el("div", { class: "wide", id: "denoising-grid", tabindex: "0", role: "group", "aria-label": "Step by step" });
    const scale = el("div");
    replace(root, asked, problem, el("div", { class: "row play-buttons" }, back, play, next, place), text, scale, grid);
    let body = null;
    let made = []; // of each new token: {step, label, p}
    let [at, timer] = [0, 0];

    /** A token as it stands after a step, in an element: a mask, or coloured by its probability where that step, or any, has kept it. */
    function shown(tag, column, step, coloured) {
      const token = made[column];
      if (!token || token.step > step) return el(tag, { class: "masked", title: "masked" }, DENOISE_MASK);
      const fresh = token.step === step;
      const colour = amountColour(token.p);
      const style = fresh || coloured ? { background: css(colour), color: inkOn(colour) } : {};
      return el(tag, { class: fresh ? "fresh" : null, "data-value": token.p, title: `${token.label}: ${percent(token.p)}, kept by step ${token.step + 1}`, style }, tokenText(token.label, "mono token", 9));
    }

    /** Show the text as it is after a step, and the steps until then. */
    function go(step) {
      if (!body) return;
      at = Math.min(Math.max(step, 0), body.steps.length - 1);
      [back.disabled, next.disabled] = [at === 0, at === body.steps.length - 1];
      replace(place, `step ${at + 1} of ${body.steps.length}`);
      replace(text, el("span", { class: "soft" }, app.store.get("run").tokens.text.slice(-DENOISE_BEFORE)), made.map((_, column) => [" ", shown("span", column, at, true)]));
      grid.querySelectorAll("tbody tr").forEach((row, number) => { row.className = number > at ? "later" : ""; });
    }

    function draw() {
      if (!body) return;
      made = new Array(body.tokens).fill(null);
      body.steps.forEach((one, step) => one.positions.forEach((position, i) => { made[position - body.start] = { step, label: one.labels[i], p: one.confidence[i] }; }));
      const head = el("tr", {}, el("th", { class: "corner" }, "step"), made.map((_, column) => el("th", { scope: "col" }, column + 1)));
      const rows = body.steps.map((_, step) => el("tr", { onclick: () => { pause(); go(step); } }, el("th", { scope: "row", class: "corner" }, step + 1), made.map((__, column) => shown("td", column, step, false))));
      replace(grid, el("table", { class: "lens denoise" }, el("thead", {}, head), el("tbody", {}, rows)));
      replace(scale, scaleBar("probability"));
      go(at);
    }

    function start() {
      if (!body) return;
      if (at === body.steps.length - 1) go(0);
      play.textContent = "Pause";
      timer = setInterval(() => { if (at < body.steps.length - 1 && root.offsetParent) go(at + 1); else pause(); }, DENOISE_PAUSE);
    }

    function pause() {
      clearInterval(timer);
      timer = 0;
      play.textContent = "Play";
    }

    const query = () => (app.source.live ? `?tokens=${root.querySelector("#denoising-tokens").value}&steps=${root.querySelector("#denoising-steps").value}` : "");
    const ask = asks(root, () => [app.store.get("run"), query()], (error) => { problem.textContent = error.message; });
    const load = () => ask(async (wait) => {
      pause();
      problem.textContent = "";
      body = null;
      for (const node of [place, text, scale, grid]) replace(node);
      body = await wait(app.source.get(`run/${app.store.get("run").run}/denoising${query()}`));
      at = body.steps.length - 1;
      draw();
    });
    whenNear(root, app, load);
    app.store.listen("theme", draw);
  },
};
