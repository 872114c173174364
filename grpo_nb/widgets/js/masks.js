// The mask of a padded batch through prefill and decode, beside the naive one.

import { keysRead, masks, range } from "./arithmetic.js";
import { button, change, clamp, frame, node, player, plural } from "./kit.js";
import { rect, slider, text, within } from "./kit.js";

export const defaults = { prompt_a: 8, prompt_b: 5, step: 2, window: 0 };

export const legal = (name, value) =>
  within(value, { step: [0, 6], window: [0, 8] }[name] ?? [1, 8]);

const PROMPT = "9+12+34="; // its last letters are the prompts
const ANSWER = "abcdef"; // what is decoded
const LEFT = 18; // of a matrix: the queries' tokens stand there
const TOP = 44; // of a matrix: its title and the keys' tokens stand there

/** The four matrices of a setting: prompt A and B, each right and naive. */
function matrices(values) {
  const { right, naive, first, size } = masks(values);
  const longest = size - values.step;
  const lengths = [values.prompt_a, values.prompt_b];
  return lengths.flatMap((length, sequence) => {
    const padding = longest - length;
    const written = PROMPT.slice(PROMPT.length - length) + ANSWER.slice(0, values.step);
    const tokens = ["·".repeat(padding), written].join("");
    const shared = { sequence, padding, tokens, first, size, right: right[sequence] };
    return [
      { ...shared, name: "right", allowed: right[sequence] },
      { ...shared, name: "naive", allowed: naive },
    ];
  });
}

const differs = (a, b) => a.some((value, i) => value !== b[i]);

/** How many queries of this step the naive mask serves badly. */
const wrong = ({ allowed, right, first }) =>
  right.slice(first).filter((row, i) => differs(row, allowed[first + i])).length;

/** What the picture says in words. */
function inWords({ step, window }, all) {
  const { size, first } = all[0];
  const queries = (count) => (count === 1 ? "1 query" : `${count} queries`);
  const kind = step ? `Decode step ${step}` : "Prefill";
  const sight = window ? `a window of ${plural(window, "key")}` : "no window";
  const bad = all.filter((matrix) => matrix.name === "naive" && wrong(matrix));
  const verdict = bad.map((matrix) => {
    const prompt = `prompt ${"AB"[matrix.sequence]}`;
    return step ? prompt : `${wrong(matrix)} of ${queries(size)} of ${prompt}`;
  });
  const naive = bad.length ? `wrong for ${verdict.join(" and ")}` : "right for both prompts";
  return (
    `${kind}: ${queries(size - first)}, ${plural(size, "key")}, ${sight}. ` +
    `The naive mask is ${naive}.`
  );
}

export default {
  render({ model, el }) {
    let pointed = null; // {sequence, query, key}
    let all = [];
    let grid = null; // where the matrices stand: {cell, width, height}
    let view = null;

    const leftOf = (i) => LEFT + (i % 2) * grid.width;
    const topOf = (i) => TOP + Math.floor(i / 2) * grid.height;
    const isAt = (matrix, query) =>
      pointed && pointed.sequence === matrix.sequence && pointed.query === query;

    function tokens(i, matrix) {
      const { cell } = grid;
      const reader = pointed?.sequence === matrix.sequence ? pointed.query : matrix.size - 1;
      return [...matrix.tokens].map((token, place) => {
        const quiet = place < matrix.padding ? "small quiet" : "small";
        const read = matrix.allowed[reader][place];
        const colour = matrix.right[reader][place] ? "up" : "down";
        const at = { "text-anchor": "middle" };
        const bold = read ? { class: `small ${colour}`, "font-weight": 700 } : { class: quiet };
        const [x, y] = [leftOf(i) + place * cell + cell / 2, topOf(i) + place * cell + cell / 2];
        return [
          text(x, topOf(i) - 5, token, { ...at, ...bold }),
          text(leftOf(i) - 9, y + 4, token, { ...at, class: quiet }),
        ];
      });
    }

    /** Squares for the keys that are read or should be: a shape for each kind, and the signs. */
    function squares(i, { allowed, right, size, first }) {
      const { cell } = grid;
      const paths = {};
      const add = (kind, d) => (paths[kind] = (paths[kind] ?? "") + d);
      for (const n of range(size * size)) {
        const [query, key] = [Math.floor(n / size), n % size];
        const [is, should] = [allowed[query][key], right[query][key]];
        if (!is && !should) continue;
        const kind = is && should ? "up" : is ? "down" : "missed";
        const [x, y] = [leftOf(i) + key * cell + 0.5, topOf(i) + query * cell + 0.5];
        const side = cell - 1;
        add(query < first ? `${kind} pale` : kind, `M${x},${y}h${side}v${side}h${-side}z`);
        if (kind === "up" || query < first) continue;
        // red and orange have a sign of their own, for eyes that see no difference
        const [left, top] = [x + side / 2 - 3, y + side / 2 - 3];
        add("sign", `M${left},${top + 6}l6,-6`);
        if (kind === "down") add("sign", `M${left},${top}l6,6`);
      }
      const { sign, ...kinds } = paths;
      const shapes = Object.entries(kinds).map(([kind, d]) => node("svg:path", { d, class: kind }));
      return [shapes, sign ? node("svg:path", { d: sign, class: "sign" }) : null];
    }

    function matrix(i, one) {
      const { cell } = grid;
      const side = one.size * cell;
      const [left, top] = [leftOf(i), topOf(i)];
      const grids = range(one.size + 1).map(
        (n) => `M${left + n * cell},${top}v${side}M${left},${top + n * cell}h${side}`,
      );
      const verdict = one.name === "naive" && grid.width > 200 ? `: ${wrong(one)} wrong` : "";
      const title = `${one.name}, prompt ${"AB"[one.sequence]}${verdict}`;
      const now = [left, top + one.first * cell, side, (one.size - one.first) * cell];
      const query = range(one.size).find((n) => isAt(one, n));
      return [
        text(left - LEFT + 4, top - 24, title, { class: "title" }),
        node("svg:path", { d: grids.join(""), class: "hair" }),
        squares(i, one),
        rect(...now, { class: "mark" }),
        query === undefined
          ? null
          : rect(left - 1, top + query * cell - 1, side + 2, cell + 2, { class: "reader" }),
        tokens(i, one),
      ];
    }

    function draw(values, width) {
      all = matrices(values);
      const half = Math.floor(width / 2);
      const cell = clamp(Math.floor((half - LEFT - 4) / all[0].size), 8, 22);
      grid = { cell, width: Math.min(half, LEFT + 14 * 22 + 30), height: TOP + all[0].size * cell };
      grid.height += 16;
      if (pointed && pointed.query >= all[0].size) pointed = null;
      const shapes = all.map((one, i) => matrix(i, one));
      return { shapes, height: 2 * grid.height, caption: inWords(values, all) };
    }

    function detail() {
      const sequence = pointed?.sequence ?? 1;
      const [right, naive] = all.slice(2 * sequence, 2 * sequence + 2);
      const query = pointed?.query ?? right.size - 1;
      const token = query < right.padding ? "padding" : `“${right.tokens[query]}”`;
      const same = differs(right.allowed[query], naive.allowed[query])
        ? `the naive mask ${keysRead(naive.allowed[query])}`
        : "the naive mask says the same";
      return (
        `Prompt ${"AB"[sequence]}, query ${query} (${token}) ` +
        `${keysRead(right.allowed[query])}; ${same}.`
      );
    }

    function queryAt(x, y) {
      if (x === null || !grid) return null;
      const i = 2 * Math.floor(y / grid.height) + Math.floor(x / grid.width);
      const query = Math.floor((y - topOf(i)) / grid.cell);
      const inside = all[i] && query >= 0 && query < all[i].size && x % grid.width > LEFT - 20;
      return inside ? { sequence: all[i].sequence, query } : null;
    }

    function point(next) {
      const other = pointed?.sequence !== next?.sequence || pointed?.query !== next?.query;
      pointed = next;
      return other;
    }

    function key(event) {
      if (event.key === "Escape") return point(null);
      const size = all[0].size;
      const now = pointed ?? { sequence: 1, query: size - 1 };
      const moves = {
        ArrowUp: { ...now, query: Math.max(now.query - 1, 0) },
        ArrowDown: { ...now, query: Math.min(now.query + 1, size - 1) },
        ArrowLeft: { ...now, sequence: 0 },
        ArrowRight: { ...now, sequence: 1 },
      };
      if (!(event.key in moves)) return false;
      point(moves[event.key]);
      return true;
    }

    /** One more token; false after the last. */
    function advance() {
      const step = model.get("step");
      change(model, { step: step >= ANSWER.length ? 0 : step + 1 });
      return model.get("step") < ANSWER.length;
    }
    const play = player("Play the steps", advance, 1000);

    view = frame(model, el, {
      name: "masks",
      label: "Which keys each query of two padded prompts reads: the right mask and the naive one",
      defaults,
      controls: [
        slider(model, "prompt_a", { label: "tokens of prompt A", min: 1, max: PROMPT.length }),
        slider(model, "prompt_b", { label: "tokens of prompt B", min: 1, max: PROMPT.length }),
        slider(model, "step", {
          label: "step",
          min: 0,
          max: ANSWER.length,
          format: (step) => (step ? `decode ${step}` : "prefill"),
        }),
        slider(model, "window", {
          label: "window",
          min: 0,
          max: PROMPT.length,
          format: (window) => (window ? plural(window, "key") : "none"),
        }),
      ],
      extra: [play.element, button("Back to prefill", () => change(model, { step: 0 }))],
      hint: "",
      draw,
      detail,
      key,
      move: (x, y) => point(queryAt(x, y)),
      legend: [
        ["up", "is read"],
        ["down", "× read by mistake"],
        ["missed", "/ should be read"],
        ["up pale", "earlier steps"],
      ],
      page: "widgets/05_masks",
      task: {
        words: "find a setting in which the naive mask is right for both prompts.",
        done: (values) =>
          !matrices(values).some((matrix) => matrix.name === "naive" && wrong(matrix)) &&
          "Prompts of one length, and nothing decoded yet: no padding, and no query but the prompt's.",
      },
    });
    return () => {
      play.stop();
      view.leave();
    };
  },
};
