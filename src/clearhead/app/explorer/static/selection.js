// One selection for the whole page: what is looked at, at which token, in which head, for which answer; and the same in the address.

const SELECTION_NUMBERS = ["position", "layer", "target", "foil", "at"];
const SELECTION_KEYS = ["view", "position", "layer", "head", "beside", "colour", "target", "foil", "off", "how", "second", "at"];
const SELECTION_USUAL = { colour: "pattern", how: "zero" }; // what the address need not say

/** The column of the answer that belongs to a token: its own, or the only one there is. */
export function columnOf(run, position) {
  return run.columns.length === run.tokens.labels.length ? position : Math.min(position, Math.max(run.columns.length - 1, 0));
}

/** Where views ask about the answer: position, and the pinned answer and its rival where they are chosen. */
export function askedOf(app, run) {
  const [target, foil] = [app.store.get("target"), app.store.get("foil")];
  const more = [target === null ? "" : `&token=${target}`, foil === null ? "" : `&against=${foil}`].join("");
  return `position=${columnOf(run, app.store.get("position"))}${more}`;
}

/** The head that the path of this run names: what views begin with where nobody has pinned one. */
export function leadingHead(app) {
  const leading = app.store.get("leading");
  return leading && leading.run === app.store.get("run")?.run ? leading.head : null;
}

/** Of the edges of a path, the one to name: the largest for the answer that comes from another token, else from its own; where none speaks for it, the largest. */
export function leadingEdge(edges) {
  const speaking = edges.filter((edge) => edge.value > 0);
  return speaking.find((edge) => /^[a-z]/.test(edge.part) || edge.source !== edge.reader) || speaking[0] || edges[0];
}

/** What the address holds: {text, ids, target text, ..., position, head, ...}; what it does not name is null. */
export function readSelection(hash) {
  const stated = new URLSearchParams(hash.replace(/^#/, ""));
  const found = { text: stated.get("text"), ids: stated.get("ids"), written: stated.get("written"), pair: stated.get("pair") };
  for (const key of SELECTION_KEYS) found[key] = stated.get(key);
  for (const key of SELECTION_NUMBERS) found[key] = /^\d+$/.test(found[key] || "") ? Number(found[key]) : null;
  return found;
}

/** The selection as an address holds it. */
export function writeSelection(app) {
  const run = app.store.get("run");
  const parts = new URLSearchParams();
  if (run) {
    const first = run.source || run.tokens;
    if (first.text) parts.set("text", first.text);
    else if (first.ids.length) parts.set("ids", first.ids.join(" "));
    if (run.source && run.tokens.text) parts.set("written", run.tokens.text);
    if (run.pair) parts.set("pair", run.pair);
  }
  for (const key of SELECTION_KEYS) {
    const value = app.store.get(key);
    if (value !== null && value !== undefined && value !== "" && value !== SELECTION_USUAL[key]) parts.set(key, String(value));
  }
  return parts.toString();
}

/** Show a run with a selection of its own: what is not given begins anew. */
export function openRun(app, run, given = {}) {
  const within = (value, most) => (value !== null && value !== undefined && value < most ? value : null);
  const kept = { target: null, foil: null, off: "", layer: null, ...given };
  Object.assign(app.store.values, { target: kept.target, foil: kept.foil, layer: kept.layer });
  app.store.values.position = within(given.position, run.tokens.labels.length) ?? run.position;
  if (given.head) app.store.values.head = given.head;
  for (const key of ["beside", "second"]) if (given[key]) app.store.values[key] = given[key];
  for (const [key, usual] of Object.entries(SELECTION_USUAL)) app.store.values[key] = given[key] || app.store.values[key] || usual;
  app.store.values.at = given.at ?? null;
  app.store.values.off = kept.off || "";
  app.store.set("run", run);
  app.store.set("selected", {});
}

/** Release every pin: the selection is again what the run began with. */
export function releasePins(app) {
  const run = app.store.get("run");
  if (!run) return;
  for (const [key, value] of Object.entries({ target: null, foil: null, layer: null, off: "", beside: null, at: null, position: run.position })) app.store.set(key, value);
}

/** Keep the address up to date, and follow it where somebody changes it. */
export function followSelection(app) {
  let waiting = 0;
  let before = null;
  app.store.listen("run", (run) => {
    const left = before && before !== run ? `run/${before.run}/` : null;
    if (left) app.source.drop((path) => path.startsWith(left));
    before = run;
  });
  app.store.listen("position", () => {
    const run = app.store.get("run");
    const here = run && [app.store.get("position"), columnOf(run, app.store.get("position"))].map((place) => `position=${place}`);
    if (run) app.source.drop((path) => path.startsWith(`run/${run.run}/`) && /[?&]position=/.test(path) && !path.split(/[?&]/).some((part) => here.includes(part)));
  });
  const write = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      if (!app.store.get("run") || app.store.get("example")) return;
      try {
        history.replaceState(null, "", `#${writeSelection(app)}`);
      } catch {
        // a frame in a notebook has no address of its own
      }
    }, 60);
  };
  for (const key of ["run", "selected", ...SELECTION_KEYS]) app.store.listen(key, write);
  addEventListener("hashchange", () => {
    const stated = readSelection(location.hash);
    for (const key of SELECTION_KEYS) if (stated[key] !== null) app.store.set(key, stated[key]);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector(".tour")) releasePins(app);
  });
}
