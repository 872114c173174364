"""Do the tutorials on 2048 and on matrix multiplication run at full size? Their own cells, with
gpt-oss-20b (random weights, MXFP4, adapters on attention and experts), for a few GRPO steps each.

    python benchmarks/tutorials_at_size.py         both, three steps each: about two minutes on an
                                                   H200
    python benchmarks/tutorials_at_size.py --only matmul --steps 2 --new 128
    python benchmarks/tutorials_at_size.py --cpu   the same with a tiny model, to try it out

The cells that load, reward, set up, ask, train and save are taken out of nbs/tutorials/06_... and
07_... and executed as they stand, with TINY = False. What is other than on a reader's GPU: the name
of the model is a config (so its weights are random, and loaded once for both pages), the tokenizer
has a token for each character beside 201,000 words that mean nothing (and the numbers of the real
special tokens), completions are short, and there are few steps, a group each.
A random model writes gibberish, whose rewards are all 0, and equal rewards prove nothing. So half
of each group is written by hand: an honest and good program, an honest and bad one, and so on. They
come as token ids with channels, through the trainer's `rollout_func`, beside completions that the
engine draws. All rewards are the tasks' own.

Checked: each reward function has spread in each group; loss and gradient are finite, the gradient
is not 0; adapters have moved, those on attention and those on experts; packed weights have not;
what the page saves is what is in memory; the sampler's log-probs are the trainer's. The table comes
last but one, JSON last. The way of a merged MXFP4 model to the disk is not run here.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from grpo_step import timed_trainer
from train_step import FULL, SMALL, clear, device_of, peaks, shown, versions

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"2048": "06_game2048_gpt_oss.ipynb", "matmul": "07_matmul_gpt_oss.ipynb"}
SPECIAL = {
    "<|channel|>": 200_005,
    "<|start|>": 200_006,
    "<|end|>": 200_007,
    "<|message|>": 200_008,
    "<|endoftext|>": 199_999,
    "<|return|>": 200_002,
}
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>{% for m in messages "
    "%}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


# The page


def cell(page, mark):
    "The one cell of code that has a line beginning with `mark`."
    cells = [
        "".join(c["source"])
        for c in json.loads((ROOT / "nbs/tutorials" / PAGES[page]).read_text())["cells"]
        if c["cell_type"] == "code"
    ]
    found = [
        source for source in cells if any(line.startswith(mark) for line in source.split("\n"))
    ]
    if len(found) != 1:
        raise ValueError(
            f"{PAGES[page]} has {len(found)} cells of code with a line that begins with "
            f"{mark!r}, and it needs exactly one"
        )
    return found[0]


def run_cell(page, mark, names):
    exec(compile(cell(page, mark), f"{PAGES[page]}, {mark}", "exec"), names)


# What stands for the tokenizer, and for a model that can program


def character_tokenizer(sizes):
    """A token for each character, the special tokens where gpt-oss has them (at the end of a
    smaller vocabulary), and words for all other numbers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = sizes["vocab_size"]
    special = (
        SPECIAL
        if size > max(SPECIAL.values())
        else {name: size - len(SPECIAL) + i for i, name in enumerate(SPECIAL)}
    )
    taken, letters = set(special.values()), iter(["\n", *map(chr, range(32, 127))])
    vocabulary = special | {next(letters, f"(t{i})"): i for i in range(size) if i not in taken}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<|endoftext|>",
        eos_token="<|return|>",
        unk_token="?",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[
            name for name in special if name not in ("<|endoftext|>", "<|return|>")
        ],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def harmony(code):
    return (
        "<|channel|>analysis<|message|>A "
        "plan.<|end|><|start|>assistant<|channel|>final<|message|>```python\n"
        f"{code}```<|return|>"
    )


def written_programs(page):
    "Programs that differ in each of the page's rewards."
    if page == "2048":
        from grpo_nb.environments.game2048 import CORNER

        return [
            CORNER,
            "import random\n\ndef strategy(board): return random.choice('WASD')\n",
            "def strategy(board): return 'W'\n",
            "import numpy\n\ndef strategy(board): return numpy.random.choice(list('WASD'))\n",
        ]
    from grpo_nb.environments.matmul import NAIVE

    fast = (
        "from operator import mul\n\ndef matmul(A, B):\n    columns = list(zip(*B))\n    "
        "return [[sum(map(mul, row, column), 0.0) for column in columns] for row in A]\n"
    )
    return [
        fast,
        NAIVE,
        "def matmul(A, B): return [[0.0] * len(B[0]) for _ in A]\n",
        "import numpy\n\ndef matmul(A, B): return (numpy.array(A) @ numpy.array(B)).tolist()\n",
    ]


def half_written(programs):
    """A rollout function: every other completion is drawn by the trainer's engine, the others are
    written."""
    from grpo_nb.rollout.engine import evaluating
    from grpo_nb.rollout.rollout import pad_left
    from grpo_nb.training.data import prompt_token_ids
    from grpo_nb.training.policy_logprobs import TrainingBatch

    def logps_of(trainer, prompts, completions):
        "What the policy thinks of completions that it has not drawn."
        ids, mask = [
            t.flip(1) for t in pad_left([row[::-1] for row in completions], 0, trainer.device)
        ]  # padded on the right
        batch = TrainingBatch(
            *pad_left(prompts, 0, trainer.device),
            ids,
            mask,
            mask,
            torch.ones(len(ids), device=trainer.device),
            torch.zeros(ids.shape, device=trainer.device),
        )
        with evaluating(trainer.model):
            found = trainer.policy_update.logps_of(trainer.model, batch)
        return [row[seen].tolist() for row, seen in zip(found, mask)]

    def rollout(prompts, trainer):
        tokenizer = trainer.tokenizer
        prompts = [
            prompt_token_ids(prompt, tokenizer, trainer.config.chat_template_kwargs)
            for prompt in prompts
        ]
        drawn = trainer.engine.generate(prompts[::2], trainer.sampling, progress=False)
        by_hand = [
            tokenizer(harmony(programs[i % len(programs)]), add_special_tokens=False).input_ids
            for i in range(len(prompts) - len(prompts[::2]))
        ]
        ids, logps = [None] * len(prompts), [None] * len(prompts)
        ids[::2], logps[::2] = (
            [row[seen].tolist() for row, seen in zip(values, drawn.mask)]
            for values in (drawn.completion_ids, drawn.logps)
        )
        ids[1::2], logps[1::2] = by_hand, logps_of(trainer, prompts[1::2], by_hand)
        return dict(prompt_ids=prompts, completion_ids=ids, logprobs=logps)

    return rollout


# What is checked


def adapters(model):
    return {
        name: p.detach().float().cpu().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def moved(before, after):
    "|change| / |before + change| of the adapters on attention and on experts."
    kinds = {
        "attention": [n for n in before if "attn" in n],
        "experts": [n for n in before if "experts" in n],
    }

    def norm(tensors):
        return math.sqrt(sum(t.square().sum().item() for t in tensors))

    return {
        kind: norm(after[n] - before[n] for n in names) / norm(after[n] for n in names)
        for kind, names in kinds.items()
        if names
    }


def packed_sum(model):
    "A number that changes if a byte of the first or the last layer's packed weights does."
    from grpo_nb.model.packed import EXPERTS, experts_of

    layers = list(experts_of(model).values())
    return [
        int(t.sum(dtype=torch.int64))
        for experts in (layers[0], layers[-1])
        for name in EXPERTS
        for t in (weight_of(experts, name).blocks, weight_of(experts, name).scales)
    ]


def weight_of(experts, name):
    return dict(experts.named_parameters())[name]


def faults(page, trainer, change, untouched, saved):
    "What is not as it must be, in sentences."
    wrong, names = [], trainer.reward_names
    for record in (r for r in trainer.log_history if "loss" in r):
        step = f"{page}, step {record['step']}"
        wrong += [
            f"{step}: {name} has no spread"
            for name in names
            if not record[f"rewards/{name}/std"] > 0
        ]
        wrong += [
            f"{step}: {name} is {record[name]}"
            for name in record
            if isinstance(record[name], float) and not math.isfinite(record[name])
        ]
        if not record["grad_norm"] > 0 or record.get("skipped_updates"):
            wrong.append(f"{step}: no gradient")
        if record["frac_reward_zero_std"]:
            wrong.append(f"{step}: a group with equal rewards")
        if record["sampling/gap_mean"] > 0.1:
            wrong.append(
                f"{step}: sampler and trainer are {record['sampling/gap_mean']:.3f} nats apart"
            )
    wrong += [
        f"{page}: the adapters on {kind} have not moved"
        for kind, share in change.items()
        if not share > 0
    ]
    if not untouched:
        wrong.append(f"{page}: packed weights have changed")
    if not saved:
        wrong.append(f"{page}: what was saved is not what is in memory")
    return wrong


def saved_as_it_is(model, folder):
    "Whether the adapter in a folder is the one in memory."
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    stored, here = load_file(folder / "adapter_model.safetensors"), get_peft_model_state_dict(model)
    return stored.keys() == here.keys() and all(
        torch.equal(stored[name], here[name].detach().cpu().to(stored[name].dtype))
        for name in stored
    )


# One page


def measure(page, args, sizes, loaded, folder):
    "Runs a page's cells; a row of the table."
    names = {"__name__": page}
    run_cell(page, "from grpo_nb import GRPOConfig", names)
    names |= {
        "TINY": False,
        "T4": False,
        "SEED": 0,
        "ALLOW_WEAK": False,
        "IN_SANDBOX": True,
        "OUT": folder / page,
        "GRPOTrainer": timed_trainer(),
    }
    run_cell(page, "problems = ", names)
    if not loaded:
        from transformers import GptOssConfig

        start = time.perf_counter()
        names["NAME"] = GptOssConfig(**sizes)
        run_cell(page, "model, tokenizer = ", names)
        loaded.update(
            model=names["model"],
            tokenizer=character_tokenizer(sizes),
            seconds=time.perf_counter() - start,
        )
        for name, p in loaded["model"].named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, 0, 0.01)  # adapters that are not zero, as after some steps
        print(
            f"loaded in {loaded['seconds']:.1f} s, {shown(peaks()['peak'])} GiB; "
            f"{', '.join(f'{key} {value}' for key, value in versions().items())}",
            flush=True,
        )
    names |= {"model": loaded["model"], "tokenizer": loaded["tokenizer"]}
    for mark in ("rewards = ", "RUN = "):
        run_cell(page, mark, names)
    names["ROOM"], names["RUN"] = (
        args.new,
        names["RUN"]
        | dict(
            max_steps=args.steps, gradient_accumulation_steps=1, warmup_steps=0, save_strategy="no"
        ),
    )
    for mark in ("trainer = ", "def ask("):
        run_cell(page, mark, names)
    trainer, model = names["trainer"], names["model"]
    trainer.log.show, trainer.rollout_func = False, half_written(written_programs(page))
    start = time.perf_counter()
    greedy = names["greedy_program"](trainer.engine)
    asked = time.perf_counter() - start
    before, sums = adapters(model), packed_sum(model)
    clear()
    trainer.train()
    memory, after = peaks(), adapters(model)
    names["trainer"] = trainer
    run_cell(page, "save_adapter(", names)
    change, saved = moved(before, after), saved_as_it_is(model, names["OUT"] / "adapter")
    names["pool"].close()
    log = [r for r in trainer.log_history if "loss" in r]
    row = dict(
        page=page,
        steps=len(log),
        tokens=[int(c["drawn"]) for c in trainer.clocks],
        seconds=[round(c["seconds"], 2) for c in trainer.clocks],
        parts={
            part: round(trainer.clocks[-1][part], 2)
            for part in ("sample", "score", "train", "update")
        },
        **memory,
        greedy=greedy.stage,
        asked=round(asked, 1),
        rewards={
            n: [
                round(sum(r[f"rewards/{n}/{m}"] for r in log) / len(log), 3)
                for m in ("mean", "std")
            ]
            for n in trainer.reward_names
        },
        grad_norm=[r["grad_norm"] for r in log],
        loss=[r["loss"] for r in log],
        gap_max=max(r["sampling/gap_max"] for r in log),
        moved=change,
        way=str(trainer.engine.way)[:120],
        faults=faults(page, trainer, change, sums == packed_sum(model), saved),
    )
    return row


def table(rows):
    "Lines of a table."
    lines = [
        (
            f"{'task':8s}{'steps':>6s}{'tokens a step':>15s}{'s a step':>10s}  "
            f"{'(sample, score, train, update)':32s}{'peak GiB':>9s}  rewards: mean (std)"
        )
    ]
    for row in rows:
        rewards = ", ".join(
            f"{name} {mean:.2f} ({std:.2f})" for name, (mean, std) in row["rewards"].items()
        )
        parts = "(" + ", ".join(f"{value:.2f}" for value in row["parts"].values()) + ")"
        lines.append(
            f"{row['page']:8s}{row['steps']:6d}{row['tokens'][-1]:15,d}{row['seconds'][-1]:10.2f} "
            f" {parts:32s}{shown(row['peak']):>9s}  {rewards}"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(PAGES), choices=list(PAGES))
    parser.add_argument(
        "--steps", type=int, default=3, help="of each page; the last one's seconds count"
    )
    parser.add_argument(
        "--new", type=int, default=256, help="tokens of a drawn completion, at most"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="a tiny model on the CPU, to try the script out"
    )
    args = parser.parse_args()
    device_of(args)
    sizes = SMALL if args.cpu else FULL
    if args.cpu:
        args.steps, args.new = 2, 8
    rows, loaded, start = [], {}, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for page in args.only:
            rows.append(measure(page, args, sizes, loaded, Path(folder)))
            row = rows[-1]
            print(
                f"{page}: adapters moved "
                f"{', '.join(f'{kind} {share:.2e}' for kind, share in row['moved'].items())}; "
                f"gradients {', '.join(f'{g:.3g}' for g in row['grad_norm'])}; "
                f"gap {row['gap_max']:.3f} nats at most; first step {row['seconds'][0]:.1f} "
                f"s; asked in {row['asked']} s: {row['greedy']}; {row['way']}",
                flush=True,
            )
    wrong = [fault for row in rows for fault in row["faults"]]
    print(
        *table(rows),
        f"{time.perf_counter() - start:.0f} s in all; "
        + ("all is as it must be" if not wrong else "WRONG: " + "; ".join(wrong)),
        sep="\n",
    )
    print(json.dumps(dict(about=versions(), rows=rows)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
