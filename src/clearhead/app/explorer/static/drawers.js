// Neurons and more: the neurons that matter to the pinned answer, steering, the token among its neighbours, and every analysis of a prompt as its command shows it.

import { css, signedColour } from "./colour.js";
import { el, figure, percent, replace, svg } from "./dom.js";
import { asks } from "./query.js";
import { saveButtons } from "./picture.js";
import { askedOf } from "./selection.js";

/** A drawer: opened, it asks; `load(run, body, wait)` fills it for each selection. */
function drawer(app, root, { id, title, words, keys, load, path = `${id}?` }) {
  const body = el("div", { class: "body" });
  const problem = el("p", { role: "alert", class: "problem" });
  const box = el("details", { id: `drawer-${id}`, class: "drawer", open: id === "neurons" }, el("summary", {}, title), el("p", { class: "soft" }, words), problem, body);
  const ask = asks(body, () => ["run", ...keys].map((key) => app.store.get(key)), (error) => { replace(body); problem.textContent = error.message; });
  const look = () => {
    const run = app.store.get("run");
    if (run && !app.source.live) box.hidden = !app.source.list(`run/${run.run}/${path}`).length; // a file shows what it has
    if (!run || box.hidden || !box.open || !root.offsetParent) return;
    problem.textContent = "";
    ask((wait) => load(app.store.get("run"), body, wait));
  };
  box.addEventListener("toggle", look);
  for (const key of ["run", "view", ...keys]) app.store.listen(key, look);
  return box;
}

/** Neurons, each with what it adds here, what it promotes and what fires it. */
async function showNeurons(app, run, body, wait) {
  const layer = Number(app.store.get("neuronLayer")) < app.store.get("model").layers ? app.store.get("neuronLayer") : null;
  const path = (own) => `run/${run.run}/neurons?${askedOf(app, run)}${own === null ? "" : `&layer=${own}`}`;
  const found = await wait(app.source.get(path(app.source.has(path(layer)) ? layer : null)));
  const layers = Array.from({ length: app.store.get("model").layers }, (_, number) => String(number)).filter((number) => app.source.has(path(number)));
  const choice = el("select", { id: "neurons-layer", onchange: () => app.store.set("neuronLayer", choice.value || null) }, el("option", { value: "" }, "all feed-forwards"), layers.map((number) => el("option", { value: number, selected: number === layer }, `feed-forward ${number}`)));
  const fired = ({ before, token, after }) => el("li", {}, el("span", { class: "soft" }, before.slice(-40)), el("mark", {}, token), el("span", { class: "soft" }, after.slice(0, 30)));
  const row = (one) => el("tr", { "data-neuron": one.name }, el("th", { scope: "row", class: "mono" }, one.name), el("td", { class: "number", "data-value": one.value }, el("span", { class: "dot", style: { background: css(signedColour(one.value < 0 ? -0.85 : 0.85)) } }), figure(one.value)), el("td", { class: "mono neuron-words", dir: "auto" }, one.promotes.join("  ") || "–"), el("td", {}, one.fired.length ? el("ul", { class: "plain" }, one.fired.map(fired)) : "–"));
  replace(body, layers.length ? el("div", { class: "row toolbar" }, el("label", { for: "neurons-layer" }, "Of"), choice) : null, el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Neurons" }, el("table", { class: "neurons" }, el("thead", {}, el("tr", {}, el("th", {}, "neuron"), el("th", { class: "number" }, "logits"), el("th", {}, "promotes"), el("th", {}, `fired most, in ${found.read} ${found.read === 1 ? "text" : "texts"}`))), el("tbody", {}, found.neurons.map(row)))));
}

/** The plane of the chosen token, its neighbours and the text's tokens. */
async function showMap(app, run, body, wait) {
  const found = await wait(app.source.get(`run/${run.run}/map?position=${app.store.get("position")}`));
  const [width, height] = [680, 380];
  const scale = (axis, size) => {
    const values = found.points.map((point) => point[axis]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return (value) => 50 + ((value - low) / (high - low || 1)) * (size - 100);
  };
  const [x, y] = [scale(0, width), scale(1, height)];
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart map", role: "img", "aria-label": "Token vectors on the plane in which they differ most" }, found.labels.map((label, place) => svg("g", { class: `map-${found.kinds[place]}`, "data-label": label }, svg("circle", { cx: x(found.points[place][0]), cy: height - y(found.points[place][1]), r: found.kinds[place] === "chosen" ? 6 : 3.5 }), svg("text", { x: x(found.points[place][0]) + 7, y: height - y(found.points[place][1]) + 4, class: "mono" }, label))));
  replace(body, el("figure", { class: "wide", tabindex: "0", role: "group", "aria-label": "The map" }, drawing), el("p", {}, "Nearest by cosine: ", found.near.slice(0, 8).map((one, number) => [number ? ", " : "", el("span", { class: "mono" }, one.label), " ", el("span", { class: "number", "data-value": one.cosine }, one.cosine.toFixed(2))])), el("p", { class: "soft" }, `The plane has ${percent(found.explained[0] + found.explained[1])} of the variance.`), saveButtons(() => drawing, "map"));
}

/** An analysis of the prompt, as its command prints and draws it: tables, lines and a picture. */
async function showAnalysis(app, name, run, body, wait) {
  const found = await wait(app.source.get(`run/${run.run}/analysis/${name}`));
  const row = (cells) => el("tr", {}, cells.map((cell) => el("td", { class: "mono", dir: "auto" }, cell)));
  const table = (part) => el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": part.title || name }, el("table", {}, part.title ? el("caption", {}, part.title) : null, el("thead", {}, el("tr", {}, part.headings.map((heading) => el("th", { scope: "col" }, heading)))), el("tbody", {}, part.rows.map(row))), part.caption ? el("p", { class: "soft" }, part.caption) : null);
  const picture = found.picture ? el("img", { class: "wide", alt: found.summary, src: `data:image/svg+xml;utf8,${encodeURIComponent(found.picture)}` }) : null;
  replace(body, found.parts.map((part) => (typeof part === "string" ? el("p", { class: "soft" }, part) : table(part))), picture);
}

/** Steering: two texts, a layer, a strength. */
function steerDrawer(app) {
  const toward = el("input", { type: "text", id: "steer-toward", value: "I love this" });
  const away = el("input", { type: "text", id: "steer-away", value: "I hate this" });
  const layer = el("input", { type: "number", id: "steer-layer", min: 0, value: 0 });
  const shown = el("output", { for: "steer-strength", class: "mono" }, "2");
  const strength = el("input", { type: "range", id: "steer-strength", min: -8, max: 8, step: 0.5, value: 2, oninput: () => { shown.textContent = strength.value; } });
  const problem = el("p", { role: "alert", class: "problem" });
  const out = el("div", { class: "row", id: "steer-out", "aria-live": "polite" });
  const go = el("button", { type: "button", id: "steer-go", class: "primary", onclick: () => steer() }, "Steer");
  const field = (id, words, input) => el("div", { class: "grow" }, el("label", { for: id }, words), input);

  const said = (name, answer) => el("div", { class: "grow steer-said", "data-side": name }, el("h3", {}, name), answer.text !== undefined ? el("p", { class: "mono", dir: "auto" }, answer.text) : el("ol", { class: "plain" }, answer.choices.map((one) => el("li", {}, el("span", { class: "mono" }, one.label), " ", el("span", { class: "number", "data-value": one.p }, percent(one.p))))));

  const ask = asks(out, () => [app.store.get("run")], (error) => { replace(out); problem.textContent = error.message; }, false);
  const steer = () => ask(async (wait) => {
    const run = app.store.get("run");
    problem.textContent = "";
    const column = run.columns.length === run.tokens.labels.length ? app.store.get("position") : 0;
    const found = await wait(app.source.post(`run/${run.run}/steer`, { toward: toward.value, away: away.value, layer: Number(layer.value), strength: Number(strength.value), position: column }));
    replace(out, said("before", found.before), said("after", found.after));
  });

  app.store.on("model", (model) => { layer.max = Math.max(model.layers - 1, 0); layer.value = Math.floor(model.layers / 2); });
  app.store.listen("run", () => replace(out));
  return el("details", { id: "drawer-steer", class: "drawer" }, el("summary", {}, "Steer the model"), el("p", { class: "soft" }, "The stream after a layer at the end of one text, less that of another, is added at every token while the model goes on with yours."), el("div", { class: "row" }, field("steer-toward", "Toward", toward), field("steer-away", "Away from", away)), el("div", { class: "row toolbar" }, el("div", {}, el("label", { for: "steer-layer" }, "Layer"), layer), el("div", { class: "slider" }, el("label", { for: "steer-strength" }, "Strength ", shown), strength), go), problem, out);
}

export const drawersSection = {
  id: "drawers",
  title: "Neurons and more",
  hint: "More to look into: neurons, steering, the map of token vectors, and what the commands print and draw. Each opens on its own.",
  applies: (model, live, source, run) => model.family !== "encoder-decoder" && model.input !== "patches" && model.task !== "embed" && (live || ["neurons?", "map?", "analysis/"].some((path) => source.list(`run/${run?.run || "recorded"}/${path}`).length)),

  mount(root, app) {
    const analyses = el("div", { id: "analyses" });
    let listed = null; // the source whose analyses are listed
    app.store.on("run", async () => {
      if (listed === app.source) return;
      listed = app.source;
      const { analyses: summaries } = await app.source.get("analyses").catch(() => ({ analyses: {} }));
      replace(analyses, Object.entries(summaries).map(([name, summary]) => drawer(app, root, { id: `analysis-${name}`, path: `analysis/${name}`, title: `clearhead ${name}: ${summary}`, words: "As the command prints and draws it.", keys: [], load: (run, body, wait) => showAnalysis(app, name, run, body, wait) })));
    });
    replace(
      root,
      drawer(app, root, { id: "neurons", title: "Neurons that matter here", words: "What single neurons of the feed-forwards add to the pinned answer, what they promote, and what fires them elsewhere.", keys: ["position", "target", "foil", "neuronLayer"], load: (run, body, wait) => showNeurons(app, run, body, wait) }),
      app.source.live ? steerDrawer(app) : null,
      drawer(app, root, { id: "map", title: "The chosen token among its neighbours", words: "Vectors of the input table, on the plane in which these differ most.", keys: ["position"], load: (run, body, wait) => showMap(app, run, body, wait) }),
      analyses,
    );
  },
};
