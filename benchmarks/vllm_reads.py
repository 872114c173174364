"""Does vLLM serve what was trained? Two layers as wide as gpt-oss-20b's (random, MXFP4, a
vocabulary of 32,768) with a random adapter on attention and experts, exported in each way, each
read by vLLM.

    python benchmarks/vllm_reads.py --vllm-site DIR
        on a GPU, with vLLM in DIR (pip install --target DIR) or, without --vllm-site, beside
        grpo_nb: two to three minutes
    python benchmarks/vllm_reads.py --cpu
        all but vLLM, with a tiny model, to try it out

Written are: the base model (save_mxfp4 without adapters), the adapter on attention alone and the
one on attention and experts (save_adapter), everything merged in 16 bit (save_merged) and in MXFP4
(save_mxfp4). vLLM reads the same prompts with each and goes on greedily. The truth is transformers'
eager model in float32 on exactly those files (experts dequantised, the adapter by PEFT);
transformers and ours in bfloat16 show what the format alone costs: a random model turns rounding
into other experts, so there is a floor.
Within tolerance: mean |log-prob - truth| at most 2 times the worse of those two, plus 0.005 nats;
the adapter's effect, as a slope of vLLM's changes on the true ones, 0.95 to 1.05; tokens that vLLM
puts first cost, under the truth, at most 2 times the mean error plus 0.005 nats on average (0.01
for those that it drew). The last line is JSON; the exit status is 1 if something is out of
tolerance.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

MARK = "@vllm "
START = time.time()
CASES = {  # name -> (folder, adapter's folder)
    "base": ("base", None),
    "base + adapter on attention": ("base", "attention"),
    "base + adapter on attention and experts": ("base", "all"),
    "merged, 16 bit": ("merged16", None),
    "merged, MXFP4": ("merged4", None),
}


def say(text):
    print(f"[{time.time() - START:5.1f} s] {text}", flush=True)


# vLLM, in a process of its own


def tell(**record):
    print(MARK + json.dumps(record), flush=True)


def engine_child():
    """Reads {'folder', 'cases', 'prompts', 'new', 'rank'} from stdin once vLLM is imported; one
    engine a folder."""
    import gc

    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.lora.request import LoRARequest

    # without compiling, 0.25 hands it a slice of padded rows, and it wants whole ones (vLLM's pull
    # request 36187)
    shrink = PunicaWrapperGPU.add_shrink
    PunicaWrapperGPU.add_shrink = lambda self, y, x, *args, **kwargs: shrink(
        self, y, x.contiguous(), *args, **kwargs
    )
    tell(version=vllm.__version__)
    job = json.loads(sys.stdin.readline())
    folder, prompts = Path(job["folder"]), [{"prompt_token_ids": ids} for ids in job["prompts"]]
    params = SamplingParams(
        max_tokens=job["new"],
        temperature=0.0,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=1,
        detokenize=False,
    )
    for name in dict.fromkeys(CASES[case][0] for case in job["cases"]):
        adapters = (
            dict(enable_lora=True, max_loras=1, max_cpu_loras=2, max_lora_rank=job["rank"])
            if any(CASES[c][1] for c in job["cases"] if CASES[c][0] == name)
            else {}
        )
        try:
            llm = LLM(
                model=str(folder / name),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=512,
                max_num_seqs=16,
                max_num_batched_tokens=4096,
                gpu_memory_utilization=0.1,
                kv_cache_memory_bytes=2**31,
                enable_prefix_caching=False,
                enforce_eager=True,
                seed=0,
                **adapters,
            )
        except Exception as error:
            traceback.print_exc()
            for case in job["cases"]:
                if CASES[case][0] == name:
                    tell(case=case, error=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        for number, case in enumerate((c for c in job["cases"] if CASES[c][0] == name), 1):
            try:
                request = (
                    LoRARequest(CASES[case][1], number, str(folder / CASES[case][1]))
                    if CASES[case][1]
                    else None
                )
                outputs = llm.generate(prompts, params, lora_request=request, use_tqdm=False)
                rows = []
                for ids, out in zip(job["prompts"], outputs):
                    drawn = list(out.outputs[0].token_ids)
                    places = [
                        *out.prompt_logprobs[1:],
                        *out.outputs[0].logprobs,
                    ]  # of each token after the first
                    told = [
                        (place[token].logprob, min(place, key=lambda t: place[t].rank))
                        for place, token in zip(places, ids[1:] + drawn)
                    ]
                    rows.append(
                        dict(
                            drawn=drawn, logps=[t[0] for t in told], first=[int(t[1]) for t in told]
                        )
                    )
                tell(case=case, rows=rows)
            except Exception as error:
                traceback.print_exc()
                return tell(
                    case=case, error=f"{type(error).__name__}: {str(error)[:200]}"
                )  # such an engine is of no use to the next case
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    tell(done=True)


class Engine:
    """The child: started early, since importing vLLM takes long; told what to do when the files are
    there."""

    def __init__(self, args, log):
        site = [os.path.abspath(args.vllm_site)] if args.vllm_site else []
        path = os.pathsep.join(
            [*site, os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        )
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        self.log = open(log, "a")
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).resolve()), "--child"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def work(self, job, limit_s):
        "case -> record."
        found = {}
        clock = threading.Timer(limit_s, self.process.kill)
        clock.start()
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if not line.startswith(MARK):
                    self.log.write(line)
                    self.log.flush()
                    continue
                record = json.loads(line.removeprefix(MARK))
                if "version" in record:
                    say(f"vLLM {record['version']}")
                if "case" in record:
                    found[record["case"]] = record
                    say(f"vLLM, {record['case']}: {record.get('error', 'done')}")
                if "done" in record:
                    break
        except BrokenPipeError:
            pass
        finally:
            clock.cancel()
            self.process.kill()
            self.process.wait()
        return found


# The model and its exports


def randomise(model, seed=0):
    """Biases, norms, sinks, embedding and router that a mistake would show in; weights in bfloat16
    stay what bfloat16 can hold."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if (
                "lora_" in name
                or "experts.gate_up_proj" in name
                and not name.endswith("bias")
                or "experts.down_proj" in name
                and not name.endswith("bias")
            ):
                continue
            if name.endswith("sinks"):
                p.normal_()
            elif "norm" in name:
                p.copy_(1 + 0.1 * torch.randn_like(p))
            elif name.endswith("bias"):
                p.normal_(0, 0.05)
            elif "embed_tokens" in name:
                p.normal_()
            elif "router" in name:
                p.normal_(0, 0.05)


def export(args, config, folder):
    "Everything that vLLM will read."
    import torch

    from grpo_nb.model.export import save_adapter, save_merged, save_mxfp4
    from grpo_nb.model.loading import load_model

    given = dict(
        max_seq_length=512,
        load_in_4bit=True,
        dtype="bfloat16",
        quiet=True,
        seed=0,
        attn_implementation="sink_key",
    )
    model, _ = load_model(config, **given)
    randomise(model)
    save_mxfp4(model, folder / "base", quiet=True)
    del model
    model, _ = load_model(folder / "base", lora_r=args.rank, lora_targets="all", **given)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
            if "lora_" in name:
                p.copy_(
                    p.bfloat16().float()
                )  # vLLM keeps adapters in bfloat16: the same numbers for all
    save_adapter(model, folder / "all")
    rounded = save_merged(model, folder / "merged16", quiet=True)
    packed = save_mxfp4(model, folder / "merged4", quiet=True)
    for export in (rounded, packed):
        print("  " + str(export).splitlines()[0][:200])
    part, _ = load_model(folder / "base", lora_r=args.rank, lora_targets="attention", **given)
    whole = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in part.named_parameters():
            if "lora_" in name:
                p.copy_(whole[name])
    save_adapter(part, folder / "attention")


def check_adapter(folder, config, rank):
    """vLLM wants A (experts x r, in) and B (out, r x experts), gate_up as the inner wrapper: refuse
    what it would misread."""
    from safetensors.torch import load_file

    E, H, inner = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    stored, start = (
        load_file(folder / "all" / "adapter_model.safetensors"),
        "base_model.model.model.layers.0.mlp.experts.",
    )
    wanted = {
        "base_layer.lora_A.weight": (E * rank, H),
        "base_layer.lora_B.weight": (2 * inner, E * rank),
        "lora_A.weight": (E * rank, inner),
        "lora_B.weight": (H, E * rank),
    }
    wrong = {
        name: tuple(stored[start + name].shape)
        for name, shape in wanted.items()
        if tuple(stored[start + name].shape) != shape
    }
    if wrong:
        sys.exit(
            "The adapter's file has not the layout that vLLM reads (this PEFT names the "
            f"sides the other way round): {wrong}"
        )
    say("the adapter's file has the layout that vLLM reads")


# Log-probs by transformers and by ours


def score(model, rows, device, autocast):
    """Log-prob of every token after the first, (N, L-1), and log-probs of all (N, L-1, V) on the
    device."""
    import torch

    ids = torch.tensor(rows, device=device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
        logits = torch.cat(
            [
                model(input_ids=part, attention_mask=torch.ones_like(part), use_cache=False).logits
                for part in ids.split(2)
            ]
        )
    logs = logits[:, :-1].float().log_softmax(-1)
    return logs.gather(-1, ids[:, 1:, None])[..., 0].cpu(), logs


def models(case, folder, device):
    """('transformers', model in bfloat16), then ('ours', model); the first may be widened by the
    caller."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Mxfp4Config

    from grpo_nb.model.adapters import route_adapters
    from grpo_nb.model.loading import load_model

    name, adapter = CASES[case]
    more = {} if name == "merged16" else dict(quantization_config=Mxfp4Config(dequantize=True))

    def adapted(model):
        return PeftModel.from_pretrained(model, folder / adapter) if adapter else model

    ours, _ = load_model(
        folder / name,
        max_seq_length=512,
        load_in_4bit=name != "merged16",
        dtype="bfloat16",
        quiet=True,
        attn_implementation="sink_key",
        device=device,
    )
    ours = adapted(ours)
    route_adapters(ours, "routed")
    yield "ours", ours.eval()
    del ours
    theirs = AutoModelForCausalLM.from_pretrained(
        folder / name,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        device_map={"": device},
        **more,
    )
    yield "transformers", adapted(theirs).eval()


def compare(case, folder, record, prompts, device, base):
    """A row of the table; `base` holds the prompts' log-probs without an adapter: true ones, and
    vLLM's."""
    import torch

    count = len(prompts[0]) - 1
    drawn = (
        [row["drawn"] for row in record["rows"]]
        if record and "rows" in record
        else [[] for _ in prompts]
    )
    rows, found = [ids + new for ids, new in zip(prompts, drawn)], {}
    for who, model in models(case, folder, device):
        found[who], _ = score(model, rows, device, autocast=True)
        if who == "transformers":
            model.float()
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("eager")
            truth, logs = score(model, rows, device, autocast=False)
        del model
    row = dict(
        case=case,
        floor_transformers=(found["transformers"] - truth).abs().mean().item(),
        floor_ours=(found["ours"] - truth).abs().mean().item(),
    )
    if case == "base":
        base["truth"] = truth[:, :count]
    change = truth[:, :count] - base["truth"]
    row["moved"] = change.abs().mean().item()

    def slope(logps, start):
        return (
            ((logps[:, :count] - start) * change).sum().item() / change.square().sum().item()
            if case != "base"
            else None
        )

    row["slope_ours"] = slope(found["ours"], base.setdefault("ours", found["ours"][:, :count]))
    if record is None or "rows" not in record:
        return row | dict(
            error=(record or {}).get(
                "error", "vLLM was not asked" if record is None else "nothing came"
            ),
            good=None if record is None else False,
        )
    told = torch.tensor([r["logps"] for r in record["rows"]])
    first = torch.tensor([r["first"] for r in record["rows"]], device=device)
    regret = (logs.max(-1).values - logs.gather(-1, first[..., None])[..., 0]).cpu()
    if case == "base":
        base["vllm"] = told[:, :count]
    error, floor = (told - truth).abs(), max(row["floor_transformers"], row["floor_ours"])
    row |= dict(
        error_vllm=error.mean().item(),
        worst=error.max().item(),
        same_first=(first == logs.argmax(-1)).float().mean().item(),
        regret=regret.mean().item(),
        regret_drawn=regret[:, count:].mean().item(),
        slope_vllm=slope(told, base["vllm"]) if "vllm" in base else None,
    )
    row["good"] = (
        row["error_vllm"] <= 2 * floor + 0.005
        and row["regret"] <= 2 * row["error_vllm"] + 0.005
        and row["regret_drawn"] <= 2 * row["error_vllm"] + 0.01
        and (case == "base" or row["slope_vllm"] is not None and 0.95 <= row["slope_vllm"] <= 1.05)
    )
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm-site",
        metavar="DIR",
        help="a folder with vLLM and what it needs, for its process alone",
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--limit", type=float, default=240, help="seconds for everything")
    parser.add_argument(
        "--log",
        default=os.path.join(tempfile.gettempdir(), "vllm_reads.log"),
        help="vLLM's own output",
    )
    parser.add_argument(
        "--folder",
        help="for the files (4 GB at 2 layers); default: a temporary one, removed at the end",
    )
    parser.add_argument(
        "--only", nargs="*", choices=list(CASES), help="some cases (the base is always there)"
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return engine_child()
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    if not args.cpu and not torch.cuda.is_available():
        sys.exit(
            "This measures on a GPU, and torch sees none. Without one, --cpu tries all but "
            "vLLM with a tiny model."
        )
    engine = (
        None if args.cpu else Engine(args, args.log)
    )  # it imports vLLM while the exports are written
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = (
        dict(
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            vocab_size=512,
        )
        if args.cpu
        else dict(
            hidden_size=2880,
            intermediate_size=2880,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            vocab_size=32_768,
        )
    )
    config = {
        "model_type": "gpt_oss",
        **sizes,
        "num_hidden_layers": args.layers,
        "sliding_window": 128,
        "pad_token_id": sizes["vocab_size"] - 2,
        "eos_token_id": sizes["vocab_size"] - 1,
    }
    device, cases = (
        "cpu" if args.cpu else "cuda",
        [case for case in CASES if not args.only or case in args.only or case == "base"],
    )
    length, new, rows = (160, 4, 2) if args.cpu else (256, 16, 8)
    prompts = torch.randint(
        sizes["vocab_size"] - 2, (rows, length), generator=torch.Generator().manual_seed(0)
    ).tolist()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        folder = Path(folder)
        export(args, config, folder)
        if not args.cpu:
            torch.cuda.empty_cache()
        sizes_mib = {
            p.name: sum(f.stat().st_size for f in p.iterdir()) / 2**20
            for p in sorted(folder.iterdir())
        }
        say(f"exported {', '.join(f'{name} ({mib:,.0f} MiB)' for name, mib in sizes_mib.items())}")
        check_adapter(folder, config, args.rank)
        records, job = {}, dict(folder=str(folder), prompts=prompts, new=new, rank=args.rank)
        for attempt in range(
            0 if args.cpu else 3
        ):  # what an engine took down with it is asked again, in a new process
            left = [case for case in cases if case not in records]
            if not left or args.limit - (time.time() - START) < 25:
                break
            if attempt:
                engine = Engine(args, args.log)
            records |= engine.work({**job, "cases": left}, args.limit - (time.time() - START) - 12)
        table, base = [], {}
        for case in cases:
            try:
                table.append(
                    compare(
                        case,
                        folder,
                        None if args.cpu else records.get(case, {}),
                        prompts,
                        device,
                        base,
                    )
                )
            except Exception as error:
                traceback.print_exc()
                table.append(
                    dict(case=case, error=f"{type(error).__name__}: {str(error)[:200]}", good=False)
                )
            if not args.cpu:
                torch.cuda.empty_cache()
        say("scored")
    heads = [
        "what vLLM reads",
        "moved by",
        "vLLM off",
        "transformers bf16 off",
        "ours bf16 off",
        "slope of vLLM",
        "of ours",
        "same first token",
        "its cost",
        "drawn ones' cost",
        "",
    ]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))

    def cell(row, name, form=".4f"):
        return "-" if row.get(name) is None else format(row[name], form)

    for row in table:
        cells = [
            row["case"],
            *(
                cell(row, name)
                for name in ("moved", "error_vllm", "floor_transformers", "floor_ours")
            ),
            cell(row, "slope_vllm", ".3f"),
            cell(row, "slope_ours", ".3f"),
            cell(row, "same_first", ".1%"),
            cell(row, "regret"),
            cell(row, "regret_drawn"),
            row.get("error") or ("within tolerance" if row["good"] else "OUT OF TOLERANCE"),
        ]
        print("| " + " | ".join(cells) + " |")
    print(
        (
            "mean |difference| in nats a token, against transformers' eager model in float32 on "
            "the same files; vLLM's own output: "
        )
        + str(args.log)
    )
    failed = [row["case"] for row in table if not args.cpu and not row.get("good")]
    print(
        json.dumps(
            dict(
                card=torch.cuda.get_device_name() if not args.cpu else "CPU",
                torch=torch.__version__,
                seconds=round(time.time() - START, 1),
                rows=table,
            )
        )
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
