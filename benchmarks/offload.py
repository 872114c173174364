"""A step of training with the layers' inputs on the card and on the host: forward and backward
through a random gpt-oss of full width, bf16, LoRA on the attention.

    python benchmarks/offload.py                  4 layers, 8,192 and 32,768 tokens, on a GPU: under
                                                  two minutes
    python benchmarks/offload.py --layers 24      the whole model: 39 GiB of weights
    python benchmarks/offload.py --lengths 65536  other lengths
    python benchmarks/offload.py --small --device cpu
                                                  the same steps with a tiny model, to try it out
                                                  (copies on a processor: the times say nothing)

Four cases, taken in turns so that the clock of the card treats them alike, the median of the
repeats of each:
"recomputed": every layer computed again in backward, its input kept on the card; "save_on_cpu": the
inputs on the host by torch's own means, with pinned memory, in the computing stream; "offloaded":
by ours (offload_layers); "offloaded, hidden too": the norm's input and the rows of the log-probs as
well (offload_hidden). A line has the seconds of a step, the ratio to "recomputed", the peak on the
card beyond the weights (and in all), and our host memory in pages. "formula" is what the inputs
take: layers x tokens x hidden size x 2 bytes.
The bus is measured too: one copy each way of 256 MiB of pinned memory. The last line is JSON.
"""

import argparse
import contextlib
import gc
import json
import time

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, GptOssForCausalLM

from grpo_nb.algorithm.logprobs import chunked_hidden_states_selective_log_softmax
from grpo_nb.model.adapters import route_adapters
from grpo_nb.model.offload import HostStore, offload_hidden, offload_layers

GiB = 2**30
FULL = dict(
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    num_local_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
)
SMALL = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
)
CASES = ("recomputed", "save_on_cpu", "offloaded", "offloaded, hidden too")


def recompute(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=False)


def save_on_cpu(function, *inputs):
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return recompute(function, *inputs)


def build(args):
    "The random model with its adapter, in bf16 on the device."
    sizes = SMALL if args.small else FULL
    config = GptOssConfig(
        **sizes,
        num_hidden_layers=args.layers,
        max_position_embeddings=131_072,
        pad_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
        attn_implementation="sink",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(args.device):
            model = GptOssForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model = get_peft_model(
        model.bfloat16(),
        LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.01)
    route_adapters(model, "routed_lean")
    return model.train()


@contextlib.contextmanager
def case(name, model, store):
    "Inside: the model as the case wants it; gives the context for what lies outside the layers."
    base = model.get_base_model()
    if not name.startswith("offloaded"):
        base._set_gradient_checkpointing(
            enable=True,
            gradient_checkpointing_func=recompute if name == "recomputed" else save_on_cpu,
        )
        try:
            yield contextlib.nullcontext
        finally:
            base._set_gradient_checkpointing(enable=False)
    else:
        with offload_layers(model, store=store):
            yield (
                (lambda: offload_hidden(model, store))
                if name == CASES[-1]
                else contextlib.nullcontext
            )


def step(model, ids, around):
    "Forward and backward; the sum of the adapter's gradients' squares, for comparison."
    base = model.get_base_model()
    for parameter in model.parameters():
        parameter.grad = None
    with around():
        hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    with around():
        logps = chunked_hidden_states_selective_log_softmax(hidden, base.lm_head.weight, ids[:, 1:])
    logps.mean().backward()
    return sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None)


def synchronize(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def bus(device):
    "Bytes a second to the host and back, pinned."
    if not device.startswith("cuda"):
        return None, None
    host, card, speeds = (
        torch.empty(2**28, dtype=torch.uint8, pin_memory=True),
        torch.empty(2**28, dtype=torch.uint8, device=device),
        [],
    )
    for to, source in ((host, card), (card, host)):
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        speeds.append(2**28 / min(times))
    return speeds


def measure(model, tokens, args):
    "name -> (median seconds, peak bytes, host bytes, gradients' norm)."
    vocab = model.get_base_model().config.vocab_size
    ids, store = torch.randint(vocab, (1, tokens), device=args.device), HostStore()
    times, peaks, norms, hosts = ({name: [] for name in CASES} for _ in range(4))
    for repeat in range(args.repeats + 1):  # the first one compiles, and gets pinned memory
        for name in CASES:
            gc.collect()
            if args.device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
            with case(name, model, store) as around:
                synchronize(args.device)
                start = time.perf_counter()
                norm = step(model, ids, around)
                synchronize(args.device)
            if not repeat:
                continue
            times[name].append(time.perf_counter() - start)
            norms[name].append(norm.item() ** 0.5)
            peaks[name].append(
                torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else 0
            )
            hosts[name].append(store.host_bytes if name.startswith("offloaded") else 0)
    for parameter in model.parameters():
        parameter.grad = None
    store.release()
    return {
        name: (
            sorted(times[name])[args.repeats // 2],
            max(peaks[name]),
            max(hosts[name]),
            norms[name][0],
        )
        for name in CASES
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[8192, 32_768], help="tokens of the one sequence"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model, 128 and 512 tokens")
    args = parser.parse_args()
    if args.small:
        args.lengths = [128, 512]
    elif not args.device.startswith("cuda"):
        parser.error(
            "the model of full width needs a CUDA device; --small --device cpu tries the script out"
        )
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    model = build(args)
    weights, H = (
        sum(p.nbytes for p in model.parameters()),
        model.get_base_model().config.hidden_size,
    )
    out, back = bus(args.device)
    print(
        (
            f"{device}, torch {torch.__version__}, gpt-oss with {args.layers} layers, "
            f"{weights / GiB:.1f} GiB of weights in bf16"
        )
        + (f"; the bus: {out / 1e9:.1f} GB/s to the host, {back / 1e9:.1f} back" if out else ""),
        flush=True,
    )
    records = []
    for tokens in args.lengths:
        try:
            results = measure(model, tokens, args)
        except torch.cuda.OutOfMemoryError:
            print(f"{tokens:,} tokens: out of memory", flush=True)
            continue
        formula = args.layers * tokens * H * 2
        for name, (seconds, peak, host, norm) in results.items():
            ratio = seconds / results["recomputed"][0]
            print(
                f"{tokens:8,d} tokens  {name:22s}{seconds:9.3f} s  x {ratio:5.3f}  card "
                f"{(peak - weights) / GiB if peak else 0:7.3f} GiB beyond the weights "
                f"({peak / GiB:6.2f} in all)"
                f"  host {host / GiB:6.3f} GiB  (formula {formula / GiB:.3f})  |gradient| "
                f"{norm:.6g}",
                flush=True,
            )
            records.append(
                dict(
                    device=device,
                    torch=torch.__version__,
                    layers=args.layers,
                    tokens=tokens,
                    name=name,
                    seconds=round(seconds, 5),
                    ratio=round(ratio, 4),
                    peak_GiB=round(peak / GiB, 4),
                    weights_GiB=round(weights / GiB, 4),
                    host_GiB=round(host / GiB, 4),
                    formula_GiB=round(formula / GiB, 4),
                    out_GBps=out and round(out / 1e9, 1),
                    back_GBps=back and round(back / 1e9, 1),
                )
            )
    print(json.dumps(records))


if __name__ == "__main__":
    main()
