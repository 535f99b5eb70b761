// What costs time waits until it is looked at: a section asks for its views when it comes near the window.

/** Call `show(run)` for each new run, once `root` is near the window; one that nobody looks at is never asked for. */
export function whenNear(root, app, show) {
  let near = false;
  let shown = null;
  const look = () => {
    const run = app.store.get("run");
    if (near && run && run !== shown) {
      shown = run;
      show(run);
    }
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
