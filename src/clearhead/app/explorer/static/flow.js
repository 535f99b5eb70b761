// The flow: the forward pass from bottom to top, stack by stack, block by block, down to single steps and their numbers.

import { bytes, el, figure, replace, seconds } from "./dom.js";
import { heatmap, scaleBar } from "./heatmap.js";
import { askAhead, asks, whenNear } from "./query.js";
import { unpack } from "./source.js";

/** Steps as a tree along their paths: {name, steps, groups, parameters, flops, bytes, seconds}. */
function flowTree(steps) {
  const root = { name: "", children: [], parameters: 0, flops: 0, bytes: 0, seconds: 0 };
  for (const step of steps) {
    let group = root;
    for (const name of step.path) {
      let inner = group.children.find((child) => child.name === name && child.children);
      if (!inner || group.children.at(-1) !== inner) {
        inner = { name, children: [], parameters: 0, flops: 0, bytes: 0, seconds: 0 };
        group.children.push(inner);
      }
      for (const key of ["parameters", "flops", "bytes", "seconds"]) inner[key] += step[key];
      group = inner;
    }
    group.children.push({ step });
  }
  return root;
}

/** A group's name as people say it: "encoder.blocks.3" is "block 3". */
function flowTitle(name) {
  const last = name.split(".").at(-1);
  return /^\d+$/.test(last) ? `block ${last}` : { feedforward: "feed-forward", cross: "cross-attention", view: "attention mask", head: "output layer" }[last] || last;
}

/** Where a group is drawn: a whole stack, a block on the stream, a sublayer beside it, something that every block uses, or any other part. */
function flowKind(name) {
  if (/\.(attention|cross|feedforward)$/.test(name)) return name.endsWith(".cross") ? "sublayer cross" : "sublayer";
  if (/(^|\.)blocks\.\d+$/.test(name)) return "block";
  if (/(^|\.)view$/.test(name)) return "aside";
  return ["encoder", "decoder"].includes(name) ? "stack" : "plain";
}

/** All steps of a group, however deep. */
function flowSteps(group) {
  return group.children.flatMap((child) => (child.step ? [child.step] : flowSteps(child)));
}

/** The top of the tree as rows: a stack begins one, what follows it stands beside it. */
function flowRows(children) {
  const rows = [];
  for (const child of children) {
    if (!rows.length || (child.children && flowKind(child.name) === "stack")) rows.push([]);
    rows.at(-1).push(child);
  }
  return rows;
}

function flowShape(step) {
  return el("span", { class: "shape mono" }, step.symbols, el("br", {}), el("span", { class: "soft" }, step.shape.join(" × ")));
}

export const flowSection = {
  id: "flow",
  title: "Flow",
  hint: "The whole forward pass, from bottom to top. The thick line is the residual stream: each sublayer reads it and adds to it. Open a box to see its steps, and a step to see its numbers.",

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const totals = el("p", { class: "soft", id: "flow-totals" });
    const lane = el("div", { class: "wide flow", id: "flow-lane", tabindex: "0", role: "group", "aria-label": "The forward pass, from bottom to top" });
    const panel = el("div", { id: "flow-step", "aria-live": "polite" });
    replace(root, problem, totals, el("div", { class: "flow-panes" }, lane, panel));
    const open = new Set();
    let view = null;
    let chosen = null;

    function stepBox(step) {
      return el("button", { type: "button", class: "step", "data-step": step.name, "aria-pressed": String(step.name === chosen), onclick: () => openStep(step) }, el("strong", {}, step.title), flowShape(step));
    }

    function groupBox(group) {
      const isOpen = open.has(group.name);
      const kind = flowKind(group.name);
      const steps = flowSteps(group);
      const share = view.totals.flops ? ` · ${((100 * group.flops) / view.totals.flops).toFixed(1)} % of FLOPs` : "";
      const about = `${steps.length} ${steps.length === 1 ? "step" : "steps"}${group.parameters ? ` · ${figure(group.parameters)} parameters` : ""}${group.flops ? share : ""}`;
      const more = kind === "sublayer cross" ? el("small", { class: "crosses" }, "keys and values from the encoder") : kind === "aside" ? el("small", {}, "used by every block") : null;
      const toggle = () => { if (isOpen) open.delete(group.name); else open.add(group.name); draw(group.name); };
      const head = el("button", { type: "button", class: "group-head", "data-group": group.name, "aria-expanded": String(isOpen), onclick: toggle }, el("strong", {}, flowTitle(group.name)), el("small", {}, about), more);
      const stream = kind === "block" && isOpen ? el("span", { class: "stream-name", "aria-hidden": "true" }, "residual stream ", el("span", { class: "mono" }, steps.at(-1).shape.join(" × "))) : null;
      const box = el("div", { class: `group ${kind}${isOpen ? " open" : ""}` }, head, stream, isOpen ? el("div", { class: "inner" }, kind === "stack" ? folded(group) : kind === "block" ? group.children.map(oneBox) : boxes(group.children)) : null);
      return kind.startsWith("sublayer") ? branch(group, box, steps) : box;
    }

    /** A sublayer beside the stream: an arm that reads, and where it adds a plus that opens that step. */
    function branch(group, box, steps) {
      const node = (step, text) => el("button", { type: "button", class: text === "+" ? "plus" : "plus norm", "aria-label": `${flowTitle(group.name)}, ${step.title}: ${step.formula}`, title: step.why, onclick: () => openStep(step) }, text);
      const add = steps.find((step) => step.name.endsWith("_residual.add"));
      const after = steps.find((step) => step.name.endsWith("_residual.after"));
      return el("div", { class: `branch${add ? " adds" : ""}${after ? " normed" : ""}${flowKind(group.name) === "sublayer cross" ? " crossing" : ""}` }, box, add ? node(add, "+") : null, after ? node(after, "norm") : null);
    }

    /** The parts of a stack; of many blocks the first one, and all others, which are built alike, in one box that opens. */
    function folded(group) {
      const blocks = group.children.filter((child) => child.children && flowKind(child.name) === "block").slice(1);
      if (blocks.length < 2) return group.children.map(oneBox);
      const key = `fold ${group.name}`;
      const isOpen = open.has(key);
      const numbers = blocks.map((block) => block.name.split(".").at(-1));
      const toggle = () => { if (isOpen) open.delete(key); else open.add(key); draw(key); };
      const total = (name) => blocks.reduce((sum, block) => sum + block[name], 0);
      const head = el("button", { type: "button", class: "group-head", "data-group": key, "aria-expanded": String(isOpen), onclick: toggle }, el("strong", {}, `blocks ${numbers[0]} to ${numbers.at(-1)}`), el("small", {}, `${blocks.length} blocks built alike · ${figure(total("parameters"))} parameters · ${((100 * total("flops")) / (view.totals.flops || 1)).toFixed(1)} % of FLOPs`));
      const fold = el("div", { class: "group fold" }, head);
      return group.children.flatMap((child) => (blocks.includes(child) ? [child === blocks[0] ? fold : null, isOpen ? oneBox(child) : null] : [oneBox(child)]));
    }

    /** Queries, keys and values side by side: none of them is made from another. */
    function fork(steps) {
      const seen = { q: 0, k: 0, v: 0 };
      return el("div", { class: "fork" }, steps.map(({ step }) => {
        const lane = step.name.split(".").at(-1)[0];
        const box = stepBox(step);
        box.style.setProperty("grid-row", String(1 + "qkv".indexOf(lane)));
        box.style.setProperty("grid-column", String(++seen[lane]));
        return box;
      }));
    }

    const oneBox = (child) => (child.step ? stepBox(child.step) : groupBox(child));

    function boxes(children, between = "→") {
      const lanes = children.filter((child) => child.step && /\.[qkv](_\w+)?$/.test(child.step.name));
      const shown = lanes.length > 1 ? children.filter((child) => child === lanes[0] || !lanes.includes(child)) : children;
      return shown.map((child, place) => [place ? el("span", { class: "arrow", "aria-hidden": "true" }, between) : null, lanes.length > 1 && child === lanes[0] ? fork(lanes) : oneBox(child)]);
    }

    function rowBox(children, place, rows) {
      const wide = open.has(children[0].name) && flowKind(children[0].name || "") === "stack";
      const feeds = rows.length > 1 && place < rows.length - 1 ? el("span", { class: "feeds" }, "→ read by every cross-attention") : null;
      return el("div", { class: `flow-row${wide ? " wide-open" : ""}` }, boxes(children, "↑"), feeds);
    }

    function draw(focus) {
      if (!view) return;
      const scrolled = lane.scrollTop;
      replace(lane, flowRows(flowTree(view.steps).children).map(rowBox));
      lane.scrollTop = scrolled;
      if (focus) [...lane.querySelectorAll("[data-group]")].find((one) => one.dataset.group === focus)?.focus();
    }

    const askStep = asks(panel, () => [app.store.get("run"), chosen], (error) => replace(panel.querySelector("#flow-numbers"), el("p", { class: "soft" }, error.message)), false);

    function openStep(step) {
      const run = app.store.get("run");
      chosen = step.name;
      for (const box of lane.querySelectorAll(".step")) box.setAttribute("aria-pressed", String(box.dataset.step === chosen));
      const letters = step.symbols.split(/[\s·]+/).filter((letter) => view.legend[letter]);
      const facts = [
        ["shape", el("span", { class: "mono" }, step.symbols), el("span", { class: "mono" }, step.shape.join(" × "))],
        ["parameters", figure(step.parameters), ""],
        ["FLOPs", figure(step.flops), ""],
        ["result", bytes(step.bytes), step.dtype],
        ["time", seconds(step.seconds), ""],
      ];
      if (step.peek.mean !== null) facts.push(["mean", figure(step.peek.mean), `deviation ${figure(step.peek.std)}`], ["from", figure(step.peek.min), `to ${figure(step.peek.max)}`]);
      const numbers = el("div", { class: "wide", id: "flow-numbers" }, el("p", { class: "soft" }, "…"));
      replace(
        panel,
        el("h3", { "data-step": step.name }, step.title, " ", el("span", { class: "soft mono" }, step.name)),
        el("p", { class: "formula mono" }, step.formula),
        el("p", {}, step.why),
        el(
          "div",
          { class: "row step-facts" },
          el("div", { class: "facts" }, el("table", {}, el("tbody", {}, facts.map(([name, value, more]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value), el("td", { class: "soft" }, more))))), el("ul", { class: "letters soft" }, letters.map((letter) => el("li", {}, el("span", { class: "mono" }, letter), ` ${view.legend[letter]}`)))),
          el("div", { class: "grow" }, numbers),
        ),
      );
      return askStep(async (wait) => showNumbers(numbers, await wait(app.source.get(`run/${run.run}/step/${step.name}`)), run));
    }

    function labelsOf(letter, count, run, step) {
      const encoder = step.name.startsWith("encoder.");
      const read = encoder && run.source ? run.source : run.tokens;
      const keys = run.source && step.name.includes(".cross.") ? run.source : read;
      const tokens = letter === "S" ? keys : letter === "T" ? read : null;
      return Array.from({ length: count }, (_, place) => (tokens && tokens.labels[place]) || String(place));
    }

    function showNumbers(node, body, run) {
      const { shape, values } = unpack(body.values);
      const [rows, columns] = shape.length > 1 ? shape : [1, shape[0] || 1];
      const finite = Array.from(values);
      const low = Math.min(...finite);
      const high = Math.max(...finite);
      const signed = low < 0 && high > 0;
      const most = Math.max(-low, high);
      const range = signed ? { low: -most, high: most } : { low, high: high > low ? high : low + 1 };
      const legend = scaleBar("value", Number(range.low.toPrecision(3)), Number(range.high.toPrecision(3)), signed);
      const axes = body.axes.length > 1 ? body.axes : ["", body.axes[0] || ""];
      const map = heatmap({ values, rows: labelsOf(axes[0], rows, run, body), columns: labelsOf(axes[1], columns, run, body), ...range, signed, cell: columns > 32 ? 12 : 18, name: `Numbers of ${body.title}`, describe: (row, column, value) => `[${row}, ${column}] = ${value.toPrecision(6)}` });
      const cells = Array.from({ length: Math.min(rows, 6) }, (_, row) => el("tr", {}, Array.from({ length: Math.min(columns, 8) }, (_, column) => el("td", { class: "number", "data-value": values[row * columns + column] }, figure(values[row * columns + column])))));
      const others = body.symbols.split(" ").slice(0, -2);
      const first = body.shape.length > 2 && others.length ? `, for the first of ${others.join(", ")}` : "";
      const corner = body.shape.slice(-2).some((count, axis) => count > shape.slice(-2)[axis]) ? `; the corner of ${rows} × ${columns}` : "";
      replace(node, el("p", { class: "soft" }, `${axes.filter(Boolean).join(" × ")}${first}: ${figure(low)} to ${figure(high)}${corner}`), map.root, legend, el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "The first numbers" }, el("table", { class: "corner-numbers" }, el("tbody", {}, cells))));
    }

    /** Open a step by its name, with the groups around it: the tour asks for it. */
    function showStep(name) {
      const step = view && view.steps.find((one) => one.name === name);
      if (!step) return;
      for (const group of step.path) open.add(group).add(`fold ${group}`);
      draw();
      openStep(step);
      const box = [...lane.querySelectorAll("[data-step]")].find((one) => one.dataset.step === name);
      lane.scrollTop += box.getBoundingClientRect().top - lane.getBoundingClientRect().top - lane.clientHeight / 3;
    }

    function failed(error) {
      view = null;
      totals.textContent = "";
      for (const node of [lane, panel]) replace(node);
      problem.textContent = error.message;
    }

    /** At first, the stacks are open, and the first block of each. */
    function openFirst() {
      for (const stack of flowTree(view.steps).children.filter((child) => child.children)) {
        if (flowKind(stack.name) === "stack") open.add(stack.name);
        const block = stack.children.find((child) => child.children && flowKind(child.name) === "block");
        if (block) open.add(block.name);
      }
    }

    const ask = asks(root, () => [app.store.get("run")], failed);
    whenNear(root, app, () => ask(async (wait) => {
      const run = app.store.get("run");
      problem.textContent = "";
      if (!run) return;
      totals.textContent = "The steps are being counted…";
      view = await wait(app.source.get(`run/${run.run}/trace`));
      if (!open.size) openFirst();
      totals.textContent = `${view.steps.length} steps, ${figure(view.totals.parameters)} parameters, ${figure(view.totals.flops)} FLOPs, ${seconds(view.totals.seconds)}, step by step`;
      totals.dataset.parameters = String(view.totals.parameters);
      totals.dataset.flops = String(view.totals.flops);
      draw();
      const same = view.steps.find((step) => step.name === chosen);
      if (app.store.get("step")) showStep(app.store.get("step"));
      else if (same) openStep(same);
      else openStep(view.steps.find((step) => step.name.endsWith("attention_residual.add")) || view.steps[0]); // the first plus on the stream
    }));
    askAhead(app, (run) => app.source.get(`run/${run.run}/trace`)); // a pass of its own
    app.store.on("model", () => {
      open.clear();
      chosen = null;
    });
    app.store.on("step", (name) => showStep(name));
    app.store.on("theme", () => {
      const step = view && view.steps.find((one) => one.name === chosen);
      if (step) openStep(step);
    });
  },
};
