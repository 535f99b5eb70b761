// Attention: every head small, one head large, where one token looks; self, encoder and cross.

import { amountColour, css, inkOn } from "./colour.js";
import { el, figure, percent, replace, svg } from "./dom.js";
import { heatmap, paint, scaleBar } from "./heatmap.js";
import { whenNear } from "./near.js";
import { saveButtons } from "./picture.js";
import { unpack } from "./source.js";

const ATTENTION_KINDS = { self: "Self-attention", encoder: "Encoder", cross: "Cross-attention" };
const ATTENTION_LINES = 400; // of the view with two columns
const ATTENTION_CHIPS = 600; // tokens that are shown as chips

/** Lines from the tokens that look, on the left, to those that are looked at: the strongest ones. */
function attentionLines(matrix, rows, columns, chosen) {
  const step = 24;
  const width = 640;
  const height = Math.max(rows.length, columns.length) * step + 8;
  const links = [];
  for (let row = 0; row < rows.length; row++) {
    if (chosen >= 0 && row !== chosen) continue;
    for (let column = 0; column < columns.length; column++) {
      const weight = matrix[row * columns.length + column];
      if (weight > 0.02) links.push([weight, row, column]);
    }
  }
  links.sort((a, b) => b[0] - a[0]);
  const y = (place) => place * step + 17;
  const short = (label) => (label.length > 18 ? `${label.slice(0, 17)}…` : label);
  const words = (labels, x, anchor) => labels.map((label, place) => svg("text", { x, y: y(place), "text-anchor": anchor, class: "mono" }, short(label)));
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "chart lines", role: "img", "aria-label": "Lines from each token to those that it looks at; thicker is more" },
    links.slice(0, ATTENTION_LINES).map(([weight, row, column]) => svg("line", { x1: 190, y1: y(row) - 4, x2: 450, y2: y(column) - 4, class: "link", "stroke-opacity": Math.min(1, 0.08 + weight), "stroke-width": 0.6 + 3 * weight })),
    words(rows, 182, "end"),
    words(columns, 458, "start"),
  );
}

/** The patches of an image as a grid, each as bright as the chosen token's weight on it. */
function attentionPatches(labels, weights) {
  const places = labels.map((label) => label.split(",").map(Number));
  const rows = 1 + Math.max(...places.map(([row]) => (Number.isNaN(row) ? 0 : row)));
  const columns = 1 + Math.max(...places.map((place) => place[1] || 0));
  const values = new Float32Array(rows * columns);
  let most = 1e-9;
  places.forEach(([row, column], i) => {
    if (Number.isNaN(row) || column === undefined) return;
    values[row * columns + column] = weights[i];
    most = Math.max(most, weights[i]);
  });
  const canvas = el("canvas", { class: "patches", role: "img", "aria-label": "Where on the image this token looks" });
  paint(canvas, values, rows, columns, 0, most);
  return canvas;
}

export const attentionSection = {
  id: "attention",
  title: "Attention",
  hint: "Each square is a head: a row looks, a column is looked at. Choose one to enlarge it; then a token, to see where it looks.",

  mount(root, app) {
    const tabs = el("div", { class: "row", role: "tablist", "aria-label": "Kind of attention" });
    const problem = el("p", { role: "alert", class: "problem" });
    const note = el("p", { class: "soft", id: "attention-note" });
    const grid = el("div", { class: "wide", id: "attention-grid" });
    const large = el("div", { id: "attention-large" });
    replace(root, tabs, problem, note, grid, large);
    let kind = "self";
    let small = null;
    let chosen = null;
    let redraw = () => {};

    function kindsOf(model) {
      return [...new Set(model.attentions.map((entry) => entry.kind))];
    }

    function showTabs() {
      const kinds = kindsOf(app.store.get("model"));
      if (!kinds.includes(kind)) kind = kinds[0];
      const others = kinds.map((name) =>
        el("button", { type: "button", role: "tab", id: `attention-tab-${name}`, "aria-selected": String(name === kind), "aria-controls": "attention-grid", tabindex: name === kind ? "0" : "-1", onclick: () => { kind = name; showTabs(); load(app.store.get("run")); }, onkeydown: (event) => moveTab(event, kinds) }, ATTENTION_KINDS[name]),
      );
      replace(tabs, kinds.length > 1 ? others : null);
    }

    function moveTab(event, kinds) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      kind = kinds[(kinds.indexOf(kind) + by + kinds.length) % kinds.length];
      showTabs();
      tabs.querySelector('[aria-selected="true"]').focus();
      load(app.store.get("run"));
    }

    const headName = (layer, number) => `${kind === "self" ? "" : `${kind}.`}${layer}.${number}`;

    function drawGrid() {
      if (!small) return;
      const { shape, values } = unpack(small.pattern);
      const [, heads, height, width] = shape;
      const roles = app.store.get("roles") || {};
      const size = height * width;
      const cells = small.layers.map((layer, row) => {
        const buttons = Array.from({ length: small.heads[row] }, (_, number) => {
          const matrix = values.subarray((row * heads + number) * size, (row * heads + number + 1) * size);
          const canvas = el("canvas", { class: "thumb", "aria-hidden": "true" });
          paint(canvas, matrix, height, width, 0, Math.max(...matrix, 1e-6));
          const name = headName(layer, number);
          const role = roles[name] || "";
          const label = `head ${name}${role ? `, ${role}` : ""}, entropy ${figure(small.entropy[row][number])} bits`;
          return el("td", {}, el("button", { type: "button", class: "head", "data-head": name, "data-entropy": small.entropy[row][number], "aria-label": label, title: label, tabindex: "-1", "aria-pressed": String(name === chosen), onclick: () => open(layer, number) }, canvas, el("span", { class: "role" }, role)));
        });
        return el("tr", {}, el("th", { scope: "row" }, layer), buttons);
      });
      replace(grid, el("table", { class: "heads", onkeydown: moveHead }, el("tbody", {}, cells)));
      const first = grid.querySelector('[aria-pressed="true"]') || grid.querySelector(".head");
      if (first) first.tabIndex = 0;
      note.textContent = small.aggregated > 1 ? `Each cell of a small picture stands for ${small.aggregated} tokens.` : "";
    }

    function moveHead(event) {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      const cell = event.target.closest("td");
      if (!step || !cell) return;
      event.preventDefault();
      const row = cell.parentElement.parentElement.children[cell.parentElement.rowIndex + step[0]];
      const next = row && row.children[cell.cellIndex + step[1]];
      const button = next && next.querySelector(".head");
      if (!button) return;
      event.target.tabIndex = -1;
      button.tabIndex = 0;
      button.focus();
    }

    async function open(layer, number) {
      const run = app.store.get("run");
      chosen = headName(layer, number);
      for (const button of grid.querySelectorAll(".head")) button.setAttribute("aria-pressed", String(button.dataset.head === chosen));
      problem.textContent = "";
      try {
        const body = await app.source.get(`run/${run.run}/attention/${kind}/${layer}`);
        if (app.store.get("run") === run && chosen === headName(layer, number)) showHead(body, number, run);
      } catch (error) {
        problem.textContent = error.message;
      }
    }

    function showHead(body, number, run) {
      const { shape, values } = unpack(body.pattern);
      const size = shape[1] * shape[2];
      const matrix = values.subarray(number * size, (number + 1) * size);
      const head = body.heads[number];
      const role = (app.store.get("roles") || {})[head.name] || head.role;
      const image = app.store.get("model").input === "patches";
      const chips = el("ul", { class: "chips looks", "aria-label": "Tokens; darker ones are looked at more" });
      const lines = el("div", { class: "wide" });
      const patches = el("div", {});
      let picture = null;
      let row = -1;

      function look(place) {
        row = place;
        const weights = place >= 0 ? matrix.subarray(place * shape[2], (place + 1) * shape[2]) : null;
        const most = weights ? Math.max(...weights, 1e-9) : 1;
        chips.childNodes.forEach((chip, column) => {
          const colour = weights ? amountColour(weights[column] / most) : null;
          chip.style.background = colour ? css(colour) : "";
          chip.style.color = colour ? inkOn(colour) : "";
          chip.lastChild.textContent = weights ? percent(weights[column]) : "";
          chip.lastChild.style.color = "inherit";
        });
        if (image && weights) replace(patches, attentionPatches(body.columns, weights));
      }

      const map = heatmap({
        values: matrix,
        rows: body.rows,
        columns: body.columns,
        name: `Head ${head.name}: rows look at columns. Arrow keys move from cell to cell.`,
        onCell: (at) => { if (at !== row && at >= 0) look(at); },
        describe: (at, column, weight) => `${body.rows[at]} looks at ${body.columns[column]}: ${weight.toFixed(3)}`,
      });
      redraw = () => {
        map.repaint();
        look(row);
      };
      const few = body.rows.length <= 48 && body.columns.length <= 64;
      const shown = body.columns.slice(0, ATTENTION_CHIPS);
      replace(chips, shown.map((label, column) => el("li", { class: "chip", "data-token": column }, el("span", { dir: "auto" }, label), el("small", {}, ""))));
      if (few) {
        picture = attentionLines(matrix, body.rows, body.columns, -1);
        replace(lines, picture);
      }
      const query = el("select", { id: "attention-query", onchange: () => { look(Number(query.value)); if (few) { picture = attentionLines(matrix, body.rows, body.columns, Number(query.value)); replace(lines, picture); } } }, el("option", { value: -1 }, "all tokens"), body.rows.map((label, place) => el("option", { value: place }, `${place}  ${label}`)));
      replace(
        large,
        el("h3", { id: "attention-head", "data-head": head.name }, `Head ${head.name}`, role ? `: ${role}` : ""),
        el("p", { class: "soft" }, `Entropy ${figure(head.entropy)} bits.`, body.aggregated > 1 ? ` Each cell stands for ${body.aggregated} tokens.` : ""),
        el("div", { class: "row" }, el("div", { class: "wide" }, map.root, scaleBar("attention weight")), el("div", { class: "grow" }, el("label", { for: "attention-query" }, "Where does this token look?"), query, patches, chips, few ? [el("h3", {}, "From token to token"), lines, saveButtons(() => picture, `head-${head.name}`)] : null)),
      );
      const at = run.position < body.rows.length ? run.position : body.rows.length - 1;
      look(image ? 0 : at);
    }

    async function load(run) {
      problem.textContent = "";
      if (!run) return;
      try {
        const found = await app.source.get(`run/${run.run}/thumbnails/${kind}`);
        if (app.store.get("run") !== run || found.kind !== kind) return;
        small = found;
        const before = chosen && chosen.match(/(\d+)\.(\d+)$/);
        const row = before && chosen.startsWith(headName(before[1], 0).slice(0, -1)) ? small.layers.indexOf(Number(before[1])) : -1;
        const [layer, number] = row >= 0 && Number(before[2]) < small.heads[row] ? [small.layers[row], Number(before[2])] : [small.layers[0], 0];
        chosen = headName(layer, number);
        drawGrid();
        await open(layer, number);
      } catch (error) {
        small = null;
        replace(grid);
        replace(large);
        problem.textContent = error.message;
      }
    }

    app.store.on("model", () => showTabs());
    app.store.on("roles", () => drawGrid());
    app.store.on("theme", () => { drawGrid(); redraw(); });
    whenNear(root, app, load);
  },
};
