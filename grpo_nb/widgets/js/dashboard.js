// A run, live or stored: its curves, what it wrote, and what it won and lost.

import { BOARD, range, readLog, smoothed } from "./arithmetic.js";
import { button, change, clamp, frame, line, node, plural } from "./kit.js";
import { rect, slider, text, thousands, tick } from "./kit.js";

// A run: {name, curves: {name in the log: [[step, value], ...]}}, and where there are any
//   samples: [{step, prompt, completion, rewards: {name: number}, advantage, pictures?: [URL]}],
//   before, after: shares of `of` that are right, won, lost: [{prompt, answer, before, after}]
export const defaults = {
  runs: [],
  run: 0, // which is read
  step: 0, // of which update; 0: the last
  pair: 0, // which texts of before and after
  compare: true, // whether the other runs are drawn too
  order: "go", // what the buttons say
  // of a live run: "status" and "line" in words, "steered": whether the buttons work, "hints"
  state: {},
  // {"words", "run", "curve", "below", "done"}: where to find the first value below a bound
  task: {},
};
export const linked = ["run", "step", "pair", "compare"]; // the address of a page holds them
export const legal = (name, value) => name === "compare" || (Number.isInteger(value) && value >= 0);

const KINDS = ["up", "down", "missed", "neutral", "ink"]; // the runs' colours
const PANEL = { left: 46, right: 12, top: 46, height: 118, bottom: 26 };
const HEIGHT = PANEL.top + PANEL.height + PANEL.bottom;
const SHARES = ["frac_reward_zero_std"];

/** A number with three digits, a share in percent. */
function told(value, name = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (SHARES.includes(name)) return `${(100 * value).toFixed(0)} %`;
  return Number(value.toPrecision(3)).toLocaleString("en-US", { maximumSignificantDigits: 3 });
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** The last step of a run. */
const lastStep = ({ curves }) =>
  Math.max(0, ...Object.values(curves ?? {}).map((points) => points.at(-1)?.[0] ?? 0));

/** The point of a curve that is nearest to a step. */
function nearest(points, step) {
  let best = null;
  for (const point of points ?? []) {
    if (!best || Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
  }
  return best;
}

/** What the values say now: the chosen run, the step that is read, the runs that are drawn. */
function chosen({ runs, run, step, compare }) {
  const at = clamp(run, 0, Math.max(runs.length - 1, 0));
  const one = runs[at] ?? { name: "", curves: {} };
  const last = lastStep(one);
  const drawn = runs.map((it, i) => ({ ...it, i })).filter(({ i }) => compare || i === at);
  return { at, one, last, read: step === 0 ? last : Math.min(step, last), drawn };
}

const total = ({ rewards }) =>
  Object.values(rewards ?? {}).reduce((sum, value) => sum + (value ?? 0), 0);

/** The best, the middle and the worst of some completions. */
function three(samples) {
  const ordered = [...samples].sort((a, b) => total(b) - total(a));
  return [ordered[0], ordered[Math.floor(ordered.length / 2)], ordered.at(-1)];
}

/** Texts of before and after: problems won and lost, or else three of the first and last. */
export function pairsOf(run) {
  const { won = [], lost = [], samples = [] } = run;
  const named = (pairs, word) =>
    pairs.map((pair, i) => ({ ...pair, title: `${word} ${i + 1} of ${pairs.length}` }));
  if (won.length || lost.length) return [...named(won, "won"), ...named(lost, "lost")];
  const steps = [...new Set(samples.map(({ step }) => step))];
  if (steps.length < 2) return [];
  const of = (step) => three(samples.filter((sample) => sample.step === step));
  const [first, last] = [of(steps[0]), of(steps.at(-1))];
  return ["best", "middle", "worst"].map((word, i) => ({
    title: `the ${word} of updates ${steps[0]} and ${steps.at(-1)}`,
    prompt: first[i].prompt,
    promptAfter: last[i].prompt === first[i].prompt ? null : last[i].prompt,
    before: first[i].completion,
    after: last[i].completion,
  }));
}

/** What became of a run, in a sentence. */
function resultOf(run) {
  if (typeof run.after === "number") {
    const before = typeof run.before === "number" ? `${percent(run.before)} before, ` : "";
    return `${run.of ?? "Right answers"}: ${before}${percent(run.after)} after.`;
  }
  const rewards = (run.curves?.reward ?? []).map(([, value]) => value);
  if (rewards.length < 2) return "";
  const count = Math.min(10, Math.floor(rewards.length / 2));
  const mean = (part) => part.reduce((sum, value) => sum + value, 0) / part.length;
  const [first, last] = [rewards.slice(0, count), rewards.slice(-count)].map(mean);
  return (
    `Reward: ${told(first)} in the first ${count === 1 ? "update" : `${count} updates`}, ` +
    `${told(last)} in the last.`
  );
}

/** Whether the reader stands where the task sends them. */
export function taskDone({ task, runs, run, step }) {
  const points = runs[task.run]?.curves?.[task.curve] ?? [];
  const first = points.find(([, value]) => value < task.below);
  return Boolean(first) && run === task.run && step === first[0];
}

export default {
  render({ model, el }) {
    let pointed = null; // {panel, step}
    let places = []; // {name, x, y, width, low, high}
    let view = null;
    const shown = {}; // what the parts under the picture show, so that they stay as they are

    // ------------------------------------------------------------ the curves

    function path(points, place, top) {
      const x = (step) => place.x + ((step - place.low) / (place.high - place.low || 1)) * place.width;
      const y = (value) => place.y + PANEL.height * (1 - value / (top || 1));
      return points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    }

    function curve({ i, curves }, name, place, top, at) {
      const points = curves[name] ?? [];
      if (!points.length) return null;
      const means = smoothed(points.map(([, value]) => value), Math.max(1, Math.floor(points.length / 15)));
      const strong = points.map(([step], k) => [step, means[k]]);
      const kind = `run ${KINDS[i % KINDS.length]}${i === at ? "" : " other"}`;
      if (points.length === 1) strong.push([points[0][0] + 0.01, means[0]]);
      return [
        i === at ? node("svg:path", { d: path(points, place, top), class: `${kind} faint` }) : null,
        node("svg:path", { d: path(strong, place, top), class: kind }),
      ];
    }

    function panel(name, place, { at, one, read, drawn }) {
      const all = drawn.flatMap(({ curves }) => (curves[name] ?? []).map(([, value]) => value));
      const top = Math.max(...all, 0) * 1.05 || 1;
      const base = place.y + PANEL.height;
      const value = nearest(one.curves[name], read);
      const steps = { class: "quiet" };
      const hair = place.x + ((read - place.low) / (place.high - place.low || 1)) * place.width;
      return [
        text(place.x - PANEL.left + 2, place.y - 26, BOARD[name], { class: "title" }),
        text(place.x, place.y - 8, told(value?.[1], name), { class: `${KINDS[at % KINDS.length]} value` }),
        line(place.x, base, place.x + place.width, base, { class: "axis" }),
        line(place.x, place.y, place.x + place.width, place.y, { class: "hair" }),
        text(place.x - 5, base + 4, "0", { "text-anchor": "end", class: "quiet" }),
        text(place.x - 5, place.y + 5, told(top / 1.05, name), { "text-anchor": "end", class: "quiet" }),
        text(place.x, base + 18, told(place.low), steps),
        text(place.x + place.width, base + 18, told(place.high), { ...steps, "text-anchor": "end" }),
        drawn.map((run) => curve(run, name, place, top, at)),
        value ? line(hair, place.y, hair, base, { class: "border" }) : null,
      ];
    }

    function draw(values, width) {
      const now = chosen(values);
      const names = Object.keys(BOARD).filter((name) =>
        now.drawn.some(({ curves }) => curves[name]?.length),
      );
      const columns = width >= 760 ? 3 : width >= 480 ? 2 : 1;
      const size = width / columns;
      const starts = now.drawn.flatMap(({ curves }) => Object.values(curves).map((p) => p[0]?.[0] ?? 1));
      const low = starts.length ? Math.min(...starts) : 0;
      const high = Math.max(low, ...now.drawn.map(lastStep));
      places = names.map((name, i) => ({
        name,
        low,
        high,
        x: (i % columns) * size + PANEL.left,
        y: Math.floor(i / columns) * HEIGHT + PANEL.top,
        width: size - PANEL.left - PANEL.right,
      }));
      const shapes = places.map((place) => panel(place.name, place, now));
      if (!names.length) {
        shapes.push(
          rect(0, 0, width, 90, { class: "empty" }),
          text(width / 2, 50, "No update yet", { "text-anchor": "middle", class: "quiet" }),
        );
      }
      under(values, now);
      const height = names.length ? Math.ceil(names.length / columns) * HEIGHT : 90;
      return { shapes, height, caption: inWords(now, names) };
    }

    function inWords({ one, read, last }, names) {
      if (!names.length) return "Curves appear after the first update.";
      const said = names.map((name) => `${BOARD[name]} ${told(nearest(one.curves[name], read)?.[1], name)}`);
      return `${one.name ? `${one.name}, ` : ""}update ${thousands(read)} of ${thousands(last)}: ${said.join("; ")}.`;
    }

    function detail(values) {
      if (!pointed) return null;
      const said = chosen(values).drawn.map(({ name, curves }) => {
        const point = nearest(curves[pointed.name], pointed.step);
        return `${name || "this run"} ${told(point?.[1], pointed.name)} (update ${point?.[0] ?? "–"})`;
      });
      return `${BOARD[pointed.name]} near update ${pointed.step}: ${said.join("; ")}.`;
    }

    // ------------------------------------------------------------ what was written

    /** A text as it was written; a long one scrolls, by keys too. */
    const box = (label, words) =>
      node("pre", { tabindex: 0, role: "group", "aria-label": label }, words || "(nothing)");

    /** A text that opens: its end stands in the line, for the answer is there. */
    function written(head, words) {
      const end = words.replace(/\s+/g, " ").trim().slice(-60);
      return node(
        "details",
        {},
        node("summary", {}, node("b", {}, head), ` … ${end}`),
        box(head, words),
      );
    }

    function sampleHead({ rewards, advantage }) {
      const said = Object.entries(rewards ?? {}).map(([name, value]) => `${name} ${told(value)}`);
      if (typeof advantage === "number") said.push(`advantage ${told(advantage)}`);
      return said.join(", ") || "completion";
    }

    function completions({ one, read }) {
      const samples = one.samples ?? [];
      const steps = [...new Set(samples.map(({ step }) => step))];
      const step = steps.filter((it) => it <= read).at(-1) ?? steps[0];
      if (step === undefined) return [];
      const own = samples.filter((sample) => sample.step === step);
      const asked = ({ prompt, pictures }) => JSON.stringify([prompt, pictures]);
      const prompts = new Map(own.map((sample) => [asked(sample), sample]));
      const stored = steps.length > 1 ? ` (kept of updates ${steps.join(", ")})` : "";
      return [
        node("p", { class: "head" }, `${plural(own.length, "completion")} of update ${step}${stored}`),
        [...prompts].map(([key, { prompt, pictures = [] }]) => [
          node("p", { class: "prompt" }, pictures.map((src) => node("img", { src, alt: "" })), prompt),
          own.filter((sample) => asked(sample) === key)
            .map((sample) => written(sampleHead(sample), sample.completion)),
        ]),
      ];
    }

    function pairParts(pair) {
      if (!pair) return [];
      const { answer } = pair;
      return [
        node("p", { class: "prompt" }, pair.prompt, answer ? node("b", {}, ` The answer is ${answer}.`) : null),
        node(
          "div",
          { class: "two" },
          ["before", "after"].map((side) =>
            node(
              "div",
              {},
              node("p", { class: "head" }, `${side} training`),
              side === "after" && pair.promptAfter ? node("p", { class: "prompt" }, pair.promptAfter) : null,
              box(`${side} training`, pair[side]),
            ),
          ),
        ),
      ];
    }

    const own = {
      status: node("p", { class: "grpo-status", "aria-live": "polite" }),
      hints: node("ul", { class: "hints" }),
      legend: node("ul", { class: "legend" }),
      result: node("p", { class: "result" }),
      pair: node("div", { class: "pair" }),
      samples: node("div", { class: "samples" }),
    };

    /** Fill a part if what it shows has changed. */
    function fill(name, key, make) {
      const now = JSON.stringify(key);
      if (shown[name] === now) return;
      shown[name] = now;
      own[name].replaceChildren(...[make()].flat(Infinity).filter((part) => part !== null));
    }

    function swatch(i) {
      const patch = node("svg:svg", { width: 26, height: 12, "aria-hidden": "true" });
      patch.append(node("svg:path", { d: "M1 6h24", class: `run ${KINDS[i % KINDS.length]}` }));
      return patch;
    }

    /** The parts under the picture, and the buttons of a live run. */
    function under(values, now) {
      const { state, runs, order } = values;
      const { one, drawn, read } = now;
      const pairs = pairsOf(one);
      const pair = clamp(values.pair, 0, Math.max(pairs.length - 1, 0));
      const live = Boolean(state.status);
      fill("status", [state.status, state.line], () =>
        live ? [node("b", {}, state.status), state.line ? ` · ${state.line}` : ""] : [],
      );
      fill("hints", state.hints ?? [], () => (state.hints ?? []).map((hint) => node("li", {}, hint)));
      fill("legend", drawn.map(({ name, i }) => [name, i]), () =>
        drawn.length > 1 ? drawn.map(({ name, i }) => node("li", {}, swatch(i), name)) : [],
      );
      fill("result", resultOf(one), () => resultOf(one));
      fill("pair", [pair, one.name, pairs[pair]], () => pairParts(pairs[pair]));
      fill("samples", [one.name, (one.samples ?? []).filter((s) => s.step <= read).length, one.samples], () =>
        completions(now),
      );
      controls.run.element.hidden = runs.length < 2;
      controls.compare.element.hidden = runs.length < 2;
      controls.pair.element.hidden = pairs.length < 2;
      pause.hidden = stop.hidden = !live;
      choose.hidden = live;
      pause.textContent = order === "pause" ? "Resume" : "Pause";
      pause.disabled = stop.disabled = !state.steered || order === "stop";
    }

    // ------------------------------------------------------------ controls

    // a message where there is a kernel: its thread may set the trait at the same moment
    const say = (order) => (model.send ? model.send({ order }) : change(model, { order }));
    const pause = button(
      "Pause",
      () => say(model.get("order") === "pause" ? "go" : "pause"),
      { class: "grpo-pause", title: "wait after the update that is being computed" },
    );
    const stop = button("Stop", () => say("stop"), {
      class: "grpo-stop",
      title: "end after the update that is being computed, with a checkpoint to go on from",
    });
    const file = node("input", { type: "file", accept: ".json,.jsonl", hidden: true, "aria-label": "a log of yours", onchange: read });
    const choose = button("Read a log of yours", () => file.click(), {
      class: "grpo-read",
      title: "log.jsonl or trainer_state.json; it stays in this browser",
    });

    async function read() {
      const [given] = file.files;
      if (!given) return;
      try {
        const run = readLog(await given.text(), given.name);
        const runs = [...model.get("runs"), run];
        change(model, { runs, run: runs.length - 1, step: 0 });
      } catch (error) {
        own.status.textContent = `${given.name} cannot be read: ${error.message}`;
        shown.status = null;
      }
      file.value = "";
    }

    /** A slider whose end follows the values. */
    function upTo(name, most, options) {
      const control = slider(model, name, { min: 0, max: 0, ...options });
      const { follow } = control;
      control.follow = (values) => {
        control.input.max = most(values);
        follow(values);
      };
      return control;
    }
    const controls = {
      run: upTo("run", ({ runs }) => Math.max(runs.length - 1, 0), {
        format: (i) => model.get("runs")[i]?.name ?? "",
        write: (run) => ({ run, step: 0, pair: 0 }),
      }),
      step: upTo("step", (values) => Math.max(chosen(values).last, 1), {
        label: "update",
        min: 1,
        max: 1,
        format: thousands,
        read: (values) => chosen(values).read,
        write: (step) => ({ step: step >= chosen(valuesNow()).last ? 0 : step }),
      }),
      pair: upTo("pair", (values) => Math.max(pairsOf(chosen(values).one).length - 1, 0), {
        label: "before and after",
        format: (i) => pairsOf(chosen(valuesNow()).one)[i]?.title ?? "",
      }),
      compare: tick(model, "compare", { label: "draw the other runs too" }),
    };
    const valuesNow = () =>
      Object.fromEntries(Object.keys(defaults).map((name) => [name, model.get(name)]));

    function stepAt(x, y) {
      if (x === null) return null;
      const inside = (p) => x >= p.x - 8 && x <= p.x + p.width + 8 && y >= p.y - 40 && y <= p.y + PANEL.height + 24;
      const place = places.find(inside);
      if (!place) return null;
      const share = clamp((x - place.x) / place.width, 0, 1);
      return { name: place.name, step: Math.round(place.low + share * (place.high - place.low)) };
    }

    function go(step) {
      const { last } = chosen(valuesNow());
      const to = clamp(step, 1, Math.max(last, 1));
      change(model, { step: to >= last ? 0 : to });
    }

    function key(event) {
      const { read, last } = chosen(valuesNow());
      const moves = {
        ArrowRight: read + 1,
        ArrowLeft: read - 1,
        PageUp: read + 10,
        PageDown: read - 10,
        Home: 1,
        End: last,
      };
      if (!(event.key in moves)) return false;
      go(moves[event.key]);
      return true;
    }

    view = frame(model, el, {
      name: "dashboard",
      label: "Runs: their curves, their completions, and what they won and lost",
      defaults,
      controls: Object.values(controls),
      extra: [pause, stop, own.status, choose, file],
      hint: "Press or drag in a curve to read another update, or press Tab and the arrow keys.",
      draw,
      detail,
      key,
      press: (x, y) => stepAt(x, y) && ((toX, toY) => {
        const place = stepAt(toX, toY) ?? null;
        if (place) go(place.step);
      }),
      move: (x, y) => {
        const now = stepAt(x, y);
        const other = JSON.stringify(now) !== JSON.stringify(pointed);
        pointed = now;
        return other;
      },
      below: [own.result, controls.pair.element, own.pair, own.samples],
      task: {
        words: ({ task }) => task.words ?? "",
        done: (values) => taskDone(values) && (values.task.done ?? "That is it."),
      },
    });
    const root = el.lastElementChild;
    root.querySelector(".picture").after(own.legend, own.hints);
    return view.leave;
  },
};
