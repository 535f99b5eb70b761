// Attention: every head small, one head large, where one token looks; self, encoder and cross, and all layers rolled into one.

import { amountColour, css, inkOn } from "./colour.js";
import { el, figure, percent, replace, svg, tokenText } from "./dom.js";
import { heatmap, paintAt, scaleBar } from "./heatmap.js";
import { patchImage } from "./image.js";
import { whenNear } from "./near.js";
import { saveButtons, saveMapButtons } from "./picture.js";
import { unpack } from "./source.js";

const ATTENTION_KINDS = { self: "Self-attention", encoder: "Encoder", cross: "Cross-attention" };
const ATTENTION_LINES = 400; // of the view with two columns
const ATTENTION_CHIPS = 96; // tokens that are all shown as chips; of more, those that are looked at most
const ATTENTION_MOST = 32;
const ATTENTION_FRAME = 6; // milliseconds of one frame that painting thumbnails may take

/** Lines from the tokens that look, on the left, to those that are looked at: the strongest ones. */
function attentionLines(matrix, rows, columns, chosen) {
  const step = 22;
  const width = 460;
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
  const short = (label) => (label.length > 16 ? `${label.slice(0, 15)}…` : label);
  const words = (labels, x, anchor) => labels.map((label, place) => svg("text", { x, y: y(place), "text-anchor": anchor, class: "mono" }, short(label)));
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "chart lines", role: "img", "aria-label": "Lines from each token to those that it looks at; thicker is more" },
    links.slice(0, ATTENTION_LINES).map(([weight, row, column]) => svg("line", { x1: 128, y1: y(row) - 4, x2: 332, y2: y(column) - 4, class: "link", "stroke-opacity": Math.min(1, 0.08 + weight), "stroke-width": 0.6 + 3 * weight })),
    words(rows, 122, "end"),
    words(columns, 338, "start"),
  );
}

export const attentionSection = {
  id: "attention",
  title: "Attention",
  hint: "Each square is a head: a row looks, a column is looked at. Choose one to enlarge it; then a token, to see where it looks.",

  mount(root, app) {
    const tabs = el("div", { class: "row", role: "tablist", "aria-label": "Kind of attention" });
    const rollout = el("button", { type: "button", id: "attention-rollout", "aria-pressed": "false", title: "All layers as one: what each place is made of in the end, if attention were all that moves anything", onclick: () => showRollout() }, "Rollout");
    const problem = el("p", { role: "alert", class: "problem" });
    const note = el("p", { class: "soft", id: "attention-note" });
    const roleList = el("ul", { class: "legend roles", id: "attention-roles", "aria-label": "Roles of heads: choose one to see which heads have it" });
    const grid = el("div", { class: "wide", id: "attention-grid" });
    const large = el("div", { id: "attention-large" });
    replace(root, el("div", { class: "row toolbar" }, tabs, rollout), problem, el("div", { class: "panes" }, el("div", { class: "pane-grid" }, roleList, grid, note), large));
    let kind = "self";
    let small = null;
    let thumbs = [];
    let chosen = null;
    let role = null;
    let painting = 0;
    let sheetAddress = "";
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
      tabs.hidden = kinds.length < 2;
      rollout.hidden = kind === "cross";
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
    const roleOf = (name) => (app.store.get("roles") || {})[name] || "";

    /** The squares of all heads; their pixels come frame by frame, so that many heads do not hold the page up. */
    function drawGrid() {
      if (!small) return;
      const { shape, values } = unpack(small.pattern);
      const [, heads, height, width] = shape;
      const size = height * width;
      thumbs = [];
      const cells = small.layers.map((layer, row) => {
        const buttons = Array.from({ length: small.heads[row] }, (_, number) => {
          const part = (place, count) => `${count > 1 ? (100 * place) / (count - 1) : 0}%`;
          const thumb = el("span", { class: "thumb", "aria-hidden": "true", style: { "background-size": `${100 * heads}% ${100 * small.layers.length}%`, "background-position": `${part(number, heads)} ${part(row, small.layers.length)}` } });
          const name = headName(layer, number);
          const words = el("span", { class: "role" });
          const button = el("button", { type: "button", class: "head", "data-head": name, "data-entropy": small.entropy[row][number], tabindex: "-1", "aria-pressed": String(name === chosen), onclick: () => open(layer, number) }, thumb, words);
          const start = (row * heads + number) * size;
          thumbs.push({ name, button, words, left: number * width, top: row * height, matrix: values.subarray(start, start + size), height, width, entropy: small.entropy[row][number] });
          return el("td", {}, button);
        });
        return el("tr", {}, el("th", { scope: "row" }, layer), buttons);
      });
      const most = Math.max(...small.heads);
      replace(grid, el("table", { class: `heads${most > 16 ? " tiny" : most > 8 ? " many" : ""}`, onkeydown: moveHead }, el("tbody", {}, cells)));
      const first = grid.querySelector('[aria-pressed="true"]') || grid.querySelector(".head");
      if (first) first.tabIndex = 0;
      note.textContent = small.aggregated > 1 ? `Each cell of a small picture stands for ${small.aggregated} tokens.` : "";
      showRoles();
      paintThumbs();
    }

    function paintThumbs() {
      cancelAnimationFrame(painting);
      if (!thumbs.length) return;
      const table = grid.querySelector(".heads");
      const sheet = el("canvas", { width: Math.max(...thumbs.map((one) => one.left + one.width)), height: Math.max(...thumbs.map((one) => one.top + one.height)) });
      const context = sheet.getContext("2d");
      let next = 0;
      const some = () => {
        const begun = performance.now();
        while (next < thumbs.length && performance.now() - begun < ATTENTION_FRAME) {
          const { left, top, matrix, height, width } = thumbs[next++];
          paintAt(context, left, top, matrix, height, width, 0, Math.max(...matrix, 1e-6));
        }
        if (next < thumbs.length) painting = requestAnimationFrame(some);
        else sheet.toBlob((blob) => showSheet(table, URL.createObjectURL(blob)));
      };
      some();
    }

    /** One picture with all small ones in it: hundreds of canvases would each be a layer of the page, and slow all of it down. */
    function showSheet(table, address) {
      table.style.setProperty("--sheet", `url("${address}")`);
      if (sheetAddress) URL.revokeObjectURL(sheetAddress);
      sheetAddress = address;
    }

    /** What the heads do, where it is known: as labels, and as a list that shows which heads do it. */
    function showRoles() {
      const counts = new Map();
      for (const { name, button, words, entropy } of thumbs) {
        const own = roleOf(name);
        const label = `head ${name}${own ? `, ${own}` : ""}, entropy ${figure(entropy)} bits`;
        words.textContent = own;
        button.setAttribute("aria-label", label);
        button.title = label;
        if (own) counts.set(own, (counts.get(own) || 0) + 1);
      }
      if (!counts.has(role)) role = null;
      const sorted = [...counts].sort((a, b) => b[1] - a[1]);
      replace(roleList, sorted.map(([name, count]) => el("li", {}, el("button", { type: "button", class: "role-filter", "data-role": name, "aria-pressed": String(name === role), onclick: () => { role = role === name ? null : name; markRole(); } }, name, el("span", { class: "count" }, count)))));
      roleList.hidden = !counts.size;
      markRole();
    }

    function markRole() {
      for (const button of roleList.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.role === role));
      for (const { name, button } of thumbs) button.classList.toggle("dim", role !== null && roleOf(name) !== role);
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

    function mark(name) {
      chosen = name;
      for (const { name: each, button } of thumbs) button.setAttribute("aria-pressed", String(each === chosen));
      rollout.setAttribute("aria-pressed", String(chosen === "rollout"));
      problem.textContent = "";
    }

    async function open(layer, number) {
      const run = app.store.get("run");
      const name = headName(layer, number);
      mark(name);
      try {
        const body = await app.source.get(`run/${run.run}/attention/${kind}/${layer}`);
        if (app.store.get("run") !== run || chosen !== name) return;
        const { shape, values } = unpack(body.pattern);
        const size = shape[1] * shape[2];
        const head = body.heads[number];
        const does = roleOf(head.name) || head.role;
        const words = `Entropy ${figure(head.entropy)} bits: ${head.entropy < 1 ? "it looks at one or two places" : `as if it looked at ${figure(2 ** head.entropy, 2)} places alike`}.${body.aggregated > 1 ? ` Each cell stands for ${body.aggregated} tokens.` : ""}`;
        showMap({ name: head.name, title: `Head ${head.name}${does ? `: ${does}` : ""}`, words, matrix: values.subarray(number * size, (number + 1) * size), rows: body.rows, columns: body.columns, scale: "attention weight" }, run);
      } catch (error) {
        problem.textContent = error.message;
      }
    }

    async function showRollout() {
      const run = app.store.get("run");
      if (!run) return;
      mark("rollout");
      try {
        const body = await app.source.get(`run/${run.run}/rollout/${kind}`);
        if (app.store.get("run") !== run || chosen !== "rollout") return;
        const words = "All layers as one: what each place is made of after the last layer, if attention and the stream around it were all that moves anything. A rough guide, not what the model computes.";
        showMap({ name: "rollout", title: "Rollout", words, matrix: unpack(body.pattern).values, rows: body.rows, columns: body.columns, scale: "share" }, run);
      } catch (error) {
        problem.textContent = error.message;
      }
    }

    /** One matrix large: a heat map, where the chosen row looks, and lines from token to token. */
    function showMap({ name, title, words, matrix, rows, columns, scale }, run, from) {
      const chips = el("ul", { class: "chips looks", "aria-label": "Tokens; darker ones are looked at more" });
      const lines = el("div", { class: "wide" });
      const image = run.picture && columns.length === run.tokens.labels.length ? patchImage(run.picture, columns, "Where on the image the chosen place looks") : null;
      const few = rows.length <= 48 && columns.length <= 64;
      const some = columns.length > ATTENTION_CHIPS;
      let picture = null;
      let row = -1;
      let waiting = 0;

      /** The columns with most weight, in the order of the text. */
      function strongest(weights) {
        const order = Array.from(weights.keys()).sort((a, b) => weights[b] - weights[a]);
        return order.slice(0, ATTENTION_MOST).sort((a, b) => a - b);
      }

      function look(place) {
        row = place;
        const weights = place >= 0 ? matrix.subarray(place * columns.length, (place + 1) * columns.length) : null;
        const most = weights ? Math.max(...weights, 1e-9) : 1;
        const columnsShown = some && weights ? strongest(weights) : null;
        chips.childNodes.forEach((chip, place) => {
          const column = columnsShown ? columnsShown[place] : place;
          const colour = weights ? amountColour(weights[column] / most) : null;
          if (columnsShown) chip.replaceChild(tokenText(columns[column]), chip.firstChild);
          chip.style.background = colour ? css(colour) : "";
          chip.style.color = colour ? inkOn(colour) : "";
          chip.lastChild.textContent = weights ? percent(weights[column]) : "";
        });
        if (image) image.draw(weights, place);
      }

      const hover = (at) => {
        if (at === row || at < 0) return;
        cancelAnimationFrame(waiting);
        waiting = requestAnimationFrame(() => look(at));
      };
      const room = Math.max(220, Math.min(760, (large.clientWidth || 760) * (large.clientWidth > 700 ? 0.55 : 1) - 110));
      const map = heatmap({
        values: matrix,
        rows,
        columns,
        room,
        name: `${title}: rows look at columns. Arrow keys move from cell to cell.`,
        onCell: hover,
        describe: (at, column, weight) => `${rows[at]} looks at ${columns[column]}: ${weight.toFixed(3)}`,
      });
      replace(chips, columns.slice(0, some ? ATTENTION_MOST : ATTENTION_CHIPS).map((label, column) => el("li", { class: "chip", "data-token": column }, tokenText(label), el("small", {}, ""))));
      const drawLines = (place) => { if (few) replace(lines, (picture = attentionLines(matrix, rows, columns, place))); };
      const query = el("select", { id: "attention-query", onchange: () => { look(Number(query.value)); drawLines(row); } }, el("option", { value: -1 }, "all tokens"), rows.map((label, place) => el("option", { value: place }, `${place}  ${label}`)));
      if (image) image.canvas.addEventListener("click", (event) => { const place = image.at(event); if (place >= 0) { look(place); drawLines(row); query.value = String(row); } });
      const file = name === "rollout" ? "rollout" : `head-${name}`;
      replace(
        large,
        el("h3", { id: "attention-head", "data-head": name }, title),
        el("p", { class: "soft" }, words),
        el(
          "div",
          { class: "row" },
          el("div", { class: "map-pane" }, map.root, scaleBar(scale), saveMapButtons(() => ({ canvas: map.canvas, rows, columns, title, scale }), file)),
          el("div", { class: "grow" }, el("label", { for: "attention-query" }, "Where does this token look?"), query, image ? el("div", {}, image.canvas, el("p", { class: "soft" }, "Warmer patches are looked at more; choose a patch to see where it looks.")) : null, some ? el("p", { class: "soft" }, `The ${ATTENTION_MOST} tokens that it looks at most, in the order of the text:`) : null, chips, few ? el("details", { open: true }, el("summary", {}, "From token to token"), lines, saveButtons(() => picture, `${file}-lines`)) : null),
        ),
      );
      drawLines(-1);
      look(from ?? (image ? 0 : Math.min(run.position, rows.length - 1)));
      query.value = String(row);
      redraw = () => showMap({ name, title, words, matrix, rows, columns, scale }, run, row);
    }

    async function load(run) {
      problem.textContent = "";
      if (!run) return;
      try {
        const found = await app.source.get(`run/${run.run}/thumbnails/${kind}`);
        if (app.store.get("run") !== run || found.kind !== kind) return;
        small = found;
        const rolled = chosen === "rollout" && kind !== "cross";
        const before = chosen && chosen.match(/(\d+)\.(\d+)$/);
        const row = before && chosen.startsWith(headName(before[1], 0).slice(0, -1)) ? small.layers.indexOf(Number(before[1])) : -1;
        const [layer, number] = row >= 0 && Number(before[2]) < small.heads[row] ? [small.layers[row], Number(before[2])] : [small.layers[0], 0];
        chosen = rolled ? "rollout" : headName(layer, number);
        drawGrid();
        await (rolled ? showRollout() : open(layer, number));
      } catch (error) {
        small = null;
        replace(grid);
        replace(large);
        problem.textContent = error.message;
      }
    }

    app.store.on("model", () => showTabs());
    app.store.on("roles", () => showRoles());
    app.store.on("theme", () => { paintThumbs(); redraw(); });
    whenNear(root, app, load);
  },
};
