"""Which kernel runs: attention, the planner and the micro-batch chooser give the same answer."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from grpo_nb.model import attention, limits
from grpo_nb.model.attention import BACKENDS, choose_backend
from grpo_nb.model.limits import (
    KERNELS,
    TRANSFORMERS_NAMES,
    asked_kernel,
    choose_kernel,
    is_old,
    prefers_cudnn,
)
from grpo_nb.model.masks import Mask
from grpo_nb.model.memory_bytes import MODELS
from grpo_nb.model.memory_fit import Step
from grpo_nb.training import micro_batches
from grpo_nb.training.config import GRPOConfig

CARDS = [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)]
LENGTHS = [64, 127, 128, 2048, 4095, 4096, 65_536]
OSS = MODELS["gpt-oss-20b"]


@pytest.fixture
def card(monkeypatch):
    "A function that pretends that every tensor lies on a card."

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
        monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name)
        monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
        monkeypatch.setattr(attention, "_cudnn_works", lambda *_: True)
        monkeypatch.setattr(micro_batches, "capability_of", lambda device: capability)

    return pretend


def tensors(length, dtype=torch.bfloat16, heads=64, head_size=64):
    "What choose_backend looks at of queries and keys on a card."

    def shaped(n):
        return SimpleNamespace(
            is_cuda=True,
            device=torch.device("cuda"),
            dtype=dtype,
            shape=torch.Size((1, n, length, head_size)),
        )

    return shaped(heads), shaped(8)


@pytest.fixture(scope="module")
def model():
    "gpt-oss-20b without memory."
    with torch.device("meta"):
        made = GptOssForCausalLM(GptOssConfig(num_local_experts=32, num_hidden_layers=1))
    made.config._attn_implementation = "sink"
    return made.bfloat16()


def of_pieces(model, length):
    "The kernel of a piece of one completion, as the micro-batch chooser reckons it."
    pieces = micro_batches.ModelPieces(model, GRPOConfig())
    pieces.shape = OSS
    return pieces.kernel(1, length)


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_three_callers_give_one_answer(card, model, capability, length):
    card(capability)
    step = Step(
        OSS, capability, lora_r=0, prompt_length=0, max_completion_length=length
    )  # frozen attention: no layers by heads
    answers = {
        "attention": choose_backend(*tensors(length))[0],
        "planner": step.kernel,
        "micro-batches": of_pieces(model, length),
    }
    assert len(set(answers.values())) == 1, answers


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize(
    "name", [name for name, kernel in TRANSFORMERS_NAMES.items() if kernel != "auto"]
)
def test_a_kernel_that_was_asked_for_is_taken(card, model, monkeypatch, capability, name):
    card(capability)
    monkeypatch.setattr(model.config, "_attn_implementation", name)
    kernel = TRANSFORMERS_NAMES[name]
    assert of_pieces(model, 8192) == kernel and kernel in BACKENDS
    if kernel in ("triton", "flex", "flash") and is_old(capability):
        with pytest.raises(ValueError, match="compute capability"):
            Step(OSS, capability, attention=name)
    else:
        assert Step(OSS, capability, lora_r=0, attention=name).kernel == kernel


def test_layers_by_heads_are_those_of_an_old_card():
    for capability, length in itertools.product(CARDS, LENGTHS):
        kernel = choose_kernel(capability=capability, queries=length, by_heads=True)[0]
        assert (kernel == "sink_heads") == (capability < (8, 0))
        step = Step(OSS, capability, prompt_length=0, max_completion_length=length)
        assert step.kernel == kernel
    assert Step(OSS, (7, 5), "nf4").kernel == "sdpa_lean"  # no sums over bitsandbytes' matrices


@pytest.mark.parametrize("capability", CARDS)
def test_models_without_sinks_take_torch_s_own(capability):
    assert Step(MODELS["Llama-3.1-8B"], capability).kernel == "sdpa"


def test_on_a_cpu_few_scores_are_computed_as_they_stand():
    q, k = torch.zeros(1, 2, 64, 8), torch.zeros(1, 2, 64, 8)
    assert choose_backend(q, k)[0] == "eager"
    long = torch.zeros(1, 1, 4096, 8)
    kernel, why = choose_backend(long, long)
    assert kernel == "sdpa" and why.endswith("(this is cpu)")
    few = limits.SMALL_SCORES
    assert [choose_kernel(capability=None, queries=9, scores=n)[0] for n in (few, few + 1)] == [
        "eager",
        "sdpa",
    ]


@pytest.mark.parametrize(
    "change, kernel, word",
    [
        (dict(dtype="float64"), "eager", "float64"),
        (dict(dtype="float32"), "sdpa", "float32"),
        (dict(triton=False), "sdpa", "not installed"),
        (dict(head_size=320), "sdpa", "320 wide"),
        (dict(queries=100, keys=100), "triton", "in Triton"),
        (dict(window=128), "triton", "in Triton"),
        (dict(cudnn=False), "triton", "in Triton"),
        (dict(keys=4095), "triton", "in Triton"),
        ({}, "flash", "a card"),
    ],
)
def test_the_reason_is_told(change, kernel, word):
    given = dict(capability=(9, 0), queries=8192, device="a card") | change
    assert choose_kernel(**given)[0] == kernel and word in choose_kernel(**given)[1]


def test_cudnn_is_asked_last(card, monkeypatch):
    card((9, 0))
    asked = []
    monkeypatch.setattr(attention, "_cudnn_works", lambda *given: asked.append(given))
    assert choose_backend(*tensors(2048))[0] == "triton" and not asked
    assert choose_backend(*tensors(8192), Mask(None, 8192, 8192, window=128))[0] == "triton"
    assert not asked
    assert choose_backend(*tensors(8192))[0] == "triton" and asked


def test_names():
    assert {asked_kernel(name) for name in TRANSFORMERS_NAMES} == {"auto", *BACKENDS}
    assert set(BACKENDS) | {"sink_heads", "flex"} == set(KERNELS)
    assert all(asked_kernel(name) == name for name in ("auto", *KERNELS))
    assert asked_kernel("flash_attention_2") == "sdpa" and asked_kernel("flex_attention") == "flex"


def test_the_line_between_kernels_is_a_limit(monkeypatch):
    monkeypatch.setattr(limits, "SHORTEST_CUDNN", 512)
    assert prefers_cudnn((9, 0), 512) and not prefers_cudnn((9, 0), 511)
    assert choose_kernel(capability=(9, 0), queries=512)[0] == "flash"


def test_the_module_is_light():
    code = "import sys; import grpo_nb.model.limits; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
