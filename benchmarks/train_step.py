"""A training step of gpt-oss-20b (random weights, full size) by length: ours in bf16 and on MXFP4
experts, transformers and Unsloth, each in a process of its own.

    python benchmarks/train_step.py
        ours, then transformers: about six minutes on an H200
    python benchmarks/train_step.py --only bf16 --lengths 8192
        one of ours, one length: under a minute
    python benchmarks/train_step.py --only unsloth --sites DIR
        Unsloth from DIR/site-unsloth; writes a random checkpoint of 39 GiB first (45 s)
    python benchmarks/train_step.py --profile --only mxfp4
        the kernels of one of our steps at 8,192 tokens, by time
    python benchmarks/train_step.py --record --only bf16 mxfp4 dense --lengths 2048
        short steps with and without recorded layers, in one process each: seconds, memory, and
        whether the gradients are the same (dense: the shape of Qwen2.5-1.5B); about 80 s
    python benchmarks/train_step.py --records FILE
        the peaks in the form of tests/data/memory_h200.json
    python benchmarks/train_step.py --cpu
        the same steps with a tiny model, to try it out

A step is forward and backward through one sequence, every layer computed again in backward, LoRA
r=8 on q, k, v and o. Ours is what GRPOTrainer does with a micro-batch (load_model,
completion_logps, grpo_loss under its autocast; a prompt of one token, all others trained on), with
each layer's input on the card and on the host; `--way plain` goes through the decoder and the
chunked head instead, which leaves out the row that a group's prompts and completions are laid out
in. The others: the mean log-prob, transformers from all logits, with FlexAttention and grouped_mm
experts; Unsloth with its own chunked log-softmax. Seconds: median after one step that is not
counted. GiB: torch's max_memory_allocated, and what the driver has given away.
Rows are printed as they are measured; the last line is JSON.
"""

import argparse
import collections
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from decode import FULL, SMALL, build, error_line, synchronize, write_bf16

GiB = 2**30
MARK = "@record "  # a line of a child's output that is for its parent
LENGTHS = [2048, 8192, 32_768, 65_536]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OURS, PEERS = ("bf16", "mxfp4"), ("transformers", "unsloth")
BUDGET = {
    ("bf16", 8192): (0.45, 40.5),
    ("mxfp4", 8192): (None, 15),
    ("bf16", 32_768): (2.6, 43),
    ("bf16", 65_536): (7.5, 46),
}  # seconds, GiB
GROWTH = 100  # KiB a token, at most
DENSE = dict(
    vocab_size=151_936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0),
    tie_word_embeddings=True,
    pad_token_id=151_000,
)
SMALL_DENSE = DENSE | dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=510,
)


# What the benchmarks of training share


def tell(**record):
    "A record for the parent."
    print(MARK + json.dumps(record), flush=True)


def versions(*names):
    "The card, and the versions of what ran."
    found = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "Python": platform.python_version(),
    }
    for name in ("torch", "triton", "transformers", "peft", *names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def clear():
    "Give cached memory back, and count peaks anew."
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def driver_bytes(mem_get_info=torch.cuda.mem_get_info):
    """What the driver had given away on this card when torch held most: CUDA's own share, and
    torch's cache at its largest."""
    if not torch.cuda.is_available():
        return 0
    free, total = mem_get_info()
    return total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()


def peaks():
    "GiB at the peak since `clear`: allocated by torch, and by the driver. None without a card."
    if not torch.cuda.is_available():
        return dict(peak=None, driver=None)
    return dict(
        peak=round(torch.cuda.max_memory_allocated() / GiB, 3),
        driver=round(driver_bytes() / GiB, 3),
    )


def attempt(function):
    "(result, None), or (None, the error in one line) with the memory of the attempt given back."
    try:
        return function(), None
    except Exception as error:
        text = error_line(error)
        if any(word in str(error) for word in ("out of memory", "ALLOC_FAILED")):
            text = "out of memory"
        else:
            traceback.print_exc()
        traceback.clear_frames(error.__traceback__)
    clear()
    return None, text


def timed(step, repeats, limit_s=60.0):
    """Median seconds of `step` after one that is not counted, and peaks of the counted ones; fewer
    repeats where they would take too long."""
    step()
    clear()
    seconds = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - start)
        if sum(seconds) + seconds[-1] > limit_s:
            break
    return dict(seconds=round(statistics.median(seconds), 4), **peaks())


def shown(value, form=".2f"):
    return "-" if value is None else format(value, form)


def run_child(script, name, argv, *, sites=(), limit_s=600.0, hear, environment=None):
    """Run `script` again as one part of itself; its records go to `hear`, the rest to a log. None,
    or why it did not end well."""
    paths = [
        str(Path(__file__).resolve().parents[1]),
        *(str(path) for path in sites if Path(path).is_dir()),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        **(environment or {}),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths),
    }
    process = subprocess.Popen(
        [sys.executable, "-u", str(Path(script).resolve()), *argv, "--child", name],
        env={**os.environ, **settings},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    late = threading.Event()

    def stop():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def too_late():
        late.set()
        stop()

    clock, last, done, failed = (
        threading.Timer(max(1.0, limit_s), too_late),
        collections.deque(maxlen=12),
        False,
        None,
    )
    clock.start()
    try:
        for line in process.stdout:
            if not line.startswith(MARK):
                last.append(line.rstrip())
                continue
            record = json.loads(line.removeprefix(MARK))
            if "done" in record:
                done, failed = True, record.get("failed")
                break
            hear(record)
    finally:
        clock.cancel()
        stop()
        process.wait()
        process.stdout.close()
    if done and not failed:
        return None
    failed = failed or (
        f"stopped after {limit_s:.0f} s" if late.is_set() else "it ended without a word"
    )
    print(f"{name}: {failed}" + "".join(f"\n    | {line[:240]}" for line in last), flush=True)
    return failed


def child(work):
    "What a child does, errors told."
    try:
        work()
        tell(done=True)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        tell(done=True, failed=error_line(error))


def word_tokenizer(sizes):
    "A tokenizer with one word for each token: t0, t1, ..."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({f"t{i}": i for i in range(sizes["vocab_size"])}, unk_token="t0")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=f"t{sizes['pad_token_id']}",
        eos_token=f"t{sizes['eos_token_id']}",
        unk_token="t0",
        padding_side="left",
    )


def arguments(description):
    "The parser with what all benchmarks of training take."
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="of the whole run; what has not begun by then is left out (default: %(default)s)",
    )
    parser.add_argument(
        "--sites",
        default="/tmp/sites",
        metavar="DIR",
        help="DIR/site-NAME holds a library that is not installed otherwise (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        default="/tmp/gpt-oss-random",
        metavar="DIR",
        help="the random checkpoint for Unsloth: written if it is not there, and kept "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="a tiny model on the CPU, to try the script out"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def device_of(args):
    if args.cpu:
        return "cpu"
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here: --cpu tries the script out with a tiny model")
    return "cuda"


# Our step


def batch_of(ids, prompt=1, rows=1):
    "Sequences as the trainer's batch: `prompt` tokens, and completions that are trained on."
    from grpo_nb.training.policy_logprobs import TrainingBatch

    seen = torch.ones_like(ids, dtype=torch.bool)
    return TrainingBatch(
        ids[:, :prompt],
        seen[:, :prompt],
        ids[:, prompt:],
        seen[:, prompt:],
        seen[:, prompt:],
        torch.ones(rows, device=ids.device),
    )


class Step:
    "Forward and backward of a model as GRPOTrainer does it, with layer inputs on the host or not."

    def __init__(
        self,
        model,
        *,
        offload,
        store=None,
        way="trainer",
        mini_batch=None,
        logit_chunk_multiplier=None,
        precision=None,
        optimizer=None,
    ):
        from grpo_nb.model.offload import HostStore, offload_layers
        from grpo_nb.training.config import GRPOConfig
        from grpo_nb.training.micro_batches import ModelPieces
        from grpo_nb.training.policy_model import Precision, checkpoint_layers, frozen_dtype

        self.model, self.way, self.optimizer = model.train(), way, optimizer
        self.config = GRPOConfig(
            offload_activations=offload,
            gradient_checkpointing=True,
            logit_chunk_multiplier=logit_chunk_multiplier,
        )
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.settings = dict(mini_batch=mini_batch, logit_chunk_multiplier=logit_chunk_multiplier)
        device = next(p.device for p in model.parameters() if p.requires_grad)
        self.precision = precision or Precision(GRPOConfig(), device, frozen_dtype(model))
        self.pieces = ModelPieces(model, self.config, self.precision.dtype)
        checkpoint_layers(model, {"use_reentrant": False})
        self.store = (store or HostStore()) if offload else None
        self.switch = offload_layers(model, store=self.store) if offload else None

    def logps(self, batch):
        from grpo_nb.algorithm.logprobs import chunked_hidden_states_selective_log_softmax
        from grpo_nb.model.offload import offload_hidden
        from grpo_nb.training.policy_logprobs import base_causal_model, completion_logps

        if self.way == "trainer":
            return completion_logps(self.model, batch, store=self.store, **self.settings)[0]
        base, ids = (
            base_causal_model(self.model),
            torch.cat([batch.prompt_ids, batch.completion_ids], 1),
        )

        def parked():
            return (
                contextlib.nullcontext()
                if self.store is None
                else offload_hidden(self.model, self.store)
            )

        with parked():
            hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state[
                :, batch.prompt_ids.shape[1] - 1 : -1
            ]
        given = {name: value for name, value in self.settings.items() if value}
        with parked():
            return chunked_hidden_states_selective_log_softmax(
                hidden, base.lm_head.weight, batch.completion_ids, **given
            )

    def slices(self, batch):
        "Let experts or MLPs work on as many tokens at a time as the trainer lets them."
        from grpo_nb.model.fused_layers import slice_layers, slice_tokens_of
        from grpo_nb.model.memory_fit import free_memory

        tokens = self.pieces.choose(batch, free_memory(batch.prompt_ids.device), most=1)[1]
        if tokens != slice_tokens_of(self.model):
            slice_layers(self.model, tokens)

    def __call__(self, batch):
        from grpo_nb.algorithm.losses import grpo_loss
        from grpo_nb.model.recorded_layers import quiet_collector

        for p in self.trained:
            p.grad = None
        self.slices(batch)
        with self.precision.adapters(self.model), quiet_collector():
            with self.precision.autocast():
                logps = self.logps(batch)
            loss = grpo_loss(logps, batch.advantages, batch.loss_mask).loss
            self.precision.scaler.scale(loss).backward()
        if self.optimizer is not None:
            self.precision.scaler.step(self.optimizer)
            self.precision.scaler.update()
        return loss.detach()

    def close(self):
        if self.switch is not None:
            self.switch.remove()
        for p in self.model.parameters():
            p.grad = None


def gpt_oss(sizes, weights, tokens, *, targets=ATTENTION, r=8, **more):
    "A random gpt-oss as load_model makes it, its adapters not zero; its tokenizer is None."
    from transformers import GptOssConfig

    from grpo_nb.model.loading import load_model

    model, _ = load_model(
        GptOssConfig(**sizes),
        max_seq_length=tokens,
        load_in_4bit="mxfp4" in weights,
        lora_r=r,
        lora_targets=targets,
        lora_alpha=2 * r,
        quiet=True,
        **more,
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, 0, 0.01)
    return model


def random_ids(sizes, tokens, device, rows=1):
    return torch.randint(
        sizes["pad_token_id"],
        (rows, tokens),
        device=device,
        generator=torch.Generator(device).manual_seed(tokens),
    )


def qwen(sizes, tokens, *, r=8):
    "A random Qwen2.5 with adapters on all linear layers, not zero."
    from transformers import Qwen2Config

    from grpo_nb.model.loading import load_model

    model, _ = load_model(
        Qwen2Config(**sizes), max_seq_length=tokens, lora_r=r, lora_alpha=2 * r, quiet=True
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, 0, 0.01)
    return model


def run_recorded(args, sizes, weights):
    "Steps call by call, then played: seconds, peaks, and how far the gradients are apart."
    from grpo_nb.model.recorded_layers import record_layers

    device, start = device_of(args), time.perf_counter()
    if weights == "dense":
        sizes = SMALL_DENSE if args.cpu else DENSE
        model = qwen(sizes, max(args.lengths))
    else:
        model = gpt_oss(sizes, weights, max(args.lengths))
    tell(loaded=weights, seconds=round(time.perf_counter() - start, 1), **peaks(), **versions())
    step = Step(model, offload=False)

    def gradients(batch):
        step(batch)
        return [p.grad.clone() for p in step.trained]

    def apart(some, others):
        "How many tensors differ, and the largest difference beside the largest number."
        ratios = [
            ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item()
            for a, b in zip(some, others)
        ]
        return f"{sum(r > 0 for r in ratios)} of {len(ratios)}, by {max(ratios):.1e}"

    def sent(batch):
        "Milliseconds until Python has sent a step, whether or not it is computed."
        synchronize()
        start = time.perf_counter()
        step(batch)
        return round(1e3 * (time.perf_counter() - start), 1)

    for tokens in sorted(args.lengths):
        batch = batch_of(random_ids(sizes, tokens, device))
        expected, again = gradients(batch), gradients(batch)
        before = timed(lambda: step(batch), args.repeats) | dict(sent_ms=sent(batch))
        with record_layers(model) as switch:
            step(batch)
            start = time.perf_counter()
            step(batch)
            synchronize()
            took, played = time.perf_counter() - start, gradients(batch)
            after = timed(lambda: step(batch), args.repeats) | dict(sent_ms=sent(batch))
            pool = getattr(switch.record, "bytes", 0)
            refused = switch.refused
        lines = [
            f"{weights}, {tokens:,} tokens: {before['seconds']:.4f} s, "
            f"recorded {after['seconds']:.4f} s (x {before['seconds'] / after['seconds']:.2f})",
            f"    sent within {before['sent_ms']:.0f} ms, recorded {after['sent_ms']:.0f}",
            f"    peak {shown(before['peak'])} GiB, recorded {shown(after['peak'])}; "
            f"pool {pool / GiB:.2f} GiB; recording took {took:.1f} s",
            f"    gradients that differ: {apart(expected, played)}; "
            f"between two steps call by call: {apart(expected, again)}",
        ]
        lines += [f"    not recorded: {refused}"] if refused else []
        tell(
            text="\n".join(lines),
            profile=dict(
                library=weights,
                tokens=tokens,
                wall_ms=1e3 * after["seconds"],
                before=before,
                after=after,
            ),
        )
    step.close()


def run_ours(args, sizes, weights):
    if args.record:
        return run_recorded(args, sizes, weights)
    device, start = device_of(args), time.perf_counter()
    model = gpt_oss(sizes, weights, max(args.lengths), offload_embedding=args.offload_embedding)
    if args.adapters != "float32":
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.to(getattr(torch, args.adapters))
    tell(loaded=weights, seconds=round(time.perf_counter() - start, 1), **peaks(), **versions())
    if args.profile:
        return profile(args, sizes, weights, model)
    store = None
    for tokens in sorted(args.lengths):
        batch = batch_of(random_ids(sizes, tokens, device))
        for offload in args.offload:

            def measured():
                nonlocal store
                from grpo_nb.model.offload import HostStore

                store = store or HostStore()
                step = Step(model, offload=offload, store=store, way=args.way)
                clear()
                try:
                    return dict(
                        timed(
                            lambda: step(batch),
                            args.repeats if tokens < 32_768 else min(args.repeats, 2),
                        ),
                        host=round(store.host_bytes / GiB, 3) if offload else 0,
                    )
                finally:
                    step.close()

            result, error = attempt(measured)
            if error:
                store = None
            tell(
                library=weights,
                tokens=tokens,
                offload=offload,
                **({"error": error} if error else result),
            )


def profile(args, sizes, weights, model):
    "The kernels of one step, by time."
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    device, tokens = (
        device_of(args),
        min((n for n in args.lengths if n >= 8192), default=max(args.lengths)),
    )
    step, batch = (
        Step(model, offload=args.offload[0], way=args.way),
        batch_of(random_ids(sizes, tokens, device)),
    )
    for _ in range(2):
        step(batch)
    synchronize()
    start = time.perf_counter()
    step(batch)
    synchronize()
    wall = (time.perf_counter() - start) * 1e3
    cuda = device == "cuda"
    with record(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as seen:
        step(batch)
        synchronize()

    def ms(event):
        return (
            getattr(event, "self_device_time_total", 0) if cuda else event.self_cpu_time_total
        ) / 1e3

    kernels = [
        event for event in seen.key_averages() if not cuda or "CUDA" in str(event.device_type)
    ]
    whole, rows = sum(map(ms, kernels)), sorted(kernels, key=ms, reverse=True)[:25]
    lines = [
        (
            f"{weights}, {tokens:,} tokens, one step: {wall:.1f} ms; "
            f"{'kernels' if cuda else 'operations'} {whole:.1f} ms in "
            f"{sum(event.count for event in kernels):,} calls"
        )
    ]
    lines += [
        f"{ms(event):9.2f} ms {ms(event) / whole:6.1%} {event.count:7,d} x  {event.key[:150]}"
        for event in rows
    ]
    if cuda:
        operations = sorted(
            (
                event
                for event in seen.key_averages()
                if "CPU" in str(event.device_type) and ms(event) > 0
            ),
            key=ms,
            reverse=True,
        )[:15]
        lines += [
            "the operations that started them:",
            *(
                f"{ms(event):9.2f} ms {event.count:7,d} x  {event.key[:150]}"
                for event in operations
            ),
        ]
    tell(
        text="\n".join(lines),
        profile=dict(
            library=weights,
            tokens=tokens,
            wall_ms=round(wall, 2),
            kernels_ms=round(whole, 2),
            top=[
                dict(name=event.key[:200], ms=round(ms(event), 3), count=event.count)
                for event in rows
            ],
        ),
    )
    step.close()


# The others


def run_transformers(args, sizes):
    from peft import LoraConfig, get_peft_model
    from transformers import GptOssConfig, GptOssForCausalLM

    device = device_of(args)
    torch.manual_seed(0)
    with torch.device(device):
        model = GptOssForCausalLM._from_config(
            GptOssConfig(**sizes),
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            attn_implementation="eager",
        )
    model = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules=ATTENTION, task_type="CAUSAL_LM")
    ).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    base = model.get_base_model()
    if device == "cuda":
        base.set_experts_implementation("grouped_mm")
        base.set_attn_implementation("flex_attention")
    tell(loaded="transformers", **peaks(), **versions())

    def logps(ids):
        return torch.log_softmax(
            model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float(), -1
        )[:, :-1].gather(-1, ids[:, 1:, None])

    peer_lengths(args, sizes, "transformers", model, logps)


def peer_lengths(args, sizes, name, model, logps):
    for tokens in sorted(args.lengths):
        ids = random_ids(sizes, tokens, device_of(args))

        def step():
            (-logps(ids).mean()).backward()
            model.zero_grad()

        clear()
        result, error = attempt(lambda: timed(step, min(args.repeats, 2)))
        model.zero_grad()
        tell(library=name, tokens=tokens, **({"error": error} if error else result))
        if error == "out of memory":
            break


def write_checkpoint(args, sizes):
    "A random bf16 checkpoint with a tokenizer."
    folder = Path(args.checkpoint)
    if (folder / "config.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_bf16(folder, sizes, build(sizes, device_of(args)))


def load_unsloth(args, sizes, tokens, load_in_4bit=False):
    from unsloth import FastLanguageModel  # before transformers, as it asks

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(args.checkpoint),
        max_seq_length=tokens,
        dtype=None if load_in_4bit else torch.bfloat16,
        load_in_4bit=load_in_4bit,
    )
    return FastLanguageModel.get_peft_model(
        model,
        r=8,
        lora_alpha=16,
        target_modules=ATTENTION,
        use_gradient_checkpointing="unsloth",
        random_state=0,
    ), tokenizer


def run_unsloth(args, sizes):
    model, _ = load_unsloth(args, sizes, max(args.lengths))
    from unsloth import FastLanguageModel
    from unsloth_zoo.rl_replacements import RL_REPLACEMENTS

    FastLanguageModel.for_training(model)
    os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] = (
        "1"  # its switch: `logits` are the final hidden states
    )
    chunked, head = (
        RL_REPLACEMENTS["grpo_selective_log_softmax"],
        model.get_output_embeddings().weight,
    )
    tell(loaded="unsloth", **peaks(), **versions("unsloth"))

    def logps(ids):
        hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return chunked(hidden[:, :-1], head, ids[:, 1:], chunks=max(4, ids.shape[1] // 4096))

    peer_lengths(args, sizes, "unsloth", model, logps)


# The parent


def record_of(row, card, versions_):
    "A measured row as the tests of the planner keep it."
    ours = row["library"] in OURS
    library = row["library"] if not ours else "ours, " + row["library"]
    where = ", layer inputs on the host" if row.get("offload") else ""
    name = f"{library}{where}, {row['tokens']:,} tokens"
    step = dict(
        weights="mxfp4" if row["library"] == "mxfp4" else "bf16",
        lora_r=8,
        lora_targets=["attention"],
        optimizer_bytes=0,
        per_device_train_batch_size=1,
        max_completion_length=row["tokens"],
        prompt_length=0,
    )
    step |= (
        dict(
            offload_activations=row["offload"],
            offload_hidden=row["offload"],
            offload_embedding=row.get("offload_embedding", False),
        )
        if ours
        else dict(implementation="transformers", slice_tokens=row["tokens"], attention="flex")
    )
    said = ", ".join(
        f"{key} {value}" for key, value in versions_.items() if key in ("torch", "transformers")
    )
    return dict(
        name=name,
        model="gpt-oss-20b",
        step=step,
        moments=["head", "layer"],
        peak_gib=row["peak"],
        source=f"python benchmarks/train_step.py on {card}, {said}; LoRA r=8 on attention, "
        "forward and backward; peak: torch.cuda.max_memory_allocated",
    )


def planned(record):
    "What the planner says for a record, GiB."
    from grpo_nb.model.memory_bytes import MODELS
    from grpo_nb.model.memory_fit import CARDS, Step, fit

    card = CARDS["H200"]
    step = Step(MODELS[record["model"]], card.capability, **record["step"])
    return fit(step, card.room).allocated(*record["moments"]) / GiB


class Table:
    "The rows so far, and what is said of each."

    def __init__(self, args):
        self.args, self.rows, self.about, self.records = args, [], {}, []

    def name(self, row):
        return row["library"] + (", on the host" if row.get("offload") else "")

    def hear(self, record):
        if "loaded" in record:
            self.about = {
                **self.about,
                **{
                    key: value
                    for key, value in record.items()
                    if key not in ("loaded", "seconds", "peak", "driver")
                },
            }
            print(
                (
                    f"{record['loaded']} is there: {shown(record.get('seconds'), '.1f')} s, "
                    f"{shown(record['peak'])} GiB; "
                )
                + ", ".join(
                    f"{key} {value}"
                    for key, value in record.items()
                    if key not in ("loaded", "seconds", "peak", "driver")
                ),
                flush=True,
            )
        elif "text" in record:
            print(record["text"], flush=True)
            self.rows.append(record["profile"])
        else:
            self.row(record)

    def row(self, row):
        before = next(
            (
                r
                for r in reversed(self.rows)
                if r.get("library") == row["library"]
                and r.get("offload") == row.get("offload")
                and "error" not in r
            ),
            None,
        )
        row["offload_embedding"] = row["library"] in OURS and self.args.offload_embedding
        self.rows.append(row)
        line = f"{self.name(row):22s}{row['tokens']:8,d} tokens  "
        if "error" in row:
            return print(line + row["error"], flush=True)
        line += f"{row['seconds']:8.3f} s  {shown(row['peak'])} GiB (driver {shown(row['driver'])})"
        if row.get("host"):
            line += f"  host {row['host']:.2f} GiB"
        if before and row["peak"]:
            row["kib_a_token"] = round(
                (row["peak"] - before["peak"]) * 2**20 / (row["tokens"] - before["tokens"]), 1
            )
            line += f"  {row['kib_a_token']:,.0f} KiB a token since {before['tokens']:,}"
        if row["peak"] and not self.args.cpu and row["library"] in (*OURS, "transformers"):
            self.records.append(record_of(row, self.about.get("card"), self.about))
            try:
                line += f"  (planned {planned(self.records[-1]):.2f})"
            except Exception as error:
                line += f"  (no plan: {error})"
        if budget := BUDGET.get((row["library"], row["tokens"])):
            seconds, gib = budget
            line += f"  budget {f'{seconds} s, ' if seconds else ''}{gib} GiB"
            if row["peak"]:
                line += ": " + (
                    "kept"
                    if row["peak"] <= gib and (seconds is None or row["seconds"] <= seconds)
                    else "missed"
                )
        print(line, flush=True)

    def ratios(self):
        "Peers over the faster of ours at each length."
        for tokens in sorted({row["tokens"] for row in self.rows if "seconds" in row}):
            rows = [row for row in self.rows if row.get("tokens") == tokens and "seconds" in row]
            for mine in (row for row in rows if row["library"] in OURS):
                others = [
                    f"{row['library']} / this: time x {row['seconds'] / mine['seconds']:.2f}"
                    + (f", memory x {row['peak'] / mine['peak']:.2f}" if mine["peak"] else "")
                    for row in rows
                    if row["library"] in PEERS
                ]
                if others:
                    print(
                        f"{tokens:8,d} tokens, {self.name(mine)}: " + "; ".join(others), flush=True
                    )


def main():
    parser = arguments(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=["bf16", "mxfp4", "transformers"],
        choices=[*OURS, "dense", *PEERS],
        help="ours (bf16, mxfp4; dense with --record), transformers, unsloth (default: bf16, "
        "mxfp4, transformers)",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--offload",
        nargs="+",
        default=["off", "on"],
        choices=["off", "on"],
        help="layer inputs on the card, on the host (default: both)",
    )
    parser.add_argument(
        "--offload-embedding", action="store_true", help="ours: the embedding on the host"
    )
    parser.add_argument(
        "--way",
        default="trainer",
        choices=["trainer", "plain"],
        help="ours: completion_logps, or the decoder and the chunked head",
    )
    parser.add_argument(
        "--adapters",
        default="float32",
        choices=["float32", "bfloat16"],
        help="ours: their number format",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="the kernels of one step instead")
    parser.add_argument(
        "--record", action="store_true", help="ours, with layers recorded and without"
    )
    parser.add_argument(
        "--records", metavar="FILE", help="write the peaks as the planner's tests keep them"
    )
    args = parser.parse_args()
    sizes = SMALL if args.cpu else FULL
    if args.cpu and args.lengths == LENGTHS:
        args.lengths = [64, 128]
    if args.child:
        args.offload = [value == "on" for value in args.offload]
        return child(
            {
                "write": lambda: write_checkpoint(args, sizes),
                "transformers": lambda: run_transformers(args, sizes),
                "unsloth": lambda: run_unsloth(args, sizes),
            }.get(args.child)
            or (lambda: run_ours(args, sizes, args.child))
        )
    device_of(args)
    table, end = Table(args), time.time() + 60 * args.minutes
    for name in args.only:
        left = end - time.time()
        if left < 20:
            print(f"{name}: left out, no time left", flush=True)
            continue
        site = (
            [Path(args.sites) / "site-unsloth", Path(args.sites) / "site-bitsandbytes"]
            if name == "unsloth"
            else []
        )
        if name == "unsloth" and run_child(
            __file__, "write", sys.argv[1:], limit_s=left, hear=table.hear
        ):
            continue
        failed = run_child(
            __file__, name, sys.argv[1:], sites=site, limit_s=end - time.time(), hear=table.hear
        )
        if failed:
            table.rows.append(dict(library=name, error=failed))
    table.ratios()
    if args.records:
        Path(args.records).write_text(
            json.dumps(dict(card=table.about.get("card"), records=table.records), indent=1) + "\n"
        )
    print(json.dumps(dict(about=table.about, way=args.way, rows=table.rows)))
    return 0 if any("seconds" in row or "wall_ms" in row for row in table.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
