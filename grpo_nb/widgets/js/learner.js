// A small policy learns by GRPO while one watches: six boxes that fill, its curve, and what moves
// it. The weights are kept here; each step is made in a worker, which may be ended if it hangs.

import { range, thinned } from "./arithmetic.js";
import { button, clamp, line, menu, node, rect, signed, slider, text, within } from "./kit.js";
import { startWeights } from "./learner_start.js";
import { PROMPTS, REWARDS, learn } from "./learner_step.js";
import { PARAMETERS, grpoLoss, policyOf } from "./policy.js";

const RATES = [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1];
const BETAS = [0, 0.02, 0.05, 0.1, 0.2, 0.5, 1];
const CLIPS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1];
const HEATS = [0.5, 0.7, 1, 1.3, 1.6, 2];
const LISTS = { rate: RATES, beta: BETAS, clip: CLIPS, temperature: HEATS };
export const defaults = {
  seed: 1,
  group: 8,
  rate: 0.002,
  clip: 0.2,
  beta: 0,
  temperature: 1,
  reward: "sorted",
};

const BEAT = 160; // ms from step to step, so that the eye can follow
const LIMIT = 8000; // ms that a step may take, on a busy phone too: then the reward hangs
const WATCHED = 150; // steps after which a run that nobody started ends
const LEAD =
  `Given four letters, a policy of ${PARAMETERS.toLocaleString("en-US")} numbers writes four ` +
  "letters. Nobody shows it how to sort: a program scores what it wrote. That is GRPO.";
const OWN =
  "Lines of JavaScript that return a number for prompt and answer, such as “dbca” and “abcd”. " +
  `They run in a worker; a step that takes longer than ${LIMIT / 1000} seconds is ended.`;
const NEW =
  "Other pages run a trained model (Transformer Explainer) or train one on text (Sequence Toy); " +
  "here a policy learns over tokens from rewards that you can rewrite, by GRPO, with every " +
  "number of an update in sight and held to a library’s by tests.";
const percent = (x) => `${(100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0)} %`;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const mean = (values) => values.reduce((total, x) => total + x, 0) / values.length;

export const inQuery = true; // links of old have the settings there
export function legal(name, value) {
  if (name === "reward") return Object.hasOwn(REWARDS, value);
  if (name === "seed") return within(value, [1, 100]);
  return LISTS[name]?.includes(value) ?? within(value, [2, 16]);
}

/** What a step says, in one line. `trail`: reward and share sorted of each step so far; `spread`: how
 * far apart two answers were paid; `paid`: the preset that pays, or null for a reward of one's own. */
function inWords(report, shown, trail, best, spread, paid) {
  const { alike, group } = report;
  const idle = alike.filter(Boolean).length;
  const fell = best - mean(trail.slice(-3).map((h) => h.reward));
  if (!Number.isFinite(report.norm)) {
    return (
      "The gradient is no finite number: this update is left out. " +
      "Lower the rate or beta, then go back to the best weights."
    );
  }
  if (spread > 0 && fell > 0.4 * spread) {
    const why = idle > PROMPTS / 2 ? "The answers of a group are alike: nothing to learn. " : "";
    return (
      `${why}The reward fell from ${best.toFixed(2)} to ${report.reward.toFixed(2)}, ` +
      "as it does when steps are too large. Lower the rate, then go back to the best weights."
    );
  }
  if (paid && paid !== "sorted" && report.reward > 0.85 && report.sorted < 0.3) {
    return (
      `The reward is ${report.reward.toFixed(2)}, and ${percent(report.sorted)} of the answers ` +
      "are sorted: the policy learnt what is paid, not what was meant."
    );
  }
  if (idle === PROMPTS) return "Every answer of every group is alike: nothing to learn.";
  if (alike[shown]) {
    return (
      "Every answer of this group is alike, or paid alike: nothing to learn. " +
      `So it is in ${idle} of ${PROMPTS} groups.`
    );
  }
  if (report.silent > 0.25) {
    return `The clip holds back ${percent(report.silent)} of the letters: they moved far enough.`;
  }
  const own = range(group).map((g) => shown * group + g);
  const top = own.reduce((a, b) => (report.advantages[b] > report.advantages[a] ? b : a));
  const { before, after } = report.chance;
  const moved = after[top] >= before[top] ? "more likely" : "less likely all the same";
  return (
    `“${report.written[top]}” is better than its group and becomes ${moved}: ` +
    `${percent(before[top])}, then ${percent(after[top])}.`
  );
}

const addressOf = (code) => URL.createObjectURL(new Blob([code], { type: "text/javascript" }));

/** A module and what it imports, fetched once: an address that needs no network any more. */
async function held(name) {
  let code = await (await fetch(new URL(name, import.meta.url))).text();
  for (const [words, other] of [...code.matchAll(/from "\.\/(\w+\.js)"/g)]) {
    code = code.replaceAll(words, `from "${await held(other)}"`);
  }
  return addressOf(code);
}

/** Where the worker's code is, and of which kind: in a page of one file, or in a module. */
async function workerCode() {
  const source = document.getElementById("learner-worker")?.textContent;
  if (source) return [addressOf(source), "classic"];
  const name = "learner_worker.js";
  return [await held(name).catch(() => new URL(name, import.meta.url)), "module"];
}

/** A worker that makes steps, one at a time: {step, end}. */
function stepper(start, [address, type]) {
  const worker = new Worker(address, { type });
  let leave = null;
  const left = new Promise((resolve) => (leave = resolve)); // {ended} of a worker that was ended
  const said = (isIt) =>
    new Promise((resolve) =>
      worker.addEventListener("message", function hear({ data }) {
        if (!isIt(data)) return; // a reward may post what it likes
        worker.removeEventListener("message", hear);
        resolve(data);
      }),
    );
  const failed = new Promise((resolve) => {
    worker.onerror = (event) => {
      event.preventDefault(); // a timer of the reward; or the worker has no code
      resolve({ ended: true, problem: event.message || "its worker did not start." });
    };
  });
  const ready = Promise.race([said((data) => data?.ready), failed, left]);
  worker.postMessage({ start });
  let id = 0;
  /** {policy, report}, or {problem}: a sentence; {ended} of a worker that is of no use any more. */
  async function step(policy, settings) {
    const began = await ready;
    if (began.ended) return began;
    id += 1;
    const mine = id;
    const answer = said((data) => data?.id === mine);
    worker.postMessage({ id, policy, settings });
    let over = false;
    async function late() {
      // beat by beat: where the page waits for a busy or sleeping machine too, more is allowed
      for (let waited = 0; waited < LIMIT && !over; waited += BEAT) await sleep(BEAT);
    }
    const data = await Promise.race([answer, late(), left]);
    over = true;
    if (data) return data;
    return {
      ended: true,
      problem:
        `it took longer than ${LIMIT / 1000} seconds and was ended. ` +
        "Look for a loop that does not end, or for a change of `self`.",
    };
  }
  function end() {
    worker.terminate();
    leave({ ended: true });
  }
  return { step, end };
}

// ---------------------------------------------------------------- the boxes

/** A word whose letters are tinted by an advantage. */
function word(letters, advantage) {
  const kind = advantage > 0 ? "up" : advantage < 0 ? "down" : "none";
  const share = Math.round(45 * Math.min(1, Math.abs(advantage) / 2));
  const style = `--tint: ${share}%`;
  return node(
    "span",
    { class: "word" },
    [...letters].map((letter) => node("span", { class: `letter ${kind}`, style }, letter)),
  );
}

/** A number and a bar from zero to it, within the ends of a scale. */
function bar(value, [low, high], words) {
  const at = (x) => (100 * (clamp(x, low, high) - low)) / (high - low || 1);
  const [from, to] = [Math.min(at(0), at(value)), Math.max(at(0), at(value))];
  const kind = value < 0 ? "down" : "up";
  return [
    node("span", { class: "track", "aria-hidden": "true" },
      node("span", { class: `fill ${kind}`, style: `left:${from}%;width:${to - from}%` })),
    node("span", { class: "number" }, words),
  ];
}

function box(name, title, words) {
  const body = node("div", { class: "inside" });
  const element = node(
    "div",
    { class: `box ${name}`, role: "group", "aria-label": title },
    node("h4", {}, title),
    body,
    node("p", { class: "note" }, words),
  );
  return { element, fill: (...parts) => body.replaceChildren(...parts.flat()) };
}

/** A curve for each name, and a line where a setting was moved. */
function curve(picture, names, trail, events, width) {
  const [left, top, height] = [34, 20, 96];
  const room = width - left - 6;
  const drawn = names.map((name) => thinned(trail.map((h, i) => [i, h[name]]), 300));
  const all = drawn.flat().map(([, value]) => value);
  const [low, high] = [Math.min(0, ...all), Math.max(1, ...all)];
  const x = (i) => left + (room * i) / Math.max(59, trail.length - 1);
  const y = (value) => top + height * (1 - (value - low) / (high - low));
  const end = { "text-anchor": "end", class: "small quiet" };
  const label = (value) => text(left - 4, y(value) + 4, String(Number(value.toPrecision(2))), end);
  const last = events.at(-1);
  const shapes = [
    ...[low, high].map((value) => line(left, y(value), left + room, y(value), { class: "hair" })),
    ...[low, high].map(label),
    ...events.map(({ at }) => line(x(at), top, x(at), top + height, { class: "hair" })),
    text(left + room, top + height + 16, `update ${trail.length}`, end),
  ];
  if (last) {
    const side = x(last.at) > width / 2 ? "end" : "start";
    shapes.push(text(x(last.at), top - 4, last.words, { "text-anchor": side, class: "small" }));
  }
  names.forEach((name, n) => {
    const kind = name === "reward" ? "up" : "down";
    const points = drawn[n].map(([i, value]) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
    shapes.push(node("svg:polyline", { points: points.join(" "), class: `curve ${kind}` }));
  });
  picture.setAttribute("width", width);
  picture.setAttribute("height", top + height + 22);
  picture.replaceChildren(...shapes);
}

// ---------------------------------------------------------------- the page

export default {
  render({ model, el }) {
    const names = Object.keys(defaults);
    const settings = () => Object.fromEntries(names.map((name) => [name, model.get(name)]));
    const start = startWeights();
    let [policy, best, trail, events, report, spread] = [];
    let chosen = null; // the prompt whose group is shown; null: the first that teaches something
    let [running, busy] = [false, false];
    let runs = 0; // how often a run was begun: of two loops only the later one goes on
    let code = REWARDS[model.get("reward")][1]; // the reward that pays
    let alone = true; // nobody has pressed a button yet
    let waiting = !matchMedia("(prefers-reduced-motion: reduce)").matches; // to be seen
    const where = workerCode(); // fetched now: later there may be no network
    let worker = null;
    let turn = 0; // what a step of an earlier turn brings is dropped

    const boxes = {
      prompts: box("prompts", "1 prompts", "letters to sort; each is answered by a group"),
      completions: box("completions", "2 completions", "tinted by advantage"),
      rewards: box("rewards", "3 rewards", "from a program"),
      advantages: box("advantages", "4 advantages", "against the group"),
      loss: box("loss", "5 loss", "its slope moves the weights"),
      update: box("update", "6 update", "how likely an answer was, and is"),
    };
    const status = node("p", { class: "caption", role: "status" });
    const figures = node("p", { class: "figures" });
    const picture = node("svg:svg", { role: "img", "aria-label": "the reward by update" });
    const place = node("div", { class: "picture" }, picture);
    const problem = node("p", { class: "problem", role: "alert", hidden: true });

    // -------------------------------------------------------------- the run

    function begin() {
      turn += 1;
      policy = policyOf(start);
      best = { reward: -Infinity, policy };
      [trail, events, report, spread] = [[], [], null, 0];
      draw();
    }

    function goBack() {
      turn += 1;
      policy = best.policy;
      mark("best", "best weights");
    }

    /** Note under the curve that a setting was moved. */
    function mark(name, words) {
      const last = events.at(-1);
      if (last?.name === name && last.at === trail.length) events.pop();
      if (trail.length) events.push({ name, words, at: trail.length });
      draw();
    }

    /** Pay by what is written now, in a fresh worker: the other reward may have spoilt it, or hang. */
    function takeReward() {
      if (code === written.value) return;
      code = written.value;
      turn += 1;
      worker?.end();
      worker = null;
      best = { reward: -Infinity, policy };
      spread = 0; // another scale
      problem.hidden = true;
      mark("reward", "another reward");
    }

    async function advance() {
      if (busy) return;
      busy = true;
      const mine = turn;
      const found = await where;
      worker ??= stepper(start, found);
      const own = worker;
      const told = await own.step(policy, { ...settings(), code });
      busy = false;
      if (told.ended) {
        own.end();
        if (worker === own) worker = null;
      }
      if (mine !== turn) return;
      if (!told.problem && !told.policy.weights.every(Number.isFinite)) {
        told.problem = "the weights would be no numbers any more.";
      }
      problem.hidden = !told.problem;
      if (told.problem) {
        pause();
        problem.textContent = `Nothing was learnt from this reward: ${told.problem}`;
        return;
      }
      ({ policy, report } = told);
      spread = Math.max(spread, Math.max(...report.rewards) - Math.min(...report.rewards));
      trail.push({ reward: report.reward, sorted: report.sorted });
      const lately = mean(trail.slice(-5).map((h) => h.reward));
      if (trail.length > 4 && lately > best.reward) best = { reward: lately, policy };
      draw();
    }

    async function run() {
      if (running) return;
      running = true;
      runs += 1;
      const mine = runs;
      play.textContent = "Pause";
      while (running && mine === runs) {
        const began = performance.now();
        await advance();
        if (alone && trail.length >= WATCHED) pause();
        const rest = Math.max(0, BEAT - (performance.now() - began));
        await sleep(rest);
      }
    }

    function pause() {
      running = false;
      play.textContent = "Run";
    }

    // -------------------------------------------------------------- the drawing

    const chips = range(PROMPTS).map((p) =>
      button("", () => {
        chosen = p;
        draw();
      }),
    );

    const gradientIn = ({ norm }) => {
      if (!Number.isFinite(norm)) return "gradient not finite: left out";
      return `gradient ${norm.toFixed(2)}${norm > 1 ? ", cut to 1" : ""}`;
    };

    const shownOf = ({ alike }) => chosen ?? Math.max(0, alike.indexOf(false));

    function fill(shown) {
      const { group, asked, written: answers, rewards, advantages, chance } = report;
      const own = range(group).map((g) => shown * group + g);
      chips.forEach((chip, p) => {
        chip.textContent = asked[p * group];
        chip.setAttribute("aria-pressed", String(p === shown));
        chip.classList.toggle("idle", report.alike[p]);
      });
      const reach = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
      const short = (x) => String(Number(x.toFixed(2))).replace("-", "−");
      const list = (item) => node("ul", {}, own.map((n) => node("li", {}, item(n))));
      if (!chips[0].isConnected) boxes.prompts.fill(chips); // once: one of them may have the focus
      boxes.completions.fill(list((n) => word(answers[n], advantages[n])));
      boxes.rewards.fill(list((n) => bar(rewards[n], reach, short(rewards[n]))));
      boxes.advantages.fill(
        list((n) => bar(advantages[n], [-2.5, 2.5], advantages[n] ? signed(advantages[n], 1) : "0")),
      );
      boxes.loss.fill(
        node("p", { class: "large" }, signed(report.loss, 3)),
        node("p", {}, `clipped: ${percent(report.silent)} of letters`),
        node("p", {}, `KL from the start: ${report.kl.toFixed(2)}`),
      );
      const likely = (n) => {
        const [was, is] = [chance.before[n], chance.after[n]].map(percent);
        return node("li", {}, word(answers[n], advantages[n]), `${was.replace(" %", "")} → ${is}`);
      };
      const order = own.toSorted((a, b) => advantages[b] - advantages[a]);
      const ends = report.alike[shown] ? order.slice(0, 1) : [order[0], order.at(-1)];
      boxes.update.fill(
        node("ul", {}, ends.map(likely)),
        node("p", {}, gradientIn(report)),
      );
    }

    /** Whether the reward is something else than being sorted. */
    const both = () => report && code !== REWARDS.sorted[1];
    /** The preset that pays; null for a reward of the reader's own. */
    const preset = () => Object.keys(REWARDS).find((name) => REWARDS[name][1] === code) ?? null;

    function draw() {
      controls.forEach((control) => control.follow(settings()));
      back.disabled = best.reward === -Infinity;
      if (report) fill(shownOf(report));
      else Object.values(boxes).forEach((one) => one.fill());
      const words = report
        ? inWords(report, shownOf(report), trail, best.reward, spread, preset())
        : "Press Run, or make one step: the boxes fill from 1 to 6.";
      status.setAttribute("aria-live", running ? "off" : "polite");
      if (status.textContent !== words) status.textContent = words;
      figures.replaceChildren(
        `update ${trail.length}`,
        node("span", { class: "up" }, `reward ${report ? report.reward.toFixed(2) : "–"}`),
        both() ? node("span", { class: "down" }, `sorted ${report.sorted.toFixed(2)}`) : "",
      );
      const names = both() ? ["sorted", "reward"] : ["reward"];
      curve(picture, names, trail, events, clamp(Math.floor(place.clientWidth || 600), 260, 976));
    }

    // -------------------------------------------------------------- what can be moved

    const touched = (act) => () => {
      alone = waiting = false;
      act();
    };
    const play = button("Run", touched(() => (running ? pause() : run())), { class: "play" });
    const once = button("One step", touched(() => (pause(), advance())));
    const back = button("Best weights", touched(goBack), { title: "go back to the best weights" });
    const copy = button("Copy a link", () => {
      navigator.clipboard?.writeText(model.link()).catch(() => {});
      copied.textContent =
        "The address of this page now holds the seed and the sliders." +
        (preset() ? "" : " Your own reward is not in it: send its lines too.");
    });
    const copied = node("p", { role: "status" }); // a run's own words change at each step
    const sliders = [
      slider(model, "group", { label: "group size", min: 2, max: 16 }),
      slider(model, "rate", { values: RATES }),
      slider(model, "clip", { values: CLIPS }),
      slider(model, "beta", { label: "beta: pull to the start", values: BETAS }),
      slider(model, "temperature", { values: HEATS }),
      slider(model, "seed", { label: "seed: begins anew", min: 1, max: 100 }),
    ];
    const presets = menu(model, "reward", {
      label: "begin with",
      options: Object.entries(REWARDS).map(([name, [words]]) => [name, words]),
    });
    const controls = [...sliders, presets];
    const written = node("textarea", {
      rows: 6,
      spellcheck: "false",
      "aria-label": "the reward: JavaScript, from prompt and answer to a number",
      onchange: takeReward,
    });
    const follow = {
      seed: begin,
      reward: () => {
        written.value = REWARDS[model.get("reward")][1];
        takeReward();
      },
    };
    const followed = names.map((name) => {
      const act = follow[name] ?? (() => mark(name, `${name} ${model.get(name)}`));
      model.on(`change:${name}`, act);
      return () => model.off(`change:${name}`, act);
    });
    written.value = code;

    const source = [learn, grpoLoss].map((f) => f.toString()).join("\n\n");
    const root = node(
      "section",
      { class: "grpo-widget grpo-learner-viz", "aria-label": "A policy that learns in the page" },
      node("p", { class: "opening" }, LEAD),
      node("div", { class: "buttons" }, play, once, button("Start over", touched(begin)), back),
      status,
      problem,
      node("div", { class: "boxes" }, Object.values(boxes).map((one) => one.element)),
      figures,
      place,
      node("div", { class: "controls" }, sliders.map((control) => control.element)),
      node(
        "details",
        {},
        node("summary", {}, "The reward: choose one, or write your own"),
        presets.element,
        node("p", {}, OWN),
        written,
      ),
      node(
        "details",
        {},
        node("summary", {}, "Show me the update"),
        node("pre", { tabindex: 0 }, source),
      ),
      node("div", { class: "buttons" }, copy),
      copied,
      node("p", { class: "note" }, NEW),
    );
    el.append(root);
    begin();
    const watch = new IntersectionObserver(([{ isIntersecting }]) => {
      if (isIntersecting && waiting) run();
      if (isIntersecting || running) waiting = !isIntersecting; // what ran goes on when it is back
      if (!isIntersecting) pause();
    });
    watch.observe(root);
    return () => {
      pause();
      watch.disconnect();
      followed.forEach((leave) => leave());
      worker?.end();
    };
  },
};
