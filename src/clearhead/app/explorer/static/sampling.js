// From logits to probabilities, in float64 and in the same fixed order as `clearhead.run.generate.sequence`:
// temperature, then top-k, top-p and min-p, each on what the one before has left.

import { unpack } from "./source.js";

const GREEDY_BELOW = 1e-6;

/** The whole numbers below `count`, by falling score; equal scores in the order of their numbers. */
export function byScore(scores) {
  const order = Array.from(scores.keys());
  return order.sort((a, b) => scores[b] - scores[a] || a - b);
}

function softmaxOf(scores) {
  let highest = -Infinity;
  for (const score of scores) if (score > highest) highest = score;
  const made = new Float64Array(scores.length);
  let total = 0;
  for (let i = 0; i < scores.length; i++) total += made[i] = Math.exp(scores[i] - highest);
  for (let i = 0; i < made.length; i++) made[i] /= total;
  return made;
}

/**
 * Probabilities of all choices from their logits, and why each removed one is gone:
 * {probabilities: Float64Array, gone: ("" | "top-k" | "top-p" | "min-p" | "greedy")[], kept: how many are left}.
 */
export function distributionOf(logits, { temperature = 1, topK = 0, topP = 1, minP = 0 } = {}) {
  const size = logits.length;
  const gone = new Array(size).fill("");
  const order = byScore(logits);
  if (temperature < GREEDY_BELOW) {
    gone.fill("greedy");
    gone[order[0]] = "";
    const only = new Float64Array(size);
    only[order[0]] = 1;
    return { probabilities: only, gone, kept: 1, order };
  }
  const scores = Float64Array.from(logits, (logit) => logit / temperature);
  const remove = (choice, reason) => {
    scores[choice] = -Infinity;
    gone[choice] = reason;
  };
  if (topK >= 1 && topK < size) {
    const least = scores[order[topK - 1]];
    for (let i = 0; i < size; i++) if (scores[i] < least) remove(i, "top-k");
  }
  if (topP < 1) {
    const shares = softmaxOf(scores);
    let running = 0;
    order.forEach((choice, place) => {
      running += shares[choice];
      if (place > 0 && !(running - shares[choice] < topP) && !gone[choice]) remove(choice, "top-p");
    });
  }
  if (minP > 0) {
    const least = scores[order[0]] + Math.log(minP);
    for (let i = 0; i < size; i++) if (!gone[i] && scores[i] < least) remove(i, "min-p");
  }
  const kept = gone.reduce((count, reason) => count + (reason ? 0 : 1), 0);
  return { probabilities: softmaxOf(scores), gone, kept, order };
}

const PLAIN = new WeakMap(); // by answer of the model: several views read the same one

/** The model's own distribution from a view `next`: {logits, probabilities, order, ...}; made once for each answer. */
export function plainOf(body) {
  if (!PLAIN.has(body)) {
    const logits = unpack(body.logits).values;
    PLAIN.set(body, { logits, ...distributionOf(logits, {}) });
  }
  return PLAIN.get(body);
}

/** The choice at which the running sum of probabilities passes a number between 0 and 1. */
export function drawFrom(probabilities, uniform) {
  let total = 0;
  let last = 0;
  for (let i = 0; i < probabilities.length; i++) {
    total += probabilities[i];
    if (probabilities[i] > 0) last = i;
  }
  let running = 0;
  for (let i = 0; i < probabilities.length; i++) {
    running += probabilities[i];
    if (running > uniform * total) return i;
  }
  return last;
}

/** A stream of numbers between 0 and 1 from a seed (mulberry32): the same seed, the same draws on this page. */
export function diceFrom(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}
