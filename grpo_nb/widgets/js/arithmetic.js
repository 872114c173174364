// What the widgets compute, without a page: pure functions of plain values, in the words of
// grpo_nb/algorithm and grpo_nb/model, and held to them by tests/widgets/test_arithmetic.py.

const sum = (values) => values.reduce((total, value) => total + value, 0);
export const range = (count) => Array.from({ length: count }, (_, i) => i);

// ---------------------------------------------------------------- advantages

/** Distance of each reward from the mean of its list, that mean, and the deviation (ddof = 1). */
function centre(rewards) {
  const mean = sum(rewards) / rewards.length;
  const distance = rewards.map((reward) => reward - mean);
  const spread = Math.max(...distance) - Math.min(...distance);
  const rounding = 8 * Number.EPSILON * Math.max(...rewards.map(Math.abs));
  if (spread <= rounding) return { distance: distance.map(() => 0), mean, std: 0 };
  const squares = sum(distance.map((d) => d * d));
  return { distance, mean, std: Math.sqrt(squares / (rewards.length - 1)) };
}

/** `group_advantages` of one reward a completion: values (N), mean and std of each group (P). */
export function groupAdvantages(rewards, numGenerations, scale = "group", eps = 1e-4) {
  const groups = range(rewards.length / numGenerations).map((p) =>
    centre(rewards.slice(p * numGenerations, (p + 1) * numGenerations)),
  );
  const ofBatch = centre(rewards).std;
  const values = groups.flatMap(({ distance, std }) => {
    const divisor = { group: std + eps, batch: ofBatch + eps, none: 1 }[scale];
    return distance.map((d) => (d === 0 ? 0 : d / divisor));
  });
  return { values, mean: groups.map((g) => g.mean), std: groups.map((g) => g.std) };
}

// ---------------------------------------------------------------- the clipped objective

/** The formula of a token, by loss: a row of `LOSSES` in Python that is left out is not drawn. */
const FORMULAS = {
  grpo: clipped,
  bnpo: clipped,
  dr_grpo: clipped,
  dapo: clipped,
  luspo: clipped,
  cispo: cispo,
  sapo: sapo,
  vespo: vespo,
  reinforce: reinforce,
};
const READ = new Map([
  [clipped, ["epsilon", "epsilon_high", "delta"]],
  [cispo, ["epsilon_high"]],
]);
export const LOSSES = Object.keys(FORMULAS);
/** The settings that a loss reads. */
export const settingsRead = (lossType) => READ.get(FORMULAS[lossType]) ?? [];
/** Whether epsilon_high is the border itself, and not its distance from 1. */
export const caps = (lossType) => FORMULAS[lossType] === cispo;

function clipped(c, A, { epsilon, epsilon_high, delta }) {
  const [low, high] = [1 - epsilon, 1 + epsilon_high];
  const inside = Math.min(Math.max(c, low), high) * A;
  const free = (delta === null ? c : Math.min(c, delta)) * A;
  const pullInside = c >= low && c <= high ? c * A : 0;
  const pullFree = delta === null || c <= delta ? c * A : 0;
  if (free === inside) return [free, (pullFree + pullInside) / 2];
  return free < inside ? [free, pullFree] : [inside, pullInside];
}

function cispo(c, A, { epsilon_high }) {
  const weight = Math.min(c, epsilon_high) * A;
  return [weight * Math.log(c), weight];
}

function sapo(c, A) {
  const tau = A > 0 ? 1.0 : 1.05;
  const gate = 1 / (1 + Math.exp(-tau * (c - 1)));
  return [((4 * gate) / tau) * A, 4 * gate * (1 - gate) * c * A];
}

function vespo(c, A) {
  const [k, lambda] = A >= 0 ? [2, 3] : [3, 2];
  const logW = Math.min(Math.max(Math.log(c), Math.log(1e-8)), 20);
  const weight = Math.exp(lambda + k * logW - lambda * Math.exp(logW)) * A;
  return [weight * Math.log(c), weight];
}

function reinforce(c, A) {
  return [A * Math.log(c), A];
}

/** [minus the loss, minus its gradient with respect to log pi] of one token at the ratio c. */
export const clippingPoint = (c, A, lossType, settings) => FORMULAS[lossType](c, A, settings);

/** The borders that a formula has: name -> ratio. */
export function clippingBorders(lossType, { epsilon, epsilon_high, delta }) {
  if (caps(lossType)) return { epsilon_high };
  if (!settingsRead(lossType).length) return {};
  const borders = { epsilon: 1 - epsilon, epsilon_high: 1 + epsilon_high };
  return delta === null ? borders : { ...borders, delta };
}

const asFloat = (x) => (Number.isInteger(x) ? x.toFixed(1) : String(x));
const short = (x) => String(Number(x.toPrecision(6)));

/** To one decimal as Python rounds: halves to the even one. */
function tenth(x) {
  const half = Math.abs((4 * x) % 2) === 1; // x ends in .25 or .75: a tie that is exact
  return half ? Math.round(5 * x) / 5 : Number(x.toFixed(1));
}

/** What is legal and a doubt, as `check_loss_settings` says it: [{sentence, changes}]. */
export function clippingDoubts(lossType, { epsilon, epsilon_high, delta }) {
  const doubts = [];
  const clips = FORMULAS[lossType] === clipped;
  const larger = Math.max(epsilon, epsilon_high);
  const border = 1 + larger;
  if (clips && epsilon >= 1) {
    doubts.push({
      sentence:
        `epsilon is ${asFloat(epsilon)}, so the lower border 1 - epsilon is not above 0 and no ` +
        "ratio ever reaches it (a ratio is never negative).",
      changes: [{ epsilon: 0.2 }],
    });
  }
  if (clips && delta !== null && delta <= border) {
    const more = Math.max(1.5, tenth(1.3 + larger));
    doubts.push({
      sentence:
        `delta is ${asFloat(delta)}, not above 1 + epsilon = ${short(border)}: it then also cuts ` +
        `ratios that the ordinary clip allows. Choose more, e.g. ${short(more)}, or None.`,
      changes: [{ delta: more }, { delta: null }],
    });
  }
  if (caps(lossType) && epsilon_high < 1) {
    doubts.push({
      sentence:
        `epsilon_high is ${lossType}'s absolute cap of the ratio and is ${short(epsilon_high)}, ` +
        "below 1: every fresh token is weighed down. 5.0 is recommended.",
      changes: [{ epsilon_high: 5 }],
    });
  }
  return doubts;
}

// ---------------------------------------------------------------- batches

const gcd = (a, b) => (b ? gcd(b, a % b) : a);
const FACTORS = ["per_device_train_batch_size", "num_processes", "steps_per_generation"];
const product = (values) => values.reduce((total, value) => total * value, 1);

/** The nearest legal values of one setting, all others staying as they are. */
export function nearestLegal(settings, name) {
  const group = settings.num_generations;
  const others = product(FACTORS.filter((f) => f !== name).map((f) => settings[f]));
  const given = settings[name];
  if (name === "num_generations") {
    const divisors = range(others + 1).filter((d) => d > 1 && others % d === 0);
    const below = divisors.filter((d) => d <= given);
    return [...below.slice(-1), ...divisors.filter((d) => d > given).slice(0, 1)];
  }
  const unit = group / gcd(group, others);
  const below = Math.floor(given / unit) * unit;
  return [below, below + unit].filter((multiple) => multiple > 0);
}

/** null, or {sentence, changes}: why these settings cannot be laid out, and what could. */
export function batchProblem(settings) {
  const size = product(FACTORS.map((f) => settings[f]));
  if (size % settings.num_generations === 0) return null;
  const names = ["num_generations", ...FACTORS];
  const near = names.map((name) => [name, nearestLegal(settings, name)]);
  const able = near.filter(([, values]) => values.length);
  const changes = able.map(([name, values]) => `${name} to ${values.join(" or ")}`).join("; ");
  return {
    sentence:
      `The generation batch holds ${size} completions ` +
      `(${FACTORS.map((f) => `${f} ${settings[f]}`).join(" x ")}), which is not a multiple of ` +
      `num_generations ${settings.num_generations}, so a group would be cut. Change one setting ` +
      `to the nearest legal value: ${changes}.`,
    changes: able.flatMap(([name, values]) => values.map((value) => ({ [name]: value }))),
  };
}

/** The four numbers that follow from the six settings. */
export function batchSizes(s) {
  const step = s.per_device_train_batch_size * s.num_processes;
  return {
    generation_batch_size: step * s.steps_per_generation,
    prompts_per_generation: (step * s.steps_per_generation) / s.num_generations,
    effective_batch_size: step * s.gradient_accumulation_steps,
    optimizer_steps_per_generation:
      (s.steps_per_generation * s.num_iterations) / s.gradient_accumulation_steps,
  };
}

/** The random numbers of a torch.Generator on the CPU, 32 bits at a time. */
function generator(seed) {
  const state = new Uint32Array(624);
  state[0] = seed;
  for (let i = 1; i < 624; i++) {
    const last = state[i - 1] ^ (state[i - 1] >>> 30);
    state[i] = Math.imul(1812433253, last) + i;
  }
  return twister(state);
}

/** A Mersenne Twister that goes on from 624 numbers. */
export function twister(state) {
  let at = 624;
  function refill() {
    for (let i = 0; i < 624; i++) {
      const y = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
      state[i] = state[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    at = 0;
  }
  return () => {
    if (at === 624) refill();
    let y = state[at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  };
}

/** `random_order`: permutation number `turn` of a generator that was seeded once. */
export function randomOrder(length, turn, seed) {
  const next = generator(seed);
  let order;
  for (let t = 0; t <= turn; t++) {
    order = range(length);
    for (let i = 0; i < length - 1; i++) {
      const j = i + (next() % (length - i));
      [order[i], order[j]] = [order[j], order[i]];
    }
  }
  return order;
}

/** `BatchLayout.schedule`; of each completion its prompt and its place in the generation batch. */
export function schedule(settings, cycles = 2, shuffle = false, seed = 0) {
  const { per_device_train_batch_size: size, num_generations: group } = settings;
  const { prompts_per_generation: prompts } = batchSizes(settings);
  const perProcess = size * settings.steps_per_generation;
  const steps = settings.steps_per_generation * settings.num_iterations;
  const rows = shuffle ? randomOrder(cycles * prompts, 0, seed) : range(cycles * prompts);
  const result = [];
  for (let cycle = 0; cycle < cycles; cycle++) {
    const orders = range(settings.num_processes).map((process) =>
      shuffle ? randomOrder(perProcess, cycle, seed + process) : range(perProcess),
    );
    for (let step = 0; step < steps; step++) {
      const done = cycle * steps + step + 1;
      const update = done % settings.gradient_accumulation_steps === 0;
      const first = (step % settings.steps_per_generation) * size;
      orders.forEach((order, process) => {
        const places = order.slice(first, first + size).map((i) => process * perProcess + i);
        const drawn = places.map((place) => rows[cycle * prompts + Math.floor(place / group)]);
        result.push({ cycle, step, process, prompts: drawn, places, update });
      });
    }
  }
  return result;
}

// ---------------------------------------------------------------- masks

/** Row i of a mask: whether key j may be read, for keyCount keys. */
export function maskRow(query, keyCount, padding, window) {
  return range(keyCount).map(
    (key) => key >= padding && key <= query && (window === 0 || key > query - window),
  );
}

/** The right masks of all queries so far, and what the naive rule gave when each was computed. */
export function masks({ prompt_a, prompt_b, step, window }) {
  const longest = Math.max(prompt_a, prompt_b);
  const size = longest + step;
  const naive = range(size).map((query) => maskRow(query < longest ? query : 0, size, 0, window));
  return {
    size,
    first: step ? size - 1 : 0, // the first query of this step
    naive,
    right: [prompt_a, prompt_b].map((length) =>
      range(size).map((query) => maskRow(query, size, longest - length, window)),
    ),
  };
}

/** The keys of one query in words; they are neighbours in every mask. */
export function keysRead(row) {
  const keys = range(row.length).filter((key) => row[key]);
  if (!keys.length) return "reads nothing";
  if (keys.length === 1) return `reads key ${keys[0]} alone`;
  return `reads keys ${keys[0]} to ${keys.at(-1)} (${keys.length})`;
}

// ---------------------------------------------------------------- chunks

/** First sequence of each piece, and one past the last of the last. */
export function pieceEdges(batch, miniBatch) {
  const pieces = Math.min(miniBatch, batch);
  return range(pieces + 1).map((i) => Math.floor((batch * i) / pieces));
}

/** `chunk_rows`: [first row, one past the last] of each chunk of the flattened batch. */
export function chunkRows(batch, length, miniBatch, multiplier) {
  const edges = pieceEdges(batch, miniBatch).map((sequence) => sequence * length);
  return edges.slice(1).flatMap((stop, i) => {
    const rows = stop - edges[i];
    const count = Math.min(multiplier, rows);
    const at = (j) => edges[i] + Math.floor((rows * j) / count);
    return range(count).map((j) => [at(j), at(j + 1)]);
  });
}

/** Bytes of the three equations' logits, of all hidden states and of one piece's. */
export function chunkBytes(s) {
  const logits = (pieces, multiplier) =>
    Math.ceil((Math.ceil(s.batch / pieces) * s.length) / multiplier) * s.vocab * s.element_bytes;
  const states = (pieces) =>
    Math.ceil(s.batch / pieces) * s.length * s.hidden * s.element_bytes;
  return {
    all_logits: logits(1, 1),
    sequence_logits: logits(s.batch, 1),
    chunk_logits: logits(s.mini_batch, s.logit_chunk_multiplier),
    all_states: states(1),
    piece_states: states(s.mini_batch),
  };
}

// ---------------------------------------------------------------- transcripts

/** What a token adds to the clipped objective: its ratio, minus its loss and its pull; null for a
 * token that nobody drew, which has no sampler's log-prob. */
export function tokenTerms(policy, sampler, advantage, { epsilon, epsilon_high }) {
  if (sampler === null) return null;
  const ratio = Math.exp(policy - sampler);
  const borders = { epsilon, epsilon_high, delta: null };
  const [objective, pull] = clippingPoint(ratio, advantage, "dapo", borders);
  return { ratio, objective, pull };
}

// ---------------------------------------------------------------- the curves of a log

/** The mean of each value and those before it: grpo_nb/training/report.py. */
export function smoothed(values, window) {
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i - window + 1), i + 1);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
}

/** At most `most` points, each the mean of neighbours: grpo_nb/widgets/dashboard.py. */
export function thinned(points, most = 200) {
  const size = Math.ceil(points.length / most) || 1;
  const mean = (part, place) => part.reduce((sum, one) => sum + one[place], 0) / part.length;
  return range(Math.ceil(points.length / size)).map((i) => {
    const part = points.slice(i * size, (i + 1) * size);
    return [mean(part, 0), mean(part, 1)];
  });
}

// Names in a log, and what the board calls them.
export const BOARD = {
  reward: "reward",
  "completions/mean_length": "length, tokens",
  entropy: "entropy, nats a token",
  frac_reward_zero_std: "groups without spread",
  "sampling/gap_mean": "gap to the sampler, nats",
  reward_group_std: "spread in a group",
};

/** The curves of a log's records. */
export function curvesOf(records) {
  const found = Object.keys(BOARD).map((name) => {
    const told = records.filter((record) => typeof record[name] === "number");
    return [name, thinned(told.map((record) => [record.step, record[name]]))];
  });
  return Object.fromEntries(found.filter(([, points]) => points.length));
}

/** A file of a run as the board holds it: log.jsonl, trainer_state.json, or a dict with a `log`. */
export function readLog(words, name) {
  let held;
  try {
    held = JSON.parse(words);
  } catch {
    const lines = words.split("\n").filter((line) => line.trim());
    held = { log: lines.map((line) => JSON.parse(line)) };
  }
  const records = Array.isArray(held) ? held : (held.log_history ?? held.log ?? [held]);
  if (!Array.isArray(records)) throw new Error("it holds no log, log_history or lines of JSON");
  const curves = curvesOf(records);
  if (!Object.keys(curves).length) throw new Error("its records have none of the board's numbers");
  return { name, curves };
}
