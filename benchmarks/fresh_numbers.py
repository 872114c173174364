"""GSM8K's problems with other numbers: what a model that has read the test problems cannot recall.

    python benchmarks/fresh_numbers.py FOLDER/test.jsonl        counts, and five of them

A worked solution says how its answer follows from the question's numbers: `<<16-3-4=9>>`. Where
every operand is one number of the question, one result before it, or a constant that the question
does not name, other numbers are drawn and the same calculations are made with them. A problem is
left out where this is in doubt (a number that stands twice, a word such as "three" beside a 3, a
time of day), or where no draw keeps whole what was whole and positive what was positive.
"""

import json
import random
import re
import sys
from fractions import Fraction

NUMBER = re.compile(r"(?<![\d.])\d[\d,]*(?:\.\d+)?")
STEP = re.compile(r"<<([^=<>]+)=([^<>]+)>>")
WORDS = dict(
    zip(
        "one two three four five six seven eight nine ten eleven twelve twenty thirty".split(),
        [*range(1, 13), 20, 30],
    ),
    half=2, twice=2, double=2, pair=2, third=3, triple=3, thrice=3, quarter=4, dozen=12,
    both=2, once=1,
)  # fmt: skip
CLOCK = re.compile(r"\d\s*(?:[ap]\.?m\b|:\d)|o'clock|\d(?:st|nd|rd|th)\b|\d/\d", re.IGNORECASE)
DRAWS = 300


def value(text):
    "The number that a text writes, exactly."
    return Fraction(text.replace(",", "").strip().rstrip("."))


def result(expression, numbers):
    "An expression's value, its operands replaced in the order in which they stand."
    left = iter(numbers)
    exact = re.sub(r"\d[\d,]*(?:\.\d+)?|\.\d+", lambda m: f"F('{next(left)}')", expression)
    return eval(exact, {"F": Fraction, "__builtins__": {}})


def steps_of(solution, asked):
    "The calculations, each operand as ('question' | 'step' | 'constant', which); None if in doubt."
    steps, found = [], []
    for expression, written in STEP.findall(solution):
        if not re.fullmatch(r"[\d.,+\-*/() ]+", expression):
            return None
        operands = []
        for text in re.findall(r"\d[\d,]*(?:\.\d+)?|\.\d+", expression):
            number = value(text)
            places = [("question", i) for i, one in enumerate(asked) if one == number]
            places += [("step", i) for i, one in enumerate(found) if one == number]
            if len(places) > 1:
                return None
            operands += places or [("constant", number)]
        try:
            exact, told = (
                result(expression, [value(t) for t in NUMBER.findall(expression)]),
                value(re.sub(r"[^\d.,-]", "", written)),
            )
        except (ValueError, ZeroDivisionError, SyntaxError, StopIteration):
            return None
        if exact != told:
            return None
        steps.append((expression, operands))
        found.append(told)
    return (steps, found) if steps else None


def another(number, rng):
    "A number of the same size and roundness; 1 and 2 stay, for the sake of grammar."
    if number <= 2 or number.denominator != 1:
        return number
    grain = next(g for g in (1000, 100, 50, 10, 5, 1) if number % g == 0 and number > 2 * g)
    low, high = (int(number * share) // grain for share in (0.6, 1.7))
    return Fraction(grain * rng.randint(max(low, 3 if grain == 1 else 1), max(high, 4)))


def changed(question, solution, rng):
    "(question, answer) with other numbers, or None."
    asked = [value(text) for text in NUMBER.findall(question)]
    words = {WORDS[w] for w in re.findall(r"[a-z]+", question.lower()) if w in WORDS}
    if len(set(asked)) < len(asked) or words & set(asked) or CLOCK.search(question):
        return None
    read = steps_of(solution, asked)
    if read is None or value(solution.split("####")[1]) != read[1][-1]:
        return None
    steps, before = read
    used = {which for _, operands in steps for kind, which in operands if kind == "question"}
    percent = {i for i, m in enumerate(NUMBER.finditer(question)) if question[m.end() :][:1] == "%"}
    for _ in range(DRAWS):
        drawn = [another(n, rng) if i in used else n for i, n in enumerate(asked)]
        found = []
        for expression, operands in steps:
            known = {"question": drawn, "step": found}
            numbers = [w if kind == "constant" else known[kind][w] for kind, w in operands]
            try:
                found.append(result(expression, numbers))
            except ZeroDivisionError:
                break
        whole = all(
            (now.denominator == 1 or then.denominator != 1) and (now > 0) == (then > 0)
            for now, then in zip(found, before)
        )
        same_order = all(
            (a < b) == (c < d)
            for i, (a, c) in enumerate(zip(asked, drawn))
            for b, d in zip(asked[:i], drawn)
        )
        fits = all(drawn[i] < 100 or asked[i] >= 100 for i in percent)
        if len(found) == len(steps) and whole and same_order and fits:
            if found[-1].denominator == 1 and found[-1] != before[-1]:
                told = iter(drawn)
                return NUMBER.sub(lambda m: written(m[0], next(told)), question), int(found[-1])
    return None


def written(text, number):
    "A number as the one that it replaces was written."
    if value(text) == number:
        return text
    return f"{int(number):,}" if "," in text else str(int(number))


def fresh_numbers(rows, seed=0):
    "Of rows with `question` and `answer`: those whose numbers could be changed, old and new."
    rng, kept = random.Random(seed), []
    for row in rows:
        new = changed(row["question"], row["answer"], rng)
        if new:
            old = row["answer"].split("####")[1].strip()
            kept.append(
                dict(old=row["question"], old_answer=old, new=new[0], new_answer=str(new[1]))
            )
    return kept


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    kept = fresh_numbers(rows)
    print(len(kept), "of", len(rows))
    for one in random.Random(1).sample(kept, 5):
        print(json.dumps(one, indent=1))
