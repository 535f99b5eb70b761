// Lines over every view: what is off, what was left out of the address, and that a typed text is not read yet.

import { ATLAS_COLOURS, atlasName } from "./atlas.js";
import { el, replace } from "./dom.js";

const NOTES_HOWS = ["zero", "mean", "second"];

/** A part by its name, as people read it. */
function noteName(name) {
  const [kind, rest] = name.includes(":") ? name.split(":") : ["head", name];
  return `${{ head: "Head", feedforward: "Feed-forward", layer: "Layer" }[kind]} ${rest}`;
}

/** Every part that can be off. */
function notedParts(model) {
  const layers = (count, prefix = "") => Array.from({ length: count }, (_, layer) => [`feedforward:${prefix}${layer}`, `layer:${prefix}${layer}`]).flat();
  const heads = model.attentions.flatMap(({ kind, layer, heads }) => Array.from({ length: heads }, (_, number) => atlasName(kind, layer, number)));
  return new Set([...heads, ...layers(model.layers), ...layers(model.encoder_layers || 0, "encoder.")]);
}

/** Drop what an address states that this page, model and run do not have; `views` are the ids of the views. Returns their names. */
export function dropUnknown(app, hash, run, views) {
  const model = app.store.get("model");
  const parts = notedParts(model);
  const below = (most) => (text) => /^\d+$/.test(text) && Number(text) < most;
  const head = (name) => parts.has(name) && !name.includes(":");
  const fits = {
    view: (name) => views.includes(name), position: below(run.tokens.labels.length), layer: below(model.layers + 1), target: below(Infinity), foil: below(Infinity), at: below(Infinity),
    head, beside: head, colour: (name) => name in ATLAS_COLOURS, how: (name) => NOTES_HOWS.includes(name), off: (names) => names.split(",").every((name) => parts.has(name)),
  };
  if (["next", "fill"].includes(model.task)) fits.target = fits.foil = below(model.vocab_size);
  const known = ["text", "ids", "written", "pair", "second"];
  const bad = [...new URLSearchParams(hash.replace(/^#/, ""))].filter(([key, value]) => value && !(known.includes(key) || fits[key]?.(value)));
  for (const [key, value] of bad) {
    if (key === "off") app.store.set("off", value.split(",").filter((name) => parts.has(name)).join(","));
    else if (key === "position") app.store.set("position", run.position);
    else if (["colour", "how"].includes(key)) app.store.set(key, key === "how" ? "zero" : "pattern");
    else if (key === "view") app.store.set("view", null);
    else if (key in fits) app.store.set(key, null);
  }
  app.store.set("dropped", bad.map(([key, value]) => `${key}=${value}`.slice(0, 40)).join(", "));
}

/** The lines, kept up to date. */
export function mountNotes(app, before) {
  const notes = el("div", { id: "notes", "aria-live": "polite" });
  before.before(notes);
  const show = () => {
    const [off, dropped, typed] = ["off", "dropped", "typed"].map((key) => app.store.get(key));
    const names = (off || "").split(",").filter(Boolean);
    const on = (name) => app.store.set("off", names.filter((other) => other !== name).join(","));
    document.body.classList.toggle("stale", Boolean(typed));
    replace(
      notes,
      names.length ? el("p", { class: "banner", id: "off-note" }, names.map((name) => el("button", { type: "button", "data-off": name, "aria-label": `Turn ${noteName(name).toLowerCase()} on again`, onclick: () => on(name) }, `${noteName(name)} is off ×`)), " “Turn off” shows the answer without it; the other views show the whole model.") : null,
      dropped ? el("p", { class: "banner", id: "dropped-note" }, `Left out of the address, since this page does not have it: ${dropped}. `, el("button", { type: "button", onclick: () => app.store.set("dropped", "") }, "Close")) : null,
      typed ? el("p", { class: "banner", id: "typed-note" }, "What you see is of the text that was read before: press Run to read this one.") : null,
    );
  };
  for (const key of ["off", "dropped", "typed"]) app.store.listen(key, show);
  for (const key of ["run", "selected"]) app.store.listen(key, () => { app.store.values.typed = false; show(); });
}
