// What the model takes at a chosen length: parameters, FLOPs, memory and cache, counted from its config.

import { bytes, el, figure, replace, svg } from "./dom.js";
import { asks } from "./query.js";

const COST_PARTS = ["embedding", "positions", "attention", "cross", "feedforward", "norms", "head"];
const COST_DTYPES = { float32: 4, bfloat16: 2, float16: 2 };

const partTitle = (part) => ({ head: "output layer", feedforward: "feed-forward", cross: "cross-attention" })[part] || part;

/** One stacked bar: the parts of a whole, each with its name and share. */
function costBar(title, parts, write, id) {
  const total = parts.total || COST_PARTS.reduce((sum, part) => sum + (parts[part] || 0), 0);
  const pieces = COST_PARTS.filter((part) => parts[part] > 0);
  const bar = el("div", { class: "stacked", role: "img", "aria-label": `${title}: ${pieces.map((part) => `${partTitle(part)} ${write(parts[part])}`).join(", ")}` }, pieces.map((part) => el("div", { class: `piece piece-${part}`, title: `${partTitle(part)}: ${write(parts[part])}`, style: { "flex-grow": String(parts[part]) } })));
  const legend = el("ul", { class: "legend" }, pieces.map((part) => el("li", {}, el("span", { class: `swatch piece-${part}` }), `${partTitle(part)} `, el("span", { class: "mono", "data-value": parts[part] }, write(parts[part])), ` (${((100 * parts[part]) / total).toFixed(1)} %)`)));
  return el("div", { class: "cost-part" }, el("h3", {}, title, " ", el("span", { class: "mono", id, "data-value": total }, write(total))), bar, legend);
}

/** Curves over length, both axes logarithmic. */
function costCurve(points, chosen) {
  const width = 560;
  const height = 220;
  const left = 64;
  const bottom = 34;
  const there = ([name]) => points.some((point) => point[name] > 0); // an encoder keeps no cache
  const names = Object.fromEntries(Object.entries({ forward: "FLOPs of one pass", cache: "bytes of the cache" }).filter(there));
  const xs = points.map((point) => Math.log2(point.length));
  const all = points.flatMap((point) => [point.forward, point.cache]).filter((value) => value > 0).map(Math.log10);
  const low = Math.min(...all);
  const high = Math.max(...all);
  const x = (length) => left + ((Math.log2(length) - xs[0]) / (xs.at(-1) - xs[0] || 1)) * (width - left - 16);
  const y = (value) => height - bottom - ((Math.log10(value) - low) / (high - low || 1)) * (height - bottom - 16);
  const lines = Object.keys(names).map((name) => {
    const kept = points.filter((point) => point[name] > 0);
    return [
      svg("polyline", { class: `curve curve-${name}`, points: kept.map((point) => `${x(point.length)},${y(point[name])}`).join(" ") }),
      kept.map((point) => svg("circle", { class: `curve curve-${name} dot`, cx: x(point.length), cy: y(point[name]), r: point.length === chosen ? 6 : 3 }, svg("title", {}, `${point.length} tokens: ${name === "cache" ? bytes(point[name]) : figure(point[name])}`))),
    ];
  });
  const ticks = points.map((point) => svg("text", { x: x(point.length), y: height - 16, "text-anchor": "middle" }, point.length));
  const rules = [low, (low + high) / 2, high].map((level) => svg("line", { class: "axis", x1: left, x2: width - 16, y1: y(10 ** level), y2: y(10 ** level) }));
  const levels = [low, (low + high) / 2, high].map((level) => svg("text", { x: left - 8, y: y(10 ** level) + 4, "text-anchor": "end" }, figure(10 ** level, 2)));
  return el(
    "figure",
    { class: "wide", tabindex: "0", role: "group", "aria-label": "By length" },
    svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `${Object.values(names).join(" and ")} by length` }, rules, ticks, svg("text", { x: width - 16, y: height - 2, "text-anchor": "end" }, "tokens"), levels, lines),
    el("figcaption", { class: "legend" }, Object.entries(names).map(([name, words]) => el("span", {}, el("span", { class: `swatch swatch-${name}` }), words))),
  );
}

export const costSection = {
  id: "cost",
  title: "Cost",
  hint: "Counted from the config, at any length; nothing is run. Both axes of the curve are logarithmic.",

  mount(root, app) {
    const length = el("input", { type: "number", id: "cost-length", min: 1, step: 1, value: 128, onchange: () => show() });
    const lengths = el("select", { id: "cost-recorded", "aria-label": "Tokens", onchange: () => { length.value = lengths.value; show(); } });
    const batch = el("input", { type: "number", id: "cost-batch", min: 1, max: 4096, step: 1, value: 1, onchange: () => show() });
    const dtype = el("select", { id: "cost-dtype", onchange: () => show() }, Object.keys(COST_DTYPES).map((name) => el("option", { value: name }, name)));
    const problem = el("p", { role: "alert", class: "problem" });
    const shown = el("div", {});
    const lengthBox = el("div", {}, el("label", { for: "cost-length" }, "Tokens"), length, lengths);
    const more = el("div", { class: "row" }, el("div", {}, el("label", { for: "cost-batch" }, "Batch"), batch), el("div", {}, el("label", { for: "cost-dtype" }, "Type"), dtype));
    replace(root, el("div", { class: "row toolbar" }, lengthBox, more), problem, shown);
    const memoryBox = el("div", {});
    const curveBox = el("div", { class: "grow" });
    const lower = el("div", { class: "row cost-lower" }, memoryBox, curveBox);

    const options = () => `batch=${batch.value}&dtype=${dtype.value}`;
    const path = (tokens) => (app.source.live ? `cost?length=${tokens}&${options()}` : `cost?length=${tokens}`);

    const ask = asks(shown, () => [app.source, length.value, options()], (error) => { problem.textContent = error.message; });
    const show = () => ask(async (wait) => {
      const model = app.store.get("model");
      if (!model || !model.family) return;
      problem.textContent = "";
      const tokens = Number(length.value);
      const here = await wait(app.source.get(model.input === "patches" && app.source.live ? `cost?${options()}` : path(tokens)));
      const memory = here.memory;
      replace(curveBox);
      replace(
        shown,
        costBar("Parameters", here.parameters, figure, "cost-parameters"),
        costBar("FLOPs, one pass forward", here.flops.forward, figure, "cost-flops"),
        lower,
      );
      replace(
        memoryBox,
        el("h3", {}, "Memory"),
        el(
          "table",
          { class: "cost-memory" },
          el("tbody", {}, [["weights", memory.weights], ["key/value cache", memory.kv_cache], ["cross-attention cache", memory.cross_cache], ["attention matrix of a layer", memory.attention_matrix], ["activations kept to train", memory.activations.total], ["all that training takes", memory.training]].filter(([, value]) => value > 0).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "number", "data-value": value }, bytes(value))))),
        ),
      );
      if (model.input !== "patches") await showCurve(wait, tokens, model);
    });

    async function showCurve(wait, chosen, model) {
      const points = [];
      for (const tokens of known(model)) {
        const body = await wait(app.source.get(path(tokens)).catch(() => null));
        if (body) points.push({ length: tokens, forward: body.flops.forward.total, cache: body.memory.kv_cache + body.memory.cross_cache });
      }
      if (points.length > 1) replace(curveBox, el("h3", {}, "By length"), costCurve(points, chosen));
    }

    function known(model) {
      if (!app.source.live) return Object.keys(app.source.record.views).filter((name) => name.startsWith("cost?length=")).map((name) => Number(name.slice(12))).sort((a, b) => a - b);
      const limit = Math.min(model.max_length || 4096, 4096);
      return [16, 64, 256, 1024, 4096].filter((tokens) => tokens <= limit);
    }

    app.store.on("model", (model) => {
      const recorded = !app.source.live;
      length.hidden = recorded;
      lengths.hidden = !recorded;
      more.hidden = recorded;
      lengthBox.hidden = model.input === "patches";
      if (recorded) replace(lengths, known(model).map((tokens) => el("option", { value: tokens }, tokens)));
      length.value = recorded ? known(model)[0] || 1 : Math.min(128, model.max_length || 128);
      length.max = model.max_length || 4096;
      show();
    });
  },
};
