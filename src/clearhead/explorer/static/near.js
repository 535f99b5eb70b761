// What costs time waits until it is looked at: a section asks for its views when it comes near the window.

const atWork = new WeakMap();

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
