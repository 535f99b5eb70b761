// The alignment ribbon of an encoder-decoder: what was read above, what was written below, bands where cross-attention looks.

import { el, percent, replace, svg } from "./dom.js";
import { asks, whenNear } from "./query.js";
import { saveButtons } from "./picture.js";
import { unpack } from "./source.js";

const RIBBON_COLUMN = 26; // pixels of a token at least; where not all fit, those around the chosen one are drawn
const RIBBON_LEAST = 0.5; // of the largest share of its row, below which a band is not drawn
const RIBBON_HALF = 13; // pixels of half the widest band
const RIBBON_HIGH = 336; // pixels from what was read to what is written

/** Where tokens stand in a row of this width. */
function ribbonPlaces(labels, width) {
  const wide = width / Math.max(labels.length, 1);
  return labels.map((_, place) => wide * (place + 0.5));
}

export const ribbonSection = {
  id: "ribbon",
  title: "Alignment",
  hint: "What the decoder looks at while it writes. Below, each token that it has read, and → the one that it writes next; bands lead from there to what the encoder read, as wide as their share of cross-attention. Choose a token to see its bands.",
  applies: (model) => model.attentions.some((entry) => entry.kind === "cross" && entry.pattern !== false),

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const which = el("select", { id: "ribbon-head", onchange: () => show() });
    const picture = el("div", { class: "wide", id: "ribbon-picture", tabindex: "0", role: "group", "aria-label": "The ribbon" });
    const list = el("div", { id: "ribbon-list", "aria-live": "polite" });
    let drawing = null;
    let pattern = null;

    function draw() {
      const run = app.store.get("run");
      if (!pattern || !run || !run.source) return;
      const chosen = Math.min(Math.floor(app.store.get("position") / pattern.aggregated), pattern.rows.length - 1);
      const width = picture.clientWidth || 800;
      const fit = Math.max(8, Math.floor(width / RIBBON_COLUMN));
      const from = (count, around) => Math.max(0, Math.min(around - Math.floor(fit / 2), count - fit));
      const row = (place) => pattern.values.subarray(place * pattern.columns.length, (place + 1) * pattern.columns.length);
      const best = row(chosen).reduce((most, share, place, all) => (share > all[most] ? place : most), 0);
      const [left, first] = [from(pattern.columns.length, best), from(pattern.rows.length, chosen)];
      const [read, written] = [pattern.columns.slice(left, left + fit), pattern.rows.slice(first, first + fit)];
      const [above, below] = [ribbonPlaces(read, width), ribbonPlaces(written, width)];
      const bands = written.flatMap((_, number) => {
        const shares = row(first + number);
        const most = Math.max(...shares);
        return read.map((__, column) => ({ row: number, column, share: shares[left + column] })).filter(({ share }) => share >= RIBBON_LEAST * most).sort((x, y) => y.share - x.share).slice(0, first + number === chosen ? 6 : 3);
      });
      const widest = Math.max(...bands.map(({ share }) => share), 1e-9);
      const here = chosen - first;
      bands.sort((x, y) => (x.row === here) - (y.row === here));
      const short = (text, count) => (text.length > count ? `${text.slice(0, count - 1)}…` : text);
      const letters = (labels) => Math.max(3, Math.floor(width / labels.length / 8));
      const [low, middle] = [RIBBON_HIGH - 52, RIBBON_HIGH / 2];
      const next = (place) => (pattern.aggregated === 1 ? pattern.rows[first + place + 1] : null); // what is written there
      const band = ({ row: number, column, share }) => {
        const [x1, x2, half] = [above[column], below[number], Math.max(1, (RIBBON_HALF * share) / widest)];
        return svg("path", { d: `M${x1 - half},34 C${x1 - half},${middle} ${x2 - half},${middle} ${x2 - half},${low} L${x2 + half},${low} C${x2 + half},${middle} ${x1 + half},${middle} ${x1 + half},34 Z`, class: `ribbon-band${number === here ? " ribbon-chosen" : ""}`, "fill-opacity": number === here ? 0.75 : 0.12 + (0.3 * share) / widest }, svg("title", {}, `${written[number]} looks at ${read[column]}: ${percent(share)}`));
      };
      drawing = svg(
        "svg",
        { viewBox: `0 0 ${width} ${RIBBON_HIGH}`, width, height: RIBBON_HIGH, class: "ribbon", role: "img", "aria-label": "Bands from written tokens to what was read; the list names them" },
        bands.map(band),
        read.map((label, place) => svg("text", { x: above[place], y: 24, "text-anchor": "middle", class: "mono" }, short(label, letters(read)))),
        written.map((label, place) => svg("text", { x: below[place], y: RIBBON_HIGH - 32, "text-anchor": "middle", class: `mono${place === here ? " ribbon-here" : ""}`, "data-token": first + place, onclick: () => app.store.set("position", (first + place) * pattern.aggregated) }, short(label, letters(written)))),
        written.map((_, place) => (next(place) ? svg("text", { x: below[place], y: RIBBON_HIGH - 12, "text-anchor": "middle", class: `mono ribbon-next${place === here ? " ribbon-here" : ""}` }, short(`→${next(place)}`, letters(written))) : null)),
      );
      replace(picture, drawing);
      const own = Array.from(row(chosen)).map((share, place) => ({ share, place })).sort((a, b) => b.share - a.share).slice(0, 5);
      replace(list, el("p", {}, next(here) ? ["Before it writes “", el("span", { class: "mono" }, next(here)), "”, "] : null, "“", el("span", { class: "mono" }, pattern.rows[chosen]), "” looks at ", own.map(({ share, place }, number) => [number ? ", " : "", el("span", { class: "mono" }, pattern.columns[place]), " ", el("span", { class: "number", "data-value": share }, percent(share))]), `. The widest band is ${percent(widest)}.`));
    }

    /** The mean of a layer's heads, or one head. */
    const ask = asks(root, () => [app.store.get("run"), which.value], (error) => { problem.textContent = error.message; });
    const show = () => ask(async (wait) => {
      const run = app.store.get("run");
      problem.textContent = "";
      if (!run?.source) return;
      const [layer, head] = which.value.split(".").map(Number);
      const body = await wait(app.source.get(`run/${run.run}/attention/cross/${layer}`));
      const { shape, values } = unpack(body.pattern);
      const cells = shape[1] * shape[2];
      const mean = new Float32Array(cells);
      const heads = Number.isNaN(head) || head === undefined ? Array.from({ length: shape[0] }, (_, number) => number) : [head];
      for (const number of heads) for (let i = 0; i < cells; i++) mean[i] += values[number * cells + i] / heads.length;
      pattern = { values: mean, rows: body.rows, columns: body.columns, aggregated: body.aggregated };
      draw();
    });

    function load() {
      if (!app.store.get("run").source) return show();
      const before = which.value;
      replace(root, problem, el("div", { class: "row toolbar" }, el("div", {}, el("label", { for: "ribbon-head" }, "Cross-attention of"), which)), picture, list, saveButtons(() => drawing, "alignment"));
      const layers = app.store.get("model").attentions.filter((entry) => entry.kind === "cross" && entry.pattern !== false);
      replace(which, layers.flatMap(({ layer, heads }) => [el("option", { value: String(layer) }, `layer ${layer}, all heads`), ...Array.from({ length: heads }, (_, head) => el("option", { value: `${layer}.${head}` }, `head cross.${layer}.${head}`))]));
      which.value = [...which.options].some((one) => one.value === before) ? before : String(layers.at(-1).layer);
      return show();
    }

    whenNear(root, app, load);
    app.store.listen("position", () => { if (root.offsetParent) draw(); });
    app.store.listen("view", () => { if (root.offsetParent && pattern) draw(); });
    new ResizeObserver(() => { if (drawing && root.offsetParent && Math.abs(picture.clientWidth - Number(drawing.getAttribute("width"))) > 24) draw(); }).observe(picture);
  },
};
