"""Unsloth's calls: arguments of published notebooks, drawing with and without an adapter, saving,
and a training in between."""

import copy
import types

import pytest
import torch
from dense_models import float8_weights
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from grpo_nb import FastLanguageModel, FastVisionModel, GRPOConfig, GRPOTrainer, SamplingParams
from grpo_nb.compat import fast
from grpo_nb.model.export import save_mxfp4
from grpo_nb.model.packed import PackedWeight
from grpo_nb.model.tiny import tiny_gpt_oss

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["1+2=", "34*5=", "7="]


@pytest.fixture(scope="module")
def oss(tmp_path_factory):
    "A gpt-oss in the released layout."
    folder = tmp_path_factory.mktemp("oss") / "model"
    model, tokenizer = tiny_gpt_oss(0)
    save_mxfp4(model, folder, tokenizer=tokenizer, quiet=True)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    "A dense model, its head tied to its embedding."
    folder, tokenizer = tmp_path_factory.mktemp("qwen"), tiny_gpt_oss(0)[1]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder, **given):
    given = {"max_seq_length": 128, "load_in_4bit": False, "quiet": True} | given
    return FastLanguageModel.from_pretrained(model_name=folder, **given)


def adapt(model, **given):
    given = {"r": 4, "target_modules": SEVEN, "lora_alpha": 8, "quiet": True} | given
    return FastLanguageModel.get_peft_model(model, **given)


def shake(model, seed=1, size=0.3):
    "Second factors that are not 0."
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator) * size
    return model


def texts(model, request=None, prompts=PROMPTS):
    outputs = model.fast_generate(prompts, GREEDY, lora_request=request)
    return [output.outputs[0].text for output in outputs]


def factors(model):
    return {name: p.detach().clone() for name, p in get_peft_model_state_dict(model).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- arguments


@pytest.mark.parametrize("kind, rows", [(True, 1), ("row", 1), ("block", 128)])
def test_float8_as_notebooks_ask_for_it(kind, rows, oss):
    "True is a scale for each row, as there; no other argument has to change."
    model, _ = load(oss, load_in_4bit=True, load_in_fp8=kind, fast_inference=True)
    found = float8_weights(model)
    assert found and {p.block[0] for p in found.values()} == {rows}
    assert any("experts" in name for name in found)
    model.vllm_engine.sleep(2), model.vllm_engine.wake_up()
    with pytest.raises(ValueError, match="give load_in_fp8=True"):
        load(oss, load_in_8bit=True)


@pytest.mark.parametrize(
    "given",
    [
        dict(load_in_4bit=True, fast_inference=True, max_lora_rank=32, gpu_memory_utilization=0.9),
        dict(load_in_4bit=False, fast_inference=True, max_lora_rank=32),
        dict(load_in_4bit=True, offload_embedding=True),
        dict(load_in_4bit=False, offload_embedding=False, torch_dtype=torch.bfloat16),
        dict(load_in_4bit=True, dtype=None, use_gradient_checkpointing="unsloth", token=None),
        dict(load_in_4bit=True, load_in_8bit=False, full_finetuning=False, device_map="unsloth"),
        dict(load_in_4bit=False, unsloth_vllm_standby=True, float8_kv_cache=True, revision=None),
    ],
)
def test_calls_of_published_notebooks_are_accepted(given, oss, capsys):
    model, tokenizer = load(oss, **given, quiet=False)
    model = FastLanguageModel.get_peft_model(
        model,
        r=4,
        target_modules=SEVEN,
        lora_alpha=8,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
    )
    assert model.max_seq_length == tokenizer.model_max_length == 128
    packed = any(isinstance(p, PackedWeight) for p in model.parameters())
    assert packed == given["load_in_4bit"]
    assert model.dtype == given.get("torch_dtype", torch.float32)
    listed = [line for line in capsys.readouterr().out.splitlines() if "without effect" in line]
    asked = [n for n in given if n in fast.WITHOUT_EFFECT and n != "use_gradient_checkpointing"]
    assert len(listed) == bool(asked) and all(f"{n}=" in listed[0] for n in asked)


@pytest.mark.parametrize("name", fast.REFUSED)
def test_what_would_be_another_model_is_refused(name, oss):
    with pytest.raises(ValueError, match=f"{name}='yes' cannot be honoured: "):
        load(oss, **{name: "yes"})
    load(oss, **{name: fast.REFUSED[name][0]})


def test_unknown_arguments_are_named_with_the_nearest(oss):
    model, tokenizer = load(oss)
    for call, nearest in (
        (lambda: load(oss, max_sequence_length=8), "max_seq_length"),
        (lambda: load(oss, gpu_memory_utilisation=0.5), "gpu_memory_utilization"),
        (lambda: adapt(model, target_module=["q_proj"]), "target_modules"),
        (lambda: model.save_pretrained_merged("x", safe_serialisation=1), "safe_serialization"),
    ):
        with pytest.raises(TypeError, match=f"the nearest is '{nearest}'"):
            call()


def test_full_fine_tuning_loads_weights_that_move(oss):
    model, _ = load(oss, load_in_4bit=True, full_finetuning=True)
    assert all(p.requires_grad and type(p.data) is torch.Tensor for p in model.parameters())
    loss = model(torch.tensor([[7, 8, 9]]), labels=torch.tensor([[7, 8, 9]])).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("folder", ["oss", "qwen"])
def test_the_seven_names_reach_every_matrix(folder, request):
    model = adapt(load(request.getfixturevalue(folder))[0])
    adapted = {name.split(".lora_")[0] for name in get_peft_model_state_dict(model)}
    assert len(adapted) == 2 * (6 if folder == "oss" else 7)
    assert all(
        model.active_peft_config.to_dict()[n] == v for n, v in dict(r=4, lora_alpha=8).items()
    )
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())


def test_get_peft_model_honours_its_arguments(qwen):
    def adapted(**given):
        return adapt(load(qwen)[0], **given)

    one, two, other = adapted(random_state=1), adapted(random_state=1), adapted(random_state=2)
    assert same(factors(one), factors(two)) and not same(factors(one), factors(other))
    attention = adapted(target_modules=["q_proj"], use_rslora=True, lora_dropout=0.25, bias="all")
    config = attention.active_peft_config
    assert (config.use_rslora, config.lora_dropout, config.bias) == (True, 0.25, "all")
    assert {name.split(".lora_")[0][-6:] for name in factors(attention)} == {"q_proj"}
    assert len(factors(adapted(target_modules="all-linear"))) == len(factors(one))
    whole = adapted(target_modules=["q_proj"], modules_to_save=["norm"])
    assert any(p.requires_grad for name, p in whole.named_parameters() if "modules_to_save" in name)
    for given, on in (("unsloth", True), (True, True), (False, False)):
        model = adapted(use_gradient_checkpointing=given)
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) == on
    with pytest.raises(ValueError, match="layers_to_transform=.* cannot be honoured"):
        adapted(layers_to_transform=[1])


# ---- the functions on the model


def test_functions_belong_to_one_model(oss):
    base, _ = load(oss)
    model = adapt(base)
    for function in fast.BOUND:
        assert getattr(model, function.__name__).__self__ is model
        assert not hasattr(type(model), function.__name__)
    assert model.fast_generate.__func__ is fast.fast_generate
    assert not any("engine" in name for name in model.state_dict())
    twin = copy.deepcopy(model)
    assert twin.fast_generate.__self__ is twin is twin.engine.model
    shake(twin)
    assert texts(twin, twin.load_lora(twin.save_lora(oss.parent / "twin"))) != texts(model)


def test_modes(qwen):
    model = adapt(load(qwen)[0], use_gradient_checkpointing=False)
    assert FastLanguageModel.for_training(model).training
    assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    assert not model.for_inference().training
    assert model.for_training(use_gradient_checkpointing=False) is model and model.training


# ---- drawing


@pytest.mark.parametrize("folder", ["oss", "qwen"])
def test_prompts_in_every_form(folder, request):
    model, tokenizer = load(request.getfixturevalue(folder))
    chat = [{"role": "user", "content": "1+2="}]
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for prompts in ("1+2=", ["1+2=", "7="], chat, [chat, "1+2="], ["1+2=", chat]):
        outputs = model.fast_generate(prompts, sampling_params=GREEDY, lora_request=None)
        one = isinstance(prompts, str) or prompts is chat
        assert [output.prompt for output in outputs] == ([prompts] if one else prompts)
    by_chat, by_text = (model.fast_generate([p], GREEDY)[0] for p in (chat, written))
    assert by_chat.prompt_token_ids == by_text.prompt_token_ids
    assert by_chat.outputs == by_text.outputs
    with pytest.raises(ValueError, match="A prompt is .*multi_modal_data"):
        model.fast_generate({"prompt": "1", "multi_modal_data": {}}, GREEDY)


def test_completions_are_the_engines(oss):
    model, tokenizer = load(oss)
    params = SamplingParams(max_tokens=10, n=3, seed=5)
    outputs = model.fast_generate(PROMPTS, params)
    rollout = model.engine.generate(PROMPTS, params)
    drawn = [one for output in outputs for one in output.outputs]
    assert [one.text for one in drawn] == rollout.texts(tokenizer)
    assert [one.finish_reason for one in drawn] == rollout.finish_reasons
    assert [len(one.token_ids) for one in drawn] == rollout.lengths.tolist()
    assert [one.index for one in drawn] == [0, 1, 2] * 3


def test_a_stop_text_cuts_the_text(oss):
    model, _ = load(oss)
    params = dict(max_tokens=30, n=8, seed=0)
    free = model.fast_generate("1+2=", SamplingParams(**params))[0].outputs
    for include in (False, True):
        stop = dict(stop=["9", "=1"], include_stop_str_in_output=include)
        cut = model.fast_generate("1+2=", SamplingParams(**params, **stop))[0].outputs
        for whole, one in zip(free, cut):
            assert one.text == fast.cut_text(whole.text, stop["stop"], include)
            assert whole.token_ids[: len(one.token_ids)] == one.token_ids
    assert any(one.text != whole.text for one, whole in zip(cut, free))
    assert fast.cut_text("a;b,", [",", ";"]) == "a" and fast.cut_text("ab", [";"]) == "ab"


def test_parameters_of_vllm_mean_what_they_mean_there(oss):
    model, tokenizer = load(oss)
    end = tokenizer.eos_token_id
    theirs = types.SimpleNamespace(
        n=2, temperature=0.7, top_p=0.9, top_k=-1, min_p=0.0, seed=3, max_tokens=8,
        stop=["="], stop_token_ids=[9], repetition_penalty=1.0, presence_penalty=0.0,
        ignore_eos=False, logprobs=None, include_stop_str_in_output=True,
    )  # fmt: skip
    params = fast.our_params(theirs, 100, (end,))
    assert set(params.stop_token_ids) == {end, 9} and params.top_k is None
    assert (params.n, params.seed, params.max_tokens, params.stop) == (2, 3, 8, ("=",))
    assert [len(o.outputs) for o in model.fast_generate(PROMPTS, theirs)] == [2, 2, 2]
    theirs.skip_special_tokens = False
    special = [one.text for o in model.fast_generate(PROMPTS, theirs) for one in o.outputs]
    assert any("<|" in text for text in special)
    theirs.ignore_eos, theirs.max_tokens = True, None
    params = fast.our_params(theirs, 100, (end,))
    assert params.stop_token_ids == (9,) and params.max_tokens == 100
    theirs.presence_penalty = 0.5
    with pytest.raises(ValueError, match="presence_penalty=0.5 cannot be honoured"):
        model.fast_generate(PROMPTS, theirs)


@pytest.mark.parametrize("folder", ["oss", "qwen"])
def test_none_is_the_model_without_its_adapter(folder, request, tmp_path):
    base, _ = load(request.getfixturevalue(folder))
    plain = texts(base)
    model = shake(adapt(base))
    assert texts(model) == plain
    model.save_lora(tmp_path / "first")
    first = model.load_lora(tmp_path / "first")
    assert texts(model, first) == [t for t in model.engine.generate(PROMPTS, GREEDY).texts(
        model.engine.tokenizer)] != plain  # fmt: skip


@pytest.mark.parametrize("folder", ["oss", "qwen"])
def test_a_saved_adapter_stands_in_for_a_while(folder, request, tmp_path, monkeypatch):
    model = shake(adapt(load(request.getfixturevalue(folder))[0]))
    saved = model.load_lora(model.save_lora(tmp_path / "first"))
    first = texts(model, saved)
    shake(model, seed=2)
    own, held = factors(model), {id(p) for p in model.parameters()}
    assert texts(model, saved) == first
    assert texts(model, types.SimpleNamespace(lora_path=str(tmp_path / "first"))) == first
    assert same(factors(model), own) and {id(p) for p in model.parameters()} == held

    def fails(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.engine, "generate", fails)
    with pytest.raises(KeyboardInterrupt):
        model.fast_generate("1", GREEDY, lora_request=saved)
    assert same(factors(model), own)


def test_an_adapter_that_does_not_fit_says_what_to_change(oss, tmp_path):
    base, _ = load(oss)
    with pytest.raises(ValueError, match="call FastLanguageModel.get_peft_model first"):
        base.load_lora(tmp_path)
    model = adapt(base)
    for number, given in enumerate((dict(r=8), dict(lora_alpha=4), dict(use_rslora=True))):
        adapt(load(oss)[0], **given).save_lora(tmp_path / str(number))
        (name, value), *_ = given.items()
        with pytest.raises(ValueError, match=f"give get_peft_model {name}={value}"):
            model.load_lora(tmp_path / str(number))
    adapt(load(oss)[0], target_modules=["q_proj"]).save_lora(tmp_path / "q")
    with pytest.raises(ValueError, match="are on different weights, such as base_model"):
        model.load_lora(tmp_path / "q")


# ---- saving


def test_save_lora_replaces_an_adapter_and_nothing_else(oss, tmp_path):
    model = adapt(load(oss)[0])
    model.save_lora(tmp_path / "lora")
    shake(model)
    model.save_lora(str(tmp_path / "lora"))
    saved = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert same(saved, {name: p.contiguous() for name, p in factors(model).items()})
    (tmp_path / "lora" / "optimizer.pt").write_text("dear")
    with pytest.raises(ValueError, match="is not empty"):
        model.save_lora(tmp_path / "lora")
    assert (tmp_path / "lora" / "optimizer.pt").read_text() == "dear"


@pytest.mark.parametrize("method", ["merged_16bit", "mxfp4", "lora"])
def test_saved_models_draw_as_the_trained_one(method, oss, tmp_path):
    model = shake(adapt(load(oss)[0]))
    expected = texts(model, model.load_lora(model.save_lora(tmp_path / "lora")))
    folder = model.save_pretrained_merged(
        tmp_path / "saved", model.engine.tokenizer, save_method=method, token="hf", quiet=True
    )
    if method == "lora":
        again = PeftModel.from_pretrained(tiny_gpt_oss(0)[0], folder)
        assert same(factors(again), factors(model))
        return
    again, tokenizer = load(folder, load_in_4bit=method == "mxfp4")
    assert len(tokenizer) == len(model.engine.tokenizer)
    assert (AutoConfig.from_pretrained(folder).to_dict().get("quantization_config") is None) == (
        method == "merged_16bit"
    )
    if method == "merged_16bit":
        assert texts(again) == expected


def test_other_ways_of_saving_say_what_to_do(oss, tmp_path):
    model, tokenizer = load(oss)
    for method in ("merged_4bit", "merged_4bit_forced", "gguf"):
        with pytest.raises(ValueError, match="give 'merged_16bit', 'mxfp4'"):
            model.save_pretrained_merged(tmp_path / "x", tokenizer, save_method=method)
    with pytest.raises(ValueError, match="call model.push_to_hub_merged"):
        model.save_pretrained_merged(tmp_path / "x", tokenizer, push_to_hub=True)
    for call in (model.save_pretrained_gguf, model.push_to_hub_gguf):
        with pytest.raises(NotImplementedError, match="convert_hf_to_gguf.py x`"):
            call("x", tokenizer, quantization_method=["q4_k_m"], token="hf")
    assert list(tmp_path.iterdir()) == []


def test_a_merged_model_is_uploaded(oss, tmp_path, monkeypatch):
    sent = []

    class Hub:
        def __init__(self, token):
            sent.append(token)

        def create_repo(self, repo_id, **given):
            if sent[0] is None:
                raise OSError("401 Client Error\nmore")
            sent.append((repo_id, given))

        def upload_folder(self, folder_path, **given):
            sent.append(sorted(file.name for file in folder_path.iterdir()))
            return f"https://hub/{given['repo_id']}"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    model, tokenizer = load(oss)
    with pytest.raises(OSError, match="401 Client Error"):  # before anything is merged
        model.push_to_hub_merged("me/model", tokenizer, save_method="mxfp4", token="")
    sent.clear()
    address = model.push_to_hub_merged(
        "me/model", tokenizer, save_method="mxfp4", token="hf_x", private=True
    )
    assert address == "https://hub/me/model" and sent[0] == "hf_x"
    assert sent[1] == ("me/model", {"private": True, "exist_ok": True})
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(sent[2])


@pytest.mark.parametrize("folder", ["oss", "qwen"])
def test_an_adapter_is_loaded_with_its_model(folder, request, tmp_path):
    given = dict(load_in_4bit=folder == "oss")
    model = shake(adapt(load(request.getfixturevalue(folder), **given)[0]))
    saved = model.load_lora(model.save_lora(tmp_path / "lora"))
    again, tokenizer = load(str(tmp_path / "lora"), **given)
    assert same(factors(again), factors(model)) and again.fast_generate.__self__ is again
    assert all(p.requires_grad == (".lora_" in name) for name, p in again.named_parameters())
    drawn = again.engine.generate(PROMPTS, GREEDY).texts(tokenizer)
    assert drawn == texts(model, saved) != texts(again) == texts(model)


# ---- training in between


@pytest.mark.parametrize("folder", ["oss", "qwen"])
def test_a_trainer_takes_the_model_as_notebooks_give_it(folder, request, tmp_path):
    model, tokenizer = load(
        request.getfixturevalue(folder), load_in_4bit=folder == "oss", fast_inference=True
    )
    model = adapt(model, use_gradient_checkpointing="unsloth")
    before = texts(model)

    def digits(completions, **_):
        return [float(sum(c.isdigit() for c in text[0]["content"])) for text in completions]

    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}]} for n in range(8)]
    sampling = SamplingParams(min_p=0.1, top_p=1.0, top_k=-1, seed=3407)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[digits],
        args=GRPOConfig(
            vllm_sampling_params=sampling,
            learning_rate=0.05,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            num_generations=4,
            max_prompt_length=32,
            max_completion_length=8,
            max_steps=2,
            report_to="none",
            output_dir=str(tmp_path / "outputs"),
            use_cpu=True,
        ),
        train_dataset=rows,
    )
    trainer.train()
    assert trainer.model is model
    model.save_lora(tmp_path / "lora")
    assert all(p.any() for p in load_file(tmp_path / "lora/adapter_model.safetensors").values())
    assert texts(model) == before != texts(model, model.load_lora(tmp_path / "lora"))


@pytest.mark.filterwarnings("ignore")
def test_a_vision_model_is_the_released_class_and_reads_pictures(tmp_path):
    from seeing_models import asked, dots, seeing

    model, processor = seeing("qwen3_vl")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    loaded, reader = FastVisionModel.from_pretrained(
        str(tmp_path / "model"), max_seq_length=128, load_in_4bit=False, quiet=True
    )
    assert type(loaded) is type(model)
    held = copy.deepcopy(loaded)
    loaded = FastVisionModel.get_peft_model(loaded, r=4, finetune_vision_layers=False, quiet=True)
    names = [n for n, p in loaded.named_parameters() if p.requires_grad]
    assert names and not any("visual" in name for name in names)
    parts = dict(finetune_vision_layers=True, finetune_language_layers=False)
    seer = FastVisionModel.get_peft_model(held, r=4, quiet=True, **parts)
    names = {n.split(".lora_")[0] for n, p in seer.named_parameters() if p.requires_grad}
    linear = [n for n, m in model.model.visual.named_modules() if isinstance(m, torch.nn.Linear)]
    assert names == {f"base_model.model.model.visual.{name}" for name in linear}
    greedy = SamplingParams(temperature=0, max_tokens=6)
    chat = asked(dots(2))["prompt"]
    text = reader.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    parts = [{"type": "image", "image": dots(2)}, {"type": "text", "text": chat[0]["content"]}]
    asks = [
        {"prompt": text, "multi_modal_data": {"image": dots(2)}},
        [{"role": "user", "content": parts}],
    ]
    said = [one.outputs[0].token_ids for one in loaded.fast_generate(asks, greedy)]
    ids = processor([text], [[dots(2)]])
    their = model.generate(
        **{k: ids[k] for k in ("input_ids", "pixel_values", "image_grid_thw")},
        mm_token_type_ids=(ids["input_ids"] == model.config.image_token_id).long(),
        attention_mask=torch.ones_like(ids["input_ids"]),
        max_new_tokens=6,
        do_sample=False,
    )[0, ids["input_ids"].shape[1] :]
    assert list(said[0]) == list(said[1]) == their.tolist()
