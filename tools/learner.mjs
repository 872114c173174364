// The weights that the learner begins with: `node tools/learner.mjs > grpo_nb/widgets/js/learner_start.js`
// It is shown letters and answers that have the same letters in any order, one in ten by chance:
// so it knows what an answer looks like and nothing of sorting. Its update is the page's own.

import { LENGTH, LETTERS, PARAMETERS, SHAPES } from "../grpo_nb/widgets/js/policy.js";
import { adamw, backward, partsOf, policyOf, randomOf, score } from "../grpo_nb/widgets/js/policy.js";
import { drawPrompts } from "../grpo_nb/widgets/js/learner_step.js";

const [STEPS, COUNT, NOISE] = [1500, 256, 0.1];
const random = randomOf(1);
const normal = () =>
  Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
const first = new Float32Array(PARAMETERS);
const { embedding, mixing, head } = partsOf(first);
const inputs = SHAPES.mixing[0] * SHAPES.mixing[1];
for (const [part, size] of [[embedding, 1], [mixing, (2 / inputs) ** 0.5], [head, 128 ** -0.5]]) {
  part.forEach((_, i) => (part[i] = size * normal()));
}
const policy = policyOf(first);
for (let step = 0; step < STEPS; step++) {
  const prompts = drawPrompts(COUNT, 1, random);
  const answers = prompts.slice();
  for (let n = 0; n < COUNT; n++)
    for (let t = LENGTH - 1; t >= 0; t--) {
      const [i, j] = [n * LENGTH + t, n * LENGTH + Math.floor(random() * (t + 1))];
      [answers[i], answers[j]] = [answers[j], answers[i]];
      if (random() < NOISE) answers[i] = Math.floor(random() * LETTERS.length);
    }
  const now = score(policy.weights, prompts, answers, 1);
  const slope = new Float32Array(answers.length).fill(-1 / answers.length);
  const gradient = backward(policy.weights, prompts, answers, 1, now, slope);
  adamw(policy, gradient, 0.003 * (1 - step / STEPS) + 1e-4);
  if (step % 300 === 299) {
    const loss = -now.logps.reduce((total, x) => total + x, 0) / answers.length;
    console.error(`step ${step + 1}: ${loss.toFixed(3)} nats a letter`);
  }
}

const scales = {};
const bytes = new Int8Array(PARAMETERS); // one byte a number, one scale for each part
const stored = partsOf(bytes);
for (const [name, part] of Object.entries(partsOf(policy.weights))) {
  scales[name] = part.reduce((most, x) => Math.max(most, Math.abs(x)), 0) / 127;
  part.forEach((x, i) => (stored[name][i] = Math.round(x / scales[name])));
}
console.log(`// The weights that the learner begins with, made by tools/learner.mjs: it has seen answers with the
// letters of their prompts in any order, and nothing of sorting.

import { partsOf } from "./policy.js";

const SCALES = ${JSON.stringify(scales)};
const BYTES =
  "${Buffer.from(bytes.buffer).toString("base64")}";

/** (PARAMETERS) of one byte each and a scale for each part. */
export function startWeights() {
  const bytes = Int8Array.from(atob(BYTES), (x) => x.charCodeAt(0));
  const weights = Float32Array.from(bytes);
  for (const [name, part] of Object.entries(partsOf(weights))) {
    part.forEach((x, i) => (part[i] = x * SCALES[name]));
  }
  return weights;
}`);
