// Rewards of a completion, function by function: what each read, what it pays, and why.

import { groupAdvantages, range } from "./arithmetic.js";
import { JUDGES } from "./judges.js";
import { button, change, clamp, frame, line, node } from "./kit.js";
import { rect, signed, text } from "./kit.js";

const words = text; // here a text is what a model wrote

const NEXT = "=== next completion ===";
const SUMS = {
  prompt: "12+34=",
  row: '{"answer": "46"}',
  functions: ["number_found_reward", "correct_number_reward", "exact_answer_reward", "proximity_reward"],
  weights: [1, 1, 1, 1],
  examples: {
    talkative: "12 and 34 make 46, as we learnt on page 7.",
    right: "46",
    wrong: "45",
    "far off": "1e6",
    "in words": "forty-six",
    "cut off": "12+34 is 4",
    "sly: all that come to mind": "43 44 45 46",
  },
  judged: {},
};

// tasks: name -> {prompt, row, functions, weights, examples: {name: text}, judged: {name: said}}
// judged: for each completion a list of [score or null, reason, marks, what went wrong]
export const defaults = {
  tasks: { sums: SUMS },
  names: ["sums"],
  task: "sums",
  text: SUMS.examples.talkative,
  row: SUMS.row,
  weights: [1, 1, 1, 1],
  judged: [], // of each completion, as `said_of` in Python makes it
  problem: "",
  live: false, // whether Python judges
};
export const linked = ["task", "text", "row", "weights"];
export const legal = (name, value) => name !== "weights" || value.every(Number.isFinite);

// What a reader is to try, and when it is done: by the scores of the first completion.
const TRIES = {
  sums: {
    words: "earn the full 3 points for the right number with a text that says more than the number.",
    done: "The reward reads the last number, whatever stands before it.",
    is: (score) => score.correct_number_reward === 3 && score.exact_answer_reward === 0,
  },
  GSM8K: {
    words: "earn at least 2 points with a wrong answer.",
    done: "The form alone is worth as much as the right number.",
    is: (score) => score.correctness_reward_func === 0 && score.total >= 2,
  },
};

/** The completions of a text in which lines `=== next completion ===` part them. */
export function splitGroup(pasted) {
  const texts = [[]];
  for (const row of pasted.split("\n")) {
    if (row.trim() === NEXT) texts.push([]);
    else texts.at(-1).push(row);
  }
  return texts.map((lines) => lines.join("\n"));
}

/** What the functions of a task say, without Python: asked here, or stored for an example. */
export function judgeHere({ tasks, task, row }, texts) {
  const { functions, examples, judged = {} } = tasks[task];
  const columns = JSON.parse(row || "{}");
  const stored = Object.entries(examples).map(([name, text]) => [text, judged[name]]);
  return texts.map((text) => {
    const found = stored.find(([example, said]) => example === text && said)?.[1];
    return functions.map((name, k) => {
      if (JUDGES[name] && columns.answer !== undefined) {
        const { points, reason, marks } = JUDGES[name](text, columns);
        return [points, reason, marks, ""];
      }
      return found?.[k] ?? [null, "", [], "it needs Python: only the examples are stored here"];
    });
  });
}

/** The weighted sum of the scores that there are, null without any. */
export function totalOf(said, weights) {
  const points = said.map(([score], k) => (score === null ? null : score * weights[k]));
  const known = points.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}

/** The advantages of a group, 0 for a completion that nobody has judged. */
export function advantagesOf(totals) {
  const known = totals.filter((total) => total !== null);
  if (known.length < 2) return totals.map(() => 0);
  const { values } = groupAdvantages(known, known.length);
  let next = 0;
  return totals.map((total) => (total === null ? 0 : values[next++]));
}

const number = (value) => (value === null ? "–" : String(Number(value.toPrecision(3))).replace("-", "−"));
const titled = (name) => name.replace(/_reward(_func)?$/, "").replaceAll("_", " ");
const ROW = 30;

export default {
  render({ model, el }) {
    let shown = 0; // the completion whose points are drawn
    let view = null;
    let judged = [];
    const marksOf = node("div", { class: "read", tabindex: 0, role: "group", "aria-label": "what was read" });
    const reasons = node("ul", { class: "reasons" });
    const prompt = node("p", { class: "prompt" });
    let earned = {}; // what the functions pay for the completion that is shown, and in all
    const fields = Object.fromEntries(
      ["text", "row"].map((name) => [
        name,
        node("textarea", {
          rows: name === "text" ? 6 : 2,
          "aria-label": name === "text" ? "completion" : "the other columns of the row, as JSON",
          spellcheck: "false",
          oninput: ({ target }) => change(model, { [name]: target.value }),
          onkeydown: (event) => event.stopPropagation(), // a notebook has meanings of its own for keys
        }),
      ]),
    );

    function choose(task) {
      const { row, weights, examples } = model.get("tasks")[task] ?? {};
      if (row === undefined) return change(model, { task }); // Python makes it
      change(model, { task, row, weights, text: Object.values(examples)[0] ?? "" });
    }

    const labelled = (name, input) =>
      node("label", { class: "control" }, node("div", { class: "head" }, node("span", { class: "name" }, name)), input);
    const chooser = node("select", {
      "aria-label": "task",
      "data-control": "task",
      onchange: () => choose(chooser.value),
    });

    const example = node("select", {
      "aria-label": "example",
      "data-control": "example",
      onchange: () => {
        const { examples } = model.get("tasks")[model.get("task")];
        const all = Object.values(examples).join(`\n${NEXT}\n`);
        shown = 0;
        change(model, { text: examples[example.value] ?? all });
      },
    });
    const examples = {
      element: labelled("example", example),
      follow({ tasks: held, task, text }) {
        const own = held[task]?.examples ?? {};
        const names = [...Object.keys(own), "all of them, as a group", "your own"];
        if (example.dataset.task !== task || example.options.length !== names.length) {
          example.dataset.task = task;
          example.replaceChildren(...names.map((name) => node("option", { value: name }, name)));
        }
        const all = Object.values(own).join(`\n${NEXT}\n`);
        const now = Object.keys(own).find((name) => own[name] === text);
        example.value = now ?? (text === all ? names.at(-2) : "your own");
      },
    };

    /** A slider for the weight of each function; as many as there are. */
    const sliders = node("div", { class: "controls" });
    function weigh(functions, weights) {
      const key = functions.join();
      if (sliders.dataset.key !== key) {
        sliders.dataset.key = key;
        sliders.replaceChildren(
          ...functions.map((name, k) => {
            const input = node("input", {
              type: "range",
              min: Math.min(0, 2 * weights[k]),
              max: Math.max(2, 2 * weights[k]),
              step: 0.1,
              "aria-label": `weight of ${name}`,
              "data-control": `weight_${k}`,
              oninput: () => {
                const now = [...model.get("weights")];
                now[k] = +input.value;
                change(model, { weights: now });
              },
            });
            const output = node("output", { "aria-hidden": "true" });
            const head = node("span", { class: "name" }, `weight of ${name}`);
            return node("label", { class: "control" }, node("div", { class: "head" }, head, output), input);
          }),
        );
      }
      [...sliders.querySelectorAll("input")].forEach((input, k) => {
        input.value = weights[k];
        input.previousElementSibling.querySelector("output").textContent = `×\u00a0${number(weights[k])}`;
      });
    }

    /** A completion with everything marked that was read in it. */
    function marked(text, said) {
      const marks = said.flatMap(([, , found]) => found);
      const edges = [0, text.length, ...marks.flatMap(([, start, end]) => [start, end])];
      const places = [...new Set(edges)].filter((at) => at <= text.length).sort((a, b) => a - b);
      const names = [...new Set(marks.map(([name]) => name))];
      return range(Math.max(places.length - 1, 0)).map((i) => {
        const [start, end] = [places[i], places[i + 1]];
        const over = marks.filter(([, from, to]) => from <= start && end <= to);
        const [inner] = over.sort((a, b) => a[2] - a[1] - (b[2] - b[1]));
        const piece = text.slice(start, end);
        if (!inner) return piece;
        const kind = `kind${names.indexOf(inner[0]) % 4}`;
        return node("mark", { class: kind, title: over.map(([name]) => name).join(", ") }, piece);
      });
    }

    function draw(values, width) {
      const { tasks: held, task } = values;
      const own = held[task];
      const given = values.weights; // an address may hold anything
      const weights = own.weights.map((weight, k) => (Number.isFinite(given?.[k]) ? given[k] : weight));
      const texts = splitGroup(values.text);
      judged = values.live ? values.judged : judgeHere(values, texts);
      shown = clamp(shown, 0, Math.max(judged.length - 1, 0));
      const said = judged[shown] ?? [];
      const totals = judged.map((one) => totalOf(one, weights));
      const advantages = advantagesOf(totals);
      under({ ...values, weights }, own, texts[shown] ?? "", said, totals);
      const points = said.map(([score], k) => (score === null ? null : score * weights[k]));
      const all = [...points, ...totals].filter((value) => value !== null).map(Math.abs);
      const scale = Math.max(...all, 1e-9);
      const left = Math.min(300, width * 0.5);
      const middle = left + 60 + (width - left - 60) / 2;
      const half = (width - left - 60) / 2 - 4;
      const bar = (value, y) => {
        if (value === null) return null;
        const size = (Math.abs(value) / scale) * half;
        return rect(value < 0 ? middle - size : middle, y, size, 16, { class: value < 0 ? "down" : "up" });
      };
      const shapes = own.functions.map((name, k) => [
        words(0, k * ROW + 18, titled(name).slice(0, Math.floor(left / 7.5))),
        words(left + 52, k * ROW + 18, number(points[k] ?? null), { "text-anchor": "end" }),
        bar(points[k] ?? null, k * ROW + 6),
      ]);
      const end = own.functions.length * ROW;
      shapes.push(
        line(0, end + 2, width, end + 2, { class: "hair" }),
        words(0, end + 22, "total", { class: "title" }),
        words(left + 52, end + 22, number(totals[shown] ?? null), { "text-anchor": "end", class: "title" }),
        bar(totals[shown] ?? null, end + 10),
        line(middle, 0, middle, end + 30, { class: "axis" }),
      );
      let height = end + 36;
      if (judged.length > 1) {
        const most = Math.max(...advantages.map(Math.abs), 1e-9);
        shapes.push(words(0, height + 20, "advantages in the group", { class: "title" }));
        advantages.forEach((value, i) => {
          const y = height + 30 + i * ROW;
          const size = (Math.abs(value) / most) * half;
          shapes.push(
            i === shown ? rect(0, y, width, ROW - 2, { class: "empty" }) : null,
            words(4, y + 19, `${i + 1}: ${texts[i].replace(/\s+/g, " ").slice(0, Math.floor(left / 11))}`),
            words(left + 52, y + 19, signed(value), { "text-anchor": "end" }),
            rect(value < 0 ? middle - size : middle, y + 6, size, 16, { class: value < 0 ? "down" : "up" }),
          );
        });
        height += 34 + judged.length * ROW;
      }
      return { shapes, height, caption: inWords(own, said, totals, advantages) };
    }

    function inWords(own, said, totals, advantages) {
      const silent = said.filter(([score]) => score === null).length;
      const group = judged.length > 1 ? ` Its advantage is ${signed(advantages[shown])}.` : "";
      const left = silent ? ` ${silent} of ${said.length} functions gave no score.` : "";
      const sum = (totals[shown] ?? null) === null ? "has no score" : `earns ${number(totals[shown])} points`;
      return `Completion ${shown + 1} of ${judged.length || 1} ${sum}.${group}${left}`;
    }

    function under({ row, weights, live }, own, text, said, totals) {
      for (const [name, field] of Object.entries(fields)) {
        const now = model.get(name);
        if (field.value !== now) field.value = now;
      }
      prompt.textContent = own.prompt;
      weigh(own.functions, weights);
      marksOf.replaceChildren(...(text ? marked(text, said) : ["(nothing)"]));
      reasons.replaceChildren(
        ...said.map(([, reason, , fault], k) =>
          node("li", {}, node("b", {}, own.functions[k]), ": ", fault || reason || "it gives no reason"),
        ),
      );
      earned = Object.fromEntries(own.functions.map((name, k) => [name, said[k]?.[0]]));
      earned.total = totals[shown];
      fields.row.hidden = !live && Object.keys(JSON.parse(row || "{}")).join() !== "answer";
    }

    function check(values) {
      const refuse = (sentence) => ({ sentence, changes: [], refused: true });
      if (values.problem) return refuse(values.problem);
      if (!Object.hasOwn(values.tasks, values.task)) {
        return refuse(values.live ? `loading ${values.task} …` : `${values.task} needs Python.`);
      }
      try {
        const row = JSON.parse(values.row || "{}");
        if (row === null || typeof row !== "object" || Array.isArray(row)) throw new Error("no object");
      } catch {
        return refuse('The row is no JSON object: write the columns as one, for example {"answer": "46"}.');
      }
      return null;
    }

    view = frame(model, el, {
      name: "rewards",
      label: "The rewards of a completion, function by function",
      defaults,
      controls: [
        {
          element: labelled("task", chooser),
          follow({ names, task }) {
            if (chooser.options.length !== names.length) {
              chooser.replaceChildren(...names.map((name) => node("option", { value: name }, name)));
            }
            chooser.value = task;
          },
        },
        examples,
      ],
      extra: [
        button("Next completion", () => {
          shown = judged.length ? (shown + 1) % judged.length : 0;
          view.redraw();
        }),
        button("Add one", () => change(model, { text: `${model.get("text")}\n${NEXT}\n` })),
      ],
      check,
      hint: "Write over the completion; a line === next completion === begins another. Press a row to read it.",
      draw,
      below: [marksOf, reasons, sliders],
      press: (x, y) => {
        const own = model.get("tasks")[model.get("task")];
        const i = Math.floor((y - own.functions.length * ROW - 66) / ROW);
        if (judged.length < 2 || i < 0 || i >= judged.length) return null;
        shown = i;
        view.redraw();
        return () => {};
      },
      task: {
        words: ({ task }) => TRIES[task]?.words ?? "",
        done: ({ task }) => TRIES[task]?.is(earned) && TRIES[task].done,
      },
    });
    const root = el.lastElementChild;
    root.querySelector(".picture").before(prompt, fields.text, fields.row);
    return view.leave;
  },
};
