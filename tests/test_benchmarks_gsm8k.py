"""benchmarks/gsm8k.py, fresh_numbers.py and on_cards.py without a card or GSM8K's rows: what they
calculate, and what is started when."""

import argparse
import itertools
import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from dense_models import float8_weights

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_other_numbers_are_calculated_as_the_worked_solution_does():
    from fresh_numbers import changed

    question = "A crate holds 12 jars. Ann fills 5 crates and breaks 8 jars. How many are whole?"
    solution = "She fills 12*5=<<12*5=60>>60 jars.\n60-8=<<60-8=52>>52 are whole.\n#### 52"
    drawn = {changed(question, solution, random.Random(seed)) for seed in range(20)}
    assert len(drawn) > 5
    for text, answer in drawn:
        jars, crates, broken = (
            int(word) for word in text.replace(".", "").split() if word.isdigit()
        )
        assert answer == jars * crates - broken > 0 and answer != 52


@pytest.mark.parametrize(
    "question, solution",
    [
        ("He has 3 pens and three hats.", "<<3+3=6>>6\n#### 6"),  # which 3?
        ("From 9 am he works 4 hours.", "<<9+4=13>>13\n#### 13"),
        ("He has 3 pens and 4 hats.", "<<3+4=8>>8\n#### 8"),  # the solution is wrong
        ("He has 3 pens and 4 hats.", "<<__import__('os')=7>>7\n#### 7"),
    ],
)
def test_a_problem_in_doubt_is_left_out(question, solution):
    from fresh_numbers import changed

    assert changed(question, solution, random.Random(0)) is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore:vllm_mode changes nothing")
def test_the_recipe_has_the_settings_of_the_stored_runs(seed):
    import gsm8k

    from grpo_nb.recipe import read_recipe

    stored = json.loads((FOLDER / f"results/gsm8k/right_{seed}.json").read_text())["arguments"]
    later = dict(beta=0.0, scale="group", rate=None, server=None, staleness=0, save=0)
    later |= dict(fp8=None, four_bit=False, mxfp4=False)  # these came since
    later |= dict(group=8, mask_truncated=False)
    run = gsm8k.settings(argparse.Namespace(**later | stored), "out")
    path = FOLDER.parent / "recipes/qwen_coder_gsm8k.yaml"
    recipe = read_recipe(path, {"seed": str(seed)})
    others = {"use_cpu", "bf16", "output_dir", "disable_tqdm", "vllm_mode", "model_init_kwargs"}
    cut = {"per_device_train_batch_size", "gradient_accumulation_steps"}  # into parts of an update
    for name in run.specs.keys() - others - cut:
        assert getattr(recipe.config, name) == getattr(run, name), name
    layouts = recipe.config.layout(), run.layout()
    assert len({one.effective_batch_size for one in layouts}) == 1
    assert len({one.generation_batch_size for one in layouts}) == 1
    assert recipe.model.dtype == run.model_init_kwargs["dtype"]
    made = runpy.run_path(FOLDER.parent / "recipes/qwen_coder_gsm8k.py")
    assert made["BOX"] == gsm8k.BOX
    texts, answers = ["1 + 2 = \\boxed{3}", "so 4", "none", "\\boxed{5} or 3"], ["3"] * 4
    assert made["right"](texts, answers) == gsm8k.right(texts, answers) == [1, 0, 0, 0]


@pytest.fixture
def command(monkeypatch):
    "What `python benchmarks/gsm8k.py` was told to do, or does."
    import gsm8k

    def run(*words, only_parsed=False):
        told = []
        if only_parsed:
            monkeypatch.setattr(gsm8k, "WAYS", {name: told.append for name in gsm8k.WAYS})
        monkeypatch.setattr(sys, "argv", ["gsm8k.py", *map(str, words)])
        gsm8k.main()
        return told

    return run


@pytest.mark.filterwarnings("ignore:vllm_mode changes nothing")
def test_a_card_for_a_stored_run_is_what_the_hub_reads(command, tmp_path, monkeypatch):
    from answers import interval
    from huggingface_hub import ModelCard

    from grpo_nb.training.hub import LocalHub

    stored, adapter = FOLDER / "results/gsm8k", tmp_path / "right_1"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    words = ["-", "--out", stored, "publish", "--name", "right_1", "--adapter", adapter]
    with LocalHub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_TOKEN", hub.token)
        command(*words, "--to", "me/right_1")
    arrived = {path.name for path in (tmp_path / "hub/me/right_1/main").iterdir()}
    assert {"README.md", "curve.png", "adapter_config.json"} <= arrived
    card = ModelCard.load(adapter / "README.md")  # refuses a model index that the hub would
    run, asked = (json.loads((stored / f"{n}.json").read_text()) for n in ("right_1", "prompts"))
    data, text = card.data, card.text
    assert (data.base_model, data.datasets) == (
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        ["openai/gsm8k"],
    )
    assert [one.metric_value for one in data.eval_results] == [0.388173, 0.396513]
    for key, before in (("after", "teacher"), ("after_1024", "teacher, 1024")):
        gain = interval([run[key]["marks"]], asked[before]["marks"])
        assert "{:+.1f} points ({:+.1f} to {:+.1f}".format(*gain) in text
        assert f"wrong {run[key]['marks'].count('w')}" in text
    assert "taken back to bfloat16" in text and "not tried on those" in text
    assert "learning_rate: 2.0e-05" in text and "max_steps: 110" in text


def test_every_run_that_waits_for_a_card_can_be_parsed(command):
    from gsm8k import name_of
    from on_cards import read

    names = []
    for cards, minutes, name, first, line in read(FOLDER / "gsm8k_runs.txt"):
        assert cards == 1 and 0 < minutes < 20 and first in (None, *names)
        names.append(name)
        words = line.replace("$OUT", "/out").replace("$NAME", name).split()
        if "benchmarks/gsm8k.py" in words:
            (given,) = command(*words[words.index("benchmarks/gsm8k.py") + 1 :], only_parsed=True)
            left = f"{given.name}_samples" if given.what == "samples" else name_of(given)
            assert left == name
            assert given.adapter is None or given.adapter.name == first


@pytest.mark.filterwarnings("ignore:vllm_mode changes nothing")
def test_a_run_trains_the_base_that_is_asked_for(command, tmp_path, monkeypatch):
    import gsm8k
    import transformers

    import grpo_nb

    config = transformers.Qwen3Config(
        **dict(vocab_size=64, hidden_size=32, intermediate_size=64, head_dim=16),
        **dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1),
    )
    loaded, told = grpo_nb.load_model, []
    monkeypatch.setattr(grpo_nb, "load_model", lambda name, **given: loaded(config, **given))
    monkeypatch.setattr(gsm8k, "GRPOTrainer", lambda *given, **more: told.append(given))
    monkeypatch.setattr(gsm8k, "rows_of", lambda *given: [])
    kept = {}
    for flag in ([], ["--fp8", "row"], ["--mxfp4"]):
        (given,) = command(tmp_path, "--out", tmp_path, "run", *flag, only_parsed=True)
        gsm8k.make_trainer(given, tmp_path)
        model, _, settings, _ = told.pop()
        kept[" ".join(flag)] = model
        assert (settings.model_init_kwargs is None) == bool(flag)
    assert kept[""] == str(tmp_path)
    assert float8_weights(kept["--fp8 row"])
    weight = kept["--mxfp4"].model.layers[0].mlp.up_proj.weight
    assert len(weight[0].abs().unique()) <= 8  # 32 numbers with one scale: 0, .5, 1, ... 6


def test_one_row_fills_a_batch(tmp_path):
    from gsm8k import rows_of

    rows = [{"question": f"{n} and 1?", "answer": f"so\n#### {n + 1}"} for n in range(70)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one, many = (rows_of(tmp_path, count, None, "") for count in (1, 70))
    assert len(one) >= 256 // 8 and set(one["answer"]) == {"1"}  # groups of an update
    assert many["answer"] == [str(n + 1) for n in range(70)]


def test_answers_become_votes():
    from gsm8k import votes_of

    texts = ["\\boxed{5}", "so 5.0", "4", "4", "it is 7", "none"]
    assert votes_of(texts, "5") == [2, [2, 1], 1]


def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_answer():
    from answers import pass_at

    for right, k in itertools.product(range(7), range(1, 7)):
        answers = [True] * right + [False] * (6 - right)
        found = [any(chosen) for chosen in itertools.combinations(answers, k)]
        assert pass_at(k, right, 6) == pytest.approx(sum(found) / len(found))


def test_runs_wait_for_cards_and_for_one_another(tmp_path):
    write = "echo $CUDA_VISIBLE_DEVICES $WORD > $OUT/$NAME.json"
    lines = f"1 1 a: sleep .5; {write}\n2 1 both: {write}\n1 1 after<a: {write}\n1 1 wrong: false\n"
    lines += "1 1 never<wrong: true\n3 1 wide: true\n1 99 late: true\n1 1 there: false\n"
    (tmp_path / "runs.txt").write_text(lines)
    (tmp_path / "there.json").touch()  # was run before
    command = [sys.executable, FOLDER / "on_cards.py", tmp_path / "runs.txt", "WORD=x"]
    command += ["--out", tmp_path, "--cards", "2", "--minutes", "5"]
    there = {**os.environ, "CUDA_VISIBLE_DEVICES": "2,3"}
    given = dict(capture_output=True, text=True, timeout=60, check=True, env=there)
    said = subprocess.run(command, **given).stdout
    assert (tmp_path / "both.json").read_text() == "2,3 x\n"
    assert said.index("a: done") < said.index("after: on card") and "wrong: failed (1)" in said
    for name in ("never", "wide", "late"):
        assert f"{name}: left out" in said
    assert "there:" not in said


@pytest.mark.parametrize("words, temperature", [([], 1.0), (["--temperature", 0.6], 0.6)])
def test_sixty_four_answers_to_each_problem(words, temperature, command, tmp_path, monkeypatch):
    import gsm8k

    def answered(model, tokenizer, prompts, answers, **given):
        assert given["temperature"] == temperature and len(prompts) == len(answers) == 128
        texts = [f"\\boxed{{{5 if i % 64 < 3 else 7}}}" for i in range(128)]
        return dict(marks="", right=0.5), texts

    monkeypatch.setattr(gsm8k, "answered", answered)
    monkeypatch.setattr(gsm8k, "loaded", lambda arguments: ("model", "tokenizer"))
    rows = [dict(question="2 + 3?", answer="#### 5"), dict(question="3 + 4?", answer="#### 7")]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command("model", "--data", tmp_path, "--out", tmp_path, "samples", "--name", "one", *words)
    record = json.loads((tmp_path / "one_samples.json").read_text())
    assert record["samples"]["counts"] == [3, 61]
    assert record["samples"]["votes"] == [[3, [61], 0], [61, [3], 0]]
    assert record["arguments"]["temperature"] == temperature


def test_samples_of_after_stand_beside_those_of_before(capsys):
    "Differences and moves, on three problems: never, once and always right."
    from gsm8k import show_samples

    before = dict(each=64, counts=[0, 1, 64], votes=[[0, [64], 0], [1, [63], 0], [64, [], 0]])
    all_right = dict(each=64, counts=[64] * 3, votes=[[64, [], 0]] * 3)
    show_samples("same", before, before)
    show_samples("all", all_right, before)
    said = capsys.readouterr().out
    assert "same     pass@k, points more than before: 1: 0.0 (0.0 to 0.0), 2: 0.0" in said
    # a problem with one right answer of 64: in 32 with a chance of a half
    assert "same     problems in 32 answers, solved, and not before: 0.2" in said
    assert said.count("either, by 32 more of before: 0.5") == 2
    assert "all      problems in 32 answers, solved, and not before: 1.5" in said
    assert "all      maj@k, points more than before: 1: 66.1" in said  # 1 - (1 + 1/64) / 3
