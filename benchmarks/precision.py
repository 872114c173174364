"""The gap between sampler and trainer in float32, bfloat16 and float16, on a gpt-oss with random
weights whose head is scaled to an entropy.

    python benchmarks/precision.py
        a small model, on a GPU if there is one, else on the CPU
    python benchmarks/precision.py --hidden 2880 --layers 24 --experts 32 --vocab 201088 \\
            --completions 32 --tokens 64
        the size of gpt-oss-20b; float32 takes 78 GiB for the weights alone

    python benchmarks/precision.py --trained FOLDER --updates 20 --record FILE
        a trained model instead, on the CPU: largest activations, log-probs, a gradient with and
        without a scaled loss, an update, and so many updates of the trainer on the same completions
        in each format; and a gpt-oss whose residual stream leaves float16. Few CPUs multiply it,
    so its products are summed in float32 and rounded once, as a card's are

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
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, GptOssForCausalLM

from grpo_nb import GRPOConfig, GRPOTrainer, load_model, tiny_gpt_oss
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


class WideSums(TorchDispatchMode):
    """Products of float16 matrices as a card makes them: summed in float32, rounded once. A CPU
    without instructions for float16 does the same, up to two hundred times slower."""

    PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm")}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.PRODUCTS and args[0].dtype == torch.float16:
            return function(*(matrix.float() for matrix in args)).half()
        return function(*args, **(kwargs or {}))


class Replay(RolloutEngine):
    "The engine, which keeps what it draws; or plays what another one has kept."

    def __init__(self, *args, tape=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.plays, self.tape = tape is not None, list(tape or [])

    def generate(self, *args, **kwargs):
        if self.plays:
            return self.tape.pop(0)
        self.tape.append(super().generate(*args, **kwargs))
        return self.tape[-1]


def vowels(completions, **_):
    "The share of vowels: every group has a spread."
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


def adapter_of(model):
    "The numbers that train, in a row."
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def trained_run(folder, name, tape, args, beside=None):
    """(trainer, the adapter after some updates, by their number, and how far the last of them went)
    of a run in a format; `tape`: completions to play; `beside`: the adapters of the float32 run."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=FORMATS[name])
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    questions = "What is rain?|Name a colour.|Why do cats sleep?|Tell me a story.|How old is iron?"
    rows = [{"prompt": question} for question in questions.split("|")]
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            max_steps=args.updates,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=16,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            use_cpu=True,
            guard_every=0,  # what is played was drawn in another format
            seed=args.seed,
            bf16=name == "bfloat16",
            fp16=name == "float16",
        )
        torch.manual_seed(args.seed)
        trainer = GRPOTrainer(
            model, vowels, config, rows, processing_class=tokenizer, peft_config=adapter
        )
        trainer.log.show = False
        if beside:  # the first numbers of the float32 run
            torch.nn.utils.vector_to_parameters(
                beside[0].clone(), [p for p in trainer.model.parameters() if p.requires_grad]
            )
        trainer.source.sampler = Replay(
            trainer.model, tokenizer, autocast_dtype=trainer.precision.dtype, tape=tape
        )
        after, step = {0: adapter_of(trainer.model).clone()}, trainer.policy_update.step
        every, lengths = max(1, args.updates // 20), {}

        def watched(number):
            kept = number == 1 or number % every == 0
            before = adapter_of(trainer.model).clone() if kept else None
            step(number)
            if kept:
                after[number] = adapter_of(trainer.model).clone()
                lengths[number] = (after[number] - before).norm()
                right = beside[number] if beside else after[number]
                gap = (after[number] - right).norm() / (right - after[0]).norm()
                print(f"{name}, update {number}: off by {gap:.4f}", file=sys.stderr, flush=True)

        trainer.policy_update.step = watched
        if args.updates:
            with WideSums():
                trainer.train()
    return trainer, after, lengths


def gradient(trainer, rollout, scale):
    "Of the log-probs of a rollout, those of its first half up and the others down; unscaled."
    model, half = trainer.model, len(rollout.mask) // 2
    sign = torch.tensor([1.0] * half + [-1.0] * (len(rollout.mask) - half))
    batch = TrainingBatch(
        *pad_left(rollout.prompt_ids),
        rollout.completion_ids,
        rollout.mask,
        rollout.mask,
        sign,
        rollout.logps,
    )
    model.zero_grad()
    with trainer.precision.autocast(), trainer.precision.adapters(model), WideSums():
        logps, _ = completion_logps(model, batch)
        (-(logps * sign[:, None]).sum() / batch.loss_mask.sum() * scale).backward()
    parts = [p.grad.flatten() / scale for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return logps.detach(), torch.cat(parts)


def largest(model, ids):
    "The largest number that a layer gives to the next, and that a linear layer gives."
    found = {"between layers": 0.0, "of a linear layer": 0.0}
    hooks = []
    for module in model.modules():
        kind = "of a linear layer" if type(module) is torch.nn.Linear else None
        kind = "between layers" if type(module).__name__.endswith("DecoderLayer") else kind
        if kind:

            def note(module, inputs, output, kind=kind):
                first = output[0] if isinstance(output, tuple) else output
                found[kind] = max(found[kind], first.abs().max().item())

            hooks.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return found


def overflowing(args):
    "A tiny gpt-oss whose residual stream passes 65,504: as it is in float16, and as loaded here."
    model, tokenizer = tiny_gpt_oss(args.seed)
    ids = torch.arange(4, 14).repeat(4, 1)
    kept = {}
    with torch.no_grad():
        layers = model.model.layers
        model.model.embed_tokens.weight *= 4e4 / model.model.embed_tokens.weight.abs().max()
        for layer in layers:
            hook = layer.self_attn.o_proj.register_forward_hook(
                lambda m, i, o: kept.update({m: o.abs().max()})
            )
            model(input_ids=ids)
            hook.remove()
            factor = 4e4 / kept[layer.self_attn.o_proj]
            layer.self_attn.o_proj.weight *= factor
            layer.self_attn.o_proj.bias *= factor
        model.load_state_dict({k: v.half().float() for k, v in model.state_dict().items()})
        exact = model(input_ids=ids).logits.log_softmax(-1)
        wide = largest(model, ids)["between layers"]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            ours, _ = load_model(folder, max_seq_length=64, dtype=torch.float16, quiet=True)
            plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
        with torch.autocast("cpu", torch.float16):
            loaded = ours.eval()(input_ids=ids).logits.float().log_softmax(-1)
        as_it_is = plain(input_ids=ids).logits.float()
    return {
        "largest between layers": wide,
        "logits that are finite, float16 as it is": as_it_is.isfinite().float().mean().item(),
        "logits that are finite, load_model": loaded.isfinite().float().mean().item(),
        "log-probs off by, load_model": (loaded - exact).abs().max().item(),
    }


def trained(args):
    "What --trained measures, printed and recorded."
    began, told = time.perf_counter(), {"torch": torch.__version__, "updates": args.updates}
    torch.set_num_threads(args.threads)
    told["gpt-oss, tiny, made large"] = overflowing(args)
    exact, paths, lengths = trained_run(args.trained, "float32", None, args)
    told["seconds of an update"] = {"float32": exact.log_history[-1]["step_time"]}
    tape, path = exact.source.sampler.tape, {"float32": paths}
    first, told["model"] = tape[0], exact.model.config.model_type
    runs = {"float32": exact}
    for name in ("bfloat16", "float16"):
        runs[name], path[name], _ = trained_run(args.trained, name, tape, args, paths)
        told["seconds of an update"][name] = runs[name].log_history[-1]["step_time"]
    told["largest activation"] = largest(exact.model, first.completion_ids)
    moved = {n: (p - paths[0]).norm() for n, p in paths.items() if n}
    told["drift"], told["skipped"] = {}, {}
    for name in ("bfloat16", "float16"):
        gaps = {n: (path[name][n] - paths[n]).norm() / far for n, far in moved.items()}
        told["drift"][name] = {n: round(gap.item(), 5) for n, gap in gaps.items()}
        told["skipped"][name] = sum(r.get("skipped_updates", 0) for r in runs[name].log_history)
    told["one update, of the way"] = {
        n: round((lengths[n] / far).item(), 5) for n, far in moved.items()
    }
    told["moved"] = moved[max(moved)].item()
    told["scale in the end"] = runs["float16"].precision.scaler.get_scale()
    for run in runs.values():  # all back to the adapter after one update
        where = [p for p in run.model.parameters() if p.requires_grad]
        torch.nn.utils.vector_to_parameters(paths[1].clone(), where)
    logps, right = gradient(exact, first, 1.0)
    told["log-probs off by"], told["gradient off by"] = {}, {}
    for name, scale in (("bfloat16", 1), ("float16", 1), ("float16", 2**16)):
        other, found = gradient(runs[name], first, scale)
        gap = (other - logps)[first.mask].abs()
        told["log-probs off by"][name] = {"mean": gap.mean().item(), "max": gap.max().item()}
        key = f"{name}, loss x {scale:,}"
        lost = ((found == 0) & (right != 0)).float().mean().item()
        error = ((found - right).norm() / right.norm()).item()
        told["gradient off by"][key] = {"relative": error, "numbers that became 0": lost}
    for name in runs:  # the policies that were learnt, compared in float32
        where = [p for p in exact.model.parameters() if p.requires_grad]
        torch.nn.utils.vector_to_parameters(path[name][max(moved)].clone(), where)
        learnt, _ = gradient(exact, tape[-1], 1.0)
        if name == "float32":
            base = learnt
        else:
            gap = (learnt - base)[tape[-1].mask].abs().mean().item()
            told.setdefault("policies apart, nats a token", {})[name] = gap
    told["seconds"] = round(time.perf_counter() - began)
    print(json.dumps(told, indent=1))
    if args.record:
        args.record.write_text(json.dumps(told, indent=1) + "\n")


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
    parser.add_argument("--trained", type=Path, help="the folder of a trained model, on the CPU")
    parser.add_argument("--updates", type=int, default=20, help="of --trained")
    parser.add_argument("--threads", type=int, default=1, help="of --trained")
    parser.add_argument("--record", type=Path, help="a file for what --trained measures")
    args = parser.parse_args()
    if args.trained:
        return trained(args)
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
