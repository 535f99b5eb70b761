// Elements, made one way: text is always text. Nothing here, or anywhere on the page, reads a string as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) node.style.setProperty(key, entry);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** An HTML element: el("p", {class: "hint"}, "text", otherElement). Listeners are given as onclick, oninput, ... */
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** How to find an element again after its part of the page is drawn anew: its name there, and the how manieth of that name it is. */
function standIn(node, here) {
  const name = (one) => one.id || `${one.tagName} ${one.getAttribute("aria-label") || ""} ${Object.entries(one.dataset).filter(([key]) => key !== "value")}`;
  const named = () => [...node.querySelectorAll(here.tagName)].filter((one) => name(one) === name(here));
  const place = named().indexOf(here);
  return () => named()[place];
}

/** Put children in the place of all that a node holds. Who is in it with the keyboard stays on what has taken that element's place. */
export function replace(node, ...children) {
  const here = document.activeElement;
  const again = here && here !== node && node.contains(here) ? standIn(node, here) : null;
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  again?.()?.focus({ preventScroll: true });
  return node;
}

/**
 * Make many controls one stop of the tab key: arrow keys, Home and End move among what `selector` finds in a node, and the tab key reaches
 * the one that is chosen, else the first.
 */
export function roving(node, selector) {
  const all = () => [...node.querySelectorAll(selector)].filter((one) => !one.disabled && !(one.closest("[hidden]") && node.contains(one.closest("[hidden]")))); // all of it may be hidden for now
  const settle = (here) => { for (const one of node.querySelectorAll(selector)) one.tabIndex = one === here ? 0 : -1; };
  const start = () => { const there = all(); settle(there.find((one) => one === document.activeElement) || there.find((one) => one.matches('[aria-current], [aria-pressed="true"]')) || there[0]); };
  node.addEventListener("focusin", (event) => { if (event.target.matches(selector)) settle(event.target); });
  node.addEventListener("keydown", (event) => {
    const there = all();
    const at = there.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: there.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    there[Math.min(Math.max(to, 0), there.length - 1)].focus();
  });
  new MutationObserver(start).observe(node, { childList: true, subtree: true, attributeFilter: ["aria-current", "aria-pressed", "hidden"] });
  start();
}

/** Show whether a button is pressed; of hundreds, those that change are touched. */
export function press(button, pressed) {
  if (button.getAttribute("aria-pressed") !== String(pressed)) button.setAttribute("aria-pressed", String(pressed));
}

/** A number as people read it: 124.4M, 0.0312, 3. */
export function figure(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0) return `−${figure(-value, digits)}`;
  const size = value;
  for (const [limit, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]]) {
    const scale = unit === "K" ? 1e3 : limit;
    if (size >= limit) return `${rounded(value / scale, digits)}${unit}`;
  }
  if (Number.isInteger(value)) return String(value);
  return size >= 0.001 ? rounded(value, digits) : value.toExponential(digits - 1);
}

/** The same with its sign: +2.48, −0.3. */
export function signed(value, digits = 3) {
  return `${value < 0 ? "" : "+"}${figure(value, digits)}`;
}

/** So many digits, and never an exponent. */
function rounded(value, digits) {
  const before = Math.max(Math.floor(Math.log10(Math.abs(value))) + 1, 1 - 3);
  return value.toFixed(Math.max(digits - before, 0));
}

/** Bytes as people read them. */
export function bytes(value) {
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= limit) return `${(value / limit).toFixed(1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

/** A time as people read it: 1.77 s, 49.7 ms. */
export function seconds(value) {
  return value >= 1 ? `${rounded(value, 3)} s` : `${value >= 1e-6 ? rounded(1000 * value, 3) : 0} ms`;
}

/** A percentage. */
export function percent(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 0.00995) return `${(100 * value).toFixed(1)} %`;
  return value >= 1e-6 || value === 0 ? `${Number((100 * value).toPrecision(2))} %` : "< 0.0001 %";
}

/** A change of a probability, in percentage points. */
export function points(change) {
  return `${change < 0 ? "−" : "+"}${(100 * Math.abs(change)).toFixed(1)} points`;
}

/** A token as text. Only a long one is cut by the style sheet: a thousand clipped boxes would make every frame slow. */
export function tokenText(label, more = "", most = 12) {
  return el("span", { dir: "auto", class: `${more}${label.length > most ? " long" : ""}`.trim() || null }, label);
}

const LETTERS = new WeakMap(); // of a text, by the tokens that were made of it

/** The whole word that a token is a piece of, as it stands in the text; null where the token is a word, a mark or no text. */
export function wholeWord(tokens, place) {
  const span = tokens.spans?.[place];
  if (!span || span[1] <= span[0] || !tokens.text) return null;
  if (!LETTERS.has(tokens)) LETTERS.set(tokens, Array.from(tokens.text));
  const letters = LETTERS.get(tokens);
  const inside = (at) => at >= 0 && at < letters.length && /[\p{L}\p{N}'’]/u.test(letters[at]);
  let [first, last] = span;
  while (first < last && !inside(first)) first++;
  if (first === last) return null;
  while (inside(first - 1)) first--;
  while (inside(last)) last++;
  const word = letters.slice(first, last).join("");
  return word === letters.slice(...span).join("").trim() || word.length > 24 ? null : word;
}
