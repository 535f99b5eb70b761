// The bench: two texts, or two models, side by side: tokens laid beside each other, a place on each side, and what differs.

import { jobProgress } from "./atlas.js";
import { el, figure, percent, points, press, replace, signed, tokenText } from "./dom.js";
import { heatmap, scaleBar } from "./heatmap.js";
import { inputFile } from "./input.js";
import { asks } from "./query.js";
import { plainOf } from "./sampling.js";
import { askedOf, columnOf, leadingEdge } from "./selection.js";
import { unpack } from "./source.js";

const BENCH_PATCHES = { residual: "the stream before it", attention: "what attention adds", feedforward: "what the feed-forward adds" };
const BENCH_AT_ONCE = 60_000; // tokens of all patched rows that are run without being asked for
const BENCH_TITLES = { heads: "Head by head, at all tokens", "cross heads": "Heads of cross-attention", residual: "Stream before each layer", attention: "Attention, token by token", cross: "Cross-attention, token by token", feedforward: "Feed-forward, token by token" };
const BENCH_TRIED = 12; // tokens that are tried in the place of another
const BENCH_FIRST = 1e9; // parameters times tokens of a comparison that is made without being asked for
const BENCH_TABLE = 400; // pixels of the table of choices
const BENCH_ROWS = 8;
const BENCH_SCORES = 4e6; // of all layers and some columns, that are asked for in one piece: they come within 100 ms

/** Pairs of places of two rows of labels, null on one side where the other has something of its own: the longest common subsequence. */
function benchAligned(ours, theirs) {
  if (ours.length === theirs.length) return ours.map((_, place) => [place, place]);
  const [n, m] = [ours.length, theirs.length];
  const best = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
  for (let i = n - 1; i >= 0; i--) for (let j = m - 1; j >= 0; j--) best[i][j] = ours[i] === theirs[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  const pairs = [];
  for (let i = 0, j = 0; i < n || j < m; ) {
    if (i < n && j < m && ours[i] === theirs[j]) pairs.push([i++, j++]);
    else if (j >= m || (i < n && best[i + 1][j] >= best[i][j + 1])) pairs.push([i++, null]);
    else pairs.push([null, j++]);
  }
  return pairs;
}

export const compareSection = {
  id: "compare",
  title: "Compare",
  hint: "A second text, or a second model (clearhead explore DIR --compare OTHER), next to the first: where do they part, and which part of A brings its answer back in B?",
  applies: (model, live, source, run) =>
    (live && model.input !== "frames") || (source.has("second") && (!run || run.run === "recorded")),

  mount(root, app) {
    const text = el("textarea", { id: "compare-text", rows: 1, spellcheck: "false" });
    const image = el("input", { type: "file", id: "compare-image", accept: "image/*" });
    const which = el("select", { id: "compare-model" });
    const go = el("button", { type: "button", id: "compare-run", class: "primary", onclick: () => send() }, "Compare");
    const problem = el("p", { role: "alert", class: "problem" });
    const shown = el("div", { id: "compare-shown" });
    const whichBox = el("div", {}, el("label", { for: "compare-model" }, "Model"), which);
    const textBox = el("div", { class: "grow" }, el("label", { for: "compare-text" }, "Second text (blank: same text)"), text);
    const imageBox = el("div", { class: "grow" }, el("label", { for: "compare-image" }, "Second image (none: same image)"), image);
    const controls = el("div", { class: "row toolbar" }, textBox, imageBox, whichBox, go);
    const part = el("select", { id: "patch-part", onchange: () => patched(patchTokens) }, Object.entries(BENCH_PATCHES).map(([value, words]) => el("option", { value }, words)));
    const patchWords = el("div", {});
    const [patchHeads, patchTokens] = ["patch-heads", "patch-tokens"].map((id) => el("div", { id }));
    const patchSaid = el("p", { id: "patch-said", "aria-live": "polite" });
    const progress = jobProgress("Patching");
    replace(root, controls, problem, shown);
    const readThrough = new Set(); // runs of which the lens of some choice was read at every column
    let other = null; // the second run
    let suggestion = null; // the second run, where nobody has asked for it
    let sent = null; // the text that it was made of
    let frame = null; // of both runs: their tokens, and where the rest goes

    const sides = () => [app.store.get("run"), other];
    const nameOf = (run) => (run.model ? app.store.get("model").other : app.store.get("model")).name;

    function setOther(run) {
      other = run;
      app.store.set("other", run);
    }

    /** Let the model read the second text: what was asked for last counts, whatever A is by then. */
    const askSecond = asks(controls, () => [app.source], (error) => { problem.textContent = error.message; });
    const send = (asked = true) => askSecond(async (wait) => {
      problem.textContent = "";
      const run = app.store.get("run");
      const model = app.store.get("model");
      if (!run) return null;
      const body = { model: Number(which.value) || 0 };
      const first = run.source || run.tokens;
      if (model.input === "patches") body.image = image.files[0] ? await wait(inputFile(image.files[0])) : app.store.get("picture") || null;
      else if (model.image_token && first.text.includes(model.image_token) && app.store.get("picture")) Object.assign(body, { text: text.value.trim() ? text.value : first.text, image: app.store.get("picture") });
      else if (text.value.trim()) body[model.tokenizer ? "text" : "ids"] = model.tokenizer ? text.value : text.value.split(/[\s,]+/).filter(Boolean).map(Number);
      else if (first.text) body.text = first.text;
      else body.ids = first.ids;
      const made = await wait(app.source.post("run", body));
      app.store.values.at = null;
      suggestion = asked ? null : made;
      if (!asked) other = made; // it is in no address and in no file
      else {
        sent = body.text || null;
        setOther(made);
        app.store.set("second", sent);
      }
      return show();
    });

    /** A second text to begin with: the token that the answer came from is another one everywhere, which the model finds likely too, so that both have as many tokens. */
    async function suggested(run) {
      const [paths, next] = await Promise.all([`paths?${askedOf(app, run)}`, `next?position=${columnOf(run, app.store.get("position"))}`].map((path) => app.source.get(`run/${run.run}/${path}`).catch(() => null)));
      const read = run.source || run.tokens;
      const there = (at) => read.spans[at]?.[1] > read.spans[at]?.[0] && /\p{L}/u.test(read.labels[at]);
      const carried = (paths?.edges || []).filter((edge) => !run.source || /^(cross|encoder)/.test(edge.part)).map((edge) => edge.source);
      const begins = (at) => /^[·▁ ]/.test(read.labels[at] ?? " ");
      const first = [leadingEdge(paths?.edges || [])?.source, ...carried].filter(there);
      const place = [...first.slice(0, 1).filter(begins), ...first.filter((at) => begins(at) && !/^\p{L}/u.test(read.labels[at + 1] ?? "")), ...first.filter(begins), ...first, read.labels.length - 1][0]; // a whole word where there is one
      const same = read.ids.flatMap((id, at) => (id === read.ids[place] && there(at) ? [at] : []));
      const capital = (label) => /^[·▁ ]\p{Lu}/u.test(label);
      const unlike = (label) => (capital(label) === capital(read.labels[place]) ? 0 : 100) + Math.abs(label.length - read.labels[place].length); // another name in the place of a name
      const others = (next?.labels || []).filter((one) => one !== read.labels[place] && /^[·▁ ]\p{L}+$/u.test(one)).sort((a, b) => unlike(a) - unlike(b));
      for (const label of others.slice(0, BENCH_TRIED)) {
        const letters = Array.from(read.text);
        for (const at of [...same].reverse()) letters.splice(read.spans[at][0], read.spans[at][1] - read.spans[at][0], ...(/^\s/.test(letters[read.spans[at][0]]) ? " " : ""), ...label.slice(1));
        const { tokens } = await app.source.post("tokens", { text: letters.join("") });
        if (tokens.labels.length === read.labels.length) return letters.join("");
      }
      return read.text;
    }

    /** What is shown before anybody asks: of a small model that is live, the text next to itself with one token changed. */
    const askFirst = asks(textBox, () => [app.store.get("run")], () => {}, false);
    const begin = () => askFirst(async (wait) => {
      const [run, model] = [app.store.get("run"), app.store.get("model")];
      if (!run || other || !app.source.live || model.other || model.input !== "tokens" || !model.tokenizer || !root.offsetParent || text.value || run.source || run.task === "embed") return;
      const found = await wait(suggested(run));
      if (text.value || other) return; // somebody was quicker
      text.value = found;
      if (model.parameters * run.tokens.labels.length < BENCH_FIRST) await send(false);
    });

    /** The second text of the address, or of a file. */
    async function restore() {
      const [run, second] = [app.store.get("run"), app.store.get("second")];
      if (!run || app.store.get("example")) return;
      if (!app.source.live) {
        if (app.source.has("second") && !other) setOther(await app.source.get("second"));
      } else if (second && second !== sent && app.store.get("model").input !== "patches") {
        sent = second;
        text.value = second;
        return send();
      }
      return show();
    }

    /** Where each side is read: A at the selected token; B where it was chosen, at the same token of a text as long, else where it is asked by itself. */
    function placeOf(run) {
      const [first, at] = [app.store.get("run"), app.store.get("at")];
      const position = app.store.get("position");
      if (run !== other) return columnOf(run, position);
      if (at !== null && at < run.tokens.labels.length) return columnOf(run, at);
      if (run.tokens.labels.length === first.tokens.labels.length) return columnOf(run, position);
      const pair = position === first.position ? null : benchAligned(first.tokens.labels, run.tokens.labels).find(([one]) => one === position);
      return columnOf(run, pair?.[1] ?? run.position);
    }

    async function nextOf(run) {
      if (run.task === "embed") return null;
      const body = await app.source.get(`run/${run.run}/next?position=${placeOf(run)}`);
      const { probabilities, order } = plainOf(body);
      return { probabilities, order, names: new Map(body.top.map((id, place) => [id, body.labels[place]])) };
    }

    /** The tokens of both, one beside the other; each can be chosen on its side. */
    function tokensOf(pairs) {
      const [one, two] = sides();
      const chip = (run, place, key) => {
        if (place === null) return el("span", { class: "chip gap", "aria-hidden": "true" }, "·");
        return el("button", { type: "button", class: "chip", [`data-${key}`]: place, "aria-label": `${key === "position" ? "A" : "B"}: read at ${run.tokens.labels[place]}, ${place}`, onclick: () => app.store.set(key, place) }, tokenText(run.tokens.labels[place]));
      };
      const cells = pairs.map(([mine, theirs]) => el("li", { class: mine !== null && theirs !== null && one.tokens.labels[mine] === two.tokens.labels[theirs] ? null : "differs" }, chip(one, mine, "position"), chip(two, theirs, "at")));
      const title = (run, side) => el("h3", {}, `${side}: ${nameOf(run)}`);
      return el("div", { class: "aligned-box" }, el("div", { class: "aligned-names" }, title(one, "A"), title(two, "B")), el("ol", { class: "aligned wide", "aria-label": "Tokens of A above those of B; what differs is marked" }, cells));
    }

    function answers(one, two) {
      const [ours, theirs] = sides();
      if (!one || !two) return el("p", { class: "soft" }, "Vectors have no distribution to compare.");
      if (one.probabilities.length !== two.probabilities.length) return el("p", { class: "soft" }, "The two models choose among different things: their distributions cannot be laid side by side.");
      const ids = [...new Set([...one.order.slice(0, BENCH_ROWS), ...two.order.slice(0, BENCH_ROWS)])];
      const divergence = one.probabilities.reduce((sum, p, i) => (p > 0 ? sum + p * Math.log2(p / Math.max(two.probabilities[i], 1e-300)) : sum), 0);
      const change = (id) => two.probabilities[id] - one.probabilities[id];
      const row = (id) => el("tr", { "data-id": id }, el("th", { scope: "row", class: "mono token", dir: "auto" }, one.names.get(id) || two.names.get(id) || `id ${id}`), [one, two].map((side) => el("td", { class: "number", "data-value": side.probabilities[id] }, percent(side.probabilities[id]))), el("td", { class: `number ${change(id) < 0 ? "less" : "more"}` }, points(change(id)).replace(" points", "")));
      return el(
        "div",
        { class: "wide", tabindex: "0", role: "group", "aria-label": "A versus B" },
        el("p", {}, `Read at “${ours.columns[placeOf(ours)]}” and “${theirs.columns[placeOf(theirs)]}”. KL divergence of B from A: `, el("strong", { id: "compare-kl", "data-value": divergence }, `${figure(divergence)} bits`)),
        el("table", { id: "compare-table" }, el("thead", {}, el("tr", {}, ["choice", "A", "B", "B − A, points"].map((name, place) => el("th", { class: place ? "number" : null }, name)))), el("tbody", {}, ids.map(row))),
      );
    }

    /** A map of both signs with a title, its scale and what a click does. */
    function signedMap({ id, title, words, values, rows, columns, unit, describe, onPin, most = values.reduce((best, value) => Math.max(best, Math.abs(value || 0)), 1e-9) }) {
      let at = [0, 0];
      const wide = root.clientWidth || 700;
      const beside = wide <= 780 ? 0 : id ? BENCH_TABLE : wide / 2; // what stands next to it
      const room = Math.max(180, Math.min(640, wide - beside - 190));
      const map = heatmap({ values, painted: values.map((value) => value || 0), rows, columns, room, low: -most, high: most, signed: true, upward: true, name: `${title}. Arrow keys move from cell to cell, Enter chooses one.`, onCell: (row, column) => { if (row >= 0) at = [row, column]; }, onPin: () => onPin && onPin(...at), describe });
      map.canvas.dataset.values = JSON.stringify(Array.from(values));
      return el("figure", { id, class: "signed-map" }, el("figcaption", {}, el("h4", {}, title), words ? el("p", { class: "soft" }, words) : null), map.root, most > 1e-9 ? scaleBar(unit, Number((-most).toPrecision(3)), Number(most.toPrecision(3)), true) : el("p", { class: "soft" }, "No difference anywhere."));
    }

    /** The probability of one choice by layer and column: of a live model in pieces, so that other views can come between; once a run is read through, another choice is quick. */
    async function followedOf(run, choice, choices) {
      const path = `run/${run.run}/followed/${choice}`;
      if (!app.source.live) return unpack((await app.source.get(path)).p);
      const layers = (run.model ? app.store.get("model").other : app.store.get("model")).layers + 1;
      const count = Math.min(readThrough.has(run.run) ? run.columns.length : Math.max(Math.floor(BENCH_SCORES / (layers * choices)), 4), run.columns.length);
      const pieces = [];
      for (let first = 0; first < run.columns.length; first += count) pieces.push(unpack((await app.source.get(`${path}?first=${first}&count=${count}`)).p));
      readThrough.add(run.run);
      const rows = Array.from({ length: pieces[0].shape[0] }, (_, layer) => pieces.flatMap(({ shape, values }) => Array.from(values.subarray(layer * shape[1], (layer + 1) * shape[1]))));
      return { shape: [rows.length, run.columns.length], values: Float32Array.from(rows.flat()) };
    }

    /** The answer after each layer, A less B, for the tokens that both have. */
    async function lensMap(choice, label, pairs, choices) {
      const [one, two] = sides();
      const both = pairs.filter(([mine, theirs]) => mine !== null && theirs !== null);
      const [ours, theirs] = await Promise.all([one, two].map((run) => followedOf(run, choice, choices)));
      if (ours.shape[0] !== theirs.shape[0]) return el("p", { class: "soft" }, `The models have ${ours.shape[0] - 1} and ${theirs.shape[0] - 1} layers: their lenses have no difference.`);
      const tokens = one.columns.length === one.tokens.labels.length && two.columns.length === two.tokens.labels.length;
      const columns = tokens ? both : one.columns.map((_, place) => [place, place]);
      const names = columns.map(([mine, other]) => (one.columns[mine] === two.columns[other] ? one.columns[mine] : `${one.columns[mine]}/${two.columns[other]}`));
      const rows = Array.from({ length: ours.shape[0] }, (_, layer) => (layer ? `block ${layer - 1}` : "embedding"));
      const values = Float32Array.from(rows.flatMap((_, layer) => columns.map(([mine, other]) => ours.values[layer * ours.shape[1] + mine] - theirs.values[layer * theirs.shape[1] + other])));
      const pin = (_, column) => { if (tokens) { app.store.values.at = columns[column][1]; app.store.set("position", columns[column][0]); app.store.set("selected", {}); show(); } };
      return signedMap({ id: "bench-lens", title: `Lens: probability of “${label}”, A − B`, words: "What each side would say if it stopped after a layer.", values, rows, columns: names, unit: "difference", onPin: pin, describe: (row, column, value) => `${rows[row]}, ${names[column]}: ${points(value)}` });
    }

    /** What each head adds to the logit of one answer, A less B. */
    async function headMap(choice, label) {
      const foil = app.store.get("foil");
      const bodies = await Promise.all(sides().map((run) => app.source.get(`run/${run.run}/contributions?position=${placeOf(run)}&token=${choice}${foil === null || foil === choice ? "" : `&against=${foil}`}`)));
      const [ours, theirs] = bodies.map((body) => new Map(body.terms.filter((term) => term.head !== null).map((term) => [term.name, term])));
      const there = [...ours.values()].filter((term) => theirs.has(term.name));
      if (!there.length) return null;
      const rows = [...new Set(there.map((term) => term.name.replace(/\.\d+$/, "")))];
      const most = Math.max(...there.map((term) => term.head)) + 1;
      const at = (row, head) => `${rows[row]}.${head}`;
      const value = (name) => (ours.has(name) && theirs.has(name) ? ours.get(name).value - theirs.get(name).value : NaN);
      const values = Float32Array.from(rows.flatMap((_, row) => Array.from({ length: most }, (_, head) => value(at(row, head)))));
      return signedMap({ id: "bench-heads", title: `Heads: direct contribution to “${label}”, A − B`, words: "Choose one to show its attention.", values, rows: rows.map((row) => (/\D/.test(row) ? row.replace(".", " ") : `layer ${row}`)), columns: Array.from({ length: most }, (_, head) => String(head)), unit: "logits", onPin: (row, head) => { app.store.set("head", at(row, head)); app.open("attention"); }, describe: (row, head, value) => (Number.isNaN(value) ? "no such head" : `head ${at(row, head)}: ${signed(value)} logits`) });
    }

    const patchPath = (run, kind) => `patch/${other.run}/${kind}?position=${columnOf(run, app.store.get("position"))}${app.store.get("target") === null ? "" : `&token=${app.store.get("target")}`}${app.store.get("foil") === null ? "" : `&against=${app.store.get("foil")}`}`;

    /** Why nothing can be patched between two runs, where that is known before; null where it can. */
    function unpatched(first, second, one, two) {
      const [ours, theirs] = [first, second].map((run) => (run.source || run.tokens).labels.length);
      if (first.model !== second.model) return "Patching takes two texts of one model.";
      if (ours !== theirs) return `The texts have ${ours} and ${theirs} tokens: patching goes token by token, so give texts of equal length.`;
      return one.probabilities.every((p, id) => Math.abs(p - two.probabilities[id]) < 1e-7) ? "Both sides say the same there: patching has nothing to bring back." : null;
    }

    const patchOf = (node) => { const run = app.store.get("run"); return run && other ? [run, patchPath(run, node === patchHeads ? "heads" : part.value)] : [run, null]; };
    const askPatches = new Map([patchHeads, patchTokens].map((node) => [node, asks(node, () => patchOf(node), (error) => { progress.end(); replace(node, el("p", { class: "soft" }, error.message)); })]));

    /** The patches of one kind of part: computed at once where that is quick, else when asked for. */
    const patched = (node, now = false) => askPatches.get(node)(async (wait) => {
      const [run, path] = patchOf(node);
      const kind = node === patchHeads ? "heads" : part.value;
      if (!path || run.task === "embed") return null;
      const model = app.store.get("model");
      const length = run.tokens.labels.length + (run.source ? run.source.labels.length : 0);
      const rows = kind === "heads" ? model.attentions.reduce((sum, entry) => sum + (entry.removable === false ? 0 : entry.heads), 0) : (model.layers + (model.encoder_layers || 0) + 1) * length;
      replace(patchSaid);
      if (node.dataset.of !== path) replace(node); // what is there is of another answer
      node.dataset.of = path;
      if (!app.source.has(`run/${run.run}/${path}`)) return replace(node, el("p", { class: "soft" }, "These patches were not recorded in this file."));
      if (!now && app.source.live && rows * length > BENCH_AT_ONCE) return replace(node, el("p", {}, `${rows.toLocaleString("en")} runs of ${length} tokens. `, el("button", { type: "button", class: "patch-run", onclick: () => patched(node, true) }, "Patch them all")));
      const body = await wait(app.source.job(run.run, path, progress.tell, () => wait.still() && root.offsetParent !== null));
      progress.end();
      if (body) return showPatches(node, body);
      return replace(node, el("p", {}, "These patches were not computed. ", el("button", { type: "button", class: "patch-run", onclick: () => patched(node, true) }, "Patch them all")));
    });

    function showPatches(node, body) {
      const run = app.store.get("run");
      const said = (map, row, column, value) => (map.part.endsWith("heads") ? `head ${map.rows[row]}.${map.columns[column]}` : `${map.part} ${map.rows[row]} at “${map.columns[column]}”`) + (value === null || Number.isNaN(value) ? ": no such head" : `: ${percent(Math.abs(value)).replace(/^/, value < 0 ? "−" : "")} comes back`);
      const pin = (map) => (row, column) => {
        const heads = map.part.endsWith("heads");
        const name = `${map.part === "cross heads" ? "cross." : map.stack === "encoder" ? "encoder." : ""}${map.rows[row]}.${map.columns[column]}`;
        if (heads) app.store.set("head", name);
        else if (map.stack !== "encoder" && column < run.tokens.labels.length) app.store.set("layer", Math.min(row, app.store.get("model").layers));
        replace(patchSaid, said(map, row, column, map.values[row][column]), ". ", heads ? el("button", { type: "button", onclick: () => app.open("attention") }, `Show attention of head ${name}`) : null, heads && app.source.live ? el("button", { type: "button", onclick: () => { setOther(other); app.store.set("off", name); app.store.set("how", "second"); app.open("ablate"); } }, "Take it from B instead") : null);
      };
      replace(
        patchWords,
        el("p", { id: "patch-words", "data-clean": body.clean_difference, "data-corrupt": body.corrupt_difference }, "A says ", el("strong", { class: "mono", dir: "auto" }, body.answer), ", B says ", el("strong", { class: "mono", dir: "auto" }, body.wrong), `: the first leads by ${figure(body.clean_difference)} logits in A and ${figure(body.corrupt_difference)} in B. A cell is B with this one thing taken from A: 0 is still B, 1 is all of A.${body.note ? ` ${body.note}.` : ""}`),
      );
      replace(
        node,
        body.maps.map((map) => signedMap({ id: null, title: `${map.stack ? `${map.stack}, ` : ""}${BENCH_TITLES[map.part] || map.part}`, values: Float32Array.from(map.values.flat().map((value) => value ?? NaN)), rows: map.rows.map((row) => (row === "end" ? "end" : `layer ${row}`)), columns: map.columns, unit: "share that comes back", most: 1, onPin: pin(map), describe: (row, column, value) => said(map, row, column, value) })),
      );
    }

    /** Mark the token that is read on each side. */
    function markPlaces() {
      const [, two] = sides();
      const read = { position: app.store.get("position"), at: two.columns.length === two.tokens.labels.length ? placeOf(two) : -1 };
      for (const [key, here] of Object.entries(read)) for (const chip of shown.querySelectorAll(`[data-${key}]`)) press(chip, Number(chip.dataset[key]) === here);
    }

    /** Where tokens, answers, maps and patches of two runs go: made once, so that another place loses no focus. */
    function framed(first, second) {
      if (frame?.first === first && frame.second === second && shown.firstChild) return frame;
      const pairs = benchAligned(first.tokens.labels, second.tokens.labels);
      const [answer, lens, heads, below] = [el("div", {}), el("div", {}), el("div", {}), el("div", {})];
      replace(patchHeads);
      replace(patchTokens);
      replace(patchWords);
      replace(shown, tokensOf(pairs), el("div", { class: "bench bench-top" }, answer, lens, heads), below);
      const map = (node) => asks(node, about, (error) => replace(node, el("p", { class: "soft" }, error.message)), false);
      frame = { first, second, pairs, answer, lens, heads, below, askLens: map(lens), askHeads: map(heads) };
      return frame;
    }

    const about = () => [...sides(), ...["position", "at", "target", "foil"].map((key) => app.store.get(key))];
    const ask = asks(shown, about, (error) => { problem.textContent = error.message; });
    const show = () => ask(async (wait) => {
      const [first, second] = sides();
      if (!first || !second) return replace(shown);
      problem.textContent = "";
      if (frame && (frame.first !== first || frame.second !== second)) replace(shown); // two other runs
      const [one, two] = await wait(Promise.all([first, second].map(nextOf)));
      const { answer, below } = framed(first, second);
      markPlaces();
      replace(answer, answers(one, two));
      const why = one && two ? unpatched(first, second, one, two) : null;
      const patches = one && first.model === second.model && !why;
      if (!patches) replace(below, why && el("p", { class: "soft" }, why));
      else if (!below.querySelector("#patch")) replace(below, el("div", { id: "patch" }, el("h4", {}, "Patch: what of A brings its answer back in B?"), patchWords, el("div", { class: "row toolbar" }, el("div", {}, el("label", { for: "patch-part" }, "Of each layer, token by token, take"), part)), el("div", { class: "bench" }, patchHeads, patchTokens), progress.root, patchSaid));
      showMaps(frame, one, two, patches, wait.still);
      return null;
    });

    /** The maps under the answers; where something else is wanted meanwhile, its question draws them. */
    async function showMaps({ pairs, lens, heads, askLens, askHeads }, one, two, patches, still) {
      if (one && two && one.probabilities.length === two.probabilities.length) {
        const choice = app.store.get("target") ?? one.order[0];
        const label = one.names.get(choice) || two.names.get(choice) || `id ${choice}`;
        await Promise.all([
          askHeads(async (wait) => replace(heads, await wait(headMap(choice, label)))),
          askLens(async (wait) => replace(lens, await wait(lensMap(choice, label, pairs, one.probabilities.length)))),
        ]);
      }
      if (patches && still()) for (const node of [patchHeads, patchTokens]) patched(node);
    }

    app.store.on("model", (model) => {
      replace(which, [model, model.other].filter(Boolean).map((one, place) => el("option", { value: place, selected: place === (model.other ? 1 : 0) }, one.name)));
      whichBox.hidden = !model.other;
      textBox.hidden = model.input === "patches";
      imageBox.hidden = model.input !== "patches";
      setOther(null);
      sent = null;
      controls.hidden = !app.source.live;
      replace(shown);
    });
    app.store.listen("run", () => {
      if (other && other === suggestion) [other, suggestion, text.value] = [null, null, ""]; // it was made of the text before
      return restore().then(begin);
    });
    app.store.listen("view", begin);
    app.store.listen("second", (second) => { if (second && second !== sent) restore(); });
    for (const key of ["position", "at", "target", "foil", "view"]) app.store.listen(key, () => { if (root.offsetParent) show(); });
    app.store.on("theme", () => show());
  },
};
