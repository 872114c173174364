"Models released with towers: what a run on texts saves is read by transformers' own classes."

import re
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from released_models import RELEASED, released
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
)
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from grpo_nb import GRPOConfig, GRPOTrainer, load_model
from grpo_nb.model.export import save_adapter, save_merged
from grpo_nb.model.loading import memory_by_part
from grpo_nb.model.memory_bytes import (
    gathered_bytes,
    released_shape,
    trained_tensors,
    weight_bytes,
)
from grpo_nb.model.stored_weights import forms, in_towers, skeleton, towers, towers_in_16_bits
from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.rollout.decoder import open_decoder
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.serving.server import VLLMServer
from grpo_nb.serving.stand_in import StandIn, serving
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps
from grpo_nb.training.policy_model import describe_trainable, load_policy

ROWS = [{"prompt": f"{a}+{b}="} for a in (7, 12) for b in (1, 345)]
IDS = torch.tensor([[0, 0, 8, 9, 10, 11, 12], [7, 8, 9, 17, 18, 7, 9]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
PLACES = (MASK.cumsum(1) - 1).clamp(min=0)
ALL = LoraConfig(r=4, target_modules="all-linear")


def alternating(completions, **others):
    "A reward that differs inside every group, so that every update moves the weights."
    return [float(number % 2) for number in range(len(completions))]


def trained(folder, place, peft_config, dtype=torch.float32, resume=None, **settings):
    "A trainer after two updates."
    settings = dict(save_strategy="no") | settings
    config = GRPOConfig(
        output_dir=str(place),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=6,
        max_steps=2,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        model_init_kwargs={"dtype": dtype},
        **settings,
    )
    trainer = GRPOTrainer(str(folder), alternating, config, ROWS, peft_config=peft_config)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


@torch.no_grad()
def logits_of(model):
    "By the class's own forward pass, for rows of which one is padded on the left."
    model.eval()
    return model(input_ids=IDS, attention_mask=MASK, position_ids=PLACES).logits[MASK.bool()]


def distance(a, b):
    "The largest difference, as a part of the largest logit."
    return ((a.double() - b.double()).abs().max() / b.abs().max()).item()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "The folder of each model, written once."
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("released") / "model"
            released(name, made[name])
        return made[name]

    return folder


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-6), (torch.float64, 1e-8)])
@pytest.mark.parametrize("name", RELEASED)
def test_an_adapter_is_read_on_the_released_class(name, dtype, most, folders, tmp_path):
    trainer = trained(folders(name), tmp_path / "run", ALL, dtype)
    trainer.save_model(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(key.startswith("base_model.model.model.language_model.") for key in saved)
    base = AutoModelForImageTextToText.from_pretrained(folders(name), dtype=dtype)
    assert type(base) is type(trainer.model.get_base_model())
    before = logits_of(base)
    read = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert get_peft_model_state_dict(read).keys() == saved.keys()  # no tower has got one anew
    expected = logits_of(read)
    assert distance(logits_of(trainer.model), expected) <= most
    assert distance(before, expected) > 1e-3  # it does something

    batch = TrainingBatch(
        IDS[:, :4], MASK[:, :4].bool(), IDS[:, 4:], MASK[:, 4:].bool(), MASK[:, 4:].bool(), None
    )
    with torch.no_grad():
        logps, _ = completion_logps(trainer.model, batch)
    whole = expected.new_zeros(*IDS.shape, expected.shape[-1])
    whole[MASK.bool()] = expected
    wanted = whole[:, 3:-1].log_softmax(-1).gather(-1, IDS[:, 4:, None])[..., 0]
    assert (logps - wanted).abs().max() <= 10 * most * expected.abs().max()
    assert trainer.log_history[0]["sampling/gap_max"] < 1e-4  # what drew and what trains agree


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("peft_config", [None, ALL])
def test_towers_wait(name, peft_config, folders):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of names in towers, for instance
        model = load_policy(str(folders(name)), GRPOConfig(), peft_config)
    base = model.get_base_model() if peft_config else model
    beside = in_towers(base)
    waiting = [p for key, p in base.named_parameters() if key.startswith(beside)]
    assert waiting and not any(p.requires_grad for p in waiting)
    assert not any("lora" in key for key, _ in base.named_parameters() if key.startswith(beside))
    size = sum(p.nbytes for p in waiting) / 2**20
    assert f"({size:,.1f} MiB of weights, kept as they are)" in describe_trainable(model)
    if peft_config is None:
        others = [key for key, p in base.named_parameters() if not key.startswith(beside)]
        assert all(base.get_parameter(key).requires_grad for key in others)


def test_what_a_user_excludes_stays_excluded(folders):
    for given in (["q_proj"], r".*\.q_proj"):
        config = LoraConfig(r=2, target_modules="all-linear", exclude_modules=given)
        model = load_policy(str(folders("Gemma 3")), GRPOConfig(), config)
        names = [key for key, p in model.named_parameters() if p.requires_grad]
        assert names and not any("q_proj" in key or "vision" in key for key in names)
        assert config.exclude_modules == (set(given) if isinstance(given, list) else given)


def test_a_model_of_the_text_class_is_trained_as_it_is(folders, tmp_path):
    text = AutoModelForCausalLM.from_pretrained(folders("Qwen3.5"), dtype=torch.float32)
    assert "ForCausalLM" in type(text).__name__ and not towers(text)
    trainer = GRPOTrainer(
        text,
        alternating,
        GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            report_to="none",
            save_strategy="no",
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=4,
        ),
        ROWS,
        processing_class=None,
        peft_config=LoraConfig(r=2, target_modules="all-linear"),
    )
    trainer.train()
    assert trainer.model.get_base_model() is text


@pytest.mark.parametrize("name", ["Gemma 3", "Mistral 3"])
def test_the_decoder_reads_the_text_model_inside(name, folders):
    model = AutoModelForImageTextToText.from_pretrained(folders(name), dtype=torch.float32)
    config = LoraConfig(r=2, target_modules=r".*language_model.*_proj", init_lora_weights=False)
    model = get_peft_model(model, config).eval()
    decoder, way = open_decoder(model)
    assert way == "plain tensors"
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(IDS, MASK)]
    cache = decoder.cache([len(row) for row in rows], [1, 1], 1)
    with torch.no_grad():
        found = decoder.logits(decoder.prefill(cache, [0, 1], rows))
        wanted = model(input_ids=IDS, attention_mask=MASK, position_ids=PLACES).logits[:, -1]
    assert distance(found, wanted) < 1e-5


def stored(folder):
    "Every tensor of the files by name, by a plain reader."
    read = {}
    for file in sorted(folder.glob("*.safetensors")):
        read |= load_file(file)
    return read


def same_bytes(a, b):
    "Whether two tensors are equal bit by bit."
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", RELEASED)
def test_a_merge_is_the_release_but_for_what_was_trained(name, folders, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj"])
    trainer = trained(folders(name), tmp_path / "run", config)
    export = save_merged(trainer.model, tmp_path / "merged", dtype="float32", quiet=True)
    before, after = stored(folders(name)), stored(tmp_path / "merged")
    assert before.keys() == after.keys()
    changed = {key for key in before if not same_bytes(before[key], after[key])}
    text = {key for key in before if re.search(r"language_model.*(q_proj|o_proj|up_proj)", key)}
    assert changed == text and len(export.rows) == len(text)
    read = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert type(read) is type(trainer.model.get_base_model())
    assert distance(logits_of(read), logits_of(trainer.model)) < 1e-4


def test_a_merge_keeps_what_transformers_does_not_read(folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders("Qwen3.5"), folder)
    tensors = stored(folder)
    mtp = {"mtp.fc.weight": torch.randn(4, 6).to(torch.bfloat16)}
    wide = {key: x.float() + 1e-6 for key, x in tensors.items() if "visual" in key}
    save_file(tensors | mtp | wide, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text("{}")
    model, _ = load_model(
        folder,
        max_seq_length=64,
        lora_r=2,
        lora_targets="attention",
        dtype="bfloat16",
        device="cpu",
        quiet=True,
    )
    save_merged(model, tmp_path / "merged", quiet=True)
    before, after = stored(folder), stored(tmp_path / "merged")
    kept = {key for key in before if same_bytes(before[key], after[key])}
    assert before.keys() == after.keys() and kept >= mtp.keys() | wide.keys()
    assert (tmp_path / "merged" / "preprocessor_config.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["Qwen3-VL", "Gemma 3"])  # an own head, and a tied one
def test_a_merge_of_whole_weights_has_them(name, folders, tmp_path):
    trainer = trained(folders(name), tmp_path / "run", None)
    save_merged(trainer.model, tmp_path / "merged", dtype="float32", quiet=True)
    before, after = stored(folders(name)), stored(tmp_path / "merged")
    assert before.keys() == after.keys()
    towers = {key for key in before if "vis" in key or "projector" in key}
    kept = {key for key in before if same_bytes(before[key], after[key])}
    assert towers and towers <= kept and not any("_proj" in key for key in kept - towers)
    read = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    wanted = trainer.model.to(torch.bfloat16).state_dict()  # the files' number format
    assert all(torch.equal(x, wanted[key]) for key, x in read.state_dict().items())


def test_a_merge_without_the_files_says_so(folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders("Gemma 3"), folder)
    model = load_policy(str(folder), GRPOConfig(), ALL)
    before = stored(folder)
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match="all is written from memory"):
        save_merged(model, tmp_path / "merged", quiet=True)
    after = stored(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert all(same_bytes(before[key], x) for key, x in after.items() if "vision" in key)


@pytest.mark.parametrize("peft_config", [None, ALL])
def test_a_run_goes_on_from_its_checkpoint(peft_config, folders, tmp_path):
    config = dict(save_strategy="steps", save_steps=1)
    first = trained(folders("Gemma 3"), tmp_path / "run", peft_config, **config)
    again = trained(
        folders("Gemma 3"), tmp_path / "run", peft_config, resume=tmp_path / "run" / "checkpoint-1"
    )
    wanted = first.model.state_dict()
    assert all(torch.equal(x, wanted[key]) for key, x in again.model.state_dict().items())


@pytest.mark.parametrize("name", RELEASED)
def test_towers_are_not_quantised(name, folders):
    model = skeleton(AutoConfig.from_pretrained(folders(name)), torch.bfloat16)
    linear = {key for key, x in model.named_modules() if isinstance(x, torch.nn.Linear)}

    def quantised(settings):  # as transformers reads them
        left = get_keys_to_not_convert(model)
        left = left if settings.llm_int8_skip_modules is None else settings.llm_int8_skip_modules
        return {key for key in linear if should_convert_module(key, left)}

    asked = BitsAndBytesConfig(load_in_4bit=True)
    text = {key for key in linear if key.startswith("model.language_model.")}
    assert quantised(asked) > text  # left alone, transformers quantises towers
    assert quantised(towers_in_16_bits(asked, model)) == text
    asked = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["q_proj", "lm_head"])
    rest = {key for key in text if not key.endswith("q_proj")}
    assert quantised(towers_in_16_bits(asked, model)) == rest
    packed = {key for key, form in forms(model, torch.bfloat16, True).items() if form.kind == "nf4"}
    assert packed and all(key.startswith("model.language_model.") for key in packed)


def test_an_encoder_and_a_decoder_are_refused_in_a_sentence(tmp_path):
    AutoConfig.for_model("t5gemma2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'t5gemma2' is no language model that writes on"):
        load_policy(str(tmp_path), GRPOConfig())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["Qwen3.5", "Gemma 3", "Ministral 3"])
def test_a_server_of_the_released_class_reads_what_it_is_sent(name, whole, folders, tmp_path):
    served = AutoModelForImageTextToText.from_pretrained(folders(name), dtype=torch.float32)
    random = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = load_policy(str(folders(name)), GRPOConfig(), None if whole else random).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape) if p.requires_grad else 0.0)
    params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=(1,))
    prompts = [[8, 9, 10], [11, 12, 13, 14]]
    stand_in = StandIn(served.eval(), tiny_tokenizer(), name="small", lora_dir=tmp_path)
    with serving(stand_in) as url:
        sampler = VLLMServer(url, folder=tmp_path / "run", max_loras=1, whole=whole)
        sampler.publish(model, 1)
        there = sampler.generate(prompts, params)
        sampler.close()
    here = RolloutEngine(model, tiny_tokenizer()).generate(prompts, params)
    assert torch.equal(there.completion_ids, here.completion_ids)
    torch.testing.assert_close(there.logps, here.logps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", RELEASED)
def test_load_model_gives_towers_neither_adapter_nor_gradient(name, folders, tmp_path):
    settings = dict(max_seq_length=64, device="cpu", quiet=True)
    plain, _ = load_model(folders(name), **settings)
    beside = in_towers(plain)
    frozen = {key for key, p in plain.named_parameters() if not p.requires_grad}
    assert frozen == {key for key, _ in plain.named_parameters() if key.startswith(beside)}
    (row,) = [row for row in memory_by_part(plain) if row["part"] == "towers"]
    assert row["bytes"] == sum(plain.get_parameter(key).nbytes for key in frozen)
    model, _ = load_model(folders(name), lora_r=2, **settings)
    trains = {key: p for key, p in model.named_parameters() if p.requires_grad}
    assert trains and all(".language_model." in key for key in trains)
    for p in trains.values():
        torch.nn.init.normal_(p, std=0.2)
    save_adapter(model, tmp_path / "adapter")
    read = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert get_peft_model_state_dict(read).keys() == get_peft_model_state_dict(model).keys()
    assert distance(logits_of(read), logits_of(model)) <= 1e-6


@pytest.mark.parametrize("name", RELEASED)
def test_a_plan_counts_towers_in_16_bits_and_trains_none(name, folders):
    model = AutoModelForImageTextToText.from_pretrained(folders(name))
    wanted = sum(p.numel() for part in towers(model).values() for p in part.parameters())
    shape = released_shape(folders(name))
    assert wanted and shape.towers == shape.parameters["towers"] == wanted
    assert weight_bytes(shape, "nf4", True)["towers"] == 2 * wanted
    assert "towers" not in trained_tensors(shape, 0) and "towers" not in trained_tensors(shape, 8)
    whole = gathered_bytes(shape, "bf16") - gathered_bytes(replace(shape, towers=0), "bf16")
    assert whole == 2 * wanted
