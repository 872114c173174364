"""Tokens a second while drawing from dense models (random weights of full size, LoRA r=8 on all
linear layers): ours replayed and call by call, transformers' generate, Unsloth's, vLLM.

    python benchmarks/decode_modules.py
        ours and transformers: Qwen2.5-1.5B in NF4 and bf16, Llama-3.1-8B in NF4
    python benchmarks/decode_modules.py --only replayed unsloth --sites DIR
        beside Unsloth from DIR/site-unsloth; writes a random checkpoint first
    python benchmarks/decode_modules.py --only replayed vllm --models Llama-3.2-3B:nf4 \\
            --rows 64 256 512 --sites DIR
        beside vLLM from DIR/site-vllm, its NF4 by bitsandbytes too, without adapters
    python benchmarks/decode_modules.py --models Qwen2.5-1.5B:nf4 --rows 8 --new 512
        other cases
    python benchmarks/decode_modules.py --cpu
        the same with tiny models, to try it out (nothing is replayed on a CPU)

Different prompts of 128 random tokens, 256 new ones, drawn at temperature 1 from the whole
vocabulary; nothing stops early. The second call counts, whole: reading the prompts and recording
the steps are in it. "replayed" is RolloutEngine as it comes, "modules" is
RolloutEngine(through_modules=True), "generate" transformers' own on the same model, "unsloth"
Unsloth's after FastLanguageModel.for_inference, "vllm" vLLM's with half of the card. "peak" is
torch's, the weights included. The last line is JSON.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from context import ATTENTION, KINDS, Case, checkpoint_of, load, sizes_of, write_for_unsloth
from decode import SETTINGS
from train_step import (
    arguments,
    attempt,
    child,
    clear,
    device_of,
    peaks,
    random_ids,
    run_child,
    shown,
    synchronize,
    tell,
    versions,
)

OURS, THEIRS = ("replayed", "modules", "generate"), ("unsloth", "vllm")
MODELS = ["Qwen2.5-1.5B:nf4", "Qwen2.5-1.5B:bf16", "Llama-3.1-8B:nf4"]


def case_of(name, library="ours"):
    model, weights = name.split(":")
    return Case(name, "rows", model, weights, library=library)


def whole(draw, ids, new):
    "Seconds of the second of two calls, and the peak."

    def run():
        for _ in range(2):
            clear()
            start = time.perf_counter()
            drawn = draw(ids, new)
            synchronize()
            seconds = time.perf_counter() - start
        if drawn != len(ids) * new:
            raise RuntimeError(f"{drawn} tokens were drawn, and {len(ids) * new} were asked for")
        return dict(seconds=round(seconds, 3), rate=round(drawn / seconds, 1), **peaks())

    result, error = attempt(run)
    return {"error": error} if error else result


def by_generate(model):
    "A function from ids (B, L) and a number of new tokens to how many were drawn."

    def draw(ids, new):
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                use_cache=True,
            )
        return out[:, ids.shape[1] :].numel()

    return draw


def by_engine(model, through_modules):
    from grpo_nb.rollout.engine import RolloutEngine
    from grpo_nb.rollout.sampling import SamplingParams

    engine = RolloutEngine(model, None, through_modules=through_modules)
    return lambda ids, new: int(
        engine.generate(
            ids.tolist(), SamplingParams(max_tokens=new, stop_token_ids=()), progress=False
        ).lengths.sum()
    ), engine.way


def by_vllm(case, args):
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(checkpoint_of(case, args)),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        quantization="bitsandbytes" if case.weights == "nf4" else None,
        max_model_len=args.prompt + args.new,
        max_num_seqs=max(args.rows),
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
    )

    def draw(ids, new):
        asked = [{"prompt_token_ids": row} for row in ids.tolist()]
        params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        drawn = llm.generate(asked, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in drawn)

    return draw


def measure(args, name, library):
    case = case_of(name, library)
    if library == "vllm":
        ways = {"vllm": (by_vllm(case, args), "")}
    elif library == "unsloth":
        from unsloth import FastLanguageModel  # before transformers, as it asks

        packed = case.weights == "nf4"
        model, _ = FastLanguageModel.from_pretrained(
            str(checkpoint_of(case, args)),
            max_seq_length=args.prompt + args.new,
            dtype=None if packed else torch.bfloat16,
            load_in_4bit=packed,
        )
        model = FastLanguageModel.get_peft_model(
            model,
            r=8,
            lora_alpha=16,
            target_modules=[*ATTENTION, "gate_proj", "up_proj", "down_proj"],
            random_state=0,
        )
        FastLanguageModel.for_inference(model)
        ways = {"unsloth": (by_generate(model), "")}
    else:
        model = load(case_of(name), args, args.prompt + args.new).eval()
        ways = {
            way: (by_generate(model), "")
            if way == "generate"
            else by_engine(model, way == "modules")
            for way in args.only
            if way in OURS
        }
    tell(
        loaded=name,
        **peaks(),
        **versions("bitsandbytes" if library == "ours" else library),
    )
    for way, (draw, how) in ways.items():
        for rows in args.rows:
            tell(
                model=name,
                way=way,
                rows=rows,
                how=how,
                **whole(
                    draw,
                    random_ids(sizes_of(case.model, args.cpu), args.prompt, device_of(args), rows),
                    args.new,
                ),
            )


def main():
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=list(OURS), choices=[*OURS, *THEIRS])
    parser.add_argument(
        "--models",
        nargs="+",
        default=MODELS,
        metavar="MODEL:WEIGHTS",
        help=f"of {', '.join(KINDS)}; nf4 or bf16",
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        help="completions that are drawn together",
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of a completion")
    args = parser.parse_args()
    if args.cpu:
        args.rows, args.prompt, args.new = [1, 2], 8, 12
    if args.child:
        step, _, name = args.child.partition(" ")
        return child(
            lambda: (
                write_for_unsloth(case_of(name, "unsloth"), args)
                if step == "write"
                else measure(args, name, step)
            )
        )
    device_of(args)
    rows, about, end = [], {}, time.time() + 60 * args.minutes

    def hear(record):
        if "loaded" in record:
            about.update(
                {
                    key: value
                    for key, value in record.items()
                    if key not in ("loaded", "peak", "driver")
                }
            )
            return print(
                f"{record['loaded']} is there: {shown(record['peak'])} GiB; "
                + ", ".join(f"{key} {value}" for key, value in about.items()),
                flush=True,
            )
        rows.append(record)
        found = (
            record["error"]
            if "error" in record
            else (
                f"{record['seconds']:8.2f} s {record['rate']:10,.0f} tok/s  "
                f"{shown(record['peak'])} GiB"
            )
        )
        print(
            f"{record['model']:20s}{record['way']:10s}{record['rows']:4d} rows {found}  "
            f"{record['how']}",
            flush=True,
        )

    for name in args.models:
        for library in [
            *(["ours"] if set(args.only) & set(OURS) else []),
            *(library for library in THEIRS if library in args.only),
        ]:
            sites = [
                Path(args.sites) / f"site-{site}"
                for site in (*(library,) * (library in THEIRS), "bitsandbytes")
            ]
            failed = "left out: no time left" if end - time.time() < 20 else None
            if not failed and library in THEIRS:
                failed = run_child(
                    __file__, f"write {name}", sys.argv[1:], limit_s=end - time.time(), hear=hear
                )
            failed = failed or run_child(
                __file__,
                f"{library} {name}",
                sys.argv[1:],
                sites=sites,
                limit_s=end - time.time(),
                hear=hear,
                environment=SETTINGS.get(library),
            )
            if failed:
                print(f"{name} {library}: {failed}", flush=True)
    for ours in (row for row in rows if row["way"] == "replayed" and "rate" in row):
        others = {
            row["way"]: ours["rate"] / row["rate"]
            for row in rows
            if (row["model"], row["rows"]) == (ours["model"], ours["rows"])
            and row is not ours
            and "rate" in row
        }
        print(
            f"{ours['model']:20s}{ours['rows']:4d} rows: replayed is "
            + ", ".join(f"x {times:.1f} of {way}" for way, times in others.items()),
            flush=True,
        )
    print(json.dumps(dict(about=about, prompt=args.prompt, new=args.new, rows=rows)))
    return 0 if any("rate" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
