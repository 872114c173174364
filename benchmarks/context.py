"""How much fits: the longest training step, and whole GRPO steps, under a cap on the card's memory.
Random weights of full size, LoRA r=8, layer inputs on the host.

    python benchmarks/context.py --list
        the cases, with what each is to reach
    python benchmarks/context.py --only t4_longest t4_grpo
        some of them, each in a process of its own
    python benchmarks/context.py --only bf16_80 --tokens 262144
        begin the search at this length in place of the planner's
    python benchmarks/context.py --only mxfp4_141 --no-confirm
        search with two layers only (below)
    python benchmarks/context.py --only batch_oss batch_oss_transformers batch_oss_unsloth \\
            --sites DIR
        beside Unsloth from DIR/site-unsloth
    python benchmarks/context.py --cpu
        every case with a tiny model, no caps

The cap holds for everything: torch's share is set by torch.cuda.set_per_process_memory_fraction to
what CUDA itself leaves of it, the library is told of a card of that size (torch.cuda.mem_get_info),
and the driver's figure at the peak is printed beside it, "kept" or "BROKEN".
Cases named t4 have a T4's limits imposed on whatever card this is: compute capability 7.5 is
reported, bfloat16, FlexAttention, flash kernels and the decode kernels are forbidden, and a short
step is searched for bfloat16 tensors. They show what fits in a T4's memory, not how fast a T4 is;
its time is a roofline estimate (320 GB/s, 65 TFLOP/s in float16), labelled so: each part takes as
long as its arithmetic or its bytes at these rates, whichever is longer, which no program reaches.
Unsloth's cases begin with a random checkpoint (gpt-oss-20b: 39 GiB at --checkpoint, Qwen3-8B:
15 GiB beside it), which is written if it is not there, and kept.
A search takes one step a length, with two layers of the model and a block of memory as large as the
layers that are missing, since layer inputs wait on the host; the longest length is then run once
with all layers, the optimizer's update included (or a shorter one, if that is all there is time
for). It begins at the planner's length, or at the goal where that is far shorter, and goes up or
down by a tenth. The last line is JSON.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import psutil
import torch
from grpo_step import grpo_step, prompts_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_step import (
    ATTENTION,
    FULL,
    SMALL,
    GiB,
    Step,
    arguments,
    attempt,
    batch_of,
    child,
    clear,
    device_of,
    driver_bytes,
    gpt_oss,
    random_ids,
    run_child,
    shown,
    synchronize,
    tell,
    versions,
    word_tokenizer,
    write_checkpoint,
)


@dataclass(frozen=True)
class Case:
    what: str
    kind: str  # "longest", "grpo", "group", "chunks" or "batch"
    model: str = "gpt-oss-20b"
    weights: str = "mxfp4"  # or "bf16", "nf4"
    cap: float | None = None  # GiB in all
    t4: bool = False
    goal: str = ""
    start: int | None = None  # tokens where the search begins; None: where the planner says
    library: str = "ours"  # or "transformers", "unsloth", for "batch"
    prompts: int = 4
    completions: int = 8
    prompt: int = 1536
    new: int = 512
    batch: int = 8  # completions of a micro-batch


CASES = {
    "t4_longest": Case(
        "longest step in a T4's memory", "longest", cap=14.5, t4=True, goal="16,384 tokens"
    ),
    "t4_grpo": Case(
        "a whole GRPO step in a T4's memory, 4 prompts x 8 completions, 2,048 tokens",
        "grpo",
        cap=14.5,
        t4=True,
        goal="fits",
    ),
    "mxfp4_24": Case("longest step in 24 GiB", "longest", cap=24, goal="98,304 tokens"),
    "bf16_80": Case(
        "longest step in 80 GiB, bf16 base",
        "longest",
        weights="bf16",
        cap=80,
        goal="262,144 tokens",
        start=262_144,
    ),
    "mxfp4_141": Case(
        "longest step in 141 GiB (positions above 131,072 exceed the model's own: memory only)",
        "longest",
        cap=141,
        goal="524,288 tokens",
        start=524_288,
    ),
    "qwen3_80": Case(
        "longest step of Qwen3-8B in 80 GiB",
        "longest",
        "Qwen3-8B",
        "nf4",
        80,
        goal="110,000 tokens",
    ),
    "llama_20k": Case(
        "8 completions of 20,480 tokens of Llama-3.1-8B: peak",
        "group",
        "Llama-3.1-8B",
        "nf4",
        goal="54.3 GB (50.6 GiB)",
        prompt=512,
        new=19_968,
    ),
    "phi4_t4": Case(
        "a whole GRPO step of Phi-4 (14B) in a T4's memory",
        "grpo",
        "Phi-4",
        "nf4",
        14.5,
        True,
        goal="fits",
        prompts=2,
        completions=4,
        prompt=512,
        new=256,
        batch=4,
    ),
    "qwen_5": Case(
        "a whole GRPO step of a 1.5B model in 5 GiB",
        "grpo",
        "Qwen2.5-1.5B",
        "nf4",
        5,
        goal="fits",
        prompt=512,
        new=256,
    ),
    "chunks_8192": Case(
        "8,192 tokens, the head in 1 and in 4 chunks, and chosen: what it saves and costs", "chunks"
    ),
    "batch_oss": Case(
        "batch of 4 by context, gpt-oss in bf16",
        "batch",
        weights="bf16",
        goal="7 x transformers' context at equal memory",
    ),
    "batch_oss_transformers": Case(
        "the same by transformers (FlexAttention, grouped_mm, checkpointing)",
        "batch",
        weights="bf16",
        library="transformers",
    ),
    "batch_oss_unsloth": Case(
        "the same by Unsloth (its checkpointing, its chunked log-softmax)",
        "batch",
        weights="bf16",
        library="unsloth",
    ),
    "batch_qwen": Case(
        "batch of 4 by context, Qwen3-8B in NF4",
        "batch",
        "Qwen3-8B",
        "nf4",
        goal="7 x transformers' context at equal memory",
    ),
    "batch_qwen_transformers": Case(
        "the same by transformers (sdpa, checkpointing)",
        "batch",
        "Qwen3-8B",
        "nf4",
        library="transformers",
    ),
    "batch_qwen_unsloth": Case(
        "the same by Unsloth (its checkpointing, its chunked log-softmax)",
        "batch",
        "Qwen3-8B",
        "nf4",
        library="unsloth",
    ),
}
DEFAULT = ["t4_longest", "t4_grpo", "chunks_8192", "llama_20k"]
KINDS = {"Llama-3.1-8B": "llama", "Qwen3-8B": "qwen3", "Phi-4": "phi3", "Qwen2.5-1.5B": "qwen2"}
KINDS |= {"Llama-3.2-3B": "llama"}
BATCH_LENGTHS = [1024, 2048, 4096, 8192, 16_384, 32_768]


# A card of another size


class NoBFloat16(TorchDispatchMode):
    "Refuses every tensor in bfloat16."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 for x in tree_leaves(result)
        ):
            raise RuntimeError(f"{func} made a tensor in bfloat16, which a T4 has not")
        return result


def forbidden(*args, **kwargs):
    raise RuntimeError("FlexAttention was asked for, which needs compute capability 8.0")


def told_to_us(function, answer):
    """`function`, with another answer for those who ask from within this library: compilers have to
    know the real card."""

    def asked(*args, **kwargs):
        return (
            answer
            if sys._getframe(1).f_globals.get("__name__", "").startswith("grpo_nb.")
            else function(*args, **kwargs)
        )

    return asked


class Limits:
    "Inside `with`: a card of `cap` GiB, with a T4's abilities or its own."

    def __init__(self, cap, t4):
        self.cuda, self.t4, self.stack = torch.cuda.is_available(), t4, ExitStack()
        self.total = torch.cuda.mem_get_info()[1] if self.cuda else 0
        self.cap = int(min(cap * GiB, self.total)) if cap and self.cuda else None
        self.told = torch.cuda.mem_get_info

    def __enter__(self):
        if self.t4:
            from grpo_nb.model import attention

            self.stack.enter_context(
                mock.patch.dict(attention.BACKENDS, triton=forbidden, flash=forbidden)
            )
            for name, answer in (("get_device_capability", (7, 5)), ("is_bf16_supported", False)):
                self.stack.enter_context(
                    mock.patch(f"torch.cuda.{name}", told_to_us(getattr(torch.cuda, name), answer))
                )
            for switch in (
                torch.backends.cuda.enable_flash_sdp,
                torch.backends.cuda.enable_cudnn_sdp,
            ):
                switch(False)
        if self.cap is not None:
            self.stack.enter_context(mock.patch("torch.cuda.mem_get_info", self.mem_get_info))
            (
                torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
            ).sum().item()  # CUDA and cuBLAS are there
            self.tighten()
        return self

    def __exit__(self, *error):
        self.stack.close()
        if self.t4:
            for switch in (
                torch.backends.cuda.enable_flash_sdp,
                torch.backends.cuda.enable_cudnn_sdp,
            ):
                switch(True)
        if self.cap is not None:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def mem_get_info(self, device=None):
        "What a card of that size would say."
        free, total = self.told(device) if device is not None else self.told()
        return max(0, self.cap - (total - free)), self.cap

    def tighten(self, spare=0.1):
        """Leave torch what CUDA's own share (kernels that were loaded meanwhile included) leaves of
        the cap, less `spare` GiB for kernels to come."""
        if self.cap is None:
            return
        free, total = self.told()
        outside = total - free - torch.cuda.memory_reserved()
        if self.cap < total:
            torch.cuda.set_per_process_memory_fraction(
                max(0.0, (self.cap - outside - spare * GiB) / total)
            )

    def kept(self):
        "None without a cap; else whether the driver gave away no more than it."
        return None if self.cap is None else driver_bytes(self.told) <= self.cap

    def peaks(self):
        if not self.cuda:
            return dict(peak=None, driver=None, kept=None)
        return dict(
            peak=round(torch.cuda.max_memory_allocated() / GiB, 3),
            driver=round(driver_bytes(self.told) / GiB, 3),
            kept=self.kept(),
        )


def t4_training(shape, *given, r=8, targets=("attention",), **more):
    """Roofline estimate of log-probs, loss and gradients on a T4, seconds by part. Nobody ran it
    there."""
    from grpo_nb.model.memory_fit import CARDS, training_work

    by_heads = shape.sinks and "attention" in targets
    work = training_work(shape, *given, r=r, targets=targets, by_heads=by_heads, **more)
    return {part: CARDS["T4"].seconds(*each) for part, each in work.items()}


def t4_drawing(*given):
    "Roofline estimate of reading prompts and drawing on a T4, seconds."
    from grpo_nb.model.memory_fit import CARDS, drawing_work

    return sum(CARDS["T4"].seconds(*work) for work in drawing_work(*given).values())


# Models


def sizes_of(name, cpu):
    "Of gpt-oss as decode.py has them; of others what prompts and tokenizers need."
    from grpo_nb.model.memory_bytes import MODELS

    if name == "gpt-oss-20b":
        return SMALL if cpu else FULL
    vocab = 256 if cpu else MODELS[name].vocab
    return dict(vocab_size=vocab, pad_token_id=vocab - 2, eos_token_id=vocab - 1)


def config_of(case, args, layers=None):
    "Of a dense model."
    from transformers import AutoConfig

    from grpo_nb.model.memory_bytes import MODELS

    shape = MODELS[case.model]
    full = dict(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    tiny = dict(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    fields = {**(tiny if args.cpu else full), **({"num_hidden_layers": layers} if layers else {})}
    return AutoConfig.for_model(
        KINDS[case.model],
        **sizes_of(case.model, args.cpu),
        **fields,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        bos_token_id=0,
    )


def load(case, args, tokens, layers=None):
    "The random model of a case, with adapters that are not zero; `layers`: only so many."
    from grpo_nb.model.loading import load_model
    from grpo_nb.model.memory_bytes import MODELS

    sizes, shape, more = sizes_of(case.model, args.cpu), MODELS[case.model], {}
    if case.library == "ours" and not shape.tied:
        more["offload_embedding"] = case.kind not in ("chunks", "batch")
    if case.model == "gpt-oss-20b":
        if case.library == "transformers" and not args.cpu:
            more |= dict(attn_implementation="flex_attention", experts_implementation="grouped_mm")
        return gpt_oss(
            {**sizes, **({"num_hidden_layers": layers} if layers else {})},
            case.weights,
            tokens,
            **more,
        )
    model, _ = load_model(
        config_of(case, args, layers),
        max_seq_length=tokens,
        load_in_4bit=case.weights == "nf4" and not args.cpu,
        load_in_fp8=case.weights == "fp8" or None,
        lora_r=8,
        lora_alpha=16,
        lora_targets="all",
        quiet=True,
        **more,
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, 0, 0.01)
    return model


def has_unsloth(args):
    return (Path(args.sites) / "site-unsloth" / "unsloth").is_dir() or importlib.util.find_spec(
        "unsloth"
    ) is not None


def checkpoint_of(case, args):
    "Where Unsloth's checkpoint is."
    folder = Path(args.checkpoint)
    return folder.with_name(
        (folder.name if case.model == "gpt-oss-20b" else f"{case.model}-random")
        + ("-tiny" if args.cpu else "")
    )


def write_for_unsloth(case, args):
    "A random bf16 checkpoint with a tokenizer, if there is none."
    folder = checkpoint_of(case, args)
    if case.model == "gpt-oss-20b":
        return write_checkpoint(
            argparse.Namespace(**{**vars(args), "checkpoint": folder}),
            sizes_of(case.model, args.cpu),
        )
    if folder.is_dir():
        return
    from transformers import AutoModelForCausalLM

    part = folder.with_name(folder.name + ".part")
    torch.manual_seed(0)
    with torch.device(device_of(args)):
        model = AutoModelForCausalLM.from_config(config_of(case, args), dtype=torch.bfloat16)
    model.save_pretrained(part)
    word_tokenizer(sizes_of(case.model, args.cpu)).save_pretrained(part)
    part.rename(folder)  # only a whole one has the name


def unsloth_step(case, args, tokens):
    """A function from ids (B, L) to nothing: forward and backward, with Unsloth's model,
    checkpointing and log-softmax."""
    from unsloth import FastLanguageModel  # before transformers, as it asks

    packed = case.weights == "nf4"
    model, _ = FastLanguageModel.from_pretrained(
        str(checkpoint_of(case, args)),
        max_seq_length=tokens,
        dtype=None if packed else torch.bfloat16,
        load_in_4bit=packed,
    )
    targets = (
        ATTENTION
        if case.model == "gpt-oss-20b"
        else [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
    )  # as ours
    model = FastLanguageModel.get_peft_model(
        model,
        r=8,
        lora_alpha=16,
        target_modules=targets,
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )
    FastLanguageModel.for_training(model)
    from unsloth_zoo.rl_replacements import RL_REPLACEMENTS

    os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] = (
        "1"  # its switch: `logits` are the final hidden states
    )
    chunked, head = (
        RL_REPLACEMENTS["grpo_selective_log_softmax"],
        model.get_output_embeddings().weight,
    )

    def step(ids):
        hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        (
            -chunked(hidden[:, :-1], head, ids[:, 1:], chunks=max(4, ids.numel() // 4096)).mean()
        ).backward()
        model.zero_grad()

    return step


def layer_bytes(model):
    "What one layer takes, near enough (scales of NF4 included)."
    from grpo_nb.model.packed import PackedWeight

    def size(p):
        if isinstance(p, PackedWeight):
            return p.blocks.nbytes + p.scales.nbytes
        return p.nbytes * (1 + 1 / 31) if getattr(p, "quant_state", None) is not None else p.nbytes

    found = [(name, p) for name, p in model.named_parameters() if ".layers." in name]
    return int(sum(size(p) for _, p in found) / model.config.num_hidden_layers)


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)


# The kinds of cases


def planned_length(case, args, limits):
    """The longest context that the planner allows for training (its rollout left aside), and what
    its longest_context says."""
    from grpo_nb.model.memory_bytes import MODELS, TARGETS
    from grpo_nb.model.memory_fit import Card, Step, fit, longest_context, with_context

    if args.cpu:
        return 128, 128
    card = Card("the cap", (limits.cap or limits.total) / GiB, (7, 5) if case.t4 else (9, 0))
    weights = "fp16" if case.weights == "bf16" and case.t4 else case.weights
    shape = MODELS[case.model]
    step = Step(
        shape,
        card.capability,
        weights,
        lora_r=8,
        lora_targets=("attention",) if shape.experts else TARGETS,
        num_generations=1,
        generation_batch_size=1,
        offload_activations=True,
        offload_hidden=True,
        offload_embedding=not shape.tied,
    )

    def fits(n):
        made = fit(with_context(step, n, prompt_length=1), card.room)
        return max(made.totals["head"], made.totals["layer"]) <= made.room

    low, high = 0, 2**15
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(64 * middle) else (low, middle - 1)
    return 64 * low, longest_context(step, card.room, prompt_length=1)


def one_step(model, case, args, limits, tokens, store, optimizer=None):
    "One step at a length: a row, or its error."
    batch = batch_of(random_ids(sizes_of(case.model, args.cpu), tokens, device_of(args)))

    def run():
        step = Step(model, offload=True, store=store, way=args.way, optimizer=optimizer)
        clear()
        try:
            start = time.perf_counter()
            loss = step(batch).item()
            synchronize()
            return dict(
                seconds=round(time.perf_counter() - start, 3),
                loss=round(loss, 4),
                host=round(store.host_bytes / GiB, 2),
                **limits.peaks(),
            )
        finally:
            step.close()

    result, error = attempt(run)
    return {"error": error} if error else result


def check_t4(model, case, args):
    "Look for bfloat16 in a short step."
    batch = batch_of(random_ids(sizes_of(case.model, args.cpu), 96, device_of(args)))
    step = Step(model, offload=False)

    def run():
        with NoBFloat16():
            return step(batch)

    _, error = attempt(run)
    step.close()
    tell(
        note="a short step without bfloat16, FlexAttention, flash and capability 8: "
        f"{error or 'yes'}",
        error=error,
    )


def search(start, try_length, *, tries, seconds_left, jump=None, first_that_fits=False):
    """From `start` (if that fits, then from `jump`) up or down by a tenth, in multiples of 64: the
    longest length that fitted, the shortest that did not, and the rows by length."""
    best, worst, rows, tokens = None, None, {}, max(64, start // 64 * 64)
    for _ in range(tries):
        if best and rows[best]["seconds"] * (tokens / best) ** 2 > seconds_left():
            break  # attention grows with the square
        rows[tokens] = row = try_length(tokens)
        if "error" not in row:
            best = tokens
        elif row["error"] == "out of memory":
            worst = tokens
        else:
            break
        if best and first_that_fits or seconds_left() < 0:
            break
        if worst:
            tokens = min(worst - 64, int(worst * 0.9) // 64 * 64)
        elif jump and jump > 1.1 * best and len(rows) == 1:
            tokens = jump // 64 * 64
        else:
            tokens = max(best + 64, int(best * 1.1) // 64 * 64)
        if tokens < 64 or best and worst and tokens < 1.05 * best:
            break
    return best, worst, rows


def targets_of(case):
    return ("attention",) if case.model == "gpt-oss-20b" else ("attention", "mlp")


def tile_of(model):
    "Tokens that the experts or the MLP were given at a time, last."
    from grpo_nb.model.fused_layers import slice_tokens_of

    return slice_tokens_of(model)


def longest(case, args, limits, deadline):
    from grpo_nb.model.memory_bytes import MODELS
    from grpo_nb.model.offload import HostStore

    planned, with_rollout = planned_length(case, args, limits)
    shape = MODELS[case.model]
    all_layers = 2 if args.cpu else shape.layers
    layers = min(args.layers or all_layers, all_layers)
    start = max(128, args.tokens or (planned if args.cpu else min(planned, case.start or planned)))
    tell(
        note=f"planned for training: {planned:,} tokens (with a rollout of that length: "
        f"{with_rollout:,}); the search begins at {start:,}, with {layers} of "
        f"{all_layers} layers"
    )
    store, model = HostStore(), load(case, args, 2 * max(start, planned), layers)
    if case.t4:
        check_t4(model, case, args)
    warm = one_step(model, case, args, limits, min(2048, start), store)  # compiles, loads kernels
    limits.tighten()
    tell(tokens=min(2048, start), layers=layers, warm=True, **warm)
    missing, ballast = (all_layers - layers) * layer_bytes(model), None
    if missing and not args.cpu:
        ballast, error = attempt(lambda: torch.empty(missing, dtype=torch.uint8, device="cuda"))
    if missing and not args.cpu and error:
        return tell(error=f"the weights alone do not fit: {error}")

    def try_length(tokens):
        row = one_step(model, case, args, limits, tokens, store)
        tell(tokens=tokens, layers=layers, **row)
        return row

    best, worst, rows = search(
        start,
        try_length,
        tries=2 if args.cpu else args.tries,
        seconds_left=lambda: deadline - time.time(),
        jump=planned,
        first_that_fits=not args.search,
    )
    if best is None:
        return tell(longest=None, error="no length fitted", failed_at=worst)
    if layers < all_layers and not args.confirm:
        return tell(longest=best, failed_at=worst, layers=layers, confirmed=False, **rows[best])
    if layers == all_layers:
        confirmed, full = (
            best,
            one_step(model, case, args, limits, best, store, optimizer_of(model)),
        )
    else:

        def expected(n):
            return rows[n]["seconds"] * all_layers / layers

        def on_host(n):
            return (all_layers + 3) * n * shape.hidden * (4 if case.t4 else 2)

        room = 0.85 * psutil.virtual_memory().available + store.host_bytes
        in_time = [
            n
            for n, row in rows.items()
            if "error" not in row and expected(n) < deadline - time.time() and on_host(n) < room
        ]
        tell(
            longest=best,
            failed_at=worst,
            layers=layers,
            confirmed=False,
            note=f"all {all_layers} layers would take about {expected(best):.0f} s, and "
            f"{deadline - time.time():.0f} s are left; on the host "
            f"{on_host(best) / GiB:.1f} GiB, and {room / GiB:.1f} are free",
            **rows[best],
        )
        if not in_time:
            return
        confirmed = max(in_time)
        del model, ballast
        clear()
        model = load(case, args, 2 * max(start, planned))
        for _ in range(3):
            full = one_step(model, case, args, limits, confirmed, store, optimizer_of(model))
            tell(tokens=confirmed, layers=all_layers, **full)
            if "error" not in full:
                break
            confirmed = int(confirmed * 0.95) // 64 * 64
    t4 = (
        dict(
            t4_estimate={
                "training": round(
                    sum(
                        t4_training(
                            shape,
                            case.weights,
                            [(1, 0, confirmed)],
                            tile=tile_of(model),
                            targets=targets_of(case),
                        ).values()
                    ),
                    1,
                )
            }
        )
        if case.t4
        else {}
    )
    tell(
        longest=confirmed if "error" not in full else None,
        failed_at=worst,
        layers=all_layers,
        confirmed="error" not in full,
        **t4,
        **full,
    )


def grpo(case, args, limits, deadline):
    from grpo_nb.model.memory_bytes import MODELS
    from grpo_nb.model.memory_fit import Card
    from grpo_nb.planning.plan import plan

    if args.cpu:
        case = Case(
            **{**vars(case), "prompts": 2, "completions": 2, "prompt": 6, "new": 4, "batch": 2}
        )
    sizes, context = sizes_of(case.model, args.cpu), case.prompt + case.new
    model = load(case, args, context)
    if case.t4:
        check_t4(model, case, args)
    limits.tighten()
    made = plan(
        case.model,
        Card("the cap", (limits.cap or 2**37) / GiB, (7, 5) if case.t4 else (9, 0)),
        weights=case.weights,
        lora_r=8,
        context=context,
        prompt_length=case.prompt,
        num_generations=case.completions,
        generation_batch_size=case.prompts * case.completions,
        per_device_train_batch_size=case.batch,
        share_prompt=True,
        offload_activations=True,
        offload_embedding=not MODELS[case.model].tied,
    )
    tell(
        note=f"planned: {made.peak / GiB:.2f} GiB at the {made.worst}, {made.rows} "
        "completions drawn together"
    )
    given = (
        {} if case.model == "gpt-oss-20b" else dict(max_batch_size=made.rows)
    )  # gpt-oss' decoder chooses by itself
    result = grpo_step(
        model,
        word_tokenizer(sizes),
        prompts_of(sizes, case.prompts, case.prompt),
        completions=case.completions,
        new_tokens=case.new,
        batch=case.batch,
        steps=1,
        offload_activations=True,
        **given,
    )
    t4 = {}
    if case.t4:
        shape, drawn = MODELS[case.model], case.prompts * case.completions
        pieces = [
            (case.prompts, 0, case.prompt),
            (drawn, case.prompt, case.new),
        ]  # a group's prompt is computed once
        trained = t4_training(
            shape,
            case.weights,
            pieces,
            batches=drawn // case.batch,
            tile=tile_of(model),
            targets=targets_of(case),
        )
        t4 = dict(
            t4_estimate={
                "training": round(sum(trained.values()), 1),
                "drawing": round(
                    t4_drawing(
                        shape,
                        case.weights,
                        case.prompts,
                        case.completions,
                        case.prompt,
                        case.new,
                        made.rows,
                    ),
                    1,
                ),
            }
        )
    tell(
        tokens=context,
        **result["steps"][-1],
        rows=made.rows,
        **t4,
        **limits.peaks(),
        **{name: result[name] for name in ("way", "log")},
    )


def group(case, args, limits, deadline):
    "A group's completions trained together, and one after the other."
    from grpo_nb.model.offload import HostStore
    from grpo_nb.training.micro_batches import split

    rows, prompt, length = (
        (2, 8, 32) if args.cpu else (case.completions, case.prompt, case.prompt + case.new)
    )
    model, store = load(case, args, length), HostStore()
    ids = random_ids(sizes_of(case.model, args.cpu), length, device_of(args), rows)
    ids[:, :prompt] = ids[:1, :prompt]
    batch = batch_of(ids, prompt, rows)
    for pieces in (rows, 1):

        def run():
            step = Step(model, offload=True, store=store)
            clear()
            try:
                start = time.perf_counter()
                for piece in split(batch, pieces):
                    step(piece)
                synchronize()
                return dict(
                    seconds=round(time.perf_counter() - start, 3),
                    host=round(store.host_bytes / GiB, 2),
                    **limits.peaks(),
                )
            finally:
                step.close()

        result, error = attempt(run)
        tell(
            tokens=length,
            completions=rows,
            pieces=pieces,
            **({"error": error} if error else result),
        )


def chunks(case, args, limits, deadline):
    "The head in more and fewer chunks."
    tokens, base = 64 if args.cpu else args.tokens or 8192, None
    model = load(case, args, tokens)
    batch = batch_of(random_ids(sizes_of(case.model, args.cpu), tokens, device_of(args)))
    for multiplier in (1, 4, None):

        def run():
            step = Step(
                model,
                offload=False,
                mini_batch=1 if multiplier else None,
                logit_chunk_multiplier=multiplier,
            )
            try:
                step(batch)
                clear()
                seconds = []
                for _ in range(3):
                    start = time.perf_counter()
                    step(batch)
                    synchronize()
                    seconds.append(time.perf_counter() - start)
                return dict(seconds=round(sorted(seconds)[1], 4), **limits.peaks())
            finally:
                step.close()

        result, error = attempt(run)
        if error:
            tell(tokens=tokens, chunks=multiplier or "chosen", error=error)
        else:
            base = base or result
            tell(
                tokens=tokens,
                chunks=multiplier or "chosen",
                saves_gib=None
                if result["peak"] is None
                else round(base["peak"] - result["peak"], 3),
                costs=round(result["seconds"] / base["seconds"], 3),
                **result,
            )


def batch_by_context(case, args, limits, deadline):
    "A batch of 4 sequences, memory by context; accumulation does not change the peak."
    lengths = [32, 64] if args.cpu else args.lengths
    unsloth = (
        unsloth_step(case, args, max(lengths)) if case.library == "unsloth" else None
    )  # before anything imports transformers
    from grpo_nb.model.offload import HostStore

    model, store = None if unsloth else load(case, args, max(lengths)), HostStore()
    if case.library == "transformers":
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    for tokens in lengths:
        if time.time() > deadline:
            break
        batch = batch_of(
            random_ids(sizes_of(case.model, args.cpu), tokens, device_of(args), 4), rows=4
        )

        def ours():
            step = Step(model, offload=True, store=store)
            try:
                return step(batch)
            finally:
                step.close()

        def theirs():
            ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            (
                -torch.log_softmax(logits.float(), -1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()
            ).backward()
            model.zero_grad()

        def run():
            clear()
            start = time.perf_counter()
            {
                "ours": ours,
                "transformers": theirs,
                "unsloth": lambda: unsloth(torch.cat([batch.prompt_ids, batch.completion_ids], 1)),
            }[case.library]()
            synchronize()
            return dict(seconds=round(time.perf_counter() - start, 3), **limits.peaks())

        result, error = attempt(run)
        tell(tokens=tokens, batch=4, **({"error": error} if error else result))
        if error:
            break


WORK = {
    "longest": longest,
    "grpo": grpo,
    "group": group,
    "chunks": chunks,
    "batch": batch_by_context,
}


def run_case(args, name):
    case = CASES[name]
    tell(about=versions("bitsandbytes", *(["unsloth"] if case.library == "unsloth" else [])))
    with Limits(case.cap, case.t4) as limits:
        WORK[case.kind](case, args, limits, args.deadline)


# The parent


def line_of(record):
    "A record in words."
    if "note" in record and "longest" not in record:
        return record["note"]
    parts = [
        f"{record[name]:,} {words}"
        for name, words in (("tokens", "tokens"), ("pieces", "pieces"), ("layers", "layers"))
        if record.get(name)
    ]
    if "chunks" in record:
        parts.append(f"chunks: {record['chunks']}")
    if record.get("warm"):
        parts.append("(to warm up)")
    if "longest" in record:
        how = (
            "" if record.get("confirmed") else " (with few layers, the others as a block of memory)"
        )
        parts.insert(
            0,
            f"LONGEST {shown(record['longest'], ',')}{how}, "
            f"failed at {shown(record.get('failed_at'), ',')}",
        )
    if "error" in record:
        return "  ".join([*parts, record["error"]])
    kept = {True: " kept", False: " BROKEN"}.get(record.get("kept"), "")
    parts += [
        f"{record['seconds']:.3f} s",
        f"{shown(record.get('peak'))} GiB, driver {shown(record.get('driver'))}{kept}",
    ]
    parts += [
        f"{name} {record[name]:.2f} s"
        for name in ("sample", "score", "train", "update")
        if name in record
    ]
    if record.get("host"):
        parts.append(f"host {record['host']:.2f} GiB")
    if "costs" in record:
        parts.append(f"saves {shown(record['saves_gib'], '.3f')} GiB, time x {record['costs']:.3f}")
    if "t4_estimate" in record:
        parts.append(
            "roofline estimate for a T4 (320 GB/s, 65 TFLOP/s float16), not measured: "
            + ", ".join(
                f"{part} {seconds:.1f} s" for part, seconds in record["t4_estimate"].items()
            )
        )
    if "log" in record:
        parts.append(f"{record['log']} {record['way']}")
    return "  ".join(parts) + ("  " + record["note"] if "note" in record else "")


def main():
    parser = arguments(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=None,
        choices=list(CASES),
        metavar="CASE",
        help=f"default: {' '.join(DEFAULT)}; --list says what there is",
    )
    parser.add_argument("--list", action="store_true", help="the cases")
    parser.add_argument("--tokens", type=int, help="begin the search at this length")
    parser.add_argument(
        "--no-search",
        dest="search",
        action="store_false",
        help="stop at the first length that fits",
    )
    parser.add_argument("--tries", type=int, default=5, help="steps of a search at most")
    parser.add_argument(
        "--layers", type=int, default=2, help="of the model during a search; 0: all"
    )
    parser.add_argument(
        "--no-confirm",
        dest="confirm",
        action="store_false",
        help="leave out the step with all layers",
    )
    parser.add_argument(
        "--way",
        default="trainer",
        choices=["trainer", "plain"],
        help="completion_logps, or the decoder and the chunked head",
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=BATCH_LENGTHS, help="of the batch cases"
    )
    parser.add_argument(
        "--case-minutes", type=float, default=4.0, help="for one case (default: %(default)s)"
    )
    parser.add_argument(
        "--no-expandable",
        dest="expandable",
        action="store_false",
        help="torch's allocator without expandable segments",
    )
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for name, case in CASES.items():
            print(
                f"{name:26s}{case.model} in {case.weights}: "
                f"{case.what}{f' (goal: {case.goal})' if case.goal else ''}"
            )
        return 0
    if args.child:
        return child(
            lambda: (
                write_for_unsloth(CASES[args.child.removeprefix("write ")], args)
                if args.child.startswith("write ")
                else run_case(args, args.child)
            )
        )
    device_of(args)
    results, about, end = {}, {}, time.time() + 60 * args.minutes
    for name in args.only or (list(CASES) if args.cpu else DEFAULT):
        case, left = CASES[name], min(end - time.time(), 60 * args.case_minutes)
        cap = f", cap {case.cap} GiB" if case.cap else ""
        goal = f" (goal: {case.goal})" if case.goal else ""
        print(f"{name}: {case.model} in {case.weights}, {case.what}{cap}{goal}", flush=True)
        rows = results[name] = []
        if left < 20:
            print("    left out: no time left", flush=True)
            continue
        if case.library == "unsloth" and not has_unsloth(args):
            rows.append(dict(error="Unsloth is not installed"))
            print(
                "    left out: Unsloth is not installed, nor is it in "
                f"{Path(args.sites) / 'site-unsloth'} (--sites DIR: another folder)",
                flush=True,
            )
            continue

        def hear(record):
            if "about" in record:
                if not about:
                    print(
                        "    "
                        + ", ".join(f"{key} {value}" for key, value in record["about"].items()),
                        flush=True,
                    )
                return about.update(record["about"])
            rows.append(record)
            print("    " + line_of(record), flush=True)

        environment = (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
            if args.expandable and not args.cpu
            else {}
        )
        sites = [
            Path(args.sites) / f"site-{site}"
            for site in (
                ("unsloth", "bitsandbytes")
                if case.library == "unsloth"
                else ("bitsandbytes", "unsloth")
                if case.weights == "nf4"
                else ()
            )
        ]
        failed = (
            run_child(__file__, f"write {name}", sys.argv[1:], limit_s=left, hear=hear)
            if case.library == "unsloth"
            else None
        )
        left = min(end - time.time(), 60 * args.case_minutes)
        failed = failed or run_child(
            __file__,
            name,
            [*sys.argv[1:], "--deadline", str(time.time() + left - 10)],
            sites=sites,
            limit_s=left + 20,
            hear=hear,
            environment=environment,
        )
        if failed:
            rows.append(dict(error=failed))
    for model, peer in (
        (model, peer) for model in ("oss", "qwen") for peer in ("transformers", "unsloth")
    ):
        mine, theirs = (
            _peaks(results.get(f"batch_{model}{tail}", [])) for tail in ("", f"_{peer}")
        )
        if mine and theirs:
            longest_, memory = max(theirs.items())
            reached = max((n for n, gib in mine.items() if gib <= memory), default=0)
            print(
                f"batch of 4, {model}: in {peer}'s {memory:.1f} GiB ({longest_:,} tokens) "
                f"ours has {reached:,} tokens of those measured: x {reached / longest_:.1f}",
                flush=True,
            )
    print(json.dumps(dict(about=about, way=args.way, cases=results)))
    return 0 if any("seconds" in row for rows in results.values() for row in rows) else 1


def _peaks(rows):
    return {row["tokens"]: row["peak"] for row in rows if row.get("peak")}


if __name__ == "__main__":
    sys.exit(main())
