"""What pictures take: sizes of released models against transformers' classes, and a tower's bytes
against what torch keeps."""

from dataclasses import replace

import pytest
import torch
import transformers as T
from live_bytes import LiveBytes
from seeing_models import asked, dots, processor_of, seeing
from torch.autograd.graph import saved_tensors_hooks

import grpo_nb
from grpo_nb.cli import main
from grpo_nb.model.memory_bytes import (
    MODELS,
    Tower,
    _seeing,
    _tower,
    picture_bytes,
    released_shape,
    trained_tensors,
)
from grpo_nb.model.memory_fit import CARDS, Step, fit
from grpo_nb.model.pictures import SIGHTS, pixels_of, with_pictures
from grpo_nb.planning.plan import describe, plan
from grpo_nb.rollout.rollout import pad_left
from grpo_nb.training.data import prompt_token_ids
from grpo_nb.training.micro_batches import ModelPieces
from grpo_nb.training.policy_logprobs import TrainingBatch

pytestmark = pytest.mark.filterwarnings("ignore")


def text(layers, hidden, inner, heads, kv, size, vocab, **more):
    return dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=size,
        vocab_size=vocab,
        **more,
    )


def rope(*sections):
    return {"rope_parameters": {"rope_type": "default", "mrope_section": [*sections]}}


ROPE3, ROPE25, TIED = rope(24, 20, 20), rope(16, 24, 24), {"tie_word_embeddings": True}
SMALL_EYES = dict(depth=24, hidden_size=1024, intermediate_size=4096)
SMALL_EYES |= dict(deepstack_visual_indexes=[5, 11, 17])
OF_25 = dict(hidden_size=1280, intermediate_size=3420)
SIGLIP = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27)
SIGLIP |= dict(num_attention_heads=16, patch_size=14)
GEMMA = SIGLIP | dict(image_size=896, vision_use_head=False)
BASE = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
BASE |= dict(image_size=512, patch_size=16)
LLAMA, APART = {"model_type": "llama"}, {"tie_word_embeddings": False}
RELEASED = {  # model_type, settings of text, of the tower, of both; and its numbers as released
    "Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        text(36, 2048, 11_008, 16, 2, 128, 151_936, **ROPE25, **TIED),
        OF_25 | {"out_hidden_size": 2048},
        TIED,
        3_754_622_976,
    ),
    "Qwen2.5-VL-7B": (
        "qwen2_5_vl",
        text(28, 3584, 18_944, 28, 4, 128, 152_064, **ROPE25),
        OF_25 | {"out_hidden_size": 3584},
        APART,
        8_292_166_656,
    ),
    "Qwen3-VL-2B": (
        "qwen3_vl",
        text(28, 2048, 6144, 16, 8, 128, 151_936, **ROPE3, **TIED),
        SMALL_EYES | {"out_hidden_size": 2048},
        TIED,
        2_127_532_032,
    ),
    "Qwen3-VL-4B": (
        "qwen3_vl",
        text(36, 2560, 9728, 32, 8, 128, 151_936, **ROPE3, **TIED),
        SMALL_EYES | {"out_hidden_size": 2560},
        TIED,
        4_437_815_808,
    ),
    "Qwen3-VL-8B": (
        "qwen3_vl",
        text(36, 4096, 12_288, 32, 8, 128, 151_936, **ROPE3),
        {"out_hidden_size": 4096},
        APART,
        8_767_123_696,
    ),
    "Gemma-3-4B": (
        "gemma3",
        text(34, 2560, 10_240, 8, 4, 256, 262_208, sliding_window=1024),
        GEMMA,
        {},
        4_300_079_472,
    ),
    "Gemma-3-12B": (
        "gemma3",
        text(48, 3840, 15_360, 16, 8, 256, 262_208, sliding_window=1024),
        GEMMA,
        {},
        12_187_325_040,
    ),
    "SmolVLM-256M": (
        "smolvlm",
        text(30, 576, 1536, 9, 3, 64, 49_280, **LLAMA),
        BASE,
        APART | {"scale_factor": 4},
        256_484_928,
    ),
    "SmolVLM-500M": (
        "smolvlm",
        text(32, 960, 2560, 15, 5, 64, 49_280, **LLAMA),
        BASE,
        APART | {"scale_factor": 4},
        507_482_304,
    ),
    "SmolVLM2-2.2B": (
        "smolvlm",
        text(24, 2048, 8192, 32, 32, 64, 49_280, **LLAMA),
        SIGLIP | {"image_size": 384},
        APART | {"scale_factor": 3},
        2_246_784_880,
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_has_its_numbers(name):
    "Counted in transformers' class without memory; its configuration is read as the table has it."
    kind, words, eyes, both, numbers = RELEASED[name]
    config = T.AutoConfig.for_model(kind, text_config=words, vision_config=eyes, **both)
    with torch.device("meta"):
        model = T.AutoModelForImageTextToText.from_config(config)
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == numbers
    shape, known = released_shape(config), MODELS[name]
    assert sum(known.parameters.values()) == numbers
    same = dict(name=name, max_positions=known.max_positions, tied=known.tied)
    assert replace(shape, **same) == known
    trains = trained_tensors(known, 8, (), tower=True)["towers"]
    eyes = next(m for n, m in model.named_modules() if n.endswith(("blocks.0", "layers.0")))
    wide = [p.shape for p in eyes.parameters() if p.ndim == 2]
    assert sum(n * a * b for n, a, b in trains) == known.tower.layers * 8 * sum(map(sum, wide))


def test_towers_that_are_known_are_those_whose_pictures_are_read():
    assert {*_seeing} == {*SIGHTS}
    others = "internvl", "kimi_k25", "qwen2_5_omni_thinker"  # patches in a list, merged otherwise
    for kind in (*SIGHTS, *others):
        tower = _tower(T.AutoConfig.for_model(kind).to_dict())
        odd = kind in ("gemma3", "gemma4")  # by default too few patches, and no tower
        assert (tower is None) == (odd or kind in others), kind


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_patches_of_a_token_in_grids(kind):
    model, processor = seeing(kind)
    prompt = prompt_token_ids(with_pictures(asked(dots(1), dots(2, 16, 40))), processor)
    patches = prompt.pixels["pixel_values"]  # (patches, numbers)
    tower = released_shape(model.config).tower
    assert patches.shape[1] == tower.numbers
    assert len(patches) == list(prompt).count(model.config.image_token_id) * tower.merged


@pytest.mark.parametrize("kind", ["gemma3", "idefics3", "smolvlm"])
def test_patches_of_a_token_in_whole_pictures(kind):
    model, _ = seeing(kind)
    prompt = prompt_token_ids(with_pictures(asked(dots(1))), processor_of(kind))
    pixels, tower = prompt.pixels["pixel_values"].flatten(0, -4), released_shape(model.config).tower
    patches = pixels.numel() // tower.numbers
    assert patches == list(prompt).count(model.config.image_token_id) * tower.merged


H, INNER = 64, 160
GRID = torch.tensor([[1, 16, 16]] * 4)
QWEN = dict(hidden_size=H, intermediate_size=INNER, num_heads=8, patch_size=4, out_hidden_size=H)
PLAIN = dict(hidden_size=H, intermediate_size=INNER, num_attention_heads=8, patch_size=4)
ONE = {"image_size": 128, "vision_use_head": False}  # a single picture of 1,024 patches
TOWERS = {  # family -> its class, the class' settings, the name of its depth
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", QWEN | {"window_size": 64}, "depth"),
    "qwen3_vl": (
        "Qwen3VLVisionConfig",
        QWEN | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        "depth",
    ),
    "siglip": ("SiglipVisionConfig", PLAIN | ONE, "num_hidden_layers"),
    "pixtral": (
        "PixtralVisionConfig",
        PLAIN | {"image_size": 128, "head_dim": 8},
        "num_hidden_layers",
    ),
}


def tower_of(kind, layers, dtype):
    "A tower of random weights, what 1,024 patches give it, and its sizes for the planner."
    name, given, depth = TOWERS[kind]
    config = getattr(T, name)(**given, **{depth: layers})
    torch.manual_seed(0)
    model = T.AutoModel.from_config(config, dtype=dtype).train()
    if kind.startswith("qwen"):
        given = dict(hidden_states=torch.randn(1024, 96).to(dtype), grid_thw=GRID)
        deep = len(getattr(config, "deepstack_visual_indexes", ()))
        sizes = Tower(layers, H, INNER, 96, 4, deep, kind == "qwen2_5_vl", True)
    else:
        given = dict(pixel_values=torch.randn(1, 3, 128, 128).to(dtype))
        if kind == "pixtral":
            given["image_sizes"] = torch.tensor([[128, 128]])
        sizes = Tower(layers, H, INNER, 48, 1, 0, kind == "pixtral", False)
    return model, given, sizes


def saved_bytes(model, given):
    "Bytes of the storages that autograd keeps, weights left out."
    held, kept = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x):
        held.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        out = model(**given)  # noqa: F841  it holds the graph
        return sum(x.untyped_storage().nbytes() for at, x in held.items() if at not in kept)


WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@WIDE
@pytest.mark.parametrize("kind", TOWERS)
def test_a_layer_of_a_tower_keeps(kind, dtype):
    "What two layers more keep for the backward pass."
    few, many = (saved_bytes(*tower_of(kind, n, dtype)[:2]) for n in (2, 4))
    tower = tower_of(kind, 2, dtype)[2]
    assert (many - few) / 2 / 1024 == pytest.approx(tower.kept(dtype.itemsize), rel=0.03)


@WIDE
@pytest.mark.parametrize("kind", [kind for kind in TOWERS if kind != "pixtral"])  # it has a mask
def test_a_tower_that_reads_without_gradients(kind, dtype):
    "The most at any time, which does not depend on how many layers there are."
    model, given, tower = tower_of(kind, 3, dtype)
    with torch.no_grad(), LiveBytes(*given.values(), *model.parameters()) as live:
        model(**given)
    assert live.peak / 1024 == pytest.approx(tower.working(dtype.itemsize), rel=0.1)


@WIDE
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "siglip"])
def test_a_tower_that_trains(kind, checkpointed, dtype):
    "Forward and backward, its pixels included."
    model, given, tower = tower_of(kind, 6, dtype)
    if checkpointed:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    own = [x for x in given.values() if not x.is_floating_point()]
    pixels = sum(x.nbytes for x in given.values() if x.is_floating_point())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    grads = [p.grad for p in model.parameters()]
    with LiveBytes(*own, *given.values(), *model.parameters(), *grads) as live:
        out = model(**given)
        out = out.pooler_output if kind.startswith("qwen") else out.last_hidden_state
        out.float().pow(2).mean().backward()
    shape = replace(MODELS["Qwen3-VL-2B"], hidden=H, tower=tower)
    tokens = 1024 // tower.merged
    _, most = picture_bytes(shape, tokens, dtype.itemsize, True, checkpointed)
    assert live.peak + pixels == pytest.approx(most, rel=0.17)


STEP = dict(
    shape=MODELS["Qwen3-VL-8B"],
    capability=(9, 0),
    prompt_length=20_000,
    max_completion_length=12_768,
    num_generations=4,
    generation_batch_size=8,
    per_device_train_batch_size=4,
)


def test_pictures_in_a_step():
    room = CARDS["H200"].room
    blind, frozen = Step(**STEP), Step(**STEP, picture_tokens=16_384)
    trained = replace(frozen, train_tower=True)
    without, made, more = (fit(step, room) for step in (blind, frozen, trained))
    assert "reading" not in without.moments and not without.host["pixels"]
    patches = 4 * 16_384
    assert made.host["pixels"] == 2 * patches * 1536 * 4, "of two prompts, in float32"
    for moment in ("head", "layer", "update"):
        assert made.totals[moment] == without.totals[moment], "what is read is gone again"
    of_four = made.moments["reading"]["pictures"]
    shared = fit(replace(frozen, share_prompt=True), room).moments["reading"]["pictures"]
    assert of_four == 4 * shared, "a group's picture is read once"
    kept = more.moments["layer"]["pictures"]
    assert kept == more.moments["head"]["pictures"] < more.moments["reading"]["pictures"]
    inputs = 4 * patches * 27 * 1152 * 2
    assert inputs < kept < 1.5 * inputs
    every = fit(replace(trained, gradient_checkpointing=False), room)
    assert every.moments["layer"]["pictures"] > 8 * kept


def test_a_plan_says_what_pictures_are():
    made = plan("Qwen3-VL-8B", "H100", context=8192, picture_tokens=4096, num_generations=2)
    assert made.setup.step.prompt_length == 4096 + 512
    said = describe(made)
    assert "4,096 tokens of each prompt are pictures: 16,384 patches, and 96 MiB of pixels" in said
    assert "does not train" in said and "reading: pictures go through their tower" in said
    whole = plan("Qwen3-VL-2B", "H200", context=8192, picture_tokens=4096, lora_r=0)
    assert whole.setup.train_tower and "GiB) trains" in describe(whole)
    numbers = sum(whole.setup.model.parameters.values())
    assert whole.setup.step.trained_numbers == numbers, "all of them, as in TRL"
    text = plan(
        "Qwen3-VL-2B", "H200", context=8192, picture_tokens=4096, lora_r=0, train_parts=["text"]
    )
    assert text.setup.step.trained_numbers == numbers - whole.setup.model.towers


@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm"])
def test_a_piece_counts_its_pictures(kind):
    "A group's once, where it is read in one row; and as what is kept where the tower trains."
    model, processor = seeing(kind)
    rows = [asked(dots(1), text="how many?"), asked(dots(2), text="and here?")]
    prompts = [prompt_token_ids(with_pictures(row), processor) for row in rows] * 2
    ids, mask = torch.full((4, 3), 65), torch.ones(4, 3).bool()
    batch = TrainingBatch(
        *pad_left(prompts), ids, mask, mask, torch.zeros(4), pixels=pixels_of(prompts)
    )
    pieces = ModelPieces(model, grpo_nb.GRPOConfig(report_to="none"))
    shape = pieces.shape
    tokens = list(prompts[0]).count(model.config.image_token_id)
    for p in model.parameters():
        p.requires_grad = False
    each = picture_bytes(shape, 4 * tokens, 4)
    assert pieces.seen_bytes(batch, 4) == each
    model.set_attn_implementation({"text_config": "sink"})
    assert pieces.seen_bytes(batch, 4) == picture_bytes(shape, 2 * tokens, 4)
    replies = replace(batch, pixels=None, reply_pixels=[*batch.pixels[:3], None])
    assert pieces.seen_bytes(replies, 4) == picture_bytes(shape, 3 * tokens, 4), "each its own"
    for p in model.parameters():
        p.requires_grad = True
    config = grpo_nb.GRPOConfig(gradient_checkpointing=False, report_to="none")
    pieces = ModelPieces(model, config)
    kept, most = pieces.seen_bytes(batch, 4)
    assert (kept, most) == picture_bytes(shape, 2 * tokens, 4, True, False) and kept
    blind = replace(batch, pixels=None)
    both = [pieces.bytes(one) for one in (batch, blind)]
    assert both[0] == max(both[1] + kept, most)


def test_the_command_line_plans_pictures(capsys):
    assert main(["plan", "Qwen3-VL-8B", "--card", "H100", "--pictures", "4096"]) == 0
    said = capsys.readouterr().out
    assert "16,384 patches" in said and "pictures and what reads them" in said
    assert main(["plan", "Qwen3-8B", "--pictures", "4096"]) == 2
    assert "4,096 tokens are pictures, and Qwen3-8B reads none" in capsys.readouterr().err
