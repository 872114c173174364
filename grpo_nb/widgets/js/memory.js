// Will it fit? A card as a vessel that fills over the moments of a GRPO step; switches empty it.

import { button, change, clamp, frame, line, menu, node, player } from "./kit.js";
import { plural, rect, slider, text, thousands, tick } from "./kit.js";
import { CARDS, CONSTANTS, MODELS } from "./planner_data.js";
import { TRAINABLE, explain, fitting, lengthsOf, longestContext, planOf } from "./planner.js";
import { readShape, setupOf, setupProblem, shapeOf, shapeProblem } from "./planner.js";
import { shortShape, standard } from "./planner.js";

export const defaults = {
  model: "gpt-oss-20b",
  shape: {}, // of a model that is not in the list, as ModelShape; {}: it is
  card: "T4",
  weights: "4 bit",
  context: 16_384,
  prompt_length: null,
  picture_tokens: 0,
  train_parts: null,
  num_generations: 8,
  generation_batch_size: null,
  per_device_train_batch_size: 1,
  gradient_accumulation_steps: 1,
  lora_r: 16,
  lora_targets: null,
  optim: "adamw_torch_fused",
  gradient_checkpointing: true,
  offload_embedding: false,
  offload_activations: false,
  offload_hidden: false,
  mini_batch: 1,
  slice_tokens: null,
  logit_chunk_multiplier: null,
  share_prompt: false,
  reference: false,
  sampler: "engine",
  moment: "", // that is shown; "": the fullest
};

// what the list says -> [format of a gpt-oss, of other models, NF4's scales quantised too]
export const WEIGHTS = {
  "4 bit": ["mxfp4", "nf4", false],
  "4 bit, attention too": ["mxfp4+nf4", "nf4", false],
  "4 bit, double quantisation": ["mxfp4+nf4", "nf4", true],
  "8 bit": ["fp8", "fp8", false],
  "16 bit": ["bf16", "bf16", false],
  "32 bit": ["fp32", "fp32", false],
};
const SAMPLERS = {
  engine: "on the weights that train",
  vllm: "vLLM beside the trainer",
  vllm_sleep: "vLLM, asleep while training",
  server: "vLLM on other cards",
};
const OPTIMIZERS = ["adamw_torch_fused", "adamw_torch", "adamw_8bit", "adafactor", "sgd"];
const CONTEXTS = Array.from({ length: 9 }, (_, k) => [2 ** (k + 10), 3 * 2 ** (k + 9)]).flat();
const PROMPTS = [null, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384];
const PICTURES = [0, 64, 256, 1024, 4096, 16_384];
const RANKS = [0, 4, 8, 16, 32, 64, 128];
const MOST = { num_generations: 64, per_device_train_batch_size: 16 };
const MOMENTS = {
  load: ["load", "The model is loaded: what is there all the time."],
  rollout: ["draw", "Completions are drawn: the cache of keys and values is full."],
  head: ["log-probs", "Log-probs are computed: the inputs of all layers are kept."],
  layer: ["layer", "Gradients of the layer that takes most."],
  reading: ["pictures", "Pictures go through their tower: forward, or backward where it trains."],
  update: ["update", "The optimizer moves the weights."],
};
const BLOCKS = Object.keys(CONSTANTS.PARTS); // their colours are in widgets.css
const LABELS = {
  weights: "weights",
  copies: "second copies",
  adapters: "adapters",
  kv: "keys, values",
  pictures: "pictures",
  hidden: "layer inputs",
  attention: "attention",
  mlp: "MLP",
  logits: "logits",
  context: "CUDA, gaps",
};
const TASK = { model: "gpt-oss-20b", card: "T4", context: 16_384 };
const SLOW = 420; // ms that a change takes to be seen
const PAUSE = 180; // ms without a change before what takes longer is computed

const gib = (size, digits = 1) =>
  (size / CONSTANTS.GiB).toLocaleString("en-US", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
const total = (parts) => Object.values(parts).reduce((sum, size) => sum + size, 0);

// ---------------------------------------------------------------- settings

/** {setup, notes}: what is planned; of settings that exclude each other one is left out, and said. */
export function settle(values) {
  const known = MODELS[values.model] ?? MODELS[defaults.model];
  const shape = shapeOf(values.shape.layers ? values.shape : known);
  const [oss, other, double_quant] = WEIGHTS[values.weights];
  const notes = [];
  const packs = shape.sinks && shape.hidden % 32 === 0 && shape.intermediate % 32 === 0;
  let weights = packs ? oss : other;
  if (!values.lora_r && !TRAINABLE.includes(weights)) {
    weights = "fp32";
    notes.push("Weights in 4 bits do not train: without adapters they are planned in 32.");
  }
  const { offload_embedding, offload_activations, gradient_checkpointing } = values;
  if (offload_embedding && shape.tied) {
    notes.push("The head is the embedding, which therefore stays on the card.");
  }
  if (offload_activations && !gradient_checkpointing) {
    notes.push("Without checkpointing there are no layer inputs to offload.");
  }
  if (shape.max_positions && values.context > shape.max_positions) {
    notes.push(`The model was made for ${thousands(shape.max_positions)} tokens.`);
  }
  const half = Math.floor(values.context / 2);
  const pictures = shape.tower ? Math.min(values.picture_tokens, half) : 0;
  if (values.picture_tokens && !shape.tower) notes.push(`${shape.name} reads no pictures.`);
  else if (pictures < values.picture_tokens) notes.push("Pictures would be most of the context: half of it is planned.");
  const least = pictures && (values.prompt_length === null ? pictures + 512 : pictures);
  const wanted = least ? Math.max(values.prompt_length, least) : values.prompt_length;
  const long = wanted !== null && wanted >= values.context;
  if (long) notes.push("The prompt would be all of the context: half of it is planned.");
  const { model, shape: _, context, moment, ...rest } = values;
  const given = {
    ...rest,
    shape,
    card: CARDS[values.card],
    weights,
    double_quant,
    offload_embedding: offload_embedding && !shape.tied,
    offload_activations: offload_activations && gradient_checkpointing,
    picture_tokens: pictures,
    ...lengthsOf(values.context, long ? half : wanted),
  };
  const set = Object.entries(given).filter(
    ([name, value]) => value !== null || ["slice_tokens", "logit_chunk_multiplier", "prompt_length"]
      .includes(name),
  );
  return { setup: setupOf(Object.fromEntries(set)), notes };
}

/** The planner's changes as values of this widget. */
export function asValues(changes, setup) {
  const { weights, double_quant, max_completion_length, card, ...values } = changes;
  if (weights) values.weights = TRAINABLE.includes(weights) ? "16 bit" : "4 bit";
  if (card) values.card = card.name;
  if (max_completion_length) {
    values.context = max_completion_length + (setup.prompt_length ?? 512);
  }
  return values;
}

const WORDS = {
  model: MODELS,
  card: CARDS,
  weights: WEIGHTS,
  sampler: SAMPLERS,
  moment: MOMENTS,
  optim: Object.fromEntries(OPTIMIZERS.map((name) => [name, name])),
};
const FEW = { num_generations: 2, lora_r: 0, prompt_length: 0, picture_tokens: 0, context: 2 };
const LISTS = { lora_targets: ["attention", "mlp"], train_parts: ["text", "tower", "projector"] };

export function legal(name, value) {
  if (name === "shape") {
    const named = typeof value?.name === "string" && value.name.length < 100;
    const listed = [value?.windows ?? [], value?.counted ?? []].every(Array.isArray);
    return named && listed && !shapeProblem(shapeOf(value));
  }
  if (name in LISTS) {
    return Array.isArray(value) && value.length > 0 &&
      value.every((one) => LISTS[name].includes(one));
  }
  if (name in WORDS) return Object.hasOwn(WORDS[name], value);
  if (typeof defaults[name] === "boolean") return typeof value === "boolean";
  return Number.isInteger(value) && value >= (FEW[name] ?? 1) && value <= CONSTANTS.ALL;
}

/** A model of one's own stands in a link with what makes it one, in place of its name. */
export function whole(found) {
  return found.shape ? { ...found, model: found.shape.name } : found;
}
export function shorten({ model, ...values }) {
  return values.shape.layers ? { ...values, shape: shortShape(values.shape) } : { ...values, model };
}

/** The same plan in Python. */
export function inPython(values) {
  const { setup } = settle(values);
  const usual = setupOf({ shape: setup.shape, card: setup.card, num_generations: setup.num_generations });
  const literal = (value) =>
    typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value);
  const skipped = ["shape", "card", "prompt_length", "max_completion_length", "num_generations"];
  const names = Object.keys(usual).filter(
    (name) => !skipped.includes(name) && JSON.stringify(setup[name]) !== JSON.stringify(usual[name]),
  );
  const own = values.prompt_length !== null || setup.picture_tokens;
  const given = ["context", ...(own ? ["prompt_length"] : [])];
  const all = { ...setup, context: values.context };
  const told = [...given, "num_generations", ...names].map((name) => `${name}=${literal(all[name])}`);
  const model = values.shape.layers ? "FOLDER" : setup.shape.name;
  return (
    "from grpo_nb.planning.plan import describe, plan\n\n" +
    `made = plan(\n    ${[JSON.stringify(model), JSON.stringify(values.card), ...told].join(",\n    ")},\n)\n` +
    "print(describe(made))"
  );
}

/** What a batch widget on the same page follows, and what is followed of it. */
export const shared = ({ num_generations, per_device_train_batch_size }) => ({
  num_generations,
  per_device_train_batch_size,
});
export const follows = (given) => given;

// ---------------------------------------------------------------- the widget

const SWITCHES = [
  ["offload_activations", "layer inputs in host memory"],
  ["offload_embedding", "embedding in host memory"],
  ["gradient_checkpointing", "checkpointing: layers keep their input"],
  ["slice_tokens", "experts and MLP in slices", { on: null, off: CONSTANTS.ALL }],
  ["logit_chunk_multiplier", "logits in chunks", { on: null, off: 1 }],
];
const MORE = [
  ["lora_targets", "adapters on experts and MLP too", { on: ["attention", "mlp"], off: ["attention"] }],
  ["share_prompt", "a group's prompt computed once"],
  ["offload_hidden", "what the head keeps in host memory"],
  ["reference", "a second model as the reference"],
  ["train_parts", "what sees trains too", { on: ["text", "tower"], off: null }],
];

const nearest = (list, value) =>
  list.reduce((a, b) => (Math.abs(b - value) < Math.abs(a - value) ? b : a));

export default {
  render({ model, el }) {
    const still = matchMedia("(prefers-reduced-motion: reduce)");
    const names = Object.keys(defaults);
    const valuesNow = () => Object.fromEntries(names.map((name) => [name, model.get(name)]));
    let known = { key: null }; // the last plan, and what it was made of
    let last = null; // {words, before, after}: what the last change of a setting did
    let shown = null; // what the picture shows now, number by number
    let motion = null; // {from, to, start}
    let pointed = null; // {moment, part}
    let drawn = null; // where things are in the picture
    let [view, waiting, doubts] = [null, 0, []];
    const order = Object.keys(MOMENTS); // of what is planned: without pictures there is one less

    /** The plan of the values, made once for each. */
    function planned(values) {
      const { moment, ...rest } = values;
      const key = JSON.stringify(rest);
      if (known.key === key) return known;
      const { setup, notes } = settle(values);
      const plan = planOf(setup);
      const before = known.key ? known : null;
      known = {
        key,
        plan,
        notes,
        values: rest,
        usual: standard(setup),
        moments: { load: plan.load, ...plan.moments },
      };
      order.splice(0, order.length, ...Object.keys(MOMENTS).filter((name) => name in known.moments));
      if (before) {
        const names = Object.keys(rest).filter(
          (name) => JSON.stringify(rest[name]) !== JSON.stringify(before.values[name]),
        );
        last = { names, before: before.plan.peak, after: plan.peak, moments: before.moments };
      }
      later();
      return known;
    }

    const momentOf = ({ plan, moments }, { moment }) => (moment in moments ? moment : plan.worst);

    // -------------------------------------------------------------- what moves

    /** What the picture has to show, as numbers in one record. */
    function target(values, { plan, usual, moments }, moment) {
      const flat = { room: plan.room };
      const put = (name, parts) => {
        for (const [part, size] of Object.entries(parts)) flat[`${name} ${part}`] = size;
      };
      put("vessel", moments[moment]);
      for (const [name, parts] of Object.entries(moments)) put(name, parts);
      put("usual", usual.moments[usual.worst]);
      flat.top = Math.min(1.14 * Math.max(plan.room, plan.peak), 4 * plan.room);
      return flat;
    }

    /** The record on its way from what was shown to what has to be. */
    function onItsWay(to) {
      const key = JSON.stringify(to);
      if (motion?.key !== key) {
        const from = shown ?? to;
        motion = { key, from, to, start: still.matches ? -Infinity : performance.now() };
      }
      const t = clamp((performance.now() - motion.start) / SLOW, 0, 1);
      const share = t * t * (3 - 2 * t);
      if (t >= 1) shown = to;
      else {
        const { from } = motion;
        const between = ([name, size]) => [name, (from[name] ?? 0) + share * (size - (from[name] ?? 0))];
        shown = Object.fromEntries(Object.entries(to).map(between));
        requestAnimationFrame(() => view?.redraw());
      }
      return shown;
    }

    // -------------------------------------------------------------- the picture

    const partsOf = (name) =>
      BLOCKS.map((part) => [part, shown[`${name} ${part}`] ?? 0]);

    function placed(width) {
      const narrow = width < 560;
      const vessel = narrow ? clamp(width * 0.43, 122, 230) : clamp(width * 0.44, 240, 400);
      const left = vessel + (narrow ? 24 : 46);
      const each = (width - left) / (order.length + 1);
      const high = narrow ? 290 : 340;
      const rows = each < 30 ? 3 : each < 56 ? 2 : 1; // of labels, so that neighbours keep apart
      return { narrow, x: 10, vessel, left, each, rows, top: 24, high, floor: 24 + high };
    }

    const yOf = (size) => drawn.floor - (drawn.high * size) / shown.top;

    /** A stack of parts; [shapes, y of its upper end]. */
    function stack(name, x, width, moment) {
      const shapes = [];
      let below = 0;
      for (const [part, size] of partsOf(name)) {
        if (size <= 0) continue;
        const [low, high] = [yOf(below), yOf(Math.min(below + size, shown.top))];
        below += size;
        if (low - high < 0.3) continue;
        const chosen = pointed?.part === part && pointed.moment === moment;
        shapes.push(
          rect(x, high, width, low - high, {
            class: `block part ${part} ${chosen ? "picked" : ""}`,
          }),
        );
        if (name === "vessel" && low - high >= 16) {
          const middle = (low + high) / 2 + 5;
          const label = part === "mlp" && known.plan.setup.shape.experts ? "experts" : LABELS[part];
          shapes.push(
            text(x + 6, middle, label, { class: "on-colour" }),
            text(x + width - 6, middle, gib(size), { class: "on-colour", "text-anchor": "end" }),
          );
        }
      }
      return [shapes, yOf(Math.min(below, shown.top)), below];
    }

    function vesselShapes(moment) {
      const { x, vessel, floor, narrow } = drawn;
      const rim = yOf(shown.room);
      const [shapes, level, size] = stack("vessel", x, vessel, moment);
      const over = size > shown.room;
      const former = last?.moments[moment] ? total(last.moments[moment]) : size;
      if (motion && former - size > 0.02 * shown.room && former <= shown.top * 1.5) {
        const from = yOf(Math.min(former, shown.top));
        shapes.push(rect(x + 3, from, vessel - 6, Math.max(0, level - from - 2), { class: "ghost" }));
        if (level - from > 20) {
          shapes.push(
            text(x + vessel / 2, (level + from) / 2 + 5, `−${gib(former - size)} GiB`, {
              class: "freed", "text-anchor": "middle",
            }),
          );
        }
      } else if (rim < level - 20) {
        shapes.push(
          text(x + vessel / 2, (rim + level) / 2 + 5, `${gib(shown.room - size)} GiB free`, {
            class: "quiet", "text-anchor": "middle",
          }),
        );
      }
      if (over) {
        shapes.push(
          rect(x - 6, level, vessel + 12, rim - level, { class: "spill" }),
          text(x + vessel / 2, Math.max(level - 7, 12), `${gib(size - shown.room)} GiB too much`, {
            class: "spilt", "text-anchor": "middle",
          }),
        );
      }
      const wall = `M${x - 9},${rim} l6,4 V${floor + 3} H${x + vessel + 3} V${rim + 4} l6,-4`;
      shapes.push(node("svg:path", { d: wall, class: "wall" }));
      const [name] = MOMENTS[moment];
      shapes.push(
        text(x + vessel / 2, floor + 22, narrow ? name : `${name}: ${gib(size)} GiB`, {
          class: "title", "text-anchor": "middle",
        }),
      );
      return shapes;
    }

    function columnShapes(moment) {
      const { left, each, rows, floor, x, vessel, narrow } = drawn;
      const wide = Math.min(56, each * (narrow ? 0.7 : 0.62));
      const shapes = [...order, "usual"].map((name, i) => {
        const middle = left + each * (i + 0.5);
        const [blocks, level, size] = stack(name, middle - wide / 2, wide, name);
        const words = name === "usual" ? "usual" : MOMENTS[name][0];
        const over = size > shown.room;
        const y = floor + 20 + 16 * (i % rows);
        return [
          name === moment ? rect(middle - each / 2, 16, each, floor - 16, { class: "here" }) : null,
          blocks,
          size > shown.top
            ? text(middle, drawn.top - 4, `↑ ${gib(size, 0)}`, { "text-anchor": "middle", class: "small" })
            : null,
          text(middle, y, words, {
            "text-anchor": "middle",
            class: `small ${narrow ? "tiny" : ""} ${name === moment && !narrow ? "bold" : "quiet"} ` +
              `${over ? "too-much" : ""}`,
          }),
        ];
      });
      const rim = yOf(shown.room);
      const { card } = known.plan.setup;
      shapes.push(
        line(x + vessel + 10, rim, left + (order.length + 1) * each, rim, { class: "border" }),
        text(left, rim - 6, `${card.name}: ${card.usable} GiB`, { class: "small halo bold" }),
      );
      return shapes;
    }

    function draw(values, width) {
      const now = planned(values);
      const moment = momentOf(now, values);
      onItsWay(target(values, now, moment));
      drawn = placed(width);
      follow(values);
      const shapes = [columnShapes(moment), vesselShapes(moment)];
      return { shapes, height: drawn.floor + 26 + 16 * Math.max(1, drawn.rows - 1), caption: verdict(now, values) };
    }

    // -------------------------------------------------------------- words

    function verdict({ plan, notes }, { context }) {
      const { setup } = plan;
      const spare = plan.room - plan.peak;
      const [name] = MOMENTS[plan.worst];
      const told = plan.fits
        ? `It fits, with ${gib(spare, 2)} GiB to spare.`
        : `It does not fit: “${name}” needs ${gib(Math.max(-spare, CONSTANTS.GiB / 100), 2)} GiB more.`;
      const waits = Object.entries(plan.host).filter(([name, size]) => size && name !== "process");
      const host = waits.map(([name, size]) => `${name} ${gib(size)} GiB`).join(", ");
      const away = host ? [`In host memory: ${host}.`] : [];
      const fills = plan.fits && plan.worst === "rollout" && plan.rows < plan.step.generation_batch_size;
      const together = `${plan.rows} of ${plan.step.generation_batch_size} completions`;
      const close = fills
        ? ` Drawing takes what is free: ${together} at a time.`
        : Math.abs(spare) < 0.03 * plan.room
          ? " That is close: a plan is right to a few per cent."
          : "";
      const what = `${setup.shape.name} in ${setup.weights} on a ${setup.card.name}, ` +
        `${thousands(context)} tokens. `;
      return [what + told + close, ...away, ...notes, ...doubts].join(" ");
    }

    function block({ moment, part }, { plan, usual }) {
      const one = moment === "usual" ? usual : plan;
      const at = moment === "usual" ? usual.worst : moment;
      const all = (one.moments[at] ?? one.load)[part];
      const terms = explain(one, at, part).map(([words, size]) => `${words} = ${gib(size, 2)}`);
      const where = moment === "usual" ? "in the usual practice" : `at “${MOMENTS[moment][0]}”`;
      return `${CONSTANTS.PARTS[part]} ${where}: ${gib(all, 2)} GiB. ${terms.join("; ")}.`;
    }

    const USUAL =
      "The usual practice at its worst moment: 16 bit, all logits at once, vLLM with weights of its own.";

    function detail(values) {
      if (pointed?.part) return block(pointed, known);
      if (pointed?.moment === "usual") return USUAL;
      if (last && Math.abs(last.before - last.after) >= CONSTANTS.GiB / 100) {
        const moved = last.before - last.after;
        const several = last.names.length === 2 ? "" : "s";
        const verb = `${moved > 0 ? "free" : "take"}${several}`;
        const what = last.names.length > 2 ? "That" : last.names.join(" and ");
        return (
          `${what} ${verb} ${gib(Math.abs(moved), 2)} GiB: the fullest moment goes from ` +
          `${gib(last.before, 2)} to ${gib(last.after, 2)}.`
        );
      }
      if (values.moment) return MOMENTS[values.moment][1];
      return null;
    }

    function facts(values) {
      const { plan, usual, moments } = planned(values);
      const moment = momentOf(known, values);
      const few = drawn.narrow ? [moment] : order; // a narrow page has room for two columns
      const columns = [...few.map((name) => moments[name]), usual.moments[usual.worst]];
      const heads = [...few.map((name) => MOMENTS[name][0]), "usual"];
      const rows = Object.entries(CONSTANTS.PARTS)
        .filter(([part]) => columns.some((parts) => parts[part]))
        .map(([part, words]) => [words, ...columns.map((parts) => (parts[part] ? gib(parts[part], 2) : "–"))]);
      return [
        ["GiB", ...heads],
        ...rows,
        ["in all", ...columns.map((parts) => gib(total(parts), 2))],
      ];
    }

    // -------------------------------------------------------------- what is found after a pause

    const solved = (values) =>
      planned(values).plan.fits && !values.shape.layers && values.model === TASK.model && values.card === TASK.card &&
      values.context >= TASK.context;

    const gains = new Map(); // switch -> where it says what it would do
    const advice = node("div", { class: "advice" });
    const code = node("pre", { tabindex: 0, "aria-label": "the same plan in Python" });
    const status = node("span", { class: "told", "aria-live": "polite" });

    function follow(values) {
      const python = inPython(values);
      if (code.textContent !== python) code.textContent = python;
    }

    /** What each switch would do, and the nearest that fits: after a pause, for it takes longer. */
    function later() {
      clearTimeout(waiting);
      waiting = setTimeout(think, PAUSE);
    }

    function think() {
      const values = valuesNow();
      const now = planned(values);
      for (const [name, { output, next }] of gains) {
        const { setup } = settle({ ...values, ...next(values) });
        const moved = setupProblem(setup) ? 0 : planOf(setup).peak - now.plan.peak;
        const small = Math.abs(moved) < CONSTANTS.GiB / 100;
        output.textContent = small ? "" : `${moved < 0 ? "−" : "+"}${gib(Math.abs(moved))} GiB`;
        output.classList.toggle("frees", moved < 0);
      }
      advice.replaceChildren(...advised(now, values));
    }

    /** Change settings and stay at the moment that is shown, so that one sees it empty. */
    const staying = () => ({ moment: momentOf(known, valuesNow()) });
    const press = (changes) => () => change(model, { ...changes, ...staying() });

    function advised({ plan }, values) {
      if (plan.fits) {
        const longest = longestContext(plan.setup);
        const room = longest > values.context && values.prompt_length === null;
        const words = `Nothing has to be changed. The longest context that fits: ${thousands(longest)} tokens. `;
        return [node("p", {}, words, room ? button("Use it", press({ context: longest })) : "")];
      }
      const found = fitting(plan);
      if (!found) return [node("p", {}, "Nothing that is known here makes it fit: take a smaller model.")];
      const changes = asValues(found.changes, plan.setup);
      const lines = found.advice.map(({ changes: one, cost, saves }) =>
        node("li", {}, `${inWords(asValues(one, plan.setup))}: frees ${gib(saves, 2)} GiB. ${cost}`),
      );
      const { card, context } = changes;
      if (context) {
        lines.push(node("li", {}, `A context of ${thousands(context)} tokens, the longest that then fits.`));
      }
      if (card) lines.push(node("li", {}, `A larger card: ${card}.`));
      const go = button("Make it fit", press(changes), { class: "fit" });
      return [
        node("p", {}, `The nearest that fits, ${plural(lines.length, "change")}: `, go),
        node("ul", {}, lines),
      ];
    }

    const inWords = (changes) =>
      Object.entries(changes)
        .map(([name, value]) => `${name} = ${value === true ? "True" : value === false ? "False" : value}`)
        .join(", ");

    // -------------------------------------------------------------- pointing

    function pointAt(x, y) {
      if (x === null || !drawn || !shown) return null;
      const { left, each, x: first, vessel, floor, rows } = drawn;
      const i = Math.floor((x - left) / each);
      const column = [...order, "usual"][i];
      const inside = x >= first - 6 && x <= first + vessel + 6;
      const moment = inside ? momentOf(known, valuesNow()) : column;
      if (!moment || y > floor + 8 + 16 * Math.max(2, rows)) return null;
      let below = 0;
      for (const [part, size] of partsOf(inside ? "vessel" : column)) {
        below += size;
        if (size > 0 && y <= floor && y >= yOf(below)) return { moment, part };
      }
      return { moment, part: null };
    }

    function point(next) {
      const other = pointed?.moment !== next?.moment || pointed?.part !== next?.part;
      pointed = next;
      return other;
    }

    /** Hold and drag over the columns: the moment follows. */
    function scrub(x) {
      const i = Math.floor((x - (drawn?.left ?? Infinity)) / (drawn?.each ?? 1));
      if (i < 0 || i > order.length) return null;
      return (at) => {
        const j = clamp(Math.floor((at - drawn.left) / drawn.each), 0, order.length - 1);
        change(model, { moment: order[j] });
      };
    }

    function key(event) {
      const values = valuesNow();
      const now = planned(values);
      const moment = momentOf(now, values);
      if (event.key === "Escape") return point(null);
      const sideways = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (sideways) {
        const next = order[clamp(order.indexOf(moment) + sideways, 0, order.length - 1)];
        change(model, { moment: next });
        if (pointed) point({ moment: next, part: pointed.part });
        return true;
      }
      const up = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!up) return false;
      const parts = BLOCKS.filter((part) => now.moments[moment][part]);
      const at = parts.indexOf(pointed?.part);
      point({ moment, part: parts[clamp(at < 0 ? 0 : at + up, 0, parts.length - 1)] });
      return true;
    }

    // -------------------------------------------------------------- controls

    function advance() {
      const at = order.indexOf(model.get("moment"));
      change(model, { moment: order[(at + 1) % order.length] });
      point(null);
      return at + 1 < order.length - 1;
    }
    const play = player("Play the step", () => advance(), 1100);
    const fullest = button("Fullest moment", () => (play.stop(), change(model, { moment: "" })));

    /** A box to tick that says what it would free. */
    function switched([name, label, { on = true, off = false } = {}]) {
      const read = (all) =>
        name === "lora_targets"
          ? settle(all).setup.lora_targets.includes("mlp")
          : on === true ? all[name] : all[name] !== off;
      const write = (yes) => ({
        [name]: yes ? on : off,
        ...(name === "offload_hidden"
          ? { mini_batch: yes ? model.get("per_device_train_batch_size") : 1 } : {}),
      });
      const control = tick(model, name, {
        label, read, write: (yes) => ({ ...write(yes), ...staying() }),
      });
      const output = node("span", { class: "gain", "aria-hidden": "true" });
      control.element.append(output);
      control.input.setAttribute("aria-label", label);
      gains.set(name, { output, next: (all) => write(!read(all)) });
      return control;
    }

    function openFile(file) {
      file?.text().then((written) => {
        try {
          const found = readShape(written);
          doubts = found.doubts;
          change(model, { model: found.shape.name, shape: found.shape, moment: "" });
          status.textContent = `${found.shape.name} is planned.`;
        } catch (error) {
          status.textContent = `Not read: ${error.message}.`;
        }
      });
    }

    const listed = node("select", {
      "aria-label": "model",
      "data-control": "model",
      onchange: () => {
        doubts = [];
        change(model, { model: listed.value, shape: {} });
      },
    }, Object.keys(MODELS).map((name) => node("option", { value: name }, name)));
    const models = {
      element: node("label", { class: "control" },
        node("div", { class: "head" }, node("span", { class: "name" }, "model")), listed),
      follow: ({ model: name, shape }) => {
        const own = listed.querySelector("[data-own]");
        own?.remove();
        if (shape.layers) listed.append(node("option", { value: name, "data-own": true }, name));
        listed.value = name;
      },
    };
    const chosen = node("input", {
      type: "file",
      accept: ".json,application/json",
      hidden: true,
      "aria-label": "a model's config.json",
      onchange: () => openFile(chosen.files[0]),
    });
    const sizes = [
      models,
      menu(model, "card", {
        options: Object.values(CARDS).map(({ name, usable }) => [name, `${name}, ${usable} GiB`]),
      }),
      menu(model, "weights", { options: Object.keys(WEIGHTS).map((name) => [name, name]) }),
      slider(model, "context", {
        label: "context in tokens",
        values: CONTEXTS,
        read: (all) => nearest(CONTEXTS, all.context),
        format: () => thousands(model.get("context")),
      }),
    ];
    const more = [
      slider(model, "num_generations", { label: "completions of a prompt", min: 2, max: MOST.num_generations }),
      slider(model, "per_device_train_batch_size", {
        label: "trained at a time", min: 1, max: MOST.per_device_train_batch_size,
      }),
      slider(model, "prompt_length", {
        label: "of the tokens, prompt",
        values: PROMPTS,
        format: (value) => (value === null ? "512, or half" : thousands(value)),
      }),
      slider(model, "picture_tokens", {
        label: "of the prompt, pictures",
        values: PICTURES,
        format: (value) => (value ? `${thousands(value)} tokens` : "none"),
      }),
      slider(model, "lora_r", {
        label: "rank of the adapters",
        values: RANKS,
        format: (value) => (value ? String(value) : "0: all weights train"),
      }),
      menu(model, "sampler", { label: "drawn", options: Object.entries(SAMPLERS) }),
      menu(model, "optim", { label: "optimizer", options: OPTIMIZERS.map((name) => [name, name]) }),
      ...MORE.map(switched),
    ];
    const folded = {
      element: node("details", { class: "more" },
        node("summary", {}, "More settings"),
        node("div", { class: "controls" }, more.map((control) => control.element))),
      follow: (all) => more.forEach((control) => control.follow(all)),
    };
    const moments = slider(model, "moment", {
      label: "moment of the step",
      values: order,
      read: (all) => momentOf(planned(all), all),
      format: (name) => MOMENTS[name][0],
    });

    const open = button("Open a config.json", () => chosen.click());
    view = frame(model, el, {
      name: "memory",
      label: "A card as a vessel that fills over the moments of a step",
      defaults,
      controls: [...sizes, ...SWITCHES.map(switched), folded, moments],
      extra: [play.element, fullest],
      hint:
        "Each column is a moment, the vessel the one that is chosen. Point at a block for its " +
        "formula, drag over the columns, or focus the picture and use the arrow keys.",
      draw,
      detail,
      key,
      move: (x, y) => point(pointAt(x, y)),
      press: (x) => scrub(x),
      legend: Object.entries(CONSTANTS.PARTS).map(([part, words]) => [`part ${part}`, words]),
      facts,
      below: [
        node("div", { class: "buttons" }, open, chosen, status),
        node("details", { class: "more" },
          node("summary", {}, "In Python, and what this leaves out"),
          code,
          node("p", {}, LEFT_OUT)),
      ],
      page: "widgets/06_memory",
      shorten,
      task: {
        words: `fit ${TASK.model} on a ${TASK.card} with ${thousands(TASK.context)} tokens, ` +
          "without another model, card or a shorter context.",
        done: (values) => solved(values) &&
          `${TASK.model} with ${thousands(values.context)} tokens fits a ${TASK.card}.`,
      },
    });
    const root = el.querySelector(".grpo-memory-viz");
    root.querySelector(".detail").after(advice);
    root.addEventListener("dragover", (event) => event.preventDefault());
    root.addEventListener("drop", (event) => {
      event.preventDefault();
      openFile(event.dataTransfer?.files[0]);
    });
    clearTimeout(waiting);
    think();
    return () => {
      play.stop();
      clearTimeout(waiting);
      view.leave();
    };
  },
};

const LEFT_OUT =
  "Every number is the planner's, for one card. Left to grpo-nb plan: cards that share the " +
  "weights or only draw, the least time of a step, and models whose numbers are counted in their " +
  "class. A config.json may be dropped anywhere on this widget; it stays in this page.";
