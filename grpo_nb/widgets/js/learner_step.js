// The task of the learner, rewards for it, and one step of a run: letters are to be sorted.

import { groupAdvantages, range } from "./arithmetic.js";
import { LENGTH, LETTERS, adamw, backward, clipNorm, grpoLoss, randomOf, score } from "./policy.js";

export const PROMPTS = 16; // of a step
const PASSES = 2; // updates with the same answers: at the second one the clip has work to do

/** Functions of (prompt, answer), four letters each, as the page shows them. */
export const REWARDS = {
  sorted: ["1 if the answer is sorted", `return answer === [...prompt].sort().join("") ? 1 : 0;`],
  places: [
    "a quarter for each letter in its place",
    `const sorted = [...prompt].sort();
return [...answer].filter((letter, i) => letter === sorted[i]).length / 4;`,
  ],
  order: [
    "a third for each pair in order (it will be hacked)",
    `let pairs = 0;
for (let i = 1; i < 4; i++) if (answer[i - 1] <= answer[i]) pairs += 1;
return pairs / 3;`,
  ],
};

/** What was thrown or returned, in a few words, whatever it is. */
function wordsOfThing(thing) {
  try {
    return String(thing?.message || (typeof thing === "string" ? `"${thing}"` : thing)).slice(0, 200);
  } catch {
    return "something without words"; // an object that is no text either
  }
}

/** A reward from its code; what throws, or is no number, is refused with a sentence. */
export function rewardFrom(code) {
  let written = null;
  try {
    written = new Function("prompt", "answer", `"use strict"; ${code}`);
  } catch (error) {
    throw new Error(`it is no JavaScript: ${error.message}`);
  }
  return (prompt, answer) => {
    const asked = `for the prompt "${prompt}" and the answer "${answer}" it`;
    let reward = null;
    try {
      reward = written(prompt, answer);
    } catch (error) {
      throw new Error(`${asked} threw an error instead of returning a number: ${wordsOfThing(error)}`);
    }
    if (typeof reward === "boolean") return +reward;
    if (typeof reward === "number" && Math.abs(reward) <= 1e6) return reward;
    throw new Error(
      `${asked} returned ${wordsOfThing(reward)}, and no number up to a million; end it with a line ` +
        "such as: return answer === prompt ? 1 : 0;",
    );
  };
}

/** Groups of one prompt each: different letters in any order, (PROMPTS x group, LENGTH). */
export function drawPrompts(count, group, random) {
  const tokens = new Uint8Array(count * group * LENGTH);
  for (let p = 0; p < count; p++) {
    const letters = range(LETTERS.length);
    for (let t = 0; t < LENGTH; t++) {
      const i = t + Math.floor(random() * (letters.length - t));
      [letters[t], letters[i]] = [letters[i], letters[t]];
    }
    for (let g = 0; g < group; g++) tokens.set(letters.slice(0, LENGTH), (p * group + g) * LENGTH);
  }
  return tokens;
}

const wordsOf = (tokens) =>
  range(tokens.length / LENGTH).map((n) =>
    Array.from(tokens.subarray(n * LENGTH, (n + 1) * LENGTH), (v) => LETTERS[v]).join(""),
  );
const chances = (logps) =>
  range(logps.length / LENGTH).map((n) =>
    Math.exp(logps.subarray(n * LENGTH, (n + 1) * LENGTH).reduce((total, x) => total + x, 0)),
  );
const meanOf = (values) => values.reduce((total, x) => total + x, 0) / values.length;

/** One step of GRPO: write, score, compare, learn. `policy` changes; what happened is returned. */
export function learn(policy, start, settings, rewardOf, random) {
  const { group, rate, temperature } = settings;
  // 16 prompts, each as often as its group has answers; the policy writes one letter at a time
  const prompts = drawPrompts(PROMPTS, group, random);
  const answers = new Uint8Array(prompts.length);
  const old = score(policy.weights, prompts, answers, temperature, random).logps;
  // the reward of each answer, and its distance from the mean of its group
  const [asked, written] = [wordsOf(prompts), wordsOf(answers)];
  const rewards = written.map((answer, n) => rewardOf(asked[n], answer));
  const { values: advantages } = groupAdvantages(rewards, group);
  // every letter of a better answer becomes more likely, of a worse one less
  const ref = score(start, prompts, answers, temperature).logps;
  let [told, norm] = [null, 0];
  for (let pass = 0; pass < PASSES; pass++) {
    const now = score(policy.weights, prompts, answers, temperature);
    told = grpoLoss(now.logps, old, ref, advantages, settings);
    const gradient = backward(policy.weights, prompts, answers, temperature, now, told.slope);
    norm = clipNorm(gradient, 1);
    if (Number.isFinite(norm)) adamw(policy, gradient, rate); // else the update is left out
  }
  const after = score(policy.weights, prompts, answers, temperature).logps;
  const { loss, kl, silent } = told;
  const chance = { before: chances(old), after: chances(after) };
  return { asked, written, rewards, advantages, loss, kl, silent, norm, chance };
}

/** Whether the words of an answer are those of its prompt in order, whatever the reward. */
const isSorted = (prompt, answer) => answer === [...prompt].sort().join("");

/** The next step of a run with a seed, in figures for the page. */
export function stepOf(policy, start, settings) {
  const random = randomOf(settings.seed * 1_000_003 + policy.steps);
  const report = learn(policy, start, settings, rewardFrom(settings.code), random);
  const { group } = settings;
  const idle = (p) => report.advantages.slice(p * group, (p + 1) * group).every((a) => a === 0);
  return {
    ...report,
    group,
    reward: meanOf(report.rewards),
    sorted: meanOf(report.written.map((answer, n) => +isSorted(report.asked[n], answer))),
    alike: range(PROMPTS).map(idle),
  };
}
