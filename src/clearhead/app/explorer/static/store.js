// What the sections share: the model, the run they look at, the selection; and who wants to hear when one of them changes.

export class Store {
  constructor(values) {
    this.values = { ...values };
    this.listeners = new Map();
  }

  get(key) {
    return this.values[key];
  }

  set(key, value) {
    if (this.values[key] === value) return;
    this.values[key] = value;
    for (const listener of this.listeners.get(key) || []) listener(value);
  }

  /** Call `listener` with the value whenever it changes. */
  listen(key, listener) {
    if (!this.listeners.has(key)) this.listeners.set(key, []);
    this.listeners.get(key).push(listener);
  }

  /** The same, and now if it is there already. */
  on(key, listener) {
    this.listen(key, listener);
    if (this.values[key] !== undefined && this.values[key] !== null) listener(this.values[key]);
  }
}
