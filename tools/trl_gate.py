"""TRL's own tests of its GRPO trainer, run for this library and for TRL, side by side.

    python tools/trl_gate.py PATH/test_grpo_trainer.py --out gate [-k EXPRESSION] [-n 2]

PATH is a file of TRL's public repository, which is not kept here. The tiny models and data sets
that the tests take from the Hugging Face hub are built on disk under the same names (those that
see only where torchvision is installed, which transformers' processors need), the line that
imports the trainer is swapped, and every test runs once for each library. OUT/gate.json holds
each test's outcome for both, with versions and date. What is printed counts them, and names each
test that TRL passes and this library does not, with its reason. docs/trl_gate.json is what
--record wrote last; docs/from_trl.md has a section made of it.

Half an hour on two cores. `--only grpo_nb` runs one half and takes the other from OUT, `--only
none` counts again. With `--again` the tests that -k chooses replace their entries in the record,
which says of each on what day, and all others stay as they were counted.
"""

import argparse
import collections
import datetime
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
HUB = "trl-internal-testing/"
LIBRARIES = {"grpo_nb": "from grpo_nb import GRPOConfig, GRPOTrainer", "trl": None}
IMPORT = "from trl import GRPOConfig, GRPOTrainer"
CAUSAL = {  # name on the hub -> class of its config, and what it needs besides
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2Config", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 4}),
    "tiny-Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4},
    ),
    "tiny-LlamaForCausalLM-3.2": ("LlamaConfig", {}),
    "tiny-MistralForCausalLM-0.2": ("MistralConfig", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2Config", {"head_dim": 4}),
    "tiny-Cohere2ForCausalLM": ("Cohere2Config", {}),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 4,
            "first_k_dense_replace": 1,
        },
    ),
    "tiny-GptOssForCausalLM": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
    ),
}
JUDGES = {
    "tiny-Qwen2ForSequenceClassification-2.5": "Qwen2Config",
    "tiny-Qwen3ForSequenceClassification": "Qwen3Config",
    "tiny-LlamaForSequenceClassification-3.2": "LlamaConfig",
}
SEERS = {  # name on the hub -> family in tests/seeing_models.py
    "tiny-Gemma3ForConditionalGeneration": "gemma3",
    "tiny-Gemma4ForConditionalGeneration": "gemma4",
    "tiny-LlavaNextForConditionalGeneration": "llava_next",
    "tiny-Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "tiny-Qwen2VLForConditionalGeneration": "qwen2_vl",
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": "qwen3_5",
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": "qwen3_5_moe",
}
SIZES = {  # of every tiny model
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
}
VOCABULARY = (
    20_000  # so large that a completion hardly ever ends by chance, as with released models
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = """The shortest path is the one you know
A test that cannot fail says nothing
Numbers before words
One idea in a cell
Show the failure before the cure
A group of one has nothing to be compared with
What is not measured is not known
The mean of means is not the mean
Errors are sentences
A guard that cannot stand refuses to start
Small steps in the dark
Every seed is a different world
Count the tokens twice
The reward is what you asked for
It is rarely what you wanted
Read the completions
Then read them again
Stop when the curve is flat
Begin again with a smaller model""".splitlines()
QWEN = {  # words that the tests with tools write by their number in Qwen's vocabulary
    **{0: "!", 11: ",", 16: "1", 17: "2", 18: "3", 19: "4", 25: ":", 27: "<", 29: ">", 40: "I"},
    **{64: "a", 65: "b", 66: "c", 198: "\n", 220: " ", 293: " b", 314: " {", 330: ' "'},
    **{397: ">\n", 411: "out", 450: "dec", 497: '",', 522: "</", 606: "name", 788: '":'},
    **{894: " any", 927: "sh", 944: "'t", 1318: "text", 1414: " know", 1513: " don"},
    **{2765: " won", 4913: '{"', 5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call"},
    **{7692: "async", 9520: "step", 11248: "}}\n", 13477: "rement", 14172: "tool"},
    **{16252: " increment", 16370: "arguments", 17453: "Done", 22785: "_tool", 35744: "increment"},
    **{64648: "multiply", 93054: "_multiply", 95642: '"}}\n', 151643: "<|endoftext|>"},
    **{151644: "<|im_start|>", 151645: "<|im_end|>", 151657: "<tool_call>"},
    **{151658: "</tool_call>"},
}
WITH_TOOLS = ("tiny-Qwen3ForCausalLM", "tiny-Qwen3MoeForCausalLM")  # have Qwen3's chat template
TESTING_UTILS = """
import importlib.util

import pytest


class TrlTestCase:
    @pytest.fixture(autouse=True)
    def set_tmp_dir(self, tmp_path):
        self.tmp_dir = str(tmp_path)


def is_ampere_or_newer(device_index=0):
    return False


def __getattr__(name):
    if not name.startswith("require_"):
        raise AttributeError(name)
    package = name.removeprefix("require_")
    if package == "torch_accelerator":
        return pytest.mark.skip(reason="needs a GPU")
    missing = importlib.util.find_spec({"vision": "PIL"}.get(package, package)) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}")
"""  # in place of TRL's own, which asks for names of the version that it belongs to

CPU_IN_BFLOAT16 = """
from transformers import training_args

# TRL's default is bfloat16, which transformers looks for on a GPU alone; a CPU has it too
training_args.is_torch_bf16_gpu_available = lambda: True
"""


PACKAGES = ("trl", "transformers", "torch")
KINDS = {
    "passed": "pass with both libraries",
    "refused": "are refused here with a sentence that says what to write instead",
    "different": "show a difference that is meant",
    "worded": "want TRL's words: here the same mistake gives another sentence",
    "private": "look at parts of TRL that are not its interface",
    "fixture": "do not pass with TRL either, on the models and data built here",
    "skipped": "are skipped with both: they need a GPU, or a package that is not installed",
    "unexplained": "differ without a reason",
}
REASONS = [  # (kind, reason, tests)
    (
        "refused",
        "beam search draws a completion from no distribution that the loss could know",
        ["test_train_with_generation_kwargs"],
    ),
    (
        "different",
        "three generations in a row that no reward function judged end the run; one is a warning",
        ["test_warning_raised_all_rewards_none"],
    ),
    (
        "different",
        "a trainer without train_dataset may evaluate; train() asks for one",
        ["test_dataset_required_without_environment"],
    ),
    (
        "different",
        "a stream of evaluation data is read once, and kept as a list",
        ["test_init_with_eval_dataset"],
    ),
    (
        "different",
        "use_liger_kernel changes nothing, and a warning says so",
        ["test_liger_kernel_with_peft_lm_head_raises"],
    ),
    (
        "worded",
        "it is a warning of Python's, given where the settings are made, and no line of TRL's log",
        ["test_warning_raised_sequence_level_with_token_summed_loss"],
    ),
    (
        "private",
        "static methods of TRL's trainer; grpo_nb.algorithm.losses has high_entropy_mask and "
        "off_policy_mask",
        [
            "test_compute_entropy_mask_0",
            "test_compute_entropy_mask_1",
            "test_compute_entropy_mask_lower_threshold",
            "test_compute_entropy_threshold_0",
            "test_compute_entropy_threshold_1",
            "test_compute_entropy_all_masked",
            "test_get_off_policy_mask",
            "test_get_off_policy_mask_padding",
        ],
    ),
    (
        "private",
        "a trainer made without its constructor, and methods and attributes with an underscore",
        [
            "test_generate_rollout_func_raises_when_required_keys_are_missing",
            "test_train_reward_func_with_log_extra",
        ],
    ),
    (
        "private",
        "data loaders and their settings; here rows are looked up by number, and streams train too",
        [
            "test_iterable_dataset_requires_dispatch_batches_false",
            "test_iterable_dataset_forces_num_workers_zero",
            "test_iterable_eval_keeps_map_style_train_workers",
            "test_train_with_iterable_dataset",
        ],
    ),
    (
        "private",
        "an attribute with an underscore",
        ["test_train_vlm_log_multimodal_false"],
    ),
    (
        "private",
        "a script in place of the model's generate, which this library's sampler does not call",
        [
            "test_train_with_environment_factory",
            "test_train_with_environment_owned_reward",
            "test_train_with_multiple_environments",
            "test_train_with_tools",
        ],
    ),
    (
        "fixture",
        "a model of this kind is not built here",
        ["test_train", "test_trust_remote_code"],
    ),
    (
        "fixture",
        "token ids of a released tokenizer, or rows of a released data set",
        [
            "test_prepare_input_called_with_correct_data",
            "test_train_with_mask_truncated_completions",
            "test_train_with_tools_multimodal_response",
        ],
    ),
    (
        "fixture",
        "the tokenizer built here takes more tokens for a tool's error than the test has room for",
        ["test_train_with_tools"],
    ),
    (
        "fixture",
        "written for another version of TRL, of Liger or of PEFT than those installed",
        [
            "test_entropy_bonus_flows_gradients",
            "test_generate_prefers_rollout_func",
            "test_generate_rollout_func_syncs_vllm_weights_when_needed",
            "test_liger_kernel_with_peft_modules_to_save_lm_head_allowed",
            "test_liger_kernel_with_peft_non_lm_head_target_allowed",
            "test_liger_kernel_with_peft_prompt_learning_raises",
            "test_train_moe_peft_model",
        ],
    ),
]


def tokenizer(
    tools: bool = False,  # with Qwen3's chat template, from the TRL that is installed
):
    "A byte-level tokenizer with a chat template of the common form."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen3_chat_template

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES, trainer)
    learnt = json.loads(made.to_str())
    words = learnt["model"]["vocab"]
    if tools:
        renumber(learnt)
    else:
        words |= {f"word{i}": i for i in range(len(words), VOCABULARY)}  # which no merge leads to
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(learnt)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=qwen3_chat_template if tools else TEMPLATE,
    )


def renumber(
    learnt: dict,  # a tokenizer as JSON, changed in place
) -> None:
    "Give the words of QWEN their numbers, and all others the numbers that are left."
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fixed = {split.pre_tokenize_str(word)[0][0]: number for number, word in QWEN.items()}
    free = (number for number in range(max(QWEN) + 1) if number not in QWEN)
    words = {word: next(free) for word in learnt["model"]["vocab"] if word not in fixed} | fixed
    learnt["model"]["vocab"] = words | {f"word{number}": number for number in free}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    learnt["added_tokens"] = [
        {"id": number, "content": word, "special": word.startswith("<|"), **plain}
        for word, number in sorted(fixed.items(), key=lambda item: item[1])
        if number >= min(number for number, word in QWEN.items() if word.startswith("<|"))
    ]


def numbers_of(words) -> dict:  # for a model's config
    "The size of a tokenizer, and its special tokens."
    return {
        "vocab_size": len(words),
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "bos_token_id": None,
    }


def build_models(
    folder: Path,  # gets one folder for each model
) -> None:
    "Tiny random models under the names that the tests use."
    import transformers

    plain, with_tools = tokenizer(), tokenizer(tools=True)
    for name, (kind, others) in CAUSAL.items():
        torch.manual_seed(0)
        words = with_tools if name in WITH_TOOLS else plain
        config = getattr(transformers, kind)(**SIZES, **numbers_of(words), **others)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    words = plain
    for name, kind in JUDGES.items():
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**SIZES, **numbers_of(words), num_labels=1)
        judge = transformers.AutoModelForSequenceClassification.from_config(config)
        judge.save_pretrained(folder / name)
        words.save_pretrained(folder / name)


def build_seers(
    folder: Path,  # gets one folder for each model
) -> None:
    "Tiny random models that see, with processors of transformers' own classes."
    sys.path.insert(0, str(ROOT / "tests"))
    from seeing_models import processor_of_transformers, seeing

    for name, family in SEERS.items():
        seeing(family)[0].save_pretrained(folder / name)
        processor_of_transformers(family).save_pretrained(folder / name)


def build_pictures(
    folder: Path,  # gets the data sets zen-image and zen-multi-image
) -> None:
    "Prompts with noise as their pictures: one each, or several at places in the message."
    import datasets
    import numpy as np

    random = np.random.default_rng(0)

    def noise():
        return random.integers(0, 255, (*random.integers(32, 64, 2), 3), dtype=np.uint8)

    rows = {"zen-image": [], "zen-multi-image": []}
    for number, sentence in enumerate(SENTENCES):
        text = {"type": "text", "text": sentence}
        rows["zen-image"].append(
            {"prompt": [{"role": "user", "content": sentence}], "image": noise()}
        )
        places = [{"type": "image"}] * (number % 3)
        content = [*places[:1], text, *places[1:]]
        rows["zen-multi-image"].append(
            {"prompt": [{"role": "user", "content": content}], "images": [noise() for _ in places]}
        )
    for name, made in rows.items():
        picture = datasets.Image()
        whole = datasets.Dataset.from_list(made)
        one = "image" in made[0]
        whole = whole.cast_column(
            "image" if one else "images", picture if one else datasets.List(picture)
        )
        inside = folder / name / "conversational_prompt_only"
        inside.mkdir(parents=True)
        card = ["---", "configs:", "- config_name: conversational_prompt_only", "  data_files:"]
        for split, chosen in (("train", range(17)), ("test", range(17, 19))):
            whole.select(chosen).to_parquet(inside / f"{split}.parquet")
            card += [f"  - split: {split}", f"    path: {inside.name}/{split}.parquet"]
        (folder / name / "README.md").write_text("\n".join([*card, "---", ""]))


def build_data(
    folder: Path,  # gets the data set, in the layout that `load_dataset` reads from a folder
) -> None:
    "Seventeen prompts for training and two for tests, as strings and as conversations."
    heads = [" ".join(sentence.split()[:3]) for sentence in SENTENCES]
    shapes = {
        "standard_prompt_only": heads,
        "conversational_prompt_only": [[{"role": "user", "content": head}] for head in heads],
    }
    card = ["---", "configs:"]
    for name, prompts in shapes.items():
        (folder / name).mkdir(parents=True)
        card += [f"- config_name: {name}", "  data_files:"]
        for split, chosen in (("train", prompts[:17]), ("test", prompts[17:])):
            lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in chosen)
            (folder / name / f"{split}.jsonl").write_text(lines)
            card += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def prepare(
    tests: Path,  # TRL's file
    library: str,  # one of LIBRARIES
    hub: Path,  # folder of the models and data
    folder: Path,  # gets a package with the tests
) -> None:
    "The tests with the hub's names replaced by folders, and the import line of one library."
    folder.mkdir(parents=True)
    text = tests.read_text()
    if text.count(IMPORT) != 1:
        raise SystemExit(f"{tests} does not hold the line {IMPORT!r} once: is it TRL's file?")
    text = text.replace(IMPORT, LIBRARIES[library] or IMPORT).replace(HUB, f"{hub}/")
    (folder / "__init__.py").touch()
    if not torch.cuda.is_available():
        (folder / "conftest.py").write_text(CPU_IN_BFLOAT16)
    (folder / tests.name).write_text(text)
    (folder / "testing_utils.py").write_text(TESTING_UTILS)


def outcomes(
    report: Path,  # pytest's junit file
) -> dict[str, tuple[str, str]]:  # test -> ("passed", "failed" or "skipped", its message)
    "What came of each test."
    found = {}
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname').split('.')[-1]}::{case.get('name')}"
        kinds = [child for child in case if child.tag in ("failure", "error", "skipped")]
        kind = (
            {"failure": "failed", "error": "failed"}.get(kinds[0].tag, "skipped") if kinds else ""
        )
        message = (kinds[0].get("message") or "") if kinds else ""
        found[name] = (kind or "passed", message[:600])
    return found


def run(
    library: str,
    tests: Path,
    out: Path,
    arguments: list[str],  # more of them, for pytest
) -> dict[str, tuple[str, str]]:
    "Run the tests for one library."
    folder, report = out / library / "tests", out / library / "report.xml"
    prepare(tests, library, out / "hub", folder)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not torch.cuda.is_available():
        environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder.parent), "-c", os.devnull, f"--junitxml={report}"]
    with (out / library / "log.txt").open("w") as log:
        subprocess.run(
            [*command, *arguments, str(folder / tests.name)],
            cwd=folder.parent,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return outcomes(report)


def verdict(
    name: str,  # of a test
    ours: tuple[str, str],
    theirs: tuple[str, str],
) -> tuple[str, str]:  # one of KINDS and the reason, which is empty where it passed
    "What a test shows."
    if theirs[0] == "passed" == ours[0]:
        return "passed", ""
    if theirs[0] == "skipped":
        return "skipped", theirs[1]
    for kind, reason, tests in REASONS:
        if (kind == "fixture") == (theirs[0] != "passed") and test_of(name) in tests:
            return kind, reason
    return "unexplained", theirs[1] or ours[1]


def test_of(name: str) -> str:  # Class::test[parameters]
    "The function of a test."
    return name.split("::")[1].split("[")[0]


def summary(record: dict) -> str:  # several lines
    "The counts, and the reason of each test that TRL passes and this library does not."
    lines = [f"{record['date']}, {record['versions']}"]
    lines += [f"{record['counts'].get(kind, 0):4} {words}" for kind, words in KINDS.items()]
    for name, (kind, reason) in record["tests"].items():
        if kind not in ("passed", "skipped", "fixture"):
            lines.append(f"{kind}: {name.split('::')[1]}: {reason}")
    return "\n".join(lines)


def counted_again(
    record: dict,  # of the tests that were run now
    before: dict,  # of all
) -> dict:
    "The record of all tests, in which those that were run now replace what they were."
    tests = dict(sorted({**before["tests"], **record["tests"]}.items()))
    counts = collections.Counter(kind for kind, _ in tests.values())
    again = before.get("again", {}) | dict.fromkeys(record["tests"], record["date"])
    return before | {
        "again": dict(sorted(again.items())),
        "counts": dict(counts.most_common()),
        "tests": tests,
    }


def found_of(
    library: str,
    args: argparse.Namespace,
    rest: list[str],  # for pytest
) -> dict[str, tuple[str, str]]:
    "The outcomes of one library: run now, or those of the last time where `--only` says so."
    if args.only in (None, library):
        shutil.rmtree(args.out / library, ignore_errors=True)
        return run(library, args.tests.resolve(), args.out, rest)
    report = args.out / library / "report.xml"
    return outcomes(report) if report.exists() else {}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", type=Path, help="TRL's tests/test_grpo_trainer.py")
    parser.add_argument("--out", type=Path, default=Path("gate"), help="a folder for all of it")
    parser.add_argument(
        "--only",
        choices=[*LIBRARIES, "none"],
        help="run one library alone, or none; the rest is taken from OUT",
    )
    parser.add_argument("--record", type=Path, help="a file for the counts and each test's kind")
    parser.add_argument("--again", action="store_true", help="see above; needs --record")
    parser.add_argument("--source", default="TRL's", help="where PATH comes from, for the record")
    args, rest = parser.parse_known_args()
    args.out = args.out.resolve()
    if args.only is None or not (args.out / "hub").exists():
        shutil.rmtree(args.out, ignore_errors=True)
        build_models(args.out / "hub")
        build_data(args.out / "hub" / "zen")
        if importlib.util.find_spec("torchvision"):
            build_seers(args.out / "hub")
            build_pictures(args.out / "hub")
    found = {library: found_of(library, args, rest) for library in LIBRARIES}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    tests, hub = {}, f"{args.out / 'hub'}/"
    for name in sorted(set().union(*found.values())):
        both = [found[library].get(name, ("missing", "")) for library in LIBRARIES]
        kind, reason = verdict(name, *both)
        tests[name.replace(hub, "")] = (kind, reason.replace(hub, ""))
    counts = dict(collections.Counter(kind for kind, _ in tests.values()).most_common())
    date = str(datetime.date.today())
    record = {"date": date, "source": args.source, "versions": versions}
    record |= {"counts": counts, "tests": tests}
    (args.out / "gate.json").write_text(json.dumps({**record, "outcomes": found}, indent=1))
    if args.again:
        record = counted_again(record, json.loads(args.record.read_text()))
    if args.record:
        args.record.write_text(json.dumps(record, indent=1) + "\n")
    print(summary(record))
    return int("unexplained" in record["counts"])


if __name__ == "__main__":
    sys.exit(main())
