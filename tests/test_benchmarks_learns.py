"""benchmarks/learns_like_trl.py and learns_on_a_card.py with runs of an update or two: what they
store, what they show, and the numbers of theirs that the lesson on the trainer holds."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import one_thread, small_model  # noqa: F401

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def scripts():
    "The two as modules; the second imports the first as it does when it is run."
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    names = ("learns_like_trl", "learns_on_a_card")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path[:] = path
    for name in {*names} - before:
        del sys.modules[name]


def run(script, monkeypatch, out, *options):
    "The script with sums of digits and runs of two updates, and what it stored."
    monkeypatch.setattr(script, "SUMS", dict(smallest=1, largest=9, held_out=30))
    monkeypatch.setattr(script, "TASK", {**script.TASK, "per_device_train_batch_size": 32})
    short = ["--seeds", "1", "--updates", "2", "--every", "2", "--warm-up", "30"]
    monkeypatch.setattr(sys, "argv", ["", *short, "--out", str(out), *options])
    script.main()
    return json.loads(out.read_text())


@pytest.mark.filterwarnings("ignore")
def test_both_libraries_start_alike_and_a_second_call_runs_nothing(
    scripts, monkeypatch, tmp_path, capsys
):
    script, out = scripts.learns_like_trl, tmp_path / "runs.json"
    stored = run(script, monkeypatch, out)
    ours, theirs = stored["runs"]
    assert (ours["name"], theirs["name"]) == ("grpo_nb", "trl")
    for one in (ours, theirs):
        assert list(one["held_out"]) == ["0", "2"] and len(one["reward"]) == 2
        assert 0 < max(one["reward"]) < 1
    assert ours["held_out"]["0"] == theirs["held_out"]["0"]
    assert stored["versions"]["trl"] and "after, trl - grpo_nb" in capsys.readouterr().out
    monkeypatch.setattr(script, "compare", None)
    assert run(script, monkeypatch, out)["runs"] == stored["runs"]
    with pytest.raises(SystemExit, match="task differ from those asked for now"):
        run(script, monkeypatch, out, "--updates", "3")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_every_kind_runs_from_the_same_weights(scripts, monkeypatch, tmp_path, capsys):
    script = scripts.learns_on_a_card
    stored = run(script, monkeypatch, tmp_path / "runs.json")
    assert [one["name"] for one in stored["runs"]] == list(script.KINDS)
    first = {one["name"]: one["reward"][0] for one in stored["runs"]}
    # (a small gpt-oss is decoded by copies here, which draws a batch's random numbers together)
    alike = {first[name] for name in ("float32", "float32, adapters")}
    assert len(alike) == 1 and 0 < min(first.values())  # the same weights, and the same draws
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("after, MXFP4, adapters - float32: ")
    assert "float32, modules: drawn through the model's modules: as asked" in shown


def test_rounded_experts_are_what_a_base_in_mxfp4_holds(scripts):
    script = scripts.learns_on_a_card
    model, _ = small_model(intermediate_size=32)
    script.round_experts(model)
    for layer in model.model.layers:
        weight = layer.mlp.experts.down_proj
        assert not weight.requires_grad
        assert torch.equal(script.pack(weight.data).dequantize(), weight.data)


def test_what_generate_draws_has_the_engines_log_probs(scripts):
    script, (model, tokenizer) = scripts.learns_on_a_card, small_model()
    prompts = ["7+1=", "345+20="] * 8
    torch.manual_seed(0)
    drawn = script.drawn_by_generate(
        prompts, SimpleNamespace(model=model, processing_class=tokenizer)
    )
    ended = 0
    for prompt, ids, logps in zip(
        drawn["prompt_ids"], drawn["completion_ids"], drawn["logprobs"], strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1)[range(len(ids)), ids]
        torch.testing.assert_close(torch.tensor(logps), want, rtol=1e-4, atol=1e-4)
        assert tokenizer.eos_token_id not in ids[:-1] and 0 < len(ids) <= script.MAX_TOKENS
        ended += ids[-1] == tokenizer.eos_token_id
    assert ended < len(prompts) == len(drawn["completion_ids"])


def test_an_interval_is_students(scripts):
    script = scripts.learns_like_trl
    mean, half = script.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.303 / 3**0.5)
    assert script.shown([0.5]) == "0.500"


def test_the_lesson_shows_what_is_stored(scripts):
    script, lesson = scripts.learns_like_trl, ROOT / "nbs/training/19_trainer.ipynb"
    stored = json.loads(script.RESULTS.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in json.loads(lesson.read_text())["cells"]]
    shown = {}
    exec(next(source for source in cells if "\nlearnt = {" in source), shown)
    assert len(stored["runs"]) == 2 * len({run["seed"] for run in stored["runs"]})
    for name, curve in script.summary(stored["runs"]).items():
        mine = zip(shown["learnt"][name], shown["half"][name], strict=True)
        want = {update: curve[update] for update in shown["updates"]}
        assert dict(zip(shown["updates"], map(list, mine), strict=True)) == want


def test_the_lesson_holds_the_numbers_of_the_card(scripts):
    "Every row of its table, as the script prints it."
    folder, learns = ROOT / "benchmarks" / "results", scripts.learns_like_trl
    runs = json.loads((folder / "learns_on_a_card.json").read_text())["runs"]
    lesson = (ROOT / "nbs" / "training" / "19_trainer.ipynb").read_text()
    kinds = list(dict.fromkeys(run["name"] for run in runs))
    assert kinds == list(scripts.learns_on_a_card.KINDS)
    for kind in kinds:
        mine = [run["held_out"].values() for run in runs if run["name"] == kind]
        first, *_, last = zip(*mine)
        differ = learns.paired(runs, kind, kinds[0]) if kind != kinds[0] else None
        cells = [kind, learns.shown(first), learns.shown(last)]
        cells += [learns.shown(differ, "{:+.3f} ± {:.3f}") + " |" if differ else "|"]
        assert f"| {' | '.join(cells)}" in lesson, kind
