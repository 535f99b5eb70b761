// The lens: what the model would say if it stopped after each layer; and what each of its parts adds to a choice.

import { amountColour, css, inkOn, signedColour } from "./colour.js";
import { el, figure, percent, replace, svg, tokenText } from "./dom.js";
import { scaleBar } from "./heatmap.js";
import { askAhead, asks, whenNear } from "./query.js";
import { saveButtons } from "./picture.js";
import { columnOf } from "./selection.js";
import { LensTables } from "./source.js";

const LENS_SHOWS = { p: "probability of the best choice", final: "probability of the final choice", entropy: "entropy in bits" };
const LENS_WIDE = 32; // columns that are drawn at once, about two screens
const LENS_PIECE = 4; // columns that are asked for at once, where their scores are many
const LENS_DRAWN = 60; // milliseconds until a grid that is being filled is drawn, and drawn again
const LENS_SCORES = 1e6; // of all layers and columns, that are asked for in one piece: they come within 100 ms

/** A small chart: a value by layer. */
function lensChart(values, layers, name) {
  const width = 420;
  const height = 130;
  const x = (i) => 40 + (i / Math.max(values.length - 1, 1)) * (width - 60);
  const y = (value) => 14 + (1 - value) * (height - 44);
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "chart small", role: "img", "aria-label": `${name} by layer` },
    [0, 0.5, 1].map((level) => svg("text", { x: 34, y: y(level) + 4, "text-anchor": "end" }, level)),
    svg("polyline", { class: "curve curve-forward", points: values.map((value, i) => `${x(i)},${y(value)}`).join(" ") }),
    values.map((value, i) => svg("circle", { class: "curve curve-forward dot", cx: x(i), cy: y(value), r: 3.5 }, svg("title", {}, `${layers[i]}: ${percent(value)}`))),
    svg("text", { x: x(0), y: height - 6, "text-anchor": "middle" }, layers[0]),
    svg("text", { x: x(values.length - 1), y: height - 6, "text-anchor": "end" }, layers.at(-1)),
  );
}

export const lensSection = {
  id: "lens",
  title: "Lens",
  applies: (model) => model.task !== "embed",
  hint: "What the model would say if it stopped after each layer, at each position: the last norm and the output layer on every layer's state. The last layer, at the top, is what it says.",

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const grid = el("div", { class: "wide", id: "lens-grid" });
    const detail = el("div", { id: "lens-detail", "aria-live": "polite" });
    const parts = el("div", { id: "lens-parts" });
    const window = el("div", { class: "row" });
    const shows = el("select", { id: "lens-shows", onchange: () => draw() }, Object.entries(LENS_SHOWS).map(([value, words]) => el("option", { value }, words)));
    const scale = el("div", { id: "lens-scale" });
    replace(root, el("div", { class: "row toolbar" }, el("div", {}, el("label", { for: "lens-shows" }, "Colour"), shows), scale, window), problem, grid, el("div", { class: "lens-panes" }, detail, parts));
    const bar = el("progress", { "aria-label": "Columns of the lens that are there", max: 1, value: 0 });
    const waits = el("p", { class: "soft", id: "lens-waits", hidden: true }, "Reading every layer… ", bar);
    grid.before(waits);
    let view = null;
    let first = 0;
    let chosen = [0, 0];
    let drawnAs = ""; // the columns and colours of the grid
    let partsWait = false; // until somebody looks

    function value(layer, column) {
      if (shows.value === "entropy") return view.entropy(layer, column);
      return shows.value === "final" ? view.final(layer, column) : view.top(layer, column)[0].p;
    }

    /** Pin a cell: its layer, and its token where the columns are tokens. */
    function pinCell(layer, column, focus) {
      choose(layer, column, focus);
      app.store.set("layer", layer);
      if (columnOf(app.store.get("run"), column) === column) app.store.set("position", column);
    }

    function choose(layer, column, focus) {
      chosen = [layer, column];
      const before = grid.querySelector('td[aria-selected="true"]');
      if (before) {
        before.tabIndex = -1;
        before.setAttribute("aria-selected", "false");
      }
      const here = grid.querySelector(`td[data-layer="${layer}"][data-column="${column}"]`);
      if (here) {
        here.tabIndex = 0;
        here.setAttribute("aria-selected", "true");
        if (focus) here.focus();
      }
      if (!view.has(column)) return;
      const best = view.top(layer, column);
      replace(
        detail,
        el("h3", {}, `${view.layers[layer]}, at `, el("span", { class: "mono" }, view.columns[column])),
        el(
          "div",
          { class: "row" },
          el("table", { class: "candidates" }, el("tbody", {}, best.map((entry) => el("tr", { "data-id": entry.id }, el("th", { scope: "row", class: "mono token", dir: "auto" }, entry.label), el("td", { class: "number", "data-value": entry.p }, percent(entry.p)))))),
          el("figure", { class: "grow" }, lensChart(view.layers.map((_, row) => view.final(row, column)), view.layers, `probability of ${view.chosen(column)}`), el("figcaption", { class: "soft" }, "Probability of the final choice, ", el("span", { class: "mono" }, view.chosen(column)), `, by layer; entropy here ${figure(view.entropy(layer, column))} bits`)),
        ),
      );
      showParts();
    }

    function keys(event) {
      const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const layer = Math.min(Math.max(chosen[0] + step[0], 0), view.layers.length - 1);
      const column = Math.min(Math.max(chosen[1] + step[1], first), Math.min(first + LENS_WIDE, view.columns.length) - 1);
      pinCell(layer, column, true);
    }

    function cell(layer, column, most) {
      if (!view.has(column)) return el("td", { role: "gridcell", class: "soft", "data-layer": layer, "data-column": column }, "…");
      const best = view.top(layer, column)[0];
      const amount = value(layer, column);
      const colour = amountColour(Math.min(amount / most, 1));
      return el(
        "td",
        {
          tabindex: "-1",
          role: "gridcell",
          "data-layer": layer,
          "data-column": column,
          "data-value": amount,
          "data-id": best.id,
          style: { background: css(colour), color: inkOn(colour) },
        },
        tokenText(best.label, "mono token", 9),
      );
    }

    /** The cell of an event: [layer, column]; null where it is none, or not there yet. */
    function cellOf(event) {
      const found = event.target.closest("td[data-value]");
      return found && [Number(found.dataset.layer), Number(found.dataset.column)];
    }

    /** What the cell under the pointer says, in full. */
    function entitle(event) {
      const at = cellOf(event);
      const best = at && view.has(at[1]) ? view.top(...at)[0] : null;
      if (best) event.target.closest("td").title = `${best.label}: ${percent(best.p)}`;
    }

    const mostShown = () => (shows.value === "entropy" ? view.mostEntropy : 1);

    /** Put columns that have come into a grid that is drawn already; where its colours change, draw all of it. */
    function fillColumns(columns) {
      const rows = [...grid.querySelectorAll("tbody tr")];
      if (drawnAs !== `${first} ${shows.value} ${mostShown()}` || rows.length !== view.layers.length) return draw();
      const focused = grid.contains(document.activeElement);
      rows.reverse().forEach((row, layer) => { for (const column of columns) row.children[column - first + 1].replaceWith(cell(layer, column, mostShown())); });
      return columns.includes(chosen[1]) ? choose(chosen[0], chosen[1], focused) : null;
    }

    function draw() {
      if (!view) return;
      const last = Math.min(first + LENS_WIDE, view.columns.length);
      const columns = Array.from({ length: last - first }, (_, i) => first + i);
      const most = mostShown();
      const focused = grid.contains(document.activeElement);
      drawnAs = `${first} ${shows.value} ${most}`;
      const head = el("tr", { role: "row" }, el("th", { role: "columnheader", class: "corner" }, "layer"), columns.map((column) => el("th", { role: "columnheader", title: view.columns[column] }, tokenText(view.columns[column], "mono token", 9))));
      const rows = view.layers.map((name, layer) => el("tr", { role: "row" }, el("th", { role: "rowheader", class: "corner" }, name), columns.map((column) => cell(layer, column, most)))).reverse(); // as everywhere, the first layer is at the bottom
      replace(grid, el("table", { class: "lens", role: "grid", "aria-label": `What the model would say, by layer and position; colour: ${LENS_SHOWS[shows.value]}`, onkeydown: keys, onpointerover: entitle, onclick: (event) => { const at = cellOf(event); if (at) pinCell(...at, false); } }, el("tbody", { role: "rowgroup" }, rows), el("tfoot", { role: "rowgroup" }, head)));
      replace(scale, scaleBar(shows.value === "entropy" ? "bits" : "probability", 0, shows.value === "entropy" ? Number(most.toFixed(1)) : 1));
      const step = (by) => () => { first = Math.min(Math.max(first + by, 0), Math.max(view.columns.length - LENS_WIDE, 0)); showWindow(); };
      replace(window, view.columns.length > LENS_WIDE ? [el("button", { type: "button", onclick: step(-LENS_WIDE) }, "Earlier tokens"), el("span", { class: "soft" }, `${first} to ${last - 1} of ${view.columns.length}`), el("button", { type: "button", onclick: step(LENS_WIDE) }, "Later tokens")] : null);
      choose(chosen[0], Math.min(Math.max(chosen[1], first), last - 1), focused);
      showMarked();
    }

    /** Scroll to the chosen column. */
    function showMarked() {
      const marked = root.offsetParent && grid.querySelector('td[aria-selected="true"]');
      if (marked) grid.scrollLeft = marked.offsetLeft + marked.offsetWidth - grid.clientWidth;
    }

    /** The columns to ask for next, those around the chosen one first: {start, count, left}; null where all are there. */
    function nextPiece(run, tables, from, at) {
      const last = Math.min(from + LENS_WIDE, run.columns.length);
      const missing = Array.from({ length: last - from }, (_, i) => from + i).filter((column) => !tables.has(column));
      if (!missing.length) return null;
      const { layers, vocab_size } = app.store.get("model");
      const most = Math.max(tables.has(at) ? LENS_PIECE : 1, Math.floor(LENS_SCORES / ((layers + 1) * (vocab_size || 1)))); // the chosen column first
      const middle = missing.reduce((best, column) => (Math.abs(column - at) < Math.abs(best - at) ? column : best));
      let start = middle;
      while (start > from && middle - start < most / 2 && !tables.has(start - 1)) start -= 1;
      let count = 1;
      while (count < most && start + count < last && !tables.has(start + count)) count += 1;
      return { start, count, left: missing.length - count, path: `run/${run.run}/lens?first=${start}&count=${count}` };
    }

    /** Ask for the columns that are drawn and not there yet; what comes is put into the grid. */
    async function fillLens(run, wait) {
      if (view?.columns !== run.columns) return;
      let drawn = performance.now();
      let fresh = [];
      for (let piece = nextPiece(run, view, first, chosen[1]); piece; piece = nextPiece(run, view, first, chosen[1])) {
        waits.hidden = false;
        bar.max = Math.min(LENS_WIDE, run.columns.length - first);
        bar.value = bar.max - piece.left - piece.count;
        view.add(piece.start, await wait(app.source.get(piece.path)));
        fresh.push(...Array.from({ length: piece.count }, (_, i) => piece.start + i).filter((column) => column >= first && column < first + LENS_WIDE));
        if (piece.left && performance.now() - drawn < LENS_DRAWN) continue;
        fillColumns(fresh);
        fresh = [];
        drawn = performance.now();
      }
      waits.hidden = true;
    }

    /** Draw the columns around the chosen one, and ask for those that are not there. */
    function showWindow() {
      draw();
      if (app.source.live) ask((wait) => fillLens(app.store.get("run"), wait));
    }

    /** Where the grid begins, and the cell that is chosen in it. */
    function placed(run) {
      const column = columnOf(run, app.store.get("position"));
      const from = Math.max(0, run.columns.length - LENS_WIDE);
      return [column < from ? Math.max(0, column - LENS_WIDE / 2) : from, column];
    }

    const askParts = asks(parts, () => [app.store.get("run"), chosen[1]], (error) => replace(parts, app.source.live ? el("p", { class: "soft" }, error.message) : null));

    /** What each part adds at the chosen column; it waits until somebody looks. */
    async function showParts() {
      partsWait = !root.offsetParent;
      if (partsWait) return;
      const left = await askParts(async (wait) => drawParts(await wait(app.source.get(`run/${app.store.get("run").run}/contributions?position=${chosen[1]}`))));
      if (left === null && !root.offsetParent) partsWait = true;
    }

    function drawParts(body) {
      const terms = [...body.terms].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
      const shown = terms.slice(0, 16);
      const rest = terms.slice(16).reduce((sum, term) => sum + term.value, 0);
      const rows = [...shown, ...(terms.length > 16 ? [{ name: `${terms.length - 16} smaller ones`, kind: "", value: rest }] : [])];
      const line = 24;
      const wide = Math.max(300, Math.min(640, parts.clientWidth || 640)); // on a phone all of it is seen
      const [left, right] = [140, 56];
      const least = Math.max(0, ...rows.map((term) => -term.value));
      const highest = Math.max(0, ...rows.map((term) => term.value));
      const unit = (wide - left - right - (least ? right : 0)) / (least + highest || 1);
      const zero = left + (least ? right + least * unit : 0);
      const names = { self: (term) => `head ${term.name}`, cross: (term) => `head ${term.name}`, encoder: (term) => `head ${term.name}`, feedforward: (term) => term.name.replace("feedforward", "feed-forward"), bias: (term) => term.name.replace("head transform", "classifier layer").replace("head bias", "output bias") };
      const said = (term) => (names[term.kind] || (() => term.name))(term);
      const picture = svg(
        "svg",
        { viewBox: `0 0 ${wide} ${rows.length * line + 6}`, class: "chart bars", role: "img", "aria-label": `What each part adds to the logit of ${body.choice}` },
        svg("line", { x1: zero, x2: zero, y1: 0, y2: rows.length * line, class: "axis" }),
        rows.map((term, i) => {
          const reach = Math.abs(term.value) * unit;
          const down = term.value < 0;
          return [
            svg("text", { x: left - 10, y: i * line + 17, "text-anchor": "end" }, said(term).length > 20 ? `${said(term).slice(0, 19)}…` : said(term)),
            svg("rect", { x: down ? zero - reach : zero, y: i * line + 4, width: reach, height: line - 8, rx: 2, fill: css(signedColour(down ? -0.8 : 0.8)) }),
            svg("text", { x: down ? zero - reach - 6 : zero + reach + 6, y: i * line + 17, "text-anchor": down ? "end" : "start", "data-term": term.name, "data-value": term.value }, figure(term.value)),
          ];
        }),
      );
      replace(
        parts,
        el("h3", {}, "What each part adds to the logit of ", el("span", { class: "mono" }, body.choice), `${body.centred ? " less the mean of all" : ""} at position ${body.column}`),
        el("p", { class: "soft" }, "Heads, feed-forwards and embeddings, with every norm held at what it does here. Together: ", el("span", { class: "mono", id: "lens-sum", "data-value": body.total }, figure(body.total, 5)), `; the model's logit${body.centred ? " less the mean of all" : ""}: `, el("span", { class: "mono", id: "lens-logit", "data-value": body.logit }, figure(body.logit, 5)), "."),
        el("figure", { class: "wide", tabindex: "0", role: "group", "aria-label": "What each part adds" }, picture),
        saveButtons(() => picture, "contributions"),
      );
    }

    function failed(error) {
      view = null;
      waits.hidden = true;
      for (const node of [grid, detail, parts]) replace(node);
      problem.textContent = error.message;
    }

    const ask = asks(root, () => [app.store.get("run")], failed);
    const ahead = whenNear(root, app, () => ask(async (wait) => {
      const run = app.store.get("run");
      problem.textContent = "";
      if (!run || run.task === "embed") return;
      const tables = new LensTables(run.columns);
      if (!app.source.live) tables.add(0, await wait(app.source.get(`run/${run.run}/lens`)));
      const [from, column] = placed(run);
      [first, chosen, view, drawnAs] = [from, [Math.min(app.store.get("layer") ?? Infinity, app.store.get("model").layers), column], tables, ""];
      if (app.source.live) await fillLens(run, wait);
      else draw();
    }));
    askAhead(app, async (run) => {
      await ahead();
      if (run === app.store.get("run") && run.task !== "embed") await app.source.get(`run/${run.run}/contributions?position=${columnOf(run, app.store.get("position"))}`);
    });
    app.store.on("theme", () => draw());
    app.store.listen("view", () => {
      if (!view || !root.offsetParent) return;
      showMarked();
      if (!drawnAs && grid.firstChild) showWindow();
      else if (partsWait) showParts();
    });
    for (const key of ["position", "layer"]) {
      app.store.listen(key, () => {
        const run = app.store.get("run");
        if (!view || view.columns !== run?.columns) return;
        const [layer, column] = [Math.min(app.store.get("layer") ?? Infinity, view.layers.length - 1), columnOf(run, app.store.get("position"))];
        if (layer === chosen[0] && column === chosen[1]) return;
        if (column >= first && column < first + LENS_WIDE && drawnAs) return choose(layer, column, false);
        chosen = [layer, column];
        if (column < first || column >= first + LENS_WIDE) first = Math.max(0, Math.min(column - LENS_WIDE / 2, view.columns.length - LENS_WIDE));
        drawnAs = "";
        if (root.offsetParent) showWindow();
      });
    }
  },
};
