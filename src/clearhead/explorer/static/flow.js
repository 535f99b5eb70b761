// The flow: the forward pass from left to right, stack by stack, block by block, down to single steps and their numbers.

import { bytes, el, figure, replace } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { whenNear } from "./near.js";
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
  return /^\d+$/.test(last) ? `block ${last}` : { feedforward: "feed-forward", cross: "cross-attention", view: "who sees whom" }[last] || last;
}

function flowShape(step) {
  return el("span", { class: "shape mono" }, step.symbols, el("br", {}), el("span", { class: "soft" }, step.shape.join(" × ")));
}

export const flowSection = {
  id: "flow",
  title: "Flow",
  hint: "The whole forward pass, from left to right. Open a block to see its steps, and a step to see what it does and its numbers.",

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const totals = el("p", { class: "soft", id: "flow-totals" });
    const lane = el("div", { class: "wide flow", id: "flow-lane", tabindex: "0", role: "group", "aria-label": "The forward pass, from left to right" });
    const panel = el("div", { id: "flow-step", "aria-live": "polite" });
    replace(root, problem, totals, lane, panel);
    const open = new Set();
    let view = null;
    let chosen = null;

    function stepBox(step) {
      return el("button", { type: "button", class: "step", "data-step": step.name, "aria-pressed": String(step.name === chosen), onclick: () => openStep(step) }, el("strong", {}, step.title), flowShape(step));
    }

    function groupBox(group) {
      const isOpen = open.has(group.name);
      const share = view.totals.flops ? ` · ${((100 * group.flops) / view.totals.flops).toFixed(1)} % of FLOPs` : "";
      const head = el("button", { type: "button", class: "group-head", "data-group": group.name, "aria-expanded": String(isOpen), onclick: () => { if (isOpen) open.delete(group.name); else open.add(group.name); draw(group.name); } }, el("strong", {}, flowTitle(group.name)), el("small", {}, `${figure(group.parameters)} parameters${share}`));
      const kind = group.name.includes(".blocks.") || group.name.startsWith("blocks.") ? (/\.(attention|cross|feedforward)$/.test(group.name) ? "sublayer" : "block") : "stack";
      return el("div", { class: `group ${kind}${isOpen ? " open" : ""}` }, head, isOpen ? el("div", { class: "inner" }, boxes(group.children)) : null);
    }

    function boxes(children) {
      return children.map((child, place) => [place ? el("span", { class: "arrow", "aria-hidden": "true" }, "→") : null, child.step ? stepBox(child.step) : groupBox(child)]);
    }

    function draw(focus) {
      if (!view) return;
      const scrolled = lane.scrollLeft;
      replace(lane, boxes(flowTree(view.steps).children));
      lane.scrollLeft = scrolled;
      if (focus) [...lane.querySelectorAll("[data-group]")].find((one) => one.dataset.group === focus)?.focus();
    }

    async function openStep(step) {
      const run = app.store.get("run");
      chosen = step.name;
      for (const box of lane.querySelectorAll(".step")) box.setAttribute("aria-pressed", String(box.dataset.step === chosen));
      const letters = step.symbols.split(/[\s·]+/).filter((letter) => view.legend[letter]);
      const facts = [
        ["shape", el("span", { class: "mono" }, `${step.symbols} = ${step.shape.join(" × ")}`), letters.map((letter) => `${letter} ${view.legend[letter]}`).join(", ")],
        ["parameters", figure(step.parameters), ""],
        ["FLOPs", figure(step.flops), ""],
        ["result", bytes(step.bytes), step.dtype],
        ["time", `${(1000 * step.seconds).toFixed(2)} ms`, ""],
      ];
      if (step.peek.mean !== null) facts.push(["values", `mean ${figure(step.peek.mean)}, deviation ${figure(step.peek.std)}`, `${figure(step.peek.min)} to ${figure(step.peek.max)}`]);
      const numbers = el("div", { class: "wide", id: "flow-numbers" }, el("p", { class: "soft" }, "…"));
      replace(
        panel,
        el("h3", { "data-step": step.name }, step.title, " ", el("span", { class: "soft mono" }, step.name)),
        el("p", { class: "formula mono" }, step.formula),
        el("p", {}, step.why),
        el("div", { class: "row step-facts" }, el("table", { class: "facts" }, el("tbody", {}, facts.map(([name, value, more]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value), el("td", { class: "soft" }, more))))), el("div", { class: "grow" }, numbers)),
      );
      try {
        const body = await app.source.get(`run/${run.run}/step/${step.name}`);
        if (chosen === step.name && app.store.get("run") === run) showNumbers(numbers, body, run);
      } catch (error) {
        replace(numbers, el("p", { class: "soft" }, error.message));
      }
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
      const axes = body.axes.length > 1 ? body.axes : ["", body.axes[0] || ""];
      const map = heatmap({ values, rows: labelsOf(axes[0], rows, run, body), columns: labelsOf(axes[1], columns, run, body), low, high: high > low ? high : low + 1, cell: columns > 32 ? 12 : 18, name: `Numbers of ${body.title}`, describe: (row, column, value) => `[${row}, ${column}] = ${value.toPrecision(6)}` });
      const corner = Array.from({ length: Math.min(rows, 6) }, (_, row) => el("tr", {}, Array.from({ length: Math.min(columns, 8) }, (_, column) => el("td", { class: "number", "data-value": values[row * columns + column] }, figure(values[row * columns + column])))));
      const more = body.shape.length > 2 ? ", of the first of all other axes" : "";
      replace(node, el("p", { class: "soft" }, `${axes.filter(Boolean).join(" × ")}: ${figure(low)} to ${figure(high)}${body.cut ? `; the corner of ${rows} × ${columns}${more}` : ""}`), map.root, el("div", { class: "wide" }, el("table", { class: "corner-numbers" }, el("tbody", {}, corner))));
    }

    whenNear(root, app, async (run) => {
      problem.textContent = "";
      totals.textContent = "The steps are being counted…";
      try {
        const found = await app.source.get(`run/${run.run}/trace`);
        if (app.store.get("run") !== run) return;
        view = found;
        const tree = flowTree(view.steps);
        if (!open.size) {
          for (const stack of tree.children) if (stack.children) open.add(stack.name);
          const block = view.steps.find((step) => step.path.some((name) => name.includes("blocks.")));
          if (block) for (const name of block.path) open.add(name);
        }
        totals.textContent = `${view.steps.length} steps, ${figure(view.totals.parameters)} parameters, ${figure(view.totals.flops)} FLOPs, ${(1000 * view.totals.seconds).toFixed(1)} ms one by one`;
        totals.dataset.parameters = String(view.totals.parameters);
        totals.dataset.flops = String(view.totals.flops);
        draw();
        const same = view.steps.find((step) => step.name === chosen);
        if (same) openStep(same);
        else replace(panel, el("p", { class: "soft" }, "Choose a step."));
      } catch (error) {
        totals.textContent = "";
        problem.textContent = error.message;
      }
    });
    app.store.on("model", () => {
      open.clear();
      chosen = null;
    });
    app.store.on("theme", () => {
      const step = view && view.steps.find((one) => one.name === chosen);
      if (step) openStep(step);
    });
  },
};
