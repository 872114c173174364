"""Thresholds beside the sorting form, in Triton's interpreter (on a GPU: on the card)."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from grpo_nb.rollout import decode_kernels, decode_ops, filter_kernels  # noqa: E402
from grpo_nb.rollout.sampling import (  # noqa: E402
    SamplingParams,
    processed_log_probs,
    sample_recorded,
    stream_keys,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "chosen",
    [
        dict(top_k=7),
        dict(top_p=0.9),
        dict(top_k=20, top_p=0.8, min_p=0.02, temperature=1.3),
    ],
    ids=str,
)
def test_as_by_sorting(dtype, chosen):
    "A flat row, one with tokens that cannot be drawn, ties, and two blocks."
    generator, params = torch.Generator().manual_seed(0), SamplingParams(**chosen)
    logits = (4 * torch.randn(4, 4500, generator=generator)).to(dtype)
    logits[0], logits[1, ::3] = torch.linspace(-1, 1, 4500).to(dtype), -torch.inf
    logits[2, 100:140] = logits[2].max()
    uniform = torch.rand(4, dtype=torch.float64, generator=generator)
    logits, uniform = logits.to(DEVICE), uniform.to(DEVICE)
    tokens, logps, left = filter_kernels.draw(logits, params, uniform)
    expected = sample_recorded(logits, params, uniform=uniform)
    least = filter_kernels.least_kept(
        logits, params, decode_kernels.block_sums(logits, params.temperature)[0]
    )
    kept = processed_log_probs(logits, params).isfinite()
    assert torch.equal((logits >= least[:, None]) & logits.isfinite(), kept)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logps, expected[1], atol=1e-5, rtol=0)
    assert torch.equal(left.ids.sort(-1).values, expected[2].ids.sort(-1).values)
    torch.testing.assert_close(left.log_mass, expected[2].log_mass, atol=1e-5, rtol=0)


def test_random_numbers_of_a_stream_are_those_of_the_formula():
    state = decode_ops.DecodeState.start([5, 3, 4], max_tokens=2, device=DEVICE)
    state.keys, rows = stream_keys(4, -9, DEVICE), torch.tensor([2, 0, 1], device=DEVICE)
    state.counts.copy_(torch.tensor([3, 0, 4095, 1]))
    numbers = decode_kernels.stream_numbers(rows, state)
    assert torch.equal(numbers, decode_ops.stream_numbers(rows, state))
