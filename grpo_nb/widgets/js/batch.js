// Six settings, the micro-batches and updates that follow, and the weights as they move.

import { batchProblem, batchSizes, groupAdvantages, range, schedule } from "./arithmetic.js";
import { button, clamp, frame, line, node, player, plural } from "./kit.js";
import { rect, signed, slider, text, tick, within } from "./kit.js";

export const defaults = {
  per_device_train_batch_size: 3,
  num_generations: 4,
  gradient_accumulation_steps: 4,
  steps_per_generation: 4,
  num_iterations: 1,
  num_processes: 1,
  shuffle: false,
};

const RANGES = {
  per_device_train_batch_size: [1, 8],
  num_generations: [2, 8],
  gradient_accumulation_steps: [1, 8],
  steps_per_generation: [1, 8],
  num_iterations: [1, 2],
  num_processes: [1, 4],
};
export const legal = (name, value) => name === "shuffle" || within(value, RANGES[name]);
/** What a memory widget on the same page follows: completions, and how many are drawn at once. */
export const shared = (settings) => ({
  num_generations: settings.num_generations,
  per_device_train_batch_size: settings.per_device_train_batch_size,
  generation_batch_size: settings.per_device_train_batch_size * settings.steps_per_generation,
});
/** And what is followed of it, as far as the sliders go. */
export const follows = (given) =>
  Object.fromEntries(
    Object.entries(given).filter(([name, value]) => value <= (RANGES[name]?.[1] ?? 0)),
  );

const CYCLES = 2;
const LEFT = 26; // of the squares: the processes' names stand there
const TOP = 24; // of the squares in a block: the cycle's name stands there
// eight colours for the prompts in turn, which colour-blind readers can tell apart
const COLOURS = "#56B4E9 #E69F00 #7FCDBB #F0E442 #CC79A7 #BBBBBB #D98B5F #8DA0CB".split(" ");

/** A reward that a completion could have had: 0 or 1, the same whenever it is asked for. */
function rewardOf(cycle, place) {
  let mixed = Math.imul(cycle + 1, 0x9e3779b9) ^ Math.imul(place + 7, 0x85ebca6b);
  mixed = Math.imul(mixed ^ (mixed >>> 15), 0x2c1b3c6d);
  mixed = Math.imul(mixed ^ (mixed >>> 12), 0x297a2d39);
  return +(((mixed ^ (mixed >>> 15)) >>> 0) / 2 ** 32 < 0.45);
}

/** Everything that the picture knows of a setting: columns of squares, one for each step. */
function laidOut(values) {
  const sizes = batchSizes(values);
  const perCycle = values.steps_per_generation * values.num_iterations;
  const advantages = range(CYCLES).map((cycle) => {
    const rewards = range(sizes.generation_batch_size).map((place) => rewardOf(cycle, place));
    return groupAdvantages(rewards, values.num_generations).values;
  });
  const columns = range(CYCLES * perCycle).map(() => ({ squares: [] }));
  let done = 0;
  for (const batch of schedule(values, CYCLES, values.shuffle, 0)) {
    const { cycle, step, process, prompts, places, update } = batch;
    const column = columns[cycle * perCycle + step];
    Object.assign(column, { cycle, step, update, updates: done + 1 });
    const squares = prompts.map((prompt, i) => ({ process, prompt, place: places[i] }));
    column.squares.push(...squares);
    if (update && process === values.num_processes - 1) done += 1;
  }
  return { columns, sizes, perCycle, advantages, rows: columns[0].squares.length };
}

/** What the picture says in words. */
function inWords(values, { sizes, columns }) {
  const updates = columns.filter((column) => column.update).length;
  const each = `${plural(sizes.generation_batch_size, "completion")} of ` +
    `${plural(sizes.prompts_per_generation, "prompt")}`;
  return (
    `A cycle draws ${each} and trains on them in ${plural(columns.length / CYCLES, "step")}; ` +
    `the weights move after every ${values.gradient_accumulation_steps}: ` +
    `${plural(updates, "update")} in ${CYCLES} cycles.`
  );
}

/** The formulas with their numbers put in. */
function formulas(values) {
  const { per_device_train_batch_size: size, num_processes: P, num_generations: G } = values;
  const { steps_per_generation: S, gradient_accumulation_steps: A, num_iterations: mu } = values;
  const sizes = batchSizes(values);
  const updates = Number(sizes.optimizer_steps_per_generation.toPrecision(3));
  return [
    ["generation_batch_size", `${size} × ${P} × ${S} = ${sizes.generation_batch_size}`],
    [
      "prompts_per_generation",
      `${sizes.generation_batch_size} / ${G} = ${sizes.prompts_per_generation}`,
    ],
    ["effective_batch_size", `${size} × ${P} × ${A} = ${sizes.effective_batch_size}`],
    ["optimizer_steps_per_generation", `${S} × ${mu} / ${A} = ${updates}`],
  ];
}

export default {
  render({ model, el }) {
    let pointed = null; // {column, row}
    let playing = null; // steps done, where the micro-batches are played
    let laid = null;
    let grid = null; // where the squares stand: {side, high, perLine, blockHeight}
    let view = null;

    /** Both cycles beside each other where squares can be large, else under each other. */
    function gridFor(width) {
      const all = laid.columns.length;
      const beside = Math.floor((width - LEFT - 8) / all) >= 17;
      const perLine = beside ? all : laid.perCycle;
      const side = clamp(Math.floor((width - LEFT - 8) / perLine), 8, 40);
      const high = clamp(side, 12, laid.rows > 16 ? 18 : 26);
      return { side, high, perLine, blockHeight: TOP + laid.rows * high + 38 };
    }

    const xOf = (column) => LEFT + (column % grid.perLine) * grid.side;
    const topOf = (column) => TOP + Math.floor(column / grid.perLine) * grid.blockHeight;

    /** All squares of one colour as one shape, and their numbers while there is room for them. */
    function squares() {
      const paths = new Map();
      const numbers = [];
      const few = laid.columns.length * laid.rows <= 400 && grid.side >= 15;
      laid.columns.forEach((column, c) => {
        const later = playing !== null && c >= playing;
        const words = { "text-anchor": "middle", class: later ? "small quiet" : "small on-colour" };
        column.squares.forEach(({ prompt }, row) => {
          const [x, y] = [xOf(c), topOf(c) + row * grid.high];
          const colour = `${COLOURS[prompt % COLOURS.length]} ${later ? "pale" : ""}`;
          const box = `M${x + 0.5},${y + 0.5}h${grid.side - 1}v${grid.high - 1}h${1 - grid.side}z`;
          paths.set(colour, (paths.get(colour) ?? "") + box);
          if (few) numbers.push(text(x + grid.side / 2, y + grid.high / 2 + 4, prompt, words));
        });
      });
      const shapes = [...paths].map(([colour, d]) => {
        const [fill, pale] = colour.split(" ");
        return node("svg:path", { d, fill, class: `square ${pale}` });
      });
      return [shapes, numbers];
    }

    /** A step's number, and a line and a triangle where the weights move after it. */
    function step(column, { step: number, update }) {
      const bottom = topOf(column) + laid.rows * grid.high;
      const middle = { "text-anchor": "middle", class: "small quiet" };
      const every = grid.side >= 20 ? 1 : grid.side >= 14 ? 2 : 4;
      const shapes = [];
      if (number % every === 0) {
        shapes.push(text(xOf(column) + grid.side / 2, bottom + 26, number, middle));
      }
      if (update) {
        const x = xOf(column) + grid.side;
        const moved = playing !== null && playing === column + 1;
        const points = `${x - 6},${bottom + 13} ${x + 6},${bottom + 13} ${x},${bottom + 2}`;
        shapes.push(
          rect(x - 1.5, topOf(column), 3, laid.rows * grid.high, { class: "solid" }),
          node("svg:polygon", { points, class: moved ? "down" : "solid" }),
        );
      }
      return shapes;
    }

    function cycleName(cycle) {
      const column = cycle * laid.perCycle;
      const [x, y] = [xOf(column), topOf(column)];
      const bottom = y + laid.rows * grid.high;
      const short = laid.perCycle * grid.side < 124 ? "cycle" : "generation cycle";
      return [
        rect(x - 1.5, y - 18, 3, bottom - y + 18, { class: "up" }),
        text(x + 5, y - 7, `${short} ${cycle}`, { class: "small up" }),
      ];
    }

    function processes(column, { num_processes }) {
      const high = (laid.rows / num_processes) * grid.high;
      const right = xOf(column) + Math.min(grid.perLine, laid.columns.length) * grid.side;
      return range(num_processes).map((process) => {
        const y = topOf(column) + process * high;
        const dotted = process ? line(LEFT, y, right, y, { class: "border" }) : null;
        return [text(0, y + high / 2 + 4, `p${process}`, { class: "small quiet" }), dotted];
      });
    }

    /** A frame around the square that is pointed at, thin ones around the rest of its group. */
    function frames({ num_generations }) {
      if (!pointed) return [];
      const { squares, cycle } = laid.columns[pointed.column];
      const group = (place) => Math.floor(place / num_generations);
      const { place } = squares[pointed.row];
      const around = (column, row, kind) =>
        rect(xOf(column) + 1, topOf(column) + row * grid.high + 1, grid.side - 2, grid.high - 2, {
          class: `mark ${kind}`,
        });
      const mates = laid.columns.flatMap((column, c) =>
        column.squares.map((other, row) =>
          column.cycle === cycle && group(other.place) === group(place)
            ? around(c, row, "thin")
            : null,
        ),
      );
      return [mates, around(pointed.column, pointed.row, "thick")];
    }

    function draw(values, width) {
      laid = laidOut(values);
      grid = gridFor(width);
      if (pointed && !laid.columns[pointed.column]?.squares[pointed.row]) pointed = null;
      if (playing !== null) playing = Math.min(playing, laid.columns.length);
      const lines = Math.ceil(laid.columns.length / grid.perLine);
      const shapes = [
        squares(),
        range(lines).map((l) => processes(l * grid.perLine, values)),
        range(CYCLES).map(cycleName),
        laid.columns.map((column, c) => step(c, column)),
        frames(values),
      ];
      return { shapes, height: lines * grid.blockHeight, caption: inWords(values, laid) };
    }

    function detail(values) {
      if (pointed) return describe(values);
      return playing === null ? null : progress(values);
    }

    /** The square that is pointed at. */
    function describe({ num_generations: G }) {
      const column = laid.columns[pointed.column];
      const { place, prompt, process } = column.squares[pointed.row];
      const reward = rewardOf(column.cycle, place);
      const advantage = laid.advantages[column.cycle][place];
      return (
        `Completion ${place % G} of prompt ${prompt}: reward ${reward}, ` +
        `advantage ${signed(advantage)}. Process ${process}, cycle ${column.cycle}, ` +
        `step ${column.step}; it counts in update ${column.updates}.`
      );
    }

    /** How far the play has come. */
    function progress({ gradient_accumulation_steps: A }) {
      const moved = Math.floor(playing / A);
      const times = plural(moved, "time");
      if (playing === 0) return "Nothing is trained on yet.";
      const { cycle, step: number, update } = laid.columns[playing - 1];
      const now = `Cycle ${cycle}, step ${number}: `;
      if (update) return `${now}the gradient is complete, and the weights move (${times} by now).`;
      return `${now}${playing % A} of ${A} micro-batches are in the gradient; the weights have ` +
        `moved ${times}.`;
    }

    function squareAt(x, y) {
      if (x === null || !grid) return null;
      const block = Math.floor(y / grid.blockHeight);
      const column = block * grid.perLine + Math.floor((x - LEFT) / grid.side);
      const row = Math.floor((y - block * grid.blockHeight - TOP) / grid.high);
      const inside = x >= LEFT && x < LEFT + grid.perLine * grid.side && row >= 0;
      return inside && laid.columns[column]?.squares[row] ? { column, row } : null;
    }

    function point(next) {
      const other = pointed?.column !== next?.column || pointed?.row !== next?.row;
      pointed = next;
      return other;
    }

    const MOVES = {
      ArrowRight: [1, 0],
      ArrowLeft: [-1, 0],
      ArrowDown: [0, 1],
      ArrowUp: [0, -1],
    };
    function key(event) {
      if (event.key === "Escape") return point(null);
      if (!(event.key in MOVES)) return false;
      const [right, down] = pointed ? MOVES[event.key] : [0, 0];
      point({
        column: clamp((pointed?.column ?? 0) + right, 0, laid.columns.length - 1),
        row: clamp((pointed?.row ?? 0) + down, 0, laid.rows - 1),
      });
      return true;
    }

    /** One more micro-batch; false after the last. */
    function advance() {
      if (playing === null || playing >= laid.columns.length) playing = 0;
      playing += 1;
      pointed = null;
      view.redraw();
      return playing < laid.columns.length;
    }
    const play = player("Play the micro-batches", advance);
    const reset = () => {
      play.stop();
      playing = null;
      view.redraw();
    };

    view = frame(model, el, {
      name: "batch",
      label: "Two generation cycles: squares are completions, columns steps, dark lines updates",
      defaults,
      controls: [
        ...Object.entries(RANGES).map(([name, [min, max]]) => slider(model, name, { min, max })),
        tick(model, "shuffle", { label: "shuffle: the order that is trained on" }),
      ],
      extra: [play.element, button("Step", advance), button("Show all", reset)],
      hint:
        "A square is a completion, its number the prompt; a triangle is an update. Point at one, " +
        "or focus the picture and use the arrow keys.",
      check: (values) => {
        const problem = batchProblem(values);
        if (!problem) return null;
        const reachable = problem.changes.filter((changes) =>
          Object.entries(changes).every(([name, value]) => value <= RANGES[name][1]),
        );
        return { sentence: problem.sentence, changes: reachable, refused: true };
      },
      draw,
      detail,
      key,
      move: (x, y) => point(squareAt(x, y)),
      facts: formulas,
      page: "widgets/03_batch",
      task: {
        words: "draw 24 completions of 6 prompts in a cycle, and move the weights twice in it.",
        done: (values) => {
          const sizes = batchSizes(values);
          const found = [sizes.generation_batch_size, sizes.prompts_per_generation];
          return String(found) === "24,6" && sizes.optimizer_steps_per_generation === 2 &&
            "Twice as many steps drawn as are in an update: two updates in a cycle.";
        },
      },
    });
    return () => {
      play.stop();
      view.leave();
    };
  },
};
