// Inside one head, at the chosen token: five stops from q·k to the mix of values, each with its numbers.

import { amountColour, css, inkOn, signedColour } from "./colour.js";
import { el, figure, percent, replace, tokenText } from "./dom.js";
import { asks, whenNear } from "./query.js";
import { leadingHead } from "./selection.js";

const HEAD_CHIPS = 96; // tokens that are shown as chips too
const HEAD_ROWS = 24; // sources that are listed; of more, those with the largest shares

/** The name of the first head with a pattern. */
function headFirst(model) {
  const first = model.attentions.find((entry) => entry.pattern !== false);
  return `${first.kind === "self" ? "" : `${first.kind}.`}${first.layer}.0`;
}

export const headSection = {
  id: "head",
  title: "Step through",
  hint: "How one head decides where the chosen token looks, and what it takes from there. A row is a token that it may look at; go from step to step.",
  applies: (model) => model.attentions.some((entry) => entry.pattern !== false && entry.heads > 0),

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const which = el("h3", { id: "head-which" });
    const stops = el("ol", { class: "stops", "aria-label": "Steps" });
    const words = el("div", { id: "head-words", "aria-live": "polite" });
    const table = el("div", { class: "wide", id: "head-table", tabindex: "0", role: "group", "aria-label": "Numbers at each step" });
    const recorded = el("p", { class: "soft", id: "head-recorded" });
    replace(root, problem, recorded, which, stops, el("div", { class: "head-panes" }, table, words));
    let body = null;
    let at = 4;

    const nameOf = () => app.store.get("head") || leadingHead(app) || headFirst(app.store.get("model"));
    const shade = (stop, value, most) => (["softmax", "mix"].includes(stop) ? amountColour(value / most) : signedColour((0.8 * value) / most));
    const said = (stop, value) => (value === null ? "hidden" : stop === "softmax" ? percent(value) : figure(value));

    /** The tokens that may be looked at, tinted by the numbers of one stop. */
    function tinted(stop, most) {
      if (body.columns.length > HEAD_CHIPS) return null;
      return el("ul", { class: "chips looks", "aria-label": `Tokens, tinted by ${stop.stop}` }, body.columns.map((label, source) => {
        const value = stop.values[source];
        const colour = value === null ? null : shade(stop.stop, value, most);
        return el("li", { class: "chip", style: colour ? { background: css(colour), color: inkOn(colour) } : {} }, tokenText(label), el("small", {}, said(stop.stop, value)));
      }));
    }

    function draw() {
      if (!body) return;
      const softmax = body.stops.find((stop) => stop.stop === "softmax").values;
      const order = softmax.map((_, place) => place).sort((a, b) => softmax[b] - softmax[a]);
      const listed = order.slice(0, HEAD_ROWS).sort((a, b) => a - b);
      const most = body.stops.map((stop) => Math.max(...stop.values.map((value) => Math.abs(value ?? 0)), 1e-9));
      const state = (place) => [place <= at ? "past" : "", place === at ? "here" : ""].filter(Boolean).join(" ") || null;
      replace(which, `Head ${body.head}, read at “${body.label}” (${body.reader})`);
      replace(stops, body.stops.map((stop, place) => el("li", {}, el("button", { type: "button", "data-stop": stop.stop, "aria-pressed": String(place === at), onclick: () => { at = place; draw(); stops.querySelectorAll("button")[place].focus(); } }, `${place + 1} ${stop.stop}`))));
      replace(words, el("p", { class: "formula mono" }, body.stops[at].formula), el("p", {}, body.stops[at].why), tinted(body.stops[at], most[at]));
      const cell = (stop, place, source) => {
        const value = stop.values[source];
        const colour = value === null ? null : shade(stop.stop, value, most[place]);
        return el("td", { class: `number${state(place) ? ` ${state(place)}` : ""}`, "data-value": value, style: colour ? { background: css(colour), color: inkOn(colour) } : {} }, said(stop.stop, value));
      };
      const rows = listed.map((source) => el("tr", { "data-source": source }, el("th", { scope: "row" }, tokenText(body.columns[source], "mono token"), el("span", { class: "soft" }, ` ${source}`)), body.stops.map((stop, place) => cell(stop, place, source))));
      const left = softmax.length - listed.length;
      replace(table, el("table", { class: "stop-table" }, el("thead", {}, el("tr", {}, el("th", { class: "past" }, "looks at"), body.stops.map((stop, place) => el("th", { class: state(place) }, stop.stop)))), el("tbody", {}, rows)), left ? el("p", { class: "soft" }, `The ${HEAD_ROWS} tokens with the largest shares; ${left} more have less.`) : null);
    }

    /** What a file has of this head, or of another: it opens on the nearest, and says so. */
    function nearest(run, name, reader) {
      const wanted = `${name}/${reader}`;
      replace(recorded);
      if (app.source.has(`run/${run.run}/stops/${wanted}`)) return wanted;
      const there = app.source.list(`run/${run.run}/stops/`);
      const found = there.filter((path) => path.startsWith(`${name}/`)).sort((a, b) => Math.abs(a.split("/")[1] - reader) - Math.abs(b.split("/")[1] - reader))[0] || there[0];
      if (!found) throw new Error("the steps of heads were not recorded in this file");
      const [head, place] = found.split("/");
      replace(recorded, head === name ? `In this file, head ${name} can be stepped through at token ${place} only.` : `In this file, the steps of head ${name} are not recorded; this is head ${head}.`);
      return found;
    }

    function failed(error) {
      body = null;
      for (const node of [which, stops, words, table]) replace(node);
      problem.textContent = error.message;
    }

    const ask = asks(root, () => [app.store.get("run"), nameOf(), app.store.get("position")], failed);
    const load = () => ask(async (wait) => {
      const [run, name] = [app.store.get("run"), nameOf()];
      if (!run) return;
      const count = (name.startsWith("encoder.") && run.source ? run.source : run.tokens).labels.length;
      problem.textContent = "";
      body = await wait(app.source.get(`run/${run.run}/stops/${nearest(run, name, Math.min(app.store.get("position"), count - 1))}`));
      at = Math.min(at, body.stops.length - 1);
      draw();
    });

    whenNear(root, app, load);
    for (const key of ["head", "leading", "position", "view"]) app.store.listen(key, () => { if (root.offsetParent) load(); });
    app.store.listen("theme", draw);
  },
};
