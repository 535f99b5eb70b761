// The story in words, and as a card to share: a picture with the sentence, the tokens and the arcs; and the address.

import { el, svg } from "./dom.js";
import { copyOf, pngOfDrawing } from "./picture.js";

const CARD_WIDTH = 1200;
const CARD_MARGIN = 48;
const CARD_LETTERS = 54; // of a line of the sentence

/** The sentence with its tokens and parts set apart. */
export function storyWords(story) {
  const parts = story.sentence.split(/(“[^”]*”|(?:[Hh]ead|[Ff]eed-forward) (?:[a-z]+\.)?[\d.]*\d|(?:under )?[\d.]+ % → (?:under )?[\d.]+ %)/);
  const said = (text, place) => (place % 2 === 0 ? text : text.startsWith("“") ? el("span", { class: "mono token", dir: "auto" }, text.slice(1, -1)) : el("strong", {}, text));
  return el("p", { class: "path-said", id: "story", "data-part": story.effects[0].name, "data-head": story.head?.name, "data-before": story.before, "data-after": story.effects[0].after }, parts.map(said));
}

/** The strongest feature of the feed-forward that the story names, by what fires it. */
export function featureWords(feature) {
  const places = feature.fired.flatMap(({ before, token, after }, place) => [place ? ", " : null, el("span", { class: "mono", dir: "auto" }, before.slice(-16), el("mark", {}, token), after.slice(0, 10))]);
  return el("p", { class: "soft", id: "story-feature", "data-feature": feature.name }, "Its strongest feature here, ", el("strong", {}, feature.name), places.length ? ", fires at " : null, places, feature.promotes.length ? [" and promotes ", el("span", { class: "mono", dir: "auto" }, feature.promotes.slice(0, 3).join("  "))] : null, ".");
}

/** Lines of words, each of so many letters at most. */
function linesOf(text, most) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && `${lines.at(-1)} ${word}`.length > most) lines.push(word);
    else lines[lines.length - 1] = `${lines.at(-1)} ${word}`.trim();
  }
  return lines;
}

/** The card as text of an SVG, with its width and height. */
function cardOf({ sentence, tokens, drawing }, model, address) {
  const looks = getComputedStyle(document.documentElement);
  const [ink, soft, paper] = ["--ink", "--soft", "--card"].map((name) => looks.getPropertyValue(name).trim());
  const lines = linesOf(sentence, CARD_LETTERS);
  const read = linesOf(tokens.map((label) => label.replace(/[·▁Ġ]/g, " ").trim()).join(" "), 110).slice(0, 2);
  const text = (y, size, fill, words, weight = 400) => svg("text", { x: CARD_MARGIN, y, fill, "font-size": size, "font-family": "system-ui, sans-serif", "font-weight": weight }, words);
  const top = 72 + 46 * lines.length + 34 * read.length;
  const box = drawing.getBoundingClientRect();
  const wide = CARD_WIDTH - 2 * CARD_MARGIN;
  const high = Math.min(560, (wide * box.height) / box.width);
  const arcs = copyOf(drawing);
  for (const [name, value] of Object.entries({ x: CARD_MARGIN, y: top, width: wide, height: high })) arcs.setAttribute(name, value);
  const height = top + high + 64;
  const card = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${CARD_WIDTH} ${height}`, width: CARD_WIDTH, height }, svg("rect", { width: CARD_WIDTH, height, fill: paper }), lines.map((line, place) => text(64 + 46 * place, 36, ink, line, 600)), read.map((line, place) => text(64 + 46 * lines.length + 30 * place, 22, soft, line)), text(height - 24, 20, soft, [model, "clearhead", address].filter(Boolean).join(" · ").slice(0, 110)));
  card.append(arcs);
  return [new XMLSerializer().serializeToString(card), CARD_WIDTH, Math.round(height)];
}

/** A button that saves the card and copies the address; `getStory()` gives {sentence, tokens, drawing}. */
export function shareButton(app, getStory) {
  const said = el("span", { class: "soft", role: "status" });
  const share = async () => {
    pngOfDrawing(...cardOf(getStory(), app.store.get("model").name, ""), "story.png");
    const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
    said.textContent = copied ? " The card is saved and the link copied." : " The card is saved; the address of this page is the link.";
  };
  return [el("button", { type: "button", id: "share", onclick: share }, "Share"), said];
}
