"""Seconds of a whole GRPO step of gpt-oss-20b (random weights, full size): 8 prompts x 8
completions x 1,024 tokens drawn, rewarded and trained, ours and Unsloth's.

    python benchmarks/grpo_step.py
        ours on MXFP4 experts, then in bf16: two to three minutes on an H200
    python benchmarks/grpo_step.py --only unsloth --sites DIR
        Unsloth's own GRPOTrainer from DIR/site-unsloth; writes a random checkpoint of 39 GiB first
        (45 s)
    python benchmarks/grpo_step.py --only mxfp4 --batch 16
        other micro-batches
    python benchmarks/grpo_step.py --only mxfp4 --steps 3
        with TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR set to empty folders the first step
        compiles everything, and with the same folders again a second run shows what they keep
    python benchmarks/grpo_step.py --cpu
        the same with a tiny model, to try it out

Ours: GRPOTrainer on a model from load_model, LoRA r=8 on q, k, v and o; the first step, in which
kernels are compiled, is not counted, the second one is, and its parts: "sample" draws the
completions, "score" is the rewards (a count of letters, nothing to speak of), "train" is log-probs,
loss and backward of all micro-batches, "update" the optimizer. Completions end only at their full
length (a random model hardly ever draws its end token). "compiled" is what torch.compile (frames)
and Triton (kernels) spent on the first step; those of an earlier run are found in the cache.
"peak" is torch's, "driver" what the driver has given away. Unsloth: its GRPOTrainer with the same
settings, sampling by its own generate. The last line is JSON.
"""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_step import (
    FULL,
    SMALL,
    arguments,
    child,
    clear,
    device_of,
    gpt_oss,
    load_unsloth,
    peaks,
    random_ids,
    run_child,
    shown,
    synchronize,
    tell,
    versions,
    word_tokenizer,
    write_checkpoint,
)

OURS = ("mxfp4", "bf16")


def prompts_of(sizes, count, tokens):
    "Prompts of random words."
    return [
        {"prompt": " ".join(f"t{i}" for i in row)}
        for row in random_ids(sizes, tokens, "cpu", count).tolist()
    ]


def letters_reward(completions, **columns):
    "Something that differs from completion to completion."
    return [sum(map(ord, text[:200])) % 17 / 16 for text in completions]


def timed_trainer():
    "GRPOTrainer with a clock on its parts."
    from grpo_nb.training.trainer import GRPOTrainer

    class Timed(GRPOTrainer):
        def make_parts(self, *given):
            super().make_parts(*given)
            self.clocks = []
            source, update = self.source, self.policy_update
            self.collector.collect = self.drawing(self.collector.collect)
            source.draw = self.timed("sample", source.draw)
            source.score = self.timed("score", source.score)
            update.accumulate = self.timed("train", update.accumulate)
            update.compile_first = self.timed("train", update.compile_first)
            update.step = self.timed("update", update.step, last=True)

        def timed(self, part, function, last=False):
            def call(*given):
                synchronize()
                start = time.perf_counter()
                result = function(*given)
                synchronize()
                clock, now = self.clocks[-1], time.perf_counter()
                clock[part] = clock.get(part, 0.0) + now - start
                if last:
                    clock["seconds"] = now - clock.pop("began")
                return result

            return call

        def drawing(self, collect):
            def call(state):
                start = time.perf_counter()
                self.clocks.append({"began": start})
                batch = collect(state)
                synchronize()
                drawn = int(batch.completion_mask.sum())
                self.clocks[-1].update(collect=time.perf_counter() - start, drawn=drawn)
                return batch

            return call

    return Timed


def watch_compilers():
    "A function that tells what torch.compile and Triton have compiled since, and how long it took."
    from torch._dynamo.utils import compilation_time_metrics

    kernels, cached = {}, []

    def heard(*, src, times, cache_hit, **_):
        if cache_hit:
            cached.append(src.name)
        else:
            kernels[src.name] = kernels.get(src.name, 0) + times.total / 1e6

    try:
        from triton import knobs

        knobs.compilation.listener = heard
    except ImportError:
        pass  # no Triton, or one before 3.4, which tells nobody

    def told():
        frames = compilation_time_metrics.get("_compile.compile_inner", [])
        slowest = sorted(kernels.items(), key=lambda item: -item[1])[:8]
        return {
            "frames": len(frames),
            "frames_s": round(sum(frames), 2),
            "kernels": len(kernels),
            "kernels_s": round(sum(kernels.values()), 2),
            "slowest": {name: round(seconds, 2) for name, seconds in slowest},
            "cached": len(cached),
        }

    return told


def grpo_step(
    model,
    tokenizer,
    rows,
    *,
    completions,
    new_tokens,
    batch,
    steps=2,
    max_batch_size=None,
    **settings,
):
    """Steps of a run, one after the other: a dictionary of seconds for each, and peaks of the last
    one."""
    from grpo_nb.training.config import GRPOConfig

    drawn = len(rows) * completions
    if drawn % batch:
        raise ValueError(
            f"{len(rows)} prompts x {completions} completions are {drawn}, which "
            f"micro-batches of {batch} do not divide"
        )
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            guard_max_gap=100.0,  # random weights of this size enlarge every rounding
            max_steps=steps,
            num_generations=completions,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=drawn // batch,
            max_completion_length=new_tokens,
            learning_rate=1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        trainer = timed_trainer()(model, letters_reward, config, rows, processing_class=tokenizer)
        trainer.log.show, trainer.engine.max_batch_size = False, max_batch_size
        clear()
        compiled = watch_compilers()
        trainer.train()
        last = trainer.log_history[-1] if trainer.log_history else {}
    return dict(
        steps=[
            {name: round(value, 3) for name, value in parts.items()} for parts in trainer.clocks
        ],
        **peaks(),
        way=str(getattr(trainer.engine, "way", ""))[:200],
        compiled=compiled(),
        log={
            name: last[name]
            for name in ("loss", "grad_norm", "sampling/gap_mean", "skipped_updates", "reward")
            if name in last
        },
    )


def measure_ours(args, sizes, weights):
    from grpo_nb.model import limits

    if args.record is not None:
        limits.RECORDED_TOKENS = args.record
    start = time.perf_counter()
    model = gpt_oss(sizes, weights, args.prompt + args.new)
    tell(loaded=weights, seconds=round(time.perf_counter() - start, 1), **peaks(), **versions())
    result = grpo_step(
        model,
        word_tokenizer(sizes),
        prompts_of(sizes, args.prompts, args.prompt),
        completions=args.completions,
        new_tokens=args.new,
        batch=args.batch,
        steps=args.steps,
        offload_activations=args.offload,
        **({"mini_batch": args.mini_batch} if args.mini_batch else {}),
    )
    tell(library=weights, **result["steps"][-1], first=result["steps"][0], **result)


def measure_unsloth(args, sizes):
    model, tokenizer = load_unsloth(args, sizes, args.prompt + args.new + 64)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # Unsloth's, after its import

    tell(loaded="unsloth", **peaks(), **versions("unsloth", "trl"))
    drawn, ends = args.prompts * args.completions, []
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(
            output_dir=folder,
            max_steps=args.steps,
            num_generations=args.completions,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=drawn // args.batch,
            max_prompt_length=args.prompt,
            max_completion_length=args.new,
            learning_rate=1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            temperature=1.0,
            beta=0.0,
        )
        known = {
            field.name for field in dataclasses.fields(GRPOConfig)
        }  # not every version has all
        config = GRPOConfig(**{name: value for name, value in settings.items() if name in known})
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[letters_reward],
            args=config,
            train_dataset=Dataset.from_list(prompts_of(sizes, args.prompts, args.prompt)),
        )
        from transformers import TrainerCallback

        class Clock(TrainerCallback):
            def on_step_end(self, *_, **__):
                synchronize()
                ends.append(time.perf_counter())
                tell(step=len(ends), seconds=round(ends[-1] - ([start] + ends)[-2], 3))

        trainer.add_callback(Clock())
        clear()
        start = time.perf_counter()
        trainer.train()
    tell(
        library="unsloth",
        seconds=round(ends[-1] - ([start] + ends)[-2], 3),
        first=dict(seconds=round(ends[0] - start, 3)),
        **peaks(),
    )


def main():
    parser = arguments(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(OURS),
        choices=[*OURS, "unsloth"],
        help="default: ours, in both formats",
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens of a completion")
    parser.add_argument("--batch", type=int, default=8, help="completions of a micro-batch")
    parser.add_argument(
        "--mini-batch", type=int, help="pieces of a micro-batch; without it as few as fit"
    )
    parser.add_argument(
        "--steps", type=int, default=2, help="the last one counts; those between are printed too"
    )
    parser.add_argument(
        "--record",
        type=int,
        metavar="TOKENS",
        help="ours: layers of inputs of up to so many tokens are recorded (0: none; default: the "
        "library's)",
    )
    parser.add_argument("--offload", action="store_true", help="ours: layer inputs on the host")
    args = parser.parse_args()
    sizes = SMALL if args.cpu else FULL
    if args.cpu:
        args.prompts, args.completions, args.prompt, args.new, args.batch = 2, 2, 8, 6, 2
    if args.child:
        return child(
            {
                "write": lambda: write_checkpoint(args, sizes),
                "unsloth": lambda: measure_unsloth(args, sizes),
            }.get(args.child)
            or (lambda: measure_ours(args, sizes, args.child))
        )
    device_of(args)
    rows, about, end = [], {}, time.time() + 60 * args.minutes
    drawn = args.prompts * args.completions

    def hear(record):
        if "loaded" in record:
            about.update(
                {
                    name: value
                    for name, value in record.items()
                    if name not in ("loaded", "seconds", "peak", "driver")
                }
            )
            return print(
                f"{record['loaded']} is there: {shown(record['peak'])} GiB; "
                + ", ".join(f"{name} {value}" for name, value in about.items()),
                flush=True,
            )
        if "step" in record:
            return print(f"    step {record['step']}: {record['seconds']:.1f} s", flush=True)
        rows.append(record)
        parts = ", ".join(
            f"{name} {record[name]:.2f}"
            for name in ("sample", "score", "train", "update")
            if name in record
        )
        speed = (
            (
                f"; {record.get('drawn', drawn * args.new) / record['sample']:,.0f} tok/s drawn, "
                f"{drawn * (args.prompt + args.new) / record['train']:,.0f} tok/s trained"
            )
            if "sample" in record
            else ""
        )
        print(
            f"{record['library']:10s}{record['seconds']:9.2f} s a step  ({parts}){speed}  "
            f"{shown(record['peak'])} GiB (driver {shown(record['driver'])})  first step "
            f"{record['first']['seconds']:.1f} s",
            flush=True,
        )
        for step in record.get("steps", [])[1:-1]:
            print(
                "    a step between: "
                + ", ".join(f"{name} {step[name]:.2f}" for name in ("seconds", "sample", "train")),
                flush=True,
            )
        if record.get("log"):
            print(f"    {record['log']}; {record.get('way')}", flush=True)
        if "compiled" in record:
            first = record["first"]
            parts = ", ".join(
                f"{name} {first[name]:.2f}" for name in ("sample", "train") if name in first
            )
            print(
                f"    first step: {parts}; compiled {record['compiled']}",
                flush=True,
            )

    print(
        f"{args.prompts} prompts of {args.prompt} tokens x {args.completions} completions of "
        f"{args.new}, micro-batches of {args.batch}",
        flush=True,
    )
    for name in args.only:
        left = end - time.time()
        site = (
            [Path(args.sites) / "site-unsloth", Path(args.sites) / "site-bitsandbytes"]
            if name == "unsloth"
            else []
        )
        failed = "left out: no time left" if left < 20 else None
        if not failed and name == "unsloth":
            failed = run_child(__file__, "write", sys.argv[1:], limit_s=left, hear=hear)
        failed = failed or run_child(
            __file__, name, sys.argv[1:], sites=site, limit_s=end - time.time(), hear=hear
        )
        if failed:
            rows.append(dict(library=name, error=failed))
            print(f"{name:10s} {failed}", flush=True)
    theirs = next((row for row in rows if row["library"] == "unsloth" and "seconds" in row), None)
    for row in rows:
        if theirs and row is not theirs and "seconds" in row:
            print(
                f"unsloth / {row['library']}: time x {theirs['seconds'] / row['seconds']:.2f}"
                + (f", memory x {theirs['peak'] / row['peak']:.2f}" if row["peak"] else ""),
                flush=True,
            )
    print(
        json.dumps(
            dict(
                about=about,
                prompts=args.prompts,
                completions=args.completions,
                prompt=args.prompt,
                new=args.new,
                batch=args.batch,
                rows=rows,
            )
        )
    )
    return 0 if any("seconds" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
