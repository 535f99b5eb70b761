// Two texts: the cosine of their vectors, and of every token of one with every token of the other.

import { css, inkOn, signedColour } from "./colour.js";
import { el, figure, replace, tokenText } from "./dom.js";
import { scaleBar } from "./heatmap.js";
import { asks, whenNear } from "./query.js";
import { unpack } from "./source.js";

const SIMILAR_MOST = 40; // tokens a side

export const similarSection = {
  id: "similar",
  title: "Similarity",
  hint: "How alike the two texts are to this model, and which tokens stand close to which: cosines of the last states.",
  applies: (model, live, source, run) => model.task === "embed" && model.family === "encoder" && model.input === "tokens" && model.tokenizer && (live || source.list(`run/${run?.run || "recorded"}/similar`).length > 0),

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const words = el("p", { class: "similar-cosine", id: "similar-words" });
    const scale = el("div", { id: "similar-scale" });
    const grid = el("div", { class: "wide", id: "similar-grid", tabindex: "0", role: "group", "aria-label": "Token by token" });
    replace(root, problem, words, scale, grid);
    let body = null;

    function draw() {
      if (!body) return;
      const { shape, values } = unpack(body.states);
      const [rows, columns] = shape.map((count) => Math.min(count, SIMILAR_MOST));
      const cell = (row, column) => {
        const value = values[row * shape[1] + column];
        const colour = signedColour(value);
        return el("td", { "data-value": value, title: `${body.tokens[0][row]} and ${body.tokens[1][column]}: ${figure(value)}`, style: { background: css(colour), color: inkOn(colour) } }, value.toFixed(2));
      };
      replace(words, "Cosine of the two texts: ", el("strong", { class: "mono", id: "similar-cosine", "data-value": body.cosine }, body.cosine.toFixed(4)));
      replace(scale, scaleBar("cosine", -1, 1, true));
      const head = el("tr", {}, el("th", { class: "corner" }, el("span", { class: "hidden-words" }, "token")), Array.from({ length: columns }, (_, column) => el("th", { scope: "col" }, tokenText(body.tokens[1][column], "mono token", 9))));
      replace(grid, el("table", { class: "similar" }, el("thead", {}, head), el("tbody", {}, Array.from({ length: rows }, (_, row) => el("tr", {}, el("th", { scope: "row", class: "corner" }, tokenText(body.tokens[0][row], "mono token", 9)), Array.from({ length: columns }, (__, column) => cell(row, column)))))), shape[0] > rows || shape[1] > columns ? el("p", { class: "soft" }, `The first ${SIMILAR_MOST} tokens of each text.`) : null);
    }

    const ask = asks(root, () => [app.store.get("run")], (error) => { problem.textContent = error.message; });
    whenNear(root, app, () => ask(async (wait) => {
      const run = app.store.get("run");
      problem.textContent = "";
      for (const node of [words, scale, grid]) replace(node);
      body = null;
      if (!run?.pair) return replace(words, "Type a second text at the left to compare this one with.");
      body = await wait(app.source.get(`run/${run.run}/similar`));
      return draw();
    }));
    app.store.listen("theme", draw);
  },
};
