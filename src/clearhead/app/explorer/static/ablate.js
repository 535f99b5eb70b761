// Turn heads, feed-forwards and whole layers off, and see what the model predicts without them, next to what it predicted before.

import { ATLAS_ASKED, atlasName, beforeAfter, cellText, effectRows, effectsAt, effectsOf, jobProgress, paintCell, partGrid } from "./atlas.js";
import { amountColour } from "./colour.js";
import { el, figure, percent, replace } from "./dom.js";
import { scaleBar } from "./heatmap.js";
import { asks } from "./query.js";
import { columnOf } from "./selection.js";

const ABLATE_KINDS = { self: "", encoder: "encoder ", cross: "cross " };
const ABLATE_FIRST = 8; // parts that are listed while everything is on
const ABLATE_HOWS = { zero: "set to zero", mean: "set to their mean over this text", second: "taken from the second text" };

/** The kind of a part's name, as the model's argument is called, and the rest of it. */
function ablatePart(name) {
  const [kind, rest] = name.includes(":") ? name.split(":") : ["head", name];
  return [`${kind}s`, rest];
}

export const ablateSection = {
  id: "ablate",
  title: "Turn off",
  hint: "What does the model say without a part? Each cell is a head, a feed-forward (FF) or a whole layer; its colour says how far the answer moves when it alone is off. Choose parts to turn them off together.",
  applies: (model, live, source, run) => ATLAS_ASKED.includes(model.task) && (live || source.list(`run/${run?.run || "recorded"}/effects/`).length > 0),

  mount(root, app) {
    const off = new Set();
    const grid = el("div", { class: "wide", id: "ablate-grid" });
    const where = el("p", { class: "soft", id: "ablate-where" });
    const problem = el("p", { role: "alert", class: "problem" });
    const answer = el("div", { id: "ablate-answer", "aria-live": "polite" });
    const progress = jobProgress("Turning each part off by itself");
    const how = el("select", { id: "ablate-how", onchange: () => app.store.set("how", how.value) });
    const howBox = el("div", {}, el("label", { for: "ablate-how" }, "Replace with"), how);
    const reset = el("button", { type: "button", id: "ablate-reset", onclick: () => app.store.set("off", "") }, "All on");
    const legend = el("div", { id: "ablate-scale" });
    replace(root, el("div", { class: "row toolbar" }, howBox, reset), problem, el("div", { class: "panes" }, el("div", { class: "pane-grid" }, grid, legend, where, progress.root), answer));
    let buttons = new Map();
    let effects = null; // of what the grid shows
    let shownFor = null; // the run and position that they are of
    let answered = null; // what the answer is of
    let waiting = 0;

    function showGrid() {
      const model = app.store.get("model");
      if (!model || !model.attentions) return;
      const removable = model.attentions.map((entry) => (entry.removable === false ? { ...entry, heads: 0 } : entry));
      const most = Math.max(...removable.map((entry) => entry.heads));
      const rows = removable.map(({ kind, layer, heads }) => {
        const whole = kind === "encoder" ? `encoder.${layer}` : String(layer);
        const others = kind === "cross" ? [null, null] : [`feedforward:${whole}`, `layer:${whole}`];
        return { title: `${ABLATE_KINDS[kind]}${layer}`, names: [...Array.from({ length: most }, (_, number) => (number < heads ? atlasName(kind, layer, number) : null)), ...others] };
      });
      const made = partGrid({
        rows,
        columns: [...Array.from({ length: most }, (_, number) => number), "FF", "all"],
        make: (name) => {
          const [set, rest] = ablatePart(name);
          return [{ class: "head part", [`data-${set}`]: rest, "aria-pressed": String(off.has(name)), onclick: () => toggle(name) }, el("span", { class: "thumb", "aria-hidden": "true" })];
        },
      });
      buttons = made.buttons;
      replace(grid, made.root);
      paint();
    }

    /** In a file only single parts are recorded: choosing one lets go of the other. */
    function toggle(name) {
      const next = new Set(app.source.live ? off : off.has(name) ? [name] : []);
      if (!next.delete(name)) next.add(name);
      app.store.set("off", [...next].join(","));
    }

    function paint() {
      const most = effects ? Math.max(...Object.values(effects.parts).map((part) => part.kl), 1e-9) : 1;
      for (const [name, button] of buttons) {
        const kl = effects?.parts[name]?.kl;
        const [set, rest] = ablatePart(name);
        const words = `${{ heads: "head", feedforwards: "feed-forward of layer", layers: "layer" }[set]} ${rest} off${kl === undefined ? "" : `: ${figure(kl)} bits`}`;
        button.setAttribute("aria-label", words);
        button.title = words;
        if (kl !== undefined) button.dataset.value = kl;
        paintCell(button.firstChild, kl === undefined ? null : amountColour(kl / most), cellText(kl, most));
      }
      replace(legend, effects ? scaleBar("bits (KL divergence)", 0, Number(most.toPrecision(3))) : null);
      if (!off.size) replace(answer, largest());
    }

    /** While everything is on: the parts without which the answer moves most. */
    function largest() {
      if (!effects) return el("p", { class: "soft" }, "Everything is on.");
      const [answered] = Object.entries(effects.before).sort((one, two) => two[1] - one[1])[0];
      const most = Object.entries(effects.parts).filter(([name]) => buttons.has(name)).sort((one, two) => two[1].kl - one[1].kl).slice(0, ABLATE_FIRST);
      const row = ([name, part]) => el("tr", {}, el("th", { scope: "row" }, part.says), el("td", { class: "number", "data-value": part.kl }, `${figure(part.kl)} bits`), el("td", { class: "number" }, percent(part.after[answered])), el("td", {}, el("button", { type: "button", "aria-label": `Turn off ${part.says}`, onclick: () => toggle(name) }, "Turn off")));
      const head = ["without", "moves by", null].map((text) => el("th", { class: text === "without" ? null : "number" }, text || [el("span", { class: "mono", dir: "auto" }, effects.labels[answered]), " is then"]));
      return [el("p", {}, "Everything is on: ", el("span", { class: "mono", dir: "auto" }, effects.labels[answered]), ` has ${percent(effects.before[answered])}. Turned off alone, these parts move the answer most:`), el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "The largest effects" }, el("table", { class: "candidates" }, el("thead", {}, el("tr", {}, head, el("th", {}, el("span", { class: "hidden-words" }, "what to do")))), el("tbody", {}, most.map(row))))];
    }

    function showHows() {
      const second = app.store.get("other");
      const run = app.store.get("run");
      const there = Object.entries(ABLATE_HOWS).filter(([value]) => value !== "second" || (second && run && second.model === run.model));
      if (!there.some(([value]) => value === app.store.get("how"))) app.store.values.how = "zero";
      replace(how, there.map(([value, words]) => el("option", { value, selected: value === app.store.get("how") }, words)));
      howBox.hidden = !app.source.live;
    }

    function follow(text) {
      off.clear();
      for (const name of (text || "").split(",").filter(Boolean)) off.add(name);
      for (const [name, button] of buttons) button.setAttribute("aria-pressed", String(off.has(name)));
      later();
    }

    function later() {
      clearTimeout(waiting);
      waiting = setTimeout(ask, 120);
    }

    /** The effect of every part alone, in the background; the grid gets its colours when it is there. */
    const at = () => { const run = app.store.get("run"); return [run, run && effectsAt(app, run)]; };
    const askEffects = asks(legend, at, (error) => { progress.end(); problem.textContent = error.message; });
    const loadEffects = () => askEffects(async (wait) => {
      const [run, position] = at();
      forgetOlder();
      if (!run || !root.offsetParent || position === null) return;
      progress.begin();
      const tell = (done, total, part) => { progress.tell(done, total); if (part && wait.still()) { effects = part; paint(); } };
      const found = await wait(effectsOf(app, run, position, tell, () => wait.still() && root.offsetParent !== null && !progress.stopped()));
      progress.end();
      if (!found) return;
      effects = found;
      where.textContent = `Read at “${run.columns[position]}”.${app.source.live ? "" : " In this file: one part at a time, set to zero."}`;
      paint();
    });

    /** Effects and answers of another text or token give way before those of this one are there. */
    function forgetOlder() {
      const wanted = `${at()[0]?.run} ${at()[1]}`;
      if (shownFor === wanted) return;
      [shownFor, effects] = [wanted, null];
      where.textContent = "";
      paint();
    }

    /** What is off, computed, or taken from what is recorded. */
    async function switched(run, position) {
      const names = [...off];
      if (!app.source.live) {
        const body = await effectsOf(app, run, effectsAt(app, run), () => {}, () => true);
        return { ablated: [body.parts[names[0]].says], kl: body.parts[names[0]].kl, rows: effectRows(body, names[0]), position: body.position };
      }
      const of = (set) => names.map(ablatePart).filter(([kind]) => kind === set).map(([, rest]) => rest);
      return app.source.post(`run/${run.run}/ablate`, { heads: of("heads"), layers: of("layers"), feedforwards: of("feedforwards"), how: app.store.get("how"), second: app.store.get("other")?.run, position });
    }

    const askAnswer = asks(answer, () => ["run", "off", "how", "other", "position"].map((key) => app.store.get(key)), (error) => { replace(answer); problem.textContent = error.message; });
    const ask = () => askAnswer(async (wait) => {
      const run = app.store.get("run");
      problem.textContent = "";
      if (!run || !off.size) return replace(answer, largest());
      const wanted = `${run.run} ${app.store.get("position")}`;
      if (answered !== wanted) replace(answer);
      answered = wanted;
      const made = await wait(switched(run, columnOf(run, app.store.get("position"))));
      const words = made.how === "second" ? `From the second text: ${made.ablated.join(", ")}` : `Off: ${made.ablated.join(", ")}`;
      return replace(
        answer,
        el("p", {}, `${words}, read at “${run.columns[made.position]}”. The distribution moves by `, el("strong", { id: "ablate-kl", "data-value": made.kl }, `${figure(made.kl)} bits`), " (KL divergence)."),
        beforeAfter(made.rows, "ablate-table"),
      );
    });

    app.store.on("model", () => {
      off.clear();
      [effects, shownFor] = [null, null];
      showGrid();
    });
    app.store.on("run", (run) => {
      showHows();
      if (run && run.task !== "embed") follow(app.store.get("off"));
      loadEffects();
    });
    app.store.listen("off", follow);
    app.store.listen("other", showHows);
    app.store.listen("how", () => { showHows(); later(); });
    app.store.listen("position", () => { forgetOlder(); later(); loadEffects(); });
    app.store.listen("view", () => loadEffects());
    app.store.listen("theme", paint);
  },
};
