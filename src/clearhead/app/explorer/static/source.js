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

/**
 * The lens as tables, which may come in pieces of some columns: `add(first, body)`. `top(layer, column)` lists the best choices as
 * {id, label, p}; `entropy(layer, column)` and `final(layer, column)` are numbers, `chosen(column)` is what the model says there.
 */
export class LensTables {
  constructor(columns) {
    this.columns = columns;
    this.layers = [];
    this.mostEntropy = 1e-9;
    this.pieces = new Map(); // by column: its piece, and its place in it
  }

  add(first, body) {
    const [ids, p, entropy, final] = [body.ids, body.p, body.entropy, body.final].map(unpack);
    this.layers = body.layers;
    this.mostEntropy = entropy.values.reduce((most, bits) => Math.max(most, bits), this.mostEntropy);
    body.columns.forEach((_, place) => this.pieces.set(first + place, { body, place, ids, p, entropy, final }));
    return this;
  }

  has(column) {
    return this.pieces.has(column);
  }

  at(table, layer, column) {
    const piece = this.pieces.get(column);
    return piece[table].values[layer * piece.ids.shape[1] + piece.place];
  }

  entropy(layer, column) {
    return this.at("entropy", layer, column);
  }

  final(layer, column) {
    return this.at("final", layer, column);
  }

  chosen(column) {
    const { body, place } = this.pieces.get(column);
    return body.chosen[place];
  }

  top(layer, column) {
    const { body, place, ids, p } = this.pieces.get(column);
    const [, columns, count] = ids.shape;
    const first = (layer * columns + place) * count;
    return Array.from({ length: count }, (_, i) => ({ id: ids.values[first + i], label: body.names[ids.values[first + i]], p: p.values[first + i] }));
  }
}

/** The lens of a run: all of it from a file, else at one column. */
export async function lensAt(source, run, column) {
  const body = await source.get(source.live ? `run/${run.run}/lens?first=${column}` : `run/${run.run}/lens`);
  return new LensTables(run.columns).add(source.live ? column : 0, body);
}

/** The path of one head's pattern: of a live model it comes by itself, a file has whole layers. */
const headPath = (source, run, kind, layer, number) => `run/${run.run}/attention/${kind}/${layer}${source.live ? `?head=${number}` : ""}`;

/** One head: {body, head, matrix}, with the weights of all rows in `matrix`. */
export async function headPattern(source, run, kind, layer, number) {
  const body = await source.get(headPath(source, run, kind, layer, number));
  const { shape, values } = unpack(body.pattern);
  const [place, size] = [source.live ? 0 : number, shape[1] * shape[2]];
  return { body, head: body.heads[place], matrix: values.subarray(place * size, (place + 1) * size) };
}

/** A model that runs: every answer is kept, so that going back costs nothing. One that nobody waits for any more is cancelled. */
export class LiveSource {
  constructor() {
    this.live = true;
    this.kept = new Map();
    this.waited = new Map(); // by path: what cancels it
  }

  async get(path) {
    if (!this.kept.has(path)) {
      const cancel = new AbortController();
      const answer = this.ask(path, { signal: cancel.signal });
      const forget = (table, own) => { if (table.get(path) === own) table.delete(path); }; // it may have been asked for again
      this.waited.set(path, cancel);
      this.kept.set(path, answer);
      answer.catch(() => forget(this.kept, answer)).finally(() => forget(this.waited, cancel));
      if (this.kept.size > 400) this.kept.delete(this.kept.keys().next().value);
    }
    return this.kept.get(path);
  }

  /** Cancel what is on its way and no longer wanted: the server drops it if it has not begun. Who waits for it hears an error that says `dropped`. */
  drop(unwanted) {
    for (const [path, cancel] of this.waited) {
      if (!unwanted(path)) continue;
      this.kept.delete(path);
      this.waited.delete(path);
      cancel.abort();
    }
  }

  /** Wait until nothing else is asked for. */
  async idle() {
    while (this.waited.size) await new Promise((done) => setTimeout(done, 60));
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

  /** A view of many passes, asked for until it is there: `tell(done, total, part)` hears how far it is and what is there already; null once `wanted()` is false. */
  async job(run, path, tell, wanted) {
    const whole = `run/${run}/${path}`;
    for (let wait = 40; !this.kept.has(whole); wait = Math.min(2 * wait, 400)) {
      const state = await this.ask(`run/${run}/job/${path}`);
      if (state.ready) this.kept.set(whole, Promise.resolve(state.body));
      else if (!wanted()) return null;
      else {
        tell(state.done, state.total, state.body);
        await new Promise((done) => setTimeout(done, wait));
      }
    }
    return this.kept.get(whole);
  }

  async post(path, body) {
    return this.ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  }

  async ask(path, options) {
    const response = await fetch(`inside/${path}`, options).catch(() => null);
    const body = await response?.json().catch(() => ({}));
    if (options?.signal?.aborted) throw Object.assign(new Error("nobody waits for this any more"), { dropped: true });
    if (!response) throw new Error("the server does not answer: is `clearhead explore` still running?");
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

  drop() {}

  async idle() {}

  async job(run, path) {
    return this.get(`run/${run}/${path}`);
  }

  async post() {
    throw new Error("this page is a recording: open the model with `clearhead explore` to run it again");
  }
}
