"""Tokens a second while decoding with gpt-oss-20b: ours beside transformers, Unsloth and vLLM, with
the bytes that a step must read as the floor.

    python benchmarks/decode.py
        every library that is installed, one after the other on one GPU: under nine minutes on an
        H200
    python benchmarks/decode.py --ours --transformers
        only these
    python benchmarks/decode.py --ours-mxfp4 --transformers --vllm --cases 1x128 8x128 64x128
        how many times as fast as plain generation, theirs and ours in one call
    python benchmarks/decode.py --unsloth-site DIR --vllm-site DIR
        libraries that stand in folders of their own (pip install --target DIR)
    python benchmarks/decode.py --adapters attention
        ours and vLLM with LoRA adapters of rank 8 on attention, or on attention and experts (all);
        with --ours-mxfp4 --vllm in MXFP4 alone
    python benchmarks/decode.py --cpu
        a tiny model on the CPU: ours beside transformers' generate, in one process
    python benchmarks/decode.py --small --device cpu
        the whole script with a tiny model and few tokens, to try it out

All run the same random model of full size (24 layers, 32 experts, 201,088 tokens). Its experts hold
numbers that MXFP4 can write, so bf16 and MXFP4 are the same weights; its router spreads tokens over
the experts, and how many are really used in a layer is counted and printed. The prompts are random
and all different, tokens are drawn at temperature 1 from the whole vocabulary, and nothing stops
early.

Speed is (tokens between a short and a long run) / (difference of their times), so that reading the
prompt drops out: 8 and 264 new tokens, the second repetition; for transformers and Unsloth 8 and
72, after one short run, and both as their generate comes (no compilation asked for). Each library
has a process of its own. Its checkpoint, if it needs one, is written to a temporary folder (39 GiB
for Unsloth, 13 GiB for vLLM) and removed. "peak" is the most that torch had allocated during a
case, reading the prompts included; vLLM reserves a share of the card ahead, and that is what its
rows say. The floor of a step is attention weights, head, the experts really used and the keys and
values so far, in the library's format, over the speed of a copy within this card's memory (bytes
read and written). Adapters are random and the same for all; vLLM reads them from a folder, ours
where they stand. The floor leaves them out.
"""

import argparse
import functools
import gc
import importlib.machinery
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

FULL = dict(
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    num_local_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
    pad_token_id=199_999,
    eos_token_id=200_002,
)
SMALL = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=8,
    pad_token_id=510,
    eos_token_id=511,
)
CASES = [
    (1, 128),
    (8, 128),
    (64, 128),
    (256, 128),
    (1, 8192),
    (8, 8192),
]  # sequences, tokens of each prompt
SMALL_CASES = [(1, 16), (4, 16)]
SECONDS = {
    "ours": 40,
    "ours_mxfp4": 40,
    "transformers": 45,
    "unsloth": 110,
    "vllm": 200,
}  # what is kept free for each while those before it run
FORMATS = {
    "ours": "bf16",
    "ours_mxfp4": "MXFP4",
    "transformers": "bf16",
    "unsloth": "bf16",
    "vllm": "MXFP4",
}
SETTINGS = {  # how each library is told: one process, no network, no reports home
    "unsloth": {"UNSLOTH_DISABLE_STATISTICS": "1"},
    "vllm": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    },
}
RANK = 8  # of adapters
SHORT = 8  # new tokens of the short run
LONG_READING = 2**15  # prompt tokens of a batch from which the median of three pairs counts
MARK = "@decode "  # a line of a child's output that is for its parent


# The model


def expert_bytes(sizes, kind):
    "Bytes of one expert's matrices: 2 a number, or 4 bits and an 8-bit scale for every 32."
    numbers = 3 * sizes["hidden_size"] * sizes["intermediate_size"]
    return numbers * 2 if kind == "bf16" else numbers * 17 // 32


def step_bytes(sizes, kind, sequences, context, experts):
    """What one decode step has to read: attention, head, the experts used in each layer, keys and
    values of so many tokens a sequence."""
    layers, width = sizes["num_hidden_layers"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * width, sizes["num_key_value_heads"] * width
    attention = layers * 2 * sizes["hidden_size"] * (queries + keys) * 2  # q and o, k and v
    head = sizes["vocab_size"] * sizes["hidden_size"] * 2
    sliding = (layers + 1) // 2  # sliding, full, sliding, ...
    held = sliding * min(context, sizes["sliding_window"]) + (layers - sliding) * context
    return (
        attention
        + head
        + layers * experts * expert_bytes(sizes, kind)
        + sequences * held * 2 * keys * 2
    )


def released_parts(sizes, device):
    """The random model in the layout of the released files: a dictionary of tensors for each layer,
    then one for the rest. The same on every call."""
    generator = torch.Generator(device).manual_seed(0)
    H, inner, E, width = (
        sizes[name]
        for name in ("hidden_size", "intermediate_size", "num_local_experts", "head_dim")
    )
    heads, queries, keys = (
        sizes["num_attention_heads"],
        sizes["num_attention_heads"] * width,
        sizes["num_key_value_heads"] * width,
    )

    def full(value, *shape):
        return torch.full(shape, value, device=device, dtype=torch.bfloat16)

    def normal(std, *shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator).mul_(
            std
        )

    for layer in range(sizes["num_hidden_layers"]):
        part = {
            "input_layernorm.weight": full(1, H),
            "post_attention_layernorm.weight": full(1, H),
            "self_attn.sinks": normal(1, heads),
        }
        for name, rows, columns in (
            ("q_proj", queries, H),
            ("k_proj", keys, H),
            ("v_proj", keys, H),
            ("o_proj", H, queries),
        ):
            part[f"self_attn.{name}.weight"], part[f"self_attn.{name}.bias"] = (
                normal(0.02, rows, columns),
                full(0, rows),
            )
        part["mlp.router.weight"], part["mlp.router.bias"] = normal(0.05, E, H), full(0, E)
        for name, rows, columns in (("gate_up_proj", 2 * inner, H), ("down_proj", H, inner)):
            part[f"mlp.experts.{name}_blocks"] = torch.randint(
                256,
                (E, rows, columns // 32, 16),
                device=device,
                dtype=torch.uint8,
                generator=generator,
            )
            part[f"mlp.experts.{name}_scales"] = torch.full(
                (E, rows, columns // 32), 120, device=device, dtype=torch.uint8
            )  # 2**-7: a std of 0.023
            part[f"mlp.experts.{name}_bias"] = full(0, E, rows)
        yield {f"model.layers.{layer}.{name}": tensor for name, tensor in part.items()}
    V = sizes["vocab_size"]
    yield {
        "model.embed_tokens.weight": normal(1, V, H),
        "model.norm.weight": full(1, H),
        "lm_head.weight": normal(0.02, V, H),
    }


def dequantize(blocks, scales):
    """MXFP4 (..., rows, G, 16) and (..., rows, G), uint8, as bf16 (..., rows, 32 G); the low half
    of a byte comes first."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values, byte = (
        torch.cat([sizes, -sizes]).to(blocks.device, torch.bfloat16),
        torch.arange(256, device=blocks.device),
    )
    pairs = torch.stack([values[byte % 16], values[byte // 16]], -1)  # (256, 2)
    factor = torch.exp2(scales.float() - 127).bfloat16()[..., None]  # a power of two: exact
    return (pairs[blocks.int()].flatten(-2) * factor).flatten(-2)


def make_config(sizes):
    """transformers' configuration: eager attention is the only one of its own that knows sinks
    without compiling, grouped_mm its fastest experts that fit."""
    from transformers import GptOssConfig

    return GptOssConfig(
        **sizes,
        architectures=["GptOssForCausalLM"],
        dtype="bfloat16",
        attn_implementation="eager",
        experts_implementation="grouped_mm",
    )


@torch.no_grad()
def build(sizes, device):
    "The random model as transformers' GptOssForCausalLM, in bf16, made on the device."
    from transformers import GptOssForCausalLM

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = GptOssForCausalLM(make_config(sizes))
    finally:
        torch.set_default_dtype(default)
    empty = dict(model.named_parameters())
    for part in released_parts(sizes, device):
        for name, tensor in part.items():
            if name.endswith("_scales"):
                continue
            if name.endswith("_blocks"):
                name = name.removesuffix("_blocks")
                tensor = dequantize(tensor, part[f"{name}_scales"]).transpose(
                    -1, -2
                )  # transformers keeps (E, in, out)
            empty.pop(name).copy_(tensor)
    if empty:
        raise RuntimeError(f"these weights were left as they were: {', '.join(empty)}")
    model.generation_config.eos_token_id = None
    return model.eval()


def adapt(model, targets):
    "The model with random adapters on these targets, the same on every call."
    from grpo_nb.model.adapters import add_adapters, resolve_targets

    model = add_adapters(model, RANK, resolve_targets(model, targets))
    generator = torch.Generator(model.device).manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zeros until a first step of training
            p.data.normal_(0, 0.02, generator=generator)
    return model.eval()


def write(folder, sizes, parts, config, gigabytes):
    """Write a checkpoint of a file a layer and one for the rest, several at a time; `config` is
    what config.json holds."""
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < gigabytes + 1:
        raise OSError(
            f"the checkpoint takes {gigabytes:.0f} GB and {folder.parent} has {free:.0f} GB "
            "free: set TMPDIR to a folder with more"
        )
    from safetensors.torch import save_file

    folder.mkdir()

    def save(number, part):
        name = f"model-{number:05d}-of-{sizes['num_hidden_layers'] + 1:05d}.safetensors"
        save_file(
            {key: tensor.cpu() for key, tensor in part.items()},
            folder / name,
            metadata={"format": "pt"},
        )
        return {key: name for key in part}

    with ThreadPoolExecutor(4) as pool:
        files = list(pool.map(save, itertools.count(1), parts))
    weight_map = {key: name for names in files for key, name in names.items()}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(config))


def write_mxfp4(folder, sizes, device):
    "The released layout: experts in MXFP4, everything else in bf16."
    plain = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    config = {
        **make_config(sizes).to_dict(),
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": plain},
    }
    write(
        folder, sizes, released_parts(sizes, device), config, checkpoint_bytes(sizes, "MXFP4") / 1e9
    )


def write_bf16(folder, sizes, model):
    "The model and a tokenizer with one word for each token."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    parts = {}
    for name, tensor in model.state_dict().items():
        parts.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else "rest", {})[
            name
        ] = tensor
    write(
        folder,
        sizes,
        parts.values(),
        model.config.to_diff_dict(),
        checkpoint_bytes(sizes, "bf16") / 1e9,
    )
    model.generation_config.save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({f"t{i}": i for i in range(sizes["vocab_size"])}, unk_token="t0")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(
        pad_token=f"t{sizes['pad_token_id']}", eos_token=f"t{sizes['eos_token_id']}", unk_token="t0"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def checkpoint_bytes(sizes, kind):
    "Near enough: everything but norms and biases."
    return (
        step_bytes(sizes, kind, 0, 0, sizes["num_local_experts"])
        + sizes["vocab_size"] * sizes["hidden_size"] * 2
    )


# Measuring


def random_prompts(sizes, sequences, length):
    "Distinct prompts as lists of token ids, without special tokens."
    generator = torch.Generator().manual_seed(sequences)
    return torch.randint(sizes["pad_token_id"], (sequences, length), generator=generator).tolist()


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def experts_used(model, prompts):
    """How many experts of a layer the last tokens of the prompts go to in one step, mean over the
    layers."""
    counts = []

    def count(router, inputs):
        rows = inputs[0].reshape(len(prompts), -1, inputs[0].shape[-1])[
            :, -1
        ]  # the last token of each prompt
        logits = torch.nn.functional.linear(rows, router.weight, router.bias)
        counts.append(logits.topk(model.config.num_experts_per_tok).indices.unique().numel())

    hooks = [
        module.register_forward_pre_hook(count)
        for name, module in model.named_modules()
        if name.endswith("mlp.router")
    ]
    try:
        model(
            input_ids=torch.tensor(prompts, device=model.device), use_cache=False, logits_to_keep=1
        )
    finally:
        for hook in hooks:
            hook.remove()
    return statistics.fmean(counts)


def copy_speed(device):
    "Bytes read and written a second by a large copy within the device's memory, median of ten."
    source = torch.ones(2**31 if device == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(12):
        synchronize()
        start = time.perf_counter()
        target.copy_(source)
        synchronize()
        times.append(time.perf_counter() - start)
    return 2 * source.numel() / statistics.median(times[2:])


def decode_speed(generate, sizes, sequences, length, short, new_tokens, warm_up):
    """Tokens a second of each sequence: `new_tokens` over what a long run takes longer than a short
    one, which reads the same prompts. Where that reading is most of the time (8 prompts of 8,192
    tokens), its noise is too: then the median of three pairs."""
    prompts = random_prompts(sizes, sequences, length)

    def seconds(n):
        synchronize()
        start = time.perf_counter()
        generate(prompts, n)
        synchronize()
        return time.perf_counter() - start

    for n in warm_up:
        seconds(n)
    pairs = 3 if sequences * length > LONG_READING else 1
    times = [(seconds(short), seconds(short + new_tokens)) for _ in range(pairs)]
    difference = statistics.median(long - short for short, long in times)
    if difference <= 0:
        raise RuntimeError(
            f"short and long runs took {times} s: the times are too noisy for a speed"
        )
    return new_tokens / difference


# The libraries: each is started in a process of its own


@dataclass
class Library:
    "What a started library can do."

    name: str
    version: str
    generate: Callable  # prompts (lists of token ids), new tokens
    new_tokens: int = 256  # between the short run and the long one
    warm_up: tuple[
        int, ...
    ] = ()  # new tokens of runs that are not counted; () is a short and a long one
    most: int = 256  # sequences
    reserved: float | None = None  # GiB taken ahead; None if memory is allocated as it is needed
    note: str = ""


def start_ours(args, sizes, packed=False):
    from grpo_nb.rollout.engine import RolloutEngine
    from grpo_nb.rollout.sampling import SamplingParams

    model = build(sizes, args.device)
    if packed:
        from grpo_nb.model.packed import pack_experts

        pack_experts(model)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    probe(args, sizes, model)
    if args.adapters != "none":
        model = adapt(model, args.adapters)
    engine = RolloutEngine(model, None)

    def generate(prompts, n):
        rollout = engine.generate(
            prompts,
            SamplingParams(max_tokens=n, stop_token_ids=(), temperature=1.0),
            progress=False,
        )
        if rollout.mask.shape != (len(prompts), n):
            raise RuntimeError(
                f"{len(prompts)} x {n} tokens were asked for, and {tuple(rollout.mask.shape)} came"
            )

    return Library("ours_mxfp4" if packed else "ours", "", generate)


def hugging_face(model, args):
    """generate(prompts, n) through transformers' interface; long prompts are read in pieces, or
    eager attention would need their square."""

    def generate(prompts, n):
        ids = torch.tensor(prompts, device=args.device)
        pieces = dict(prefill_chunk_size=512) if ids.shape[1] > 2048 else {}
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                **pieces,
            )
        if out.shape[1] != ids.shape[1] + n:
            raise RuntimeError(
                f"{n} new tokens were asked for, and {out.shape[1] - ids.shape[1]} came"
            )

    return generate


SLOW = dict(new_tokens=64, warm_up=(SHORT,), most=8)  # libraries that take 30 to 50 ms a step


def start_transformers(args, sizes):
    model = build(sizes, args.device)
    probe(args, sizes, model)
    return Library(
        "transformers",
        importlib.metadata.version("transformers"),
        hugging_face(model, args),
        note="grouped_mm experts",
        **SLOW,
    ), model


def start_unsloth(args, sizes):
    from unsloth import FastLanguageModel  # before transformers, as it asks

    model, _ = FastLanguageModel.from_pretrained(
        str(args.folder / "bf16"), max_seq_length=16_384, dtype=torch.bfloat16, load_in_4bit=False
    )
    FastLanguageModel.for_inference(model)
    model.generation_config.eos_token_id = None
    return Library(
        "unsloth", importlib.metadata.version("unsloth"), hugging_face(model, args), **SLOW
    )


def start_vllm(args, sizes):
    from vllm import LLM, SamplingParams

    adapter, settings = None, {}
    if args.adapters != "none":
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(args.adapters, 1, str(args.folder / "adapter"))
        settings = dict(enable_lora=True, max_lora_rank=RANK, max_loras=1)
    llm = LLM(
        model=str(args.folder / "mxfp4"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=9216,
        max_num_seqs=256,
        gpu_memory_utilization=0.7,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": [1, 8, 64, 256]},
        seed=0,
        **settings,
    )
    free, total = torch.cuda.mem_get_info()

    def generate(prompts, n):
        params = SamplingParams(
            max_tokens=n, min_tokens=n, ignore_eos=True, temperature=1.0, detokenize=False
        )
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            params,
            use_tqdm=False,
            lora_request=adapter,
        )
        if {len(o.outputs[0].token_ids) for o in outputs} != {n}:
            raise RuntimeError(f"{n} new tokens were asked for, and other numbers came")

    return Library(
        "vllm",
        importlib.metadata.version("vllm"),
        generate,
        reserved=(total - free) / 2**30,
        note="prefix cache off",
    )


def tell(**record):
    "A record for the parent."
    print(MARK + json.dumps(record), flush=True)


def error_line(error):
    "An exception in one line."
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]


def probe(args, sizes, model):
    "Tell about the card and the routing, once."
    if not args.probe:
        return
    import transformers

    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    try:
        versions["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        pass
    tell(
        card=torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        versions=versions,
        copy=copy_speed(args.device),
    )
    counts = {
        n: experts_used(model, random_prompts(sizes, n, min(length for _, length in args.cases)))
        for n in sorted({n for n, _ in args.cases})
    }
    tell(experts=counts)


def run_cases(library, args, sizes):
    tell(library=library.name, version=library.version, note=library.note)
    cuda = args.device == "cuda"
    new_tokens, short = (6, 2) if args.small else (library.new_tokens, SHORT)
    for sequences, length in args.cases:
        record = dict(library=library.name, sequences=sequences, prompt=length, new=new_tokens)
        if sequences > library.most:
            tell(**record, error=f"left out: more than {library.most} sequences take minutes")
            continue
        if time.time() > args.deadline:
            tell(**record, error="left out: no time left")
            continue
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            warm_up = [
                short if n == SHORT else n for n in library.warm_up or (short, short + new_tokens)
            ]
            speed = decode_speed(
                library.generate, sizes, sequences, length, short, new_tokens, warm_up
            )
            peak = library.reserved or (torch.cuda.max_memory_allocated() / 2**30 if cuda else None)
            tell(**record, speed=speed, peak=peak, reserved=library.reserved is not None)
        except Exception as error:
            tell(**record, error=error_line(error))


def child(name, args, sizes):
    "One process of the benchmark."
    try:
        if name == "write mxfp4":
            write_mxfp4(args.folder / "mxfp4", sizes, args.device)
        elif name == "write bf16":
            write_bf16(args.folder / "bf16", sizes, build(sizes, args.device))
        elif name == "write adapter":
            from grpo_nb.model.export import save_adapter

            model = adapt(build(sizes, args.device), args.adapters)
            save_adapter(model, args.folder / "adapter", overwrite=True)
        elif name == "probe":
            probe(args, sizes, build(sizes, args.device))
        elif name == "transformers":
            library, model = start_transformers(args, sizes)
            run_cases(library, args, sizes)
            if args.checkpoint:
                write_bf16(
                    args.folder / "bf16", sizes, model
                )  # for Unsloth: the model is here already
        else:
            run_cases(
                dict(
                    ours=start_ours,
                    ours_mxfp4=functools.partial(start_ours, packed=True),
                    unsloth=start_unsloth,
                    vllm=start_vllm,
                )[name](args, sizes),
                args,
                sizes,
            )
        tell(done=True)
    except (Exception, SystemExit) as error:
        import traceback

        traceback.print_exc()
        tell(done=True, failed=error_line(error))


# The parent


class Bench:
    "Starts the children, keeps what they tell, prints the table."

    def __init__(self, args, sizes):
        self.args, self.sizes, self.began = args, sizes, time.time()
        self.end = self.began + 60 * args.minutes
        self.card, self.versions, self.copy, self.experts = None, {}, None, {}
        self.rows, self.notes, self.failed = {}, {}, {}
        self.folder = Path(tempfile.mkdtemp(prefix="decode-"))
        self.logs = Path(args.logs or self.folder / "logs").absolute()
        self.logs.mkdir(parents=True, exist_ok=True)

    def say(self, text):
        print(f"[{time.time() - self.began:4.0f} s] {text}", flush=True)

    def environment(self, name):
        "The child's: the project's folder, the library's own, and what the library reads there."
        site = getattr(self.args, f"{name}_site", None)
        paths = [
            site and os.path.abspath(site),
            str(Path(__file__).resolve().parents[1]),
            *os.environ.get("PYTHONPATH", "").split(os.pathsep),
        ]
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            **SETTINGS.get(name, {}),
            "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in paths if p),
        }

    def installed(self, name):
        package = "grpo_nb" if name.startswith("ours") else name
        return (
            importlib.machinery.PathFinder.find_spec(
                package, self.environment(name)["PYTHONPATH"].split(os.pathsep) + sys.path
            )
            is not None
        )

    def hear(self, name, record):
        "One record of a child."
        if "card" in record:
            self.card, self.versions, self.copy = record["card"], record["versions"], record["copy"]
            self.say(
                f"{self.card}; copies {self.copy / 1e12:.2f} TB/s; "
                + ", ".join(f"{k} {v}" for k, v in self.versions.items())
            )
        elif "experts" in record:
            self.experts = {int(n): count for n, count in record["experts"].items()}
            self.say(
                f"experts used in a layer, of {self.sizes['num_local_experts']}: "
                + ", ".join(f"{count:.1f} by {n} tokens" for n, count in self.experts.items())
            )
        elif "sequences" in record:
            self.rows[name, record["sequences"], record["prompt"]] = record
            what = record.get("error")
            if not what:
                what = (
                    f"{record['speed']:.1f} tok/s a sequence, "
                    f"{record['speed'] * record['sequences']:,.0f} in all"
                )
                if record["peak"]:
                    what += f", {record['peak']:.1f} GiB"
            self.say(f"{name}, {record['sequences']} x {record['prompt']:,}: {what}")
        elif "version" in record:
            self.notes[name] = " ".join(
                filter(None, [record["version"], record["note"] and f"({record['note']})"])
            )
            self.say(f"{name} {self.notes[name]} has started")
        elif record.get("failed"):
            self.failed[name] = record["failed"]
            self.say(f"{name} failed: {record['failed']}")

    def run(self, name, deadline, *flags, grace=20):
        "Run a child to its end, or to so many seconds past its deadline; whether it ended well."
        self.say(f"{name} ...")
        args, log = self.args, self.logs / f"{name.replace(' ', '-')}.log"
        command = [
            sys.executable,
            "-u",
            str(Path(__file__).resolve()),
            "--child",
            name,
            "--folder",
            str(self.folder),
            "--deadline",
            str(deadline),
        ]
        command += ["--device", args.device, "--adapters", args.adapters, *flags]
        command += ["--cases", *(f"{sequences}x{prompt}" for sequences, prompt in args.cases)]
        if args.small:
            command.append("--small")
        if self.card is None:
            command.append("--probe")
        streams = dict(
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        process = subprocess.Popen(
            command, env=self.environment(name), cwd=self.folder, start_new_session=True, **streams
        )

        def stop():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

        clock, finished, late = (
            threading.Timer(max(1, deadline + grace - time.time()), stop),
            False,
            False,
        )
        clock.start()
        try:
            with open(log, "w") as file:
                for line in process.stdout:
                    if not line.startswith(MARK):
                        file.write(line)
                        file.flush()
                        continue
                    record = json.loads(line.removeprefix(MARK))
                    self.hear(name, record)
                    if record.get("done"):
                        finished = True
                        break
        finally:
            clock.cancel()
            late = time.time() > deadline + grace - 1
            stop()  # and whatever it had started
            process.wait()
            process.stdout.close()
        if not finished:
            self.hear(
                name,
                dict(
                    done=True,
                    failed="stopped: no time left" if late else last_error(log.read_text()),
                ),
            )
        return name not in self.failed

    def work(self, chosen):
        "Every library in its turn."
        missing = [name for name in chosen if not self.installed(name)]
        for name in missing:
            self.hear(name, dict(failed="not installed"))
        chosen = [name for name in chosen if name not in missing]
        if chosen and not {"ours", "ours_mxfp4", "transformers"} & set(chosen):
            self.run("probe", self.end)
        wrote = {"bf16": False, "mxfp4": False}
        for place, name in enumerate(chosen):
            deadline = self.end - sum(SECONDS[later] for later in chosen[place + 1 :]) * min(
                1, self.args.minutes / 8.5
            )
            if name == "transformers" and "unsloth" in chosen:
                wrote["bf16"] = self.run(name, deadline, "--checkpoint", grace=60)
                continue
            kind = {"unsloth": "bf16", "vllm": "mxfp4"}.get(name)
            if kind and not wrote[kind]:
                shutil.rmtree(
                    self.folder / kind, ignore_errors=True
                )  # what a failed child has left
                wrote[kind] = self.run(f"write {kind}", deadline)
            failed = [f"write {kind}"] if kind and not wrote[kind] else []
            if name == "vllm" and self.args.adapters != "none" and not failed:
                failed = [] if self.run("write adapter", deadline) else ["write adapter"]
            if failed:
                self.hear(name, dict(failed=f"no checkpoint: {self.failed[failed[0]]}"))
            else:
                self.run(name, deadline)
            for written in (kind, "adapter") if kind else ():
                shutil.rmtree(self.folder / written, ignore_errors=True)

    def share_of_floor(self, name, row):
        """Measured speed over that of reading the step's bytes at the speed of a copy; None without
        a count of the experts."""
        n = row["sequences"]
        if self.copy is None or n not in self.experts:
            return None
        context = row["prompt"] + SHORT + row["new"] // 2
        return (
            row["speed"]
            * step_bytes(self.sizes, FORMATS[name], n, context, self.experts[n])
            / self.copy
        )

    def table(self, chosen):
        "The results as a table in markdown."

        def cell(value, form):
            return "" if value is None else format(value, form)

        heads = (
            "library | format | sequences | prompt | tok/s a sequence | tok/s in all | peak "
            "GiB | experts a layer | share of the floor | ours / this"
        )
        lines = [f"| {heads} |", "|---" * (heads.count("|") + 1) + "|"]
        for name in chosen:
            rows = {key[1:]: row for key, row in self.rows.items() if key[0] == name}
            for case in self.args.cases:
                same = (
                    "ours_mxfp4"
                    if FORMATS[name] == "MXFP4" and ("ours_mxfp4", *case) in self.rows
                    else "ours"
                )  # like against like, if both were run
                row, mine = rows.get(case), self.rows.get((same, *case), {}).get("speed")
                if row is None:
                    continue
                start = f"| {name} | {FORMATS[name]} | {case[0]} | {case[1]:,} | "
                if "error" in row:
                    lines.append(start + row["error"].replace("|", "/") + " | | | | | |")
                    continue
                speed, ratio = (
                    row["speed"],
                    mine / row["speed"] if mine and not name.startswith("ours") else None,
                )
                peak, used, share = (
                    cell(row["peak"], ".1f") + (" reserved" if row["reserved"] else ""),
                    self.experts.get(case[0]),
                    self.share_of_floor(name, row),
                )
                lines.append(
                    start
                    + (
                        f"{speed:.1f} | {speed * case[0]:,.0f} | {peak} | "
                        f"{cell(used, '.1f')} | {cell(share, '.0%')} | {cell(ratio, '.2f')} |"
                    )
                )
            if name in self.failed:
                lines.append(
                    f"| {name} | {FORMATS[name]} | | | {self.failed[name].replace('|', '/')} "
                    "| | | | | |"
                )
        return "\n".join(lines)

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)


def last_error(log):
    "The last line of a log that names an error, or its last line."
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return ((named or lines or ["it ended without a word"])[-1])[:200]


# The CPU


def cpu(cases=((64, 8, 8), (16, 1, 64)), repeats=5, device="cpu"):
    """Ours beside transformers' generate with a tiny model in this process; cases are (prompts,
    completions of each, tokens). The ratios."""
    import transformers

    from grpo_nb.model.tiny import tiny_gpt_oss
    from grpo_nb.rollout.engine import RolloutEngine
    from grpo_nb.rollout.rollout import pad_left
    from grpo_nb.rollout.sampling import SamplingParams

    model, tokenizer = tiny_gpt_oss()
    model, pad = model.to(device), tokenizer.pad_token_id
    model.generation_config.eos_token_id = None  # nothing stops
    engine, own, ratios = RolloutEngine(model, tokenizer), model.config._experts_implementation, []
    count = sum(p.numel() for p in model.parameters())
    print(
        f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {count:,} parameters",
        flush=True,
    )

    def ours(prompts, n, tokens):
        out = engine.generate(
            prompts, SamplingParams(max_tokens=tokens, n=n, stop_token_ids=()), progress=False
        ).completion_ids
        return out.numel()

    def theirs(experts):
        def generate(prompts, n, tokens):
            ids, mask = pad_left(prompts, pad, device)
            model.set_experts_implementation(experts)
            try:
                with torch.inference_mode():
                    out = model.generate(
                        input_ids=ids,
                        attention_mask=mask.long(),
                        num_return_sequences=n,
                        max_new_tokens=tokens,
                        min_new_tokens=tokens,
                        do_sample=True,
                        temperature=1.0,
                        top_k=0,
                        top_p=1.0,
                        pad_token_id=pad,
                    )
            finally:
                model.set_experts_implementation(own)
            return out[:, ids.shape[1] :].numel()

        return generate

    ways = {
        "ours": ours,
        **{
            f"transformers, {experts} experts": theirs(experts)
            for experts in ("eager", "grouped_mm")
        },
    }
    for prompts, n, tokens in cases:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, 13, (prompts,), generator=generator).tolist()
        texts = [
            torch.randint(7, len(tokenizer), (length,), generator=generator).tolist()
            for length in lengths
        ]  # ids below 7 are special
        seconds = {name: [] for name in ways}
        for repeat in range(repeats + 1):  # in turns, the first not counted
            for name, generate in ways.items():
                start = time.perf_counter()
                came = generate(texts, n, tokens)
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
                if came != prompts * n * tokens:
                    raise RuntimeError(
                        f"{name}: {prompts * n * tokens} tokens were asked for, and {came} came"
                    )
        median = {name: statistics.median(times) for name, times in seconds.items()}
        best = min((name for name in median if name != "ours"), key=median.get)
        ratios.append(median[best] / median["ours"])
        print(
            f"{prompts} prompts x {n} of {tokens} tokens: "
            + "; ".join(
                f"{name} {prompts * n * tokens / time_:,.0f} tok/s"
                for name, time_ in median.items()
            ),
            flush=True,
        )
        print(f"ours / {best}: x {ratios[-1]:.2f}", flush=True)
    return ratios


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in SECONDS:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            action="store_true",
            help=f"measure {name}; without any such option, all",
        )
    parser.add_argument(
        "--unsloth-site",
        metavar="DIR",
        help="a folder with Unsloth and what it needs, for its process alone",
    )
    parser.add_argument("--vllm-site", metavar="DIR", help="the same for vLLM")
    parser.add_argument(
        "--adapters",
        default="none",
        choices=["none", "attention", "all"],
        help=f"with LoRA adapters of rank {RANK}, ours and vLLM (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.5,
        help="start no case after this; vLLM keeps its share (default: %(default)s)",
    )
    parser.add_argument("--logs", metavar="DIR", help="keep each library's own output here")
    parser.add_argument("--small", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="a tiny model on the CPU, ours beside transformers, in one process",
    )
    parser.add_argument(
        "--cases", nargs="+", metavar="NxT", help="sequences x tokens of each prompt, as in 8x128"
    )
    for name in ("--child", "--folder", "--deadline"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--probe", "--checkpoint"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu:
        return cpu()

    sizes, cases = (SMALL, SMALL_CASES) if args.small else (FULL, CASES)
    args.cases = [tuple(map(int, case.split("x"))) for case in args.cases or ()] or cases
    if args.child:
        args.folder, args.deadline = Path(args.folder), float(args.deadline)
        return child(args.child, args, sizes)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device is here: use --cpu, or --small --device cpu to try the script"
        )
    able = list(SECONDS) if args.adapters == "none" else ["ours", "ours_mxfp4", "vllm"]
    chosen = [name for name in SECONDS if getattr(args, name)] or able
    if unable := set(chosen) - set(able):
        raise SystemExit(
            f"{' and '.join(sorted(unable))} cannot be measured with --adapters {args.adapters}: "
            "ours and vLLM can; leave the option out for all libraries"
        )
    bench = Bench(args, sizes)
    try:
        bench.work(chosen)
        print(
            f"\n{bench.card}; a copy moves {(bench.copy or 0) / 1e12:.2f} TB/s; "
            + ", ".join(f"{k} {v}" for k, v in bench.versions.items())
        )
        if args.adapters != "none":
            targets = "attention and experts" if args.adapters == "all" else args.adapters
            print(f"adapters of rank {RANK} on {targets}")
        for name, note in bench.notes.items():
            if note:
                print(f"{name} {note}")
        print(bench.table(chosen), flush=True)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
