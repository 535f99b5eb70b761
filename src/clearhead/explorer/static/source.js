// Where the page's data comes from: a live model behind /inside/, or a record inside an exported file. Both answer the same paths.

/** Arrays travel packed: {shape, type, low, high, data}. Gives {shape, values} with values as a typed array of numbers. */
export function unpack(packed) {
  const text = atob(packed.data);
  const raw = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
  if (packed.type === "f32") return { shape: packed.shape, values: new Float32Array(raw.buffer) };
  if (packed.type === "i32") return { shape: packed.shape, values: new Int32Array(raw.buffer) };
  const values = new Float32Array(raw.length);
  const step = (packed.high - packed.low) / 255;
  for (let i = 0; i < raw.length; i++) values[i] = packed.low + raw[i] * step;
  return { shape: packed.shape, values };
}

/** The lens as tables: `top(layer, column)` lists the best choices as {id, label, p}; `entropy` and `final` have a row for each layer. */
export function unpackLens(body) {
  const [ids, p, entropy, final] = [body.ids, body.p, body.entropy, body.final].map(unpack);
  const [, columns, count] = ids.shape;
  const rows = (table) => body.layers.map((_, layer) => table.values.subarray(layer * columns, (layer + 1) * columns));
  const top = (layer, column) =>
    Array.from({ length: count }, (_, place) => {
      const at = (layer * columns + column) * count + place;
      return { id: ids.values[at], label: body.names[ids.values[at]], p: p.values[at] };
    });
  const mostEntropy = entropy.values.reduce((most, bits) => Math.max(most, bits), 1e-9);
  return { layers: body.layers, columns: body.columns, chosen: body.chosen, top, entropy: rows(entropy), final: rows(final), mostEntropy };
}

/** A model that runs: every answer is kept, so that going back costs nothing. */
export class LiveSource {
  constructor() {
    this.live = true;
    this.kept = new Map();
  }

  async get(path) {
    if (!this.kept.has(path)) {
      const answer = this.ask(path);
      this.kept.set(path, answer);
      answer.catch(() => this.kept.delete(path));
      if (this.kept.size > 400) this.kept.delete(this.kept.keys().next().value);
    }
    return this.kept.get(path);
  }

  /** Whether a path can be answered: live, every path can. */
  has() {
    return true;
  }

  /** A path whose answer changes: `model` while it loads, `roles`. */
  async fresh(path) {
    this.kept.delete(path);
    return this.get(path);
  }

  /** A view of many passes, asked for until it is there: `tell(done, total)` hears how far it is; null once `wanted()` is false. */
  async job(run, path, tell, wanted) {
    const whole = `run/${run}/${path}`;
    for (let wait = 40; !this.kept.has(whole); wait = Math.min(2 * wait, 400)) {
      const state = await this.ask(`run/${run}/job/${path}`);
      if (state.ready) this.kept.set(whole, Promise.resolve(state.body));
      else if (!wanted()) return null;
      else {
        tell(state.done, state.total);
        await new Promise((done) => setTimeout(done, wait));
      }
    }
    return this.kept.get(whole);
  }

  async post(path, body) {
    return this.ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  }

  async ask(path, options) {
    let response;
    try {
      response = await fetch(`inside/${path}`, options);
    } catch {
      throw new Error("the server does not answer: is `clearhead explore` still running?");
    }
    const body = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(body.error || `the server answered ${response.status}`);
    return body;
  }
}

/** A run that was recorded: what is not in it cannot be computed. */
export class RecordedSource {
  constructor(record) {
    this.live = false;
    this.record = record;
  }

  has(path) {
    return Object.hasOwn(this.record.views, path);
  }

  /** The recorded paths that begin so, without their beginning. */
  list(prefix) {
    return Object.keys(this.record.views).filter((path) => path.startsWith(prefix)).map((path) => path.slice(prefix.length));
  }

  async get(path) {
    if (!this.has(path)) throw new Error("this was not recorded: open the model with `clearhead explore` to compute it");
    return this.record.views[path];
  }

  async fresh(path) {
    return this.get(path);
  }

  async job(run, path) {
    return this.get(`run/${run}/${path}`);
  }

  async post() {
    throw new Error("this page is a recording: open the model with `clearhead explore` to run it again");
  }
}
