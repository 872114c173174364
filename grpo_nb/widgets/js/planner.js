// What a GRPO step takes of a card, in the words of grpo_nb/model/memory_bytes.py, memory_fit.py and
// planning/plan.py, and held to them by tests/widgets/test_planner.py: pure functions of plain
// values. Of those it leaves out cards that share one model (fsdp) and cards that only draw.

import { CARDS, CONSTANTS, FAMILIES, REFUSED } from "./planner_data.js";

const { GiB, ALL, PARTS, limits } = CONSTANTS;
const add = (values) => values.reduce((total, value) => total + value, 0);
const addUp = (parts) => add(Object.values(parts));
const ceilOf = (a, b) => Math.ceil(a / b);
const floorOf = (a, b) => Math.floor(a / b);
const has = (list, word) => list.some((part) => word.includes(part));
const mapped = (record, f) =>
  Object.fromEntries(Object.entries(record).map(([key, value]) => [key, f(value, key)]));

// ---------------------------------------------------------------- models

const SHAPE = {
  experts: 0,
  experts_per_token: 1,
  windows: [],
  tied: false,
  sinks: false,
  qkv_bias: false,
  out_bias: false,
  mlp_bias: false,
  qk_norm: false,
  joined: false,
  norms: 2,
  max_positions: null,
  towers: 0,
  tower: null,
  counted: [],
  state: 0,
};

/** `ModelShape`: windows may be given as the few that go round through the layers. */
export function shapeOf(fields) {
  const shape = { ...SHAPE, ...fields };
  const { windows, layers } = shape;
  if (!windows.length) return shape;
  return { ...shape, windows: Array.from({ length: layers }, (_, i) => windows[i % windows.length]) };
}

/** A shape as `shapeOf` takes it: without what is usual, its windows as the few that go round. */
export function shortShape(shape) {
  const { windows } = shape;
  const round = windows.findIndex(
    (_, n) => n && windows.every((window, i) => window === windows[i % n]),
  );
  const short = { ...shape, windows: round > 0 ? windows.slice(0, round) : windows };
  const usual = ([key, value]) => JSON.stringify(value) === JSON.stringify(SHAPE[key]);
  return Object.fromEntries(Object.entries(short).filter((entry) => !usual(entry)));
}

/** `ModelShape.tensors`: kind -> [how many, rows, numbers in a row]. */
export function tensors(s) {
  const [H, inner, E, n] = [s.hidden, s.intermediate, s.experts, s.layers];
  const beside = s.towers ? { towers: [[1, s.towers, 1]] } : {};
  if (s.counted.length) {
    const counted = s.counted.map(([kind, numbers]) => {
      const [c, row] = kind === "embedding" || kind === "head" ? [1, H] : [n, 1];
      return [kind, [[c, floorOf(floorOf(numbers, c), row), row], [1, numbers % (c * row), 1]]];
    });
    return { ...beside, ...Object.fromEntries(counted) };
  }
  const [q, k] = [s.heads * s.head_dim, s.kv_heads * s.head_dim];
  const projections = s.joined ? [q + 2 * k] : [q, k, k];
  const wide = s.joined ? [[2 * inner, H]] : [[inner, H], [inner, H]];
  const biases = E ? [[E, 2 * inner], [E, H], [E, 1]] : [[inner, 1], [inner, 1], [H, 1]];
  const small = [
    ...Array(s.norms).fill([H, 1]),
    ...(s.qk_norm ? [[s.head_dim, 1], [s.head_dim, 1]] : []),
    ...(s.sinks ? [[s.heads, 1]] : []),
    ...(E ? [[E, H]] : []),
    ...(s.qkv_bias ? projections.map((rows) => [rows, 1]) : []),
    ...(s.out_bias ? [[H, 1]] : []),
    ...(s.mlp_bias ? biases : []),
  ];
  const inLayers = (sizes) => sizes.map((size) => [n, ...size]);
  const vocab = [[1, s.vocab, H]];
  return {
    embedding: vocab,
    head: s.tied ? [] : vocab,
    attention: inLayers([...projections.map((rows) => [rows, H]), [H, q]]),
    mlp: inLayers(E ? [[E, 2 * inner * H], [E, H * inner]] : [...wide, [H, inner]]),
    rest: [...inLayers(small), [1, H, 1]],
    ...beside,
  };
}

/** `Tower.matrices`: [from, to] of a layer's linear layers. */
function matricesOf({ hidden: H, intermediate: inner, gated, joined }) {
  const projections = joined ? [[H, 3 * H]] : Array(3).fill([H, H]);
  return [...projections, [H, H], ...Array(1 + gated).fill([H, inner]), [inner, H]];
}

/** `Tower.kept`: bytes of a patch that a layer which trains keeps. */
function towerKept({ hidden, intermediate, gated, joined }, element) {
  const norm = gated ? (element < 4 ? 8 : 12) : 2 * element;
  const wide = (2 + 2 * gated) * intermediate * element;
  return hidden * (2 * norm + (joined ? 7 : 4) * element) + wide;
}

/** `Tower.working`: the most bytes of a patch that a layer holds while it reads. */
function towerWorking({ hidden, intermediate, gated, joined }, element) {
  const wide = (2 + gated) * intermediate + (4 - gated) * hidden;
  return Math.max(wide * element, hidden * (30 - 4 * gated + 4 * element) * joined);
}

/** `picture_bytes`: [kept until the backward pass is through, the most at any time]. */
function pictureBytes(shape, tokens, element, trains, checkpointed) {
  const { tower } = shape;
  const [patches, width] = [tokens * tower.merged, tower.hidden * element];
  const pixels = patches * tower.numbers * element;
  const vectors = tokens * shape.hidden * element * (1 + tower.deep);
  if (!trains) return [0, pixels + patches * towerWorking(tower, element) + vectors];
  const one = towerKept(tower, element);
  const projectors = 3 * width * (1 + tower.deep);
  const kept = pixels + patches * (tower.layers * (checkpointed ? width : one) + projectors);
  const gradients = width + (2 + tower.gated) * tower.intermediate * element;
  const again = (one - 4 * width) * checkpointed; // the last projector is through, the input kept
  return [kept, kept + patches * (again + gradients)];
}

const numbersIn = (kinds) =>
  mapped(kinds, (sizes) => add(sizes.map(([count, rows, row]) => count * rows * row)));
/** `ModelShape.parameters`: kind -> numbers. */
export const parameters = (shape) => numbersIn(tensors(shape));

// ---------------------------------------------------------------- a dropped config.json

const plainName = (name) => name.toLowerCase().replaceAll("_", "");
const NO_FAMILY = {
  joined: false, head_norms: false, gemma: false, qkv_bias: false, full_every: null,
};
const familyOf = (kind) =>
  FAMILIES.find(({ name }) => plainName(kind).startsWith(plainName(name))) ?? NO_FAMILY;

function checkConfig(config, kind) {
  const missing = Object.keys(REFUSED.needed).filter((key) => !config[key]);
  if (missing.length) {
    throw new Error(
      `the configuration of ${kind} has no ${missing.join(", ")}: this arithmetic is ` +
        "for decoders of the Llama family and mixtures of experts like gpt-oss",
    );
  }
  for (const [key, why] of Object.entries(REFUSED.unlike)) {
    const empty = Array.isArray(config[key]) && !config[key].length;
    if (config[key] && !empty) {
      throw new Error(
        `the configuration of ${kind} has ${key}=${config[key]}: ${why}, which this ` +
          "arithmetic does not know",
      );
    }
  }
  if (REFUSED.plain_mlp.includes(kind)) {
    throw new Error(
      `a ${kind} has an MLP of two matrices, and this arithmetic knows three (gate, up, down)`,
    );
  }
  const recurrent = (key) => REFUSED.recurrent.some((start) => key.startsWith(start));
  const own = Object.keys(config).find((key) => config[key] && recurrent(key));
  if (own) {
    throw new Error(
      `${kind} has layers with a state of their own (${own}), and what their training keeps is ` +
        "counted by no formula here",
    );
  }
}

function windowsOf(config, layers, kind) {
  const window = config.sliding_window;
  const linear = ["linear_attention", "conv"];
  const kinds = config.layer_types ?? [];
  if (kinds.some((one) => linear.includes(one))) {
    return kinds.map((one) => (linear.includes(one) ? 0 : null));
  }
  if (!window || config.use_sliding_window === false) return [];
  if (kinds.length) return kinds.map((one) => (one.includes("sliding") ? window : null));
  const pattern = config.sliding_window_pattern || familyOf(kind).full_every;
  const every = kind === "gpt_oss" ? 2 : pattern;
  return Array.from({ length: layers }, (_, i) => (every && (i + 1) % every === 0 ? null : window));
}

function longestSequence(config) {
  const rope = config.rope_parameters || config.rope_scaling || {};
  const longest = config.max_position_embeddings || null;
  const alone = "rope_type" in rope || "type" in rope;
  for (const one of alone ? [rope] : Object.values(rope)) {
    if (typeof one !== "object" || one === null) continue;
    const kind = one.rope_type ?? one.type;
    if (!longest) break;
    if (kind === "dynamic") return longest;
    if (kind === "longrope" || kind === "su") {
      const name = "original_max_position_embeddings";
      return Math.min(longest, one[name] || config[name] || longest);
    }
  }
  const first = rope.original_max_position_embeddings || longest;
  const stretches = ["linear", "yarn"].includes(rope.rope_type ?? rope.type);
  if (!longest || first > longest || !stretches || !rope.factor) return longest;
  return Math.max(longest, Math.trunc(rope.factor * first));
}

/** `read_shape` of a config.json's text or object: {shape, doubts}; an Error with a sentence. */
export function readShape(given) {
  let whole;
  try {
    whole = typeof given === "string" ? JSON.parse(given) : given;
  } catch {
    throw new Error("this file is no JSON: drop a model's config.json");
  }
  if (typeof whole !== "object" || whole === null || Array.isArray(whole)) {
    throw new Error("this file holds no configuration: drop a model's config.json");
  }
  const config = { ...whole, ...whole.text_config };
  const kind = config.model_type || "a model";
  checkConfig(config, kind);
  const [oss, family] = [kind === "gpt_oss", familyOf(kind)];
  const sizes = Object.fromEntries(
    Object.entries(REFUSED.needed).map(([theirs, ours]) => [ours, config[theirs]]),
  );
  const experts = config.num_local_experts || config.num_experts || config.n_routed_experts || 0;
  const each = ["num_experts_per_tok", "experts_per_token", "top_k_experts"];
  const mixture = experts && {
    experts,
    experts_per_token: each.map((name) => config[name]).find(Boolean) ?? 1,
    intermediate: config.moe_intermediate_size || config.intermediate_size,
  };
  const bias = Boolean(config.attention_bias ?? oss);
  const named = String(config._name_or_path || "").split("/").filter(Boolean).at(-1);
  const shape = shapeOf({
    name: named || kind,
    ...sizes,
    ...(mixture || {}),
    kv_heads: config.num_key_value_heads || sizes.heads,
    head_dim: config.head_dim || floorOf(sizes.hidden, sizes.heads),
    windows: windowsOf(config, sizes.layers, kind),
    tied: Boolean(config.tie_word_embeddings ?? kind.startsWith("gemma")),
    sinks: oss,
    qkv_bias: bias || family.qkv_bias,
    out_bias: bias,
    mlp_bias: oss || Boolean(config.mlp_bias),
    qk_norm: family.head_norms,
    joined: family.joined,
    norms: family.gemma ? 4 : 2,
    max_positions: longestSequence(config),
  });
  const wrong = shapeProblem(shape);
  if (wrong) throw new Error(wrong);
  const doubts = [];
  if (!REFUSED.exact.includes(kind)) {
    doubts.push(
      `The numbers of a ${kind} are reckoned from its sizes; grpo-nb plan counts them in its class.`,
    );
  }
  if (whole.vision_config || whole.audio_config) {
    doubts.push("What sees or hears in it is not counted here; grpo-nb plan counts it.");
  }
  return { shape, doubts };
}

const COUNTS = ["layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"];
/** Why an object is no shape; null where it is one. */
export function shapeProblem(shape) {
  const whole = (value, least) => Number.isInteger(value) && value >= least && value < 2 ** 40;
  const wrong = COUNTS.find((name) => !whole(shape[name], 1));
  if (wrong) {
    return `${wrong} of ${shape.name} is ${shape[wrong]}, and it is a count: give a whole number ` +
      "of at least 1";
  }
  const others = ["experts", "experts_per_token", "norms", "towers", "state"];
  const lists = {
    windows: (one) => one === null || whole(one, 0),
    counted: (one) => Array.isArray(one) && one[0] in KINDS && whole(one[1], 0),
  };
  const { tower } = shape;
  const sizes = ["layers", "hidden", "intermediate", "numbers", "merged"];
  const sees = tower === null ||
    (typeof tower === "object" && sizes.every((name) => whole(tower[name], 1)) && whole(tower.deep, 0));
  const bad = (sees ? null : "tower") ?? others.find((name) => !whole(shape[name], 0)) ??
    (shape.layers > 4096 ? "layers" : null) ??
    Object.keys(lists).find((name) => !Array.isArray(shape[name]) || !shape[name].every(lists[name]));
  return bad ? `${bad} of ${shape.name} holds what is no count` : null;
}

// ---------------------------------------------------------------- weights and what trains

const isNf4 = (weights) => weights.includes("nf4");
const isMxfp4 = (weights) => weights.includes("mxfp4");
export const TRAINABLE = ["bf16", "fp16", "fp32"];

/** `weight_bits`: kind -> bits a number. */
export function weightBits(shape, weights, doubleQuant = false) {
  const bits = mapped(tensors(shape), () => (weights === "fp32" ? 32 : 16));
  if (isNf4(weights)) bits.attention = 4 + (doubleQuant ? 8 / 64 + 32 / (64 * 256) : 32 / 64);
  if (weights === "nf4" && !shape.experts) bits.mlp = bits.attention;
  if (isMxfp4(weights)) bits.mlp = 4 + 8 / 32;
  if (weights === "fp8") {
    bits.attention = bits.mlp = 8 + 32 / Math.min(shape.hidden, shape.intermediate);
  }
  return bits;
}

function weightBytes(shape, weights, doubleQuant = false) {
  const bits = weightBits(shape, weights, doubleQuant);
  return mapped(parameters(shape), (count, kind) => Math.trunc((count * bits[kind]) / 8));
}

function stateBytes(optim, weight = 4) {
  const size = CONSTANTS.STATES.find(([part]) => optim.includes(part))?.[1] ?? 8;
  return has(CONSTANTS.OWN_FORMAT, optim) ? size : floorOf(size * weight, 4);
}

function updateBytes(optim, kinds, weight) {
  if (has(CONSTANTS.IN_PLACE, optim)) return 0;
  if (optim.includes("adafactor")) {
    const sizes = Object.values(kinds).flat().map(([, n, row]) => n * row);
    return Math.max(0, ...sizes) * (weight === 4 ? 8 : 16);
  }
  return weight * addUp(numbersIn(kinds));
}

function trainedTensors(shape, r, targets, tower) {
  if (!r) {
    const { towers, ...others } = tensors(shape);
    return tower ? tensors(shape) : others;
  }
  const [H, inner] = [shape.hidden, shape.intermediate];
  const [q, k] = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim];
  const E = Math.max(shape.experts, 1);
  const up = shape.experts ? [[H, 2 * inner]] : [[H, inner], [H, inner]];
  const adapted = {
    attention: [[r, H, q], [r, H, k], [r, H, k], [r, q, H]],
    mlp: [...up, [inner, H]].map(([wide, out]) => [r * E, wide, out]),
  };
  const kinds = Object.keys(adapted).filter((kind) => targets.includes(kind));
  const pairs = (layers) => ([n, wide, out]) => [[layers, n, wide], [layers, out, n]];
  const found = Object.fromEntries(
    kinds.map((kind) => [kind, adapted[kind].flatMap(pairs(shape.layers))]),
  );
  if (!tower) return found;
  const sizes = matricesOf(shape.tower).map((one) => [r, ...one]);
  return { ...found, towers: sizes.flatMap(pairs(shape.tower.layers)) };
}

function kvBytes(shape, rows, context, element, { prompt = 0, group = 1, paged = true } = {}) {
  const token = 2 * shape.kv_heads * shape.head_dim * element;
  const windows = shape.windows.length ? shape.windows : Array(shape.layers).fill(null);
  const linear = windows.filter((window) => window === 0).length;
  const states = rows * linear * 4 * shape.state;
  if (!paged) return rows * context * token * (shape.layers - linear) + states;
  const shared = floorOf(prompt, limits.PAGE);
  const own = ceilOf(Math.max(context - 1, 1), limits.PAGE) - shared;
  const pages = 1 + ceilOf(rows, group) * shared + rows * own;
  const full = windows.filter((window) => window === null).length;
  return states + token * (full * pages * limits.PAGE + (rows + 1) * add(windows));
}

// ---------------------------------------------------------------- a layer

const perToken = (shape, element) => [
  shape.heads * shape.head_dim * element,
  shape.kv_heads * shape.head_dim * element,
];
const wideHead = (shape) => floorOf(shape.head_dim + 10, 8) * 8;
function onePass(shape, how) {
  if (how.implementation !== "ours" || shape.sinks) return how.implementation === "ours" && how.one_pass;
  const plain = how.element === 4 || how.autocast || how.all_weights;
  return !(plain || shape.experts || shape.joined || shape.norms > 2);
}
const normalised = (shape, how) => (shape.norms > 2 ? 4 : how.stream);
const behind = (shape, how) =>
  floorOf(shape.norms - 2, 2) * 4 * shape.hidden * (1 + how.all_weights);

function besideAttention(shape, how) {
  const H = shape.hidden * how.element;
  const [q, k] = perToken(shape, how.element);
  const [narrow, one] = [how.element < 4, onePass(shape, how)];
  const both = (shape.heads + shape.kv_heads) * shape.head_dim;
  let norm = narrow && !one ? 4 * shape.hidden : 0;
  norm += shape.qk_norm * both * (one ? how.element : 4);
  const own = narrow && (how.implementation === "transformers" || (shape.experts && !one));
  let adapters = how.targets.includes("attention") ? (own ? 3 * H + q : H) : 0;
  if (how.all_weights) norm += normalised(shape, how) * (shape.hidden + shape.qk_norm * both);
  if (how.autocast) [norm, adapters] = [norm - 4 * shape.hidden, 3 * H];
  norm += behind(shape, how);
  return [norm, adapters + shape.joined * (q + k)];
}

function widened(shape, how) {
  const [q, k] = perToken(shape, how.element);
  const wide = wideHead(shape) / shape.head_dim;
  return (
    Math.trunc((wide - 1) * 2 * (q + k)) +
    q * (how.element === 4 || !how.targets.includes("attention")) +
    Math.trunc(how.repeated * 2 * wide * (q - k))
  );
}

function attentionKept(shape, how) {
  const [q, k] = perToken(shape, how.element);
  const [norm, copies] = besideAttention(shape, how);
  if (how.kernel === "sink_heads") return norm + shape.hidden * how.element;
  let more = ["flex", "flash"].includes(how.kernel) ? q : 0;
  if (how.kernel === "sdpa" && shape.sinks) more = widened(shape, how);
  return norm + copies + 2 * q + 2 * k + 4 * shape.heads + more;
}

function attentionPeak(shape, how, length) {
  if (how.kernel === "sink_heads") return attentionKept(shape, how) + 4 * shape.hidden * how.element;
  const [q, k] = perToken(shape, how.element);
  const scores = shape.heads * length * (shape.sinks ? 4 * how.element : 12);
  const key = how.repeated ? CONSTANTS.SINK_KEY_REPEATED : CONSTANTS.SINK_KEY;
  const work = how.kernel === "sdpa" && shape.sinks ? key : CONSTANTS.QUERIES[how.kernel];
  const fixed = add(besideAttention(shape, how)) + 4 * shape.heads + 2 * q + 2 * k;
  return fixed + Math.trunc(work * q) + (how.kernel === "eager" ? scores : 0);
}

function attentionScratch(shape, element, tokens, kernel) {
  const G = floorOf(shape.heads, shape.kv_heads);
  if (kernel === "flash") {
    const one = G * shape.head_dim * (4 + 2 * element) * tokens;
    return Math.max(one, Math.min(shape.kv_heads * one, limits.GRADIENT_BYTES));
  }
  if (kernel !== "sdpa_lean" && kernel !== "sink_heads") return 0;
  const one = G * wideHead(shape) * element;
  const part = (n) =>
    Math.max(1, Math.min(shape.kv_heads, floorOf(limits.PART_BYTES, one * n))) * one * n;
  const turned = kernel === "sink_heads" ? 2 * part(3 * tokens) : 0;
  return floorOf(5 * part(3 * tokens) + turned, 2);
}

const inSlices = (how, tokens) => tokens > (how.slice_tokens || tokens);
const sliceOf = (how, tokens) => Math.min(tokens, how.slice_tokens || tokens);

function computedAgain(shape, how, tokens, checkpointed) {
  const lean = shape.experts && how.slice_tokens && how.implementation === "ours";
  return inSlices(how, tokens) || Boolean(lean && checkpointed);
}

const mlpNorm = (shape, how) =>
  onePass(shape, how) ? how.stream * shape.hidden : how.element < 4 ? 4 * shape.hidden : 0;

function mlpKept(shape, how, recompute = false) {
  const [H, inner] = [shape.hidden * how.element, shape.intermediate * how.element];
  const K = shape.experts_per_token;
  const theirs = how.implementation === "transformers";
  const adapters = how.targets.includes("mlp");
  let norm = mlpNorm(shape, how);
  if (how.all_weights && !how.autocast) norm += normalised(shape, how) * shape.hidden;
  norm += behind(shape, how);
  if (shape.experts) {
    return norm + H + 64 * K + (theirs ? 6 * K * inner + K * H : recompute ? 0 : 2 * K * inner);
  }
  if (recompute) return norm + H;
  const copies = (how.element < 4 && theirs) || how.autocast ? 2 * H : H;
  return norm + copies * adapters + (3 - onePass(shape, how) + adapters) * inner;
}

function densePeak(shape, how, tokens) {
  const [H, inner] = [shape.hidden * how.element, shape.intermediate * how.element];
  const [n, sliced] = [sliceOf(how, tokens), inSlices(how, tokens)];
  const norm = mlpNorm(shape, how);
  const again = sliced ? n * (mlpKept(shape, how) - norm) + tokens * H : 0;
  const casts = how.element < 4 && how.implementation === "transformers";
  const adapters = how.targets.includes("mlp");
  const gradients = casts ? inner + 4 * shape.intermediate : (3 - adapters) * inner;
  return Math.max(
    tokens * mlpKept(shape, how, sliced) + again + n * (gradients + shape.joined * inner),
    tokens * (norm + CONSTANTS.NORM_ROWS * 4 * shape.hidden * !onePass(shape, how)),
  );
}

function expertsPeak(shape, how, tokens, again) {
  const [H, inner] = [shape.hidden * how.element, shape.intermediate * how.element];
  const [K, n] = [shape.experts_per_token, sliceOf(how, tokens)];
  if (how.implementation === "transformers") {
    const sums = CONSTANTS.PEFT_SUMS * shape.experts * 3 * shape.hidden * inner;
    return n * 4 * K * inner + how.targets.includes("mlp") * sums;
  }
  if (how.each) {
    const rows = Math.min(tokens, limits.ROWS_OF_ONE);
    return rows * (5 * H + (again ? 3 : 1) * inner) + tokens * 4 * shape.hidden;
  }
  const gates = again ? 2 * inner : 0;
  if (again && K * n > limits.PAIRS_BACKWARD) {
    const parts = ceilOf(K * n, limits.PAIRS_BACKWARD);
    const one = ceilOf(K * n, parts) * (gates + inner + H);
    return Math.max(n * 4 * shape.hidden + one, n * 8 * shape.hidden);
  }
  return Math.max(K * n * (gates + inner + H), K * n * (gates + H) + n * 8 * shape.hidden);
}

function mlpPeak(shape, how, tokens, checkpointed) {
  if (!shape.experts) return densePeak(shape, how, tokens);
  const again = computedAgain(shape, how, tokens, checkpointed);
  return tokens * mlpKept(shape, how, again) + expertsPeak(shape, how, tokens, again);
}

/** `layer_inputs`: [bytes on the card, bytes in host memory]. */
function layerInputs(shape, tokens, element, offload) {
  const one = tokens * shape.hidden * element;
  if (!offload) return [shape.layers * one, 0];
  return [Math.min(CONSTANTS.BUFFERS, shape.layers) * one, shape.layers * one];
}

const keepsResults = (kernel, length) => kernel === "flash" && length >= limits.KEPT_FROM;
const attentionResults = (shape, element) => shape.heads * (shape.head_dim * element + 4);

/** `head_bytes`: [final states and their rows, logits, rows of logits at a time]. */
function headBytes(shape, tokens, drawn, step) {
  const { element } = step;
  const H = shape.hidden * element;
  const norm = element < 4 ? 4 * shape.hidden : H;
  if (step.implementation === "transformers") {
    return [tokens * (norm + H), drawn * shape.vocab * (element + 12), drawn];
  }
  const piece = ceilOf(drawn, step.mini_batch);
  const multiplier = step.logit_chunk_multiplier;
  const rows = multiplier
    ? ceilOf(piece, multiplier)
    : Math.min(limits.ROWS_PER_CHUNK, ceilOf(piece, 4));
  return [tokens * (norm + H) + drawn * 2 * H, rows * shape.vocab * element, rows];
}

function streamRows(shape, how) {
  const casts = how.implementation === "transformers" && how.targets.includes("mlp");
  if (casts && !shape.experts && how.element < 4) return 5;
  return shape.experts || how.element === 4 ? 2 : 1;
}

function inputsWithoutCheckpointing(shape, how) {
  if (how.element === 4 || how.autocast) return 2 * shape.layers * how.stream;
  return how.element * (onePass(shape, how) ? shape.layers : 1);
}

function keptByALayer(shape, how, tokens, length) {
  const each = shape.sinks ? how.element : 4 + how.element;
  const scores = how.kernel === "eager" ? tokens * shape.heads * length * each : 0;
  return [
    tokens * attentionKept(shape, how) + scores,
    tokens * mlpKept(shape, how, inSlices(how, tokens)),
  ];
}

function stepBytes(shape, how, step) {
  const [tokens, drawn] = step.tokens;
  const length = step.context;
  let [states, logits] = headBytes(shape, tokens, drawn, step);
  if (how.all_weights) states += tokens * shape.hidden * how.stream;
  const [attention, mlp] = keptByALayer(shape, how, tokens, length);
  const peak =
    tokens * attentionPeak(shape, how, length) +
    attentionScratch(shape, how.element, tokens, how.kernel);
  const first = [attention, mlpPeak(shape, how, tokens, step.gradient_checkpointing)];
  let kept, n, layer;
  if (step.gradient_checkpointing) {
    [kept] = layerInputs(shape, tokens, how.stream, step.offload_activations);
    [n, layer] = [0, add(first) >= peak ? first : [peak, 0]];
    if (step.offload_activations && keepsResults(how.kernel, length)) {
      kept += tokens * attentionResults(shape, how.element);
    }
  } else {
    kept = tokens * shape.hidden * inputsWithoutCheckpointing(shape, how);
    [n, layer] = [shape.layers, first];
  }
  const others = Math.max(n - 1, 0);
  const stream = tokens * shape.hidden * how.stream * streamRows(shape, how);
  const held = how.implementation === "transformers" ? drawn * shape.vocab * how.element : 0;
  return {
    head: { hidden: kept + states, attention: n * attention, mlp: n * mlp, logits },
    layer: {
      hidden: kept + stream,
      attention: others * attention + layer[0],
      mlp: others * mlp + layer[1],
      logits: held,
    },
  };
}

// ---------------------------------------------------------------- drawing

/** `drawn_directly`: whether the decoder reads the model's own tensors. */
const drawnDirectly = (s) =>
  s.sinks || !(s.experts || s.towers || s.counted.length || s.windows.includes(0));

function rolloutBytes(shape, rows, step) {
  const { element, context, prompt_length: prompt, num_generations: group } = step;
  const [H, inner] = [shape.hidden * element, shape.intermediate * element];
  let [read, behind] = [ceilOf(rows, group) * prompt, 0];
  const paged = drawnDirectly(shape);
  if (paged) {
    read = Math.min(read, limits.PREFILL_TOKENS);
    if (prompt > read) {
      behind = kvBytes(shape, 1, prompt, element);
      behind += 8 * prompt * shape.kv_heads * shape.head_dim * element;
    }
  }
  let mlp = read * 3 * inner;
  if (shape.experts) {
    const together = Math.min(read, limits.PREFILL_TOKENS);
    mlp = together * shape.experts_per_token * (3 * inner + H) + read * 8 * shape.hidden;
  }
  return {
    kv: kvBytes(shape, rows, context, element, { prompt, group, paged }),
    hidden: read * 3 * H,
    attention: read * 3 * add(perToken(shape, element)) + behind,
    mlp,
    logits: rows * shape.vocab * (element + 8),
  };
}

function unpackBytes(shape, weights, element, grouped) {
  if (TRAINABLE.includes(weights)) return 0;
  const one = 2 * shape.hidden * shape.intermediate * element;
  const eight = weights === "fp8" && shape.experts;
  if (eight && !shape.sinks) return shape.experts * one;
  if (!isMxfp4(weights) && !eight) return one;
  if (!grouped) return floorOf(one * 3, 2);
  return Math.min(shape.experts, Math.max(1, floorOf(limits.UNPACKED, one))) * one;
}

const vllmWeights = (step) =>
  addUp(weightBytes(step.shape, isMxfp4(step.weights) ? "mxfp4" : "bf16"));

function drawing(step, rows) {
  const { shape } = step;
  if (step.sampler === "server") return {};
  if (step.sampler !== "engine") {
    const [prompt, group] = [step.prompt_length, step.num_generations];
    const kv = kvBytes(shape, rows, step.context, 2, { prompt, group });
    return { kv, logits: CONSTANTS.VLLM_GRAPHS };
  }
  const parts = rolloutBytes(shape, rows, step);
  const dense = unpackBytes(shape, step.weights, step.element, !step.old);
  const reading = parts.hidden + parts.attention + parts.mlp; // after the pictures
  const [, seen] = readingPictures(step, ceilOf(rows, step.num_generations), false);
  return { ...parts, mlp: parts.mlp + dense, pictures: Math.max(0, seen - reading) };
}

/** `reading_pictures`: [kept until the backward pass is through, the most at any time]. */
function readingPictures(step, prompts, trains) {
  if (!step.picture_tokens) return [0, 0];
  const tokens = prompts * step.picture_tokens;
  return pictureBytes(step.shape, tokens, step.element, trains, step.gradient_checkpointing);
}

// ---------------------------------------------------------------- a step

const KERNELS = {
  sink: "auto", sink_eager: "eager", sink_triton: "triton", sink_flex: "auto",
  sink_key: "sdpa", sink_lean: "sdpa_lean", sink_lse: "flash",
};
const older = ([major], than) => major < than;

/** `choose_kernel` for products in 16 bits on a GPU. */
function kernelOf(setup, context, plain) {
  const { shape, card, attention } = setup;
  let kernel = KERNELS[attention] ?? attention;
  if (kernel === "auto" && !shape.sinks) kernel = "sdpa";
  else if (kernel === "auto" && older(card.capability, 8)) kernel = "sdpa_lean";
  else if (kernel === "auto" && shape.head_dim > limits.LARGEST_HEAD) kernel = "sdpa";
  else if (kernel === "auto") {
    const long = !older(card.capability, 9) && context >= limits.SHORTEST_CUDNN;
    kernel = long ? "flash" : "triton";
  }
  const byHeads = setup.lora_r && setup.lora_targets.includes("attention") && plain;
  return kernel === "sdpa_lean" && byHeads ? "sink_heads" : kernel;
}

export const usualPrompt = (context) => Math.min(512, floorOf(context, 2));

/** A configuration with defaults for everything that is not given; `shape` and `card` are records. */
export function setupOf(given) {
  const setup = {
    weights: given.shape.sinks ? "mxfp4" : "bf16",
    double_quant: false,
    lora_r: 32,
    lora_targets: given.shape.experts ? ["attention"] : ["attention", "mlp"],
    prompt_length: null,
    picture_tokens: 0,
    train_parts: null,
    max_completion_length: 15_872,
    num_generations: 8,
    generation_batch_size: given.num_generations ?? 8,
    per_device_train_batch_size: 1,
    gradient_accumulation_steps: 1,
    share_prompt: false,
    mini_batch: 1,
    logit_chunk_multiplier: null,
    gradient_checkpointing: true,
    slice_tokens: null,
    offload_embedding: false,
    offload_activations: false,
    offload_hidden: false,
    reference: false,
    sampler: "engine",
    attention: "auto",
    implementation: "ours",
    optim: "adamw_torch_fused",
  };
  return { ...setup, ...given };
}

/** `lengths_of`: a context as the lengths of prompt and completion. */
export function lengthsOf(context, promptLength) {
  const prompt = promptLength ?? usualPrompt(context);
  const odd = promptLength === null && context < 1024 && context % 2;
  return { prompt_length: odd ? prompt : promptLength, max_completion_length: context - prompt };
}

/** `Setup.step`: the setup with what follows from it. */
function stepOf(setup) {
  const { shape, card, weights } = setup;
  const completion = setup.max_completion_length;
  const prompt = setup.prompt_length ?? usualPrompt(2 * completion);
  const context = prompt + completion;
  const old = older(card.capability, 8);
  const autocast = !old;
  const [adapters, plain] = [setup.lora_r > 0, !isNf4(weights)];
  const each = adapters || weights === "fp32" ? 4 : 2;
  const element = weights === "fp32" && !autocast ? 4 : 2;
  const parts = setup.train_parts ?? (adapters ? [] : ["tower"]);
  const trainTower = Boolean(setup.picture_tokens && shape.tower) && parts.includes("tower");
  const kinds = trainedTensors(shape, setup.lora_r, setup.lora_targets, trainTower);
  const [batch, group] = [setup.per_device_train_batch_size, setup.num_generations];
  const drawn = batch * completion;
  const prompts = setup.share_prompt ? ceilOf(batch, group) : batch;
  return {
    ...setup,
    prompt_length: prompt,
    context,
    old,
    element,
    all_weights: !adapters,
    cast: weights === "fp32" && autocast,
    residual: weights === "fp32" || (old && shape.sinks) ? 4 : element,
    kernel: kernelOf(setup, context, plain),
    plain,
    trained: addUp(numbersIn(kinds)),
    trained_element: each,
    optimizer_bytes: stateBytes(setup.optim, each),
    update_bytes: updateBytes(setup.optim, kinds, each),
    accumulates: setup.gradient_accumulation_steps > 1,
    train_tower: trainTower,
    prompts,
    tokens: [prompts * prompt + drawn, drawn],
  };
}

/** Why settings exclude each other, as `Step` says it; null where they do not. */
export function setupProblem(setup) {
  const { shape, weights } = setup;
  if (isMxfp4(weights) && (!shape.experts || shape.hidden % 32 || shape.intermediate % 32)) {
    const why = shape.experts ? "has sizes that are no multiples of 32" : "has no experts";
    return `${weights} keeps experts in blocks of 32, and ${shape.name} ${why}: choose nf4 or bf16`;
  }
  if (setup.offload_embedding && shape.tied) {
    return (
      `the head of ${shape.name} is its embedding, which every step multiplies with: it cannot ` +
      "be offloaded. Leave offload_embedding out"
    );
  }
  const [pictures, prompt] = [setup.picture_tokens, stepOf(setup).prompt_length];
  if (pictures && !shape.tower) {
    return (
      `${inFull(pictures)} tokens are pictures, and ${shape.name} reads none, or none that is known ` +
      "here: leave picture_tokens out"
    );
  }
  if (pictures > prompt) {
    return (
      `${inFull(pictures)} tokens of the prompt are pictures, and it has ${inFull(prompt)}: ` +
      "prompt_length counts them too"
    );
  }
  if (!setup.lora_r && !TRAINABLE.includes(weights)) {
    return (
      `weights in ${weights} do not train, and without adapters (lora_r=0) all do: give ` +
      `lora_r=16, or weights in ${TRAINABLE.join(", ")}`
    );
  }
  if (setup.offload_activations && !setup.gradient_checkpointing) {
    return (
      "offload_activations=True moves what gradient checkpointing keeps, and " +
      "gradient_checkpointing is False: leave it on, or offload_activations out."
    );
  }
  return null;
}

function computation(step, sliceTokens) {
  return {
    element: step.element,
    stream: step.residual || step.element,
    targets: step.lora_r ? step.lora_targets : ["attention", "mlp"],
    all_weights: step.all_weights,
    autocast: step.cast,
    kernel: step.kernel,
    repeated: step.old,
    each: step.old,
    slice_tokens: sliceTokens,
    implementation: step.implementation,
    one_pass: step.plain,
  };
}

function hiddenOnHost(step) {
  if (!step.offload_hidden) return 0;
  const [states] = headBytes(step.shape, ...step.tokens, {
    ...step,
    mini_batch: 1,
    logit_chunk_multiplier: null,
  });
  return states - ceilOf(states, step.mini_batch);
}

function inputsOnHost(step) {
  if (!step.offload_activations) return 0;
  const { shape, tokens: [tokens] } = step;
  const [, inputs] = layerInputs(shape, tokens, step.residual, true);
  if (!keepsResults(step.kernel, step.context)) return inputs;
  const full = shape.windows.filter((window) => window === null).length;
  return inputs + full * tokens * attentionResults(shape, step.element);
}

function pixelsOnHost(step) {
  if (!step.picture_tokens) return 0;
  const { merged, numbers } = step.shape.tower;
  const prompts = ceilOf(step.generation_batch_size, step.num_generations);
  return 4 * prompts * step.picture_tokens * merged * numbers;
}

function training(step, sliceTokens) {
  const moments = stepBytes(step.shape, computation(step, sliceTokens), step);
  moments.head.hidden -= hiddenOnHost(step);
  moments.layer.mlp += unpackBytes(step.shape, step.weights, step.element, !step.old);
  if (!step.picture_tokens) return moments;
  const [kept, most] = readingPictures(step, step.prompts, step.train_tower);
  const { head, layer } = mapped(moments, (parts) => ({ ...parts, pictures: kept }));
  return { head, layer, reading: { pictures: most } };
}

/** `unpacked_to_record`: what a recorded layer's experts take more. */
function unpackedToRecord(step, capability) {
  const { shape, element } = step;
  const large = CONSTANTS.LARGE_CARDS.some((one) => one.join() === capability.join());
  const kept = !step.gradient_checkpointing || step.offload_activations;
  const short = step.tokens[0] <= limits.RECORDED_TOKENS;
  const ours = step.implementation === "ours" && isMxfp4(step.weights);
  if (!large || !short || kept || !ours) return 0;
  const all = 3 * shape.experts * shape.hidden * shape.intermediate * element;
  return all - unpackBytes(shape, step.weights, element, true);
}

function casts(step, layers, head = false) {
  if (!step.cast) return 0;
  const { shape } = step;
  const counts = parameters(shape);
  const inside = floorOf(layers * (counts.attention + counts.mlp), shape.layers);
  return 2 * (inside + head * shape.vocab * shape.hidden);
}

function withGradients(step, sliceTokens) {
  const [passes, each] = [training(step, sliceTokens), step.trained_element];
  if (step.all_weights) return allGradients(step, sliceTokens, passes);
  const held = step.trained * (2 * each + step.optimizer_bytes);
  const kept = step.gradient_checkpointing ? 1 : step.shape.layers;
  const copies = { head: casts(step, kept > 1 ? kept : 0, true), layer: casts(step, kept) };
  const found = mapped(passes, (parts, moment) =>
    ({ ...parts, adapters: held, copies: copies[moment] ?? 0 }));
  return { ...found, update: { adapters: held + step.update_bytes } };
}

function allGradients(step, sliceTokens, passes) {
  const { shape, trained_element: each, trained: numbers } = step;
  const again = Number(step.accumulates);
  const [states, gradients] = [step.optimizer_bytes * numbers, each * numbers];
  const kinds = tensors(shape);
  const sizes = [...kinds.attention, ...kinds.mlp].map(([, n, row]) => n * row);
  const [layer, matrix] = [each * add(sizes), each * Math.max(...sizes)];
  const vocab = shape.vocab * shape.hidden;
  const waits = states + again * (gradients + matrix) + each * vocab * shape.tied * again;
  const last = waits + (1 - again) * (each * vocab + layer);
  const first = waits + (1 - again) * (gradients - each * vocab * !shape.tied);
  const alone = { ...step, shape: { ...shape, layers: 1, windows: shape.windows.slice(0, 1) } };
  const deepest = casts(step, step.gradient_checkpointing ? 1 : shape.layers);
  const layers = [
    { ...passes.layer, adapters: last, copies: deepest },
    { ...training(alone, sliceTokens).layer, adapters: first, copies: casts(step, 1) },
    {
      hidden: step.tokens[0] * shape.hidden * step.residual,
      adapters: states + gradients + each * vocab * (again + shape.tied),
    },
  ];
  const summed = vocab * (each === 4 ? 4 : 4 + each);
  const worst = layers.reduce((one, other) => (addUp(other) > addUp(one) ? other : one));
  return {
    head: {
      ...passes.head,
      adapters: states + again * gradients + summed,
      copies: casts(step, shape.layers, true),
    },
    layer: worst,
    ...(step.picture_tokens
      ? { reading: { ...passes.reading, adapters: states + (again || step.train_tower) * gradients } }
      : {}),
    update: { adapters: states + gradients + step.update_bytes },
  };
}

const ACTIVATIONS = ["kv", "pictures", "hidden", "attention", "mlp", "logits"];

function withRest(parts, fixed) {
  const all = mapped(PARTS, (_, name) => (parts[name] ?? 0) + (fixed[name] ?? 0));
  const gaps = Math.trunc(CONSTANTS.FRAGMENTATION * add(ACTIVATIONS.map((name) => all[name])));
  return { ...all, context: CONSTANTS.CUDA_CONTEXT + CONSTANTS.LIBRARIES + gaps };
}

function held(step) {
  const weights = weightBytes(step.shape, step.weights, step.double_quant);
  const reference = step.reference ? addUp(weights) : 0;
  const sampler = step.sampler.startsWith("vllm") ? vllmWeights(step) : 0;
  const asleep = step.sampler === "vllm_sleep" ? sampler : 0;
  const embedding = step.offload_embedding ? weights.embedding : 0;
  return {
    weights: { ...weights, embedding: weights.embedding - embedding },
    embedding,
    reference,
    sampler,
    asleep,
  };
}

/** What is there from the beginning, and a rollout of as many completions as fit. */
function rolloutThatFits(step, room, there) {
  const fixed = {
    weights: addUp(there.weights),
    adapters: step.trained * ((step.all_weights ? 0 : 4) + step.optimizer_bytes),
    copies: there.reference + there.sampler,
  };
  const load = withRest({}, fixed);
  if (step.sampler === "engine") {
    fixed.copies += casts(step, step.all_weights ? step.shape.layers : 0, true);
  }
  let rows = Math.min(step.generation_batch_size, limits.MOST_DRAWN_TOGETHER);
  while (true) {
    const rollout = withRest(drawing(step, rows), fixed);
    if (rows === 1 || addUp(rollout) <= room) return { rows, rollout, load };
    rows -= Math.max(1, floorOf(rows, 16));
  }
}

function possibleSlices(step) {
  if (step.slice_tokens !== null) return [step.slice_tokens >= ALL ? null : step.slice_tokens];
  const experts = step.shape.experts > 0;
  if (step.implementation !== "ours") return [experts ? 4096 : null];
  const sizes = experts ? limits.SLICES : [null, ...limits.SLICES.slice(2)];
  return step.per_device_train_batch_size > 1 ? sizes.slice(0, experts ? 3 : 1) : sizes;
}

/**
 * `plan_of`: bytes of a step by moment and part, with the largest slices and the most completions
 * that fit. `load` is what the rollout begins with.
 */
export function planOf(setup) {
  const step = stepOf(setup);
  const room = Math.trunc(setup.card.usable * GiB);
  const there = held(step);
  const { rows, rollout, load } = rolloutThatFits(step, room, there);
  const drawn = step.sampler === "vllm" ? drawing(step, rows) : {};
  const copies = there.reference + there.sampler - there.asleep;
  const fixed = { weights: addUp(there.weights), ...drawn, copies };
  let sliceTokens, moments, recorded;
  for (sliceTokens of possibleSlices(step)) {
    const passes = withGradients(step, sliceTokens);
    recorded = unpackedToRecord(step, setup.card.capability);
    const wide = { ...passes.layer, mlp: (passes.layer.mlp ?? 0) + recorded };
    if (recorded && addUp(withRest(wide, fixed)) <= room) passes.layer = wide;
    else recorded = 0;
    moments = mapped(passes, (parts) => withRest(parts, fixed));
    if (Math.max(addUp(moments.head), addUp(moments.layer)) <= room) break;
  }
  moments = { rollout, ...moments };
  const totals = mapped(moments, addUp);
  const peak = Math.max(...Object.values(totals));
  return {
    setup,
    step,
    room,
    load,
    moments,
    totals,
    peak,
    worst: Object.keys(totals).find((moment) => totals[moment] === peak),
    fits: peak <= room,
    recorded,
    host: {
      process: CONSTANTS.HOST_PROCESS,
      embedding: there.embedding,
      "layer inputs": inputsOnHost(step),
      "hidden states": hiddenOnHost(step),
      pixels: pixelsOnHost(step),
      "sleeping weights": there.asleep,
    },
    weights: there.weights,
    there,
    rows,
    slice_tokens: sliceTokens,
  };
}

/** `standard`: the same step in the usual practice: 16 bit, transformers, vLLM. */
export function standard(setup) {
  const old = older(setup.card.capability, 8);
  return planOf({
    ...setup,
    weights: setup.lora_r ? (old ? "fp16" : "bf16") : setup.weights,
    double_quant: false,
    slice_tokens: ALL,
    share_prompt: false,
    mini_batch: 1,
    logit_chunk_multiplier: null,
    gradient_checkpointing: true,
    offload_embedding: false,
    offload_activations: false,
    offload_hidden: false,
    sampler: "vllm",
    attention: old && setup.shape.sinks ? "eager" : "auto",
    implementation: "transformers",
  });
}

/** `Setup.longest_context`: tokens, a multiple of 64; 0 where not even 64 fit. */
export function longestContext(setup, most = 2 ** 22) {
  const prompt = setup.prompt_length ?? 0;
  const fits = (units) => {
    const context = 64 * units;
    const own = setup.prompt_length ?? usualPrompt(context);
    if (own >= context) return false;
    return planOf({ ...setup, prompt_length: own, max_completion_length: context - own }).fits;
  };
  let [low, high] = [floorOf(prompt, 64), floorOf(most, 64)];
  while (low < high) {
    const middle = floorOf(low + high + 1, 2);
    if (fits(middle)) low = middle;
    else high = middle - 1;
  }
  return 64 * low > prompt && fits(low) ? 64 * low : 0;
}

// ---------------------------------------------------------------- what to change

/** `switches`: [changes, what they cost] of all that would change a setup, cheapest first. */
export function switches(s) {
  const [step, batch] = [stepOf(s), s.per_device_train_batch_size];
  const found = [];
  const may = (when, changes, cost) => when && found.push([changes, cost]);
  may(s.implementation !== "ours", { implementation: "ours" },
    "No cost: the same numbers, computed in chunks.");
  may(s.attention !== "auto", { attention: "auto" },
    "No cost: the kernel that suits model and card.");
  may(s.reference && s.lora_r, { reference: false },
    "No cost: without its adapters the model is the reference.");
  may(!s.offload_embedding && !s.shape.tied, { offload_embedding: true },
    "Hardly a cost: a step copies the rows of its tokens to the card.");
  may(s.sampler.startsWith("vllm"), { sampler: "engine" },
    "The trainer draws from the weights that train, without a copy of them.");
  may(!s.share_prompt && batch > 1 && step.prompt_length, { share_prompt: true },
    "Saves time as well: a group's prompt is computed once.");
  const rows = ceilOf(step.tokens[1], step.mini_batch);
  may(s.logit_chunk_multiplier === null && rows > 1024,
    { logit_chunk_multiplier: ceilOf(rows, 256) },
    "Chunks of 256 rows: a few per cent of the head's time.");
  for (const tokens of [4096, 1024]) {
    may(s.slice_tokens !== null && s.slice_tokens > tokens, { slice_tokens: tokens },
      "The MLP's forward pass once more, in the backward pass: its larger part is matrix products.");
  }
  may(!s.gradient_checkpointing, { gradient_checkpointing: true },
    "A second forward pass: about half more time (a third where all weights train).");
  may(s.gradient_checkpointing && !s.offload_activations, { offload_activations: true },
    "Up to a tenth of the time, and host memory: the inputs are copied out and back.");
  const more = { gradient_accumulation_steps: s.gradient_accumulation_steps * batch };
  may(batch > 1, { per_device_train_batch_size: 1, ...more },
    "More and smaller passes for the same update; the trainer does it by itself, a piece of a " +
      "micro-batch after the other, as many as fit.");
  may(batch > 1 && !s.offload_hidden, { offload_hidden: true, mini_batch: batch },
    "A few per cent of the head's time, and host memory.");
  dear(s, step, may);
  return found;
}

function dear(s, step, may) {
  const both = s.lora_targets.includes("attention") && s.lora_targets.includes("mlp");
  may(stateBytes(s.optim) >= stateBytes("adamw_torch"), { optim: "adamw_8bit" },
    "The optimizer's states in 8 bits, by bitsandbytes.");
  may(s.weights === "fp32" && (s.lora_r || !step.old), { weights: step.old ? "fp16" : "bf16" },
    s.lora_r
      ? "Weights rounded to 16 bits; an adapter stays in float32."
      : "Updates that are smaller than a weight's rounding to 16 bits are lost.");
  may(!s.lora_r, { lora_r: 32 },
    "Adapters train, and the model's own weights stay: a hundredth of the numbers.");
  const packs = TRAINABLE.includes(s.weights) || (s.weights === "nf4" && s.shape.sinks);
  may(s.lora_r && packs,
    { weights: s.shape.sinks ? "mxfp4" : "nf4", ...(s.double_quant ? { double_quant: false } : {}) },
    s.shape.sinks
      ? "The format that the experts were released in."
      : "Weights rounded to 4 bits, and unpacked in every step.");
  may(s.lora_r && both, { lora_targets: ["attention"] },
    "Experts and MLP keep their weights: less can be learnt.");
  may(s.lora_r > 8, { lora_r: 8 }, "Adapters of a smaller rank: less can be learnt.");
}

function withThese(plan, chosen) {
  const setup = Object.assign({}, plan.setup, ...chosen.map(([changes]) => changes));
  return setupProblem(setup) ? null : planOf(setup);
}

const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const among = (chosen, one) => chosen.some((other) => same(one, other));

function nextSwitch(plan, chosen) {
  for (const one of switches(plan.setup)) {
    const after = among(chosen, one) ? null : withThese(plan, [one]);
    if (after && plan.peak - after.peak >= CONSTANTS.LEAST_SAVING) return [one, after];
  }
  return [null, plan];
}

function switchesFor(plan) {
  let [chosen, now, one] = [[], plan, null];
  while (!now.fits) {
    [one, now] = nextSwitch(now, chosen);
    if (!one) return chosen;
    chosen.push(one);
  }
  for (const last of chosen.toReversed()) {
    const rest = chosen.filter((other) => other !== last);
    if (withThese(plan, rest)?.fits) chosen = rest;
  }
  return chosen;
}

function listed(plan, chosen, bySaving) {
  const [left, found] = [[...chosen], []];
  let now = plan;
  while (left.length && !now.fits) {
    const made = left.map((one) => [withThese(now, [one]), one]).filter(([after]) => after);
    const [after, best] = made.reduce((a, b) => (bySaving && b[0].peak < a[0].peak ? b : a));
    const [[changes, cost]] = left.splice(left.indexOf(best), 1);
    found.push({ changes, cost, saves: now.peak - after.peak, plan: after });
    now = after;
  }
  return found;
}

/** `advise`: [{changes, cost, saves, plan}], the largest saving first. */
export function advise(plan) {
  const chosen = switchesFor(plan);
  const found = listed(plan, chosen, true);
  return found.every(({ saves }) => saves > 0) ? found : listed(plan, chosen, false);
}

/** `larger_card`: the smallest larger one on which a plan fits, or null. */
export function largerCard(plan) {
  const { setup } = plan;
  const bySize = Object.values(CARDS).sort((a, b) => a.usable - b.usable);
  const fits = (card) =>
    (plan.step.old || !older(card.capability, 8)) &&
    card.usable > setup.card.usable &&
    planOf({ ...setup, card }).fits;
  return bySize.find(fits) ?? null;
}

/** `fitting`: {plan, changes, advice} of the nearest that fits, or null; a card by its record. */
export function fitting(plan) {
  const advice = advise(plan);
  const last = advice.at(-1)?.plan ?? plan;
  const changes = Object.assign({}, ...advice.map((one) => one.changes));
  if (last.fits) return { plan: last, changes, advice };
  const longest = longestContext(last.setup);
  if (longest >= CONSTANTS.LEAST_CONTEXT) {
    const { max_completion_length } = lengthsOf(longest, last.setup.prompt_length);
    const setup = { ...last.setup, max_completion_length };
    return { plan: planOf(setup), changes: { ...changes, max_completion_length }, advice };
  }
  const card = largerCard(last);
  if (!card) return null;
  return { plan: planOf({ ...last.setup, card }), changes: { ...changes, card }, advice };
}

// ---------------------------------------------------------------- a block in words

const inFull = (x) => x.toLocaleString("en-US", { maximumFractionDigits: 2 });
const KINDS = {
  embedding: "embedding",
  head: "head",
  attention: "attention",
  mlp: "MLP",
  rest: "norms and biases",
  towers: "for images and sound",
};

const OF_PART = {
  weights({ plan, step }) {
    const [counts, bits] = [
      parameters(step.shape),
      weightBits(step.shape, step.weights, step.double_quant),
    ];
    const name = (kind) => (kind === "mlp" && step.shape.experts ? "experts" : KINDS[kind]);
    return Object.entries(plan.weights)
      .filter(([, size]) => size)
      .map(([kind, size]) => [
        `${name(kind)}: ${inFull(counts[kind] / 1e9)} billion numbers × ${bits[kind]} bits`,
        size,
      ]);
  },
  copies({ plan, training }) {
    const { reference, sampler, asleep } = plan.there;
    return [
      ["the reference: a second model", reference],
      ["vLLM's own weights", training ? sampler - asleep : sampler],
    ];
  },
  adapters({ step, training }) {
    if (step.all_weights) return [];
    const each = training ? [4, "gradient 4 + "] : [0, ""];
    return [
      [
        `${inFull(step.trained / 1e6)} million numbers × (4 bytes + ${each[1]}optimizer ` +
          `${step.optimizer_bytes})`,
        step.trained * (4 + each[0] + step.optimizer_bytes),
      ],
    ];
  },
  kv({ step, plan }) {
    const element = step.sampler === "engine" ? step.element : 2;
    const paged = drawnDirectly(step.shape) || step.sampler !== "engine";
    const token = 2 * step.shape.kv_heads * step.shape.head_dim * element;
    const full = (step.shape.windows.length ? step.shape.windows : Array(step.shape.layers).fill(null))
      .filter((window) => (paged ? window === null : window !== 0)).length;
    if (!paged) {
      return [
        [
          `${plan.rows} completions × ${inFull(step.context)} tokens × ${full} layers × ` +
            `${inFull(token)} bytes (2 × heads of keys × their size × ${element})`,
          plan.rows * step.context * full * token,
        ],
      ];
    }
    const own = { prompt: step.prompt_length, group: step.num_generations };
    const windows = (plan.rows + 1) * add(step.shape.windows) * token;
    const all = kvBytes({ ...step.shape, state: 0 }, plan.rows, step.context, element, own);
    const pages = (all - windows) / (token * full * limits.PAGE);
    return [
      [
        `${inFull(pages)} pages of ${limits.PAGE} tokens × ${full} full layers × ${inFull(token)} ` +
          `bytes (2 × heads of keys × their size × ${element})`,
        full ? all - windows : 0,
      ],
      [`sliding layers: ${plan.rows + 1} rings of their windows × ${inFull(token)} bytes`, windows],
    ];
  },
  pictures({ step, moment, plan }) {
    const { tower } = step.shape;
    const together = { rollout: ceilOf(plan.rows, step.num_generations) }[moment] ?? step.prompts;
    const patches = together * step.picture_tokens * tower.merged;
    const pixels = [
      `${inFull(patches)} patches × ${inFull(tower.numbers)} pixels × ${step.element} bytes`,
      patches * tower.numbers * step.element,
    ];
    if (moment === "rollout") {
      return [["what their tower needs more than the text that is read after it", Infinity]];
    }
    const work = patches * towerWorking(tower, step.element);
    if (!step.train_tower) {
      return [pixels, ["a layer of the tower, nothing kept", work], ["vectors for the text", Infinity]];
    }
    const width = tower.hidden * step.element;
    const one = step.gradient_checkpointing ? width : towerKept(tower, step.element);
    const words = `${tower.layers} layers of the tower × ${inFull(one)} bytes a patch`;
    return [pixels, [words, patches * tower.layers * one], ["its projector and gradients", Infinity]];
  },
  hidden({ step, moment }) {
    const { shape, tokens: [tokens] } = step;
    if (moment === "rollout") return [["prompts being read: tokens × 3 × H × bytes", Infinity]];
    if (step.all_weights) return [];
    const one = tokens * shape.hidden * step.residual;
    const kept = step.offload_activations ? Math.min(CONSTANTS.BUFFERS, shape.layers) : shape.layers;
    const unit = `${inFull(tokens)} tokens × ${inFull(shape.hidden)} × ${step.residual} bytes`;
    const inputs = step.gradient_checkpointing
      ? [[`the inputs of ${kept} layers, each ${unit}`, kept * one]]
      : [];
    const rest = {
      head: "the states before the head, and gradients for the rows of drawn tokens",
      layer: "the residual stream and its gradient in this layer",
    };
    return [...inputs, [rest[moment] ?? "", Infinity]];
  },
  attention({ step, moment, plan }) {
    const { shape, tokens: [tokens] } = step;
    if (moment === "rollout") {
      const long = drawnDirectly(shape) && step.prompt_length > limits.PREFILL_TOKENS;
      const words = "prompts being read: tokens × 3 × (queries + keys) × bytes";
      return [[words + (long ? ", and copies of the keys and values before them" : ""), Infinity]];
    }
    const how = computation(step, plan.slice_tokens);
    const kept = keptByALayer(step.shape, how, tokens, step.context)[0];
    const words = `${inFull(tokens)} tokens × ${inFull(kept / tokens)} bytes a token, kept for backward`;
    if (!step.gradient_checkpointing) {
      return [[`${step.shape.layers} layers × ${words}`, step.shape.layers * kept], ["", Infinity]];
    }
    return [[words, kept], ["its gradients, and what its kernel works with", Infinity]];
  },
  mlp({ step, moment, plan }) {
    const [{ shape, tokens: [tokens] }, all] = [step, plan.moments[moment].mlp];
    const recorded = moment === "layer" ? plan.recorded : 0;
    const dense = recorded + unpackBytes(shape, step.weights, step.element, !step.old);
    const unpacked = [
      `weights unpacked from ${step.weights === "fp8" ? 8 : 4} bits, as long as they are multiplied`,
      dense,
    ];
    if (moment === "rollout") return [unpacked, ["prompts being read", Infinity]];
    if (all === dense) return [unpacked];
    const again = shape.experts
      ? computedAgain(shape, computation(step, plan.slice_tokens), tokens, step.gradient_checkpointing)
      : inSlices({ slice_tokens: plan.slice_tokens }, tokens);
    const each = mlpKept(shape, computation(step, plan.slice_tokens), again);
    const sliced = inSlices({ slice_tokens: plan.slice_tokens }, tokens);
    const slices = sliced ? `, in slices of ${inFull(plan.slice_tokens)} tokens` : "";
    const kept = [`${inFull(tokens)} tokens × ${inFull(each)} bytes a token, kept for backward`, tokens * each];
    if (!step.gradient_checkpointing) return [unpacked, ["all layers, kept for backward", Infinity]];
    return [kept, [`its gradients${slices}`, Infinity], unpacked];
  },
  logits({ step, moment, plan }) {
    const [V, E] = [step.shape.vocab, step.element];
    if (moment === "rollout" && step.sampler === "engine") {
      return [[`${plan.rows} completions × ${inFull(V)} words × ${E + 8} bytes`, plan.rows * V * (E + 8)]];
    }
    const graphs = step.sampler.startsWith("vllm")
      ? [["vLLM's activations and recorded steps, an estimate", CONSTANTS.VLLM_GRAPHS]]
      : [];
    if (moment !== "head") return graphs;
    const [, size, rows] = headBytes(step.shape, ...step.tokens, step);
    return [[`${inFull(rows)} rows at a time × ${inFull(V)} words × ${E} bytes`, size], ...graphs];
  },
  context() {
    return [
      ["CUDA itself", CONSTANTS.CUDA_CONTEXT],
      ["workspaces of its libraries", CONSTANTS.LIBRARIES],
      [`gaps, ${100 * CONSTANTS.FRAGMENTATION} % of the activations`, Infinity],
    ];
  },
};
const REST = {
  copies: "copies in 16 bits for the products",
  adapters: "every weight's gradient and optimizer states, as far as they exist by now",
};

/** [[formula, bytes], ...] of a block; they add up to it. */
export function explain(plan, moment, part) {
  const all = (plan.moments[moment] ?? plan.load)[part];
  if (!all) return [];
  const training = !["load", "rollout"].includes(moment);
  const said = OF_PART[part]({ plan, step: plan.step, moment, training });
  const found = [];
  let left = all;
  const known = add(said.map(([, size]) => (Number.isFinite(size) ? size : 0)));
  for (const [words, size] of said) {
    const own = Number.isFinite(size) ? Math.min(size, left) : Math.max(0, Math.min(left, all - known));
    if (own && words) found.push([words, own]);
    if (words) left -= own;
  }
  const update = moment === "update" && part === "adapters" ? "what the optimizer works with" : "";
  if (left) found.push([update || REST[part] || "what else it works with", left]);
  return found;
}
