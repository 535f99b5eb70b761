// How views ask: what costs time waits until it is looked at, and an answer that comes late is not shown for what is wanted by then.

const NEAR_AHEAD = 1e9; // parameters times tokens of a run whose views are asked for before anybody looks
const NEAR_PAUSE = 1200; // milliseconds that a run must have been shown for that
const atWork = new WeakMap(); // by part of the page: its latest question
let nearQueue = Promise.resolve();

/** Thrown within a question that is no longer asked: what follows in it is not done. */
class Passed extends Error {}

/**
 * The questions of one part of the page, of which only the latest counts. `about()` lists what they depend on; `failed(error)` shows an error.
 * Returns `ask(work)`: `work(wait)` reads the selection, asks with `await wait(promise)`, and draws; nothing after a `wait` is done where
 * something else is wanted meanwhile. Then, or where the request was dropped, a part that is seen asks again by itself, unless `again` is
 * false. The part is busy until the latest question ends. `ask` gives true once it, or a later one in its place, is drawn, false if that
 * failed, null if it was left.
 */
export function asks(node, about, failed, again = true) {
  return function ask(work) {
    const own = { about: about() };
    own.end = follow(own, work);
    return own.end;
  };

  async function follow(own, work) {
    const wanted = () => atWork.get(node) === own && about().every((one, place) => Object.is(one, own.about[place]));
    const wait = async (answer) => {
      let found = null;
      try {
        found = await answer;
      } catch (error) {
        throw error.dropped || !wanted() ? new Passed() : error;
      }
      if (!wanted()) throw new Passed();
      return found;
    };
    wait.still = wanted;
    atWork.set(node, own);
    node.setAttribute("aria-busy", "true");
    try {
      for (;;) {
        try {
          await work(wait);
          return true;
        } catch (error) {
          if (atWork.get(node) !== own) return atWork.get(node).end;
          if (!(error instanceof Passed)) {
            failed(error);
            return false;
          }
          if (!again || !node.offsetParent) return null;
          own.about = about();
        }
      }
    } finally {
      if (atWork.get(node) === own) node.removeAttribute("aria-busy");
    }
  }
}

/**
 * Call `load()` for each new run, once `root` is near the window; one that nobody looks at is never asked for, one that was left or failed
 * is asked for again. Returns a function that does so before anybody looks, for `askAhead`.
 */
export function whenNear(root, app, load) {
  let near = false;
  let shown = null; // the run that is there, or asked for
  const applies = () => !document.querySelector(`nav a[data-view="${root.closest("section")?.id}"]`)?.hidden;
  const look = async (ahead = false) => {
    const run = app.store.get("run");
    if (!run || run === shown || (ahead && !applies())) return;
    if (!near && !ahead) {
      if (applies()) root.setAttribute("aria-busy", "true"); // what stands there is still of the run before
      return;
    }
    shown = run;
    if (await load()) return;
    if (shown === run) shown = null;
    if (!near) look();
  };
  new IntersectionObserver(
    (entries) => {
      near = entries.at(-1).isIntersecting;
      look();
    },
    { rootMargin: "600px 0px" },
  ).observe(root);
  app.store.on("run", () => look());
  return () => look(true);
}

/** Of a small model, ask for a view before anybody looks: `work(run)` is called once nothing else is asked for, one view after the other. */
export function askAhead(app, work) {
  app.store.listen("run", (run) => {
    const begun = performance.now();
    const wanted = () => run && app.store.get("run") === run && app.source.live && app.store.get("model").parameters * run.tokens.labels.length < NEAR_AHEAD;
    nearQueue = nearQueue.then(async () => {
      if (wanted()) await new Promise((done) => setTimeout(done, Math.max(0, NEAR_PAUSE - (performance.now() - begun))));
      if (wanted()) await app.source.idle();
      if (wanted()) await work(run).catch(() => null);
    });
  });
}
