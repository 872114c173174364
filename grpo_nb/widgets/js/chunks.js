// A batch cut into pieces and chunks, and what each way of cutting costs in memory.

import { chunkBytes, chunkRows, pieceEdges, range } from "./arithmetic.js";
import { clamp, frame, menu, node, plural, rect, slider, text, thousands, within } from "./kit.js";

export const defaults = {
  batch: 4,
  length: 8192,
  vocab: 128000,
  hidden: 4096,
  mini_batch: 4,
  logit_chunk_multiplier: 4,
  element_bytes: 4,
};

export function legal(name, value) {
  const lists = { length: LENGTHS, vocab: VOCABS, hidden: HIDDENS, element_bytes: [4, 2, 1] };
  return lists[name]?.includes(value) ?? within(value, [1, name === "logit_chunk_multiplier" ? 32 : 16]);
}
const TASK = { batch: 4, length: 32768, vocab: 128000, hidden: 4096, element_bytes: 4 };
const HEIGHT = 200; // of the batch
const TOP = 22;
const LENGTHS = range(8).map((k) => 2 ** (10 + k));
const VOCABS = [32000, 128000, 151936, 201088];
const HIDDENS = [1024, 2048, 2880, 4096, 8192];
const DTYPES = [
  [4, "float32"],
  [2, "bf16"],
  [1, "1 byte, as the documents print it"],
];
const BARS = [
  ["all_logits", "all logits (equation 1)", "neutral"],
  ["sequence_logits", "one sequence's logits (equation 2)", "neutral"],
  ["chunk_logits", "one chunk's logits (equation 3)", "red"],
  ["all_states", "all hidden states", "neutral"],
  ["piece_states", "one piece's hidden states", "solid"],
];

const gib = (bytes) => `${thousands(Number((bytes / 2 ** 30).toFixed(3)))} GiB`;

/** The pieces of a setting: [{first, last, chunks}], sequences and rows. */
function pieces({ batch, length, mini_batch, logit_chunk_multiplier }) {
  const edges = pieceEdges(batch, mini_batch);
  const chunks = chunkRows(batch, length, mini_batch, logit_chunk_multiplier);
  let n = 0;
  return edges.slice(1).map((last, i) => {
    const mine = [];
    while (n < chunks.length && chunks[n][1] <= last * length) mine.push(chunks[n++]);
    return { first: edges[i], last, chunks: mine };
  });
}

/** What the picture says in words. */
function inWords(values, all) {
  const chunks = all.flatMap((piece) => piece.chunks);
  const largest = Math.max(...chunks.map(([start, stop]) => stop - start));
  const { all_logits: whole, chunk_logits: one } = chunkBytes(values);
  return (
    `${plural(all.length, "piece")}, ${plural(chunks.length, "chunk")} of up to ` +
    `${plural(largest, "token")}: ${gib(one)} of logits at a time where the whole batch would ` +
    `take ${gib(whole)}.`
  );
}

export default {
  render({ model, el }) {
    let pointed = null; // {piece, chunk}
    let all = [];
    let places = []; // of the chunks: {piece, chunk, x, y, width, height}
    let view = null;

    /** A bracket at each side of a box, as a path. */
    function brackets(x, y, width, height) {
      const tip = 5;
      const side = (at, inward) =>
        `M${at + inward * tip},${y} H${at} V${y + height} H${at + inward * tip}`;
      return `${side(x, 1)} ${side(x + width, -1)}`;
    }

    function piece(p, x, width, tallest, { length }) {
      const { first, last, chunks } = all[p];
      const perSequence = HEIGHT / tallest;
      const yOf = (row) => TOP + (row / length - first) * perSequence;
      const shapes = range(last - first).map((s) =>
        rect(x, TOP + s * perSequence, width, perSequence, {
          class: (first + s) % 2 ? "sequence odd" : "sequence",
        }),
      );
      const red = chunks.map(([start, stop], c) => {
        const [y, height] = [yOf(start), yOf(stop) - yOf(start)];
        places.push({ piece: p, chunk: c, x, y, width, height });
        const at = pointed ?? { piece: 0, chunk: 0 };
        if (at.piece === p && at.chunk === c) {
          shapes.push(rect(x, y, width, height, { class: "red chosen" }));
        }
        const gap = Math.min(1.5, height / 4);
        return brackets(x + 4, y + gap, width - 8, height - 2 * gap);
      });
      const black = brackets(x - 3, TOP - 3, width + 6, (last - first) * perSequence + 6);
      return [
        shapes,
        node("svg:path", { d: red.join(" "), class: "bracket" }),
        node("svg:path", { d: black, class: "bracket solid" }),
      ];
    }

    function bars(values, width, top) {
      const bytes = chunkBytes(values);
      const most = Math.max(...Object.values(bytes));
      const room = width - 96; // the number stands behind its bar
      return BARS.map(([name, words, kind], i) => {
        const y = top + i * 42;
        const long = Math.max((bytes[name] / most) * room, 1.5);
        return [
          text(0, y + 12, words),
          rect(0, y + 18, long, 14, { class: kind }),
          text(long + 6, y + 30, gib(bytes[name])),
        ];
      });
    }

    function draw(values, width) {
      all = pieces(values);
      places = [];
      const wide = width >= 620;
      const room = (wide ? Math.floor(width * 0.48) : width) - 8;
      const step = Math.min(room / all.length, 130);
      const tallest = Math.max(...all.map(({ first, last }) => last - first));
      if (pointed && !all[pointed.piece]?.chunks[pointed.chunk]) pointed = null;
      const left = wide ? Math.floor(width * 0.54) : 0;
      const shapes = [
        text(0, 10, "the batch: black pieces, red chunks", { class: "title" }),
        all.map((_, p) => piece(p, 4 + p * step, Math.max(step * 0.8 - 2, 8), tallest, values)),
        node(
          "svg:g",
          { transform: `translate(${left}, ${wide ? 0 : TOP + HEIGHT + 24})` },
          text(0, 10, "bytes", { class: "title" }),
          bars(values, width - left, 14).flat(),
        ),
      ];
      const height = (wide ? 0 : TOP + HEIGHT + 24) + Math.max(230, wide ? TOP + HEIGHT + 8 : 0);
      return { shapes, height, caption: inWords(values, all) };
    }

    function detail({ length, vocab, hidden, element_bytes }) {
      if (!pointed) return null;
      const { first, last, chunks } = all[pointed.piece];
      const [start, stop] = chunks[pointed.chunk];
      const sequences = range(last - first).map((s) => first + s);
      const touched = sequences.filter((s) => start < (s + 1) * length && stop > s * length);
      return (
        `Chunk ${pointed.chunk} of piece ${pointed.piece}: rows ${thousands(start)} to ` +
        `${thousands(stop - 1)} (sequence ${touched.join(", ")}), ` +
        `${plural(stop - start, "token")}: ${gib((stop - start) * vocab * element_bytes)} of ` +
        `logits from ${gib((stop - start) * hidden * element_bytes)} of hidden states.`
      );
    }

    function point(next) {
      const other = pointed?.piece !== next?.piece || pointed?.chunk !== next?.chunk;
      pointed = next;
      return other;
    }

    function chunkAt(x, y) {
      if (x === null) return null;
      const found = places.find(
        (place) =>
          x >= place.x && x < place.x + place.width && y >= place.y && y < place.y + place.height,
      );
      return found ? { piece: found.piece, chunk: found.chunk } : null;
    }

    function key(event) {
      if (event.key === "Escape") return point(null);
      const now = pointed ?? { piece: 0, chunk: -1 };
      const last = (piece) => all[piece].chunks.length - 1;
      const across = (piece) => ({ piece, chunk: clamp(now.chunk, 0, last(piece)) });
      const moves = {
        ArrowUp: () => ({ ...now, chunk: Math.max(now.chunk - 1, 0) }),
        ArrowDown: () => ({ ...now, chunk: Math.min(now.chunk + 1, last(now.piece)) }),
        ArrowLeft: () => across(Math.max(now.piece - 1, 0)),
        ArrowRight: () => across(Math.min(now.piece + 1, all.length - 1)),
      };
      if (!(event.key in moves)) return false;
      point(moves[event.key]());
      return true;
    }

    const listed = (name, label, values) =>
      slider(model, name, { label, values, format: thousands });
    view = frame(model, el, {
      name: "chunks",
      label: "A batch cut into pieces and chunks, and the bytes of each",
      defaults,
      controls: [
        slider(model, "batch", { label: "batch: sequences", min: 1, max: 16 }),
        listed("length", "context length", LENGTHS),
        listed("vocab", "vocabulary", VOCABS),
        listed("hidden", "hidden size", HIDDENS),
        slider(model, "mini_batch", { min: 1, max: 16 }),
        slider(model, "logit_chunk_multiplier", { min: 1, max: 32 }),
        menu(model, "element_bytes", { label: "dtype", options: DTYPES }),
      ],
      hint:
        "Blue shades are sequences; the filled chunk is the one in memory. Point at another, or " +
        "focus the picture and use the arrow keys.",
      draw,
      detail,
      key,
      move: (x, y) => point(chunkAt(x, y)),
      page: "widgets/05_masks",
      task: {
        words: "cut 4 sequences of 32,768 tokens so that neither logits nor hidden states take more " +
          "than half a GiB at a time, in float32.",
        done: (values) => {
          const { chunk_logits, piece_states } = chunkBytes(values);
          const asked = Object.entries(TASK).every(([name, value]) => values[name] === value);
          return asked && Math.max(chunk_logits, piece_states) <= 2 ** 29 &&
            "Chunks bound the logits, pieces the hidden states: each has its own knob.";
        },
      },
    });
    return view.leave;
  },
};
