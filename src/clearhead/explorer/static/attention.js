// Attention: every head small, one head large, where one token looks; self, encoder and cross, and all layers rolled into one.

import { el, figure, replace } from "./dom.js";
import { enlarged } from "./enlarged.js";
import { paintAt } from "./heatmap.js";
import { whenNear } from "./near.js";
import { unpack } from "./source.js";

const ATTENTION_KINDS = { self: "Self-attention", encoder: "Encoder", cross: "Cross-attention" };
const ATTENTION_FRAME = 6; // milliseconds of one frame that painting thumbnails may take

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
      const scale = small.aggregated > 1 ? [`Each cell of a small picture stands for ${small.aggregated} tokens.`] : [];
      note.textContent = [...scale, ...(app.store.get("model").unpatterned || [])].join(" ");
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
        redraw = enlarged(large, { name: head.name, title: `Head ${head.name}${does ? `: ${does}` : ""}`, words, matrix: values.subarray(number * size, (number + 1) * size), rows: body.rows, columns: body.columns, scale: "attention weight" }, run);
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
        redraw = enlarged(large, { name: "rollout", title: "Rollout", words, matrix: unpack(body.pattern).values, rows: body.rows, columns: body.columns, scale: "share" }, run);
      } catch (error) {
        problem.textContent = error.message;
      }
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
        note.textContent = (app.store.get("model").unpatterned || []).join(" ");
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
