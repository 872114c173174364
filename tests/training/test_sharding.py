"Processes that each hold a share of the weights (FSDP2, gloo) make the updates of one."

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from sharded_child import (
    EVALUATED,
    PLANNED,
    SHARDED,
    evaluations,
    named,
    planned,
    run_of,
    sampled,
    write_named,
)
from small_runs import CLOCKS, small_model, weights_of, without_clocks
from test_distributed import STOPPED, goes_on, preempted, torchrun

from grpo_nb import GRPOConfig
from grpo_nb.model.memory_bytes import lora_parameters, read_shape
from grpo_nb.model.memory_fit import find_card
from grpo_nb.model.packed import PackedWeight
from grpo_nb.planning.plan import Setup, crossing, plan_of
from grpo_nb.serving.stand_in import StandIn, serving
from grpo_nb.training.sharding import (
    asked_by_launcher,
    asked_in_config,
    bytes_of,
    check_shardable,
    frozen_integers,
    settings_of,
    sharding_of,
)

pytestmark = pytest.mark.long

OTHERS = [name for name in EVALUATED if name != "adapter"]
QUICK = ("dapo", "packed experts", "adapter and kl", "unequal pieces")


def test_integers_are_cut_by_a_torch_that_asks_every_share_for_a_gradient(monkeypatch):
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    with frozen_integers():
        assert not _fsdp_param.nn.Parameter(torch.ones(2, dtype=torch.uint8)).requires_grad
        assert _fsdp_param.nn.Parameter(torch.ones(2)).requires_grad
        assert not _fsdp_param.nn.Parameter(torch.ones(2), requires_grad=False).requires_grad
        assert _fsdp_param.nn.Module is torch.nn.Module
    with pytest.raises(RuntimeError, match="floating point"):
        _fsdp_param.nn.Parameter(torch.ones(2, dtype=torch.uint8))


def started(*arguments, timeout=400):
    "Two processes of sharded_child.py; what they print to stderr."
    done = torchrun(*arguments, timeout=timeout, child="sharded_child.py")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    "What both processes ended with, of the cases that are asked for: one launch."
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    asked = [
        [one[kind] for one in params if kind in one] for kind in ("name", "evaluation", "model")
    ]
    out = tmp_path_factory.mktemp("sharded")
    write_named(out)
    started(out, "all_of_it", json.dumps(asked))
    return [torch.load(out / f"rank{rank}.pt") for rank in (0, 1)], out


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in SHARDED]
)
def test_shards_make_the_updates_of_whole_weights(name, ranks, tmp_path):
    first, second = (rank[name] for rank in ranks[0])
    trainer = run_of(tmp_path, name, 1)
    start = weights_of(trainer.model)
    trainer.train()
    for key, weight in weights_of(trainer.model).items():
        assert torch.equal(first["weights"][key], second["weights"][key])
        far = float((first["weights"][key] - weight).abs().max())
        assert far < (2e-3 if name == "float16" else 1e-5), (key, far)
    moved = [float((w - start[n]).abs().max()) for n, w in weights_of(trainer.model).items()]
    assert max(moved) > 1e-2
    total = sum(w.numel() for w in start.values())
    assert first["held"] + second["held"] == total and second["held"] > 0.4 * total
    for one, two in zip(trainer.log_history, first["history"], strict=True):
        for key in (
            {"loss", "grad_norm", "reward"} if name == "quantile" else set(one) - set(CLOCKS)
        ):
            close = dict(rel=0.05, abs=0.02) if name == "float16" else dict(rel=1e-3, abs=1e-4)
            assert two[key] == pytest.approx(one[key], **close), (one["step"], key)


@pytest.mark.parametrize(
    "evaluation", ["adapter", *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)]
)
def test_an_evaluation_of_shards_is_that_of_whole_models(evaluation, ranks, tmp_path):
    one = evaluations(tmp_path, evaluation, 1, None)
    losses = {"loss", "entropy"} | ({"kl"} if "beta" in EVALUATED[evaluation] else set())
    for rank in (0, 1):
        of_rank = torch.load(ranks[1] / f"evaluated{rank}.pt")[evaluation]
        for (size, count), shards in of_rank["full_shard"].items():
            whole = of_rank[None][size, count]
            assert {f"eval_{one}" for one in losses} <= shards.keys() == whole.keys()
            for key in whole.keys() - {f"eval_{clock}" for clock in CLOCKS} - set(CLOCKS):
                assert shards[key] == pytest.approx(whole[key], abs=1e-5), (size, count, key)
                if size == 1:  # then it is all the same which process has which batches
                    alone = one[size, count][key]
                    assert shards[key] == pytest.approx(alone, abs=1e-5), (count, key)
    assert abs(one[1, 5]["eval_loss"]) > 1e-3 and one[1, 5]["eval_loss"] != one[1, 3]["eval_loss"]


@pytest.mark.parametrize("model", PLANNED)
def test_the_planner_counts_the_bytes_of_two_processes(model, ranks, tmp_path):
    trainer = planned(tmp_path, model, 1)
    config = replace(trainer.config, per_device_train_batch_size=6, gradient_accumulation_steps=1)
    config = replace(config, fsdp="full_shard", bf16=False)  # what is gathered, and no casts
    setup = Setup(
        read_shape(trainer.model.config), find_card("H100"), config, PLANNED[model], 2, lora_r=3
    )
    made, trained = plan_of(setup), lora_parameters(setup.model, 3, cards=2)
    received = crossing(setup)
    for rank, of_rank in enumerate(torch.load(ranks[1] / f"counted{n}.pt")[model] for n in (0, 1)):
        if rank == 0:  # where a tensor's rows cannot be halved, it has one more
            assert of_rank["weights"] == sum(made.weights.values())
            assert of_rank["adapters"] == of_rank["gradients"] == 4 * trained
            assert of_rank["moments"] == 8 * trained
        assert of_rank["weights"] <= sum(made.weights.values())
        assert of_rank["gathered"] == made.moments["layer"]["copies"]
        gathered = sum(size for part, size in received.items() if part != "gradients")
        assert of_rank["received"] == {
            "allgather": 2 * gathered,
            "reduce": 2 * received["gradients"],
        }


@pytest.mark.parametrize("read", ["dense", "packed"])
def test_the_first_process_alone_reads_a_model(read, ranks):
    trainer = named(ranks[1], read, None)
    whole = sum(map(bytes_of, trainer.model.parameters()))
    first, second = (torch.load(ranks[1] / f"loaded{rank}.pt")[read] for rank in (0, 1))
    assert first["norms"] == second["norms"] == pytest.approx(trainer.reference.norms())
    models = 2 if first["norms"] else 1  # without an adapter, the reference is a second one
    assert first["held"] + second["held"] == whole
    assert (
        second["peak"] < models * second["held"] + 1.1 * second["gathered"] < 0.9 * models * whole
    )
    expected = dict(trainer.model.named_parameters())
    for key in [key for key in expected if isinstance(expected[key], PackedWeight)]:
        packed = expected.pop(key)
        expected |= {f"{key}_{part}": getattr(packed, part) for part in ("blocks", "scales")}
    for of_rank in (first, second):
        assert of_rank["weights"].keys() == expected.keys()
        assert all(torch.equal(of_rank["weights"][key], w) for key, w in expected.items())


def test_the_best_model_is_loaded_by_every_process_that_has_a_share(ranks):
    first, last = (
        load_file(ranks[1] / "best" / f"checkpoint-{n}" / "model.safetensors") for n in (1, 2)
    )
    assert any(not torch.equal(first[name], last[name]) for name in first)
    for rank in (0, 1):
        ended = torch.load(ranks[1] / f"best{rank}.pt")
        assert all(torch.equal(ended[name], weight) for name, weight in first.items())


def test_a_sharded_run_draws_and_resumes_bit_for_bit(ranks):
    for rank in (0, 1):
        whole, again = torch.load(ranks[1] / f"resumed{rank}.pt").values()
        assert without_clocks(whole["history"]) == without_clocks(again["history"])
        one, other = without_clocks([whole["evaluation"], again["evaluation"]])
        assert one == other
        assert whole["way"].startswith("directly")  # on the gathered tensors
        assert max(record["sampling/gap_max"] for record in whole["history"]) < 1e-4
        for name, weight in whole["weights"].items():
            assert torch.equal(weight, again["weights"][name]), name


def test_a_checkpoint_of_two_processes_goes_on_with_one(ranks, tmp_path):
    folder, one = ranks[1] / "sampled" / "checkpoint-2", dict(fsdp=None, max_steps=3)
    saved = load_file(folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="written by 2 processes and this run has 1: start as"):
        sampled(tmp_path, "other", folder, **one)
    trainer = sampled(tmp_path, "one", folder, gradient_accumulation_steps=2, **one)
    then, now = trainer.log_history[-2:]
    assert (then["step"], now["step"]) == (2, 3) and now["num_tokens"] > then["num_tokens"]
    moved = weights_of(trainer.model)
    far = [
        float((moved[n.replace(".weight", ".default.weight")] - w).abs().max())
        for n, w in saved.items()
    ]
    assert 0 < max(far) < 0.05  # one update of AdamW away
    ends = load_file(ranks[1] / "saved" / "adapter_model.safetensors")
    assert {n: w.shape for n, w in ends.items()} == {n: w.shape for n, w in saved.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    ["one draws, one waits", "an update that ends", "one machine alone", "a rank dies"],
)
def test_shards_are_in_the_checkpoint_after_a_signal(case, tmp_path):
    pause, rank, send, step = STOPPED[case]
    shards = dict(fsdp="full_shard", optim="adamw_torch")
    options = dict(rank=rank, save_steps=2 if case == "a rank dies" else 100, settings=shards)
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder in (stopped, whole):
        folder.mkdir()
    steps, seconds, said, status = preempted(stopped, send, pause=pause, **options)
    assert steps == [step] and status == 1, said[-3000:]  # none where a rank is not met
    # the others wait 25 s for one that is never written; a busy machine needs ten without that
    assert seconds < (40 if case == "a rank dies" else 20), said[-3000:]
    done = torchrun(whole, "resumed", json.dumps([str(stopped)]), json.dumps(shards), timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    goes_on(stopped, whole)


@pytest.mark.full
def test_shards_and_a_server_make_the_updates_of_whole_models_and_that_server(tmp_path):
    stand_in = StandIn(*small_model(), name="small", lora_dir=tmp_path, max_loras=3)
    with serving(stand_in) as url:
        said = started(tmp_path, "served", url)
    assert "view tensor" not in said  # torch's warning that gradients may be wrong
    for rank in (0, 1):
        shards, whole, *all_weights = torch.load(tmp_path / f"served{rank}.pt").values()
        some, alike = (one["weights"] for one in all_weights)
        assert all(float((some[name] - x).abs().max()) < 1e-5 for name, x in alike.items())
        assert all(
            record["sampling/gap_mean"] < 1e-5
            for one in all_weights
            for record in one["history"]
            if "loss" in record
        )
        for name, weight in whole["weights"].items():
            assert float((shards["weights"][name] - weight).abs().max()) < 1e-5, name
        histories = shards["history"], whole["history"]
        judged = [[r for r in one if "eval_loss" in r] for one in histories]
        for one, two in zip(*judged, strict=True):
            for key in ("eval_reward", "eval_loss", "eval_kl", "eval_entropy"):
                assert one[key] == pytest.approx(two[key], abs=1e-5)
        updates = [[r for r in one if "loss" in r] for one in histories]
        for one, two in zip(*updates, strict=True):
            for key in ("reward", "num_tokens", "sampling/staleness_mean"):
                assert one[key] == two[key]
            assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
        assert [one["sampling/staleness_max"] for one in updates[0]] == [0, 1, 1, 1]
        assert len(judged[0]) == 2
        assert max(w.abs().max() for n, w in whole["weights"].items() if "lora_B" in n) > 1e-2
    assert not stand_in.adapters.folders


def test_what_is_asked_for_and_what_is_refused(monkeypatch):
    assert asked_in_config(GRPOConfig()) is None
    assert asked_in_config(GRPOConfig(fsdp="full_shard auto_wrap")).reshard_after_forward
    assert not asked_in_config(GRPOConfig(fsdp="shard_grad_op")).reshard_after_forward
    for given, said in (
        (dict(fsdp="hybrid_shard"), "full_shard"),
        (dict(fsdp="full_shard", fsdp_config={"fsdp_version": 1}), "version 1 is not supported"),
        (dict(fsdp="full_shard", fsdp_config={"forward_prefetch": True}), "leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            asked_in_config(GRPOConfig(**given))
    with pytest.raises(ValueError, match="one process"):
        sharding_of(GRPOConfig(fsdp="full_shard"), 1)
    for name, value in dict(USE_FSDP="true").items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    told = dict(VERSION="2", STATE_DICT_TYPE="FULL_STATE_DICT", RESHARD_AFTER_FORWARD="false")
    for name, value in told.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    assert asked_by_launcher() == settings_of({"reshard_after_forward": False}, "a file")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ValueError, match="shards stay on the card"):
        asked_by_launcher()


def test_what_cannot_be_sharded_is_refused():
    model, config = small_model()[0], GRPOConfig()
    check_shardable(model, config)
    with pytest.raises(ValueError, match="name one in optim"):
        check_shardable(model, config, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="offload_activations=True"):
        check_shardable(model, GRPOConfig(offload_activations=True))
    model.lm_head.to(torch.bfloat16)
    with pytest.raises(ValueError, match="is bfloat16 and float32"):
        check_shardable(model, config)
