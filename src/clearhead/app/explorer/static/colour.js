// Colours of amounts: one scale that begins with the page's own background, so that nothing looks like nothing, in light and in dark.
// The palette itself is in style.css.

const PREFERS_DARK = matchMedia("(prefers-color-scheme: dark)");

/** "light" or "dark", as the page is shown now. */
export function theme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen;
  return PREFERS_DARK.matches ? "dark" : "light";
}

/** A colour of the palette by its name, "--ink", as the page is shown now. */
export function paletteColour(name) {
  const stated = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const [, light, dark] = stated.match(/^light-dark\((.+),\s*(.+)\)$/) || [];
  return light === undefined ? stated : theme() === "dark" ? dark : light;
}

const RAMPS = {};

/** The stops of a ramp of the palette, each [r, g, b]; read once for each theme. */
function rampOf(name) {
  const key = `--${name}-${theme()}`;
  RAMPS[key] ||= paletteColour(key).split(" ").map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return RAMPS[key];
}

function between(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((value, channel) => Math.round(value + (stops[low + 1][channel] - value) * (place - low)));
}

/** [r, g, b] of an amount between 0 and 1. */
export function amountColour(share) {
  return between(rampOf("amount"), share);
}

/** [r, g, b] of a number between -1 and 1. */
export function signedColour(share) {
  return between(rampOf("signed"), (share + 1) / 2);
}

const TABLES = {};

function colourTable(name, colour) {
  const key = `${name} ${theme()}`;
  if (!TABLES[key]) {
    TABLES[key] = new Uint8Array(768);
    for (let i = 0; i < 256; i++) TABLES[key].set(colour(i / 255), 3 * i);
  }
  return TABLES[key];
}

/** 256 colours of amounts, for pixels: a flat Uint8Array of r, g, b; made once for each theme. */
export function amountTable() {
  return colourTable("amount", amountColour);
}

/** The same of numbers of both signs: nothing in the middle. */
export function signedTable() {
  return colourTable("signed", (share) => signedColour(2 * share - 1));
}

/** Black or white, whichever reads better on a colour: at this luminance both have a contrast of 4.58, elsewhere the better has more. */
export function inkOn(colour) {
  const [red, green, blue] = colour.map((value) => (value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.1791 ? "#000" : "#fff";
}

/** As CSS writes it. */
export function css([red, green, blue]) {
  return `rgb(${red},${green},${blue})`;
}
