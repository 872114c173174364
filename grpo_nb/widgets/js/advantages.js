// Drag the rewards of a group and watch its advantages follow.

import { groupAdvantages, range } from "./arithmetic.js";
import { button, change, clamp, frame, keyed, line, menu, node, within } from "./kit.js";
import { rect, signed, slider, snap, text } from "./kit.js";

export const defaults = { rewards: [1, 0, 0, 0], scale: "group" };

const SCALES = [
  ["group", "group: by the group's deviation"],
  ["batch", "batch: by the whole batch's deviation"],
  ["none", "none: by nothing"],
];
export function legal(name, value) {
  if (name === "scale") return SCALES.some(([scale]) => scale === value);
  return within(value.length, [2, 12]) && value.every((one) => Math.abs(one) <= 100);
}
const LEFT = 46; // of the columns
const REWARDS = { top: 26, height: 140 };
const ADVANTAGES = { top: 214, height: 170 };
const HEIGHT = ADVANTAGES.top + ADVANTAGES.height + 24;

/** Rewards for a number of completions: those that are there, then zeros. */
const resized = (rewards, count) => range(count).map((i) => rewards[i] ?? 0);

/** What the picture says in words. */
function inWords({ rewards }, { values, mean, std }) {
  const middle = `The mean of the group is ${mean[0].toFixed(2)}`;
  if (std[0] === 0) return `${middle}, and all rewards are equal: there is nothing to learn.`;
  const own = values.slice(0, rewards.length);
  const best = own.indexOf(Math.max(...own));
  const worst = own.indexOf(Math.min(...own));
  return (
    `${middle}, its deviation ${std[0].toFixed(2)}. ` +
    `Completion ${best} gains most (${signed(own[best])}), ` +
    `completion ${worst} loses most (${signed(own[worst])}).`
  );
}

/** A group beside ours, half right and half wrong, where the scale reads the whole batch. */
const others = (count, scale) => (scale === "batch" ? range(count).map((i) => +(i % 2 === 0)) : []);

/** The rewards that count, and what follows from them. */
function advantagesOf({ rewards, scale }) {
  const shown = [...rewards, ...others(rewards.length, scale)];
  return { shown, ...groupAdvantages(shown, rewards.length, scale) };
}

export default {
  render({ model, el }) {
    let pointed = null; // a completion
    let columns = null; // where they stand: {size, count}
    let view = null;
    const start = [...model.get("rewards")];
    const span = () => {
      const all = [...start, ...model.get("rewards")];
      return { min: Math.min(0, ...all), max: Math.max(1, ...all), step: 0.05 };
    };
    const heightOf = (reward) => {
      const { min, max } = span();
      return REWARDS.top + REWARDS.height * (1 - (reward - min) / (max - min));
    };

    function give(i, reward) {
      const rewards = [...model.get("rewards")];
      rewards[i] = reward;
      change(model, { rewards });
    }

    function grip(i, reward, x, size) {
      const knob = Math.min(size - 2, 34);
      const middle = x + size / 2;
      const y = heightOf(reward);
      const { min, max } = span();
      return node(
        "svg:g",
        {
          class: "grip",
          role: "slider",
          tabindex: 0,
          "data-key": `reward_${i}`,
          "aria-label": `reward of completion ${i}`,
          "aria-valuemin": min,
          "aria-valuemax": max,
          "aria-valuenow": reward,
          "aria-orientation": "vertical",
          onfocus: () => point(i),
          onkeydown: (event) => {
            const value = keyed(event, reward, span());
            if (value === null) return;
            event.preventDefault();
            event.stopPropagation();
            give(i, value);
          },
        },
        rect(x, y - 22, size, 44, { fill: "transparent" }),
        rect(middle - knob / 2, y - 5, knob, 10, { rx: 5, class: "knob" }),
      );
    }

    /** Both bars of completion i, and their numbers where there is room. */
    function bars(i, reward, value, own, size, zero, scaleOf) {
      const x = LEFT + i * size;
      const kind = !own || value === 0 ? "neutral" : value > 0 ? "up" : "down";
      const colour = { class: own ? kind : `${kind} pale` };
      const [inset, width] = [size * 0.14, size * 0.72];
      const [top, bottom] = [heightOf(Math.max(reward, 0)), heightOf(Math.min(reward, 0))];
      const length = scaleOf(Math.abs(value));
      const up = value > 0 ? zero - length : zero;
      const words = { "text-anchor": "middle", class: size < 34 ? "small" : "" };
      const shapes = [
        rect(x + inset, top, width, bottom - top, colour),
        rect(x + inset, up, width, length, colour),
      ];
      if (size >= 26) {
        const y = value < 0 ? zero + length + 14 : up - 5;
        shapes.push(text(x + size / 2, y, signed(value, size < 34 ? 1 : 2), words));
      }
      if (size >= 18 && own) {
        shapes.push(text(x + size / 2, HEIGHT - 4, i, { ...words, class: "small quiet" }));
      }
      return shapes;
    }

    function draw(values, width) {
      const { rewards } = values;
      const result = advantagesOf(values);
      const [G, all] = [rewards.length, result.shown.length];
      const size = Math.min((width - LEFT) / all, 110);
      columns = { size, count: G };
      const reach = 1.2 * Math.max((G - 1) / Math.sqrt(G), ...result.values.map(Math.abs));
      const scaleOf = (value) => (value / reach) * (ADVANTAGES.height / 2);
      const zero = ADVANTAGES.top + ADVANTAGES.height / 2;
      const [group, end] = [LEFT + size * G, LEFT + size * all];
      const mean = heightOf(result.mean[0]);
      const ends = { "text-anchor": "end", class: "small" };
      const shapes = [
        text(0, REWARDS.top - 12, "rewards: drag a bar", { class: "title" }),
        text(0, ADVANTAGES.top - 8, "advantages", { class: "title" }),
        line(LEFT, heightOf(0), end, heightOf(0), { class: "axis" }),
        line(LEFT, zero, end, zero, { class: "axis" }),
        text(LEFT - 4, zero + 4, "0", ends),
      ];
      if (pointed !== null && pointed < G) {
        const x = LEFT + pointed * size;
        shapes.push(rect(x, REWARDS.top - 6, size, HEIGHT - REWARDS.top + 6, { class: "hair" }));
      }
      result.shown.forEach((reward, i) => {
        shapes.push(bars(i, reward, result.values[i], i < G, size, zero, scaleOf));
      });
      shapes.push(
        line(LEFT, mean, group, mean, { class: "border" }),
        text(LEFT - 4, mean + 4, "mean", ends),
        rewards.map((reward, i) => grip(i, reward, LEFT + i * size, size)),
      );
      if (all > G) {
        const words = { class: "small quiet", "text-anchor": "end" };
        shapes.push(text(end, REWARDS.top - 12, "grey: another group", words));
      }
      return { shapes, height: HEIGHT, caption: inWords(values, result) };
    }

    function completionAt(x, y) {
      if (x === null || !columns) return null;
      const i = Math.floor((x - LEFT) / columns.size);
      return i >= 0 && i < columns.count && y > REWARDS.top - 12 ? i : null;
    }

    function point(i) {
      if (i === pointed) return false;
      pointed = i;
      view?.redraw();
      return true;
    }

    function press(x, y) {
      const i = completionAt(x, y);
      if (i === null || y > REWARDS.top + REWARDS.height + 12) return null;
      const { min, max, step } = span();
      return (_, at) => {
        const share = 1 - (at - REWARDS.top) / REWARDS.height;
        give(i, snap(min + clamp(share, 0, 1) * (max - min), { min, max, step }));
      };
    }

    function detail(values) {
      if (pointed === null || pointed >= values.rewards.length) return null;
      const { values: advantages, mean } = advantagesOf(values);
      const reward = values.rewards[pointed];
      return (
        `Completion ${pointed}: reward ${reward.toFixed(2)}, ` +
        `${signed(reward - mean[0])} from the mean, advantage ${signed(advantages[pointed])}.`
      );
    }

    const preset = (words, make) =>
      button(words, () => change(model, { rewards: model.get("rewards").map(make) }));

    view = frame(model, el, {
      name: "advantages",
      label: "The rewards of a group, and the advantages that follow from them",
      defaults,
      controls: [
        menu(model, "scale", { label: "scale: what divides", options: SCALES }),
        slider(model, "completions", {
          label: "completions of the group",
          min: 2,
          max: 12,
          read: ({ rewards }) => rewards.length,
          write: (count) => ({ rewards: resized(model.get("rewards"), count) }),
        }),
      ],
      extra: [
        preset("One is right", (_, i) => +(i === 0)),
        preset("All are equal", () => 0.5),
        preset("Almost equal", (_, i) => (i === 0 ? 0.55 : 0.5)),
      ],
      hint: "Drag a bar, or reach it with Tab and move it with the arrow keys.",
      draw,
      press,
      detail,
      move: (x, y) => point(completionAt(x, y)),
      page: "widgets/01_pull",
      task: {
        words: "give one completion an advantage of 3 or more.",
        done: (values) => Math.max(...advantagesOf(values).values.slice(0, values.rewards.length)) >= 3 &&
          "One that is right among eleven or more: what is rare is pushed furthest.",
      },
    });
    return view.leave;
  },
};
