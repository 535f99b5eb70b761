// The answer, next to the text: the likeliest choices at the chosen token. One can be pinned, and compared with another.

import { el, percent, replace, roving } from "./dom.js";
import { term } from "./glossary.js";
import { nextSlider } from "./next.js";
import { asks } from "./query.js";
import { diceFrom, distributionOf, drawFrom, plainOf } from "./sampling.js";
import { columnOf, openRun } from "./selection.js";

const ANSWER_ROWS = 6;
const ANSWER_WRITES = 12; // tokens that "Continue" writes
const ANSWER_ASKED = { next: (label) => ["After ", label, " comes"], fill: (label) => ["In the place of ", label], tag: (label) => ["The tag of ", label], span: (label) => ["The answer ", label], classify: (label) => ["The ", label, " is"] };

export const answerSection = {
  id: "answer",
  title: "Answer",
  hint: "Choose one to explain it; “compare with” asks why not another.",
  applies: (model) => model.task !== "embed",

  mount(root, app) {
    const words = el("p", { id: "answer-words" });
    const list = el("ol", { id: "answer-list", class: "answers" });
    const more = el("p", { class: "soft", id: "answer-pinned" });
    const set = (change) => app.store.set("sampling", { ...app.store.get("sampling"), ...change });
    const off = (written) => (value) => (value ? written(value) : "off");
    const sliders = {
      temperature: nextSlider("temperature-here", "Temperature", 0, 2, 0.05, 1, (value) => (value < 1e-6 ? "0" : value.toFixed(2)), () => set({ temperature: Number(sliders.temperature.input.value) })),
      topK: nextSlider("top-k-here", "Top-k", 0, 100, 1, 0, off(String), () => set({ topK: Number(sliders.topK.input.value) })),
      topP: nextSlider("top-p-here", "Top-p", 0.01, 1, 0.01, 1, (value) => (value >= 1 ? "off" : value.toFixed(2)), () => set({ topP: Number(sliders.topP.input.value) })),
    };
    const go = el("button", { type: "button", id: "answer-continue", onclick: () => writeOn() }, "Continue");
    const sampling = el("details", { id: "answer-sampling", open: matchMedia("(min-width: 62rem)").matches }, el("summary", {}, "Sampling"), el("div", { class: "answer-sliders" }, Object.values(sliders).map((slider) => slider.root)), el("p", { class: "soft" }, term("temperature", "Temperature"), ", ", term("top-k"), " and ", term("top-p"), " decide how boldly the next token is drawn."));
    replace(root, el("div", { class: "row answer-head" }, words, go), list, more, sampling);
    let writing = false;
    const dice = diceFrom(0);
    roving(list, "button");
    let body = null;

    function row(id, place, p, most, pinned, gone) {
      const label = body.labels[place];
      const foil = app.store.get("foil") === id;
      const pin = el("button", { type: "button", class: `answer-pin${gone ? " gone" : ""}`, title: gone ? `removed by ${gone}` : null, "data-id": id, "aria-pressed": String(id === pinned), onclick: () => pinAnswer(id) }, el("span", { class: "mono token", dir: "auto" }, label), el("span", { class: "number", "data-value": p }, percent(p)), el("span", { class: "bar", style: { width: `${(100 * p) / most}%` } }));
      const against = id === pinned ? null : el("button", { type: "button", class: "answer-foil", "data-foil": id, "aria-pressed": String(foil), "aria-label": `compare with ${label}`, onclick: () => app.store.set("foil", foil ? null : id) }, "compare with");
      return el("li", {}, pin, against);
    }

    function pinAnswer(id) {
      if (app.store.get("foil") === id) app.store.set("foil", null);
      app.store.set("target", app.store.get("target") === id ? null : id);
    }

    function draw() {
      if (!body) return;
      const { logits } = plainOf(body);
      const { probabilities, gone } = distributionOf(logits, sampled() ? app.store.get("sampling") : {});
      const pinned = app.store.get("target") ?? body.top[0];
      const shown = body.top.slice(0, ANSWER_ROWS);
      const most = probabilities[body.top[0]] || 1;
      const [before, label, after] = (ANSWER_ASKED[app.store.get("run").task] || ((text) => [text]))(body.label);
      replace(words, before, label === undefined ? null : el("span", { class: "mono chip here" }, label), after || null);
      replace(list, shown.map((id, place) => row(id, place, probabilities[id], most, pinned, gone[id])));
      const name = (id) => (body.top.includes(id) ? body.labels[body.top.indexOf(id)] : `id ${id}`);
      const foil = app.store.get("foil");
      more.textContent = foil === null ? `Explaining “${name(pinned)}”` : `Explaining “${name(pinned)}” rather than “${name(foil)}”`;
    }

    const sampled = () => ["next", "fill"].includes(app.store.get("run")?.task);

    /** Draw a token, append it, and so on, until it is stopped or somebody chooses another text. */
    async function writeOn() {
      writing = !writing;
      go.textContent = writing ? "Stop" : "Continue";
      try {
        for (let count = 0; writing && count < ANSWER_WRITES; count++) {
          const run = app.store.get("run");
          const next = await app.source.get(`run/${run.run}/next?position=${run.columns.length - 1}`);
          const choice = drawFrom(distributionOf(plainOf(next).logits, app.store.get("sampling")).probabilities, dice());
          const longer = await app.source.post(`run/${run.run}/extend`, { token: choice });
          if (app.store.get("run") !== run) break;
          openRun(app, longer);
        }
      } catch (error) {
        if (!error.dropped) more.textContent = error.message;
      }
      writing = false;
      go.textContent = "Continue";
    }

    function failed(error) {
      body = null;
      for (const node of [words, list]) replace(node);
      more.textContent = error.message;
    }

    const ask = asks(root, () => [app.store.get("run"), app.store.get("position")], failed);
    const load = () => ask(async (wait) => {
      const run = app.store.get("run");
      if (!run || run.task === "embed") return;
      body = await wait(app.source.get(`run/${run.run}/next?position=${columnOf(run, app.store.get("position"))}`));
      draw();
    });

    for (const key of ["run", "position"]) app.store.listen(key, load);
    app.store.listen("run", (run) => {
      go.hidden = !app.source.live || run?.task !== "next";
      sampling.hidden = !sampled();
    });
    app.store.listen("sampling", (given) => {
      for (const [name, slider] of Object.entries(sliders)) if (Number(slider.input.value) !== given[name]) slider.set(given[name]);
      draw();
    });
    for (const key of ["target", "foil"]) app.store.listen(key, draw);
  },
};
