"""Rows that come and go, and what filters cost, with random weights of a Qwen2.5-1.5B's shape.

python benchmarks/rows.py                       on a GPU, about five minutes
python benchmarks/rows.py --small --device cpu  tries the script with a tiny model

1. kernels: top-k, top-p and min-p by thresholds against the sorting form, on the same logits.
2. filters: a step of 1 to 256 rows without filters and with them, in one process, in turns; of a
   model that is unsure of the next token and of one that is sure.
3. rows: 2,000 completions of unlike lengths, with rows that are refilled, and batch by batch.
4. company: completions drawn alone, in eights and all together, the same random numbers each.
5. first: seconds of the first call of a shape, of its second, and of one with other lengths.
"""

import argparse
import itertools
import random
import statistics
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.rollout import concatenate
from grpo_nb.rollout.sampling import SamplingParams, sample_recorded

FILTERS = {
    "top_k 50, top_p .95": dict(top_k=50, top_p=0.95),
    "top_p .95": dict(top_p=0.95),
    "min_p .05": dict(min_p=0.05),
}
SIZES = dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28)
SIZES |= dict(num_attention_heads=12, num_key_value_heads=2, vocab_size=151_936)
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=512)


class Tokenizer:
    "All that an engine needs where prompts are ids."

    pad_token_id = 0


def make(device, dtype, sizes):
    "A random model, its rotation in float32."
    config = transformers.Qwen2Config(
        **sizes, max_position_embeddings=32_768, tie_word_embeddings=True, pad_token_id=0
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = transformers.Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.requires_grad_(False)


def prompts_of(count, vocabulary, low, high, seed=5):
    rng = random.Random(seed)
    return [
        [rng.randrange(10, vocabulary) for _ in range(rng.randrange(low, high))]
        for _ in range(count)
    ]


class Clock:
    "Seconds on the device."

    def __init__(self, device):
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def __call__(self, work):
        self.wait()
        start = time.perf_counter()
        result = work()
        self.wait()
        return time.perf_counter() - start, result


def kernels(model, args, clock):
    "The thresholds beside the sorting form."
    if args.device != "cuda":
        return print("kernels: not on a CPU")
    from grpo_nb.rollout import filter_kernels

    generator = torch.Generator("cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        logits = 4 * torch.randn(64, 201_088, device="cuda", generator=generator)
        logits = logits.to(dtype)
        uniform = torch.rand(64, dtype=torch.float64, device="cuda", generator=generator)
        for name, chosen in FILTERS.items():
            params = SamplingParams(temperature=0.8, **chosen)
            ours = filter_kernels.draw(logits, params, uniform)
            plain = sample_recorded(logits, params, uniform=uniform)
            left = [x[2].ids.sort(-1).values.tolist() for x in (ours, plain)]
            seconds = []
            for work in (
                lambda p=params, z=logits: filter_kernels.draw(z, p, uniform),
                lambda p=params, z=logits: sample_recorded(z, p, uniform=uniform),
            ):
                seconds.append(statistics.median(clock(work)[0] for _ in range(5)))
            print(
                f"kernels, {str(dtype)[6:]}, {name}: {int((ours[0] == plain[0]).sum())} of 64 "
                f"tokens equal, log-probs to {(ours[1] - plain[1]).abs().max():.1e}, survivors of "
                f"{sum(a == b for a, b in zip(*left))} rows equal, mass to "
                f"{(ours[2].log_mass - plain[2].log_mass).abs().max():.1e}; "
                f"{1000 * seconds[0]:.2f} ms beside {1000 * seconds[1]:.2f} sorted",
                flush=True,
            )


def filters(model, args, clock):
    """Milliseconds of a step, filters in turns: of an unsure model, whose logits are alike, and of
    one as sure as a trained model, which a temperature of an eighth makes of it."""
    engine, vocabulary = RolloutEngine(model, Tokenizer()), model.config.vocab_size
    tokens = 20 if args.small else 128
    counts = (1, 8) if args.small else (1, 8, 64, 256)
    for rows, temperature in itertools.product(counts, (1.0, 0.125)):
        prompts = prompts_of(rows, vocabulary, 128, 129)
        ways = {"no filter": {}, **FILTERS}
        times = {name: [] for name in ways}
        for repeat in range(4):  # the first is not counted
            for name, chosen in ways.items():
                given = dict(temperature=temperature, seed=0, stop_token_ids=(), **chosen)
                params = SamplingParams(max_tokens=tokens, **given)
                seconds, drawn = clock(lambda: engine.generate(prompts, params, progress=False))
                short = SamplingParams(max_tokens=4, **given)
                start, _ = clock(lambda: engine.generate(prompts, short, progress=False))
                times[name] += [(seconds - start) / (tokens - 4)] * (repeat > 0)
                if not chosen:
                    surprise = -drawn.logps.sum().item() / drawn.lengths.sum().item()
        median = {name: statistics.median(t) for name, t in times.items()}
        text = ", ".join(
            f"{name} {1000 * t:.3f} ms ({t / median['no filter'] - 1:+.1%})"
            for name, t in median.items()
        )
        print(f"filters, {rows} rows, entropy {surprise:.1f} nats: {text}", flush=True)


def rows(model, args, clock):
    "Many completions of unlike lengths: refilled, and one batch after the other."
    vocabulary, most = model.config.vocab_size, 40 if args.small else 4096
    groups, size = (10, 16) if args.small else (250, args.rows)
    rng = random.Random(5)
    stops = tuple(rng.sample(range(1000 % vocabulary, vocabulary), vocabulary // args.every))
    prompts = [p for p in prompts_of(groups, vocabulary, 32, 256) for _ in range(8)]
    params = SamplingParams(max_tokens=most, stop_token_ids=stops, seed=1)
    engine = RolloutEngine(model, Tokenizer(), max_batch_size=size)

    def in_batches():
        parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        return concatenate([engine.generate(part, params, progress=False) for part in parts])

    ways = {"refilled": lambda: engine.generate(prompts, params, progress=False)}
    ways["batch by batch"] = in_batches
    engine.generate(prompts[:size], SamplingParams(max_tokens=8, seed=0), progress=False)
    speeds = {}
    for name, work in ways.items():
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, rollout = clock(work)
        count = int(rollout.lengths.sum())
        speeds[name] = count / seconds
        peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0
        print(
            f"rows, {name}, {size} at a time: {len(rollout.lengths)} completions, mean "
            f"{count / len(rollout.lengths):.0f}, longest {int(rollout.lengths.max())}, "
            f"{seconds:.1f} s, {count / seconds:,.0f} tok/s, peak {peak:.1f} GiB",
            flush=True,
        )
    print(f"rows: refilled / batch by batch x {speeds['refilled'] / speeds['batch by batch']:.2f}")


def company(model, args, clock):
    "The same completions in other company; in float32, so that they differ at borders alone."
    wide = make(args.device, torch.float32, model.config_sizes | dict(num_hidden_layers=2))
    prompts, rollouts = prompts_of(64, wide.config.vocab_size, 4, 64), {}
    params = SamplingParams(max_tokens=32, seed=3, stop_token_ids=())
    for size in (1, 8, 64):
        some = prompts if size > 1 else prompts[:8]
        engine = RolloutEngine(wide, Tokenizer(), max_batch_size=size)
        rollouts[size] = engine.generate(some, params, progress=False).completion_ids
    for size in (1, 8):
        n = len(rollouts[size])
        same = (rollouts[size] == rollouts[64][:n]).all(1).sum()
        print(f"company: {int(same)} of {n} completions equal at {size} and at 64 rows")


def first(model, args, clock):
    "First calls."
    vocabulary = model.config.vocab_size
    for number, (low, high) in enumerate(((64, 512), (64, 512), (100, 300), (10, 700))):
        engine = RolloutEngine(model, Tokenizer())
        prompts = [p for p in prompts_of(8, vocabulary, low, high, number) for _ in range(8)]
        params = SamplingParams(max_tokens=16 if args.small else 64, seed=0, stop_token_ids=())
        seconds, _ = clock(lambda: engine.generate(prompts, params, progress=False))
        print(f"first: call {number + 1} of 64 rows, {low} to {high - 1} tokens: {seconds:.2f} s")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {f.__name__: f for f in (first, kernels, filters, company, rows)}
    parser.add_argument("--parts", default=",".join(parts), help="some of: %(default)s")
    parser.add_argument("--small", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, default=256, help="at a time (default: %(default)s)")
    parser.add_argument("--every", type=int, default=400, help="a stop token in so many")
    args = parser.parse_args()
    sizes, clock = (SMALL if args.small else SIZES), Clock(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = make(args.device, dtype, sizes)
    model.config_sizes = sizes
    name = torch.cuda.get_device_name() if args.device == "cuda" else "a CPU"
    print(f"{name}, torch {torch.__version__}, {RolloutEngine(model, Tokenizer()).way}", flush=True)
    for part in args.parts.split(","):
        try:
            parts[part](model, args, clock)
        except Exception:  # the others are measured
            traceback.print_exc()


if __name__ == "__main__":
    main()
