// The words of the page, each with one line that says what it means; shown where the word is pointed at, focused or touched.

import { el, replace } from "./dom.js";

/** By word, as it stands in a sentence: its definition. */
const GLOSSARY = {
  "activation patching": "Putting an activation of one text in the place of the same activation of another, to see what it carries.",
  attention: "What moves information between tokens: each token takes a weighted sum of what other tokens offer.",
  "attention mask": "Which tokens a token may look at; a decoder hides those that come later.",
  cosine: "How alike two vectors point: 1 the same way, 0 unrelated, −1 opposite.",
  "cross-attention": "Attention from what the decoder writes to what the encoder has read.",
  embedding: "The vector that a token begins with, from a table learned in training.",
  entropy: "How spread out shares are, in bits: 0 is all on one, 3 is like 8 equal ones.",
  "feed-forward": "The part of a layer that works on each token by itself: wide, then narrow again.",
  FLOPs: "Additions and multiplications of numbers that a pass takes.",
  gradient: "How much the answer would change if a number changed a little.",
  head: "One of several attentions of a layer, with its own queries, keys and values; 4.2 is head 2 of layer 4.",
  heads: "Several attentions of a layer, each with its own queries, keys and values; 4.2 is head 2 of layer 4.",
  key: "The vector with which a token says what it has to offer.",
  keys: "The vectors with which tokens say what they have to offer.",
  "KL divergence": "How far one distribution is from another, in bits; 0 is the same.",
  "KV cache": "Keys and values of tokens already read, kept so that they are not computed again.",
  layer: "One attention and one feed-forward; layers are stacked, the first at the bottom.",
  layers: "Each is one attention and one feed-forward; they are stacked, the first at the bottom.",
  lens: "Reading a layer in the middle as if it were the last: what would the model say now?",
  logit: "The score of a choice before softmax; one logit more makes it 2.7 times as likely against the others.",
  logits: "Scores of choices before softmax; one logit more makes a choice 2.7 times as likely against the others.",
  "log-odds": "The logarithm of how many times likelier one is than all others.",
  neuron: "One number of the wide part of a feed-forward; it fires on some inputs and not on others.",
  neurons: "Numbers of the wide part of a feed-forward; each fires on some inputs and not on others.",
  norm: "Brings a vector to a standard size before a part reads it.",
  "output layer": "Compares the last vector with every choice and gives each a logit.",
  parameters: "The numbers that training has learned.",
  patch: "A small square of an image; to the model what a token is to a model of text.",
  patches: "Small squares of an image; to the model what tokens are to a model of text.",
  probability: "A share of 1 for each choice: softmax of the logits.",
  query: "The vector with which a token asks what it is looking for.",
  queries: "The vectors with which tokens ask what they are looking for.",
  "residual stream": "The vector of a token on its way through the layers; every part reads it and adds to it.",
  softmax: "Turns scores into shares that are above 0 and sum to 1; larger scores get larger shares.",
  steering: "Adding a direction to the stream while the model runs, to push what it says.",
  temperature: "Below 1 the likeliest choice gains, above 1 all become alike.",
  token: "A piece of text, often part of a word, that the model reads as one number; · stands for a space.",
  tokens: "Pieces of text, often parts of words, that the model reads as numbers; · stands for a space.",
  "top-k": "Only the k likeliest choices stay.",
  "top-p": "Only the likeliest choices that together reach this probability stay.",
  value: "The vector that a token passes on to those that look at it.",
  values: "The vectors that tokens pass on to those that look at them.",
  vocabulary: "All tokens that the model knows.",
};

const GLOSSARY_WORDS = new RegExp(`(?<![\\p{L}·-]|arrow |shift )(${Object.keys(GLOSSARY).sort((a, b) => b.length - a.length).join("|")})(?![\\p{L}-])`, "giu");
const GLOSSARY_OF = new Map(Object.keys(GLOSSARY).map((word) => [word.toLowerCase(), word]));

const idOf = (word) => `word-${word.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;

/** A word with its definition: it can be focused, and is described by its entry in the list of words. */
export function term(word, text = word) {
  return el("button", { type: "button", class: "term", "aria-describedby": idOf(word), "data-word": word }, text);
}

/** A text with the first of each word that the list has made a term. */
export function glossed(text) {
  const known = new Set();
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(GLOSSARY_WORDS)) {
    const word = GLOSSARY_OF.get(match[0].toLowerCase());
    if (known.has(word)) continue;
    known.add(word);
    parts.push(text.slice(at, match.index), term(word, match[0]));
    at = match.index + match[0].length;
  }
  return [...parts, text.slice(at)].filter((part) => part !== "");
}

/** The list of words at the foot of the page, and the tip that shows an entry at its word. */
export function mountGlossary(foot) {
  const tip = el("div", { class: "tip", role: "tooltip", hidden: true });
  const entries = Object.entries(GLOSSARY).map(([word, meaning]) => [el("dt", {}, word), el("dd", { id: idOf(word) }, meaning)]);
  replace(foot, el("details", { id: "glossary" }, el("summary", {}, "Words on this page"), el("dl", {}, entries)), tip);
  const show = (node) => {
    replace(tip, GLOSSARY[node.dataset.word]);
    tip.hidden = false;
    const [word, own] = [node.getBoundingClientRect(), tip.getBoundingClientRect()];
    tip.style.left = `${Math.max(8, Math.min(word.left, window.innerWidth - own.width - 8))}px`;
    tip.style.top = `${word.bottom + own.height + 12 > window.innerHeight ? word.top - own.height - 6 : word.bottom + 6}px`;
  };
  const hide = () => { tip.hidden = true; };
  for (const begin of ["pointerover", "focusin", "click"]) document.addEventListener(begin, (event) => { const node = event.target.closest?.(".term"); if (node) show(node); else if (begin !== "focusin") hide(); });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, { passive: true, capture: true });
}
