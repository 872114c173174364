// Forty models that learn an answer side by side, each from the groups that it draws by chance.

import { groupAdvantages, range } from "./arithmetic.js";
import { button, change, frame, line, node, slider, text, within } from "./kit.js";

export const defaults = {
  p: 0.01, // chance of the right answer at the start
  G: 8, // group size
  seed: 0,
};
export const legal = (name, value) =>
  name === "p" ? value >= 1e-6 && value <= 0.5 : within(value, name === "G" ? [2, 32] : [0, 9999]);

const [STEPS, RUNS] = [100, 40];
const CHANCES = range(30).map((k) => Number((10 ** (k / 10 - 4)).toPrecision(3)));
// how often each answer was heard: words and signs, then numbers; the 4 stands behind them
const WORDS = [1, 2, 1, 1, 1, 1, 1];
const NUMBERS = range(11).map(() => 1);

/** The probabilities of a model that babbles, the right answer last. */
export function babble(p) {
  const shared = (all, share) => all.map((n) => (share * n) / all.reduce((sum, m) => sum + m, 0));
  return [...shared(WORDS, 0.9), ...shared(NUMBERS, 0.1 - p), p];
}

function softmax(z) {
  const e = z.map(Math.exp);
  const sum = e.reduce((total, value) => total + value, 0);
  return e.map((value) => value / sum);
}

const known = new Map();
/** The advantages of the right and of the other answers of a group. */
function advantages(G, hits) {
  const key = 64 * G + hits;
  if (!known.has(key)) {
    const { values } = groupAdvantages(range(G).map((g) => +(g < hits)), G);
    known.set(key, [values[0], values[G - 1]]);
  }
  return known.get(key);
}

/** One step of GRPO on logits: each answer that was drawn pushes by its advantage. */
export function pushed(z, drawn, right) {
  const [G, hits] = [drawn.length, drawn.filter((answer) => answer === right).length];
  if (hits === 0 || hits === G) return z;
  const [good, bad] = advantages(G, hits);
  const next = [...z]; // the advantages of a group add up to 0: nothing else is left of the softmax
  for (const answer of drawn) next[answer] += (answer === right ? good : bad) / G;
  return next;
}

/** Numbers from 0 up to 1 (mulberry32). */
function chance(seed) {
  let state = (seed + 1) * 0x9e3779b1;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** The answer that a number from 0 up to 1 falls on: the last one lies first. */
function answerAt(pi, number) {
  let answer = pi.length - 1;
  let left = number - pi[answer];
  if (left < 0) return answer;
  for (answer = 0; left >= pi[answer] && answer < pi.length - 2; answer++) left -= pi[answer];
  return answer;
}

/** [run][step]: the probability of the right answer. */
function learn({ p, G, seed }) {
  const random = chance(seed);
  const right = WORDS.length + NUMBERS.length;
  const numbers = new Float64Array(G);
  return range(RUNS).map(() => {
    let z = babble(p).map(Math.log);
    let pi = softmax(z);
    return range(STEPS + 1).map(() => {
      const was = pi[right];
      let hits = 0;
      for (let g = 0; g < G; g++) hits += (numbers[g] = random()) < was; // the right one lies first
      if (hits === 0 || hits === G) return was; // all alike: nothing is pushed
      z = pushed(z, Array.from(numbers, (n) => answerAt(pi, n)), right);
      pi = softmax(z);
      return was;
    });
  });
}

export default {
  render({ model, el }) {
    let shown = { key: "" };
    function runsOf(values) {
      const key = JSON.stringify(values);
      if (shown.key !== key) shown = { key, runs: learn(values) };
      return shown.runs;
    }
    const won = (values) => runsOf(values).filter((run) => run.at(-1) > 0.9).length;

    function draw(values, width) {
      const runs = runsOf(values);
      const [left, top, high, wide] = [44, 30, 200, width - 56];
      const x = (step) => left + (step / STEPS) * wide;
      const y = (p) => top + high * (1 - p);
      const points = (series) => series.map((p, t) => `${x(t).toFixed(1)},${y(p).toFixed(1)}`).join(" ");
      const sorted = range(STEPS + 1).map((t) => runs.map((run) => run[t]).sort((a, b) => a - b));
      const at = (share) => sorted.map((all) => all[Math.round(share * (RUNS - 1))]);
      const shapes = [
        text(0, 16, "probability of 4", { class: "title" }),
        [0, 0.5, 1].map((p) => [
          line(left, y(p), left + wide, y(p), { class: "hair" }),
          text(left - 6, y(p) + 5, p, { "text-anchor": "end", class: "small quiet" }),
        ]),
        range(5).map((k) => text(x(25 * k), top + high + 20, 25 * k, { "text-anchor": "middle", class: "small quiet" })),
        text(left + wide / 2, top + high + 40, "step", { "text-anchor": "middle", class: "small quiet" }),
        node("svg:polygon", {
          points: `${points(at(0.1))} ${points(at(0.9)).split(" ").reverse().join(" ")}`,
          class: "up",
          opacity: 0.2,
        }),
        runs.filter((_, i) => i % 4 === 0).map((run) => node("svg:polyline", { points: points(run), class: "single" })),
        node("svg:polyline", { points: points(at(0.5)), class: "curve up" }),
      ];
      const caption = `Groups of ${values.G}: ${won(values)} of ${RUNS} models end above 0.9.`;
      return { shapes, height: top + high + 48, caption };
    }

    const view = frame(model, el, {
      name: "luck",
      label: "The probability of the right answer, step by step, for forty models",
      defaults,
      controls: [
        slider(model, "p", { label: "chance of 4 at the start", values: CHANCES, format: (p) => `1 in ${Math.round(1 / p).toLocaleString("en-US")}` }),
        slider(model, "G", { label: "group size", min: 2, max: 32 }),
      ],
      extra: [button("Other dice", () => change(model, { seed: (model.get("seed") + 1) % 9999 }))],
      hint: "Blue: the median. Tinted: eight of ten models. Grey: ten of them, one by one.",
      draw,
      page: "lessons/01_what_rl_is",
      task: {
        words: "let all 40 models learn a 4 that comes once in 200 answers at first.",
        done: (values) => values.p <= 0.0051 && won(values) === RUNS &&
          `A group of ${values.G} meets the 4 early enough, every time.`,
      },
    });
    return view.leave;
  },
};
