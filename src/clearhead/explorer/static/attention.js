// Attention: every head small, one head large, where one token looks; self, encoder and cross, and all layers rolled into one.

import { el, figure, replace } from "./dom.js";
import { enlarged } from "./enlarged.js";
import { paintAt } from "./heatmap.js";
import { whenNear, whileWorking } from "./near.js";
import { unpack } from "./source.js";

const ATTENTION_KINDS = { self: "Self-attention", encoder: "Encoder", cross: "Cross-attention" };
const ATTENTION_FRAME = 6; // milliseconds of one frame that painting thumbnails may take

export const attentionSection = {
  id: "attention",
  title: "Attention",
  hint: "Each square is a head: layers down, heads across. Choose one to enlarge it; in it a row looks, a column is looked at.",
  applies: (model) => model.attentions.length > 0,

  mount(root, app) {
    const tabs = el("div", { class: "row", role: "tablist", "aria-label": "Kind of attention" });
    const rollout = el("button", { type: "button", id: "attention-rollout", "aria-pressed": "false", title: "All layers as one: what each place is made of in the end, if attention were all that moves anything", onclick: () => showRollout() }, "Rollout");
    const problem = el("p", { role: "alert", class: "problem" });
    const note = el("p", { class: "soft", id: "attention-note" });
    const roleList = el("ul", { class: "legend roles", id: "attention-roles", "aria-label": "Roles of heads: choose one to see which heads have it" });
    const grid = el("div", { class: "wide", id: "attention-grid" });
    const large = el("div", { id: "attention-large" });
    replace(root, el("div", { class: "row toolbar" }, tabs, rollout), problem, el("div", { class: "panes" }, el("div", { class: "pane-grid" }, roleList, grid, note), large));
    let kind = null;
    let small = null;
    let thumbs = [];
    let chosen = null;
    let role = null;
    let painting = 0;
    let sheetAddress = "";
    let panel = null;
    let followRow = () => {};

    function kindsOf(model) {
      return [...new Set(model.attentions.map((entry) => entry.kind))];
    }

    function showTabs() {
      const kinds = kindsOf(app.store.get("model"));
      if (!kinds.includes(kind)) kind = kinds.includes("cross") ? "cross" : kinds[0];
      const others = kinds.map((name) =>
        el("button", { type: "button", role: "tab", id: `attention-tab-${name}`, "aria-selected": String(name === kind), "aria-controls": "attention-grid", tabindex: name === kind ? "0" : "-1", onclick: () => goTo(name), onkeydown: (event) => moveTab(event, kinds) }, ATTENTION_KINDS[name]),
      );
      replace(tabs, kinds.length > 1 ? others : null);
      tabs.hidden = kinds.length < 2;
      rollout.hidden = kind === "cross";
    }

    function moveTab(event, kinds) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      goTo(kinds[(kinds.indexOf(kind) + by + kinds.length) % kinds.length]);
      tabs.querySelector('[aria-selected="true"]').focus();
    }

    /** Show another kind of attention; the head that was pinned is of the kind before. */
    function goTo(name) {
      kind = name;
      if (headOf(app.store.get("head"))?.kind !== kind) app.store.values.head = null;
      showTabs();
      return whileWorking(large, load(app.store.get("run")));
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
          const button = el("button", { type: "button", class: "head", "data-head": name, "data-entropy": small.entropy[row][number], tabindex: "-1", "aria-pressed": String(name === chosen), onclick: () => pinHead(name, layer, number) }, thumb, words);
          const start = (row * heads + number) * size;
          thumbs.push({ name, button, words, left: number * width, top: row * height, matrix: values.subarray(start, start + size), height, width, entropy: small.entropy[row][number] });
          return el("td", {}, button);
        });
        return el("tr", {}, el("th", { scope: "row" }, layer), buttons);
      });
      const most = Math.max(...small.heads);
      replace(grid, el("table", { class: `heads${most > 16 ? " tiny" : most > 8 ? " many" : ""}`, onkeydown: moveHead }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "hidden-words" }, "layer")), Array.from({ length: most }, (_, number) => el("th", { scope: "col" }, number)))), el("tbody", {}, cells)));
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

    /** Choose a head for the whole page. */
    function pinHead(name, layer, number) {
      if (app.store.get("head") === name) open(layer, number);
      else app.store.set("head", name);
    }

    /** A head by its name, where this model has it: {kind, layer, number}. */
    function headOf(name) {
      const [, own, layer, number] = (name || "").match(/^(?:(encoder|cross)\.)?(\d+)\.(\d+)$/) || [];
      const found = app.store.get("model").attentions.find((entry) => entry.kind === (own || "self") && entry.layer === Number(layer) && entry.pattern !== false && Number(number) < entry.heads);
      return found ? { kind: found.kind, layer: found.layer, number: Number(number) } : null;
    }

    function moveHead(event) {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      const cell = event.target.closest("td");
      if (!step || !cell) return;
      event.preventDefault();
      const row = cell.parentElement.parentElement.children[cell.parentElement.sectionRowIndex + step[0]];
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

    /** Put a matrix beside the grid; its rows are tokens of the selection, but for an encoder's before a decoder. */
    function show(found, run, aggregated) {
      const own = kind !== "encoder";
      const place = () => Math.min(Math.floor(app.store.get("position") / aggregated), found.rows.length - 1);
      panel = enlarged(large, found, run, own ? place() : 0, (row) => { if (own && row >= 0) app.store.set("position", row * aggregated); });
      followRow = () => { if (own) panel.choose(place()); };
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
        show({ name: head.name, title: `Head ${head.name}${does ? `: ${does}` : ""}`, words, matrix: values.subarray(number * size, (number + 1) * size), rows: body.rows, columns: body.columns, scale: "attention weight" }, run, body.aggregated);
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
        show({ name: "rollout", title: "Rollout", words, matrix: unpack(body.pattern).values, rows: body.rows, columns: body.columns, scale: "share" }, run, 1);
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
        const pinned = headOf(app.store.get("head"));
        if (pinned && pinned.kind !== kind) return await goTo(pinned.kind);
        const [layer, number] = pinned ? [pinned.layer, pinned.number] : [small.layers[0], 0];
        app.store.values.head = headName(layer, number);
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
    app.store.on("theme", () => { paintThumbs(); if (panel) panel.redraw(); });
    app.store.listen("position", () => followRow());
    app.store.listen("head", (name) => {
      const found = headOf(name);
      if (!found || !small) return;
      if (found.kind === kind) open(found.layer, found.number);
      else goTo(found.kind);
    });
    whenNear(root, app, (run) => {
      const pinned = headOf(app.store.get("head"));
      if (pinned) kind = pinned.kind;
      showTabs();
      return load(run);
    });
  },
};
