"A run as one page: every text escaped, whatever is missing left out."

import json
from html.parser import HTMLParser

import pyarrow
import pyarrow.parquet
import pytest
from small_runs import one_thread, small_trainer  # noqa: F401

from grpo_nb.cli import main
from grpo_nb.training.report import (
    by_reward,
    counted,
    pictures_of_sample,
    read_run,
    report_html,
    series,
    turns_of,
    write_report,
)
from grpo_nb.training.reporting import several_turns, write_samples

EVIL = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)> & \"'"


class Page(HTMLParser):
    "The tags of a page, their attributes, and its text."

    def __init__(self, text):
        super().__init__()
        self.tags, self.names, self.text = [], set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def sample(step, reward, completion="4", turns=None):
    return {
        "step": step,
        "prompt": EVIL,
        "completion": completion,
        "rewards": {EVIL: reward},
        "advantage": float("nan") if reward is None else reward,
        "extra": {"note": EVIL},
        "turns": turns,
    }


def run_folder(folder, lines, samples=()):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("\n".join(lines))
    for rows in samples:
        write_samples(rows, folder / "completions", rows[0]["step"])
    return folder


def test_a_hostile_run_stays_text(tmp_path):
    records = [{"step": s, "reward": s / 9, f"rewards/{EVIL}/mean": 0.5, EVIL: 1} for s in (1, 2)]
    turns = several_turns([{"role": "assistant", "content": EVIL}, {"role": EVIL, "content": EVIL}])
    rows = [sample(2, 0.5, EVIL), sample(2, None, EVIL, turns), sample(2, 0.0)]
    folder = run_folder(tmp_path / "a <script> b", map(json.dumps, records), [rows])
    (folder / "hints.jsonl").write_text(json.dumps({"step": EVIL, "hint": EVIL}))
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert not {"script", "img", "link", "iframe", "object", "a"} & set(page.tags)
    assert not {"src", "href", "onerror", "onclick", "onload"} & page.names
    assert page.text.count(EVIL) >= 12 and page.tags.count("article") == 3
    assert "a <script> b" in page.text and "read and not trained on" in page.text
    assert "The colours go by message" in page.text


def test_what_cannot_be_read_is_left_out_and_counted(tmp_path):
    lines = [
        '{"step": 1, "reward": 0.25, "loss": NaN, "kl": Infinity}',
        '{"reward": 1}',
        "[3]",
        '{"step": 2, "reward": 0.75, "note": "text", "flag": true}',
        '{"step": 3, "rew',
    ]
    run = read_run(run_folder(tmp_path / "x", lines))
    assert run.damaged == 3 and series(run.records) == {"reward": [(1, 0.25), (2, 0.75)]}
    text = Page(report_html(run)).text
    assert "reward 0.25 at first, 0.75 at last" in text and "damaged lines left out: 3" in text
    assert "set log_completions=True" in text and "Hints" not in text
    empty = Page(report_html(read_run(run_folder(tmp_path / "y", []))))
    assert "0 updates" in empty.text and "svg" not in empty.tags


def test_a_damaged_file_is_left_out_and_named(tmp_path, capsys):
    rows = [[sample(step, 0.5)] for step in (1, 2, 3, 4)]
    folder = run_folder(tmp_path / "x", ['{"step": 1, "reward": 0.25}', "[" * 100_000], rows)
    stored = folder / "completions"
    whole = (stored / "completions_00001.parquet").read_bytes()
    (stored / "completions_00001.parquet").write_bytes(whole[: len(whole) // 2])
    (stored / "completions_00002.parquet").write_bytes(b"")
    other = pyarrow.table({"step": [3], "text": ["no completion"]})
    pyarrow.parquet.write_table(other, stored / "completions_00003.parquet")
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().err
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    names = ", ".join(f"completions_0000{i}.parquet" for i in (1, 2, 3))
    assert f"damaged lines left out: 1; damaged files left out: {names}" in page.text
    assert f"damaged lines left out: 1; damaged files left out: {names}" in said
    assert "step 4, 1 completions" in page.text and page.tags.count("article") == 1


@pytest.mark.parametrize("theirs", [0.5, 3, "3", "said", [1], True])
def test_columns_of_rewards_or_of_another_library_are_no_turns_and_no_pictures(theirs):
    row = {"completion": "said", "turns": theirs, "pictures": theirs}
    shown = json.dumps(["data:image/png;base64,AA=="])
    assert turns_of(row) == [("assistant", "said")]
    assert pictures_of_sample({**row, "reply_pictures": shown}) == json.loads(shown)


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path, capsys):
    folder = run_folder(tmp_path / "x", ['{"step": 1, "reward": 0.25}'])
    for out in (tmp_path, tmp_path / ("a" * 300), "/dev/null/page.html"):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(folder), "--out", str(out)])
        assert ended.value.code == 2
        assert str(out)[:50] in capsys.readouterr().err


def test_the_best_and_the_worst_come_first():
    rows = [{"a": value, "b": None} for value in (0.1, 0.9, 0.5, 0.3, 0.7)]
    best, worst = by_reward(rows, ["a", "b"], most=2)
    assert [r["a"] for r in best] == [0.9, 0.7] and [r["a"] for r in worst] == [0.1, 0.3]
    best, worst = by_reward(rows[:1], ["a"])
    assert len(best) == 1 and not worst
    assert [r["times"] for r in counted([*rows[:2], dict(rows[0])])] == [2, 1]


def test_one_value_is_a_point_and_one_number(tmp_path):
    lines = ['{"step": 0, "eval_reward": 0.25, "seconds": 10}', '{"step": 1, "reward": 0.5}']
    page = report_html(read_run(run_folder(tmp_path / "x", lines)))
    assert "1 update; reward 0.5; evaluation 0.25; 10 seconds" in page
    assert page.count('class="alone"') == page.count("<svg") and page.count(">0</text>") == 2


def test_a_page_of_a_real_run(tmp_path, capsys):
    made = small_trainer(tmp_path / "run", log_completions=True, seed=1)  # which has a hint
    made.train()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "new/page.html")]) == 0
    assert capsys.readouterr().out.startswith("open ")
    page = Page((tmp_path / "new/page.html").read_text(encoding="utf-8"))
    assert "2 updates" in page.text and page.text.count("step 2, 16 completions") == 1
    first = made.hints_given[0]
    assert first in page.text and "policy" in page.text
    stored = [json.loads(x)["hint"] for x in open(tmp_path / "run/hints.jsonl")]
    assert stored == made.hints_given


def test_a_folder_without_a_run_is_a_sentence(tmp_path, capsys):
    with pytest.raises(ValueError, match="there is no log.jsonl in"):
        write_report(tmp_path)
    assert main(["report", str(tmp_path)]) == 2 and "output_dir" in capsys.readouterr().err
