"""The largest models and the longest contexts, run: whole GRPO steps with their rollouts, all
layers, random weights of full size that are made on the card, a smaller card's memory imposed.

    python benchmarks/large.py --list
        the rows, with what is planned and about how long each takes on an H200
    python benchmarks/large.py oss_380k OUT.json --minutes 9
        one of them; OUT.json is written as it goes, and says where it was when its time was over
    python benchmarks/large.py oss_380k OUT.json --cpu
        a narrow one of the family, to try it out
    python benchmarks/on_cards.py benchmarks/large_runs.txt --out DIR --minutes 28
        the rows in the order of what they are worth, as many as there is time for

The cap holds for torch, and the library is told of a card of that size (`Limits` in context.py).
"planned" are the planner's GiB by moment and part, "as torch counts" the same without CUDA's own
memory and gaps, and without Adam's moments, which the first step has not yet: what "peak" of
drawing and training is to be. ("copies of the row" come on top: completions that are trained
together share their prompt, and attention copies it.) "driver" is what the driver had given away,
which is to stay below the cap. The only step is the first one, so its seconds hold what is compiled
("compiled"). A random model hardly ever draws its end token: every
completion has its full length. Positions above the model's own cost what others do, and mean
nothing.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from context import KINDS, Limits
from grpo_step import prompts_of, timed_trainer, watch_compilers
from sharded import NARROW
from train_step import GiB, clear, versions, word_tokenizer

from grpo_nb import GRPOConfig, load_model
from grpo_nb.model.memory_bytes import MODELS, row_bytes
from grpo_nb.model.memory_fit import Card
from grpo_nb.planning.plan import plan


@dataclass(frozen=True)
class Row:
    model: str
    weights: str  # of the planner's formats
    gib: float  # of the card
    prompt: int  # tokens
    new: int = 1024  # tokens of a completion
    completions: int = 2  # of the one prompt
    batch: int = 1  # completions trained at a time
    r: int = 32  # rank of the adapters
    host: bool = False  # layer inputs wait in host memory
    embedding: bool = False  # and so does the embedding
    minutes: float = 9  # reckoned on an H200, loading and compiling included


ROWS = {
    "oss_380k": Row("gpt-oss-20b", "mxfp4", 139.8, 378_976, batch=2, minutes=6),
    "llama_70b": Row(
        "Llama-3.3-70B", "nf4", 47.4, 512, 1536, completions=4, embedding=True, minutes=5
    ),
    "oss_120b": Row("gpt-oss-120b", "mxfp4", 111.7, 3072, completions=8, minutes=3),
    "oss_262k": Row(
        "gpt-oss-20b", "bf16", 79.15, 261_120, batch=2, r=8, host=True, embedding=True, minutes=4
    ),
    "oss_116k": Row(
        "gpt-oss-20b", "mxfp4", 24.0, 115_328, r=8, host=True, embedding=True, minutes=3
    ),
    "qwen3_110k": Row("Qwen3-8B", "nf4", 79.15, 108_976, minutes=4),
    "llama_20k": Row(
        *("Llama-3.1-8B", "nf4", 139.8, 512, 19_968, 8),
        **dict(host=True, embedding=True, minutes=8),
    ),
}
TYPES = KINDS | {"gpt-oss-20b": "gpt_oss", "gpt-oss-120b": "gpt_oss", "Llama-3.3-70B": "llama"}


def config_of(row, narrow):
    "transformers' settings of the row's model, with positions enough for its context."
    s, given = MODELS[row.model], dict(model_type=TYPES[row.model])
    given |= dict(hidden_size=s.hidden, intermediate_size=s.intermediate, head_dim=s.head_dim)
    given |= dict(num_attention_heads=s.heads, num_key_value_heads=s.kv_heads)
    given |= dict(num_hidden_layers=s.layers, vocab_size=s.vocab, tie_word_embeddings=s.tied)
    given |= dict(pad_token_id=s.vocab - 2, eos_token_id=s.vocab - 1, bos_token_id=None)
    given |= dict(num_local_experts=s.experts) if s.experts else {}
    given["max_position_embeddings"] = max(s.max_positions, row.prompt + row.new)
    few = dict(num_hidden_layers=2, num_local_experts=4) if s.experts else dict(num_hidden_layers=2)
    return given | NARROW | few if narrow else given


def planned(row):
    "The planner's step of a row."
    return plan(
        row.model,
        Card("the cap", row.gib, (9, 0)),
        weights=row.weights,
        double_quant=row.weights == "nf4",
        lora_r=row.r,
        context=row.prompt + row.new,
        prompt_length=row.prompt,
        num_generations=row.completions,
        generation_batch_size=row.completions,
        per_device_train_batch_size=row.batch,
        share_prompt=row.batch > 1,
        offload_activations=row.host,
        offload_hidden=row.host,
        offload_embedding=row.embedding,
    )


def order_reward(completions, **columns):
    "No two alike: a group without a spread has no backward pass."
    return [float(i) for i in range(len(completions))]


def watched(record, limits):
    "A trainer that notes where it is, and seconds and peaks of each part."

    class Watched(timed_trainer()):
        def timed(self, part, function, last=False):
            timed = super().timed(part, function, last)

            def call(*given):
                record.update(part=part, part_began=time.time())
                clear()
                result, before = timed(*given), record["measured"].get(part, {})
                found = {k: v for k, v in limits.peaks().items() if v is not None and k != "kept"}
                seen = {name: max(before.get(name, 0), value) for name, value in found.items()}
                seen |= dict(seconds=self.clocks[-1].get(part))
                # a new dictionary each time, as another thread writes the record
                record["measured"] = record["measured"] | {part: seen}
                record["part"] = "between parts"
                limits.tighten()
                return result

            return call

    return Watched


def step(row, record, args):
    "Load the model and make a step; what is found goes into the record."
    if args.cpu:
        row = replace(row, prompt=40, new=6, completions=2)
    start, config = time.perf_counter(), config_of(row, args.cpu)
    with Limits(row.gib, False) as limits, tempfile.TemporaryDirectory() as folder:
        model, _ = load_model(
            config,
            max_seq_length=row.prompt + row.new,
            load_in_4bit=row.weights == "mxfp4" or row.weights == "nf4" and not args.cpu,
            lora_r=row.r,
            lora_targets="attention" if MODELS[row.model].experts else "all",
            offload_embedding=row.embedding,
            quiet=True,
        )
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, 0, 0.01)
        record["loaded_s"] = round(time.perf_counter() - start, 1)
        limits.tighten()
        settings = GRPOConfig(
            output_dir=folder,
            guard_every=0,  # it would read the long prompt once more
            max_steps=1,
            num_generations=row.completions,
            per_device_train_batch_size=row.batch,
            gradient_accumulation_steps=row.completions // row.batch,
            max_completion_length=row.new,
            offload_activations=row.host,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=args.cpu,
        )
        rows, tokenizer = prompts_of(config, 1, row.prompt), word_tokenizer(config)
        trainer = watched(record, limits)(model, order_reward, settings, rows, None, tokenizer)
        trainer.log.show, compiled = False, watch_compilers()
        trainer.train()
        told = trainer.log_history[-1]
        record["log"] = {
            k: told[k] for k in ("loss", "grad_norm", "sampling/gap_mean") if k in told
        }
        record.update(way=trainer.engine.way, compiled=compiled(), drawn=trainer.clocks[0]["drawn"])
        record["step_s"] = round(trainer.clocks[0]["seconds"], 1)


def write(record, out):
    "The record as it is now; whole or not at all."
    part = out.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(out)


def witness(record, out, seconds, leave=os._exit):
    "A thread that writes the record every two seconds, and ends the process when its time is over."
    end = time.time() + seconds

    def watch():
        while "ended" not in record:
            record["seconds"] = round(time.time() - end + seconds, 1)
            if cuda := torch.cuda.is_initialized():
                record["peak_of_part"] = round(torch.cuda.max_memory_allocated() / GiB, 2) * cuda
            if time.time() > end:
                in_part = time.time() - record.get("part_began", end - seconds)
                record["ended"] = False
                record["error"] = (
                    f"not over after {seconds:.0f} s: {in_part:.0f} s in {record['part']}"
                )
            write(dict(record), out)
            if record.get("ended") is False:
                return leave(3)
            time.sleep(min(2, seconds / 4))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def about(name, row):
    "A row before it is run: what it is, and what is planned."
    made = planned(row)
    gib = {m: {k: round(v / GiB, 2) for k, v in parts.items()} for m, parts in made.moments.items()}
    moments = made.setup.step.trained_numbers * made.setup.step.optimizer_bytes
    at = {"sample": ("rollout",), "train": ("head", "layer")}
    counted = {part: made.allocated(*when) - moments for part, when in at.items()}
    if row.batch > 1:  # which a plan leaves out
        tokens, keys = row.prompt + row.batch * row.new, row.batch * (row.prompt + row.new)
        counted["copies of the row"] = row_bytes(made.setup.model, 2, tokens, keys)
    return dict(
        row=name,
        **asdict(row),
        planned=gib,
        planned_peak=round(made.peak / GiB, 2),
        planned_at=made.worst,
        as_torch_counts={part: round(size / GiB, 2) for part, size in counted.items()},
        part="loading",
        measured={},
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", nargs="?", choices=ROWS)
    parser.add_argument("out", nargs="?", type=Path, default=Path("large.json"))
    parser.add_argument("--minutes", type=float, help="at most (default: what is reckoned, and 2)")
    parser.add_argument("--gib", type=float, help="of the card, in place of the row's")
    parser.add_argument("--list", action="store_true", help="the rows, and nothing is run")
    parser.add_argument("--cpu", action="store_true", help="narrow, on the CPU")
    args = parser.parse_args()
    if args.list or not args.row:
        for name, row in ROWS.items():
            told = about(name, row)
            print(
                f"{name:11s} {row.model}, {row.weights}: {row.prompt:,} + {row.new:,} tokens x "
                f"{row.completions} in {row.gib} GiB; planned {told['planned_peak']} at the "
                f"{told['planned_at']}; about {row.minutes:g} minutes"
            )
        return 0
    if not (args.cpu or torch.cuda.is_available()):
        sys.exit("there is no GPU here: --cpu tries the script with a narrow model")
    row = replace(ROWS[args.row], gib=args.gib or ROWS[args.row].gib)
    record = about(args.row, row) | versions("bitsandbytes")
    thread = witness(record, args.out, 60 * (args.minutes or row.minutes + 2))
    try:
        step(row, record, args)
        record["ended"] = True
    except Exception as error:
        record.update(ended=False, error=f"{type(error).__name__}: {error}"[:2000])
    thread.join(0)
    write(record, args.out)
    for part, seen in record["measured"].items():
        print(part, seen, "planned", record["as_torch_counts"].get(part), flush=True)
    print(record.get("error") or f"a step of {record['step_s']} s", flush=True)
    return 0 if record["ended"] else 1


if __name__ == "__main__":
    sys.exit(main())
