"Recipes: what is refused and how it is said, what a planner makes of one, and how one is written."

import dataclasses
import inspect
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import trl
import yaml
from trl.scripts.grpo import GRPOScriptArguments

from grpo_nb import cli
from grpo_nb.planning.plan import advise, plan_of
from grpo_nb.recipe import (
    FIELDS,
    GROUPS,
    NAMES,
    NOT_HERE,
    SHORT,
    comments,
    groups_of_settings,
    lines_of,
    mapping_in,
    named_object,
    read_recipe,
    recipe_of,
    setup_of_recipe,
    underscored,
    with_lines,
)
from grpo_nb.training.config import GRPOConfig

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def light(*arguments):
    "`grpo-nb` in a process that may not import torch or transformers."
    guard = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers'])); "
        "from grpo_nb.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", guard, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("theirs", [trl.ModelConfig, trl.ScriptArguments, GRPOScriptArguments])
def test_the_names_and_defaults_of_trl(theirs):
    for one in dataclasses.fields(theirs):
        assert one.name in NAMES
        default = trl_default(one)
        if one.name in NOT_HERE:
            assert default in NOT_HERE[one.name][0], one.name
        elif one.name != "dtype":
            assert FIELDS[one.name].default == default, one.name


@pytest.mark.parametrize(
    "given, loaded, planned",
    [
        ({}, trl.ModelConfig().dtype, "fp32"),
        ({"dtype": "bfloat16"}, "bfloat16", "bf16"),
        ({"load_in_4bit": True}, "auto", "mxfp4"),
        ({"load_in_4bit": True, "dtype": "float16"}, "float16", "mxfp4"),
        ({"load_in_fp8": True}, "auto", "fp8"),
        ({"load_in_fp8": "block", "dtype": "float32"}, "float32", "fp8"),
    ],
)
def test_the_number_format_is_trl_s_but_for_what_is_left_beside_4_bits(given, loaded, planned):
    recipe = recipe_of(given | dict(model_name_or_path="gpt-oss-20b", use_peft=True))
    assert recipe.model.number_format() == loaded
    assert setup_of_recipe(recipe).weights == planned


def test_float32_beside_4_bits_is_not_planned():
    recipe = recipe_of(dict(model_name_or_path="Phi-4", load_in_4bit=True, dtype="float32"))
    with pytest.raises(ValueError, match="set dtype: auto"):
        setup_of_recipe(recipe)


def trl_default(one):
    return one.default_factory() if one.default is dataclasses.MISSING else one.default


@pytest.mark.filterwarnings("ignore:log_level")
def test_a_recipe_of_trl_s_own_parser(tmp_path):
    text = """
model_name_or_path: Qwen/Qwen3-4B
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [proximity_reward]
learning_rate: 1e-5
use_peft: true
lora_target_modules: [q_proj, v_proj]
chat_template_kwargs: {enable_thinking: false}
report_to: none
log_level: info
"""
    (tmp_path / "run.yaml").write_text(text)
    types = (GRPOScriptArguments, GRPOConfig, trl.ModelConfig)
    line = ["--config", str(tmp_path / "run.yaml")]
    data, config, model = trl.TrlParser(types).parse_args_and_config(line)
    recipe = read_recipe(tmp_path / "run.yaml")
    assert recipe.config == config
    for ours, theirs in ((recipe.model, model), (recipe.adapter, model), (recipe.data, data)):
        shared = ours.specs.keys() & {one.name for one in dataclasses.fields(theirs)} - {"dtype"}
        for name in shared:
            assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.long
@pytest.mark.parametrize(
    "line, sentence",
    [
        ("learning_rte: 1e-5", "the nearest is 'learning_rate'"),
        ("model: x", "There is no setting 'model'; the nearest is 'model_name_or_path'"),
        (
            "model_name: x\nlearning_rte: 1",
            "or_path'. There is no setting 'learning_rte'; the nearest",
        ),
        ("rewards: x", "the nearest is 'reward_funcs'"),
        ("7: x", "There is no setting '7'"),
        ("learning_rate: fast", "learning_rate is 'fast', but it has to be a number"),
        ("num_generations: 1", "nothing to be compared with"),
        ("loss_type: drgrpo", "The nearest is 'dr_grpo'"),
        ("bf16_full_eval: true", "bf16_full_eval=True cannot be honoured"),
        ("load_in_8bit: true", "set load_in_4bit"),
        ("bnb_4bit_quant_type: fp4", "leave it out"),
        ("trust_remote_code: true", "in a script"),
        ("torch_dtype: bfloat16\ndtype: float16", "torch_dtype and dtype are names of one setting"),
        ("lora_dropout: 1.0", "lora_dropout is 1.0"),
        ("reward_weights: [1, two]", "one finite number"),
        ("bf16: true\nfp16: true", "exclude each other"),
        ("beta: 1\nbeta: 0", "line 4: beta stands there twice"),
        ("beta: [1", "is no YAML"),
        ("\tbeta: 1", "is no YAML"),
        ("beta: " + "[" * 5_000, "is no YAML: it is nested too deeply"),
        ("beta: " + "1" * 5_000, "is no YAML: Exceeds the limit"),
        ("beta: 2026-99-99", "is no YAML: month must be in 1..12"),
    ],
)
def test_a_mistake_in_a_file_is_a_sentence_and_touches_nothing(line, sentence, tmp_path):
    file, out = tmp_path / "run.yaml", tmp_path / "out"
    file.write_text(f"model_name_or_path: Qwen/Qwen3-4B\noutput_dir: {out}\n{line}\n")
    for command in (("train", "--config"), ("plan",)):
        done = light(*command, file)
        assert done.returncode == 2 and sentence in done.stderr, done.stderr
        assert done.stderr.startswith(f"grpo-nb {command[0]}: {file}") and not done.stdout
        assert done.stderr.count("\n") == 1
    assert not out.exists()


def test_flags_lie_on_top_of_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("beta: 0.1\nbf16: true\nrun_name: 1e3\nlora_r: 8\n")
    words = {"bf16": "false", "lora_r": "4", "reward_weights": ["1", "1e-1"], "run_name": "7"}
    with pytest.warns(UserWarning, match="use_peft is not"):
        recipe = read_recipe(tmp_path / "run.yaml", words)
    expected = GRPOConfig(beta=0.1, bf16=False, reward_weights=[1.0, 0.1], run_name="7")
    assert recipe.config == expected and recipe.adapter.lora_r == 4


def test_a_doubt_is_said_once(tmp_path):
    (tmp_path / "run.yaml").write_text("model_name_or_path: Qwen3-4B\nlora_r: 8\ndtype: auto\n")
    done = light("plan", tmp_path / "run.yaml", "--card", "H100")
    expected = (
        "grpo-nb plan: lora_r is set and use_peft is not, so there is no adapter to set up.\n"
    )
    assert done.returncode == 0 and done.stderr == expected


def test_a_flag_for_every_field_with_hyphens_too():
    import argparse

    from grpo_nb.recipe import add_flags

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    for name in NAMES:
        for word in (f"--{name}", f"--{name.replace('_', '-')}"):
            assert vars(parser.parse_args(underscored([word, "1"]))).keys() == {name}
    assert parser.parse_args(["--no_gradient_checkpointing"]).gradient_checkpointing == "false"
    assert parser.parse_args(underscored(["--beta=-1"])).beta == "-1"


def test_every_setting_is_in_the_help_with_its_comment():
    every = {}
    for group in groups_of_settings():
        said = comments(group)
        every |= said
        bases = {name for base in group.__mro__[1:] for name in getattr(base, "specs", {})}
        assert group.specs.keys() - bases <= said.keys()
    assert every["logging_first_step"] == "log the first update as well"  # beside it
    assert every["eval_steps"].startswith("updates between two evaluations")  # above it


def test_what_trl_accepts_and_means_nothing_here_is_not_in_the_help():
    said = light("train", "--help").stdout
    shown = {word.strip("[],") for word in said.split() if word.startswith("--")}
    assert {"--beta", "--lora_r", "--dataset_name", "--save_steps"} <= shown
    assert not shown & {f"--{name}" for name in NOT_HERE} and "--vllm_group_port" not in shown


def test_the_short_names_are_reward_functions():
    for name in SHORT:
        function = named_object(name, "reward_funcs")
        assert function.__name__ == name and "completions" in inspect.signature(function).parameters


OPEN_R1S = [  # lines of open-r1's that ask for what is done in another way, and what is said
    ("benchmarks: [math_500]", "run them on the model"),
    ("callbacks: [push_to_hub_revision]", "in a script"),
    ("push_to_hub_revision: true", "hub_revision"),
    ("wandb_entity: me", "WANDB_ENTITY"),
    ("dataset_mixture: {datasets: []}", "in dataset_name"),
    ("cosine_max_len: 1000", "file.py:name"),
]


@pytest.mark.parametrize("line, sentence", OPEN_R1S)
def test_a_line_of_open_r1s_that_is_written_elsewhere(line, sentence, tmp_path):
    (tmp_path / "run.yaml").write_text(line)
    with pytest.raises(ValueError, match=sentence):
        read_recipe(tmp_path / "run.yaml")


def test_older_names_are_todays_in_files_flags_and_written_lines(tmp_path):
    text = "torch_dtype: float16 # old\nwandb_project: sums\nbenchmarks: []\n"
    (tmp_path / "run.yaml").write_text(text)
    recipe = read_recipe(tmp_path / "run.yaml")
    assert (recipe.model.dtype, recipe.config.project) == ("float16", "sums")
    for name in ("torch_dtype", "dtype"):
        assert read_recipe(tmp_path / "run.yaml", {name: "auto"}).model.dtype == "auto"
    assert with_lines(text, {"dtype": "auto"}) == text.replace("float16", "auto")


def test_the_short_names_of_trl_and_of_open_r1(monkeypatch):
    for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"):
        assert named_object(name, "reward_funcs") is getattr(trl.rewards, name)
    assert named_object("accuracy", "reward_funcs") is trl.rewards.accuracy_reward
    long = named_object("get_soft_overlong_punishment", "reward_funcs")
    theirs = trl.rewards.get_soft_overlong_punishment(1280, 256)  # as in trl/scripts/grpo.py
    lengths = [[0] * n for n in (1, 1024, 1152, 1280, 1281)]
    assert long(completion_ids=lengths) == theirs(completion_ids=lengths) == [0, 0, -0.5, -1, -1]
    for name, said in (("cosine", "get_cosine_scaled_reward"), ("tag_cuont", "'tag_count'")):
        with pytest.raises(ValueError, match=said):
            named_object(name, "reward_funcs")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"trl is not installed.*math_reward\(\)"):
        named_object("accuracy_reward", "reward_funcs")


def test_a_function_in_a_module_of_the_present_folder(tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text("def score(completions, **kwargs): return [7.0]\n")
    monkeypatch.chdir(tmp_path)
    for name in ("my_scores:score", "my_scores.score", "my_scores.py:score"):
        assert named_object(name, "reward_funcs")(["a"]) == [7.0]


@pytest.mark.parametrize(
    "text",
    [
        "a: 1 # why\nbeta: 0.1 # because\nc: 2\n",
        "a: 1\nbeta:\n  - 1\n  - 2 # two\n# about c\nc: {d: [1, 2]}\n",
        "a: 1\nbeta: [1,\n  2]\nc: 2",
        "a: 1\nbeta:\nc: 2\n\n\n",
        "a: 1\nbeta:\n  d:\n    - e\nc: x\n",
        "beta: |\n  long\n  text\na: 1\n",
        "a: 1\n",
        "{a: 1, beta: 2}\n",
    ],
)
@pytest.mark.parametrize("value", [True, 8, "attention", None, ["q_proj", "v_proj"], 1e-05])
def test_a_changed_line_changes_nothing_else(text, value):
    before, after = yaml.safe_load(text), with_lines(text, {"beta": value})
    assert yaml.safe_load(after) == before | {"beta": value}
    assert [line for line in ("# why", "# because", "# about c") if line in text] == [
        line for line in ("# why", "# because", "# about c") if line in after
    ]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_fit_the_card_that_they_name(path):
    text = path.read_text()
    recipe = read_recipe(path)
    made = plan_of(setup_of_recipe(recipe))
    assert made.fits
    if "Not run yet" in text:  # those that download
        assert "RUN_CARD.md" in text and made.setup.card.name == mapping_in(text, path)["card"]
        done = light("plan", path)
        assert done.returncode == 0 and "It fits" in done.stdout, done.stderr
    for name in mapping_in(text, path)["reward_funcs"] if "Not run yet" in text else []:
        named_object(name, "reward_funcs")


CARDLESS = "use_peft: true\nlora_target_modules: {}\nmax_completion_length: {}\n"
TIGHT = [  # model, card, lines
    ("Qwen3-4B", "T4", CARDLESS.format("all-linear", 4096)),
    ("Qwen/Qwen3-8B", "L4", CARDLESS.format("[q_proj, v_proj]", 16_384) + "dtype: bfloat16\n"),
    ("meta-llama/Llama-3.1-8B", "L4", CARDLESS.format("all", 8192) + "lora_r: 64\n"),
    ("openai/gpt-oss-20b", "T4", CARDLESS.format("attention", 8192) + "load_in_4bit: true\n"),
    ("Phi-4", "A10G", CARDLESS.format("all", 2048) + "dtype: float32\n"),
    ("Phi-4", "L4", CARDLESS.format("all", 2048) + "steps_per_generation: 4\n"),
    ("Phi-4", "A100-40", CARDLESS.format("all", 9000) + "per_device_train_batch_size: 16\n"),
]


@pytest.mark.parametrize("model, card, lines", TIGHT)
def test_what_is_written_fits_and_makes_the_same_updates(model, card, lines, tmp_path, capsys):
    text = f"model_name_or_path: {model}\ncard: {card}\n{lines}"
    (tmp_path / "run.yaml").write_text(text)
    run, fits = str(tmp_path / "run.yaml"), str(tmp_path / "fits.yaml")
    assert cli.main(["plan", run]) == 1
    pasted = capsys.readouterr().out.split("As lines of")[1].split("\n", 2)[2]
    pasted, needed = pasted.split("Fits with: ")
    flags = ["train", "--config", run, *shlex.split(needed)]
    asked = vars(cli._parser(flags).parse_args(flags)).items()
    with_flags = read_recipe(run, {name: value for name, value in asked if name in NAMES})
    assert cli.main(["plan", run, "--write", fits]) == 0
    assert f"--config {fits}" in capsys.readouterr().err
    before, after = (read_recipe(tmp_path / f"{name}.yaml") for name in ("run", "fits"))
    given = yaml.safe_load(text) | yaml.safe_load(pasted)
    assert after == with_flags == recipe_of(given | {"learning_rate": 1e-6})
    old, new = (plan_of(setup_of_recipe(recipe)) for recipe in (before, after))
    advised = advise(old)[-1].plan
    assert not old.fits and new.fits
    assert new.totals["layer"] <= advised.totals["layer"]  # a rollout takes what there is
    layouts = [recipe.config.layout() for recipe in (before, after)]
    for name in ("effective_batch_size", "generation_batch_size", "prompts_per_generation"):
        assert getattr(layouts[0], name) == getattr(layouts[1], name)
    scales = [r.adapter.lora_alpha / r.adapter.lora_r for r in (before, after)]
    assert scales[0] == scales[1]
    assert cli.main(["plan", fits]) == 0


def test_a_recipe_that_cannot_be_made_to_fit_is_not_written(tmp_path):
    (tmp_path / "run.yaml").write_text("model_name_or_path: Llama-3.3-70B\nuse_peft: true\n")
    done = light("plan", tmp_path / "run.yaml", "--write", tmp_path / "fits.yaml")
    assert done.returncode == 1 and "not written" in done.stderr
    assert not (tmp_path / "fits.yaml").exists()
    done = light("plan", tmp_path / "run.yaml", "--card", "H200", "--write", tmp_path / "no" / "x")
    assert done.returncode == 2 and "No such file" in done.stderr


def test_plan_refuses_flags_that_belong_into_the_file(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model_name_or_path: Qwen3-4B\n")
    assert cli.main(["plan", str(tmp_path / "run.yaml"), "--lora-r", "8"]) == 2
    assert "--lora-r is for a model without a recipe" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "run.yaml"), "--no-checkpointing"]) == 2
    assert "--no-checkpointing is for a model without a recipe" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "run.yaml"), "--card", "H100", "--json"]) == 0


def test_the_planner_s_words_for_a_recipe():
    recipe = recipe_of(dict(model_name_or_path="gpt-oss-20b", use_peft=True, lora_r=32))
    changes = dict(lora_r=8, lora_targets=("attention",), weights="mxfp4", double_quant=False)
    assert lines_of(changes, recipe) == {
        "lora_r": 8,
        "lora_alpha": 8,
        "lora_target_modules": "attention",
        "load_in_4bit": True,
    }
    assert {*lines_of(dict(weights="bf16", share_prompt=True), recipe)} <= {*FIELDS}
    assert len(GROUPS) == 4


def test_the_launch_of_several_cards_is_the_first_line_once(tmp_path, capsys):
    run, fits = tmp_path / "run.yaml", tmp_path / "fits.yaml"
    run.write_text(f"# mine\nmodel_name_or_path: Qwen3-4B\n{CARDLESS.format('all-linear', 4096)}")
    assert cli.main(["plan", str(run), "--cards", "4", "--write", str(fits)]) == 0
    line = f"torchrun --nproc-per-node 4 -m grpo_nb train --config {fits}"
    assert (
        fits.read_text().startswith(f"# {line}\n# mine\nmodel_name")
        and line in capsys.readouterr().err
    )
    assert cli.main(["plan", str(fits), "--cards", "2", "--write", str(fits)]) == 0
    assert fits.read_text().count("torchrun") == 1 and "--nproc-per-node 2" in fits.read_text()
    assert cli.main(["plan", str(fits), "--write", str(fits)]) == 0
    assert fits.read_text().startswith("# mine\n")
    run.write_text(f"{run.read_text()}generation_batch_size: 8\n")
    assert cli.main(["plan", str(run), "--cards", "3"]) == 2
    assert "Set generation_batch_size=24" in capsys.readouterr().err


def test_cards_that_only_draw_are_written_into_the_recipe(tmp_path, capsys):
    run, fits = tmp_path / "run.yaml", tmp_path / "fits.yaml"
    run.write_text(f"# mine\nmodel_name_or_path: Qwen3-4B\n{CARDLESS.format('all-linear', 4096)}")
    words = ["--card", "A100-80", "--write", str(fits)]
    assert cli.main(["plan", str(run), "--cards", "2", "--samplers", "2", *words]) == 0
    said = capsys.readouterr().out
    config = read_recipe(fits).config
    assert config.use_vllm and config.vllm_mode == "server" and len(config.server_urls()) == 2
    begins = fits.read_text().splitlines()[:4]
    assert [line.split()[1] for line in begins[:3]] == [
        f"CUDA_VISIBLE_DEVICES={cards}" for cards in ("0", "1", "2,3")
    ] and begins[3] == "# mine"
    assert all(
        line[2:] in said and url[-5:] in said for line, url in zip(begins, config.server_urls())
    )
    own = fits.read_text().replace("127.0.0.1:8000", "node-1:8000")
    fits.write_text(own)  # addresses of one's own stay, if there are as many
    assert cli.main(["plan", str(fits), "--cards", "2", "--samplers", "2", *words]) == 0
    assert fits.read_text() == own
    assert cli.main(["plan", str(fits), "--card", "A100-80"]) == 0
    assert "drawn elsewhere" in capsys.readouterr().out


def test_vllm_of_a_recipe_is_planned_and_left_out_where_it_does_not_fit(tmp_path, capsys):
    run, fits = tmp_path / "run.yaml", tmp_path / "fits.yaml"
    lines = "dtype: bfloat16\nuse_vllm: true\nvllm_gpu_memory_utilization: 0.6\n"
    run.write_text(f"model_name_or_path: Qwen3-4B\n{lines}{CARDLESS.format('all-linear', 4096)}")
    assert cli.main(["plan", str(run), "--card", "H100"]) == 0
    assert "vLLM takes 60% of the card: 7.5 GiB of weights" in capsys.readouterr().out
    assert cli.main(["plan", str(run), "--card", "L4", "--write", str(fits)]) == 0
    assert "use_vllm: false" in fits.read_text()
    assert plan_of(setup_of_recipe(read_recipe(fits), "L4")).fits
