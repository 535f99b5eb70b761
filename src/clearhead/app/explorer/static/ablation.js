// What each word, or each patch, is worth to the pinned answer: left out, and by gradient × input.

import { css, signedColour } from "./colour.js";
import { el, figure, replace } from "./dom.js";
import { glossed } from "./glossary.js";
import { patchImage } from "./image.js";
import { asks, whenNear } from "./query.js";
import { columnOf } from "./selection.js";

const WORTH_HALF = 50; // % of a track on each side of zero
const WORTH_SHOWN = 40; // words in the table, those that count most

/** A number as a bar to the left or to the right of the middle. */
function worthBar(value, most) {
  const reach = (WORTH_HALF * Math.abs(value)) / most;
  return el("td", { class: "worth-cell" }, el("span", { class: "worth-track" }, el("span", { class: "worth-bar", style: { left: `${value < 0 ? WORTH_HALF - reach : WORTH_HALF}%`, width: `${reach}%`, background: css(signedColour(value < 0 ? -0.85 : 0.85)) } })), el("span", { class: "number", "data-value": value }, figure(value)));
}

export const worthSection = {
  id: "worth",
  title: "Words",
  hint: "What the answer loses when a word is left out, next to a first-order estimate of the same from one backward pass. Blue speaks for the answer, red against it.",
  applies: (model) => ["classify", "tag", "fill", "span"].includes(model.task) && model.family !== "encoder-decoder",

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const words = el("p", { id: "worth-words" });
    const pictures = el("div", { class: "row", id: "worth-pictures" });
    const table = el("div", { class: "wide", id: "worth-table", tabindex: "0", role: "group", "aria-label": "What each part is worth" });
    replace(root, problem, words, pictures, table);
    let body = null;

    function draw() {
      const run = app.store.get("run");
      if (!body || !run) return;
      const image = Boolean(run.picture);
      const name = el("span", { class: "mono", dir: "auto" }, body.choice);
      replace(words, "The logit of ", name, ` less the mean of all is ${figure(body.logit)}. A ${image ? "patch" : "word"} is left out by putting `, el("span", { class: "mono" }, body.without), " in its place.");
      replace(pictures, image ? [picture(run, body.dropped, "left out"), picture(run, body.gradient, "gradient × input")] : null);
      const most = (values) => Math.max(...values.map(Math.abs), 1e-9);
      const [left, right] = [most(body.dropped), most(body.gradient)];
      const order = body.units.map((_, place) => place);
      const shown = image || order.length > WORTH_SHOWN ? order.sort((a, b) => Math.abs(body.dropped[b]) - Math.abs(body.dropped[a])).slice(0, image ? 12 : WORTH_SHOWN) : order;
      const rows = shown.map((place) => el("tr", { "data-unit": body.units[place] }, el("th", { scope: "row", class: "mono token", dir: "auto" }, body.units[place]), worthBar(body.dropped[place], left), worthBar(body.gradient[place], right)));
      const title = (text) => el("th", { class: "worth-head" }, text);
      replace(table, el("table", { class: "worth-table" }, el("thead", {}, el("tr", {}, el("th", {}, image ? "patch" : "word"), title("lost without it"), title("gradient × input"))), el("tbody", {}, rows)), shown.length < body.units.length ? el("p", { class: "soft" }, `The ${shown.length} that count most of ${body.units.length}.`) : null);
    }

    function picture(run, values, name) {
      const drawn = patchImage(run.picture, run.tokens.labels, `The image; each patch by what it is worth, ${name}`);
      const byToken = new Array(run.tokens.labels.length).fill(0);
      body.places.forEach((places, unit) => { for (const place of places) byToken[place] = values[unit]; });
      drawn.draw(byToken, -1, true);
      return el("figure", {}, drawn.canvas, el("figcaption", { class: "soft" }, name));
    }

    function failed(error) {
      body = null;
      for (const node of [words, pictures, table]) replace(node);
      problem.textContent = error.message;
    }

    const ask = asks(root, () => ["run", "position", "target"].map((key) => app.store.get(key)), failed);
    const load = () => ask(async (wait) => {
      const [run, target] = [app.store.get("run"), app.store.get("target")];
      problem.textContent = "";
      if (!run) return;
      const asked = `position=${columnOf(run, app.store.get("position"))}${target === null ? "" : `&token=${target}`}`;
      body = await wait(app.source.get(`run/${run.run}/occlusion?${asked}`));
      draw();
    });

    app.store.on("model", (model) => {
      const name = model.input === "patches" ? "Patches" : "Words";
      if (model.input === "patches") root.parentElement.querySelector(".hint").replaceChildren(...glossed("What the answer loses when a patch is left out, next to a first-order estimate of the same from one backward pass. Blue speaks for the answer, red against it."));
      document.querySelectorAll('#worth-title, nav a[data-view="worth"]').forEach((node) => { node.textContent = name; });
    });
    whenNear(root, app, load);
    for (const key of ["position", "target"]) app.store.listen(key, () => { if (root.offsetParent) load(); });
    app.store.listen("theme", draw);
  },
};
