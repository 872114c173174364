"""The two paths of the map: heads, questions, exercises and solutions, and those of others."""

import ast
import json
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot
import pytest

from grpo_nb.algorithm.losses import LOSSES

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
PATHS = {  # name -> its pages, without the folder and the ending
    caption: [page.removeprefix("nbs/").removesuffix(".ipynb") for page in pages]
    for _, caption, pages in runpy.run_path(str(ROOT / "tools/course.py"))["sections"](ROOT)
    if caption in ("The afternoon", "Build it")
}
SPINE = [  # those with exercises whose solutions have a file
    "lessons/01_what_rl_is",
    "algorithm/00_gradient",
    "algorithm/01_advantages",
    "model/02_masks",
    "model/03_attention",
    "algorithm/04_logprobs",
    "algorithm/02_losses",
    "algorithm/03_batching",
    "tutorials/01_first_run",
    "lessons/10_a_real_run_read",
    "lessons/02_when_the_reward_does_not_rise",
    "planning/01_plan",
    "tutorials/02_gpt_oss_20b_t4",
    "training/19_trainer",
]
# other lessons with exercises whose solutions have a file
OTHERS = ["lessons/08_a_sampler_in_another_process"]
EXERCISE = re.compile(r"^### Exercise: (.+) \((\d+) minutes\)$", re.M)


def cells_of(lesson):
    cells = json.loads((NBS / f"{lesson}.ipynb").read_text())["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def exercises(lesson):
    "title -> (place of its stub among the cells, minutes, what is said about it)."
    cells = cells_of(lesson)
    for i, (kind, source) in enumerate(cells):
        if kind == "markdown" and (found := EXERCISE.search(source)):
            yield found[1], (i + 2, int(found[2]), source)


def solutions(lesson):
    "title -> the blocks of code in its section: the solution, and what may be tried with it."
    page = NBS / "solutions" / f"{Path(lesson).name[3:]}.md"
    for section in page.read_text().split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        yield title, re.findall(r"```python\n(.+?)```", rest, re.S)


ALL = [
    pytest.param(lesson, title, id=f"{Path(lesson).name[3:]}: {title}")
    for lesson in [*SPINE, *OTHERS]
    for title, _ in exercises(lesson)
]


# Which cells an exercise needs


class Names(ast.NodeVisitor):
    "What a cell reads from the cells above it, and what it leaves to the cells below."

    def __init__(self, tree):
        self.reads, self.leaves, self.later = set(), set(), set()
        self.visit(tree)
        self.reads |= self.later - self.leaves

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load):
            self.reads |= {node.id} - self.leaves
        else:
            self.leaves.add(node.id)

    def visit_Assign(self, node):
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_For(self, node):
        for part in (node.iter, node.target, *node.body, *node.orelse):
            self.visit(part)

    def visit_comprehension_of(self, node):
        inner = {n.id for g in node.generators for n in ast.walk(g.target) if hasattr(n, "id")}
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - inner
        self.reads |= names - self.leaves

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_comprehension_of

    def visit_Import(self, node):
        self.leaves |= {(a.asname or a.name).split(".")[0] for a in node.names}

    visit_ImportFrom = visit_Import

    def visit_function(self, node):
        for part in (*getattr(node, "decorator_list", ()), *getattr(node, "bases", ())):
            self.visit(part)
        own, read = {"_"}, set()
        for n in ast.walk(node):
            if isinstance(n, ast.Name):
                (read if isinstance(n.ctx, ast.Load) else own).add(n.id)
            own |= {getattr(n, "arg", None), getattr(n, "name", None)}
        self.later |= read - own
        if hasattr(node, "name"):
            self.leaves.add(node.name)

    visit_FunctionDef = visit_ClassDef = visit_Lambda = visit_function


def parsed(source):
    source = re.sub(r"^[%!].*$", "", source, flags=re.M)
    top_level_await = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(source, "a cell", "exec", top_level_await)


def needed(cells, last, solution):
    "The code cells on which cell `last` and its solution depend, in order, and that cell."
    wanted = Names(parsed(cells[last][1])).reads | Names(parsed(solution)).reads
    chosen = [last]
    for i in range(last - 1, -1, -1):
        if cells[i][0] != "code" or "#| eval: false" in cells[i][1]:
            continue
        names = Names(parsed(cells[i][1]))
        if names.leaves & wanted:
            wanted = (wanted - names.leaves) | names.reads
            chosen.append(i)
    return chosen[::-1]


def run_stub(lesson, title, solution):
    "The names that the stub of an exercise leaves, and the call of its check."
    matplotlib.use("Agg")
    cells, names = cells_of(lesson), {"display": lambda *_: None}
    *before, last = needed(cells, dict(exercises(lesson))[title][0], solution)
    assert cells[last][1].startswith("# your turn")
    for i in before:
        exec(compile(parsed(cells[i][1]), f"{lesson}, cell {i}", "exec"), names)
    tree = parsed(cells[last][1])
    call = ast.Expression(tree.body.pop().value)
    exec(compile(tree, "the stub", "exec"), names)
    return names, compile(call, "the check", "eval")


@pytest.mark.parametrize("lesson, title", ALL)
def test_a_stub_fails_its_check_and_the_solution_passes(lesson, title):
    solution = dict(solutions(lesson))[title][0]
    names, check = run_stub(lesson, title, solution)
    assert eval(check, names) is False
    exec(solution, names)
    assert eval(check, names) is True
    matplotlib.pyplot.close("all")


NEAR = {  # (lesson, title) -> answers that are nearly right
    ("lessons/01_what_rl_is", "You get what you pay for"): [
        "def my_reward(answer): return answer.endswith('4')",
        "def my_reward(answer): return answer.startswith('4')",
    ],
    ("lessons/01_what_rl_is", "How patient must one be?"): [
        "def groups_needed(p, G, sure): "
        "return 1 + math.ceil(math.log(1 - sure) / (G * math.log(1 - p)))",
    ],
    ("algorithm/00_gradient", "Punish everything?"): [
        "def average_push(pi): return pi * (1 - pi)",
        "def average_push(pi): return [-1.0] * len(pi)",
    ],
    ("algorithm/01_advantages", "Leave one out"): [
        "def leave_one_out(r, G): return group_advantages(r, G, scale='none').values",
    ],
    ("tutorials/01_first_run", "Pay for being close"): [
        "def closeness_reward(texts, answer): "
        "return [-abs((last_number(t) or 0) - float(a)) for t, a in zip(texts, answer)]",
    ],
    ("algorithm/01_advantages", 'Which hill does "group" climb?'): [  # not 0 at 0
        "def objective(p): return torch.arcsin(2 * p - 1)",
    ],
    ("planning/01_plan", "The part that grows"): [  # GB
        "def layer_inputs(layers, tokens, hidden): return layers * tokens * hidden * 2 / 1e9",
    ],
    ("model/02_masks", "Packed documents"): [
        "def same_document(numbers): return lambda b, h, q, k: numbers[q] <= numbers[k]",
    ],
    ("algorithm/02_losses", "The clip with if"): [  # the size of the advantage is left out
        "def clipped_with_if(c, a, epsilon, epsilon_high, delta): "
        "return -min(c, 1 + epsilon_high) if a > 0 else min(max(c, 1 - epsilon), delta)",
    ],
    ("lessons/10_a_real_run_read", 'How many answers make a "never"?'): [
        "def answers_needed(p): return 1 + math.ceil(math.log(0.05) / math.log(1 - p))",
    ],
    ("lessons/02_when_the_reward_does_not_rise", "The smallest group"): [
        "def smallest_group(p): return math.ceil(math.log(2) / p)",
        "def smallest_group(p): return {0.5: 2, 0.2: 3, 0.05: 14, 0.01: 69}[p]",
    ],
}


@pytest.mark.parametrize("lesson, title", NEAR)
def test_an_answer_that_is_nearly_right_fails_its_check(lesson, title):
    for answer in NEAR[lesson, title]:
        names, check = run_stub(lesson, title, answer)
        exec(answer, names)
        assert eval(check, names) is False, answer
    matplotlib.pyplot.close("all")


def test_a_list_of_numbers_is_an_answer_too():
    answer = """def average_push(pi):
    V = range(len(pi))
    return [float(sum(-pi[i] * (float(k == i) - pi[k]) for i in V)) for k in V]"""
    names, check = run_stub("algorithm/00_gradient", "Punish everything?", answer)
    exec(answer, names)
    assert eval(check, names) is True


@pytest.mark.full
def test_a_graded_reward_gets_as_far_as_its_solution_says():
    title, (solution, run) = next(iter(solutions("lessons/02_when_the_reward_does_not_rise")))
    names, _ = run_stub("lessons/02_when_the_reward_does_not_rise", title, solution + run)
    exec(solution + run, names)
    before, after = (names["chance"](m) for m in (names["untrained"], names["graded"].model))
    assert 0.6 < names["late"](names["graded"], "reward") < 0.9 and 500 * before < after < 0.2


# What stands where


@pytest.mark.parametrize("lesson", [*SPINE, *OTHERS])
def test_no_solution_stands_in_its_lesson(lesson):
    found = dict(exercises(lesson))
    assert found and found.keys() == dict(solutions(lesson)).keys()
    page = f"](../solutions/{Path(lesson).name[3:]}.md)"
    for _, _, words in found.values():
        assert "<summary>Hint</summary>" in words and page in words
    text = "\n".join(source for _, source in cells_of(lesson))
    for solution, *_ in dict(solutions(lesson)).values():
        body = [line for line in solution.splitlines()[1:] if len(line.strip()) > 30]
        assert not [line for line in body if line in text]
    assert "<summary>Solution</summary>" not in text


def test_each_class_of_the_trainer_is_used_before_the_next_one_is_written():
    code = [source for kind, source in cells_of("training/19_trainer") if kind == "code"]
    written = [re.findall(r"^class (\w+)", source, re.M) for source in code]
    exported = [i for i, source in enumerate(code) if "#| export" in source and written[i]]
    assert len(exported) >= 8
    for i, end in zip(exported, [*exported[1:], len(code)]):
        assert re.search(rf"\({written[i][-1]}\b", "\n".join(code[i + 1 : end])), written[i]


def head_of(lesson):
    "(minutes, its promises) as the first cell gives them."
    source = cells_of(lesson)[0][1].partition("<!-- /course -->")[2]
    minutes = re.search(
        r"^\*\*(\d+) minutes\*\* reckoned.+\*\*Needs:\*\* .+glossary\.md", source, re.M
    )
    promises = re.search(r"After this lesson you can\n\n((?:- .+\n?)+)", source)[1]
    return int(minutes[1]), promises.strip().splitlines()


def counted(lesson):
    'Words and open lines of code above "More", whose cells say that they are not counted.'
    cells = json.loads((NBS / f"{lesson}.ipynb").read_text())["cells"]
    more = [i for i, cell in enumerate(cells) if "".join(cell["source"]).startswith("## More")]
    assert all("Not counted in the minutes above" in "".join(cells[i]["source"]) for i in more)
    words, lines = 0, 0
    for cell in cells[: more[0]] if more else cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            words += len(re.sub(r"\S*://\S*", "", source).split())
        elif cell["metadata"].get("cellView") != "form":
            lines += sum(bool(line.strip()) for line in source.split("\n"))
    return words, lines


def estimate(lesson):
    """Minutes: 200 words in one, five seconds for an open line of code, the first exercise, and
    three to run the page."""
    words, lines = counted(lesson)
    exercise = next(iter(dict(exercises(lesson)).values()), (0, 0))[1]
    return words / 200 + lines / 12 + exercise + 3


@pytest.mark.parametrize("lesson", [*PATHS["The afternoon"], *PATHS["Build it"]])
def test_a_lesson_says_how_long_it_takes_and_what_one_can_do_then(lesson):
    minutes, promises = head_of(lesson)
    assert abs(minutes / estimate(lesson) - 1) < 0.15
    assert len(promises) == 3 and all(len(p) > 40 for p in promises)


@pytest.mark.parametrize("lesson", [*PATHS["The afternoon"], *PATHS["Build it"]])
def test_a_lesson_has_two_questions_before_it_shows(lesson):
    above = []
    for kind, source in cells_of(lesson):
        above += [source] if kind == "markdown" else []
        if "**Predict first**" in source:
            break
        assert kind == "markdown" or re.search(r"^(import|from|#\||%|# @title Imports)", source)
    questions = above[-1].partition("**Predict first**")[2]
    assert questions.count("<details><summary>") == questions.count("</details>") == 2


# The glossary and the bibliography

PAGES = ("glossary", "bibliography", "how_fast", "where_it_runs", "library", "decisions")


def rows_of(page):
    "The cells of each row of the tables of a page."
    text = (ROOT / f"docs/{page}.md").read_text().replace("\\|", "")
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page):
    text = (ROOT / f"docs/{page}.md").read_text()
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    assert links and not [link for link in links if not (ROOT / "docs" / link).exists()]


def test_each_symbol_and_word_stands_once_with_its_lesson():
    rows = [row for row in rows_of("glossary") if row[0] not in ("symbol", "word")]
    names = [name for row in rows for name in row[0].split(", ")]
    assert len(names) > 60 and sorted(set(names)) == sorted(names)
    assert all("](../nbs/" in row[-1] for row in rows)


def test_every_loss_has_its_paper():
    named = {row[0]: row[1] for row in rows_of("bibliography")}
    missing = [loss for loss in LOSSES if f"`{loss}`" not in named]
    assert not missing, "a row in docs/bibliography.md says where each loss is from"
    source = re.compile(r"arXiv|\(\d{4}\)|no paper describes this form")
    assert not [loss for loss in LOSSES if not source.search(named[f"`{loss}`"])]


def test_every_paper_that_the_library_names_is_listed():
    number = re.compile(r"(?:arXiv|arxiv\.org/abs/)\s*\n?\s*#?\s*(\d{4}\.\d{5})")
    sources = [p.read_text() for p in (ROOT / "grpo_nb").rglob("*.py")]
    sources += [p.read_text() for p in NBS.rglob("*.ipynb")]
    named = {n for text in sources for n in number.findall(text)}
    assert len(named) > 15
    listed = set(number.findall((ROOT / "docs/bibliography.md").read_text()))
    assert not named - listed


# The diagrams

DIAGRAMS = sorted((ROOT / "docs/diagrams").glob("*.svg"))


def test_diagrams_stand_in_lessons_with_words_for_those_who_do_not_see_them():
    picture = re.compile(r"!\[([^\]]*)\]\(([^)]*docs/diagrams/[^)]*)\)")
    pages = [ROOT / "index.ipynb", *NBS.rglob("*.ipynb")]
    found = [
        (p, *each) for p in pages if not p.is_symlink() for each in picture.findall(p.read_text())
    ]
    assert len(found) > 8 and all(len(words) > 60 for _, words, _ in found)
    assert not [target for p, _, target in found if not (p.parent / target).exists()]


@pytest.mark.parametrize("drawing", DIAGRAMS, ids=lambda p: p.stem)
def test_a_diagram_is_legible_and_stays_in_its_card(drawing):
    """Text is 16 units high or more, of 460: 11 pixels where a drawing is 330 wide. At .53 of its
    height a letter, no line leaves the card."""
    root = ElementTree.fromstring(drawing.read_text())
    width, height = (float(x) for x in root.get("viewBox").split()[2:])
    assert width == 460 and root.find("{*}title").text and root.find("{*}desc").text
    for each in root.iter("{http://www.w3.org/2000/svg}text"):
        size, x, y = (float(each.get(name)) for name in ("font-size", "x", "y"))
        wide = 0.53 * size * len(each.text)
        left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[each.get("text-anchor")]
        assert size >= 16 and 0 < y < height, each.text
        assert each.get("transform") or (0 < left and left + wide < width), each.text
