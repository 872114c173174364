// The widgets on a page without a kernel: <div data-widget="batch"></div> becomes the widget.
// data-values='{"num_generations": 8}' are values to begin with. What is moved stands in the page's
// address too, #dashboard?run=1&step=50, so that a link opens it there.

import { followLink } from "./kit.js";
import { Model } from "./model.js";

let shown = []; // {element, name, widget, model} of the widgets that share settings

/** One change moves both: what a widget shares is set in those of other kinds that follow it. */
function tie(element, name, widget, model) {
  if (!widget.shared) return;
  shown = shown.filter((other) => other.element !== element);
  const values = () => Object.fromEntries(Object.keys(widget.defaults).map((n) => [n, model.get(n)]));
  let before = widget.shared(values());
  const tell = () => {
    const now = widget.shared(values());
    const moved = Object.entries(now).filter(([key, value]) => value !== before[key]);
    before = now;
    for (const other of shown.filter((one) => one.name !== name)) {
      const given = Object.entries(other.widget.follows(Object.fromEntries(moved)));
      for (const [key, value] of given) other.model.set(key, value);
    }
  };
  for (const key of Object.keys(widget.defaults)) model.on(`change:${key}`, tell);
  shown.push({ element, name, widget, model });
}

/** What the address calls a place: the widget's name, and a number from its second place on. */
function nameInLink(element, name) {
  const all = [...document.querySelectorAll(`[data-widget="${name}"]`)];
  const place = all.indexOf(element);
  return place > 0 ? `${name}-${place + 1}` : name;
}

/** Show one widget in an element, in place of what is in it; returns its model. */
export async function mount(element, name, values = {}) {
  const widget = await import(`./${name}.js`);
  const start = { ...widget.defaults, ...values };
  const model = new Model(start);
  const asked = !element.dataset.mounted;
  const held = followLink(nameInLink(element, name), widget, model, start, asked);
  element.replaceChildren();
  widget.default.render({ model, el: element });
  element.dataset.mounted = "true";
  tie(element, name, widget, model);
  if (held) element.scrollIntoView();
  return model;
}

function addStyle() {
  const href = new URL("widgets.css", import.meta.url).href;
  if (document.querySelector(`link[href="${href}"]`)) return;
  const link = document.createElement("link");
  document.head.append(Object.assign(link, { rel: "stylesheet", href }));
}

/** Mount every `data-widget` below an element. */
export function mountAll(below = document) {
  addStyle();
  const places = [...below.querySelectorAll("[data-widget]:not([data-mounted])")];
  return Promise.all(
    places.map((place) =>
      mount(place, place.dataset.widget, JSON.parse(place.dataset.values || "{}")),
    ),
  );
}

await mountAll(); // who imports this module waits until the widgets stand
