// A guided tour: about ten steps along the forward pass, told with the tokens and the numbers of the reader's own input.

import { el, figure, percent, replace } from "./dom.js";
import { distributionOf } from "./sampling.js";
import { unpack } from "./source.js";

const quoted = (text) => `“${text.length > 40 ? `${text.slice(0, 39)}…` : text}”`;

/** The steps of the tour, each {section, title, words}; what a model does not have is left out. */
async function tourSteps(app) {
  const run = app.store.get("run");
  const model = app.store.get("model");
  const read = run.source || run.tokens;
  const middle = Math.min(Math.floor(read.labels.length / 2), read.labels.length - 1);
  const image = model.input === "patches";
  const trace = await app.source.get(`run/${run.run}/trace`);
  const find = (end) => trace.steps.find((step) => step.name.endsWith(end));
  const steps = [];
  const add = (section, title, ...words) => steps.push({ section, title, words: words.join(" ") });

  add("input", "Pieces", image ? `The image was cut into ${read.labels.length} patches and marks, read as a row.` : `Your text became ${read.labels.length} tokens. A model reads only these: number ${middle} is ${quoted(read.labels[middle])}${read.ids.length ? `, and to the model it is ${read.ids[middle]}` : ""}.`);
  const embed = find("front.tokens") || find("front.project");
  if (embed) add("flow", "Vectors", `Each of them becomes a vector of ${model.d_model} numbers: ${embed.shape.join(" × ")} in all. The first begins with ${embed.peek.first.slice(0, 3).map((value) => figure(value)).join(", ")}.`);
  add("flow", "A stream through blocks", `The vectors pass ${model.layers + (model.encoder_layers || 0)} blocks. Each block reads the stream and adds to it: ${trace.steps.length} steps in all, ${figure(trace.totals.flops)} multiplications and additions.`);
  const scores = find("attention.scores");
  if (scores) add("flow", "Queries meet keys", `In a block, each token asks and each token offers: their products are the scores, here ${scores.shape.join(" × ")}. ${scores.why}`);

  const kind = model.attentions[0].kind;
  const last = model.attentions.filter((entry) => entry.kind === kind).at(-1).layer;
  const attention = await app.source.get(`run/${run.run}/attention/${kind}/${last}`).catch(() => null);
  if (attention) {
    const { shape, values } = unpack(attention.pattern);
    const row = Math.min(middle, shape[1] - 1);
    const weights = Array.from(values.subarray(row * shape[2], (row + 1) * shape[2]));
    const best = weights.indexOf(Math.max(...weights));
    const role = (app.store.get("roles") || {})[attention.heads[0].name];
    add("attention", "Where it looks", `In head ${attention.heads[0].name}, ${quoted(attention.rows[row])} gives ${percent(weights[best])} of its attention to ${quoted(attention.columns[best])}.`, role ? `This head's role: ${role}.` : "", "Every square of the grid is such a head.");
  }
  const cross = model.attentions.find((entry) => entry.kind === "cross");
  if (cross) add("attention", "Two stacks", `The decoder looks at what the encoder has read, through cross-attention: ${run.source.labels.length} tokens there, ${run.tokens.labels.length} written here. The third tab shows it.`);
  const wide = find("feedforward.up") || find("feedforward.gate");
  if (wide) add("flow", "Each token by itself", `Then every token is widened to ${wide.shape.at(-1)} numbers, bent, and narrowed again: the feed-forward part, which holds most of the ${figure(model.parameters)} parameters of many models.`);
  if (run.task !== "embed") {
    const lens = await app.source.get(`run/${run.run}/lens`).catch(() => null);
    if (lens) {
      const column = Math.min(run.position, lens.columns.length - 1);
      const early = lens.top[0][column][0];
      const end = lens.top.at(-1)[column][0];
      add("lens", "Making up its mind", `If it stopped before the first block, it would say ${quoted(early.label)} with ${percent(early.p)}. After the last one it says ${quoted(end.label)} with ${percent(end.p)}.`);
    }
    const next = await app.source.get(`run/${run.run}/next?position=${run.position}`);
    const { probabilities, order } = distributionOf(unpack(next.logits).values, {});
    const second = order.length > 1 ? `, then ${quoted(next.labels[1])} with ${percent(probabilities[order[1]])}` : "";
    add("next", run.task === "next" ? "The next token" : "The answer", `All scores become probabilities: ${quoted(next.labels[0])} has ${percent(probabilities[order[0]])}${second}. ${run.task === "next" ? "Move the sliders to see how one of them is drawn." : ""}`);
    if (app.source.live) add("ablate", "What if a part were missing?", "Switch a head off and see how these probabilities move. Many heads can go and little changes; some cannot.");
  }
  add("cost", "What it takes", `All this needed ${figure(trace.totals.flops)} FLOPs for ${run.tokens.labels.length} ${image ? "places" : "tokens"}. Twice the length costs more than twice as much, because every token looks at every other.`);
  add("input", "Your turn", app.source.live ? "Change the text and run it again: every section follows." : "This was a recording. Open a model with clearhead explore to type your own.");
  return steps;
}

/** Begin the tour; Escape ends it. */
export async function startTour(app) {
  if (!app.store.get("run")) return app.say("The tour begins when the model has read something.");
  document.querySelector(".tour")?.remove();
  const steps = await app.busy("Preparing the tour…", () => tourSteps(app));
  if (!steps) return null;
  const before = document.activeElement;
  const title = el("h2", { id: "tour-title", tabindex: "-1" });
  const words = el("p", { id: "tour-words" });
  const place = el("p", { class: "soft", id: "tour-place" });
  const back = el("button", { type: "button", onclick: () => go(at - 1) }, "Back");
  const next = el("button", { type: "button", class: "primary", id: "tour-next", onclick: () => (at + 1 < steps.length ? go(at + 1) : end()) }, "Next");
  const card = el("div", { class: "tour", role: "dialog", "aria-labelledby": "tour-title", "aria-describedby": "tour-words" }, title, words, place, el("div", { class: "row" }, back, next, el("button", { type: "button", onclick: () => end() }, "End the tour")));
  let at = 0;

  function end() {
    card.remove();
    document.removeEventListener("keydown", onKey);
    for (const section of document.querySelectorAll("main > section")) section.classList.remove("toured");
    if (before instanceof HTMLElement) before.focus();
  }

  function go(to) {
    at = Math.max(0, to);
    const step = steps[at];
    replace(title, step.title);
    replace(words, step.words);
    replace(place, `${at + 1} of ${steps.length}`);
    back.disabled = at === 0;
    replace(next, at + 1 < steps.length ? "Next" : "Done");
    for (const section of document.querySelectorAll("main > section")) section.classList.toggle("toured", section.id === step.section);
    document.getElementById(step.section).scrollIntoView({ block: "start" });
    title.focus({ preventScroll: true });
  }

  function onKey(event) {
    if (event.key === "Escape") end();
    else if (event.key === "ArrowRight" && card.contains(document.activeElement)) go(Math.min(at + 1, steps.length - 1));
    else if (event.key === "ArrowLeft" && card.contains(document.activeElement)) go(at - 1);
  }

  document.addEventListener("keydown", onKey);
  document.body.append(card);
  go(0);
  return null;
}
