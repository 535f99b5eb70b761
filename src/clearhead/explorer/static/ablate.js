// Switch heads, feed-forwards and whole layers off, and see what the model says without them, beside what it said before.

import { el, figure, percent, replace } from "./dom.js";
import { whileWorking } from "./near.js";
import { columnOf } from "./selection.js";

const ABLATE_KINDS = { self: "self-attention", encoder: "encoder", cross: "cross-attention" };

/** The name of a layer as the model's stacks count them: "3", or "encoder.3". */
function ablateLayerName(kind, layer) {
  return kind === "encoder" ? `encoder.${layer}` : String(layer);
}

function ablateRow(entry, widest) {
  const change = entry.after - entry.before;
  const bar = (value, kind) => el("div", { class: `bar ${kind}`, style: { width: `${(100 * value) / (widest || 1)}%` } });
  return el(
    "tr",
    { "data-id": entry.id },
    el("th", { scope: "row", class: "mono token", dir: "auto" }, entry.label),
    el("td", { class: "number", "data-before": entry.before }, percent(entry.before)),
    el("td", { class: "number", "data-after": entry.after }, percent(entry.after)),
    el("td", { class: `number ${change < 0 ? "less" : "more"}` }, `${change < 0 ? "−" : "+"}${percent(Math.abs(change))}`),
    el("td", { class: "fill" }, bar(entry.before, "before"), bar(entry.after, "after")),
  );
}

export const ablateSection = {
  id: "ablate",
  title: "Ablate",
  hint: "Switch parts of the model off: what does it say without them?",
  applies: (model, live) => live && ["next", "fill", "classify", "tag"].includes(model.task),

  mount(root, app) {
    const off = { heads: new Set(), layers: new Set(), feedforwards: new Set() };
    const grid = el("div", { class: "wide", id: "ablate-grid" });
    const problem = el("p", { role: "alert", class: "problem" });
    const answer = el("div", { id: "ablate-answer", "aria-live": "polite" });
    const how = el("select", { id: "ablate-how", onchange: () => later() }, el("option", { value: "zero" }, "set to zero"), el("option", { value: "mean" }, "set to their mean over this text"));
    const reset = el("button", { type: "button", id: "ablate-reset", onclick: () => app.store.set("off", "") }, "All on");
    replace(root, el("div", { class: "row toolbar" }, el("div", {}, el("label", { for: "ablate-how" }, "What is off is"), how), reset), problem, grid, answer);
    let waiting = 0;
    let asked = 0;

    function toggle(set, name, label, text) {
      const button = el("button", { type: "button", class: "part", "aria-pressed": String(off[set].has(name)), "aria-label": label, [`data-${set}`]: name }, text);
      button.addEventListener("click", () => {
        if (off[set].has(name)) off[set].delete(name);
        else off[set].add(name);
        app.store.set("off", written());
      });
      return button;
    }

    function showGrid() {
      const model = app.store.get("model");
      if (!model || !model.attentions) return;
      const most = Math.max(...model.attentions.map((entry) => entry.heads));
      const head = el("tr", {}, el("th", { scope: "col" }, "layer"), Array.from({ length: most }, (_, number) => el("th", { scope: "col" }, `head ${number}`)), el("th", { scope: "col" }, "feed-forward"), el("th", { scope: "col" }, "all of it"));
      const rows = model.attentions.map(({ kind, layer, heads }) => {
        const prefix = kind === "self" ? "" : `${kind}.`;
        const whole = ablateLayerName(kind, layer);
        const cells = Array.from({ length: most }, (_, number) => el("td", {}, number < heads ? toggle("heads", `${prefix}${layer}.${number}`, `head ${prefix}${layer}.${number} off`, `${layer}.${number}`) : null));
        const others = kind === "cross" ? [el("td", {}), el("td", {})] : [el("td", {}, toggle("feedforwards", whole, `feed-forward of layer ${whole} off`, "off")), el("td", {}, toggle("layers", whole, `layer ${whole} off`, "off"))];
        return el("tr", {}, el("th", { scope: "row" }, `${ABLATE_KINDS[kind]} ${layer}`), cells, others);
      });
      replace(grid, el("table", { class: "parts" }, el("thead", {}, head), el("tbody", {}, rows)));
    }

    /** What is off, as the selection has it: heads by their names, the others with their kind before them. */
    const written = () => [...off.heads, ...[...off.layers].map((name) => `layer:${name}`), ...[...off.feedforwards].map((name) => `feedforward:${name}`)].join(",");

    function follow(text) {
      for (const set of Object.values(off)) set.clear();
      for (const name of (text || "").split(",").filter(Boolean)) {
        const [kind, rest] = name.includes(":") ? name.split(":") : ["head", name];
        off[`${kind}s`]?.add(rest);
      }
      for (const button of grid.querySelectorAll(".part")) for (const set of Object.keys(off)) if (set in button.dataset) button.setAttribute("aria-pressed", String(off[set].has(button.dataset[set])));
      later();
    }

    function later() {
      clearTimeout(waiting);
      waiting = setTimeout(() => whileWorking(answer, ask()), 120);
    }

    async function ask() {
      const run = app.store.get("run");
      problem.textContent = "";
      const heads = [...off.heads];
      const layers = [...off.layers];
      const feedforwards = [...off.feedforwards];
      if (!run || !(heads.length + layers.length + feedforwards.length)) return replace(answer, el("p", { class: "soft" }, "Everything is on."));
      const mine = ++asked;
      const position = columnOf(run, app.store.get("position"));
      try {
        const made = await app.source.post(`run/${run.run}/ablate`, { heads, layers, feedforwards, how: how.value, position });
        if (mine !== asked || app.store.get("run") !== run) return null;
        const widest = Math.max(...made.rows.map((entry) => Math.max(entry.before, entry.after)), 1e-12);
        return replace(
          answer,
          el("p", {}, `Off: ${made.ablated.join(", ")}, read at “${run.columns[position]}”. The distribution moves by `, el("strong", { id: "ablate-kl", "data-value": made.kl }, `${figure(made.kl)} bits`), " (KL divergence)."),
          el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Before and after" }, el("table", { id: "ablate-table" }, el("thead", {}, el("tr", {}, ["choice", "before", "after", "change"].map((name, place) => el("th", { class: place ? "number" : null }, name)), el("th", {}, el("span", { class: "hidden-words" }, "bars")))), el("tbody", {}, made.rows.map((entry) => ablateRow(entry, widest))))),
        );
      } catch (error) {
        problem.textContent = error.message;
        return replace(answer);
      }
    }

    app.store.on("model", () => {
      for (const set of Object.values(off)) set.clear();
      showGrid();
    });
    app.store.on("run", (run) => {
      if (run && app.source.live && run.task !== "embed") follow(app.store.get("off"));
    });
    app.store.listen("off", follow);
    app.store.listen("position", () => later());
  },
};
