// The page: finds its source, mounts the sections, and carries what they share.

import { ablateSection } from "./ablate.js";
import { attentionSection } from "./attention.js";
import { compareSection } from "./compare.js";
import { costSection } from "./cost.js";
import { el, replace } from "./dom.js";
import { flowSection } from "./flow.js";
import { inputSection } from "./input.js";
import { lensSection } from "./lens.js";
import { nextSection } from "./next.js";
import { LiveSource, RecordedSource } from "./source.js";
import { Store } from "./store.js";
import { startTour } from "./tour.js";

const SECTIONS = [inputSection, flowSection, attentionSection, lensSection, nextSection, ablateSection, compareSection, costSection];

const byId = (id) => document.getElementById(id);

function makeApp(source) {
  const store = new Store({ model: null, run: null, second: null, position: null, token: null, roles: {}, theme: null, example: false, failed: false });
  return {
    source,
    store,
    /** A line under the header: what the page is doing. */
    say(text) {
      const status = byId("status");
      status.className = "";
      status.textContent = text || "";
    },
    /** What went wrong, in words. */
    fail(error) {
      const status = byId("status");
      status.className = "error";
      status.textContent = error.message || String(error);
    },
    /** Run `work` with a line that says so; errors are shown, not thrown. */
    async busy(text, work) {
      this.say(text);
      document.body.setAttribute("aria-busy", "true");
      try {
        const made = await work();
        this.say("");
        return made;
      } catch (error) {
        this.fail(error);
        return null;
      } finally {
        document.body.removeAttribute("aria-busy");
      }
    },
  };
}

function mountSections(app) {
  const links = [];
  for (const section of SECTIONS) {
    const body = el("div", { class: "body" });
    const root = el("section", { id: section.id, "aria-labelledby": `${section.id}-title` }, el("h2", { id: `${section.id}-title` }, section.title), el("p", { class: "hint" }, section.hint), body);
    byId("main").append(root);
    links.push(el("a", { href: `#${section.id}` }, section.title));
    section.mount(body, app);
  }
  replace(byId("sections"), links);
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const link = links.find((one) => one.getAttribute("href") === `#${entry.target.id}`);
        if (link && entry.isIntersecting) for (const one of links) one.toggleAttribute("data-here", one === link);
      }
    },
    { rootMargin: "-30% 0px -60% 0px" },
  );
  for (const root of document.querySelectorAll("main > section")) seen.observe(root);
}

function mountTools(app) {
  const dark = el("button", { type: "button", id: "theme", onclick: () => switchTheme(app) }, "Light / dark");
  const tour = el("button", { type: "button", id: "tour", onclick: () => startTour(app) }, "Guided tour");
  const save = el("a", { id: "export", class: "button", href: "#", download: "" }, "Save this page");
  app.store.on("run", (run) => save.setAttribute("href", run && app.source.live ? `/inside/export?run=${encodeURIComponent(run.run)}` : "#"));
  replace(byId("tools"), tour, dark, app.source.live ? save : null);
  const kept = localTheme();
  if (kept) applyTheme(app, kept);
}

function localTheme() {
  try {
    return localStorage.getItem("clearhead-theme");
  } catch {
    return null;
  }
}

function switchTheme(app) {
  const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  applyTheme(app, now === "dark" ? "light" : "dark");
}

function applyTheme(app, theme) {
  document.documentElement.dataset.theme = theme;
  app.store.set("theme", theme);
  try {
    localStorage.setItem("clearhead-theme", theme);
  } catch {
    // a page opened from a file may have no storage: the choice then lasts as long as the page
  }
}

function showModel(model) {
  const parts = [model.name, model.family, `${model.layers + (model.encoder_layers || 0)} layers`, `${Number(model.parameters || 0).toLocaleString("en")} parameters`];
  byId("model-name").textContent = model.ready ? parts.join(" · ") : model.failed ? `${model.name}: no model` : model.says || "loading…";
}

/** A line over the sections that says what they show while there is no model: nothing yet, or an example. */
function followLoading(app) {
  const banner = el("p", { id: "banner", class: "banner", role: "status", hidden: true });
  byId("main").before(banner);
  const show = () => {
    const example = app.store.get("example");
    const waits = !app.store.get("model");
    const failed = app.store.get("failed");
    banner.hidden = !example && !waits && !failed;
    banner.classList.toggle("wrong", failed);
    const loading = example ? "An example: a small model, recorded. Your model is being loaded and takes its place in a moment." : "The model is being loaded…";
    banner.textContent = failed ? `There is no model to show.${example ? " What you see below is a recorded example of another, small one." : ""}` : loading;
  };
  for (const key of ["example", "model", "failed"]) app.store.on(key, show);
  show();
}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

async function startLive(app) {
  const example = app.source.get("example").catch(() => null);
  let model = await app.source.fresh("model");
  showModel(model);
  if (!model.ready) {
    const shown = await example;
    if (shown && !model.ready) {
      app.store.set("example", true);
      const live = app.source;
      app.source = new RecordedSource(shown);
      app.store.set("model", shown.views.model);
      app.store.set("run", shown.run);
      app.live = live;
    }
  }
  const live = app.live || app.source;
  while (!model.ready) {
    await pause(300);
    model = await live.fresh("model");
    showModel(model);
    if (model.failed) throw new Error(`The model cannot be opened: ${model.says}`);
  }
  app.source = live;
  app.store.set("example", false);
  app.store.set("run", null);
  app.store.set("model", model);
  followRoles(app);
  if (model.example) {
    const run = await app.busy("The model reads its first text…", () => app.source.post("run", model.example));
    if (run) app.store.set("run", run);
  }
}

async function followRoles(app) {
  for (let tries = 0; tries < 200; tries++) {
    const found = await app.source.fresh("roles").catch(() => null);
    if (found && found.ready) {
      app.store.set("roles", found.roles);
      return;
    }
    await pause(1000);
  }
}

async function startRecorded(app, record) {
  const model = await app.source.get("model");
  showModel(model);
  app.store.set("model", model);
  app.store.set("roles", (record.views.roles || {}).roles || {});
  app.store.set("run", record.run);
  app.say(record.says || "A recording: what was computed is here, nothing more is run.");
}

/** In a notebook's frame a link to a place on this page would lead to the notebook: there the page goes to it by itself. */
function keepLinksHere() {
  if (location.protocol !== "about:") return;
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (!link) return;
    event.preventDefault();
    byId(link.getAttribute("href").slice(1))?.scrollIntoView();
  });
}

async function start() {
  const stored = byId("record");
  const record = stored ? JSON.parse(stored.textContent) : null;
  const app = makeApp(record ? new RecordedSource(record) : new LiveSource());
  mountTools(app);
  mountSections(app);
  keepLinksHere();
  if (!record) followLoading(app);
  try {
    await (record ? startRecorded(app, record) : startLive(app));
  } catch (error) {
    app.fail(error);
    app.store.set("failed", true);
  }
  window.clearhead = app;
}

start();
