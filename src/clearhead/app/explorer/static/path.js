// The path: from which tokens the answer came, through which heads. Tokens across, layers up; an arc is what one head carried.

import { ATLAS_ASKED, jobProgress } from "./atlas.js";
import { css, inkOn, signedColour } from "./colour.js";
import { el, figure, percent, replace, signed, svg, wholeWord } from "./dom.js";
import { asks, whenNear } from "./query.js";
import { saveButtons } from "./picture.js";
import { askedOf, columnOf, leadingEdge } from "./selection.js";
import { featureWords, shareButton, storyWords } from "./share.js";
import { LensTables } from "./source.js";

const PATH_COLUMN = 58; // pixels of a column; where not all fit, those that matter get one
const PATH_LEAST = 40; // pixels of a column on the narrowest screen
const PATH_NARROW = 500; // pixels of a picture on a phone
const PATH_EDGES = 60; // at most, however low the threshold
const PATH_LISTED = 12;
const PATH_READ = 7; // parts that are listed of what a feed-forward read
const PATH_NAMED = 10; // arcs with the name of their head, the strongest ones
const PATH_WHY = 3; // edges that are followed one step further back by themselves
const PATH_TURNED = 24; // pixels by which the room must change for another drawing: more than a scroll bar
const PATH_GAP = 20; // pixels between what the encoder and what the decoder reads
const PATH_AHEAD = 1e9; // parameters times tokens below which the reasons of all edges that are listed are asked for ahead

/** Of an edge's head: {kind, layer}. */
function pathPlace(part) {
  const [, kind, layer] = part.match(/^(?:(encoder|cross)\.)?(\d+)\.\d+$/) || [];
  return layer === undefined ? null : { kind: kind || "self", layer: Number(layer) };
}

/** Pixels before the first column: for the names of layers, which a phone has numbers for. */
const pathLeft = (room) => (room < PATH_NARROW ? 34 : 84);

/** Which tokens get a column: [{side, place, label}], the encoder's before the decoder's. */
function pathColumns(run, edges, reader, room) {
  const all = [...(run.source ? run.source.labels.map((label, place) => ({ side: "source", place, label })) : []), ...run.tokens.labels.map((label, place) => ({ side: "main", place, label }))];
  const fit = Math.max(5, Math.floor((room - pathLeft(room) - (room < PATH_NARROW ? 62 : 176)) / PATH_COLUMN));
  if (all.length <= fit) return all;
  const wanted = new Set([`main ${reader}`]);
  for (const edge of edges) {
    if (wanted.size + 1 >= fit) break;
    wanted.add(`${edge.from} ${edge.source}`).add(`${edge.to} ${edge.reader}`);
  }
  return all.filter((one) => wanted.has(`${one.side} ${one.place}`));
}

/** The column of the answer that a token's cells are read at; -1: it has none. */
const pathColumn = (run, place, reader) => (run.columns.length === run.tokens.labels.length ? place : place === reader ? 0 : -1);

/** The sides that an edge begins and ends on: cross-attention leads from the encoder's tokens to the decoder's. */
function pathSides(edge) {
  const { kind } = pathPlace(edge.part) || { kind: edge.part.startsWith("feedforward encoder") || edge.part.startsWith("encoder") ? "encoder" : "self" };
  return { ...edge, from: kind === "self" ? "main" : "source", to: kind === "encoder" ? "source" : "main" };
}

/** A point of an arc, `share` of the way along its four points. */
function pathPoint(curve, share) {
  const shares = [(1 - share) ** 3, 3 * share * (1 - share) ** 2, 3 * share ** 2 * (1 - share), share ** 3];
  return [0, 1].map((axis) => curve.reduce((sum, point, place) => sum + shares[place] * point[axis], 0));
}

/** Arcs between the same two places run side by side, not on one another: each with `aside`, pixels from the middle of them. */
function pathLanes(edges, thick, room) {
  const lanes = new Map();
  for (const edge of edges) {
    const key = `${edge.one} ${edge.two} ${edge.level}`;
    lanes.set(key, [...(lanes.get(key) || []), edge]);
  }
  return [...lanes.values()].flatMap((own) => {
    const all = own.reduce((sum, edge) => sum + thick(edge) + 1.5, 0);
    let before = 0;
    return own.map((edge) => {
      const middle = before + thick(edge) / 2 + 0.75 - all / 2;
      before += thick(edge) + 1.5;
      return { ...edge, aside: own.length > 1 ? middle * Math.min(1, room / all) : 0 };
    });
  });
}

/** Names for the strongest arcs, each on its arc where it covers no other name; one that finds no room is in the table only. */
function pathNames(edges, taken) {
  const placed = [...taken];
  for (const edge of edges) {
    const half = 4 * edge.part.length + 6;
    for (const share of [0.5, 0.38, 0.62, 0.26, 0.74, 0.15, 0.85]) {
      const [x, y] = pathPoint(edge.curve, share);
      if (placed.some((one) => Math.abs(one.x - x) < one.half + half && Math.abs(one.y - y) < 17)) continue;
      placed.push({ x, y, half, name: edge.part });
      break;
    }
  }
  return placed.slice(taken.length);
}

/** Text on a plate of the card's colour: no line runs through it. */
const pathPlate = (x, y, half, text, looks) => [svg("rect", { x: x - half, y: y - 8.5, width: 2 * half, height: 17, rx: 4, class: "path-plate" }), svg("text", { x, y: y + 4, "text-anchor": "middle", class: looks }, text)];

/** Pixels from the top of the picture to the end of the first screen: the tokens below it are never out of sight. */
function pathTall(picture, room) {
  const below = window.innerHeight - (picture.getBoundingClientRect().top + window.scrollY) - (room < PATH_NARROW ? 20 : 96);
  return Math.max(room < PATH_NARROW ? 260 : 320, Math.min(600, below));
}

/** The picture: lens cells as the grid, arcs for heads; in the gutter at the right what feed-forwards and the token itself add; the stream that is read runs up to the answer. */
function pathPicture({ columns, layers, cell, edges, pulses, most, chosen, answer, reader, room, tall, gave, word, choose, openInner }) {
  const two = columns.some((one) => one.side === "source");
  const narrow = room < PATH_NARROW;
  const named = columns.map((one) => word(one));
  const [left, right, top, gap] = [pathLeft(room), narrow ? 72 : 176, 48, two ? PATH_GAP : 0];
  const foot = 42 + (named.some(Boolean) ? 16 : 0) + (two ? 18 : 0);
  const wide = Math.max(PATH_LEAST, Math.min(150, (room - left - right - gap) / columns.length));
  const high = Math.max(9, Math.min(104, (tall - top - foot) / layers.length));
  const every = Math.ceil(15 / high); // layers of which one has its text
  const width = left + wide * columns.length + gap + right;
  const height = top + high * layers.length + foot;
  const at = (side, place) => columns.findIndex((one) => one.side === side && one.place === place);
  const x = (column) => left + wide * (column + 0.5) + (columns[column]?.side === "main" ? gap : 0);
  const y = (layer) => top + high * (layers.length - 1 - layer) + high / 2;
  const short = (text, count = Math.floor((wide - 6) / 7.4)) => (text.length > count ? `${text.slice(0, Math.max(count - 1, 1))}…` : text);
  const bend = high * 0.5;
  const lift = Math.min(9, high * 0.4); // from the middle of a cell to where an arc ends
  const share = (value) => Math.min(1, Math.abs(value) / (most || 1));
  const largest = Math.max(most, ...pulses.map(({ value }) => Math.abs(value)), 1e-9);
  const thick = (edge) => 1.2 + 10 * (edge.why ? 0.05 : share(edge.value));
  const found = edges.map((edge, number) => ({ ...edge, number, one: at(edge.from, edge.source), two: at(edge.to, edge.reader), level: pathPlace(edge.part).layer })).filter((edge) => edge.one >= 0 && edge.two >= 0);
  const there = pathLanes(found, thick, Math.max(high * 0.7, 12)).map((edge) => {
    const [x1, x2, loop] = [x(edge.one), x(edge.two), Math.min(44, wide * 0.55)];
    const [y1, y2] = [y(edge.level) - lift + edge.aside, y(edge.level + 1) + lift + edge.aside];
    // What a head reads at its own token has no way to go: a loop shows it, on the side where no arc arrives.
    return { ...edge, curve: edge.one === edge.two ? [[x1 + 6, y1], [x1 + loop + edge.aside, y1 + 3], [x1 + loop + edge.aside, y2 - 3], [x1 + 6, y2]] : [[x1, y1], [x1, y1 - bend], [x2, y2 + bend], [x2, y2]] };
  }).sort((a, b) => a.number - b.number);
  const arc = ({ curve: [from, ...rest] }) => `M${from} C${rest.join(" ")}`;
  const column = at("main", reader);
  const widest = Math.max(...gave.main.map(Math.abs), ...gave.source.map(Math.abs), 1e-9);
  const tint = (one) => (gave[one.side][one.place] !== undefined ? signedColour((0.85 * gave[one.side][one.place]) / widest) : null);
  const here = (one) => one.side === "main" && one.place === reader;
  const pill = Math.max(70, Math.min(220, 8.6 * answer.length + 28));
  const middle = Math.max(4 + pill / 2, Math.min(x(column), width - 4 - pill / 2));
  const drawn = [...there].sort((a, b) => (b.why ? 1 : 0) - (a.why ? 1 : 0) || Math.abs(a.value) - Math.abs(b.value));
  const texted = (layer) => (layers.length - 1 - layer) % every === 0 || layer === 0;
  const cells = columns.flatMap((one, place) => layers.flatMap((_, layer) => {
    const text = one.side === "main" && texted(layer) ? short(cell(layer, one.place)) : "";
    return text ? [{ x: x(place), y: y(layer), half: 3.8 * text.length + 3, text, looks: `path-cell mono${here(one) ? " path-here" : ""}` }] : [];
  }));
  const gutter = left + wide * columns.length + gap + 10; // where the pulses stand, those of one layer one below another
  const ofLayer = (pulse) => pulses.filter((one) => one.layer === pulse.layer);
  const pulsed = (pulse) => y(pulse.layer) + Math.min(15, high / 2) * (ofLayer(pulse).indexOf(pulse) - (ofLayer(pulse).length - 1) / 2);
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "path-picture", role: "img", width, height, "aria-label": `Arcs from the tokens that ${answer} came from, through heads; the table lists them` },
    layers.map((name, layer) => (texted(layer) ? svg("text", { x: left - 14, y: y(layer) + 4, "text-anchor": "end", class: "path-layer" }, narrow ? name.replace("block ", "").replace("embedding", "in") : name) : null)),
    columns.map((_, place) => svg("line", { class: "path-stream", x1: x(place), x2: x(place), y1: y(0) + 8, y2: y(layers.length - 1) - 8 })),
    svg("path", { class: "path-spine", d: `M${x(column)},${y(0) + high / 2 + 6} L${x(column)},${top - 4} L${middle},${top - 14}` }),
    drawn.map((edge) => svg("path", { d: arc(edge), class: `path-edge${edge.why ? " path-why" : ""}${edge.number === chosen ? " path-chosen" : ""}`, "data-part": edge.part, stroke: edge.why ? null : css(signedColour(edge.value < 0 ? -0.9 : 0.9)), "stroke-width": thick(edge), "stroke-opacity": edge.number === chosen ? 1 : 0.35 + 0.5 * share(edge.value), onclick: edge.why ? null : () => choose(edge.number) }, svg("title", {}, edge.words))),
    cells.map((one) => pathPlate(one.x, one.y, one.half, one.text, one.looks)),
    pulses.map((pulse) => [pulse, pulsed(pulse)]).map(([{ value, name, words, inner }, cy]) => svg("g", inner === undefined ? {} : { class: "path-inner", "data-inner": inner, onclick: () => openInner(inner) }, svg("circle", { cx: gutter, cy, r: 2.5 + 5.5 * Math.sqrt(Math.abs(value) / largest), fill: css(signedColour(value < 0 ? -0.9 : 0.9)), class: "path-pulse" }, svg("title", {}, words)), high < 12 && share(value) < 0.5 ? null : svg("text", { x: gutter + 12, y: cy + 4, class: "path-layer" }, narrow ? signed(value, 2) : `${name} ${signed(value)}`))),
    pathNames(there.filter((edge) => !edge.why && share(edge.value) > 0.2).slice(0, PATH_NAMED), cells).map((one) => pathPlate(one.x, one.y, one.half, one.name, "path-name")),
    columns.map((one, place) => {
      const colour = tint(one);
      const top = height - foot + 8;
      return [svg("rect", { x: x(place) - wide / 2 + 2, y: top, width: wide - 4, height: 24, rx: 5, class: `path-chip${here(one) ? " path-chip-here" : ""}`, style: colour ? { fill: css(colour) } : {} }), svg("text", { x: x(place), y: top + 17, "text-anchor": "middle", class: "mono path-token", style: colour ? { fill: inkOn(colour) } : {} }, short(one.label)), named[place] ? svg("text", { x: x(place), y: top + 39, "text-anchor": "middle", class: "path-layer" }, short(`in ${named[place]}`, Math.floor(wide / 6.6))) : null];
    }),
    two ? [["source", "the encoder reads"], ["main", "the decoder reads"]].map(([side, words]) => { const first = columns.findIndex((one) => one.side === side); return first < 0 ? null : svg("text", { x: x(first) - wide / 2 + 2, y: height - 5, class: "path-layer" }, words); }) : null,
    svg("rect", { x: middle - pill / 2, y: 4, width: pill, height: 30, rx: 15, class: "path-answer" }),
    svg("text", { x: middle, y: 24, "text-anchor": "middle", class: "path-answer-text" }, short(answer, 24)),
  );
}

export const pathSection = {
  id: "path",
  title: "Path",
  hint: "Which head moved this, and from where? Tokens across, layers up; each arc is what one head carried, as wide as its logits.",
  applies: (model) => model.task !== "embed" && model.attentions.some((entry) => entry.pattern !== false && entry.removable !== false),

  mount(root, app) {
    const problem = el("p", { role: "alert", class: "problem" });
    const sum = el("p", { id: "path-sum" });
    const finding = el("div", { id: "path-finding", "aria-live": "polite" });
    const mark = (name) => svg("svg", { class: "path-mark", width: 30, height: 12, "aria-hidden": "true" }, name === "circle" ? svg("circle", { cx: 15, cy: 6, r: 5, class: "path-pulse", fill: css(signedColour(0.9)) }) : svg("line", { x1: 2, x2: 28, y1: 6, y2: 6, class: `path-edge${name === "why" ? " path-why" : ""}`, "stroke-width": name === "why" ? 1.6 : 5, stroke: name === "why" ? null : css(signedColour(name === "for" ? 0.9 : -0.9)) }));
    const key = el("ul", { class: "legend", id: "path-key" });
    const showKey = () => replace(key, [["for", "for the answer"], ["less", "against it"], ["circle", "a feed-forward (choose it: what it read), or the token itself"], ["why", "what made a head look there"]].map(([name, said]) => el("li", {}, mark(name), said)));
    const least = el("input", { type: "range", id: "path-least", min: 0, max: 60, step: 1, value: 12, oninput: () => draw() });
    const shown = el("output", { for: "path-least", class: "mono" });
    const picture = el("div", { class: "wide", id: "path-picture", tabindex: "0", role: "group", "aria-label": "The path" });
    const left = el("p", { class: "soft", id: "path-left" });
    const table = el("div", { class: "wide", id: "path-table" });
    const why = el("div", { id: "path-why", "aria-live": "polite" });
    const inner = el("select", { id: "path-inner", onchange: () => (inner.value === "" ? replace(why) : openInner(Number(inner.value))) });
    const innerBox = el("div", { class: "path-inner-box" }, el("label", { for: "path-inner" }, "What did a feed-forward read? "), inner);
    let drawing = null;
    let body = null;
    let asksFor = [];
    let lens = null; // of a file, all of it; a live page asks for the cells that are drawn
    let said = new Map(); // by column: what the model would say there, layer by layer
    let reasons = new Map(); // by edge: what made its head look there
    let chosen = -1;
    let leading = null; // the edge that is always drawn: the one the story names, else the strongest
    let story = null; // the parts that the answer rests on, once they are measured
    const testing = jobProgress("Removing parts one by one, to find out what the answer rests on");
    let [shownRun, shownAsked, shownWide] = [null, null, 0];
    replace(root, problem, finding, why, picture, el("div", { class: "row path-below" }, key, el("div", { class: "slider" }, el("label", { for: "path-least" }, "Hide links below ", shown, " of the strongest"), least), innerBox), left, sum, table, saveButtons(() => drawing, "path"));
    showKey();

    const named = (side, place) => { const run = app.store.get("run"); return ((side === "source" ? run.source : run.tokens).labels[place]) ?? String(place); };
    const keyOf = (edge) => `${edge.part}/${edge.reader}/${edge.source}`;
    const words = (edge) => `head ${edge.part}: ${figure(edge.value)} ${edge.why ? "log-odds" : "logits"}, from “${named(edge.from, edge.source)}” (${edge.source}) to “${named(edge.to, edge.reader)}” (${edge.reader})`;

    function visible() {
      const most = Math.abs(body.edges[0]?.value ?? 0);
      const strong = body.edges.filter((edge) => Math.abs(edge.value) >= (Number(least.value) / 100) * most).slice(0, PATH_EDGES);
      return strong.includes(leading) || !leading ? strong : [...strong, leading];
    }

    const logits = (value) => `${signed(value)} logits`;

    /** The sentence over the picture: what the chosen arc carried, else the story, of which each number was measured. */
    function showFinding(direct) {
      const edge = direct[chosen] || (story || !testing.root.hidden ? null : leading); // where nothing can be removed, the strongest arc
      if (edge) return replace(finding, el("p", { class: "path-said" }, arcWords(edge)), el("div", { class: "path-acts" }, actsOf(edge, direct.indexOf(edge), edge === direct[chosen])));
      if (story) return replace(finding, storyWords(story), story.feature ? featureWords(story.feature) : null, el("div", { class: "path-acts" }, storyActs(direct)));
      return replace(finding, testing.root);
    }

    /** What one arc carried: it is read off, nothing is removed for it. */
    function arcWords(edge) {
      const same = named(edge.from, edge.source).replace(/[·▁ ]/g, "").toLowerCase() === body.choice.replace(/[·▁ ]/g, "").toLowerCase();
      const token = (side, place) => el("span", { class: "mono token", dir: "auto" }, named(side, place));
      const place = edge.to === "main" ? [] : [" at ", token(edge.to, edge.reader)];
      const own = edge.from === edge.to && edge.source === edge.reader ? ", which it reads itself" : "";
      const whose = edge.from === "source" ? " of the encoder" : "";
      return [el("strong", {}, `Head ${edge.part} ${edge.value < 0 ? "lowered" : same ? "copied" : "raised"} `), el("strong", { class: "mono", dir: "auto" }, body.choice), " from ", token(edge.from, edge.source), el("span", { class: "soft" }, ` (token ${edge.source}${whose})`), own, ...place, ": ", el("strong", { class: "mono" }, logits(edge.value)), "."];
    }

    /** What can be done with the parts that the story names. */
    function storyActs(direct) {
      const [most] = story.effects;
      const number = story.edge ? direct.findIndex((edge) => keyOf(edge) === keyOf(story.edge)) : -1;
      const inner = most.name.includes(":") && offered() ? el("button", { type: "button", onclick: () => takeOff({ part: most.name }, "zero") }, `Turn off ${most.name.replace("feedforward:", "feed-forward ")}`) : null;
      const head = !story.head ? [] : story.edge ? actsOf(pathSides(story.edge), number, false) : [el("button", { type: "button", "aria-label": `Show attention of head ${story.head.name}`, onclick: () => openHead({ part: story.head.name }, "attention") }, "Show attention"), offered() && el("button", { type: "button", "aria-label": `Turn off head ${story.head.name}`, onclick: () => takeOff({ part: story.head.name }, "zero") }, "Turn off")];
      return [head, inner, shareButton(app, () => ({ sentence: story.sentence, tokens: app.store.get("run").tokens.labels, drawing }))];
    }

    const tested = (run, path) => ATLAS_ASKED.includes(run.task) && has(path);

    /** Where the story of the chosen answer is. */
    function storyPath(run) {
      const target = app.store.get("target");
      return `story?position=${columnOf(run, app.store.get("position"))}${target === null ? "" : `&token=${target}`}`;
    }

    /** Remove candidates one by one, in the background, and tell what was found. */
    async function tellStory(run, path, still) {
      const found = tested(run, path) ? await app.source.job(run.run, path, testing.tell, () => still() && !testing.stopped()).catch(() => null) : null;
      if (!still()) return;
      testing.end();
      story = found;
      leading = body.edges.find((edge) => found?.edge && keyOf(edge) === keyOf(found.edge)) || leading;
      app.store.set("leading", { run: run.run, head: found ? found.head?.name : leading?.part });
      draw();
    }

    function draw() {
      const run = app.store.get("run");
      if (!body || run !== shownRun) return; // what was looked at has given way to something else
      showKey();
      shown.textContent = `${least.value} %`;
      const direct = visible();
      const steps = direct.slice(0, PATH_LISTED).flatMap((edge, number) => ((number < PATH_WHY || number === chosen) && reasons.get(keyOf(edge))?.edges || []).filter((one) => one.value > 0 && pathPlace(one.part) && one.reader !== one.source).slice(0, 2).map((one) => ({ ...pathSides(one), why: true }))).filter((one, place, all) => all.findIndex((other) => keyOf(other) === keyOf(one)) === place);
      const edges = [...direct, ...steps].map((edge) => ({ ...edge, words: words(edge) }));
      const reader = run.columns.length === run.tokens.labels.length ? body.column : body.rows[0];
      const layers = lens ? lens.layers : ["embedding", ...Array.from({ length: app.store.get("model").layers }, (_, layer) => `block ${layer}`)];
      const column = (place) => (lens && lens.columns.length === run.tokens.labels.length ? place : place === reader ? 0 : -1);
      const cell = (layer, place) => (lens && column(place) >= 0 ? lens.top(layer, column(place))[0].label : said.get(pathColumn(run, place, reader))?.[layer] ?? "");
      const level = (term) => (term.kind === "feedforward" ? term.layer + 1 : term.name.includes("embedding") ? 0 : -1);
      const most = Math.abs(body.edges[0]?.value ?? 1);
      const pulses = body.terms.filter((term) => level(term) >= 0 && Math.abs(term.value) >= (Number(least.value) / 100) * most).map((term) => ({ layer: level(term), value: term.value, name: term.name.replace("feedforward", "feed-forward").replace(" embedding", ""), words: `${term.name}: ${figure(term.value)} logits${term.kind === "feedforward" ? "; what it read" : ""}`, inner: term.kind === "feedforward" ? term.layer : undefined }));
      shownWide = picture.clientWidth;
      const room = shownWide || 860;
      const columns = pathColumns(run, edges, reader, room);
      const all = run.tokens.labels.length + (run.source ? run.source.labels.length : 0);
      left.textContent = columns.length < all ? `${columns.length} of ${all} tokens are drawn: those that contributed most.` : "";
      const layersRead = body.terms.filter((term) => term.kind === "feedforward" && has(`reads/${term.layer}/${body.rows[0] ?? body.column}`)).map((term) => term.layer);
      innerBox.hidden = !layersRead.length;
      if (inner.dataset.layers !== String(layersRead)) replace(inner, el("option", { value: "" }, "choose a layer"), layersRead.map((layer) => el("option", { value: layer }, `layer ${layer}`)));
      inner.dataset.layers = String(layersRead);
      asksFor = columns.filter((one) => one.side === "main").map((one) => pathColumn(run, one.place, reader)).filter((place) => place >= 0);
      showFinding(direct); // before the picture, which is as tall as what stands over it leaves room for
      drawing = pathPicture({ columns, layers, cell, edges, pulses, most, chosen, answer: body.choice, reader, room, tall: pathTall(picture, room), word: (one) => wholeWord(one.side === "source" ? run.source : run.tokens, one.place), gave: { main: body.sources, source: body.memory || [] }, choose, openInner });
      replace(picture, drawing);
      replace(table, edges.length ? tableOf(direct) : el("p", { class: "soft" }, "No head carried anything: the answer is made at its own token."));
    }

    const offered = () => ATLAS_ASKED.includes(app.store.get("run").task) && (app.source.live || app.source.list(`run/${app.store.get("run").run}/effects/`).length > 0);
    const second = () => app.source.live && app.store.get("other")?.model === app.store.get("run").model;

    /** Switch an edge's head off, or take what it gives from the second text. */
    function takeOff(edge, how) {
      app.store.set("how", how);
      app.store.set("off", edge.part);
      app.open("ablate");
    }

    /** Which parts made what a feed-forward read at the answer's token. */
    function openInner(layer) {
      const run = app.store.get("run");
      chosen = -1;
      inner.value = String(layer);
      return askWhy(async (wait) => {
        const reader = body.rows[0] ?? body.column;
        const made = await wait(app.source.get(`run/${run.run}/reads/${layer}/${reader}`));
        const shown = made.edges.slice(0, PATH_READ);
        const rest = 1 - shown.reduce((sum, edge) => sum + edge.value, 0);
        const item = (edge) => el("tr", { "data-part": edge.part }, el("th", { scope: "row" }, pathPlace(edge.part) ? `head ${edge.part}` : edge.part.replace("feedforward", "feed-forward"), " ", el("span", { class: "soft" }, (app.store.get("roles") || {})[edge.part] || "")), el("td", { class: "mono token", dir: "auto" }, named(pathSides(edge).from, edge.source), el("span", { class: "soft" }, ` ${edge.source}`)), el("td", { class: "number", "data-value": edge.value }, percent(Math.abs(edge.value)).replace(/^/, edge.value < 0 ? "−" : "")), el("td", { class: "fill" }, el("div", { class: "bar", style: { width: `${Math.min(100, (100 * Math.abs(edge.value)) / Math.abs(made.edges[0].value))}%` } })));
        const neurons = el("button", { type: "button", onclick: () => { app.store.set("neuronLayer", String(layer)); app.open("drawers"); } }, "Show its neurons");
        replace(why, el("h3", {}, `What feed-forward ${layer} read at “${named("main", reader)}”`), el("p", { class: "soft" }, "The vector that it reads is a sum: what each earlier part put into it, as a share of the whole. A head is listed with the token that it read from."), el("table", { id: "path-reads" }, el("tbody", {}, shown.map(item), Math.abs(rest) < 5e-4 ? null : el("tr", {}, el("th", { scope: "row" }, "all others"), el("td", {}), el("td", { class: "number" }, percent(Math.abs(rest)).replace(/^/, rest < 0 ? "−" : "")), el("td", {})))), app.source.live || app.source.list(`run/${run.run}/neurons`).length ? neurons : null);
        if (!seen(why)) why.scrollIntoView({ block: "nearest", behavior: "instant" });
      });
    }

    const seen = (node) => node.getBoundingClientRect().bottom < window.innerHeight;
    const has = (path) => app.source.has(`run/${app.store.get("run").run}/${path}`);

    /** In a file, where the answer that is asked about is not recorded: the ones that are, to go to. */
    function offer(run) {
      const there = app.source.list(`run/${run.run}/paths?`).map((asked) => new URLSearchParams(asked)).filter((asked) => !asked.has("token"));
      const go = (asked) => { for (const key of ["target", "foil"]) app.store.set(key, null); app.store.set("position", Number(asked.get("position"))); };
      replace(sum, "This file has the path of the answer at ", there.map((asked) => el("button", { type: "button", class: "mono", "data-go": asked.get("position"), onclick: () => go(asked) }, run.columns[Number(asked.get("position"))])), " only: a live page has it everywhere.");
    }

    /** Point at an arc: the sentence speaks of it, and says why where that is known. */
    function choose(number) {
      chosen = chosen === number ? -1 : number;
      inner.value = "";
      replace(why);
      draw();
    }

    /** What can be done with the head of an edge. */
    function actsOf(edge, number, pressed) {
      return [has(`looks/${keyOf(edge)}`) && el("button", { type: "button", "aria-pressed": String(pressed && why.childElementCount > 0), "aria-label": `Why head ${edge.part} looks there`, onclick: () => explain(edge, number) }, "Why?"), el("button", { type: "button", "aria-label": `Show attention of head ${edge.part}`, onclick: () => openHead(edge, "attention") }, "Show attention"), has(`stops/${edge.part}/${edge.reader}`) && el("button", { type: "button", "aria-label": `Step through head ${edge.part}`, onclick: () => openHead(edge, "head") }, "Step through"), offered() && el("button", { type: "button", "aria-label": `Turn off head ${edge.part}`, onclick: () => takeOff(edge, "zero") }, "Turn off"), offered() && second() && el("button", { type: "button", "aria-label": `Take head ${edge.part} from the second text`, onclick: () => takeOff(edge, "second") }, "From B")];
    }

    function tableOf(direct) {
      const rows = direct.slice(0, PATH_LISTED).map((edge, number) => {
        const pressed = number === chosen;
        return el(
          "tr",
          { "data-edge": keyOf(edge), class: pressed ? "path-row" : null },
          el("th", { scope: "row", class: "mono" }, edge.part, (app.store.get("roles") || {})[edge.part] ? el("span", { class: "soft" }, ` ${app.store.get("roles")[edge.part]}`) : null),
          el("td", { class: "mono token", dir: "auto" }, named(edge.from, edge.source), el("span", { class: "soft" }, ` ${edge.source}`)),
          el("td", { class: "mono token", dir: "auto" }, named(edge.to, edge.reader), el("span", { class: "soft" }, ` ${edge.reader}`)),
          el("td", { class: "number", "data-value": edge.value }, figure(edge.value)),
          el("td", { class: "path-acts" }, actsOf(edge, number, pressed)),
        );
      });
      return el("table", {}, el("thead", {}, el("tr", {}, ["head, its role", "from", "read at"].map((name) => el("th", {}, name)), el("th", { class: "number" }, "logits"), el("th", {}, el("span", { class: "hidden-words" }, "what to do")))), el("tbody", {}, rows));
    }

    function openHead(edge, view) {
      app.store.set("head", edge.part);
      if (edge.to === "main") app.store.set("position", edge.reader);
      app.open(view);
    }

    async function reasonsOf(run, edge, idle = false) {
      const [key, kept] = [keyOf(edge), reasons];
      if (idle) await app.source.idle();
      if (!kept.has(key)) kept.set(key, await app.source.get(`run/${run.run}/looks/${key}`));
      return kept.get(key);
    }

    /** A question about this path: the same run, answer and rival. */
    const about = () => { const run = app.store.get("run"); return [run, run && askedOf(app, run)]; };
    const askWhy = asks(why, () => [...about(), chosen], (error) => { replace(why, el("p", { class: "soft" }, error.message)); draw(); }, false);

    function explain(edge, number) {
      chosen = number;
      const run = app.store.get("run");
      return askWhy(async (wait) => {
        const body = await wait(reasonsOf(run, edge));
        const found = [...body.edges.filter((one) => one.value > 0), ...body.edges.filter((one) => one.value < 0)].slice(0, 6); // what speaks for it first
        const said = (one) => { const side = pathSides(one); const where = one.reader === one.source ? ["at ", named(side.to, one.reader)] : ["brought ", named(side.from, one.source), " to ", named(side.to, one.reader)]; return el("li", { "data-part": one.part }, el("span", { class: "mono" }, pathPlace(one.part) ? `head ${one.part}` : one.part), ` ${where[0]}`, el("span", { class: "mono" }, where[1]), where[2] || null, where[3] ? el("span", { class: "mono" }, where[3]) : null, ` (${where.length > 2 ? `${one.source} to ${one.reader}` : one.reader}): `, el("span", { class: "mono", "data-value": one.value }, `${one.value < 0 ? "" : "+"}${figure(one.value)}`)); };
        replace(why, el("h3", {}, `Why head ${edge.part} looks from “${named(edge.to, edge.reader)}” at “${named(edge.from, edge.source)}”`), el("p", { class: "soft" }, body.inexact ? "What earlier parts add to the log-odds of looking there, by gradient × activation: first order, not a sum." : [`The score is `, el("span", { class: "mono", id: "why-score" }, figure(body.score)), ", a sum over what earlier parts put into the query and into the key. The largest of either side:"]), found.length ? el("ol", {}, found.map(said)) : el("p", { class: "soft" }, "Nothing comes before it but the tokens themselves."));
        draw();
      });
    }

    /** Ask what the model would say in the cells that are drawn and not known yet. */
    async function fillCells(run, wait) {
      const missing = [...new Set(asksFor)].filter((place) => !said.has(place));
      if (!app.source.live || !missing.length) return;
      const found = await wait(app.source.get(`run/${run.run}/said/${missing.join(",")}`).catch(() => null));
      if (!found) return;
      found.columns.forEach((place, number) => said.set(place, found.says.map((row) => row[number])));
      draw();
    }

    /** When there is nothing else to do: what made the strongest heads look there, as dashed arcs. */
    async function followBack(run, still) {
      const cheap = app.store.get("model").parameters * run.tokens.labels.length < PATH_AHEAD;
      for (const [number, edge] of body.edges.slice(0, cheap ? PATH_LISTED : PATH_WHY).entries()) {
        if (!still() || !root.offsetParent) return;
        await reasonsOf(run, edge, true).catch(() => null);
        if (still() && number < PATH_WHY) draw();
        if (still()) await fillCells(run, (asked) => asked.then((found) => (still() ? found : null))); // a dashed arc may have brought a column of its own
      }
    }

    function failed(error) {
      const [run, asked] = about();
      body = null;
      for (const node of [finding, sum, picture, left, table, why]) replace(node);
      if (app.source.has(`run/${run.run}/paths?${asked}`)) problem.textContent = error.message;
      else offer(run);
    }

    const ask = asks(root, about, failed);
    const load = () => ask(async (wait) => {
      const [run, asked] = about();
      problem.textContent = "";
      if (run !== shownRun || asked !== shownAsked) [finding, why].forEach((node) => replace(node)); // a sentence of something else
      if (!run || run.task === "embed") return;
      const [found, grid] = await wait(Promise.all([app.source.get(`run/${run.run}/paths?${asked}`), app.source.live ? null : app.source.get(`run/${run.run}/lens`).then((all) => new LensTables(run.columns).add(0, all), () => null)]));
      if (shownRun !== run) said = new Map();
      [body, lens, reasons, chosen, shownRun, shownAsked] = [{ ...found, edges: found.edges.map(pathSides) }, grid, new Map(), -1, run, asked];
      leading = leadingEdge(body.edges) || null;
      story = null;
      const path = storyPath(run);
      if (tested(run, path)) testing.begin();
      else testing.end();
      const carried = found.total - found.rest;
      replace(sum, "The logit of ", el("strong", { class: "mono", dir: "auto" }, found.choice), found.against === null ? (found.centred ? " less the mean of all" : null) : [" less that of ", el("strong", { class: "mono", dir: "auto" }, found.against)], " is ", el("strong", { class: "mono", id: "path-logit", "data-value": found.logit }, figure(found.logit, 5)), ": heads carried ", el("span", { class: "mono", "data-value": carried }, figure(carried, 5)), ", everything else added ", el("span", { class: "mono", "data-value": found.rest }, figure(found.rest, 5)), "; together ", el("span", { class: "mono", id: "path-total", "data-value": found.total }, figure(found.total, 5)), ".");
      replace(why);
      inner.value = "";
      draw();
      const still = () => body?.edges && shownRun === app.store.get("run") && shownAsked === about()[1];
      await fillCells(run, wait);
      tellStory(run, path, still);
      followBack(run, still);
    });

    whenNear(root, app, load);
    for (const key of ["position", "target", "foil"]) app.store.listen(key, () => { if (root.offsetParent) load(); });
    app.store.listen("view", () => {
      const run = app.store.get("run");
      if (!body || !root.offsetParent || !run) return;
      if (run !== shownRun || askedOf(app, run) !== shownAsked) load();
      else if (picture.clientWidth !== shownWide) draw();
    });
    new ResizeObserver(() => { if (body && root.offsetParent && Math.abs(picture.clientWidth - shownWide) > PATH_TURNED) draw(); }).observe(picture);
    app.store.listen("theme", () => draw());
    for (const key of ["roles", "other"]) app.store.listen(key, () => draw());
  },
};
