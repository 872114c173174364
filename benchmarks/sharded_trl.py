"""The run of `sharded.py` by TRL's GRPOTrainer with accelerate's FSDP2: the same random weights,
prompts, completions, micro-batches and adapters; record and options are the same.

    torchrun --nproc-per-node 2 benchmarks/sharded_trl.py qwen3-32b OUT.json --updates 5 --new 64
        each card draws with transformers' generate, which gathers every layer for every token
    torchrun --nproc-per-node 2 benchmarks/sharded_trl.py qwen3-32b OUT.json --layers 2 --cpu
        a narrow one of two layers, to try it out

Transformer layers are wrapped, the weights are in bf16 and, as TRL leaves them under FSDP, the
adapters in float32; gradient checkpointing is on (its default and ours), beta 0, so no reference
model. The first process makes the weights in host memory, the second's are pages that it never
touches; both get their shares from the first (`cpu_ram_efficient_loading`). The end token is
forbidden (`min_new_tokens`), so every completion has its full length. "sample" is TRL's
`_generate`, "score" its rewards, "train" the rest of its `training_step`, "update" the optimizer's
step, "seconds" the whole update. "begun_s" is from the start to the first update.
"""

import os
import tempfile
import time
from unittest import mock

import torch
from datasets import Dataset
from grpo_step import letters_reward, prompts_of
from peft import LoraConfig
from sharded import SHAPES, parsed, quickly, shape_of, told
from train_step import clear, peaks, synchronize, versions, word_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.initialization import no_init_weights
from trl import GRPOConfig, GRPOTrainer


def model_of(arguments):
    "transformers' model on the host; only the first process writes its weights."
    config = AutoConfig.for_model(**shape_of(arguments))
    with no_init_weights() if os.environ["RANK"] != "0" else quickly():
        # torch's own numbers, which transformers overwrites, would take minutes
        with mock.patch.object(torch.Tensor, "uniform_", lambda tensor, *given, **names: tensor):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class Watched(GRPOTrainer):
    "TRL's trainer with a clock on its parts, and the peaks of drawing and of training."

    clocks = ()  # of each update

    def timed(self, part, function, *given):
        synchronize()
        start, others = time.perf_counter(), self.inside()
        result = function(*given)
        synchronize()
        clock = self.clocks[-1]
        took = time.perf_counter() - start - (self.inside() - others)
        clock[part] = clock.get(part, 0.0) + took
        for name, value in peaks().items():
            clock[f"{part} {name}"] = max(clock.get(f"{part} {name}", 0), value or 0)
        return result

    def inside(self):
        "Seconds of the parts that happen inside `training_step`."
        return self.clocks[-1].get("sample", 0.0) + self.clocks[-1].get("score", 0.0)

    def _generate(self, *given):
        found = self.timed("sample", super()._generate, *given)
        self.clocks[-1]["drawn"] = sum(map(len, found[1]))
        clear()
        return found

    def _calculate_rewards(self, *given):
        return self.timed("score", super()._calculate_rewards, *given)

    def training_step(self, *given):
        clear()
        return self.timed("train", super().training_step, *given)


class Clock(TrainerCallback):
    "Where an update begins and ends."

    def __init__(self):
        self.clocks, self.first = [], None

    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()
        self.first = self.first or self.began
        self.clocks.append({})

    def on_pre_optimizer_step(self, *args, **kwargs):
        synchronize()
        self.moved = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        synchronize()
        now = time.perf_counter()
        self.clocks[-1].update(update=now - self.moved, seconds=now - self.began)


def settings(arguments, folder):
    "Those of `sharded.py` in TRL's names, and its FSDP2."
    drawn = arguments.prompts * arguments.completions // int(os.environ["WORLD_SIZE"])
    return GRPOConfig(
        output_dir=folder,
        max_steps=arguments.updates,
        num_generations=arguments.completions,
        per_device_train_batch_size=min(arguments.batch, drawn),
        gradient_accumulation_steps=drawn // min(arguments.batch, drawn),
        max_completion_length=arguments.new,
        generation_kwargs={"min_new_tokens": arguments.new},
        learning_rate=1e-5,
        beta=0.0,
        bf16=True,
        use_cpu=arguments.cpu,
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        fsdp=True,
        fsdp_config=dict(
            version=2,
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_layer_cls_to_wrap=["Qwen3DecoderLayer"],
            reshard_after_forward=True,
            cpu_ram_efficient_loading=True,
        ),
    )


def shared_out_on_cpu():
    "accelerate has FSDP2 for devices alone: here its processes on the CPU pass for some."
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    return mock.patch.dict(PartialState._shared_state, distributed_type=DistributedType.MULTI_XPU)


def main():
    arguments = parsed(__doc__, [name for name in SHAPES if name.startswith("qwen3")])
    start = time.perf_counter()
    model, clock = model_of(arguments), Clock()
    loaded, sizes = time.perf_counter() - start, model.config.to_dict()
    with tempfile.TemporaryDirectory() as folder:
        config = settings(arguments, folder)
        if arguments.cpu:
            shared_out_on_cpu().start()
        trainer = Watched(
            model,
            letters_reward,
            config,
            Dataset.from_list(prompts_of(sizes, arguments.prompts, arguments.prompt)),
            processing_class=word_tokenizer(sizes),
            callbacks=[clock],
            peft_config=LoraConfig(
                r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
            ),
        )
        trainer.clocks = clock.clocks
        trainer.train()
    told(
        arguments,
        clock.clocks,
        loaded_s=round(loaded, 1),
        begun_s=round(clock.first - start, 1),
        placed={str(weight.placements) for weight in trainer.model.parameters()}.pop(),
        log=trainer.state.log_history,
        **versions("trl", "accelerate"),
    )


if __name__ == "__main__":
    main()
