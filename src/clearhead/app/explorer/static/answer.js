// The answer, next to the text: the likeliest choices at the chosen token. One can be pinned, and compared with another.

import { el, percent, replace } from "./dom.js";
import { asks } from "./query.js";
import { plainOf } from "./sampling.js";
import { columnOf } from "./selection.js";

const ANSWER_ROWS = 6;
const ANSWER_ASKED = { next: (label) => ["After ", label, " comes"], fill: (label) => ["In the place of ", label], tag: (label) => ["The tag of ", label], span: (label) => ["The answer ", label], classify: (label) => ["The ", label, " is"] };

export const answerSection = {
  id: "answer",
  title: "Answer",
  hint: "Choose one to see where it came from; “compare with” asks why this one and not that.",
  applies: (model) => model.task !== "embed",

  mount(root, app) {
    const words = el("p", { id: "answer-words" });
    const list = el("ol", { id: "answer-list", class: "answers" });
    const more = el("p", { class: "soft", id: "answer-pinned" });
    replace(root, words, list, more);
    let body = null;

    function row(id, place, p, most, pinned) {
      const label = body.labels[place];
      const foil = app.store.get("foil") === id;
      const pin = el("button", { type: "button", class: "answer-pin", "data-id": id, "aria-pressed": String(id === pinned), onclick: () => pinAnswer(id) }, el("span", { class: "mono token", dir: "auto" }, label), el("span", { class: "number", "data-value": p }, percent(p)), el("span", { class: "bar", style: { width: `${(100 * p) / most}%` } }));
      const against = id === pinned ? null : el("button", { type: "button", class: "answer-foil", "data-foil": id, "aria-pressed": String(foil), "aria-label": `compare with ${label}`, onclick: () => app.store.set("foil", foil ? null : id) }, "compare with");
      return el("li", {}, pin, against);
    }

    function pinAnswer(id) {
      if (app.store.get("foil") === id) app.store.set("foil", null);
      app.store.set("target", app.store.get("target") === id ? null : id);
    }

    function draw() {
      if (!body) return;
      const { probabilities } = plainOf(body);
      const pinned = app.store.get("target") ?? body.top[0];
      const shown = body.top.slice(0, ANSWER_ROWS);
      const most = probabilities[body.top[0]] || 1;
      const [before, label, after] = (ANSWER_ASKED[app.store.get("run").task] || ((text) => [text]))(body.label);
      replace(words, before, label === undefined ? null : el("span", { class: "mono chip here" }, label), after || null);
      replace(list, shown.map((id, place) => row(id, place, probabilities[id], most, pinned)));
      const name = (id) => (body.top.includes(id) ? body.labels[body.top.indexOf(id)] : `id ${id}`);
      const foil = app.store.get("foil");
      more.textContent = foil === null ? `Explaining “${name(pinned)}”` : `Explaining “${name(pinned)}” rather than “${name(foil)}”`;
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
    for (const key of ["target", "foil"]) app.store.listen(key, draw);
  },
};
