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

/** Show whether a button is pressed; of hundreds, those that change are touched. */
export function press(button, pressed) {
  if (button.getAttribute("aria-pressed") !== String(pressed)) button.setAttribute("aria-pressed", String(pressed));
}

/** A number as people read it: 124.4M, 0.0312, 3. */
export function figure(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]]) {
    const scale = unit === "K" ? 1e3 : limit;
    if (size >= limit) return `${rounded(value / scale, digits)}${unit}`;
  }
  if (Number.isInteger(value)) return String(value);
  return size >= 0.001 ? rounded(value, digits) : value.toExponential(digits - 1);
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

/** A percentage. */
export function percent(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 0.0995) return `${(100 * value).toFixed(1)} %`;
  return value >= 1e-6 || value === 0 ? `${Number((100 * value).toPrecision(2))} %` : "< 0.0001 %";
}

/** A token as text. Only a long one is cut by the style sheet: a thousand clipped boxes would make every frame slow. */
export function tokenText(label, more = "", most = 12) {
  return el("span", { dir: "auto", class: `${more}${label.length > most ? " long" : ""}`.trim() || null }, label);
}
