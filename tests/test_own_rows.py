"The page on rows of one's own: its files train, its commands and scripts run."

import csv
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from grpo_nb import cli
from grpo_nb.environments.gsm8k import gsm8k
from grpo_nb.model.tiny import tiny_gpt_oss

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/own_rows.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)


def rewards(out):
    lines = (out / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


@pytest.mark.long
def test_the_rows_that_ship_are_learnt_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    first, second = map(shlex.split, blocks("sh")[0].splitlines())
    assert cli.main([*first[1:], "--max_steps", "40"]) == 0
    found = rewards(tmp_path / "runs/own_rows")
    assert len(found) == 4 and found[0] < 0.12 and found[-1] > 0.25
    assert cli.main(second[1:]) == 0
    assert "0+0=" in (tmp_path / "runs/own_rows/report.html").read_text()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "py"])
def test_rows_of_each_kind_train_with_the_pages_reward(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{a}+1=", "answer": a + 1} for a in range(4)]
    reward, script = blocks("python")
    (tmp_path / "my_rows.py").write_text(f"{reward}\n\ndef rows():\n    return {rows!r}\n")
    with open("my_rows.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with open("my_rows.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    model, tokenizer = tiny_gpt_oss()
    model.save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    words = shlex.split(blocks("sh")[1].replace("\\\n", " "))[1:]
    changes = {"Qwen/Qwen3-0.6B": "tiny", "my_rows.jsonl": f"my_rows.{kind}", "256": "3"}
    changes |= {"recipes/own_rows.yaml": str(ROOT / "recipes/own_rows.yaml")}
    changes |= {"my_rows.jsonl": "my_rows.py:rows"} if kind == "py" else {}
    words = [changes.get(word, word) for word in words]
    assert cli.main([*words, "--max_steps", "1", "--logging_steps", "1"]) == 0
    assert len(rewards(tmp_path / "runs/mine")) == 1


def test_the_pages_script_and_its_reward_are_those_that_ship(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward, script = blocks("python")
    (tmp_path / "my_rows.py").write_text(reward)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rows", raising=False)
    names = {}
    exec(script.replace("max_steps=100", "max_steps=1"), names)
    assert (tmp_path / "runs/script/log.jsonl").exists()
    ours = runpy.run_path(str(ROOT / "recipes/own_rows.py"))["right"]
    given = dict(completions=["2+3=5", "no", [{"content": "so -7"}]], answer=[5, "5", -7])
    assert ours(**given) == names["right"](**given) == [1.0, 0.0, 1.0]
    shown = json.loads(blocks("json")[0])
    shipped = [*map(json.loads, (ROOT / "recipes/own_rows.jsonl").read_text().splitlines())]
    assert shown in shipped


def test_what_is_no_row_or_no_function_is_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # datasets logs to the stream of an earlier test, which is closed
    monkeypatch.setattr("logging.raiseExceptions", False)
    (tmp_path / "none.jsonl").touch()
    (tmp_path / "none.csv").touch()
    (tmp_path / "cut.jsonl").write_text('{"prompt": "2+3=", "answer": 5')
    (tmp_path / "heads.csv").write_text("prompt,answer\n")
    (tmp_path / "my_rows.py").write_text("def right(completions, **columns): return [0.0]")
    words = ["train", "--config", str(ROOT / "recipes/own_rows.yaml"), "--output_dir", "runs"]
    rewarded = ["--reward_funcs", "my_rows.py:right"]
    for given, sentence in (
        (["--dataset_name", "none.jsonl", *rewarded], "it is empty; write one a line"),
        (["--dataset_name", "none.csv", *rewarded], "No columns to parse from file"),
        (["--dataset_name", "cut.jsonl", *rewarded], "JSON parse error: Missing a comma or '}'"),
        (["--dataset_name", "heads.csv", *rewarded], "has no rows 'train' that can be read"),
        (
            ["--dataset_name", "heads.csv", "--reward_funcs", "my_rows.py"],
            "names the file 'my_rows.py': add its function",
        ),
    ):
        assert cli.main([*words, *given]) != 0
        said = capsys.readouterr().err
        assert sentence in said and "Traceback" not in said


def test_gsm8k_reads_a_file(tmp_path):
    row = {"question": "How much is 7 and 5?", "answer": "7 + 5 = 12\n#### 12"}
    (path := tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    for split in ("train", "test[:1]"):
        (made,) = gsm8k(split, path)
        assert made["answer"] == "12" and made["prompt"][-1]["content"].startswith("How much")
    with pytest.raises(FileNotFoundError, match="there is no file .*none.jsonl: give the path"):
        gsm8k("train", tmp_path / "none.jsonl")
