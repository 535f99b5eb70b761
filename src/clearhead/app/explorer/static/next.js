// The next token: the distribution that the model's logits give under temperature, top-k, top-p and min-p.
// The logits are here; moving a slider asks nobody.

import { el, percent, replace } from "./dom.js";
import { asks } from "./query.js";
import { diceFrom, distributionOf, drawFrom, plainOf } from "./sampling.js";
import { columnOf, openRun } from "./selection.js";

const NEXT_ROWS = 20;
const NEXT_WORDS = {
  next: "What comes next, after the chosen token. Move the sliders: the model need not run again.",
  fill: "What may stand in the place of the chosen token.",
  classify: "Which class the whole input belongs to.",
  tag: "Which tag the chosen token gets.",
  span: "Where the answer begins, or ends.",
  embed: "",
};

const NEXT_TITLES = { next: "Next token", fill: "Fill in", classify: "Classes", tag: "Tags", span: "Answer", embed: "Output" };

/** A slider with its value in words: {root, input, set(value)}. */
export function nextSlider(name, label, least, most, step, value, write, onInput) {
  const shown = el("output", { for: `next-${name}`, class: "mono" }, write(value));
  const input = el("input", { type: "range", id: `next-${name}`, min: least, max: most, step, value, oninput: () => { shown.textContent = write(Number(input.value)); onInput(); } });
  const root = el("div", { class: "slider" }, el("label", { for: `next-${name}` }, `${label} `, shown), input);
  return { root, input, set(to) { input.value = to; shown.textContent = write(Number(input.value)); } };
}

function nextRow(entry, widest) {
  const bar = el("div", { class: "bar", style: { width: `${(100 * entry.p) / (widest || 1)}%` } });
  const marks = [entry.actual ? "follows in the text" : "", entry.gone ? `removed by ${entry.gone}` : ""].filter(Boolean).join(", ");
  return el(
    "tr",
    { "data-id": entry.id, "data-gone": entry.gone || null, class: entry.gone ? "gone" : null },
    el("th", { scope: "row", class: "mono token", dir: "auto", title: `id ${entry.id}` }, entry.label),
    el("td", { class: "number", "data-value": entry.p }, percent(entry.p)),
    el("td", { class: "number soft", "data-value": entry.plain }, percent(entry.plain)),
    el("td", { class: "fill" }, bar),
    el("td", { class: "soft" }, marks),
  );
}

export const nextSection = {
  id: "next",
  title: "Next token",
  hint: "The scores of the last layer, as probabilities, and how one of them is chosen.",
  applies: (model) => model.task !== "embed",

  mount(root, app) {
    const words = el("p", {});
    const where = el("div", { class: "next-where", id: "next-where" });
    const problem = el("p", { role: "alert", class: "problem" });
    const body = el("tbody", {});
    const kept = el("p", { class: "soft", id: "next-kept" });
    const history = el("ol", { class: "chips", id: "next-history", "aria-label": "Tokens chosen so far" });
    const find = el("input", { type: "text", id: "next-find", placeholder: "part of a token, or its id", oninput: () => draw() });
    const seed = el("input", { type: "number", id: "next-seed", value: 0, min: 0, step: 1, onchange: () => { dice = diceFrom(Number(seed.value)); } });
    let dice = diceFrom(0);
    let view = null;
    let logits = null;
    let plain = null;
    const written = [];

    const sliders = {
      temperature: nextSlider("temperature", "Temperature", 0, 2, 0.05, 1, (value) => (value < 1e-6 ? "0 (greedy)" : value.toFixed(2)), () => chosen()),
      topK: nextSlider("top-k", "Top-k", 0, 100, 1, 0, (value) => (value ? String(value) : "off"), () => chosen()),
      topP: nextSlider("top-p", "Top-p", 0.01, 1, 0.01, 1, (value) => (value >= 1 ? "off" : value.toFixed(2)), () => chosen()),
      minP: nextSlider("min-p", "Min-p", 0, 1, 0.01, 0, (value) => (value ? value.toFixed(2) : "off"), () => chosen()),
    };
    const options = () => Object.fromEntries(Object.entries(sliders).map(([name, slider]) => [name, Number(slider.input.value)]));
    const chosen = () => app.store.set("sampling", options());
    const reset = el("button", { type: "button", id: "next-reset", onclick: () => { sliders.temperature.set(1); sliders.topK.set(0); sliders.topP.set(1); sliders.minP.set(0); chosen(); } }, "The model's own distribution");
    const sample = el("button", { type: "button", id: "next-sample", class: "primary", onclick: () => append(drawFrom(distributionOf(logits, options()).probabilities, dice())) }, "Sample and append");
    const greedy = el("button", { type: "button", id: "next-greedy", onclick: () => append(distributionOf(logits, { temperature: 0 }).order[0]) }, "Append the likeliest");
    const back = el("button", { type: "button", id: "next-back", disabled: true, onclick: () => goBack() }, "Step back");
    const writing = el("div", { class: "row toolbar writing" }, sample, greedy, back, el("div", {}, el("label", { for: "next-seed" }, "Seed"), seed));
    const table = el(
      "div",
      { class: "wide", tabindex: "0", role: "group", "aria-label": "Choices" },
      el("table", { id: "next-table" }, el("thead", {}, el("tr", {}, el("th", {}, "choice"), el("th", { class: "number" }, "probability"), el("th", { class: "number" }, "without sliders"), el("th", {}, el("span", { class: "hidden-words" }, "bar")), el("th", {}, el("span", { class: "hidden-words" }, "remarks")))), body),
    );
    const finding = el("div", {}, el("label", { for: "next-find" }, "Find a token"), find);
    const panel = el("div", { class: "row" }, el("div", { class: "controls" }, Object.values(sliders).map((slider) => slider.root), reset, finding), el("div", { class: "grow" }, kept, table));
    replace(root, words, el("div", { class: "row toolbar" }, where, writing), history, problem, panel);

    function title(name) {
      document.getElementById("next-title").textContent = name;
      document.querySelector('nav a[data-view="next"]').textContent = name;
    }

    function nameOf(choice) {
      const place = view.top.indexOf(choice);
      return place >= 0 ? view.labels[place] : `id ${choice}`;
    }

    function wanted(result) {
      const search = find.value.trim();
      if (!search) return result.order.slice(0, NEXT_ROWS);
      const number = /^\d+$/.test(search) && Number(search) < logits.length ? [Number(search)] : [];
      const found = view.top.filter((_, place) => view.labels[place].includes(search.replaceAll(" ", "·")));
      return [...new Set([...number, ...found])].slice(0, NEXT_ROWS);
    }

    function draw() {
      if (!view) return;
      const asked = { next: `, after “${view.label}”`, fill: `, in the place of “${view.label}”`, tag: `, for “${view.label}”` };
      const { temperature, topK, topP, minP } = options();
      const result = temperature === 1 && !topK && topP >= 1 && !minP ? plain : distributionOf(logits, options());
      const entries = wanted(result).map((id) => ({ id, label: nameOf(id), p: result.probabilities[id], plain: plain.probabilities[id], gone: result.gone[id], actual: id === view.actual }));
      const widest = Math.max(...entries.map((entry) => entry.p), 1e-12);
      replace(body, entries.map((entry) => nextRow(entry, widest)));
      kept.textContent = app.store.get("run").task === "classify" ? `${logits.length.toLocaleString("en")} classes` : `${result.kept.toLocaleString("en")} of ${logits.length.toLocaleString("en")} choices ${result.kept === 1 ? "is" : "are"} left${asked[app.store.get("run").task] || ""}`;
      kept.dataset.value = String(result.kept);
    }

    async function append(choice) {
      const run = app.store.get("run");
      const p = distributionOf(logits, options()).probabilities[choice];
      const label = nameOf(choice);
      await app.read(`The model reads on after ${label}…`, () => app.source.post(`run/${run.run}/extend`, { token: choice }), (longer) => {
        written.push({ run, label, p, choice, after: longer.run });
        openRun(app, longer);
      });
    }

    function goBack() {
      const last = written.pop();
      if (last) openRun(app, last.run);
    }

    function showHistory() {
      back.disabled = !written.length;
      replace(history, written.map((entry) => el("li", { class: "chip", "data-id": entry.choice }, entry.label, el("small", { "data-value": entry.p }, percent(entry.p)))));
    }

    function failed(error) {
      view = null;
      replace(body);
      kept.textContent = "";
      problem.textContent = error.message;
    }

    const ask = asks(root, () => [app.store.get("run"), app.store.get("position")], failed);
    const load = () => ask(async (wait) => {
      const run = app.store.get("run");
      if (!run || run.task === "embed") return;
      problem.textContent = "";
      view = await wait(app.source.get(`run/${run.run}/next?position=${columnOf(run, app.store.get("position"))}`));
      plain = plainOf(view);
      logits = plain.logits;
      draw();
    });
    /** Follow the selection; what nobody sees is not drawn. */
    function look() {
      const run = app.store.get("run");
      if (run && run.task !== "embed") showWhere(run);
      if (root.offsetParent) load();
    }


    function showWhere(run) {
      if (run.columns.length < 2) return replace(where);
      const chosen = columnOf(run, app.store.get("position"));
      const shown = where.querySelector("select");
      if (shown && where.dataset.run === run.run) {
        shown.value = chosen; // the same element: whoever moves through it by keys stays in it
        return where;
      }
      where.dataset.run = run.run;
      const select = el("select", { id: "next-position", onchange: () => app.store.set("position", Number(select.value)) }, run.columns.map((label, place) => el("option", { value: place, selected: place === chosen }, `${place}  ${label}`)));
      return replace(where, el("label", { for: "next-position" }, "At the token"), select);
    }

    app.store.on("run", (run) => {
      if (!run) return;
      if (!written.some((entry) => entry.after === run.run) && !written.some((entry) => entry.run === run)) written.length = 0;
      const reads = run.task === "embed";
      words.textContent = reads ? "This model gives vectors and chooses nothing: there is no distribution to show." : NEXT_WORDS[run.task];
      panel.hidden = reads;
      writing.hidden = run.task !== "next" || !app.source.live;
      for (const slider of Object.values(sliders)) slider.root.hidden = !["next", "fill"].includes(run.task);
      reset.hidden = sliders.topK.root.hidden;
      panel.classList.toggle("no-sliders", reset.hidden);
      finding.hidden = !["next", "fill", "span"].includes(run.task);
      title(NEXT_TITLES[run.task]);
      sliders.topK.input.max = Math.min(200, app.store.get("model").vocab_size || run.columns.length);
      showHistory();
      look();
    });
    for (const key of ["position", "view"]) app.store.listen(key, look);
    app.store.listen("sampling", (given) => {
      for (const [name, slider] of Object.entries(sliders)) if (Number(slider.input.value) !== given[name]) slider.set(given[name]);
      draw();
    });
  },
};
