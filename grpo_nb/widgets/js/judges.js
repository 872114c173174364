// Reward functions that a page without Python can ask: two-digit sums and GSM8K.
// They are held to grpo_nb/environments/{verifiers,arithmetic,gsm8k}.py by tests; \d is 0 to 9 here.

const NUMERAL =
  "(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\\.[0-9]+)?|(?<![0-9])\\.[0-9]+)(?:[eE][-+]?[0-9]+)?";
const STATED = new RegExp(
  "(?:(?<![\\p{L}\\p{N}_)\\]}])(?<sign>[-+\\u2212]))?(?:\\\\?[$€£])?" +
    `(?:\\\\[dt]?frac\\{(?<top>[-+]?${NUMERAL})\\}\\{(?<bottom>[-+]?${NUMERAL})\\}` +
    `|(?<number>${NUMERAL})(?:\\/(?<over>${NUMERAL}))?)`,
  "gu",
);
const THOUSANDS = /(?:\\,|\{,\}|,\\!)(?=[0-9]{3})/g;
const TIMES_TEN = /(?<=[0-9])\s*(?:\\times|\\cdot|[×*])\s*10\^(?:\{([-+]?[0-9]+)\}|([-+]?[0-9]+))/g;
const NUMBER = /(?:(?<!\d)[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?/g;
const INTEGER = /^[-+\u2212]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)$/;
const BRACE = /\\boxed\s*\{|\\[{}]|[{}]/g;
const TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"];

/** The value of one numeral, 1 for a denominator that is not there, null beyond all bounds. */
function numeralValue(numeral) {
  if (numeral === undefined) return 1;
  const [digits, exponent = ""] = numeral.toLowerCase().split("e");
  if (digits.length > 300 || exponent.replace(/^[-+]+/, "").length > 4) return null;
  return Number(numeral.replace(/,/g, ""));
}

/** Where a text states numbers, LaTeX's spellings rewritten first. */
function statedIn(text) {
  const plain = text.replace(THOUSANDS, ",").replace(TIMES_TEN, (_, a, b) => `e${a ?? ""}${b ?? ""}`);
  return [...plain.matchAll(STATED)].map(({ groups }) => groups);
}

function statedValue({ sign, top, bottom, number, over }) {
  const [above, below] = [numeralValue(top ?? number), numeralValue(bottom ?? over)];
  if (above === null || !below) return null;
  return ((sign === "-" || sign === "\u2212" ? -1 : 1) * above) / below;
}

/** The inside of the last closed box, or null. */
function boxed(text) {
  const opened = [];
  let last = null;
  for (const brace of text.matchAll(BRACE)) {
    if (brace[0] === "{" || brace[0].startsWith("\\boxed")) opened.push(brace);
    else if (brace[0] === "}" && opened.length) {
      const start = opened.pop();
      if (start[0] !== "{") last = text.slice(start.index + start[0].length, brace.index);
    }
  }
  return last;
}

/** The number that a text ends up with, or null. */
function finalNumber(text) {
  const stated = statedIn(boxed(text) ?? text);
  return stated.length ? statedValue(stated.at(-1)) : null;
}

const verdict = (right, answer) => (right ? "which is right" : `and ${answer} is right`);
const quoted = (text) => `'${text.slice(0, 60)}'`;
const said = (points, reason, marks = []) => ({ points, reason, marks });

/** The last number: [its text, its mark], or null. */
function lastNumber(text) {
  const found = [...text.matchAll(NUMBER)].at(-1);
  return found ? [found[0], ["number", found.index, found.index + found[0].length]] : null;
}

function numberFound(text) {
  const found = lastNumber(text);
  if (!found) return said(-1, "there is no number");
  return said(1, `the last number is ${found[0]}`, [found[1]]);
}

function correctNumber(text, { answer }) {
  const found = lastNumber(text);
  if (!found) return said(-3, "there is no number");
  const right = Math.abs(Number(found[0].replace(/,/g, "")) - Number(answer)) <= 1e-9;
  return said(right ? 3 : -3, `the last number is ${found[0]}, ${verdict(right, answer)}`, [found[1]]);
}

function exactAnswer(text, { answer }) {
  const right = text.trim() === String(answer).trim();
  const start = text.length - text.trimStart().length;
  const marks = text.trim() ? [["all of it", start, text.trimEnd().length]] : [];
  return said(right ? 1 : 0, `the text is ${right ? "" : "not "}exactly ${answer}`, marks);
}

function nearness(text, { answer }) {
  const [value, right] = [finalNumber(text), finalNumber(String(answer))];
  if (value === null) return said(-1, "it ends up with no number that has a value");
  if (value === right) return said(1, `it ends up with ${value}, which is right`);
  const distance = Math.abs(value - right) / Math.max(Math.abs(right), 1);
  const far = `it ends up with ${value}, and ${answer} is right; the further away, the fewer points`;
  return said(1.5 / (1 + distance) - 1, far);
}

/** Where a completion gives its answer: [start, end] without white space, or null. */
function answerPlace(text) {
  const begin = text.lastIndexOf(TAGS[2]);
  const start = begin + TAGS[2].length;
  const end = begin < 0 ? -1 : text.indexOf(TAGS[3], start);
  if (end < 0) return null;
  const inside = text.slice(start, end);
  const first = start + inside.length - inside.trimStart().length;
  return [first, Math.max(first, start + inside.trimEnd().length)];
}

function correctness(text, { answer }) {
  const place = answerPlace(text);
  if (!place) return said(0, "there is no answer between <answer> and </answer>");
  const [inside, marks] = [text.slice(...place), [["answer", ...place]]];
  const stated = statedIn(inside);
  if (stated.length !== 1) {
    return said(0, `the answer holds ${stated.length || "no"} numbers, and one is asked for`, marks);
  }
  const right = statedValue(stated[0]) === finalNumber(String(answer));
  return said(right ? 2 : 0, `the answer is ${quoted(inside)}, ${verdict(right, answer)}`, marks);
}

function wholeNumber(text) {
  const place = answerPlace(text);
  if (!place) return said(0, "there is no answer between <answer> and </answer>");
  const inside = text.slice(...place);
  const whole = INTEGER.test(inside);
  const reason = `${quoted(inside)} is ${whole ? "" : "not "}spelt as a whole number`;
  return said(whole ? 0.5 : 0, reason, [["answer", ...place]]);
}

const countOf = (text, part) => text.split(part).length - 1;

/** Before, between and after the tags, or null unless each is there once and in order. */
function pieces(text) {
  if (TAGS.some((tag) => countOf(text, tag) !== 1)) return null;
  const found = [];
  let rest = text;
  for (const tag of TAGS) {
    const at = rest.indexOf(tag);
    if (at < 0) return null;
    found.push(rest.slice(0, at));
    rest = rest.slice(at + tag.length);
  }
  return [...found, rest];
}

function formFault(text) {
  const wrong = TAGS.filter((tag) => countOf(text, tag) !== 1);
  if (wrong.length) return wrong.map((tag) => `${tag} occurs ${countOf(text, tag)} times`).join(", ");
  const found = pieces(text);
  if (!found) return "the tags are not in their order";
  if ([0, 2, 4].some((i) => found[i].trim())) return "there is text outside of the tags";
  return [1, 3].every((i) => found[i].trim()) ? "" : "there is nothing between two tags";
}

function lineFault(text) {
  const fault = formFault(text);
  if (fault) return fault;
  const [before, reasoning, between, answer, after] = pieces(text);
  const lines = [reasoning, answer].every((part) => part[0] === "\n" && part.at(-1) === "\n");
  const apart = before === "" && between === "\n" && ["", "\n"].includes(after);
  return lines && apart ? "" : "a tag does not stand on a line of its own";
}

const tagMarks = (text) =>
  [...text.matchAll(new RegExp(TAGS.join("|").replaceAll("/", "\\/"), "g"))].map((found) => [
    "tag",
    found.index,
    found.index + found[0].length,
  ]);

function strictForm(text) {
  const fault = lineFault(text);
  return said(fault ? 0 : 0.5, fault || "it is the form of the prompt, line by line", tagMarks(text));
}

function softForm(text) {
  const fault = formFault(text);
  const well = "all tags are there once and in order, with something in them and nothing outside";
  return said(fault ? 0 : 0.5, fault || well, tagMarks(text));
}

function countedTags(text) {
  const once = TAGS.filter((tag) => countOf(text, tag) === 1);
  const rest = once.includes(TAGS[3]) ? text.slice(text.lastIndexOf(TAGS[3]) + TAGS[3].length) : "";
  const after = [...rest.trim()].length;
  const late = after ? `; ${after} characters after the end take a little off` : "";
  const points = 0.125 * once.length - Math.min(0.001 * after, 0.125);
  return said(points, `${once.length} of 4 tags occur exactly once${late}`, tagMarks(text));
}

/** name of a reward function -> (completion, row) -> {points, reason, marks}. */
export const JUDGES = {
  number_found_reward: numberFound,
  correct_number_reward: correctNumber,
  exact_answer_reward: exactAnswer,
  proximity_reward: nearness,
  correctness_reward_func: correctness,
  int_reward_func: wholeNumber,
  strict_format_reward_func: strictForm,
  soft_format_reward_func: softForm,
  xmlcount_reward_func: countedTags,
};

/** For tests: what one of them says. */
export const judge = (name, text, row) => JUDGES[name](text, row);
