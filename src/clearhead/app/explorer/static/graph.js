// The graph: which parts led to the answer, and by way of which others; each edge can be tested by an intervention.

import { jobProgress } from "./atlas.js";
import { css, signedColour } from "./colour.js";
import { el, figure, percent, replace, signed, svg } from "./dom.js";
import { saveButtons } from "./picture.js";
import { asks, whenNear } from "./query.js";
import { askedOf } from "./selection.js";

const GRAPH_SHOWN = 24; // edges at first
const GRAPH_NODE = [104, 34]; // pixels of a node, and of one on a phone
const GRAPH_NODE_SMALL = [76, 34];
const GRAPH_NARROW = 500;
const GRAPH_SHARE = 0.5; // of a wide screen that the picture takes where it fits: the table stands next to it
const GRAPH_ROW = 34; // pixels between rows
const GRAPH_ROW_LEAST = 14;
const GRAPH_GAP = 6; // and between columns, at least
const GRAPH_WAYS = { value: "value", key: "key", query: "query" };

const GRAPH_UNTESTED = ["feature", "error", "skip", "group"]; // kinds of nodes whose edges have no test

const graphKey = (edge) => `${edge.source}>${edge.target}>${edge.kind}`;

/** A node's name and its second line: a head's role, what fires a neuron. */
function graphName(node, roles, narrow) {
  const name = node.id.split("@")[0];
  const [kind, rest] = name.includes(" ") ? name.split(" ") : ["head", name];
  if (node.kind === "logit") return [node.label, ""];
  if (node.kind === "embedding") return [node.label, ""];
  const words = narrow ? { head: "", feedforward: "ff", neuron: "n" } : { head: "head", feedforward: "feed-forward", neuron: "neuron", feature: "feature", error: "rest of", skip: "linear part of" };
  const more = node.kind === "head" ? roles[name] : node.fired?.length ? `at “${node.fired[0].token.trim()}”` : "";
  return [`${words[kind] ?? kind} ${rest}`.trim(), more || ""];
}

/** A node in a sentence. */
function graphWords(node) {
  const name = node.id.split("@")[0].replace("feedforward", "feed-forward").replace("error", "what no feature says of feed-forward").replace("skip", "the linear part of feed-forward");
  if (node.kind === "logit") return ["the logit of ", el("span", { class: "mono" }, node.label)];
  if (node.kind === "embedding") return ["the embedding of ", el("span", { class: "mono" }, node.label), el("span", { class: "soft" }, ` ${node.position}`)];
  return [node.kind === "head" ? `head ${name}` : name, " at ", el("span", { class: "mono" }, node.label), el("span", { class: "soft" }, ` ${node.position}`)];
}

/** Where each node stands: columns of tokens, rows of parts from bottom to top; what shares a cell stands side by side, two in a line. */
function graphPlaces(nodes, room, tall, narrow) {
  const [full, high] = narrow ? GRAPH_NODE_SMALL : GRAPH_NODE;
  const wide = (node) => (node.kind === "embedding" ? Math.min(full, Math.max(28, 8 * node.label.length + 14)) : full);
  const side = (node) => (node.stack ? 0 : 1);
  const columnOf = (node) => `${side(node)} ${String(node.position).padStart(6, "0")}`;
  const levelOf = (node) => side(node) * 1e6 + (node.kind === "logit" ? 5e5 : node.kind === "embedding" ? 0 : 10 + 2 * node.layer + (node.kind === "head" ? 0 : 1));
  const columns = [...new Set(nodes.map(columnOf))].sort();
  const levels = [...new Set(nodes.map(levelOf))].sort((a, b) => a - b);
  const cell = (column, level) => nodes.filter((node) => columnOf(node) === column && levelOf(node) === level);
  const linesOf = (own) => own.flatMap((_, place) => (place % 2 ? [] : [own.slice(place, place + 2)]));
  const across = (line) => line.reduce((sum, node) => sum + wide(node) + 8, -8);
  const grid = columns.map((column) => levels.map((level) => linesOf(cell(column, level))));
  const widths = grid.map((rows) => Math.max(...rows.flat().map(across)));
  const need = widths.reduce((sum, one) => sum + one, 0);
  const gap = Math.max(GRAPH_GAP, Math.min(40, (room - need - 8) / columns.length));
  const lefts = widths.map((_, place) => 4 + gap / 2 + widths.slice(0, place).reduce((sum, one) => sum + one + gap, 0));
  const lines = levels.map((_, row) => Math.max(...grid.map((rows) => rows[row].length)) * (high + 6) - 6);
  const between = Math.min(GRAPH_ROW, Math.max(GRAPH_ROW_LEAST, (tall - lines.reduce((sum, one) => sum + one, 8)) / levels.length)); // all of it fits the screen where it can
  const heights = lines.map((own) => own + between);
  const height = heights.reduce((sum, one) => sum + one, 0) - between + 8;
  const places = new Map();
  grid.forEach((rows, at) => rows.forEach((lines, step) => {
    const bottom = height - 4 - heights.slice(0, step).reduce((sum, one) => sum + one, 0);
    lines.forEach((line, number) => {
      let left = lefts[at] + (widths[at] - across(line)) / 2;
      for (const node of line) {
        places.set(node.id, { x: left + wide(node) / 2, y: bottom - high / 2 - number * (high + 6), wide: wide(node), step });
        left += wide(node) + 8;
      }
    });
  }));
  const bare = columns.map((column, at) => ({ node: nodes.find((node) => columnOf(node) === column), x: lefts[at] + widths[at] / 2, y: height - 4 - high / 2 })).filter((_, at) => !grid[at][0].length);
  return { places, bare, width: Math.ceil(need + gap * columns.length + 8), height, high };
}

/** The picture: blue adds, red takes; dashed by way of keys and queries. */
function graphPicture({ nodes, edges, roles, room, tall, narrow, chosen, choose }) {
  const { places, bare, width, height, high } = graphPlaces(nodes, room, tall, narrow);
  const most = Math.max(...edges.map((edge) => edge.influence), 1e-9);
  const thick = (edge) => 1 + 7 * Math.sqrt(edge.influence / most);
  const short = (text, letters) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);
  const curve = (edge) => {
    const [from, to] = [places.get(edge.source), places.get(edge.target)];
    const [y1, y2] = [from.y - high / 2, to.y + high / 2];
    const far = to.step - from.step;
    const bow = far > 1 && Math.abs(from.x - to.x) < to.wide ? Math.min(90, 24 + 14 * far) * (from.x > to.x ? -1 : 1) : 0; // round what stands between
    const bend = Math.max(16, (y1 - y2) * 0.45);
    return `M${from.x},${y1} C${from.x + bow},${y1 - bend} ${to.x + bow},${y2 + bend} ${to.x},${y2}`;
  };
  const lit = (edge) => chosen === null || chosen === graphKey(edge) || chosen === edge.source || chosen === edge.target;
  const box = (node) => {
    const { x, y, wide } = places.get(node.id);
    const [name, more] = graphName(node, roles, narrow);
    const text = (dy, words, looks) => svg("text", { x, y: y + dy, "text-anchor": "middle", class: looks }, words);
    return svg(
      "g",
      { class: `graph-node graph-${node.kind}${chosen === node.id ? " graph-chosen" : ""}`, "data-node": node.id, onclick: () => choose(node.id) },
      svg("title", {}, [name, more].filter(Boolean).join(", ")),
      svg("rect", { x: x - wide / 2, y: y - high / 2, width: wide, height: high, rx: node.kind === "logit" ? 17 : 7 }),
      text(more ? -2 : 4.5, short(name, Math.floor((wide - 2) / 7)), node.kind === "embedding" || node.kind === "logit" ? "mono" : null),
      more ? text(11.5, short(more, Math.floor((wide - 8) / 6.4)), "graph-more") : null,
    );
  };
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, class: "graph-picture", role: "img", "aria-label": "The graph of parts that led to the answer; the table lists its edges" },
    [...edges].reverse().map((edge) => svg("path", { d: curve(edge), class: `graph-edge${edge.kind === "value" ? "" : " graph-look"}`, "data-edge": graphKey(edge), stroke: css(signedColour(edge.value < 0 ? -0.9 : 0.9)), "stroke-width": thick(edge), "stroke-opacity": lit(edge) ? 0.8 : 0.12, onclick: () => choose(graphKey(edge)) }, svg("title", {}, `${edge.source} to ${edge.target}: ${signed(edge.value)} logits`))),
    bare.map(({ node, x, y }) => svg("text", { x, y: y + 4.5, "text-anchor": "middle", class: "graph-more" }, short(node.label, 14))), // a token whose embedding is not among the nodes
    nodes.map(box),
  );
}

export const graphSection = {
  id: "graph",
  title: "Graph",
  hint: "Which parts led to the answer, and by way of which others? Tokens across, layers up; a line is what one part adds to what another reads, in logits of the answer. Test a line: it is cut, and the model runs again.",
  applies: (model, live, source, run) => model.graph && (live || Boolean(run && source.list(`run/${run.run}/graph?`).length)),

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const said = el("p", { id: "graph-said" });
    const picture = el("div", { class: "wide", id: "graph-picture", tabindex: "0", role: "group", "aria-label": "The graph" });
    const about = el("div", { id: "graph-node", "aria-live": "polite" });
    const table = el("div", { class: "wide", id: "graph-table", tabindex: "0", role: "group", "aria-label": "Edges" });
    const panes = el("div", { class: "graph-panes" }, picture, el("div", { class: "graph-side" }, about, table));
    const count = el("output", { class: "mono", for: "graph-count" });
    const slider = el("input", { type: "range", id: "graph-count", min: 3, max: GRAPH_SHOWN, step: 1, value: GRAPH_SHOWN, oninput: () => draw() });
    const flag = (id, words) => el("button", { type: "button", id, "aria-pressed": "false", onclick: (event) => { event.currentTarget.setAttribute("aria-pressed", String(event.currentTarget.getAttribute("aria-pressed") !== "true")); load(); } }, words);
    const looks = flag("graph-scores", "What made heads look");
    const inner = flag("graph-neurons", "Single neurons");
    const all = el("button", { type: "button", id: "graph-test-all", onclick: () => testAll() }, "Test all lines");
    const progress = jobProgress("Computing the graph");
    const legend = el("ul", { class: "legend", id: "graph-legend" });
    const mark = (kind, value) => svg("svg", { class: "path-mark", width: 30, height: 12, "aria-hidden": "true" }, svg("line", { x1: 2, x2: 28, y1: 6, y2: 6, class: `graph-edge${kind === "value" ? "" : " graph-look"}`, "stroke-width": 4, stroke: css(signedColour(value)) }));
    replace(root, problem, said, el("div", { class: "row toolbar graph-tools" }, el("div", { class: "slider" }, el("label", { for: "graph-count" }, "Lines "), slider, count), looks, inner, all), progress.root, legend, panes);
    let body = null;
    let shownFor = null;
    let chosen = null;
    let tested = new Map();
    let drawing = null;

    const pressed = (button) => button.getAttribute("aria-pressed") === "true";
    const pathOf = (run) => `graph?${askedOf(app, run)}${pressed(inner) ? "&neurons=1" : ""}${pressed(looks) ? "&scores=1" : ""}`;
    const testPath = (run, edge) => `run/${run.run}/edge/${edge.source}/${edge.target}/${edge.kind}?${askedOf(app, run)}`;
    const question = () => { const run = app.store.get("run"); return [run, run && pathOf(run)]; };
    const asked = () => question().map((one) => one?.run ?? one).join("/"); // what a graph is of: run, answer and options
    const node = (id) => body.nodes.find((one) => one.id === id);

    function shown() {
      const edges = body.edges.slice(0, Number(slider.value));
      const ends = new Set(edges.flatMap((edge) => [edge.source, edge.target]));
      return { edges, nodes: body.nodes.filter((one) => ends.has(one.id)) };
    }

    function draw() {
      if (!body) return;
      const { edges, nodes } = shown();
      count.textContent = ` ${edges.length} of ${body.edges.length}`;
      const left = drawing ? picture.scrollLeft : Infinity; // it begins at the answer
      const wide = panes.clientWidth;
      const [narrow, room] = [wide < GRAPH_NARROW, wide * (matchMedia("(min-width: 62rem)").matches ? GRAPH_SHARE : 1)];
      drawing = graphPicture({ nodes, edges, roles: app.store.get("roles") || {}, room, narrow, tall: window.innerHeight - (picture.getBoundingClientRect().top + window.scrollY) - 16, chosen, choose });
      replace(picture, drawing);
      picture.scrollLeft = Math.min(left, picture.scrollWidth);
      replace(legend, [["value", 0.9, "adds to the answer"], ["value", -0.9, "takes from it"], ...(body.scores ? [["key", 0.9, "made a head look there (key, query)"]] : [])].map(([kind, value, words]) => el("li", {}, mark(kind, value), words)));
      showNode();
      showTable(edges);
    }

    /** What a node is: what it adds, and of a head or neuron what is known of it. */
    function showNode() {
      const one = chosen && node(chosen);
      if (!one) return void replace(about);
      const name = one.id.split("@")[0];
      const role = (app.store.get("roles") || {})[name];
      const layer = one.kind === "feedforward" && !one.stack ? name.split(" ")[1] : null;
      const open = (view, key, value) => { app.store.set(key, value); app.open(view); };
      const example = ({ before, token, after }) => el("li", { class: "mono" }, el("span", { class: "soft" }, before.slice(-40)), el("mark", {}, token), el("span", { class: "soft" }, after.slice(0, 30)));
      replace(
        about,
        el("h3", {}, graphWords(one)),
        el("p", {}, role ? `${role}. ` : null, one.kind === "logit" ? null : ["Over all ways it adds ", el("strong", { class: "mono" }, signed(one.value)), " logits. "], one.kind === "head" ? el("button", { type: "button", onclick: () => open("attention", "head", name) }, "Show attention") : null, layer !== null ? el("button", { type: "button", onclick: () => open("drawers", "neuronLayer", layer) }, "Show its neurons") : null),
        one.promotes?.length ? el("p", {}, "Promotes ", el("span", { class: "mono", dir: "auto" }, one.promotes.join("  "))) : null,
        one.fired?.length ? [el("p", {}, "Fires most at:"), el("ul", { class: "plain" }, one.fired.map(example))] : null,
      );
    }

    function showTable(edges) {
      const run = app.store.get("run");
      const exact = !body.scores;
      const row = (edge) => {
        const key = graphKey(edge);
        const found = tested.get(key);
        const number = (name, words, value) => el("td", { class: "number", "data-name": words, [`data-${name}`]: value ?? null }, value === null || value === undefined ? "" : signed(value));
        const can = app.source.has(testPath(run, edge)) && ![edge.source, edge.target].some((id) => GRAPH_UNTESTED.includes(node(id).kind));
        return el(
          "tr",
          { "data-edge": key, class: chosen === key ? "path-row" : null },
          el("td", {}, graphWords(node(edge.source))),
          el("td", {}, graphWords(node(edge.target)), edge.kind === "value" ? null : el("span", { class: "soft" }, `, its ${GRAPH_WAYS[edge.kind]}`)),
          number("value", "adds", edge.value),
          exact ? number("held", "without it, all else held", found?.held) : null,
          number("change", "without it", found?.change),
          el("td", { class: "number", "data-name": "the answer" }, found && found.before !== null ? `${percent(found.before)} → ${percent(found.after)}` : ""),
          el("td", { class: "path-acts" }, can ? el("button", { type: "button", "aria-label": `Test the edge from ${edge.source} to ${edge.target}, ${edge.kind}`, onclick: () => test(edge) }, found ? "Tested" : "Test") : null),
        );
      };
      const heads = ["from", "to"].map((name) => el("th", { scope: "col" }, name));
      const numbers = ["adds", ...(exact ? ["without it, all else held"] : []), "without it", "the answer then"].map((name) => el("th", { scope: "col", class: "number" }, name));
      replace(table, el("table", { class: "graph-edges" }, el("thead", {}, el("tr", {}, heads, numbers, el("th", {}, el("span", { class: "hidden-words" }, "what to do")))), el("tbody", {}, edges.map(row))), saveButtons(() => drawing, "graph"));
    }

    function choose(key) {
      chosen = chosen === key ? null : key;
      draw();
    }

    const askTest = asks(table, question, (error) => { problem.textContent = error.message; }, false);

    /** Cut an edge and run the model. */
    function test(edge) {
      chosen = graphKey(edge);
      const run = app.store.get("run");
      return askTest(async (wait) => {
        const found = await wait(app.source.get(testPath(run, edge)));
        tested.set(graphKey(edge), found);
        draw();
      });
    }

    async function testAll() {
      const mine = body;
      for (const edge of shown().edges) {
        if (body !== mine || !root.offsetParent) return;
        if (!tested.has(graphKey(edge)) && ![edge.source, edge.target].some((id) => GRAPH_UNTESTED.includes(node(id).kind)) && app.source.has(testPath(app.store.get("run"), edge))) await test(edge);
      }
    }

    /** Nothing is shown until the graph of the present question is there. */
    function clear() {
      [body, chosen, tested, shownFor, drawing] = [null, null, new Map(), null, null];
      all.hidden = true;
      count.textContent = "";
      for (const part of [said, picture, about, table, legend]) replace(part);
    }

    function failed(error) {
      clear();
      progress.end();
      problem.textContent = app.source.live ? error.message : "In this file the graph of this answer was not recorded: choose the one that the file opens on.";
    }

    const ask = asks(root, question, failed);
    const load = () => ask(async (wait) => {
      const [run, path] = question();
      problem.textContent = "";
      if (!run || run.task === "embed" || !root.offsetParent) return;
      if (asked() !== shownFor) clear();
      for (const [button, more] of [[looks, "scores"], [inner, "neurons"]]) button.hidden = !app.source.live && !app.source.list(`run/${run.run}/graph?`).some((one) => one.includes(more));
      progress.begin();
      const found = await wait(app.source.job(run.run, path, progress.tell, () => wait.still() && !progress.stopped()));
      progress.end();
      if (!found) return void replace(said, "This graph was not computed. ", el("button", { type: "button", id: "graph-again", onclick: () => load() }, "Compute it"));
      clear();
      [body, shownFor] = [found, asked()];
      slider.max = Math.max(3, body.edges.length);
      slider.value = GRAPH_SHOWN;
      all.hidden = !app.source.live;
      replace(said, "The logit of ", el("strong", { class: "mono", dir: "auto" }, body.choice), body.against === null ? (body.centred ? " less the mean of all" : null) : [" less that of ", el("strong", { class: "mono", dir: "auto" }, body.against)], " is ", el("strong", { class: "mono", id: "graph-logit", "data-value": body.logit }, figure(body.logit, 4)), body.probability === null ? "" : ` (${percent(body.probability)})`, `. ${body.nodes.length - 1} parts carry ${Math.round(100 * body.kept_nodes)} % of the influence on it.`);
      draw();
    });

    whenNear(root, app, load);
    for (const key of ["position", "target", "foil", "view"]) app.store.listen(key, () => { if (root.offsetParent && asked() !== shownFor) load(); });
    for (const key of ["roles", "theme"]) app.store.listen(key, () => { if (root.offsetParent) draw(); });
  },
};
