// What costs time waits until it is looked at: a section asks for its views when it comes near the window.

const atWork = new WeakMap();
const NEAR_AHEAD = 1e9; // parameters times tokens of a run whose views are asked for before anybody looks
const NEAR_PAUSE = 1200; // milliseconds that a run must have been shown for that
let nearQueue = Promise.resolve();

/** Mark a part of the page until `work` is done: what stands there is still of the run before. */
export async function whileWorking(root, work) {
  atWork.set(root, work);
  root.setAttribute("aria-busy", "true");
  await work;
  if (atWork.get(root) === work) root.removeAttribute("aria-busy");
}

/** Call `show(run)` for each new run, once `root` is near the window; one that nobody looks at is never asked for. */
export function whenNear(root, app, show) {
  let near = false;
  let shown = null;
  const applies = () => !document.querySelector(`nav a[data-view="${root.closest("section")?.id}"]`)?.hidden;
  const look = () => {
    const run = app.store.get("run");
    if (!run || run === shown) return;
    if (near) {
      shown = run;
      whileWorking(root, show(run));
    } else if (applies()) root.setAttribute("aria-busy", "true");
  };
  new IntersectionObserver(
    (entries) => {
      near = entries.at(-1).isIntersecting;
      look();
    },
    { rootMargin: "600px 0px" },
  ).observe(root);
  app.store.on("run", look);
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
