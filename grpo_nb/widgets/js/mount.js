// The widgets on a page without a kernel: <div data-widget="batch"></div> becomes the widget.
// data-values='{"num_generations": 8}' are values to begin with.

import { Model } from "./model.js";

/** Show one widget in an element, in place of what is in it; returns its model. */
export async function mount(element, name, values = {}) {
  const widget = await import(`./${name}.js`);
  const model = new Model({ ...widget.defaults, ...values });
  element.replaceChildren();
  widget.default.render({ model, el: element });
  element.dataset.mounted = "true";
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

mountAll();
