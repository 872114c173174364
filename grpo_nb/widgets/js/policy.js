// A small policy over letters and one update of it by GRPO, without a page: typed arrays and
// loops. tests/widgets/test_policy.py holds its values and gradients to the library's.

import { clippingPoint } from "./arithmetic.js";

export const LETTERS = "abcdefgh";
export const LENGTH = 4; // letters of a prompt, and of its answer
const V = LETTERS.length; // the token V says that nothing stands in a slot yet
const SLOTS = 2 * LENGTH - 1; // what the policy reads: the prompt, and what it has written so far
const [D, H] = [16, 128]; // numbers of a letter, and of a hidden row
export const SHAPES = { embedding: [V + 1, D], mixing: [SLOTS, D, H], bias: [H], head: [H, V] };
const sizeOf = (shape) => shape.reduce((total, n) => total * n, 1);
export const PARAMETERS = Object.values(SHAPES).reduce((total, s) => total + sizeOf(s), 0);

/** The parts of a flat array of parameters, by name, as views. */
export function partsOf(flat) {
  let at = 0;
  return Object.fromEntries(
    Object.entries(SHAPES).map(([name, s]) => [name, flat.subarray(at, (at += sizeOf(s)))]),
  );
}

/** Numbers from 0 up to 1 that a seed gives (mulberry32). */
export function randomOf(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** A policy with its optimizer's two averages, at the start of a run. */
export const policyOf = (weights) => ({
  weights: Float32Array.from(weights),
  mean: new Float32Array(weights.length),
  square: new Float32Array(weights.length),
  steps: 0,
});

/** Where the row of a token in a slot begins in a table (SLOTS, V + 1, H). */
const rowAt = (slot, token) => (slot * (V + 1) + token) * H;

/** What stands in slot s when letter t of an answer is written. */
const tokenAt = (prompt, answer, s, t) =>
  s < LENGTH ? prompt[s] : s - LENGTH < t ? answer[s - LENGTH] : V;

/** The hidden row of letter t: the prompt's tokens and the letters before t, looked up and added. */
function hiddenRow(weights, table, prompt, answer, t, hidden) {
  hidden.set(weights.bias);
  for (let s = 0; s < SLOTS; s++) {
    const at = rowAt(s, tokenAt(prompt, answer, s, t));
    for (let h = 0; h < H; h++) hidden[h] += table[at + h];
  }
  for (let h = 0; h < H; h++) if (hidden[h] < 0) hidden[h] = 0;
}

/** embedding times mixing, once for all: (SLOTS, V + 1, H). */
function tableOf({ embedding, mixing }) {
  const table = new Float32Array(SLOTS * (V + 1) * H);
  for (let s = 0; s < SLOTS; s++)
    for (let v = 0; v <= V; v++)
      for (let d = 0; d < D; d++) {
        const [x, to, from] = [embedding[v * D + d], rowAt(s, v), (s * D + d) * H];
        for (let h = 0; h < H; h++) table[to + h] += x * mixing[from + h];
      }
  return table;
}

/** Log-probs (V) of the next letter from a hidden row. */
function logSoftmax(head, hidden, temperature, logps) {
  logps.fill(0);
  for (let h = 0; h < H; h++) {
    if (hidden[h] === 0) continue;
    for (let v = 0; v < V; v++) logps[v] += (hidden[h] * head[h * V + v]) / temperature;
  }
  const top = Math.max(...logps);
  let total = 0;
  for (let v = 0; v < V; v++) total += Math.exp(logps[v] - top);
  for (let v = 0; v < V; v++) logps[v] -= top + Math.log(total);
}

/** Log-probs of answers, letter by letter (N, T), and what `backward` needs. With `random`, the
 * letters are drawn and written into `answers`. */
export function score(flat, prompts, answers, temperature, random = null) {
  const weights = partsOf(flat);
  const table = tableOf(weights);
  const count = answers.length;
  const hidden = new Float32Array(count * H);
  const all = new Float32Array(count * V);
  const logps = new Float32Array(count);
  for (let i = 0; i < count; i++) {
    const [n, t] = [Math.floor(i / LENGTH), i % LENGTH];
    const answer = answers.subarray(n * LENGTH, (n + 1) * LENGTH);
    const prompt = prompts.subarray(n * LENGTH, (n + 1) * LENGTH);
    const row = all.subarray(i * V, (i + 1) * V);
    const state = hidden.subarray(i * H, (i + 1) * H);
    hiddenRow(weights, table, prompt, answer, t, state);
    logSoftmax(weights.head, state, temperature, row);
    if (random) answer[t] = drawn(row, random());
    logps[i] = row[answer[t]];
  }
  return { logps, all, hidden };
}

/** The letter that a random number falls on. */
function drawn(logps, x) {
  for (let v = 0; v < V - 1; v++) if ((x -= Math.exp(logps[v])) < 0) return v;
  return V - 1;
}

/** The gradient of the parameters from the slope of the loss at each log-prob (N, T). */
export function backward(flat, prompts, answers, temperature, { all, hidden }, slope) {
  const weights = partsOf(flat);
  const gradient = new Float32Array(flat.length);
  const to = partsOf(gradient);
  const table = new Float32Array(SLOTS * (V + 1) * H); // the gradient of `tableOf`
  const pull = new Float32Array(H);
  for (let i = 0; i < answers.length; i++) {
    const [n, t] = [Math.floor(i / LENGTH), i % LENGTH];
    if (slope[i] === 0) continue;
    pull.fill(0);
    for (let v = 0; v < V; v++) {
      const own = v === answers[i] ? 1 : 0;
      const logit = (slope[i] * (own - Math.exp(all[i * V + v]))) / temperature;
      for (let h = 0; h < H; h++) {
        const state = hidden[i * H + h];
        if (state === 0) continue; // the hidden number is off
        to.head[h * V + v] += state * logit;
        pull[h] += weights.head[h * V + v] * logit;
      }
    }
    const answer = answers.subarray(n * LENGTH, (n + 1) * LENGTH);
    const prompt = prompts.subarray(n * LENGTH, (n + 1) * LENGTH);
    for (let h = 0; h < H; h++) to.bias[h] += pull[h];
    for (let s = 0; s < SLOTS; s++) {
      const at = rowAt(s, tokenAt(prompt, answer, s, t));
      for (let h = 0; h < H; h++) table[at + h] += pull[h];
    }
  }
  for (let s = 0; s < SLOTS; s++)
    for (let v = 0; v <= V; v++)
      for (let d = 0; d < D; d++) {
        const [at, m] = [rowAt(s, v), (s * D + d) * H];
        for (let h = 0; h < H; h++) {
          to.embedding[v * D + d] += table[at + h] * weights.mixing[m + h];
          to.mixing[m + h] += table[at + h] * weights.embedding[v * D + d];
        }
      }
  return gradient;
}

/** The loss of GRPO, and its slope at each log-prob. All are (N, T), advantages (N). */
export function grpoLoss(logps, old, ref, advantages, { clip, beta }) {
  const borders = { epsilon: clip, epsilon_high: clip, delta: null };
  const slope = new Float32Array(logps.length);
  let [loss, kl, silent] = [0, 0, 0];
  logps.forEach((logp, i) => {
    const A = advantages[Math.floor((i * advantages.length) / logps.length)];
    const [objective, pull] = clippingPoint(Math.exp(logp - old[i]), A, "dapo", borders);
    const d = ref[i] - logp;
    const k3 = Math.exp(d) - d - 1; // an estimate of the distance to the reference
    loss += (beta * k3 - objective) / logps.length;
    slope[i] = (beta * (1 - Math.exp(d)) - pull) / logps.length;
    kl += k3 / logps.length;
    silent += (A !== 0 && pull === 0) / logps.length;
  });
  return { loss, slope, kl, silent };
}

/** Make a gradient no longer than `most`; returns how long it was. */
export function clipNorm(gradient, most) {
  const norm = Math.sqrt(gradient.reduce((total, g) => total + g * g, 0));
  if (norm > most) gradient.forEach((g, i) => (gradient[i] = (g * most) / (norm + 1e-6)));
  return norm;
}

/** One step of AdamW without weight decay. */
export function adamw(policy, gradient, rate, [b1, b2] = [0.9, 0.999], eps = 1e-8) {
  const { weights, mean, square } = policy;
  const steps = ++policy.steps;
  const [m, s] = [1 - b1 ** steps, 1 - b2 ** steps];
  gradient.forEach((g, i) => {
    mean[i] = b1 * mean[i] + (1 - b1) * g;
    square[i] = b2 * square[i] + (1 - b2) * g * g;
    weights[i] -= (rate * (mean[i] / m)) / (Math.sqrt(square[i] / s) + eps);
  });
}
