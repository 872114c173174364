// The values that a widget follows, on a page without a kernel.

/** What a widget needs of a model, for values that nobody else knows. */
export class Model {
  constructor(values) {
    this.values = { ...values };
    this.events = new EventTarget();
  }
  get(name) {
    return this.values[name];
  }
  set(name, value) {
    if (this.values[name] === value) return;
    this.values[name] = value;
    this.events.dispatchEvent(new Event(`change:${name}`));
  }
  save_changes() {}
  on(event, listener) {
    this.events.addEventListener(event, listener);
  }
  off(event, listener) {
    this.events.removeEventListener(event, listener);
  }
}
