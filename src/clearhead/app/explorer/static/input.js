// Input: what somebody types, as the tokens that the model reads, and how they were made.

import { css, inkOn, signedColour } from "./colour.js";
import { el, figure, press, replace, roving, tokenText, wholeWord } from "./dom.js";
import { glossed } from "./glossary.js";
import { patchImage, soundImage } from "./image.js";
import { asks } from "./query.js";
import { drawingPad } from "./pad.js";
import { askedOf, columnOf, openRun } from "./selection.js";

const INPUT_CHIPS = 600; // shown at first; more on demand
const INPUT_PAUSE = 120; // milliseconds without a key, after which what is typed is shown as tokens

/** A file as the page sends it: a data address. */
export function inputFile(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => failed(new Error("the file cannot be read")));
    reader.readAsDataURL(file);
  });
}

/** Tokens as chips; the chosen one is pressed. */
function inputChips(tokens, chosen, onChoose, all, showAll) {
  const some = all ? tokens.labels : tokens.labels.slice(0, INPUT_CHIPS);
  const chips = some.map((label, place) => {
    const span = tokens.spans[place];
    const small = [tokens.ids.length ? tokens.ids[place] : null, span && span[1] > span[0] ? `${span[0]}–${span[1]}` : null].filter((part) => part !== null).join(" · ");
    return el("li", {}, el("button", { type: "button", title: wholeWord(tokens, place) ? `a piece of “${wholeWord(tokens, place)}”` : null, class: `chip${tokens.special[place] ? " special" : ""}`, "data-token": place, "data-id": tokens.ids[place], "aria-pressed": String(place === chosen), onclick: () => onChoose(place), onfocus: () => onChoose(place, true), onpointerenter: () => onChoose(place, true) }, tokenText(label), el("small", {}, small)));
  });
  const more = tokens.labels.length > some.length ? el("li", {}, el("button", { type: "button", onclick: showAll }, `show all ${tokens.labels.length}`)) : null;
  return [...chips, more].filter(Boolean);
}

/** The text with the characters behind one token marked. */
function inputMarked(text, span) {
  if (!text || !span || span[1] <= span[0]) return text ? [text] : [];
  const letters = Array.from(text);
  return [letters.slice(0, span[0]).join(""), el("mark", {}, letters.slice(span[0], span[1]).join("")), letters.slice(span[1]).join("")];
}

/** How the text was split into one token, stage by stage. */
function inputStages(stages, place) {
  if (!stages) return null;
  const final = stages.final[place];
  if (!final) return null;
  if (final.text === null || final.text === undefined) return el("ol", { class: "stages" }, el("li", {}, "put there by the tokenizer: it is not in the text"), el("li", {}, `id ${final.id}`));
  const part = final.text === 1 && stages.pair ? stages.pair : stages.text;
  const token = part.tokens.find((one) => one.start === final.start && one.end === final.end && one.id === final.id);
  const piece = token ? part.pieces[token.piece] : null;
  const rows = [
    ["normalise", part.normalised === part.text ? "unchanged" : part.normalised],
    ["split", piece ? piece.text : "–"],
    ["subword model", final.token],
    ["as a number", String(final.id)],
  ];
  return el("ol", { class: "stages" }, rows.map(([name, value]) => el("li", {}, el("strong", {}, `${name}: `), el("span", { class: "mono", dir: "auto" }, value.length > 200 ? `${value.slice(0, 199)}…` : value))));
}

export const inputSection = {
  id: "input",
  title: "Input",
  hint: "Type something. The model reads tokens, each a number.",

  mount(root, app) {
    const text = el("textarea", { id: "input-text", rows: 2, spellcheck: "false", "aria-label": "Text" });
    const target = el("textarea", { id: "input-target", rows: 2, spellcheck: "false", placeholder: "empty: the model writes its own" });
    const pair = el("textarea", { id: "input-pair", rows: 2, spellcheck: "false" });
    const image = el("input", { type: "file", id: "input-image", accept: "image/*", onchange: () => pick(image.files[0]) });
    const sound = el("input", { type: "file", id: "input-sound", accept: "audio/*", onchange: () => hear(sound.files[0]) });
    const preview = el("img", { id: "input-preview", alt: "the chosen image", hidden: true });
    const go = el("button", { type: "button", id: "input-run", class: "primary", onclick: () => send() }, "Run");
    const mask = el("button", { type: "button", id: "input-mask", hidden: true, onclick: () => insertMask() });
    const maskWords = el("span", { class: "soft", id: "input-mask-words", hidden: true });
    const keys = el("span", { class: "soft" }, "or Ctrl + Enter");
    const problem = el("p", { role: "alert", class: "problem" });
    const seen = el("figure", { id: "input-picture", hidden: true });
    const tokens = el("ul", { class: "chips", id: "input-tokens", "aria-label": "Tokens" });
    const source = el("ul", { class: "chips", id: "input-source", "aria-label": "Tokens of the source" });
    const about = el("p", { class: "soft", id: "input-about" });
    const tinted = el("p", { class: "soft", id: "input-tinted", hidden: true });
    const marked = el("p", { class: "marked mono", id: "input-marked", dir: "auto" });
    const made = el("div", { id: "input-stages", "aria-live": "polite" });
    const boxes = {
      text: el("div", { class: "grow" }, el("label", { for: "input-text" }, "Text"), text),
      target: el("div", { class: "grow" }, el("label", { for: "input-target" }, "What the decoder has written"), target),
      pair: el("details", { class: "grow" }, el("summary", {}, "A second text"), el("label", { for: "input-pair" }, "Pair"), pair),
      image: el("div", { class: "grow drop" }, el("label", { for: "input-image" }, "An image: choose one, or drop it here"), image, preview),
    };
    boxes.sound = el("div", { class: "grow drop" }, el("label", { for: "input-sound" }, "A sound: choose a file, or drop it here"), sound);
    const pad = el("details", { class: "grow", hidden: true }, el("summary", {}, "Draw one"), drawingPad((address) => { picture = address; app.store.set("picture", picture); preview.src = picture; preview.hidden = false; send(); }));
    boxes.image.append(pad);
    const examples = el("details", { id: "input-examples", hidden: true }, el("summary", {}, "Examples"), el("ul", { class: "plain" }));
    const sourceBox = el("div", { hidden: true }, el("h3", { class: "small" }, "The encoder reads"), source);
    const tokensTitle = el("h3", { class: "small" }, "Tokens");
    replace(root, el("div", { class: "row" }, Object.values(boxes)), el("div", { class: "row toolbar run-row" }, go, keys, mask, maskWords), problem, examples, sourceBox, el("div", { class: "row tokens-head" }, tokensTitle, about), seen, tokens, tinted, el("details", { id: "input-how" }, el("summary", {}, "How it was split"), marked, made));
    for (const key of ["run", "position", "target", "foil", "theme"]) app.store.listen(key, () => tint());
    app.store.listen("position", markChosen);
    for (const list of [tokens, source]) roving(list, "button");
    let typing = 0;
    let picture = null;
    let recording = null; // a sound file, as the page sends it
    let shownImage = null;
    let stages = null;
    const all = { tokens: false, source: false };

    /** Whether what stands in the boxes is what the model has read. */
    const unread = () => { const run = app.store.get("run"); const first = run?.source || run?.tokens; return Boolean(run) && (text.value !== (first.text || first.ids.join(" ")) || (pair.value || "") !== (run.pair || "")); };
    for (const box of [text, pair]) box.addEventListener("input", () => { app.store.set("typed", unread()); });
    for (const box of [text, pair]) box.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(previewTokens, INPUT_PAUSE); });
    for (const box of [text, target, pair]) {
      box.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
      });
    }
    for (const box of [boxes.image, boxes.sound]) box.addEventListener("dragover", (event) => event.preventDefault());
    boxes.sound.addEventListener("drop", (event) => {
      event.preventDefault();
      hear(event.dataTransfer.files[0]);
    });
    boxes.image.addEventListener("drop", (event) => {
      event.preventDefault();
      pick(event.dataTransfer.files[0]);
    });

    /** Inputs that the page has tried on this model, each with what it found there; in a file, those whose run is in it can be opened. */
    async function followExamples() {
      for (let tries = 0; tries < 200; tries++) {
        const found = await app.source.fresh("examples").catch(() => null);
        if (found && found.ready) return showExamples(found.examples);
        if (!app.source.live) return null;
        await new Promise((done) => setTimeout(done, 1000));
      }
      return null;
    }

    function showExamples(found) {
      const words = (one) => [el("span", { class: "mono", dir: "auto" }, one.text || one.name || one.ids.join(" "), one.pair ? ` / ${one.pair}` : ""), el("span", { class: "soft" }, one.says)];
      const row = (one) => el("li", {}, app.source.live || one.run ? el("button", { type: "button", class: "example", onclick: () => take(one) }, words(one)) : el("p", { class: "example" }, words(one)));
      const own = app.source.live || !found.some((one) => one.run) ? null : el("li", {}, el("button", { type: "button", class: "example", id: "input-own", onclick: () => openRun(app, app.source.record.run) }, "Back to the text of this file"));
      replace(examples.lastChild, own, found.map(row));
      examples.hidden = !found.length;
    }

    async function take(one) {
      if (!app.source.live) return openRun(app, one.run);
      text.value = one.text || (one.ids || []).join(" ");
      [target.value, pair.value] = ["", one.pair || ""];
      if (one.pair) boxes.pair.open = true;
      if (one.image) {
        picture = one.image;
        app.store.set("picture", picture);
        preview.src = `data:image/png;base64,${picture}`;
        preview.hidden = false;
      }
      return send();
    }

    /** The tokens of what is being typed: the model has not read them yet. */
    const askTyped = asks(about, () => [app.store.get("run"), text.value, pair.value], () => {}, false);
    const previewTokens = () => askTyped(async (wait) => {
      const model = app.store.get("model");
      const run = app.store.get("run");
      if (!run || !app.source.live || !model.tokenizer || !text.value || (model.image_token && text.value.includes(model.image_token))) return null;
      const found = await wait(app.source.post("tokens", { text: text.value, ...(pair.value && !boxes.pair.hidden ? { pair: pair.value } : {}) }));
      const read = run.source || run.tokens;
      const list = run.source ? source : tokens;
      if (found.tokens.ids.join() === read.ids.join()) return list.querySelector(".typed") ? (showTokens(run), tint()) : null;
      replace(list, found.tokens.labels.slice(0, INPUT_CHIPS).map((label, place) => el("li", {}, el("span", { class: `chip typed${found.tokens.special[place] ? " special" : ""}` }, tokenText(label)))));
      const count = found.tokens.labels.length;
      about.textContent = `${figure(count)} ${count === 1 ? "token" : "tokens"}, not read yet: press Run`;
      tinted.hidden = true;
      return null;
    });

    function insertMask() {
      const { mask: word } = app.store.get("model");
      text.setRangeText(word, text.selectionStart, text.selectionEnd, "end");
      text.focus();
      previewTokens();
    }

    /** The image as the model reads it, with its patches; a patch is chosen by pointing at it, or by its chip. */
    function showPicture(run) {
      seen.hidden = !run.picture && !run.sound;
      shownImage = null;
      if (run.sound) {
        const heard = soundImage(run.sound, run.source.labels.length, "The spectrogram of the sound: time goes right, pitch goes up");
        replace(seen, heard.canvas, el("figcaption", { class: "soft" }, `What the encoder reads: ${run.sound.shape.join(" bands × ")} frames, as ${run.source.labels.length} moments; silence at the end is not shown`));
      }
      if (!run.picture) return;
      shownImage = patchImage(run.picture, run.tokens.labels, "The image as the model reads it, cut into patches");
      shownImage.canvas.addEventListener("pointermove", (event) => { const place = shownImage.at(event); if (place >= 0) choose("tokens", place, true); });
      shownImage.canvas.addEventListener("click", (event) => { const place = shownImage.at(event); if (place >= 0) choose("tokens", place); });
      replace(seen, shownImage.canvas, el("figcaption", { class: "soft" }, `As the model reads it: ${run.picture.shape.slice(1).reverse().join(" × ")} pixels`));
    }

    /** How many tokens there are, and whether all of the text is in them. */
    function countWords(run) {
      const model = app.store.get("model");
      const read = run.source || run.tokens;
      const count = run.tokens.labels.length;
      if (model.input === "patches") {
        const marks = run.tokens.special.filter(Boolean).length;
        return `${figure(count - marks)} patches${marks ? `, and ${marks === 1 ? "a mark" : `${marks} marks`} before them` : ""}; each is read as one token`;
      }
      if (run.sound) return `${figure(count)} tokens written, of ${figure(read.labels.length)} moments heard`;
      const end = read.spans.reduce((last, span) => Math.max(last, span[1]), 0);
      const letters = Array.from(read.text.trimEnd()).length;
      const cut = end && read.labels.length >= model.max_length && end < letters ? ` The model reads at most ${model.max_length.toLocaleString("en")} tokens: what comes after character ${end.toLocaleString("en")} of ${letters.toLocaleString("en")} is left out.` : "";
      const unknown = model.unknown ? read.labels.filter((label, place) => label === model.unknown && !read.special[place]).length : 0;
      const strange = unknown ? ` ${unknown === 1 ? "One of them is" : `${unknown} of them are`} ${model.unknown}: the tokenizer does not know what stands there.` : "";
      const bare = model.tokenizer ? "" : " This model has no tokenizer: it reads token ids.";
      return `${figure(count)} ${count === 1 ? "token" : "tokens"}${cut || strange || bare ? `.${cut}${strange}${bare}` : ""}`;
    }

    async function pick(file) {
      if (!file) return;
      try {
        picture = await inputFile(file);
        app.store.set("picture", picture);
        preview.src = picture;
        preview.hidden = false;
        const { image_token: mark } = app.store.get("model");
        if (mark && !text.value.includes(mark)) text.value = `${mark}\n${text.value}`;
        await send();
      } catch (error) {
        problem.textContent = error.message;
      }
    }

    async function hear(file) {
      if (!file) return;
      try {
        recording = await inputFile(file);
        target.value = "";
        await send();
      } catch (error) {
        problem.textContent = error.message;
      }
    }

    function asked() {
      const model = app.store.get("model");
      if (model.input === "frames") return { sound: recording, ...(target.value ? { target: target.value } : {}) };
      if (model.input === "patches") return { image: picture };
      if (!model.tokenizer) {
        const ids = text.value.split(/[\s,]+/).filter(Boolean).map(Number);
        if (ids.some((id) => !Number.isInteger(id))) throw new Error("this model has no tokenizer: give token ids, whole numbers with spaces between them");
        return { ids, ...(target.value ? { target: target.value } : {}) };
      }
      const body = { text: text.value };
      if (picture && model.image_token && text.value.includes(model.image_token)) body.image = picture;
      if (!boxes.target.hidden && target.value) body.target = target.value;
      if (!boxes.pair.hidden && pair.value) body.pair = pair.value;
      return body;
    }

    function send() {
      problem.textContent = "";
      return app.read("The model reads…", async () => app.source.post("run", asked()), (run) => openRun(app, run), (error) => { problem.textContent = error.message; });
    }

    function choose(side, place, quietly) {
      const run = app.store.get("run");
      if (!run) return;
      const list = side === "source" ? run.source : run.tokens;
      const typed = side === "source" || !run.source ? stages && stages.text : stages && stages.target;
      replace(marked, inputMarked(list.text, list.spans[place]));
      replace(made, el("h3", {}, "How ", el("span", { class: "mono", dir: "auto" }, list.labels[place]), " was split from the text"), inputStages(typed, place) || el("p", { class: "soft" }, run.sound || list.ids.length ? `id ${list.ids[place]}` : list.special[place] ? "A mark that the model puts before the patches; what it gathers is what the classes are read from." : `The patch in row ${list.labels[place].split(",")[0]} and column ${list.labels[place].split(",")[1]}, both counted from 0.`));
      if (shownImage) shownImage.draw(null, place);
      if (quietly) return;
      for (const [list, own] of [[source, side === "source"], [tokens, side !== "source"]]) for (const chip of list.querySelectorAll(".chip")) press(chip, own && Number(chip.dataset.token) === place);
      if (side !== "source") app.store.set("position", place);
    }

    /** Tint the tokens by what they gave to the pinned answer, through heads: blue for it, red against it. */
    const askTint = asks(tinted, () => ["run", "position", "target", "foil"].map((key) => app.store.get(key)), () => showTint(null));
    const tint = () => askTint(async (wait) => {
      const run = app.store.get("run");
      tinted.hidden = true;
      if (!run || run.task === "embed") return;
      await wait(app.source.get(`run/${run.run}/next?position=${columnOf(run, app.store.get("position"))}`).catch(() => null)); // the answer comes first
      showTint(await wait(app.source.get(`run/${run.run}/paths?${askedOf(app, run)}`)));
    });

    function showTint(found) {
      const gave = [[tokens, found ? found.sources : []], [source, (found && found.memory) || []]];
      const most = Math.max(...gave.flatMap(([, values]) => values.map(Math.abs)), 1e-9);
      for (const [list, values] of gave) {
        for (const chip of list.querySelectorAll(".chip")) {
          const value = values[Number(chip.dataset.token)] ?? null;
          const colour = value === null ? null : signedColour((0.85 * value) / most);
          chip.style.background = colour ? css(colour) : "";
          chip.style.color = colour ? inkOn(colour) : "";
          if (value !== null) { chip.dataset.gave = String(value); chip.title = `contributed ${figure(value)} logits to ${found.choice}`; }
        }
      }
      tinted.hidden = !found;
      if (!found) return;
      const word = (text) => el("span", { class: "mono", dir: "auto" }, text);
      replace(tinted, "Tinted: what heads carried from each token to ", word(found.choice), found.against === null ? null : [" rather than ", word(found.against)], "; blue for it, red against it.");
    }

    function markChosen() {
      for (const chip of tokens.querySelectorAll(".chip")) press(chip, Number(chip.dataset.token) === app.store.get("position"));
    }

    function showTokens(run) {
      sourceBox.hidden = !run.source || Boolean(run.sound);
      tokensTitle.textContent = run.source ? "The decoder reads" : "Tokens";
      if (run.source && !run.sound) replace(source, inputChips(run.source, -1, (place, quietly) => choose("source", place, quietly), all.source, () => { all.source = true; showTokens(run); }));
      const chosen = app.store.get("position");
      replace(tokens, inputChips(run.tokens, chosen, (place, quietly) => choose("tokens", place, quietly), all.tokens, () => { all.tokens = true; showTokens(run); }));
      const count = run.tokens.labels.length;
      about.textContent = countWords(run);
      about.dataset.value = String(count);
    }

    app.store.on("model", (model) => {
      const both = model.family === "encoder-decoder";
      boxes.text.hidden = ["patches", "frames"].includes(model.input);
      boxes.sound.hidden = model.input !== "frames" || !app.source.live;
      boxes.image.hidden = model.input !== "patches" && !model.image_token;
      boxes.target.hidden = !both;
      boxes.pair.hidden = model.family !== "encoder" || model.input === "patches";
      boxes.text.firstChild.textContent = model.tokenizer ? (both ? "What the encoder reads" : "Text") : "Token ids";
      const fills = model.task === "fill" && Boolean(model.mask);
      mask.hidden = maskWords.hidden = !fills || !app.source.live;
      mask.disabled = !app.source.live;
      mask.textContent = `Insert ${model.mask}`;
      maskWords.textContent = `where the model is to fill something in`;
      keys.hidden = ["patches", "frames"].includes(model.input);
      go.textContent = { patches: "Look", frames: "Listen" }[model.input] || "Run";
      root.parentElement.querySelector(".hint").replaceChildren(...glossed({ patches: "Choose an image. The model reads it in patches, row by row.", frames: "Choose a sound. The encoder reads its spectrogram, moment by moment; the decoder writes what is said, token by token." }[model.input] || "Type something. The model reads tokens, each a number."));
      go.disabled = !app.source.live;
      for (const box of [text, target, pair, image, sound]) box.disabled = !app.source.live;
      go.hidden = !app.source.live;
      keys.hidden = keys.hidden || !app.source.live;
      boxes.image.hidden = boxes.image.hidden || !app.source.live;
      pad.hidden = model.input !== "patches" || Math.max(...(model.image_size || [0])) > 64;
      if (model.task === "embed" && app.source.live) boxes.pair.open = true;
      examples.hidden = true;
      if (!app.store.get("example")) followExamples();
      const begin = model.example || {};
      target.value = begin.target || "";
      pair.value = begin.pair || "";
      picture = begin.image || null;
      recording = begin.sound || null;
      app.store.set("picture", picture);
      preview.hidden = !picture;
      if (picture) preview.src = `data:image/png;base64,${picture}`;
    });
    const askStages = asks(made, () => [app.store.get("run")], () => {}, false);
    app.store.on("run", (run) => {
      if (!run) return;
      all.tokens = all.source = false;
      problem.textContent = "";
      const first = run.source || run.tokens;
      if (document.activeElement !== text) text.value = first.text || first.ids.join(" ");
      if (document.activeElement !== pair) pair.value = run.pair || "";
      if (run.source && !app.source.live) target.value = run.tokens.text || "";
      showTokens(run);
      showPicture(run);
      replace(marked);
      replace(made, el("p", { class: "soft" }, run.picture ? "Choose a patch to see where it is." : "Choose a token to see how the text was split."));
      stages = null;
      if (text.value !== (first.text || first.ids.join(" "))) previewTokens(); // somebody has typed on meanwhile
      askStages(async (wait) => { stages = await wait(app.source.get(`run/${run.run}/stages`)); });
    });
  },
};
