// The head atlas: every head small, coloured by choice; one head large, or two side by side; and all layers rolled into one.

import { ATLAS_COLOURS, atlasName, cellText, colourPath, colourValues, jobProgress, paintCell, partGrid, roleColours } from "./atlas.js";
import { besidePanel } from "./compare.js";
import { amountColour, signedColour } from "./colour.js";
import { el, figure, replace } from "./dom.js";
import { dimFirst, enlarged } from "./enlarged.js";
import { paintAt, scaleBar } from "./heatmap.js";
import { readsImage } from "./image.js";
import { askAhead, asks, whenNear } from "./query.js";
import { leadingHead } from "./selection.js";
import { headPattern, unpack } from "./source.js";

const ATTENTION_KINDS = { self: "Self-attention", encoder: "Encoder", cross: "Cross-attention" };
const ATTENTION_RANKED = 8; // heads in a row where they are ordered by size
const ATTENTION_FRAME = 6; // milliseconds of one frame that painting thumbnails may take

export const attentionSection = {
  id: "attention",
  title: "Heads",
  hint: "Every head of the model: layers from bottom to top, heads across, coloured by what you choose. Choose a head to enlarge it (a row looks, a column is looked at); with the shift key, a second one next to it.",
  applies: (model) => model.attentions.length > 0,

  mount(root, app) {
    const tabs = el("div", { class: "row", role: "tablist", "aria-label": "Kind of attention" });
    const rollout = el("button", { type: "button", id: "attention-rollout", "aria-pressed": "false", title: "All layers as one: what each place is made of in the end, if attention were all that moves anything", onclick: () => showRollout() }, "Rollout");
    const problem = el("p", { role: "alert", class: "problem" });
    const note = el("p", { class: "soft", id: "attention-note" });
    const roleList = el("ul", { class: "legend roles", id: "attention-roles", "aria-label": "Roles of heads: choose one to see which heads have it" });
    const grid = el("div", { class: "wide", id: "attention-grid" });
    const large = el("div", { id: "attention-large" });
    const colours = el("select", { id: "attention-colour", onchange: () => app.store.set("colour", colours.value) });
    const order = el("select", { id: "attention-order", onchange: () => drawGrid() }, el("option", { value: "layer" }, "layer by layer"), el("option", { value: "most" }, "largest first"));
    const beside = el("select", { id: "attention-beside", onchange: () => app.store.set("beside", beside.value || null) });
    const legend = el("div", { id: "attention-legend" });
    const without = el("p", { id: "attention-without", "aria-live": "polite" });
    const progress = jobProgress("Computing");
    const choice = (label, node) => el("div", {}, el("label", { for: node.id }, label), node);
    replace(root, el("div", { class: "row toolbar" }, tabs, choice("Colour by", colours), choice("Order", order), choice("Compare with", beside), rollout), problem, el("div", { class: "panes" }, el("div", { class: "pane-grid" }, roleList, grid, legend, progress.root, note), el("div", { class: "pane-large" }, without, large)));
    let kind = null;
    let picked = false; // a reader chose this kind: the head that the path names does not change it
    let small = null;
    let thumbs = [];
    let chosen = null;
    let role = null;
    let painting = 0;
    let values = null; // of each head, for the colour
    let sheetAddress = "";
    let panel = null;
    let followRow = () => {};
    let largeWaits = false; // until somebody looks: it is as large as the room for it

    function kindsOf(model) {
      return [...new Set(model.attentions.map((entry) => entry.kind))];
    }

    function showTabs() {
      const kinds = kindsOf(app.store.get("model"));
      if (!kinds.includes(kind)) kind = kinds.includes("cross") ? "cross" : kinds[0];
      const others = kinds.map((name) =>
        el("button", { type: "button", role: "tab", id: `attention-tab-${name}`, "aria-selected": String(name === kind), "aria-controls": "attention-grid", tabindex: name === kind ? "0" : "-1", onclick: () => pick(name), onkeydown: (event) => moveTab(event, kinds) }, ATTENTION_KINDS[name]),
      );
      replace(tabs, kinds.length > 1 ? others : null);
      tabs.hidden = kinds.length < 2;
      rollout.hidden = kind === "cross";
    }

    function moveTab(event, kinds) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      pick(kinds[(kinds.indexOf(kind) + by + kinds.length) % kinds.length]);
      tabs.querySelector('[aria-selected="true"]').focus();
    }

    /** Show another kind of attention; the head that was pinned is of the kind before. */
    function pick(name) {
      picked = true;
      return goTo(name);
    }

    function goTo(name) {
      kind = name;
      if (headOf(app.store.get("head"))?.kind !== kind) app.store.values.head = null;
      showTabs();
      return load();
    }

    const headName = (layer, number) => atlasName(kind, layer, number);
    const roleOf = (name) => (app.store.get("roles") || {})[name] || "";

    /** The rows of the grid: layers, or the heads by what they are coloured with. */
    function rowsOf() {
      const most = Math.max(...small.heads);
      const layers = small.layers.map((layer, row) => ({ title: layer, names: Array.from({ length: most }, (_, number) => (number < small.heads[row] ? headName(layer, number) : null)) }));
      if (order.value === "layer") return layers;
      const colour = app.store.get("colour");
      const size = (name) => (colour === "role" ? (roleOf(name) ? 1 : 0) : Math.abs((values || new Map()).get(name) ?? -1));
      const names = layers.flatMap((row) => row.names).filter((name) => name !== null);
      if (colour === "role") names.sort((a, b) => size(b) - size(a) || roleOf(a).localeCompare(roleOf(b)));
      else names.sort((a, b) => size(b) - size(a));
      const wide = Math.min(most, ATTENTION_RANKED);
      return Array.from({ length: Math.ceil(names.length / wide) }, (_, row) => ({ title: `${row * wide + 1}.`, names: Array.from({ length: wide }, (_, at) => names[row * wide + at] ?? null) }));
    }

    /** The squares of all heads; their pixels come frame by frame, so that many heads do not hold the page up. */
    function drawGrid() {
      if (!small) return;
      const { shape, values: pixels } = unpack(small.pattern);
      const [, heads, height, width] = shape;
      const size = height * width;
      const places = new Map(small.layers.flatMap((layer, row) => Array.from({ length: small.heads[row] }, (_, number) => [headName(layer, number), { layer, row, number }])));
      const part = (place, count) => `${count > 1 ? (100 * place) / (count - 1) : 0}%`;
      const sorted = order.value !== "layer";
      const rows = rowsOf();
      thumbs = [];
      const made = partGrid({
        rows,
        columns: rows[0].names.map((_, number) => (sorted ? "" : number)),
        corner: sorted ? "rank" : "layer",
        first: chosen,
        make: (name) => {
          const { layer, row, number } = places.get(name);
          const thumb = el("span", { class: "thumb", "aria-hidden": "true", style: { "background-size": `${100 * heads}% ${100 * small.layers.length}%`, "background-position": `${part(number, heads)} ${part(row, small.layers.length)}` } });
          const words = el("span", { class: "role" });
          const start = (row * heads + number) * size;
          thumbs.push({ name, thumb, words, left: number * width, top: row * height, matrix: pixels.subarray(start, start + size), height, width, entropy: small.entropy[row][number] });
          return [{ class: "head", "data-head": name, "data-entropy": small.entropy[row][number], "aria-pressed": String(name === chosen), onclick: (event) => (event.shiftKey && name !== chosen ? app.store.set("beside", name) : pinHead(name, layer, number)) }, thumb, words];
        },
      });
      for (const one of thumbs) one.button = made.buttons.get(one.name);
      made.root.classList.toggle("named", sorted);
      replace(grid, made.root);
      const scale = small.aggregated > 1 ? [`Each cell of a small picture stands for ${small.aggregated} tokens.`] : [];
      note.textContent = [...scale, ...(app.store.get("model").unpatterned || [])].join(" ");
      showRoles();
      paintColours();
      paintThumbs();
    }

    /** What can be chosen: colours that this run has, heads to lay beside the pinned one. */
    function showChoices() {
      const run = app.store.get("run");
      const there = Object.entries(ATLAS_COLOURS).filter(([name]) => ["pattern", "role", "entropy"].includes(name) || (run && colourPath(app, run, name) !== null));
      if (!there.some(([name]) => name === app.store.get("colour"))) app.store.values.colour = "pattern";
      replace(colours, there.map(([name, { title }]) => el("option", { value: name, selected: name === app.store.get("colour") }, title)));
      const others = small ? small.layers.flatMap((layer, row) => Array.from({ length: small.heads[row] }, (_, number) => headName(layer, number))).filter((name) => name !== chosen) : [];
      replace(beside, el("option", { value: "" }, "no other head"), others.map((name) => el("option", { value: name, selected: name === app.store.get("beside") }, `head ${name}`)));
    }

    /** Fetch the numbers of the colour that is chosen, and paint them. */
    const colourOf = () => { const [run, colour] = [app.store.get("run"), app.store.get("colour")]; return [run, colour, run && colourPath(app, run, colour), small]; };
    const askColours = asks(legend, colourOf, (error) => { progress.end(); problem.textContent = error.message; });
    const recolour = () => askColours(async (wait) => {
      const [run, colour] = [app.store.get("run"), app.store.get("colour")];
      if (!run || !small) return;
      showChoices();
      problem.textContent = "";
      const had = values;
      if (["pattern", "role"].includes(colour)) values = null;
      else {
        values = null;
        paintColours();
        values = await wait(colourValues(app, run, colour, small, progress.tell, () => wait.still() && root.offsetParent !== null));
        progress.end();
      }
      if (order.value !== "layer") drawGrid();
      else if (values || had) paintColours();
      else showWithout();
    });

    /** The colours of the cells: pictures of the patterns, roles, or numbers on a scale. */
    function paintColours() {
      const colour = app.store.get("colour");
      const { title, unit, signed } = ATLAS_COLOURS[colour];
      const own = thumbs.map(({ name }) => values?.get(name)).filter((value) => value !== undefined);
      const most = own.reduce((best, value) => Math.max(best, Math.abs(value)), 1e-9);
      const roles = roleColours([...roleList.querySelectorAll("[data-role]")].map((button) => button.dataset.role));
      for (const { name, thumb, words, button } of thumbs) {
        const value = values?.get(name);
        const shade = colour === "role" ? roles.get(roleOf(name)) : value === undefined ? null : signed ? signedColour(value / most) : amountColour(value / most);
        paintCell(thumb, colour === "pattern" || (colour !== "role" && !values) ? null : shade || amountColour(0), colour === "role" ? roleOf(name).slice(0, 2) : cellText(value, most));
        words.textContent = order.value === "layer" ? roleOf(name) : name;
        if (value === undefined) delete button.dataset.value;
        else button.dataset.value = value;
        const label = [`head ${name}`, roleOf(name), value === undefined ? null : `${title} ${figure(value)}`, colour === "entropy" ? null : `entropy ${figure(Number(button.dataset.entropy))} bits`].filter(Boolean).join(", ");
        button.setAttribute("aria-label", label);
        button.title = label;
      }
      for (const button of roleList.querySelectorAll("[data-role]")) button.style.setProperty("--role", colour === "role" ? `rgb(${roles.get(button.dataset.role).join(",")})` : "transparent");
      replace(legend, own.length ? scaleBar(unit, signed ? Number((-most).toPrecision(3)) : 0, Number(most.toPrecision(3)), Boolean(signed)) : null);
      showWithout();
    }

    /** What the model says without the pinned head, where that is computed already, and where to switch it off. */
    function showWithout() {
      const run = app.store.get("run");
      const name = chosen;
      const bits = app.store.get("colour") === "off" ? values?.get(name) : undefined;
      const offered = run && headOf(name)?.removable && colourPath(app, run, "off") !== null;
      const named = leadingHead(app);
      const other = named && headOf(named) && name && named !== name && name !== "rollout";
      replace(without, offered ? [bits === undefined ? null : [`Without head ${name} the answer moves by `, el("strong", { "data-value": bits }, `${figure(bits)} bits`), ". "], el("button", { type: "button", onclick: () => { app.store.set("off", name); app.open("ablate"); } }, `Turn off head ${name}`), " "] : null, other ? el("button", { type: "button", id: "attention-story", onclick: () => { picked = false; app.store.set("head", named); } }, `Show head ${named}, which the story names`) : null);
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
          const drawn = kind === "cross" || readsImage(app.store.get("run")) ? matrix : dimFirst(matrix, height, width);
          paintAt(context, left, top, drawn, height, width, 0, Math.max(...drawn, 1e-6));
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
      for (const { name } of thumbs) {
        const own = roleOf(name);
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

    /** A head by its name, where this model has it: {kind, layer, number}, and whether it can be turned off. */
    function headOf(name) {
      const [, own, layer, number] = (name || "").match(/^(?:(encoder|cross)\.)?(\d+)\.(\d+)$/) || [];
      const found = app.store.get("model").attentions.find((entry) => entry.kind === (own || "self") && entry.layer === Number(layer) && entry.pattern !== false && Number(number) < entry.heads);
      return found ? { kind: found.kind, layer: found.layer, number: Number(number), removable: found.removable !== false } : null;
    }

    function mark(name) {
      chosen = name;
      for (const { name: each, button } of thumbs) {
        button.setAttribute("aria-pressed", String(each === chosen));
        if (name !== "rollout") button.tabIndex = each === chosen ? 0 : -1;
      }
      rollout.setAttribute("aria-pressed", String(chosen === "rollout"));
      problem.textContent = "";
      showWithout();
    }

    /** Put a matrix beside the grid; its rows are tokens of the selection, but for an encoder's before a decoder. */
    function show(found, run, aggregated) {
      const own = kind !== "encoder";
      large.closest(".panes").classList.remove("paired");
      const place = () => Math.min(Math.floor(app.store.get("position") / aggregated), found.rows.length - 1);
      panel = enlarged(large, found, run, own ? place() : 0, (row) => { if (own && row >= 0) app.store.set("position", row * aggregated); });
      followRow = () => { if (own) panel.choose(place()); };
    }

    const askLarge = asks(large, () => [app.store.get("run"), chosen, app.store.get("beside")], (error) => { problem.textContent = error.message; }, false);

    function open(layer, number) {
      const run = app.store.get("run");
      mark(headName(layer, number));
      largeWaits = !root.offsetParent;
      if (largeWaits) return null;
      return askLarge(async (wait) => {
        const [found, other] = await wait(Promise.all([headPattern(app.source, run, kind, layer, number), besideOf(run)]));
        const { body, head, matrix } = found;
        const does = roleOf(head.name) || head.role;
        if (other) return showPair(found, other, run);
        const words = `Mean entropy of all rows ${figure(head.entropy)} bits: ${head.entropy < 1 ? "on one or two tokens" : `spread over about ${figure(Math.round(2 ** head.entropy), 2)} tokens`}.${body.aggregated > 1 ? ` Each cell stands for ${body.aggregated} tokens.` : ""}`;
        return show({ name: head.name, title: `Head ${head.name}${does ? `: ${does}` : ""}`, words, matrix, rows: body.rows, columns: body.columns, scale: "attention weight" }, run, body.aggregated);
      });
    }

    /** The head that is pinned beside: {name, title, matrix, shape}; null where there is none of this kind. */
    async function besideOf(run) {
      const found = headOf(app.store.get("beside"));
      if (!found || found.kind !== kind || app.store.get("beside") === chosen) return null;
      return titled(await headPattern(app.source, run, kind, found.layer, found.number));
    }

    const titled = ({ head, matrix }) => ({ name: head.name, title: `${head.name}${roleOf(head.name) ? ` ${roleOf(head.name)}` : ""}`, matrix });

    function showPair(found, other, run) {
      const own = kind !== "encoder";
      large.closest(".panes").classList.add("paired");
      panel = { redraw: () => showPair(found, other, run) };
      followRow = () => {};
      besidePanel(large, titled(found), other, { ...found.body, scale: "attention weight" }, (row) => { if (own && row >= 0) app.store.set("position", row * found.body.aggregated); });
    }

    function showRollout() {
      const run = app.store.get("run");
      if (!run) return null;
      mark("rollout");
      largeWaits = !root.offsetParent;
      if (largeWaits) return null;
      return askLarge(async (wait) => {
        const body = await wait(app.source.get(`run/${run.run}/rollout/${kind}`));
        const words = "All layers as one: what each place is made of after the last layer, if attention and the stream around it were all that moves anything. A rough guide, not what the model computes.";
        show({ name: "rollout", title: "Rollout", words, matrix: unpack(body.pattern).values, rows: body.rows, columns: body.columns, scale: "share" }, run, 1);
      });
    }

    function failed(error) {
      small = null;
      note.textContent = (app.store.get("model").unpatterned || []).join(" ");
      for (const node of [grid, large]) replace(node);
      problem.textContent = error.message;
    }

    const ask = asks(root, () => [app.store.get("run"), kind], failed);
    const load = () => ask(async (wait) => {
      const run = app.store.get("run");
      problem.textContent = "";
      if (!run) return null;
      small = await wait(app.source.get(`run/${run.run}/thumbnails/${kind}`));
      const rolled = chosen === "rollout" && kind !== "cross";
      const pinned = headOf(app.store.get("head"));
      const named = pinned || (picked ? null : headOf(leadingHead(app)));
      if (named && named.kind !== kind) return goTo(named.kind); // it was pinned, or the story named it, meanwhile
      const { layer, number } = firstHead();
      chosen = rolled ? "rollout" : headName(layer, number);
      drawGrid();
      if (!root.offsetParent) await wait(headPattern(app.source, run, kind, layer, number)); // what is drawn large once somebody looks
      return Promise.all([rolled ? showRollout() : open(layer, number), recolour()]);
    });

    /** The head to begin with: the pinned one, else the one that the path names. Only a reader pins one. */
    function firstHead() {
      const leading = headOf(leadingHead(app));
      return headOf(app.store.get("head")) || (leading?.kind === kind ? leading : { layer: small.layers[0], number: 0 });
    }

    /** Draw the large one of a grid that was drawn before anybody looked. */
    function showLarge() {
      const found = headOf(chosen);
      if (!largeWaits || !root.offsetParent || !small) return;
      largeWaits = false;
      if (chosen === "rollout") showRollout();
      else if (found) open(found.layer, found.number);
    }

    app.store.on("model", () => showTabs());
    app.store.on("roles", () => { showRoles(); paintColours(); });
    app.store.on("theme", () => { paintThumbs(); paintColours(); if (panel) panel.redraw(); });
    app.store.listen("position", () => followRow());
    app.store.listen("view", showLarge);
    for (const key of ["colour", "position", "target", "foil", "other", "view"]) app.store.listen(key, () => { if (root.offsetParent) recolour(); });
    app.store.listen("beside", () => { const found = headOf(chosen); showChoices(); if (found && small && found.kind === kind) open(found.layer, found.number); });
    app.store.listen("leading", () => {
      showWithout();
      if (headOf(app.store.get("head")) || !small || chosen === "rollout") return;
      const leading = headOf(leadingHead(app));
      if (leading && leading.kind !== kind && !picked) return void goTo(leading.kind);
      const { layer, number } = firstHead();
      if (headName(layer, number) !== chosen) open(layer, number);
    });
    app.store.listen("head", () => showWithout());
    app.store.listen("head", (name) => {
      const found = headOf(name);
      if (!found || !small) return;
      if (found.kind === kind) open(found.layer, found.number);
      else goTo(found.kind);
    });
    const ahead = whenNear(root, app, () => {
      const first = headOf(app.store.get("head")) || headOf(leadingHead(app));
      if (first) kind = first.kind;
      showTabs();
      return load();
    });
    askAhead(app, ahead);
  },
};
