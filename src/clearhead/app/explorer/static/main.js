// The page: finds its source, mounts the sections, and carries what they share.

import { ablateSection } from "./ablate.js";
import { answerSection } from "./answer.js";
import { attentionSection } from "./attention.js";
import { compareSection } from "./bench.js";
import { costSection } from "./cost.js";
import { el, replace, roving } from "./dom.js";
import { denoiseSection } from "./denoise.js";
import { drawersSection } from "./drawers.js";
import { flowSection } from "./flow.js";
import { glossed, mountGlossary } from "./glossary.js";
import { graphSection } from "./graph.js";
import { headSection } from "./head.js";
import { inputSection } from "./input.js";
import { lensSection } from "./lens.js";
import { dropUnknown, mountNotes } from "./notes.js";
import { asks } from "./query.js";
import { nextSection } from "./next.js";
import { pathSection } from "./path.js";
import { playSection } from "./play.js";
import { ribbonSection } from "./ribbon.js";
import { followSelection, openRun, readSelection, writeSelection } from "./selection.js";
import { similarSection } from "./similar.js";
import { LiveSource, RecordedSource } from "./source.js";
import { Store } from "./store.js";
import { startTour } from "./tour.js";
import { worthSection } from "./ablation.js";

const STAYS = [inputSection, answerSection]; // at the left, in place
const VIEWS = [ribbonSection, similarSection, denoiseSection, pathSection, worthSection, playSection, graphSection, attentionSection, headSection, lensSection, nextSection, ablateSection, compareSection, drawersSection, flowSection, costSection]; // at the right, one at a time

const byId = (id) => document.getElementById(id);

function makeApp(source) {
  const store = new Store({ model: null, run: null, selected: null, view: null, second: null, other: null, at: null, beside: null, colour: "pattern", how: "zero", sampling: { temperature: 1, topK: 0, topP: 1, minP: 0 }, position: null, layer: null, neuronLayer: null, head: null, target: null, foil: null, off: "", dropped: "", typed: false, roles: {}, theme: null, example: false, failed: false });
  return {
    source,
    store,
    /** Show one of the views at the right. */
    open(id) {
      if (!VIEWS.some((section) => section.id === id)) return;
      store.set("view", id);
      const link = document.querySelector(`nav a[data-view="${id}"]`);
      if (link.parentElement.scrollWidth > link.parentElement.clientWidth) link.scrollIntoView({ block: "nearest", inline: "center" });
      const narrow = matchMedia("(max-width: 61.99rem)").matches;
      if (store.get("run") && (narrow || byId("views").getBoundingClientRect().top < 0)) byId(narrow ? id : "top").scrollIntoView({ block: "start", behavior: "instant" });
    },
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
    /** Let the model read something, with a line that says so, and call `show(run)`; nothing is shown where the reader has gone on to another text meanwhile. */
    read(text, work, show, failed = (error) => this.fail(error)) {
      const ask = asks(document.body, () => [store.get("run")], (error) => { this.say(""); failed(error); }, false);
      const read = ask(async (wait) => {
        this.say(text);
        const run = await wait(work());
        this.say("");
        show(run);
      });
      return read.then((made) => { if (made === null) this.say(""); });
    },
  };
}

function mountSection(section, app) {
  const body = el("div", { class: "body" });
  const root = el("section", { id: section.id, "aria-labelledby": `${section.id}-title` }, el("h2", { id: `${section.id}-title` }, section.title), el("p", { class: "hint" }, glossed(section.hint)), body);
  section.mount(body, app);
  return root;
}

function mountSections(app) {
  const links = VIEWS.map((section) => el("a", { title: section.hint, href: `#view=${section.id}`, "data-view": section.id, onclick: (event) => { event.preventDefault(); app.open(section.id); } }, section.title));
  replace(byId("sections"), links);
  roving(byId("sections"), "a");
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); byId("sections").querySelector('[tabindex="0"]').focus(); });
  const views = el("div", { id: "views" }, byId("sections"));
  const stays = el("div", { id: "stays" });
  byId("main").append(stays, views);
  mountNotes(app, byId("main"));
  const applies = (section) => !section.applies || !app.store.get("model") || section.applies(app.store.get("model"), app.source.live, app.source, app.store.get("run"));
  const show = () => {
    const there = VIEWS.filter(applies);
    const chosen = there.find((section) => section.id === app.store.get("view")) || there[0];
    VIEWS.forEach((section, place) => {
      byId(section.id).hidden = section !== chosen;
      links[place].hidden = !there.includes(section);
      if (section === chosen) links[place].setAttribute("aria-current", "true");
      else links[place].removeAttribute("aria-current");
    });
    byId("answer").hidden = !applies(answerSection);
  };
  for (const key of ["model", "view", "run"]) app.store.listen(key, show); // before the views hear of it: they ask whether they are seen
  for (const section of STAYS) stays.append(mountSection(section, app));
  for (const section of VIEWS) views.append(mountSection(section, app));
  show();
}

function mountTools(app) {
  const dark = el("button", { type: "button", id: "theme", onclick: () => switchTheme(app) }, "Dark or light");
  const tour = el("button", { type: "button", id: "tour", onclick: () => startTour(app) }, "Guided tour");
  const save = el("a", { id: "export", class: "button", href: "#", download: "" }, "Save this page");
  app.store.on("run", (run) => save.setAttribute("href", run && app.source.live ? `inside/export?run=${encodeURIComponent(run.run)}` : "#"));
  save.addEventListener("click", (event) => {
    event.preventDefault();
    saveFile(app, save, `inside/export?run=${encodeURIComponent(app.store.get("run").run)}&state=${encodeURIComponent(writeSelection(app))}${app.store.get("other") ? `&second=${app.store.get("other").run}` : ""}`);
  });
  const play = el("button", { type: "button", id: "play-open", class: "primary", onclick: () => app.play() }, "Play");
  replace(byId("tools"), play, tour, dark, app.source.live ? save : null);
  const kept = localTheme();
  if (kept) applyTheme(app, kept);
}

/** Save the page as a file. It takes a while, since every view is computed for it: a line says so until it is there. */
async function saveFile(app, button, address) {
  if (button.getAttribute("aria-disabled")) return;
  button.setAttribute("aria-disabled", "true");
  app.say("Writing the file: every view is computed for it, which may take a while…");
  try {
    const answer = await fetch(address).catch(() => null);
    if (!answer) throw new Error("the server does not answer: is `clearhead explore` still running?");
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `the server answered ${answer.status}`);
    const place = URL.createObjectURL(await answer.blob());
    el("a", { href: place, download: "clearhead.html" }).click();
    setTimeout(() => URL.revokeObjectURL(place), 60_000);
    app.say("The file is saved: it opens anywhere, without a network.");
  } catch (error) {
    app.fail(error);
  }
  button.removeAttribute("aria-disabled");
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
  const layers = model.layers + (model.encoder_layers || 0);
  const parts = [model.name, model.family, `${layers} layer${layers === 1 ? "" : "s"}`, `${Number(model.parameters || 0).toLocaleString("en")} parameters`];
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
  if (model.ready) app.source.drop((path) => path === "example"); // nobody needs it
  else {
    const shown = await example;
    if (shown && !model.ready) {
      app.store.set("example", true);
      const live = app.source;
      app.source = new RecordedSource(shown);
      app.store.set("model", shown.views.model);
      openRun(app, shown.run);
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
  const stated = readSelection(location.hash);
  const named = statedInput(stated);
  const begin = named || model.example;
  if (begin) {
    await app.read("The model reads its first text…", () => app.source.post("run", begin), (run) => {
      if (stated.view) app.open(stated.view);
      openRun(app, run, named || !stated.text ? stated : {});
      dropUnknown(app, location.hash, run, VIEWS.map((section) => section.id));
    });
  }
}

/** What the address asks the model to read; null where it names nothing. */
function statedInput({ text, ids, written, pair }) {
  if (text === null && ids === null) return null;
  const more = { ...(written ? { target: written } : {}), ...(pair ? { pair } : {}) };
  return text === null ? { ids: ids.split(" ").map(Number), ...more } : { text, ...more };
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
  const stated = readSelection(location.hash || record.state || "");
  if (stated.view) app.open(stated.view);
  openRun(app, record.run, stated);
  dropUnknown(app, location.hash, record.run, VIEWS.map((section) => section.id));
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

/** The record of a saved file: JSON, in gzip, in base64. */
function unpackRecord(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function start() {
  const stored = byId("record");
  const record = stored ? await unpackRecord(stored.textContent) : null;
  const app = makeApp(record ? new RecordedSource(record) : new LiveSource());
  window.clearhead = app;
  mountTools(app);
  mountSections(app);
  mountGlossary(byId("foot"));
  followSelection(app);
  addEventListener("hashchange", () => { if (app.store.get("run")) dropUnknown(app, location.hash, app.store.get("run"), VIEWS.map((section) => section.id)); });
  keepLinksHere();
  if (!record) followLoading(app);
  try {
    await (record ? startRecorded(app, record) : startLive(app));
  } catch (error) {
    app.fail(error);
    app.store.set("failed", true);
  }
}

start();
