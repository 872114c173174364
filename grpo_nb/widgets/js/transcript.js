// A completion token by token: who wrote it, whether it is in the loss, and what moves it.

import { range, tokenTerms } from "./arithmetic.js";
import { frame, line, menu, node, plural, rect } from "./kit.js";
import { signed, slider, text } from "./kit.js";
import { EXAMPLE } from "./transcript_example.js";

export const defaults = {
  completions: EXAMPLE,
  completion: 0,
  colour: "owner",
  epsilon: 0.2,
  epsilon_high: 0.28,
};

export const linked = ["completion", "colour", "epsilon", "epsilon_high"];
export function legal(name, value) {
  if (name === "colour") return COLOURS.some(([colour]) => colour === value);
  return value >= 0 && (name === "completion" ? value in EXAMPLE : value <= 2);
}

const COLOURS = [
  ["owner", "owner: who wrote it"],
  ["loss", "loss: in it or not"],
  ["advantage", "advantage"],
  ["pull", "pull: advantage × ratio, clipped"],
];
const FONT = '14px ui-monospace, Menlo, Consolas, "Liberation Mono", monospace';
const LEFT = 10; // of the tokens: a stretch's line stands there
const BOX = 24; // height of a token
const LINE = BOX + 6;
const LABEL = 20; // above the tokens of a stretch

/** A token's text with its white space in sight. */
const seen = (words) => words.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥");

/** A function: (words, width) -> what fits of them, its end left out, and its width. */
function measure() {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = FONT;
  const known = new Map();
  const size = (words) => {
    if (!known.has(words)) known.set(words, Math.ceil(pen.measureText(words).width));
    return known.get(words);
  };
  return (words, width) => {
    let end = words.length;
    let kept = words;
    while (end > 1 && size(kept) > width) kept = `${words.slice(0, --end)}…`;
    return [kept, size(kept)];
  };
}

/** The tokens of a completion with all that is known of each. */
function tokensOf({ completions, completion, epsilon, epsilon_high }) {
  const { advantage, tokens } = completions[completion];
  return tokens.map(([words, owner, policy, sampler], index) => {
    const terms = tokenTerms(policy, sampler, advantage, { epsilon, epsilon_high });
    const clipped = terms !== null && advantage !== 0 && terms.pull === 0;
    const known = { words, owner, policy, sampler, index, advantage };
    return { ...known, ...terms, drawn: terms !== null, clipped };
  });
}

/** Neighbours with one owner: [[token, ...], ...]. */
function stretchesOf(tokens) {
  const stretches = [];
  for (const token of tokens) {
    const last = stretches.at(-1);
    if (last && last[0].owner === token.owner && last[0].drawn === token.drawn) last.push(token);
    else stretches.push([token]);
  }
  return stretches;
}

/** What stands above a stretch, by what the colours show. */
function labelOf(stretch, colour) {
  const { owner, drawn, advantage } = stretch[0];
  if (colour === "owner") return `${owner}: ${plural(stretch.length, "token")}`;
  if (!drawn) return `${owner}: ${colour === "loss" ? "not in the loss" : `no ${colour}`}`;
  if (colour === "loss") return `${owner}: in the loss`;
  if (colour === "advantage") return `${owner}: advantage ${signed(advantage)}`;
  const pulls = stretch.filter((token) => !token.clipped).map((token) => token.pull);
  const clipped = stretch.length - pulls.length;
  const ends = [Math.min(...pulls), Math.max(...pulls)].map((end) => signed(end));
  const words = pulls.length ? `pull ${ends[0] === ends[1] ? ends[0] : ends.join(" to ")}` : "";
  return `${owner}: ${[words, clipped ? `${clipped} clipped` : ""].filter(Boolean).join(", ")}`;
}

/** A token's colour: a class and how strong it is. */
function paint({ owner, drawn, advantage, pull }, colour) {
  if (colour === "owner") return [drawn ? "own" : owner === "prompt" ? "asked" : "read", 1];
  if (!drawn) return ["bare", 1];
  if (colour === "loss") return ["counted", 1];
  const value = colour === "pull" ? pull : advantage;
  if (value === 0) return ["bare", 1];
  return [value > 0 ? "up" : "down", 0.12 + 0.34 * Math.min(Math.abs(value) / 2, 1)];
}

/** What the picture says in words. */
function inWords({ completions, completion }, tokens) {
  const drawn = tokens.filter((token) => token.drawn);
  const { title, advantage } = completions[completion];
  const clipped = drawn.filter((token) => token.clipped).length;
  const rest = tokens.length - drawn.length;
  return (
    `${title}: ${drawn.length} of ${plural(tokens.length, "token")} are in the loss, each with ` +
    `advantage ${signed(advantage)}; ${rest} are only read. The clip silences ${clipped || "none"}.`
  );
}

/** A token in words. */
function tokenInWords(token, count) {
  const name = `Token ${token.index + 1} of ${count}, “${seen(token.words)}”, by ${token.owner}`;
  if (!token.drawn) {
    const alone = `${name}: nobody drew it, so it has no ratio and is not in the loss.`;
    if (token.policy === null) return alone;
    return `${alone} The policy's log-prob of it: ${number(token.policy)}.`;
  }
  const end = token.clipped ? "the clip leaves no pull" : `pull ${signed(token.pull)}`;
  return (
    `${name}: log-prob ${number(token.policy)} under the policy, ${number(token.sampler)} under ` +
    `the sampler, ratio ${token.ratio.toFixed(2)}. Advantage ${signed(token.advantage)}, ${end}.`
  );
}

const number = (value) => value.toFixed(2).replace("-", "−").replace(/^−0\.00$/, "0.00");

export default {
  render({ model, el }) {
    let pointed = null; // a token
    let tokens = [];
    let boxes = []; // where the tokens stand: {x, y, width, token}
    let view = null;
    const fitted = measure();

    function place(stretches, width) {
      boxes = [];
      let top = 0;
      return stretches.map((stretch) => {
        let [x, y] = [LEFT, top + LABEL];
        for (const token of stretch) {
          const [words, size] = fitted(seen(token.words), width - LEFT - 10);
          const box = Math.max(size, 8) + 8;
          if (x + box > width && x > LEFT) [x, y] = [LEFT, y + LINE];
          boxes.push({ x, y, width: box, words, token });
          x += box + 3;
        }
        const span = { stretch, top, bottom: y + BOX };
        top = y + LINE + 6;
        return span;
      });
    }

    /** All boxes, a shape for each colour; lines under them, and strokes through the clipped. */
    function paper(colour) {
      const paths = new Map();
      const add = (kind, d) => paths.set(kind, (paths.get(kind) ?? "") + d);
      for (const { x, y, width, token } of boxes) {
        const [kind, strength] = paint(token, colour);
        add(`token ${kind}|${strength.toFixed(3)}`, `M${x},${y}h${width}v${BOX}h${-width}z`);
        add(token.drawn ? "wrote|1" : "wrote not|1", `M${x},${y + BOX}h${width}`);
        if (colour === "pull" && token.clipped) add("axis|1", `M${x},${y + BOX}l${width},${-BOX}`);
      }
      return [...paths].map(([kind, d]) => {
        const [name, opacity] = kind.split("|");
        return node("svg:path", { d, class: name, opacity });
      });
    }

    function reader({ x, y, width }) {
      return rect(x - 1, y - 1, width + 2, BOX + 2, { class: "reader" });
    }

    function draw(values, width) {
      tokens = tokensOf(values);
      if (pointed !== null && pointed >= tokens.length) pointed = null;
      const spans = place(stretchesOf(tokens), width);
      const shapes = spans.map(({ stretch, top, bottom }) => [
        text(LEFT, top + 13, labelOf(stretch, values.colour), { class: "quiet" }),
        line(2, top + 4, 2, bottom, { class: stretch[0].drawn ? "owner own" : "owner not" }),
      ]);
      shapes.push(
        paper(values.colour),
        boxes.filter(({ token }) => token.index === pointed).map(reader),
        boxes.map(({ x, y, words }) => text(x + 4, y + 17, words, { class: "mono" })),
      );
      return { shapes, height: spans.at(-1).bottom + 4, caption: inWords(values, tokens) };
    }

    function point(token) {
      const other = token !== pointed;
      pointed = token;
      return other;
    }

    function tokenAt(x, y) {
      if (x === null) return null;
      const inside = (box) => x >= box.x - 2 && x <= box.x + box.width + 2 && y >= box.y - 3;
      return boxes.find((box) => inside(box) && y <= box.y + BOX + 3)?.token.index ?? null;
    }

    /** The first token of the next stretch, or of this one or the one before. */
    function turn(from, towards) {
      const firsts = stretchesOf(tokens).map((stretch) => stretch[0].index);
      const before = firsts.filter((first) => first < from);
      if (towards > 0) return firsts.find((first) => first > from) ?? tokens.length - 1;
      return before.at(-1) ?? 0;
    }

    function key(event) {
      if (event.key === "Escape") return point(null);
      const now = pointed ?? -1;
      const moves = {
        ArrowRight: () => Math.min(now + 1, tokens.length - 1),
        ArrowLeft: () => Math.max(now - 1, 0),
        ArrowDown: () => turn(now, 1),
        ArrowUp: () => turn(now, -1),
        Home: () => 0,
        End: () => tokens.length - 1,
      };
      if (!(event.key in moves)) return false;
      point(moves[event.key]());
      return true;
    }

    /** A slider over the completions, however many there are. */
    function chooser() {
      const control = slider(model, "completion", {
        min: 0,
        max: 0,
        format: (i) => model.get("completions")[i].title,
      });
      const { follow } = control;
      control.follow = (values) => {
        control.input.max = values.completions.length - 1;
        follow(values);
      };
      return control;
    }
    const borders = { min: 0, step: 0.02, format: (value) => value.toFixed(2) };

    view = frame(model, el, {
      name: "transcript",
      label: "The tokens of a completion: who wrote each, and what it adds to the loss",
      defaults,
      controls: [
        chooser(),
        menu(model, "colour", { label: "colour by", options: COLOURS }),
        slider(model, "epsilon", { ...borders, max: 1 }),
        slider(model, "epsilon_high", { ...borders, max: 2 }),
      ],
      hint:
        "Point at a token for its numbers, or press Tab and the arrow keys: ← → go by tokens, " +
        "↑ ↓ by turns.",
      draw,
      detail: () => (pointed === null ? null : tokenInWords(tokens[pointed], tokens.length)),
      key,
      move: (x, y) => point(tokenAt(x, y)),
      task: {
        words: "colour by pull, and move a border until the clip silences no token of this completion.",
        done: (values) => values.colour === "pull" && !tokensOf(values).some((token) => token.clipped) &&
          `With epsilon_high = ${values.epsilon_high.toFixed(2)} each token that was drawn is pushed.`,
      },
    });
    return view.leave;
  },
};
