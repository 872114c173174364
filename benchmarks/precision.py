"""The gap between sampler and trainer in float32, bfloat16 and float16, on a gpt-oss with random
weights whose head is scaled to an entropy.

    python benchmarks/precision.py
        a small model, on a GPU if there is one, else on the CPU
    python benchmarks/precision.py --hidden 2880 --layers 24 --experts 32 --vocab 201088 \\
            --completions 32 --tokens 64
        the size of gpt-oss-20b; float32 takes 78 GiB for the weights alone

The weights are rounded once to numbers that all three formats hold exactly; then the whole model is
converted from format to format, so only computing differs.
Completions are drawn in each format by the library's engine (prefill, then a token at a time with a
cache) and scored in each format by the trainer's path (one forward pass over whole sequences). The
rows where both formats are the same are cached decode against full forward. Printed as a table in
markdown: mean, median and largest |gap| in nats a token, and the share of tokens whose ratio
exp(gap) leaves [0.8, 1.2].
A second table compares the log-probs of all completions scored together with those of eight of them
scored one at a time, in the same format.
"""

import argparse
import gc
import time

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.rollout import pad_left
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@torch.no_grad()
def convert(model, dtype):
    """The parameters in another format, one at a time; buffers (the rotary frequencies) stay in
    float32."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return model


def build(args):
    "A gpt-oss with random weights, made on the device in bfloat16."
    torch.manual_seed(args.seed)
    heads = (
        64 if args.hidden == 2880 else 8 * max(1, args.hidden // 512)
    )  # 8 query heads share a key head
    config = GptOssConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        vocab_size=args.vocab,
        num_local_experts=args.experts,
        num_experts_per_tok=min(4, args.experts),
        num_attention_heads=heads,
        num_key_value_heads=heads // 8,
        head_dim=64 if args.hidden >= 512 else 32,
        initializer_range=args.hidden**-0.5,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(args.device):
            model = GptOssForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.no_grad()
def scale_head(model, nats, seed):
    "Multiply the head until the mean entropy of the next token is so many nats; the factor."
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (4, 32), generator=generator).to(model.device)
    logits = model(input_ids=ids).logits.float()  # (4, 32, V)

    def entropy(scale):
        logps = (logits * scale).log_softmax(-1)
        return -(logps.exp() * logps).sum(-1).mean().item()

    if not 0 < nats < entropy(1e-4):
        raise SystemExit(
            f"--entropy {nats} cannot be reached: {model.config.vocab_size:,} tokens have "
            f"between 0 and {entropy(1e-4):.2f} nats"
        )
    low, high = 1e-4, 1e4
    for _ in range(40):
        scale = (low * high) ** 0.5
        low, high = (scale, high) if entropy(scale) > nats else (low, scale)
    model.lm_head.weight.mul_(scale)
    return scale


def draw(model, args):
    "Completions by the engine, without an end."
    generator = torch.Generator().manual_seed(args.seed)
    lengths = torch.randint(8, 33, (args.completions,), generator=generator).tolist()
    prompts = [torch.randint(args.vocab, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(max_tokens=args.tokens, stop_token_ids=(), seed=args.seed)
    return RolloutEngine(model, None, through_modules=True).generate(
        prompts, params, progress=False
    )


@torch.no_grad()
def score(model, rollout, together, first=None):
    """Log-probs (N, T) by the trainer's path, so many completions at a time, and the mean entropy,
    nats."""
    device = rollout.mask.device
    batch = TrainingBatch(
        *pad_left(rollout.prompt_ids, device=device),
        rollout.completion_ids,
        rollout.mask,
        rollout.mask,
        torch.zeros(len(rollout.mask), device=device),
        rollout.logps,
    )
    parts = [
        completion_logps(model, batch.rows(slice(i, i + together)), return_entropy=True)
        for i in range(0, first or len(batch), together)
    ]
    logps, entropy = (torch.cat(p) for p in zip(*parts))
    return logps, entropy.mean().item()


def row(sampler, trainer, gap):
    "A line of the table."
    size, ratio = gap.abs(), gap.exp()
    outside = ((ratio < 0.8) | (ratio > 1.2)).float().mean().item()
    return (
        f"| {sampler} | {trainer} | {size.mean().item():.1e} | {size.median().item():.1e} | "
        f"{size.max().item():.1e} | {outside:.2%} |"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--hidden",
        type=int,
        default=128,
        help="width of the model and of an expert (default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--experts", type=int, default=8, help="in each layer; 4 are active (default: %(default)s)"
    )
    parser.add_argument("--vocab", type=int, default=2048, help="(default: %(default)s)")
    parser.add_argument(
        "--entropy",
        type=float,
        default=2.0,
        help="nats of the next token, on average (default: %(default)s)",
    )
    parser.add_argument("--completions", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=32, help="of each completion (default: %(default)s)"
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=list(FORMATS),
        help="leave float32 out if the card is too small for it",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()

    def say(text):
        print(f"{text}   [{time.perf_counter() - began:.0f} s]", flush=True)

    model = build(args)
    say(
        f"{torch.cuda.get_device_name() if args.device.startswith('cuda') else 'CPU'}, torch "
        f"{torch.__version__}; gpt-oss of {sum(p.numel() for p in model.parameters()):,} "
        "random parameters: "
        f"{args.layers} layers, width {args.hidden:,}, {args.experts} experts, "
        f"{args.vocab:,} tokens"
    )
    scale = scale_head(model, args.entropy, args.seed)
    convert(
        convert(model, torch.float16), torch.bfloat16
    )  # now every format holds the weights exactly
    say(f"head x {scale:.3g} for {args.entropy:g} nats")

    order, rollouts = [name for name in FORMATS if name in args.formats], {}
    for name in order:
        try:
            rollouts[name] = draw(convert(model, FORMATS[name]), args)
        except FloatingPointError as error:
            say(f"{name}: {error}")
        else:
            say(f"drawn in {name}: {int(rollouts[name].mask.sum()):,} tokens")
    scores, alone, entropies = {}, {}, {}
    for name in reversed(order):  # the last format is still there
        convert(model, FORMATS[name])
        for sampler, rollout in rollouts.items():
            scores[sampler, name], entropies[sampler] = score(model, rollout, args.completions)
        if name in rollouts:
            alone[name], _ = score(model, rollouts[name], 1, first=min(8, args.completions))
        say(f"scored in {name}")

    heading = "mean | median | max | outside [0.8, 1.2] |\n|---|---|---|---|---|---|"
    print(
        "\nentropy where tokens were drawn: "
        f"{', '.join(f'{value:.2f} nats ({name})' for name, value in entropies.items())}\n\n"
        f"| sampler | trainer | {heading}"
    )
    for sampler in rollouts:
        for trainer in order:
            print(row(sampler, trainer, scores[sampler, trainer] - rollouts[sampler].logps))
    print(f"\n| format | full forward | {heading}")
    for name in alone:
        print(
            row(
                name,
                "one at a time, against all together",
                alone[name] - scores[name, name][: len(alone[name])],
            )
        )
    peak = (
        f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        if args.device.startswith("cuda")
        else ""
    )
    print(f"\n{time.perf_counter() - began:.0f} s{peak}")


if __name__ == "__main__":
    main()
