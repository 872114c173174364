// The objective of one token and its gradient against the ratio, with borders to drag.

import { LOSSES, clippingBorders, clippingDoubts, clippingPoint } from "./arithmetic.js";
import { caps, range, settingsRead } from "./arithmetic.js";
import { change, clamp, frame, keyed, line, menu, node } from "./kit.js";
import { rect, signed, slider, snap, text, tick } from "./kit.js";

export const defaults = { loss_type: "dapo", epsilon: 0.2, epsilon_high: 0.28, delta: null };

export const legal = (name, value) =>
  name === "loss_type"
    ? LOSSES.includes(value)
    : value === null ? name === "delta" : value >= 0 && value <= 6;

const MAX_RATIO = 3;
const RATIOS = range(300).map((i) => 0.01 + (i * (MAX_RATIO - 0.01)) / 299);
const NAMES = { epsilon: "1 − ε", epsilon_high: "1 + ε_high", delta: "δ" };
const SIGNS = [1, -1];
const HEIGHT = 210; // of a panel
const PANELS = [
  { curve: 0, title: "objective (−loss)", reach: 4.2, ticks: [-4, -2, 0, 2, 4] },
  { curve: 1, title: "pull on log π (−gradient)", reach: 3, ticks: [-2, 0, 2] },
];

/** Where a border may lie: the slider's own ends, for a cap from 0 on. */
function ends(name, lossType) {
  const high = { epsilon: 1, epsilon_high: caps(lossType) ? 6 : 2, delta: 3.4 }[name];
  return { min: name === "delta" ? 1 : 0, max: high, step: 0.02 };
}

/** The setting whose border lies at a ratio. */
function settingAt(name, ratio, lossType) {
  if (name === "epsilon") return 1 - ratio;
  return name === "epsilon_high" && !caps(lossType) ? ratio - 1 : ratio;
}

/** Where the pull of a sign is 0: [first ratio, last ratio] of each band. */
function silent(A, loss_type, settings) {
  const bands = [];
  let open = null;
  for (const ratio of RATIOS) {
    const zero = clippingPoint(ratio, A, loss_type, settings)[1] === 0;
    if (zero && open === null) bands.push((open = [ratio, ratio]));
    else if (zero) open[1] = ratio;
    else open = null;
  }
  const borders = Object.values(clippingBorders(loss_type, settings));
  const exact = (ratio) => borders.find((border) => Math.abs(border - ratio) < 0.011) ?? ratio;
  return bands.map((band) => band.map(exact));
}

/** What the picture says in words. */
function inWords({ loss_type, ...settings }) {
  const parts = SIGNS.map((A) => {
    const bands = silent(A, loss_type, settings).map(([low, high]) => {
      if (high >= MAX_RATIO) return `above ${low.toFixed(2)}`;
      return low <= 0.01 ? `below ${high.toFixed(2)}` : `${low.toFixed(2)} to ${high.toFixed(2)}`;
    });
    const token = A > 0 ? "a good token (A = +1)" : "a bad one (A = −1)";
    return bands.length ? `${token} is silent ${bands.join(" and ")}` : `${token} is never silent`;
  });
  return `${loss_type}: ${parts.join("; ")}.`;
}

export default {
  render({ model, el }) {
    let pointed = null; // a ratio
    let panels = []; // where they stand: {left, top, width}
    let view = null;
    const valuesNow = () =>
      Object.fromEntries(Object.keys(defaults).map((name) => [name, model.get(name)]));
    const xOf = (panel, ratio) => panel.left + (ratio / MAX_RATIO) * panel.width;
    const yOf = (panel, value) =>
      panel.top + (HEIGHT / 2) * (1 - clamp(value, -panel.reach, panel.reach) / panel.reach);

    function axes(panel) {
      const left = { "text-anchor": "end", class: "small quiet" };
      const bottom = { "text-anchor": "middle", class: "small quiet" };
      const end = panel.top + HEIGHT;
      return [
        text(panel.left - 30, panel.top - 12, panel.title, { class: "title" }),
        panel.ticks.map((value) => [
          line(panel.left, yOf(panel, value), panel.left + panel.width, yOf(panel, value), {
            class: value ? "hair" : "axis",
          }),
          text(panel.left - 5, yOf(panel, value) + 4, String(value).replace("-", "−"), left),
        ]),
        range(MAX_RATIO + 1).map((ratio) => [
          line(xOf(panel, ratio), panel.top, xOf(panel, ratio), end, { class: "hair" }),
          text(xOf(panel, ratio), end + 34, ratio, bottom),
        ]),
        text(panel.left + panel.width / 2, end + 50, "ratio c = π / π_old", bottom),
      ];
    }

    function curve(panel, A, { loss_type, ...settings }) {
      const points = RATIOS.map((ratio) => {
        const value = clippingPoint(ratio, A, loss_type, settings)[panel.curve];
        return `${xOf(panel, ratio).toFixed(1)},${yOf(panel, value).toFixed(1)}`;
      });
      return node("svg:polyline", {
        points: points.join(" "),
        class: `curve ${A > 0 ? "up" : "down"}`,
      });
    }

    function band(panel, A, { loss_type, ...settings }) {
      if (panel.curve === 0) return [];
      const top = A > 0 ? panel.top : panel.top + HEIGHT / 2;
      return silent(A, loss_type, settings).map(([low, high]) =>
        rect(xOf(panel, low), top, xOf(panel, high) - xOf(panel, low), HEIGHT / 2, {
          class: A > 0 ? "up" : "down",
          opacity: 0.14,
        }),
      );
    }

    /** A border: a dotted line with a knob under the axis, and its name. */
    function border(panel, name, ratio, row, values) {
      const x = xOf(panel, Math.min(ratio, MAX_RATIO));
      const y = panel.top + HEIGHT + 8;
      const cap = caps(values.loss_type) ? "cap" : NAMES[name];
      const limits = ends(name, values.loss_type);
      const sides = x > panel.left + panel.width - 40 ? "end" : "middle";
      return node(
        "svg:g",
        {
          class: "grip",
          role: "slider",
          tabindex: 0,
          "data-key": `${name}_${panel.curve}`,
          "aria-label": `border ${cap}`,
          "aria-valuemin": limits.min,
          "aria-valuemax": limits.max,
          "aria-valuenow": values[name],
          "aria-valuetext": `${name} ${values[name]}, ratio ${ratio.toFixed(2)}`,
          onkeydown: (event) => {
            const towards = name === "epsilon" ? -1 : 1; // a key moves the line its way
            const flipped = { key: event.key };
            const swaps = { ArrowRight: "ArrowLeft", ArrowLeft: "ArrowRight" };
            if (towards < 0 && event.key in swaps) flipped.key = swaps[event.key];
            const value = keyed(flipped, values[name], limits);
            if (value === null) return;
            event.preventDefault();
            event.stopPropagation();
            change(model, { [name]: value });
          },
        },
        rect(x - 16, y - 16, 32, 32, { fill: "transparent" }),
        line(x, panel.top + 17 + 15 * row, x, y, { class: "border" }),
        node("svg:circle", { cx: x, cy: y, r: 7, class: "knob" }),
        text(x, panel.top + 12 + 15 * row, cap, { "text-anchor": sides, class: "small halo" }),
      );
    }

    /** A line at the ratio that is pointed at, and a dot on each curve. */
    function pointer(panel, { loss_type, ...settings }) {
      if (pointed === null) return [];
      const x = xOf(panel, pointed);
      const dots = SIGNS.map((A) => {
        const value = clippingPoint(pointed, A, loss_type, settings)[panel.curve];
        const colour = A > 0 ? "up" : "down";
        return node("svg:circle", { cx: x, cy: yOf(panel, value), r: 5, class: colour });
      });
      return [line(x, panel.top, x, panel.top + HEIGHT, { class: "axis" }), dots];
    }

    function draw(values, width) {
      const wide = width >= 620;
      const each = (wide ? (width - 30) / 2 : width) - 46;
      panels = PANELS.map((panel, i) => ({
        ...panel,
        left: 34 + (wide && i ? each + 64 : 0),
        top: 26 + (!wide && i ? HEIGHT + 100 : 0),
        width: each,
      }));
      const borders = Object.entries(clippingBorders(values.loss_type, values));
      const visible = borders.filter(([, ratio]) => ratio >= 0 && ratio <= MAX_RATIO);
      visible.sort((a, b) => a[1] - b[1]);
      const shapes = panels.map((panel) => [
        axes(panel),
        SIGNS.map((A) => band(panel, A, values)),
        visible.map(([name, ratio], row) => border(panel, name, ratio, row, values)),
        SIGNS.map((A) => curve(panel, A, values)),
        pointer(panel, values),
      ]);
      const height = panels[1].top + HEIGHT + 56;
      return { shapes, height, caption: inWords(values) };
    }

    const panelAt = (x, y) =>
      panels.find(
        ({ left, top, width }) =>
          x >= left - 8 && x <= left + width + 8 && y >= top - 8 && y <= top + HEIGHT + 26,
      );
    const ratioAt = (panel, x) =>
      clamp(((x - panel.left) / panel.width) * MAX_RATIO, 0.01, MAX_RATIO);

    function point(ratio) {
      const other = ratio !== pointed;
      pointed = ratio;
      if (other) view?.redraw();
    }

    /** Take the nearest border, if one is near. */
    function press(x, y) {
      const panel = panelAt(x, y);
      if (!panel) return null;
      const { loss_type, ...settings } = valuesNow();
      const near = Object.entries(clippingBorders(loss_type, settings))
        .map(([name, ratio]) => [Math.abs(xOf(panel, ratio) - x), name])
        .sort((a, b) => a[0] - b[0])[0];
      if (!near || near[0] > 18) return null;
      const name = near[1];
      return (at) => {
        const value = settingAt(name, ratioAt(panel, at), loss_type);
        change(model, { [name]: snap(value, ends(name, loss_type)) });
      };
    }

    function detail({ loss_type, ...settings }) {
      if (pointed === null) return null;
      const words = SIGNS.map((A) => {
        const [objective, pull] = clippingPoint(pointed, A, loss_type, settings);
        const silence = pull === 0 ? "silent" : `pull ${signed(pull)}`;
        return `A = ${A > 0 ? "+1" : "−1"}: objective ${signed(objective)}, ${silence}`;
      });
      return `At ratio ${pointed.toFixed(2)}: ${words.join("; ")}.`;
    }

    /** A slider that is pale where the loss does not read its setting. */
    function borderSlider(name, options) {
      const format = (x) => x.toFixed(2);
      const control = slider(model, name, { ...ends(name), format, ...options });
      const { follow } = control;
      control.follow = (values) => {
        control.input.max = ends(name, values.loss_type).max;
        follow(values);
        const read = settingsRead(values.loss_type).includes(name) && values[name] !== null;
        control.input.disabled = !read;
        control.element.classList.toggle("idle", !read);
      };
      return control;
    }
    let kept = model.get("delta") ?? 2; // what delta is when it is ticked again
    const twoSided = tick(model, "two_sided", {
      label: "a second border δ where A < 0",
      read: ({ delta }) => delta !== null,
      write: (on) => ({ delta: on ? kept : null }),
    });

    view = frame(model, el, {
      name: "clipping",
      label: "The objective of one token, and its gradient, against the ratio",
      defaults,
      controls: [
        menu(model, "loss_type", { options: LOSSES.map((name) => [name, name]) }),
        borderSlider("epsilon"),
        borderSlider("epsilon_high"),
        borderSlider("delta", {
          read: ({ delta }) => delta ?? kept,
          write: (delta) => ({ delta: (kept = delta) }),
        }),
        twoSided,
      ],
      hint:
        "Blue, solid: A = +1. Orange, dashed: A = −1. Tinted: no pull. Drag a border, or press " +
        "Tab and the arrow keys.",
      check: ({ loss_type, ...settings }) => clippingDoubts(loss_type, settings)[0] ?? null,
      draw,
      press,
      detail,
      move: (x, y) => {
        const panel = x === null ? null : panelAt(x, y);
        point(panel ? ratioAt(panel, x) : null);
      },
      page: "widgets/01_pull",
      task: {
        words: "let a bad token (A = −1) be pushed at every ratio, a good one (A = +1) not.",
        done: ({ loss_type, ...settings }) =>
          !silent(-1, loss_type, settings).length && silent(1, loss_type, settings).length > 0 &&
          "Nothing stops a bad token any more, however rare it has become.",
      },
    });
    return view.leave;
  },
};
