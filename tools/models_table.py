"""What works with which family of models: docs/models.json and docs/models.md.

    python tools/models_table.py                make both anew, all families (minutes)
    python tools/models_table.py llama gpt_oss  these families anew, the others as they are stored
    python tools/models_table.py --page         the page alone, from docs/models.json
    python tools/models_table.py --check        change nothing; exit 1 if the page is out of date

Each family is a tiny random model (tools/tiny_families.py), written as its makers write theirs and
read by this library in a process of its own. What comes back is compared with transformers' class
of `config.architectures` and with PEFT on it.
"""

import argparse
import contextlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

RECORD, PAGE, FRONT = ROOT / "docs/models.json", ROOT / "docs/models.md", ROOT / "index.ipynb"
PROMPTS = ("7=", "12+345=", "6*7-1=", "99-9+100*20=")  # 2 to 12 tokens
SECONDS = 90  # that a family may take
ADAPTER, MERGE, DRAWN = 1e-6, 1e-4, 2e-5  # what may differ: of the largest logit; nats
COLUMNS = {
    "loads": "`load_model` and `GRPOTrainer(folder)` read the released folder",
    "trains": "one update with the default targets of LoRA: finite, and the weights change",
    "adapter": "PEFT puts the saved adapter on the released class: the trainer's logits to "
    f"{ADAPTER:g} of the largest",
    "merge": f"the released class reads `save_merged`: the trainer's logits to {MERGE:g} of the "
    "largest",
    "drawn": "how completions are drawn. Their log-probs are those of the model's own forward "
    f"pass, each row alone and without padding, to {DRAWN:g} nats",
    "planned": "`grpo-nb plan` answers from its config.json",
    "served": "the adapter that a vLLM server is sent bears names of the released files; no server "
    "was asked",
}
VERSIONS = ("torch", "transformers", "peft", "trl")
NO_WORD = "without a word: "  # what begins a fault that no user is told


class Fault(Exception):
    "A difference that the library does not tell its user."


def one_line(error):
    "What a user reads, cut to a line."
    words = " ".join(str(error).split())
    kind = type(error)
    raw = kind not in (ValueError, Fault, str) and not kind.__module__.startswith("grpo_nb")
    return f"{kind.__name__}: {words}"[:300] if raw else words[:300]


def logits_of(model, rows):
    "The logits of each row alone."
    import torch

    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in rows]


def furthest(ours, theirs):
    "The largest difference, as a part of the largest logit."
    largest = max(float(x.abs().max()) for x in theirs)
    return max(float((x - y).abs().max()) for x, y in zip(ours, theirs, strict=True)) / largest


def digits(completions, **columns):
    "A reward with spread."
    return [sum(1.0 if c.isdigit() else 0.1 for c in text) for text in completions]


class Family:
    "One family's released folder, and what this library makes of it."

    def __init__(self, name, folder):
        from tiny_families import write_released

        from grpo_nb.model.tiny import tiny_tokenizer

        self.name, self.home, self.tokenizer = name, folder, tiny_tokenizer()
        self.released = folder / "released"
        self.theirs = write_released(name, self.tokenizer, self.released)
        self.rows = [self.tokenizer(prompt + "12345=678").input_ids for prompt in PROMPTS]

    def config(self):
        from grpo_nb import GRPOConfig

        return GRPOConfig(
            output_dir=str(self.home / "run"),
            max_steps=1,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=8,
            learning_rate=2e-2,
            gradient_checkpointing=False,
            disable_dropout=True,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )

    def loads(self):
        from grpo_nb import load_model
        from grpo_nb.training.policy_model import load_policy

        self.model, _ = load_model(self.released, max_seq_length=128, lora_r=4, quiet=True)
        load_policy(str(self.released), self.config())
        return "yes"

    def trains(self):
        import torch

        from grpo_nb import GRPOTrainer

        rows = [{"prompt": prompt} for prompt in PROMPTS]
        given = digits, self.config(), rows
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer = GRPOTrainer(self.model, *given, processing_class=self.tokenizer)
        self.doubts = [str(w.message) for w in said if "where the policy trains" in str(w.message)]
        trainer.log.show = False
        weights = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in weights.items()}
        trainer.train()
        record = next(one for one in trainer.log_history if "sampling/gap_max" in one)
        if record.get("skipped_updates"):
            raise Fault("the gradients are not finite, and the update is left out")
        if not all(p.isfinite().all() for p in weights.values()):
            raise Fault("the update makes weights that are not finite")
        still = [n for n, p in weights.items() if "lora_B" in n and torch.equal(p, before[n])]
        if still:
            raise Fault(f"{len(still)} adapters get no gradient, {still[0]} among them")
        self.trainer, self.model = trainer, trainer.model.eval()
        self.ours = logits_of(self.model, self.rows)
        self.gap = record["sampling/gap_max"]
        return "yes"

    def adapter(self):
        from peft import PeftModel

        self.trainer.save_model(self.home / "adapter")
        base = self.theirs.from_pretrained(self.released).eval()
        plain = logits_of(base, self.rows)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base, self.home / "adapter").eval()
        if missing := [str(w.message) for w in said if "missing adapter keys" in str(w.message)]:
            raise Fault(f"PEFT on {self.theirs.__name__}: {missing[0]}")
        theirs = logits_of(model, self.rows)
        if furthest(plain, theirs) < 100 * ADAPTER:
            raise Fault(f"the adapter changes no logit of {self.theirs.__name__}")
        if (off := furthest(self.ours, theirs)) > ADAPTER:
            raise Fault(f"logits of PEFT on {self.theirs.__name__} differ by {off:.1g}")
        return "yes"

    def merge(self):
        from grpo_nb.model.export import save_merged

        to = dict(dtype="float32", overwrite=True, quiet=True)
        save_merged(self.model, self.home / "merged", **to)
        model, found = self.theirs.from_pretrained(self.home / "merged", output_loading_info=True)
        if found["missing_keys"] or found["unexpected_keys"]:
            names = sorted({*found["missing_keys"], *found["unexpected_keys"]})
            raise Fault(f"{self.theirs.__name__} misses or does not know {', '.join(names[:2])}")
        theirs = logits_of(model.eval(), self.rows)
        if (off := furthest(self.ours, theirs)) > MERGE:
            raise Fault(f"logits of {self.theirs.__name__} differ by {off:.1g}")
        return "yes"

    def drawn(self):
        from grpo_nb.rollout.engine import RolloutEngine
        from grpo_nb.rollout.sampling import SamplingParams

        engine = RolloutEngine(self.model, self.tokenizer, progress=False)
        rollout = engine.generate(list(PROMPTS), SamplingParams(max_tokens=8, n=2, seed=1))
        off = 0.0
        for i, prompt in enumerate(rollout.prompt_ids):
            length = int(rollout.mask[i].sum())
            ids = rollout.completion_ids[i, :length]
            (logits,) = logits_of(self.model, [prompt + ids.tolist()])
            logps = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
            plain = logps.gather(-1, ids[:, None])[:, 0]
            off = max(off, float((plain - rollout.logps[i, :length]).abs().max()))
        way = re.sub(r"^through the model's modules, a step recorded", "recorded", engine.way)
        way = re.sub(r", not a gpt-oss or one of .*", "", way)  # or each new family changes all
        if not self.gap <= DRAWN and self.doubts:
            raise ValueError(self.doubts[0])
        if not self.gap <= DRAWN:
            raise Fault(f"the trainer's log-probs differ by {self.gap:.1g} nats ({way})")
        if not off <= DRAWN:
            raise Fault(f"log-probs differ by {off:.1g} nats ({way})")
        return way

    def planned(self):
        from grpo_nb import cli

        said, words = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(words):
            try:
                status = cli.main(["plan", str(self.released), "--context", "128"])
            except SystemExit as ended:
                status = ended.code
        if status not in (0, 1):
            raise ValueError(words.getvalue().strip().removeprefix("grpo-nb plan: "))
        return "yes"

    def served(self):
        from safetensors import safe_open

        from grpo_nb.serving.adapter_versions import served_config

        served_config(self.model)
        stored = set()
        for file in self.released.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                stored |= {name.rpartition(".")[0] for name in tensors.keys()}
        # vLLM knows the prefixes of transformers' class, too
        in_layers = {name.split("layers.")[-1] for name in stored}
        names = self.theirs.from_pretrained(self.released).state_dict()
        known = {name.rpartition(".")[0] for name in names}
        stored |= {name for name in known if name.split("layers.")[-1] in in_layers}
        with safe_open(self.home / "adapter/adapter_model.safetensors", "pt") as tensors:
            keys = [k.removeprefix("base_model.model.") for k in tensors.keys()]
        modules = {re.sub(r"(\.base_layer)*\.lora_[AB]\.weight$", "", key) for key in keys}
        if unknown := sorted(modules - stored):
            raise Fault(f"the adapter names {unknown[0]}, which no released file has")
        return "yes"


STEPS = {  # column -> the columns without which it has no meaning
    "loads": (),
    "planned": (),
    "trains": ("loads",),
    "adapter": ("trains",),
    "merge": ("trains",),
    "drawn": ("trains",),
    "served": ("adapter",),
}


def row_of(name, folder, tracebacks):
    "The row of one family: column -> yes, a way, a sentence, or None where it was not reached."
    family, row = Family(name, folder), {}
    row["class"] = family.theirs.__name__
    for step, needs in STEPS.items():
        if not all(reached(row, need) for need in needs):
            row[step] = None
            continue
        try:
            row[step] = getattr(family, step)()
        except Fault as fault:
            row[step] = f"no: {NO_WORD}{one_line(fault)}"
        except Exception as error:
            row[step] = f"no: {one_line(error)}"
            tracebacks[step] = traceback.format_exc()
    return row


def reached(row, step):
    "Whether a step of a row went well."
    return bool(row.get(step)) and not row[step].startswith("no: ")


def in_child(name):
    "A row, made in a process of its own, and the tracebacks of its errors."
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            quiet, found = open(Path(folder) / "said", "w"), {}
            os.dup2(quiet.fileno(), 1), os.dup2(quiet.fileno(), 2)
            try:
                answer.write_text(json.dumps([row_of(name, Path(folder), found), found]))
            except BaseException:
                answer.write_text(json.dumps([None, {"making": traceback.format_exc()}]))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not answer.exists():
            said = (Path(folder) / "said").read_text()[-500:]
            raise SystemExit(f"{name} ended with status {status}:\n{said}")
        row, found = json.loads(answer.read_text())
        if row is None:
            raise SystemExit(f"{name} cannot be made:\n{found['making']}")
        return row, found


# the page


def table(heads, rows):
    "A table of Markdown."
    lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


WAYS = {"directly": "own decoder", "recorded": "recorded modules", "through": "modules"}


def cell(row, column):
    "What the table shows of a step: yes, a way, no, or - where it was not reached."
    said = row[column]
    if said is None:
        return "-"
    if said.startswith("no: "):
        return "**no**"
    return WAYS[re.split(r"[: ]", said)[0]] if column == "drawn" else said


def whole(row):
    "Whether nothing of a row is refused."
    return all(reached(row, column) for column in COLUMNS)


BRANDS = {  # model_type -> what people call it
    "gpt_oss": "gpt-oss",
    "llama": "Llama",
    "qwen2": "Qwen 2.5",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 MoE",
    "qwen3_5": "Qwen 3.5",
    "mistral": "Mistral",
    "mistral3": "Mistral 3",
    "phi3": "Phi 3 and 4",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "glm4": "GLM 4",
    "deepseek_v3": "DeepSeek V3",
    "nemotron_h": "Nemotron-H",
    "lfm2": "LFM2",
}


def front_sentence(record):
    "What README says of families: those of `BRANDS` without a no."
    rows = record["families"]
    named = [brand for name, brand in BRANDS.items() if name in rows and whole(rows[name])]
    fine = sum(map(whole, rows.values()))
    return (
        f"The same calls serve {', '.join(named[:-1])} and {named[-1]}: "
        f"[{fine} of {len(rows)} families](docs/models.md) pass every check on tiny models."
    )


def with_sentence(text, record):
    "The front page with its sentence on families."
    sentence = front_sentence(record)
    ends = r"The same calls serve [^\n]*? on tiny models\."
    text, count = re.subn(ends, lambda _: sentence, text)
    if count != 1:
        raise SystemExit(f"{FRONT.name} has {count} sentences on families, not one")
    return text


def page_of(record):
    "docs/models.md."
    rows, versions = record["families"], record["versions"]
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    noes = [
        (f"`{name}`", column, row[column].removeprefix("no: ").replace("|", "\\|"))
        for name, row in rows.items()
        for column in COLUMNS
        if (row[column] or "").startswith("no: ")
    ]
    fine = sum(map(whole, rows.values()))
    templates = [(f"`{name}`", said) for name, said in record["tools"].items()]
    return (
        "\n\n".join(
            [
                "# Families of models",
                "<!-- Made by tools/models_table.py from docs/models.json. -->",
                f"What works with {len(rows)} families of text models, {fine} of them with no "
                "no. Each is a tiny random model with a layer or two of each kind, "
                "written as its makers write theirs, on a CPU in float32. "
                f"Made with {made} by `python tools/models_table.py`.",
                table(("column", "what a yes means"), COLUMNS.items()),
                "A - stands where an earlier column says no.",
                table(
                    ("family", "released as", *COLUMNS),
                    [
                        (f"`{name}`", f"`{row['class']}`", *(cell(row, c) for c in COLUMNS))
                        for name, row in rows.items()
                    ],
                ),
                "## What a no says",
                table(("family", "column", "what the user reads, cut to a line"), noes),
                "## Tools",
                f"Chat templates that TRL {versions['trl']} ships, without those that it has "
                "changed for training. Yes: calls that the template writes, with nested arguments, "
                "several at once and texts that look like numbers, are read back as they were.",
                table(("template", "tools"), templates),
            ]
        )
        + "\n"
    )


def tools_of_templates():
    "What a run with tools makes of each chat template that TRL ships: yes, or the sentence."
    from tool_templates import verdicts

    words = {name: one_line(said) for name, said in verdicts().items()}
    return {
        name: "yes" if said == "round-trips" else said.replace("refused", "no")
        for name, said in words.items()
    }


def renewed(record, names):
    "The record with these families made anew."
    import importlib.metadata

    from tiny_families import FAMILIES

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        row_of("llama", Path(folder), {})  # children share what is imported and warm
    versions = {n: importlib.metadata.version(n) for n in VERSIONS}
    tools = tools_of_templates()
    made = dict(record.get("families", {}))
    for name in names or FAMILIES:
        made[name], found = in_child(name)
        print(*found.values(), sep="\n", end="", file=sys.stderr)
        shown = {c: (made[name][c] or "-")[:160] for c in COLUMNS if made[name][c] != "yes"}
        print(name, shown, flush=True)
        rows = {name: made[name] for name in FAMILIES if name in made}
        yield {"versions": versions, "families": rows, "tools": tools}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="model_type of each (default: all)")
    parser.add_argument("--page", action="store_true", help="the page alone, from the record")
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is out of date")
    args = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not (args.page or args.check):
        for made in renewed(record, args.families):
            record = made
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
    front, status = FRONT.read_text(encoding="utf-8"), 0
    for path, wanted in ((PAGE, page_of(record)), (FRONT, with_sentence(front, record))):
        if not args.check:
            path.write_text(wanted, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != wanted:
            print(f"{path.name} is out of date: python tools/models_table.py --page")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
