// Compare: two inputs, or two models, side by side.

import { el, figure, percent, replace } from "./dom.js";
import { paint } from "./heatmap.js";
import { inputFile } from "./input.js";
import { distributionOf } from "./sampling.js";
import { columnOf } from "./selection.js";
import { unpack } from "./source.js";

export const compareSection = {
  id: "compare",
  title: "Compare",
  hint: "A second input, or a second model (clearhead explore DIR --compare OTHER), beside the first.",
  applies: (model, live) => live,

  mount(root, app) {
    const text = el("textarea", { id: "compare-text", rows: 1, spellcheck: "false" });
    const image = el("input", { type: "file", id: "compare-image", accept: "image/*" });
    const which = el("select", { id: "compare-model" });
    const go = el("button", { type: "button", id: "compare-run", class: "primary", onclick: () => send() }, "Compare");
    const head = el("input", { type: "text", id: "compare-head", value: "0.0", onchange: () => show() });
    const problem = el("p", { role: "alert", class: "problem" });
    const shown = el("div", { id: "compare-shown" });
    const whichBox = el("div", {}, el("label", { for: "compare-model" }, "Model"), which);
    const textBox = el("div", { class: "grow" }, el("label", { for: "compare-text" }, "Second text; empty: the same"), text);
    const imageBox = el("div", { class: "grow" }, el("label", { for: "compare-image" }, "Second image; none: the same"), image);
    const controls = el("div", { class: "row toolbar" }, textBox, imageBox, whichBox, el("div", {}, el("label", { for: "compare-head" }, "Head"), head), go);
    replace(root, controls, problem, shown);
    let other = null; // the second run

    async function send() {
      problem.textContent = "";
      const run = app.store.get("run");
      const model = app.store.get("model");
      if (!run) return;
      const body = { model: Number(which.value) || 0 };
      const first = run.source || run.tokens;
      if (model.input === "patches") body.image = image.files[0] ? await inputFile(image.files[0]) : app.store.get("picture") || null;
      else if (text.value.trim()) body[model.tokenizer ? "text" : "ids"] = model.tokenizer ? text.value : text.value.split(/[\s,]+/).filter(Boolean).map(Number);
      else if (first.text) body.text = first.text;
      else body.ids = first.ids;
      try {
        other = await app.source.post("run", body);
        app.store.set("second", body.text || null);
        await show();
      } catch (error) {
        problem.textContent = error.message;
      }
    }

    /** Where each side is read: the first at the selected token, the second where it is asked by itself, or there too where it is as long. */
    const placeOf = (run) => columnOf(run, run === other && run.tokens.labels.length !== app.store.get("run").tokens.labels.length ? run.position : app.store.get("position"));

    async function nextOf(run) {
      if (run.task === "embed") return null;
      const body = await app.source.get(`run/${run.run}/next?position=${placeOf(run)}`);
      const { probabilities, order } = distributionOf(unpack(body.logits).values, {});
      const names = new Map(body.top.map((id, place) => [id, body.labels[place]]));
      return { probabilities, order, names, label: body.label };
    }

    async function picture(run) {
      const found = head.value.trim().match(/^(?:(self|encoder|cross)\.)?(\d+)\.(\d+)$/);
      if (!found) throw new Error("a head is called layer.head, such as 0.1, encoder.0.1 or cross.0.1");
      const body = await app.source.get(`run/${run.run}/attention/${found[1] || "self"}/${found[2]}`);
      const { shape, values } = unpack(body.pattern);
      const number = Number(found[3]);
      if (number >= shape[0]) throw new Error(`layer ${found[2]} has ${shape[0]} heads`);
      const canvas = el("canvas", { class: "pair-map", role: "img", "aria-label": `Head ${head.value} of ${shape[1]} by ${shape[2]} tokens` });
      paint(canvas, values.subarray(number * shape[1] * shape[2], (number + 1) * shape[1] * shape[2]), shape[1], shape[2]);
      return canvas;
    }

    function side(title, run, canvas) {
      const chips = run.tokens.labels.slice(0, 200).map((label) => el("li", { class: "chip" }, el("span", { dir: "auto" }, label)));
      return el("div", { class: "grow side" }, el("h3", {}, title), el("p", { class: "soft" }, `${run.tokens.labels.length} tokens${run.columns.length ? `, read at “${run.columns[placeOf(run)]}”` : ""}`), el("ul", { class: "chips" }, chips), canvas);
    }

    async function show() {
      const pair = [app.store.get("run"), other];
      if (!pair[0] || !pair[1]) return;
      problem.textContent = "";
      try {
        const [one, other] = await Promise.all(pair.map(nextOf));
        const maps = await Promise.all(pair.map((run) => picture(run).catch((error) => el("p", { class: "soft" }, error.message))));
        const names = [app.store.get("model").name, pair[1].model ? app.store.get("model").other.name : app.store.get("model").name];
        const sides = el("div", { class: "row" }, pair.map((run, place) => side(`${"AB"[place]}: ${names[place]}`, run, maps[place])));
        let table = el("p", { class: "soft" }, "Vectors have no distribution to compare.");
        if (one && other && one.probabilities.length === other.probabilities.length) {
          const ids = [...new Set([...one.order.slice(0, 8), ...other.order.slice(0, 8)])];
          const divergence = one.probabilities.reduce((sum, p, i) => (p > 0 ? sum + p * Math.log2(p / Math.max(other.probabilities[i], 1e-300)) : sum), 0);
          table = el(
            "div",
            { class: "wide", tabindex: "0", role: "group", "aria-label": "A beside B" },
            el("p", {}, "KL divergence of B from A: ", el("strong", { id: "compare-kl", "data-value": divergence }, `${figure(divergence)} bits`)),
            el("table", { id: "compare-table" }, el("thead", {}, el("tr", {}, ["choice", "A", "B", "difference"].map((name, place) => el("th", { class: place ? "number" : null }, name)))), el("tbody", {}, ids.map((id) => el("tr", { "data-id": id }, el("th", { scope: "row", class: "mono token", dir: "auto" }, one.names.get(id) || other.names.get(id) || `id ${id}`), el("td", { class: "number", "data-value": one.probabilities[id] }, percent(one.probabilities[id])), el("td", { class: "number", "data-value": other.probabilities[id] }, percent(other.probabilities[id])), el("td", { class: "number" }, `${other.probabilities[id] < one.probabilities[id] ? "−" : "+"}${percent(Math.abs(other.probabilities[id] - one.probabilities[id]))}`))))),
          );
        } else if (one && other) table = el("p", { class: "soft" }, "The two models choose among different things: their distributions cannot be laid side by side.");
        replace(shown, sides, table);
      } catch (error) {
        problem.textContent = error.message;
      }
    }

    app.store.on("model", (model) => {
      replace(which, [model, model.other].filter(Boolean).map((one, place) => el("option", { value: place, selected: place === (model.other ? 1 : 0) }, one.name)));
      whichBox.hidden = !model.other;
      textBox.hidden = model.input === "patches";
      imageBox.hidden = model.input !== "patches";
      other = null;
      controls.hidden = !app.source.live;
      head.value = model.attentions && model.attentions[0].kind === "encoder" ? "encoder.0.0" : "0.0";
      replace(shown);
    });
    for (const key of ["run", "position"]) app.store.listen(key, () => show());
    app.store.on("theme", () => show());
  },
};
