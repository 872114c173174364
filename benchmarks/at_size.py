"""Is it right at full size? Loss and adapter gradients of a gpt-oss of full width (random weights),
ours against transformers' eager model on the same weights, dequantised.

    python benchmarks/at_size.py              2 and 24 layers, bf16 and MXFP4: about four minutes
                                              on an H200
    python benchmarks/at_size.py --layers 2   the short one only
    python benchmarks/at_size.py --only mxfp4 --tokens 512
    python benchmarks/at_size.py --cpu        a tiny model, ours in float32 against float64

One model is built by load_model and computes four times: ours as it trains (routed experts, sink
attention, layers computed again, chunked head), then, its experts dequantised to dense weights,
transformers' own way (eager attention, eager experts, all logits) in bf16; then, every weight
widened in place, transformers' way in float32, which is the truth here (its norms and router never
compute in more), and ours in float32. Printed are loss, and |gradient - truth| / |truth| over all
adapters together and for the worst kind of adapter, and how many of the tokens' choices of experts
differ from the truth's: a random model turns rounding into other experts, so in bf16 both sides are
off, and ours may be no further off than transformers'.
Within tolerance, bf16: transformers' own error in the same run says how large rounding is. The
errors of our log-probs (root mean square over the tokens) are at most 1.25 times transformers'. The
loss is their mean, in which errors of either sign cancel more or less by chance: it is at most as
far from the truth as transformers', and four standard errors more (transformers' root mean square
over the root of the number of tokens: 1 case in 16,000 by chance). The error of all gradients
together is at most 1.25 times transformers', that of each kind of adapter at most 1.5 times, or
1 %.
In float32: loss 1e-5 (relative), all gradients 1e-3, each kind 5e-3, and ten times that where a tie
sent some token to another expert.
Adapters are on attention and, with up to 4 layers, on the experts too (PEFT makes a dense copy of a
layer's experts). What a layer adds to the residual stream is made smaller by the power of two next
to 1 / sqrt(2 layers), as trained models have it. The last line is JSON.
"""

import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from train_step import (
    ATTENTION,
    FULL,
    SMALL,
    Step,
    arguments,
    attempt,
    batch_of,
    child,
    clear,
    device_of,
    gpt_oss,
    peaks,
    random_ids,
    run_child,
    shown,
    tell,
    versions,
)

TOLERANCE = dict(
    tokens=1.25,
    least_tokens=1e-5,
    standard_errors=4,
    least=1e-2,
    all=1.25,
    kind=1.5,
    wide_loss=1e-5,
    wide_all=1e-3,
    wide_kind=5e-3,
    other_experts=10,
)


@torch.no_grad()
def damp(model, layers):
    "What each layer adds, times a power of two: exact in every format."
    from grpo_nb.model.packed import PackedWeight, experts_of

    by = -round(math.log2(2 * layers) / 2)
    for name, p in model.named_parameters():
        if name.endswith(
            (
                "o_proj.weight",
                "o_proj.base_layer.weight",
                "o_proj.bias",
                "o_proj.base_layer.bias",
                "down_proj_bias",
            )
        ):
            p.mul_(2.0**by)
    for experts in experts_of(model).values():
        if isinstance(experts.down_proj, PackedWeight):
            experts.down_proj.scales.sub_(-by)  # exponents, unsigned bytes
        else:
            experts.down_proj.mul_(2.0**by)


@torch.no_grad()
def widen(model, dtype):
    """Every frozen weight in `dtype`, packed ones dequantised; one at a time, so that old and new
    are together only once."""
    from grpo_nb.model.packed import PackedWeight

    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is None:
                continue
            if isinstance(p, PackedWeight):
                module._parameters[name] = torch.nn.Parameter(
                    p.dequantize().to(dtype).contiguous(), requires_grad=False
                )
            elif (
                p.is_floating_point()
                and (p.dtype != dtype)
                and not (p.requires_grad and dtype == torch.bfloat16)
            ):
                p.data = p.data.to(dtype)
    model.config.dtype = dtype


class Choices:
    "Inside `with`: the experts that each token is sent to, one tensor a layer."

    def __init__(self, model):
        self.routers, self.top, self.found = (
            [m for name, m in model.named_modules() if name.endswith("mlp.router")],
            model.config.num_experts_per_tok,
            {},
        )

    def __enter__(self):
        def note(router, inputs):
            if router in self.found:
                return  # the second pass of checkpointing
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            with torch.no_grad():
                self.found[router] = (
                    torch.nn.functional.linear(
                        x.to(router.weight.dtype), router.weight, router.bias
                    )
                    .topk(self.top)
                    .indices.sort()
                    .values.cpu()
                )

        self.hooks = [router.register_forward_pre_hook(note) for router in self.routers]
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def differ(self, other):
        "The share of (token, layer) pairs whose experts are not the same."
        pairs = [(self.found[r], other.found[r]) for r in self.routers]
        return sum((a != b).any(1).sum().item() for a, b in pairs) / sum(len(a) for a, _ in pairs)


def gradients(model):
    return {
        name: p.grad.detach().double().cpu()
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is not None
    }


def compute_ours(model, batch, autocast):
    """Log-probs, the gradients of their negative mean, and the choices of experts, as the trainer
    computes them."""
    step = Step(model, offload=True)
    model.zero_grad(set_to_none=True)
    try:
        with Choices(model) as choices:
            with torch.autocast(batch.prompt_ids.device.type, torch.bfloat16, enabled=autocast):
                logps = step.logps(batch).double()
            (-logps.mean()).backward()
        return logps.detach().flatten().cpu(), gradients(model), choices
    finally:
        step.close()


def compute_theirs(model, ids, autocast):
    "The same by transformers' own forward pass, from all logits."
    base = model.get_base_model()
    attention, experts = base.config._attn_implementation, base.config._experts_implementation
    base.set_attn_implementation("eager")
    base.set_experts_implementation("eager")
    model.train()
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    model.zero_grad(set_to_none=True)
    try:
        with Choices(model) as choices:
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
                logits = model(
                    input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
                ).logits
            wide = torch.promote_types(logits.dtype, torch.float32)
            logps = (
                torch.log_softmax(logits[:, :-1].to(wide), -1).gather(-1, ids[:, 1:, None]).double()
            )
            (-logps.mean()).backward()
        return logps.detach().flatten().cpu(), gradients(model), choices
    finally:
        model.zero_grad(set_to_none=True)
        base.set_attn_implementation(attention)
        base.config._experts_implementation = experts


def kind(name):
    return ".".join(
        part
        for part in name.split(".")
        if not part.isdigit() and part not in ("base_model", "model", "layers", "default", "weight")
    )


def distance(mine, truth):
    "Relative error of all gradients together, and of each kind of adapter."
    sums = {}
    for name, g in truth.items():
        d = sums.setdefault(kind(name), [0.0, 0.0])
        d[0] += (mine[name] - g).square().sum().item()
        d[1] += g.square().sum().item()
    errors = {k: math.sqrt(a / max(b, 1e-300)) for k, (a, b) in sums.items()}
    return math.sqrt(sum(a for a, _ in sums.values()) / sum(b for _, b in sums.values())), errors


def compare(args, sizes, weights, layers):
    device = device_of(args)
    targets = [*ATTENTION, "experts"] if layers <= 4 else ATTENTION
    model = gpt_oss(
        {**sizes, "num_hidden_layers": layers},
        weights,
        args.tokens,
        targets=targets,
        offload_embedding=False,
    )
    damp(model, layers)
    ids = random_ids(sizes, args.tokens, device)
    small, truth_dtype = (
        (torch.float32, torch.float64) if args.cpu else (torch.bfloat16, torch.float32)
    )
    autocast, found = not args.cpu, {}
    tell(
        note=f"{weights}, {layers} layers, {args.tokens} tokens, adapters on "
        f"{', '.join(targets)}: {shown(peaks()['peak'])} GiB",
        about=versions(),
    )
    found["ours"] = compute_ours(model, batch_of(ids), autocast)
    widen(model, small)
    found["transformers"] = compute_theirs(model, ids, autocast)
    clear()
    widen(model, truth_dtype)
    found["truth"] = compute_theirs(model, ids, False)
    wide, error = attempt(lambda: compute_ours(model, batch_of(ids), False))
    if error:
        tell(note=f"ours in {truth_dtype}: {error}")
    else:
        found["ours, wide"] = wide
    truth_logps, truth, choices = found["truth"]
    truth_loss, rows = -truth_logps.mean().item(), {}
    for name, (logps, grads, chosen) in found.items():
        if name == "truth":
            continue
        missing = truth.keys() ^ grads.keys()
        if missing:
            tell(note=f"{name}: gradients that only one side has: {sorted(missing)[:3]}")
        whole, kinds = distance(grads, {n: g for n, g in truth.items() if n in grads})
        worst = max(kinds, key=kinds.get)
        loss = -logps.mean().item()
        rows[name] = dict(
            loss=loss,
            loss_error=abs(loss - truth_loss) / abs(truth_loss),
            token_error=(logps - truth_logps).square().mean().sqrt().item(),
            gradient_error=whole,
            kinds=kinds,
            worst=worst,
            worst_error=kinds[worst],
            experts_differ=chosen.differ(choices),
            missing=len(missing),
        )
    ours, theirs, wide = rows["ours"], rows["transformers"], rows.get("ours, wide")
    t, verdict = TOLERANCE, []
    allowed = theirs["loss_error"] + t["standard_errors"] * max(
        theirs["token_error"], t["least_tokens"]
    ) / math.sqrt(len(truth_logps)) / abs(truth_loss)
    if ours["loss_error"] > allowed:
        verdict.append("loss")
    if ours["token_error"] > max(t["least_tokens"], t["tokens"] * theirs["token_error"]):
        verdict.append("log-probs")
    if ours["gradient_error"] > max(t["least"], t["all"] * theirs["gradient_error"]):
        verdict.append("gradients")
    verdict += [
        f"gradients of {k}"
        for k, error in ours["kinds"].items()
        if error > max(t["least"], t["kind"] * theirs["kinds"].get(k, 0))
    ]
    if wide:
        more = t["other_experts"] if wide["experts_differ"] else 1
        if (
            wide["loss_error"] > t["wide_loss"] * more
            or wide["gradient_error"] > t["wide_all"] * more
            or wide["worst_error"] > t["wide_kind"] * more
        ):
            verdict.append("ours in the truth's format")
    if any(row["missing"] for row in rows.values()):
        verdict.append("gradients are missing")
    tell(
        weights=weights,
        layers=layers,
        tokens=args.tokens,
        truth=str(truth_dtype).removeprefix("torch."),
        truth_loss=truth_loss,
        loss_allowed=allowed,
        within=not verdict,
        outside=verdict,
        rows=rows,
        **peaks(),
    )


def main():
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=["bf16", "mxfp4"], choices=["bf16", "mxfp4"])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 24])
    parser.add_argument("--tokens", type=int, default=384)
    args = parser.parse_args()
    sizes = SMALL if args.cpu else FULL
    if args.cpu:
        args.layers, args.tokens = [2], 48
    if args.child:
        weights, layers = args.child.split("-")
        return child(lambda: compare(args, sizes, weights, int(layers)))
    device_of(args)
    results, about, end = [], {}, time.time() + 60 * args.minutes

    def hear(record):
        if "about" in record:
            if not about:
                print(
                    ", ".join(f"{key} {value}" for key, value in record["about"].items()),
                    flush=True,
                )
            about.update(record["about"])
        if "note" in record:
            return print(record["note"], flush=True)
        results.append(record)
        print(
            f"    loss {record['truth_loss']:.6f} in {record['truth']} (the truth), "
            f"tolerance {record['loss_allowed']:.1e}, peak {shown(record['peak'])} GiB",
            flush=True,
        )
        for name, row in record["rows"].items():
            print(
                f"    {name:14s} loss {row['loss']:.6f}, relative error "
                f"{row['loss_error']:.1e}; a token's log-prob {row['token_error']:.1e}; "
                f"gradients {row['gradient_error']:.2e}, worst {row['worst_error']:.2e} "
                f"({row['worst']}); other experts {row['experts_differ']:.2%}",
                flush=True,
            )
        ours, theirs = record["rows"]["ours"], record["rows"]["transformers"]
        print(
            (
                "    ours / transformers: error of the gradients x "
                f"{ours['gradient_error'] / max(theirs['gradient_error'], 1e-300):.2f}; "
            )
            + (
                "within tolerance"
                if record["within"]
                else f"OUTSIDE: {', '.join(record['outside'])}"
            ),
            flush=True,
        )

    failed = False
    for layers in args.layers:
        for weights in args.only:
            left = end - time.time()
            why = (
                "left out: no time left"
                if left < 20
                else run_child(
                    __file__, f"{weights}-{layers}", sys.argv[1:], limit_s=left, hear=hear
                )
            )
            if why:
                failed = True
                results.append(dict(weights=weights, layers=layers, error=why))
                print(f"{weights}, {layers} layers: {why}", flush=True)
    print(json.dumps(dict(about=about, tolerance=TOLERANCE, results=results)))
    return 1 if failed or not all(row.get("within") for row in results) else 0


if __name__ == "__main__":
    sys.exit(main())
