"Runs on rows with pictures: they reach the sampler, the loss, checkpoints and evaluations."

import base64
import io
import json
import random

import datasets
import peft
import pytest
import torch
import transformers
import trl
from PIL import Image
from seeing_models import FAMILIES, asked, dots, seeing
from seen_by_others import EVERY, TRAINED, seen_by_others
from small_runs import weights_of

import grpo_nb
from grpo_nb import GRPOTrainer
from grpo_nb.model.pictures import pixels_of, with_pictures
from grpo_nb.model.stored_weights import towers
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.data import many_prompt_token_ids
from grpo_nb.training.policy_logprobs import completion_logps
from grpo_nb.training.report import read_run, report_html
from grpo_nb.widgets import dashboard

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = [
    asked(dots(1 + i % 3, width=(24, 16, 32)[i % 3], seed=i)) | {"answer": 1 + i % 3}
    for i in range(8)
]
ADAPTER = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])


def low(completions, **columns):
    "Likes bytes with small numbers."
    return [
        -len(one[0]["content"].encode()) / 10 - len(set(one[0]["content"])) for one in completions
    ]


def config_of(folder, library=grpo_nb, **changes):
    usual = dict(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        learning_rate=1e-2,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        disable_tqdm=True,
    )
    return library.GRPOConfig(**{**usual, **changes})


def run_of(kind, folder, rows=ROWS, adapter=ADAPTER, model=None, **changes):
    made, processor = seeing(kind)
    return GRPOTrainer(
        model or made,
        low,
        config_of(folder, **changes),
        rows,
        processing_class=processor,
        peft_config=adapter,
    )


def records_of(trainer):
    return [one for one in trainer.state.log_history if "reward" in one]


@pytest.mark.long
@pytest.mark.parametrize("kind", FAMILIES)
def test_sampler_and_trainer_see_the_same(kind, tmp_path):
    "A micro-batch is half of a cycle, and a row in it has no picture."
    rows = [*ROWS[:3], asked(text="no picture") | {"answer": 0}]
    trainer = run_of(
        kind, tmp_path, rows, per_device_train_batch_size=8, steps_per_generation=2, max_steps=4
    )
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    records = records_of(trainer)
    assert len(records) == 2 and max(one["sampling/gap_max"] for one in records) < 1e-4
    assert all(one["grad_norm"] > 0 for one in records)
    kept = dict(trainer.model.named_parameters())
    assert all(torch.equal(kept[name], weight) for name, weight in frozen.items())
    assert not any("visi" in n and ".lora" in n for n in kept), "the tower has no adapter"


def test_a_groups_picture_is_read_once_in_drawing_and_in_training(tmp_path):
    "And the run is that of rows each for itself."
    trained, read = [], []
    for row in (False, True):
        model, _ = seeing("qwen3_vl")
        if row:
            model.set_attn_implementation({"text_config": "sink"})
            tower = model.model.visual.patch_embed
            tower.register_forward_pre_hook(lambda _, given: read.append(len(given[0])))
        trainer = run_of("qwen3_vl", tmp_path, adapter=None, model=model, optim="sgd")
        trainer.train()
        trained.append(weights_of(trainer.model))
    for name, weight in trained[0].items():
        torch.testing.assert_close(trained[1][name], weight, rtol=0, atol=1e-5, msg=name)
    _, processor = seeing("qwen3_vl")
    prompts = many_prompt_token_ids([with_pictures(row) for row in ROWS[:4]], processor)
    patches = [len(one["pixel_values"]) for one in pixels_of(prompts)]
    assert {*read} == {sum(patches[:2]), sum(patches[2:])}
    assert read[-3:] != read[-1:] * 3, "once drawn, once trained"


PROJECTORS = {"gemma3": "model.multi_modal_projector.", "qwen3_vl": "model.visual.merger."}


def part_of(name, model, kind):
    "Which part of a model a weight or an adapter belongs to."
    name = name.removeprefix("base_model.model.").replace("deepstack_merger_list", "merger")
    if name.startswith(PROJECTORS[kind]):
        return "projector"
    return "tower" if name.startswith(tuple(towers(model))) else "text"


@pytest.mark.parametrize("kind", PROJECTORS)
@pytest.mark.parametrize("parts", [["text"], ["projector"], ["tower", "projector"], None])
def test_parts_train_by_name(kind, parts, tmp_path):
    "Without an adapter; None is TRL's: all of them."
    trainer = run_of(kind, tmp_path, adapter=None, train_parts=parts)
    before = weights_of(trainer.model)
    trainer.train()
    after = weights_of(trainer.model)
    moved = {
        part_of(name, trainer.model, kind) for name in after if not after[name].equal(before[name])
    }
    assert moved == set(parts or ("text", "tower", "projector"))
    assert ("and do not train" in trainer.trainable) == (parts == ["text"])


@pytest.mark.parametrize("kind", PROJECTORS)
@pytest.mark.parametrize("parts", [None, ["tower"], ["text", "projector"]])
def test_adapters_on_parts_by_name(kind, parts, tmp_path):
    "The same names stand in several parts, and whoever reads the adapter finds it on the same."
    adapter = peft.LoraConfig(r=2, target_modules="all-linear")
    trainer = run_of(kind, tmp_path, adapter=adapter, train_parts=parts, max_steps=1)
    base = trainer.model.get_base_model()
    having = {part_of(n, base, kind) for n, p in trainer.model.named_parameters() if ".lora" in n}
    wanted = set(parts or ["text"]) - ({"projector"} if kind == "gemma3" else set())
    assert having == wanted, "a Gemma 3's projector is a matrix, and no linear layer"
    trainer.train()
    assert records_of(trainer)[0]["grad_norm"] > 0
    trainer.save_model(tmp_path / "adapter")
    read = peft.PeftModel.from_pretrained(seeing(kind)[0], tmp_path / "adapter")
    mine = {n for n, _ in trainer.model.named_parameters()}
    assert mine == {n for n, _ in read.named_parameters()}


def test_parts_that_no_row_reaches_are_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="train_parts names tower, which no row reaches"):
        run_of("gemma3", tmp_path, [{"prompt": "how many?"}] * 4, train_parts=["tower"])
    with pytest.raises(ValueError, match="a list of some of 'text', 'tower', 'projector'"):
        config_of(tmp_path, train_parts=["eyes"])


@pytest.mark.parametrize("form", ["column", "parts", "one", "dataset", "bytes"])
def test_pictures_wherever_the_data_has_them(form, tmp_path):
    "The same pictures give the same run."
    rows = ROWS[:4]
    if form == "parts":
        rows = [
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "image": row["images"][0]},
                            {"type": "text", "text": "how many?"},
                        ],
                    }
                ],
                "answer": row["answer"],
            }
            for row in rows
        ]
    elif form != "column":
        rows = [
            {"prompt": row["prompt"], "image": row["images"][0], "answer": row["answer"]}
            for row in rows
        ]
    if form in ("dataset", "bytes"):
        rows = datasets.Dataset.from_list(rows)
        rows = rows.cast_column("image", datasets.Image(decode=form == "dataset"))
    trainer = run_of("idefics3", tmp_path, rows, max_steps=1)
    trainer.train()
    assert expected_reward(tmp_path) == pytest.approx(records_of(trainer)[0]["reward"])


def expected_reward(folder, held=[]):  # noqa: B006
    if not held:
        trainer = run_of("idefics3", folder / "expected", ROWS[:4], max_steps=1)
        trainer.train()
        held.append(records_of(trainer)[0]["reward"])
    return held[0]


def test_rewards_are_given_pictures_and_prompts(tmp_path):
    seen = {}

    def look(prompts, completions, images, answer, **columns):
        seen.update(prompts=prompts, images=images, answer=answer)
        return [0.0, 1.0] * (len(completions) // 2)

    _, processor = seeing("idefics3")
    trainer = GRPOTrainer(
        seeing("idefics3")[0],
        look,
        config_of(tmp_path, max_steps=1, log_completions=True),
        ROWS,
        ROWS[:2],
        processing_class=processor,
        peft_config=ADAPTER,
    )
    trainer.train()
    assert seen["images"][0][0].size == (24, 16) and len(set(seen["answer"])) == 2
    assert [part["type"] for part in seen["prompts"][0][0]["content"]] == ["image", "text"]
    shown = trainer.samples[0]
    assert shown["prompt"] == "user: [picture]how many?"
    (small,) = json.loads(shown["pictures"])
    small = Image.open(io.BytesIO(base64.b64decode(small.removeprefix("data:image/png;base64,"))))
    assert small.tobytes() == seen["images"][0][0].tobytes(), "it is small already"
    page, asked_for = report_html(read_run(tmp_path)), json.loads(shown["pictures"])[0]
    assert f'<img src="{asked_for}" alt="">' in page and "img-src data:" in page
    assert asked_for in dashboard.samples_table(trainer.samples)
    board = dashboard.run_of(trainer.state.log_history, trainer.samples)
    assert board["samples"][0]["pictures"] == [asked_for]
    assert trainer.evaluate()["eval_reward"] == pytest.approx(0.5)


def test_pictures_are_left_out_of_samples(tmp_path):
    settings = dict(max_steps=1, log_completions=True, log_multimodal=False)
    trainer = run_of("gemma3", tmp_path, **settings)
    trainer.train()
    assert trainer.samples and not any("pictures" in sample for sample in trainer.samples)


def batch_in(held):
    "The batch that a saved state holds, wherever it stands in it."
    if isinstance(held, dict):
        inside = [held["batch"]] if held.get("batch") else map(batch_in, held.values())
    else:
        inside = map(batch_in, held) if isinstance(held, list) else []
    return next((one for one in inside if one), None)


def test_a_checkpoint_in_the_middle_of_a_cycle_keeps_the_pictures(tmp_path):
    changes = dict(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
    )
    whole = run_of("qwen3_vl", tmp_path, **changes)
    whole.train()
    for number in (1, 3):
        folder = tmp_path / f"checkpoint-{number}"
        held = torch.load(folder / "training_state.pt", weights_only=True)
        batch = batch_in(held)
        assert len(batch["pixels"]) == 8 and batch["pixels"][0]["image_grid_thw"].shape == (1, 3)
        again = run_of("qwen3_vl", tmp_path / f"again-{number}", **changes)
        again.train(resume_from_checkpoint=str(folder))
        for name, weight in weights_of(whole.model).items():
            assert torch.equal(weight, weights_of(again.model)[name]), name


def test_peft_reads_the_adapter_on_the_released_class(tmp_path):
    trainer = run_of("qwen3_vl", tmp_path)
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    base, processor = seeing("qwen3_vl")
    assert isinstance(base, transformers.Qwen3VLForConditionalGeneration)
    read = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    batch = trainer.collector.collect(trainer.state)
    assert batch.pixels is not None and pixels_of([[1]]) is None
    with torch.no_grad():
        ours, _ = completion_logps(trainer.model, batch)
        theirs, _ = completion_logps(read, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (tmp_path / "adapter" / "processor_config.json").exists()
    assert processor.image_token == "<|image_pad|>"


def test_a_model_by_name_brings_its_processor(tmp_path):
    model, processor = seeing("idefics3")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    trainer = GRPOTrainer(
        str(tmp_path / "model"), low, config_of(tmp_path, max_steps=1), ROWS, peft_config=ADAPTER
    )
    assert isinstance(trainer.processing_class, transformers.Idefics3Processor)
    trainer.train()
    assert records_of(trainer)[0]["grad_norm"] > 0


def test_who_does_not_see_is_a_sentence(tmp_path):
    model, tokenizer = tiny_gpt_oss()
    given = dict(args=config_of(tmp_path), train_dataset=ROWS, processing_class=tokenizer)
    with pytest.raises(ValueError, match="GptOssForCausalLM reads none"):
        GRPOTrainer(model, low, **given)

    seer, processor = seeing("idefics3")
    with pytest.raises(ValueError, match="with max_staleness they would not reach"):
        run_of("idefics3", tmp_path, max_staleness=1)
    with pytest.raises(ValueError, match="reads texts alone"):
        trainer = GRPOTrainer(seer, low, **given | dict(processing_class=processor.tokenizer))
        trainer.train()
    with pytest.raises(ValueError, match="was not loaded from anywhere: pass processing_class"):
        GRPOTrainer(seer, low, **given | dict(processing_class=None))


def written_before(processor):
    "A rollout function that gives the same completions in every run."
    chance = random.Random(0)

    def rollout(prompts, trainer):
        tokenizer = processor.tokenizer
        drawn = [[chance.randint(20, 90) for _ in range(chance.randint(1, 5))] for _ in prompts]
        read = many_prompt_token_ids(
            [with_pictures({"prompt": prompt}) for prompt in prompts], processor
        )
        return {
            "prompt_ids": [*map(list, read)],
            "completion_ids": [ids + [tokenizer.eos_token_id] for ids in drawn],
            "logprobs": [[-1.0] * (len(ids) + 1) for ids in drawn],
        }

    return rollout


def trained(library, kind, folder, processor=None, **changes):
    "Weights after 20 updates on the same completions."
    model, own = seeing(kind)
    processor = processor or own
    if changes.get("beta"):  # TRL reads its reference from a folder
        model.save_pretrained(folder / "began")
        model.config._name_or_path = str(folder / "began")
    if changes.pop("frozen", False):
        for tower in towers(model).values():
            tower.requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith(
            ("k_proj.bias", "qkv.bias")
        ):  # moves all scores alike: its gradient is rounding
            weight.requires_grad_(False)
    trainer = library.GRPOTrainer(
        model,
        low,
        args=config_of(
            folder,
            library,
            max_steps=20,
            learning_rate=1e-3,
            vllm_importance_sampling_correction=False,
            **changes,
        ),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=processor,
        rollout_func=written_before(processor),
    )
    trainer.train()
    return weights_of(trainer.model), [r for r in trainer.state.log_history if "loss" in r]


@pytest.mark.long
@pytest.mark.parametrize("kind", TRAINED)
def test_weights_are_those_that_trl_has_stored(kind, tmp_path):
    "Of families whose processors TRL takes with torchvision alone; every 31st number is kept."
    ours, log = trained(grpo_nb, kind, tmp_path)
    theirs, began = seen_by_others()["weights"][kind], weights_of(seeing(kind)[0])
    assert ours.keys() == theirs.keys() and len(log) == 20
    for name, kept in theirs.items():
        mine = ours[name].flatten()[::EVERY]
        torch.testing.assert_close(mine, torch.tensor(kept), rtol=0, atol=1e-5, msg=name)
        assert "qkv.bias" in name or "k_proj.bias" in name or not began[name].equal(ours[name])


@pytest.mark.long
@pytest.mark.parametrize("kind, changes", [
    ("gemma3", dict(beta=0.1)),
    ("gemma3", dict(frozen=True)),
    ("idefics3", dict(gradient_accumulation_steps=2, loss_type="grpo")),
])  # fmt: skip
def test_weights_are_those_of_trl(kind, changes, tmp_path, monkeypatch):
    monkeypatch.setattr(trl.trainer.grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    theirs, their_log = trained(trl, kind, tmp_path / "trl", **changes)
    ours, our_log = trained(grpo_nb, kind, tmp_path / "grpo_nb", **changes)
    began = weights_of(seeing(kind)[0])
    assert ours.keys() == theirs.keys() and len(our_log) == len(their_log) == 20
    for weight in ours:
        torch.testing.assert_close(ours[weight], theirs[weight], rtol=0, atol=2e-5, msg=weight)
    assert max((ours[weight] - began[weight]).abs().max() for weight in ours) > 0.005
