// A guided tour: about ten steps along the forward pass, told with the tokens and the numbers of the reader's own input.

import { el, figure, percent, replace } from "./dom.js";
import { plainOf } from "./sampling.js";
import { columnOf } from "./selection.js";
import { headPattern, lensAt } from "./source.js";

const quoted = (text) => `“${text.length > 40 ? `${text.slice(0, 39)}…` : text}”`;

/** The steps of the tour, each {section, title, words}; what a model does not have is left out. */
async function tourSteps(app) {
  const run = app.store.get("run");
  const model = app.store.get("model");
  const read = run.source || run.tokens;
  const position = columnOf(run, app.store.get("position"));
  const middle = Math.min(Math.floor(read.labels.length / 2), read.labels.length - 1);
  const image = model.input === "patches";
  const trace = await app.source.get(`run/${run.run}/trace`);
  const find = (end) => trace.steps.find((step) => step.name.endsWith(end));
  const blocks = model.layers + (model.encoder_layers || 0);
  const steps = [];
  const add = (section, title, words, step, pins = {}) => steps.push({ section, title, words, step: step ? step.name : null, pins });

  if (image) add("input", "Pieces", `The image was cut into ${read.special.filter((mark) => !mark).length} patches. The model reads them as a row${read.special.some(Boolean) ? `, after a mark called ${quoted(read.labels[0])}` : ""}: to it, a patch is what a word is to a model of text.`);
  else add("input", "Pieces", `Your text became ${read.labels.length} tokens, and these are all that the model reads. Number ${middle}, counted from 0, is ${quoted(read.labels[middle])}${read.ids.length ? `; to the model it is the number ${read.ids[middle]}` : ""}.`);
  const embed = find("front.tokens") || find("front.project");
  if (embed) add("flow", "Vectors", `Each ${image ? "patch" : "token"} becomes a vector of ${embed.shape.at(-1)} numbers${embed.peek.first.length ? `. The first one begins with ${embed.peek.first.slice(0, 3).map((value) => figure(value)).join(", ")}` : ""}. ${image ? "They are made from its pixels" : "They were learned in training: what the token means before its neighbours are known"}.`, embed);
  const placed = find("embedding.placed") || find("q_rotated") || find("biased");
  if (placed) add("flow", "Positions", `By itself a vector does not say where its ${image ? "patch" : "token"} stands. ${placed.name.endsWith("placed") ? "A second vector is added to it, one for each position" : placed.name.endsWith("q_rotated") ? "Queries and keys are turned by an angle that grows with the position" : "Scores fall or rise with the distance"}: so order counts.`, placed);
  const adds = find("_residual.add");
  add("flow", "A stream through blocks", `The vectors flow through ${blocks} ${blocks === 1 ? "block" : "blocks"}. Each block reads the stream and adds to it, at every plus on the thick line. It takes ${trace.steps.length} steps and ${figure(trace.totals.flops)} multiplications and additions in all.`, adds);
  const scores = find("attention.scores");
  if (scores) add("flow", "Queries meet keys", `In a block, each ${image ? "patch" : "token"} asks a question, its query, and offers an answer, its key. Their products are the scores, ${scores.shape.join(" × ")} numbers here: how well each query fits each key.`, scores);

  const softmax = find("attention.pattern");
  if (softmax) add("flow", "Softmax", `Softmax turns each row of scores into shares that sum to 1${softmax.peek.max === null ? "" : `; the largest one here is ${percent(softmax.peek.max)}`}. A token that may not be seen gets none.`, softmax);
  const mixed = find("attention.z");
  if (mixed) add("flow", "Values are mixed", `Each ${image ? "patch" : "token"} also has a value. A head's result is the sum of all values, each times its share: ${mixed.shape.at(-1)} numbers for each head.`, mixed);

  const kind = model.attentions.some((entry) => entry.kind === "self") ? "self" : model.attentions[0].kind; // whose rows are tokens of the selection
  const last = model.attentions.filter((entry) => entry.kind === kind && entry.pattern !== false).at(-1);
  const found = last ? await headPattern(app.source, run, kind, last.layer, 0).catch(() => null) : null;
  if (found) {
    const { body: attention, matrix } = found;
    const [row, width] = [Math.min(middle, attention.rows.length - 1), attention.columns.length];
    const weights = Array.from(matrix.subarray(row * width, (row + 1) * width));
    const best = weights.indexOf(Math.max(...weights));
    const role = (app.store.get("roles") || {})[attention.heads[0].name];
    const mostly = attention.aggregated > 1 ? `Around ${quoted(attention.rows[row])}, most attention goes to the tokens around ${quoted(attention.columns[best])}.` : `In head ${attention.heads[0].name}, ${quoted(attention.rows[row])} gives ${percent(weights[best])} of its attention to ${best === row && kind !== "cross" ? "itself" : quoted(attention.columns[best])}.`;
    add("attention", "Where it looks", `${mostly}${role ? ` The role of this head: ${role}.` : ""} Every small square is such a head; choose one to see it large.`, null, { head: attention.heads[0].name, position: row * attention.aggregated });
  }
  const cross = model.attentions.find((entry) => entry.kind === "cross");
  if (cross) add("attention", "Two stacks", `The decoder looks at what the encoder has read, through cross-attention: ${run.source.labels.length} tokens there, ${run.tokens.labels.length} here.`, null, { head: `cross.${cross.layer}.0` });
  const wide = find("feedforward.up") || find("feedforward.gate");
  const within = trace.steps.filter((step) => step.name.includes("feedforward")).reduce((sum, step) => sum + step.parameters, 0);
  if (wide) add("flow", "Each by itself", `Then every ${image ? "patch" : "token"} by itself is widened to ${wide.shape.at(-1)} numbers, bent, and narrowed again. These feed-forward parts hold ${percent(within / trace.totals.parameters)} of the parameters.`, wide);
  if (run.task !== "embed") {
    const column = Math.min(position, run.columns.length - 1);
    const lens = await lensAt(app.source, run, column).catch(() => null);
    if (lens) {
      const early = lens.top(0, column)[0];
      const end = lens.top(lens.layers.length - 1, column)[0];
      add("lens", "Making up its mind", `The lens asks the model for its answer after every layer. Before the first block it would say ${quoted(early.label)}, with ${percent(early.p)}; after the last one it says ${quoted(end.label)}, with ${percent(end.p)}.`);
    }
    const next = await app.source.get(`run/${run.run}/next?position=${position}`);
    const { probabilities, order } = plainOf(next);
    const second = order.length > 1 ? `, then ${quoted(next.labels[1])} with ${percent(probabilities[order[1]])}` : "";
    const more = { next: " Move the sliders to see how one of them is drawn, and append it.", fill: ` This is for the place of ${quoted(next.label)}; choose another above the table.`, tag: ` This is for ${quoted(next.label)}; choose another above the table.` }[run.task] || "";
    add("next", run.task === "next" ? "The next token" : "The answer", `The last scores become probabilities: ${quoted(next.labels[0])} has ${percent(probabilities[order[0]])}${second}.${more}`);
    if (app.source.live && run.task !== "span") add("ablate", "What if a part were missing?", "Switch a head off and see how these probabilities move. Many heads can go and little changes; some cannot.");
  } else add("input", "Vectors, not words", `This model makes no choice: its answer is the vectors themselves, ${model.d_model} numbers each. Where it was trained for that, texts that mean alike get vectors that lie close together.`);
  add("cost", "What it takes", `All this needed ${figure(trace.totals.flops)} FLOPs for ${run.source ? `${run.source.labels.length} tokens read and ${run.tokens.labels.length} written` : `${run.tokens.labels.length} ${image ? "patches and marks" : "tokens"}`}. Twice as many cost more than twice as much, because each looks at ${model.family === "decoder" ? "all before it" : "all others"}.`);
  add("input", "Your turn", app.source.live ? `${image ? "Choose another image" : "Change the text and run it again"}: every section follows.` : "This was a recording. Open a model with clearhead explore to type your own.");
  return steps;
}

/** Begin the tour; Escape ends it. */
export async function startTour(app) {
  if (!app.store.get("run")) return app.say("The tour begins when the model has read something.");
  document.querySelector(".tour")?.remove();
  let steps = null;
  await app.read("Preparing the tour…", () => tourSteps(app), (made) => { steps = made; });
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
    app.store.set("step", null);
    for (const section of document.querySelectorAll("main section")) section.classList.remove("toured");
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
    for (const section of document.querySelectorAll("main section")) section.classList.toggle("toured", section.id === step.section);
    if (step.section !== "input") app.open(step.section);
    for (const [key, value] of Object.entries(step.pins)) app.store.set(key, value);
    document.getElementById(step.section).before(card); // above what it explains, never over it
    app.store.set("step", step.step);
    card.scrollIntoView({ block: "start" });
    title.focus({ preventScroll: true });
  }

  function onKey(event) {
    if (event.key === "Escape") end();
    else if (event.key === "ArrowRight" && card.contains(document.activeElement)) go(Math.min(at + 1, steps.length - 1));
    else if (event.key === "ArrowLeft" && card.contains(document.activeElement)) go(at - 1);
  }

  document.addEventListener("keydown", onKey);
  go(0);
  return null;
}
