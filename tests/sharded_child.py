"""What each process of a sharded run does; started by test_sharding.py through torchrun, and
imported by it for the same run in one process.

torchrun --nproc_per_node 2 sharded_child.py OUT FUNCTION [JSON]
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from accelerate import PartialState
from distributed_child import CASES, ScriptedSource, scripted
from live_bytes import LiveBytes
from peft import LoraConfig
from small_runs import ROWS, small_model, small_trainer, weights_of
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_nb import GRPOTrainer, script
from grpo_nb.model.adapters import add_adapters, resolve_targets
from grpo_nb.model.export import save_mxfp4
from grpo_nb.model.packed import pack_experts
from grpo_nb.recipe import recipe_of
from grpo_nb.rollout.rollout import Rollout
from grpo_nb.training.collect import CompletionSource

STEPS = 5
EXTREME = dict(cispo=dict(epsilon_high=5.0), luspo=dict(importance_sampling_level="sequence"))
# name -> settings; beside the cases of whole weights on two processes
SHARDED = {
    **CASES,
    **{
        kind: dict(loss_type=kind, num_iterations=2, **EXTREME.get(kind, {}))
        for kind in ("cispo", "luspo", "sapo", "vespo")
    },
    "adapter and kl": dict(loss_type="dapo", learning_rate=1.0, beta=0.2, num_iterations=2),
    "moving reference": dict(
        loss_type="dapo", beta=0.2, sync_ref_model=True, ref_model_sync_steps=2
    ),
    "balanced experts": dict(loss_type="dapo", router_aux_loss_coef=0.1),
    "packed experts": dict(loss_type="dapo", learning_rate=1.0, num_iterations=2),
    "tied dense": dict(loss_type="dapo", num_iterations=2),
    "one idle": dict(loss_type="dapo", mask_truncated_completions=True),
    "recomputed": dict(loss_type="dapo", gradient_checkpointing=True),
    "kept": dict(
        loss_type="dapo",
        fsdp="shard_grad_op",
        beta=0.2,
        sync_ref_model=True,
        ref_model_sync_steps=1,
    ),
    "kept adapter": dict(
        loss_type="dapo", fsdp="shard_grad_op", learning_rate=1.0, beta=0.2, num_iterations=2
    ),
    "adamw": dict(loss_type="dapo", optim="adamw_torch", learning_rate=0.01, weight_decay=0.1),
    "unequal pieces": dict(loss_type="dapo", num_iterations=2),
}


class IdleSource(ScriptedSource):
    "The same completions, all of the second half of a generation cut off."

    def draw(self, rows, numbers=None):
        rollout = super().draw(rows, numbers)
        first = PartialState().process_index * len(numbers)
        idle = [first + i >= 6 for i in range(len(numbers))]
        rollout.finish_reasons = ["length" if one else "stop" for one in idle]
        return rollout


class Idle(GRPOTrainer):
    source_class = IdleSource


class AnswersByRow(CompletionSource):
    "Completions of an evaluation: a function of the row's number and of how often it was answered."

    answered = None

    def draw(self, rows, numbers=None):
        self.answered = Counter() if self.answered is None else self.answered
        made = []
        for row in rows:
            place = self.answered[row["number"]] % self.config.used("num_generations_eval")
            self.answered[row["number"]] += 1
            g = torch.Generator().manual_seed(10 * row["number"] + place)
            made.append(torch.randint(7, 21, (1 + (row["number"] + place) % 4,), generator=g))
        mask = torch.arange(4) < torch.tensor(list(map(len, made)))[:, None]
        ids = torch.nn.utils.rnn.pad_sequence([*made, torch.zeros(4).long()], True)[:-1]
        prompts = [self.tokenizer(row["prompt"]).input_ids for row in rows]
        return Rollout(prompts, ids * mask, mask, torch.zeros(mask.shape), ["stop"] * len(rows))


class Evaluated(GRPOTrainer):
    source_class = AnswersByRow


EVALUATED = {  # settings of evaluations; the first trains adapters, the others all weights
    "adapter": dict(beta=0.2, loss_type="dapo", num_iterations=2, mini_batch=2),
    "reference": dict(beta=0.2, loss_type="grpo", router_aux_loss_coef=0.1),
    "quantile": dict(loss_type="luspo", importance_sampling_level="sequence", num_iterations=2),
}
EVALUATED["quantile"]["top_entropy_quantile"] = 0.5


def evaluations(out, name, processes, fsdp):
    """What `evaluate` returns of one row (so that a second process has none), three and five, with
    batches of one and of three completions."""
    found = {}
    for size in (1, 3):
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        trainer = small_trainer(
            Path(out) / f"{name}{size}{fsdp}",
            trainer=Evaluated,
            arguments=dict(peft_config=lora) if name == "adapter" else {},
            per_device_train_batch_size=16 // processes,
            per_device_eval_batch_size=size,
            num_generations_eval=2,
            optim="sgd",
            fsdp=fsdp,
            **EVALUATED[name],
        )
        with torch.no_grad():
            for p in trainer.policy_update.parameters:  # away from the reference
                p.mul_(1.2) if name != "adapter" else p.add_(0.05)
        for count in (1, 3, 5):
            rows = [{**row, "number": n} for n, row in enumerate(ROWS[:count])]
            found[size, count] = trainer.evaluate(rows)
    return found


def evaluated(out, rank, names):
    "The evaluations that are named, of shards and of whole models."
    results = {
        name: {fsdp: evaluations(out, name, 2, fsdp) for fsdp in ("full_shard", None)}
        for name in names
    }
    torch.save(results, Path(out) / f"evaluated{rank}.pt")


def model_of(name):
    "Another model than that of `distributed_child`, or None."
    if name == "tied dense":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        tokenizer = small_model()[1]
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.25,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        return Qwen3ForCausalLM(config), tokenizer
    if name == "packed experts":
        model, tokenizer = small_model(hidden_size=32, intermediate_size=32)
        pack_experts(model)
        torch.manual_seed(0)
        return add_adapters(model, 4, resolve_targets(model, "all")), tokenizer
    if name in ("adapter and kl", "kept adapter"):
        return small_model()
    return None


def not_the_first(name, model):
    "A later process's model: without weights, or in one case with others, which do not count."
    if name != "unequal pieces":
        model.to("meta").tie_weights()
        return model
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    return model


def run_of(out, name, processes, **changes):
    "A trainer of one case."
    case = {"fsdp": "full_shard", **SHARDED[name], "max_steps": STEPS, **changes}
    if processes == 1:
        case["fsdp"] = None
    others = dict(zip(("model", "tokenizer"), model_of(name) or small_model()))
    if processes > 1 and os.environ["RANK"] != "0":
        others["model"] = not_the_first(name, others["model"])
    if name == "one idle":
        others["trainer"] = Idle
    if name in ("adapter and kl", "kept adapter"):
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        others["arguments"] = dict(peft_config=lora)
    return scripted(out, name, processes, **others, **case)


def equal(out, rank, names):
    "The cases that are named, one after the other."
    results = {}
    for name in names:
        trainer = run_of(out, name, 2)
        if name == "unequal pieces":  # one process would take one piece, the other two
            own, agreed = trainer.weights, trainer.weights.agreed
            own.agreed = lambda count, agreed=agreed: agreed(count + rank)
        trainer.train()
        results[name] = dict(
            history=trainer.log_history,
            weights=weights_of(trainer.model),
            held=sum(p.to_local().numel() for p in trainer.policy_update.parameters),
        )
    torch.save(results, Path(out) / f"rank{rank}.pt")


class Received(TorchDispatchMode):
    "Inside `with`: counts the bytes that this process receives, by kind of call."

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            whole = args[0] if "gather" in name else args[1]
            n = torch.distributed.get_world_size()
            self.bytes[name.split("_")[1]] += whole.nbytes * (n - 1) // n
        return operation(*args, **(kwargs or {}))


PLANNED = {"tied dense": "fp32", "packed experts": "mxfp4"}  # case -> the planner's format


def planned(out, name, processes):
    "A trainer of adapters of rank 3, which two processes cannot halve, on all linear layers."
    made = model_of(name)
    if name == "packed experts":
        model, tokenizer = small_model(hidden_size=32, intermediate_size=32, num_experts=3)
        pack_experts(model.to(torch.bfloat16))
    else:
        model, tokenizer = made
    model = add_adapters(model, 3, resolve_targets(model, "all"))
    case = dict(beta=0.2, num_iterations=2, optim="adamw_torch", max_steps=2, loss_type="dapo")
    fsdp = "full_shard" if processes == 2 else None
    return scripted(out, name, processes, model=model, tokenizer=tokenizer, fsdp=fsdp, **case)


def counted(out, rank, names):
    "Bytes that a process holds and receives, of the cases of `PLANNED` that are named."
    results = {}
    for name in names:
        trainer = planned(Path(out) / "counted", name, 2)
        found, update = Counter(), trainer.policy_update
        step = update.step

        def count(*given, found=found, update=update, step=step):
            found["gradients"] = sum(p.grad.to_local().nbytes for p in update.parameters)
            step(*given)

        update.step = count
        with Received() as received:
            trainer.train()
        for p in trainer.model.parameters():
            if isinstance(p, DTensor):
                kind = "adapters" if p.requires_grad else "weights"
                found[kind] += p.to_local().nbytes
        found["moments"] = sum(
            value.to_local().nbytes
            for state in trainer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, DTensor)
        )
        found["gathered"] = trainer.weights.spare_bytes
        results[name] = dict(found, received=dict(received.bytes))
    torch.save(results, Path(out) / f"counted{rank}.pt")


NAMED = dict(num_hidden_layers=8, hidden_size=64, intermediate_size=64)  # mostly layers


def write_named(out):
    "Folders with the models of `named`."
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    experts, tokenizer = small_model(**NAMED)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **heads, **NAMED)
    Qwen3ForCausalLM(config).save_pretrained(Path(out) / "dense")
    save_mxfp4(experts.to(torch.bfloat16), Path(out) / "packed", tokenizer=tokenizer, quiet=True)


def named(out, name, fsdp):
    "A trainer of a model that is named: to the trainer with all its weights, or in a recipe."
    model, settings = str(Path(out) / name), dict(fsdp=fsdp, beta=0.1, optim="sgd")
    if name == "packed":
        adapter = dict(use_peft=True, lora_r=4, lora_dropout=0, lora_target_modules="all")
        given = dict(load_in_4bit=True, dtype="bfloat16", output_dir=str(out), **adapter)
        recipe = recipe_of(dict(model_name_or_path=model, use_cpu=True, fsdp=fsdp, **given))
        model, _ = script.model_of(recipe)
    return small_trainer(Path(out) / f"named {name}", model=model, **settings)


def loaded(out, rank):
    "What a process holds of each model that is named, and the most that it held meanwhile."
    results = {}
    for name in ("dense", "packed"):
        with LiveBytes() as live:
            trainer = named(out, name, "full_shard")
        weights = {n: p for n, p in trainer.model.named_parameters() if isinstance(p, DTensor)}
        results[name] = dict(
            peak=live.peak,
            held=sum(p.to_local().nbytes for p in weights.values()),
            gathered=trainer.weights.spare_bytes,
            weights={n: p.full_tensor() for n, p in weights.items()},
            norms=trainer.reference.norms(),
        )
    torch.save(results, Path(out) / f"loaded{rank}.pt")


def worse_and_worse(completions, trainer_state, **columns):
    "A reward by which the first evaluation is the best."
    return [-float(trainer_state.global_step) for _ in completions]


def best(out, rank):
    "A run that ends with the weights of its first checkpoint."
    trainer = small_trainer(
        Path(out) / "best",
        worse_and_worse,
        arguments=dict(eval_dataset=ROWS[:1]),
        per_device_train_batch_size=8,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        beta=0.1,
        optim="adamw_torch",
        weight_decay=0.5,
        fsdp="full_shard",
    )
    trainer.train()
    torch.save(weights_of(trainer.model), Path(out) / f"best{rank}.pt")


def sampled(out, folder, resume=None, **changes):
    "A run that draws for itself, with an adapter; with it an evaluation."
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    settings = dict(
        per_device_train_batch_size=8,
        optim="adamw_torch",
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        beta=0.1,
        fsdp="full_shard",
    )
    trainer = small_trainer(
        Path(out) / folder, arguments=dict(peft_config=lora), **{**settings, **changes}
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def way_of(trainer):
    "How the engine draws while the weights are gathered."
    trainer.weights.gather()
    way = trainer.engine.way
    trainer.weights.release()
    return way


def all_of_it(out, rank):
    "`equal`, `evaluated`, `counted`, `loaded`, `best` and `resumed_alike` in one launch."
    cases, judged, planned_ones = json.loads(sys.argv[3])
    equal(out, rank, cases)
    best(out, rank)
    evaluated(out, rank, judged)
    counted(out, rank, planned_ones)
    loaded(out, rank)
    resumed_alike(out, rank)


def resumed_alike(out, rank):
    "A run, and the same from its middle on; its end, saved."
    results = {}
    for name in ("whole", "again"):
        resume = str(Path(out) / "sampled" / "checkpoint-2") if results else None
        trainer = sampled(out, "sampled", resume)
        results[name] = dict(
            history=trainer.log_history,
            weights=weights_of(trainer.model),
            way=way_of(trainer),
            evaluation=trainer.evaluate([{"prompt": "1+1="}] * 3),
        )
    trainer.save_model(Path(out) / "saved")
    torch.save(results, Path(out) / f"resumed{rank}.pt")


def served(out, rank):
    "Runs whose completions a server draws: on shards, and with the whole model in each process."
    lora = dict(
        r=4,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    server = dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=sys.argv[3])
    shape = dict(per_device_train_batch_size=8, max_steps=4, guard_every=1, eval_steps=3)
    adapted = dict(peft_config=LoraConfig(**lora), eval_dataset=ROWS[:1])
    results = {}
    for name, fsdp, given, more in (
        ("shards", "full_shard", adapted, dict(max_staleness=1, beta=0.1)),
        ("whole", None, adapted, dict(max_staleness=1, beta=0.1)),
        ("shards, all weights", "full_shard", {}, {}),
        ("whole, all weights", None, {}, {}),
    ):
        model, tokenizer = small_model()
        model.set_attn_implementation("sink")  # which reads a batch in one row
        more |= dict(eval_strategy="steps") if given else {}
        trainer = small_trainer(
            Path(out) / name,
            model=model,
            tokenizer=tokenizer,
            arguments=given,
            **dict(fsdp=fsdp, optim="adamw_torch", **shape, **server, **more),
        )
        trainer.train()
        results[name] = dict(history=trainer.log_history, weights=weights_of(trainer.model))
    torch.save(results, Path(out) / f"served{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[2]](sys.argv[1], int(os.environ["RANK"]))
    torch.distributed.destroy_process_group()
