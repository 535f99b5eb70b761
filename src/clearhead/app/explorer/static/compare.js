// Two heads side by side, and where they differ: three maps of the same tokens, one cell chosen in all of them.

import { el, figure, replace } from "./dom.js";
import { heatmap, scaleBar } from "./heatmap.js";

/** Put two matrices of one shape into a node, and the first less the second. `one` and `two` are {name, title, matrix}. */
export function besidePanel(node, one, two, { rows, columns, scale }, onPin) {
  const less = one.matrix.map((weight, place) => weight - two.matrix[place]);
  const most = less.reduce((best, value) => Math.max(best, Math.abs(value)), 1e-9);
  const at = less.reduce((best, value, place) => (Math.abs(value) > Math.abs(less[best]) ? place : best), 0);
  const [row, column] = [Math.floor(at / columns.length), at % columns.length];
  const third = node.clientWidth > 700 ? 3 : 1;
  const room = Math.max(150, Math.min(420, node.clientWidth / third - 150));
  const maps = [];
  let chosen = "";
  const follow = (at, other) => {
    if (at < 0 || chosen === `${at} ${other}`) return;
    chosen = `${at} ${other}`;
    for (const map of maps) map.choose(at, other);
  };
  const draw = (title, matrix, signed, describe) => {
    const map = heatmap({ values: matrix, rows, columns, room, low: signed ? -most : 0, high: signed ? most : 1, signed, name: `${title}: rows look at columns. Arrow keys move from cell to cell.`, onCell: follow, onPin, describe });
    maps.push(map);
    return el("figure", { class: "beside" }, el("figcaption", { class: "mono" }, title), map.root, signed ? scaleBar("difference", Number((-most).toPrecision(2)), Number(most.toPrecision(2)), true) : scaleBar(scale, 0, 1));
  };
  const said = (name) => (from, to, weight) => `${name}: ${rows[from]} looks at ${columns[to]}: ${weight.toFixed(3)}`;
  replace(
    node,
    el("h3", { id: "attention-head", "data-head": one.name, "data-beside": two.name }, `Head ${one.name} versus head ${two.name}`),
    el("p", { id: "beside-most", "data-value": less[at] }, "They differ most where ", el("span", { class: "mono", dir: "auto" }, rows[row]), " looks at ", el("span", { class: "mono", dir: "auto" }, columns[column]), `: ${figure(one.matrix[at])} versus ${figure(two.matrix[at])}.`),
    el("div", { class: "row besides" }, draw(one.title, one.matrix, false, said(one.name)), draw(two.title, two.matrix, false, said(two.name)), draw(`${one.name} − ${two.name}`, less, true, (from, to, value) => `${rows[from]} → ${columns[to]}: ${value < 0 ? "" : "+"}${value.toFixed(3)}`)),
  );
}
