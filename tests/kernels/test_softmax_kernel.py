"The softmax kernel beside the same operations of torch, interpreted where there is no GPU."

import pytest
import torch

from grpo_nb.algorithm.logprobs import _softmax_chunk
from grpo_nb.kernels.training_kernels import softmax_chunk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("V", [1, 7, 4096, 5000])
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_kernel_does_what_the_operations_do(dtype, V, graded, entropy):
    "Temperature, scale, logits of -inf, a row's token at either end; interpreted without a GPU."
    torch.manual_seed(V)
    logits = (8 * torch.randn(6, V)).to(DEVICE, dtype)
    index = torch.randint(V, (6,), device=DEVICE)
    index[0], index[1] = 0, V - 1
    if V > 1:
        logits[2:4, (index[2] + 1) % V], logits[3, index[3]] = -torch.inf, -torch.inf
    grads = torch.randn(6, device=DEVICE) if graded else None
    ours, plain = logits.clone(), logits.clone()
    logps, entropies = softmax_chunk(
        ours, index, grads, temperature=0.7, scale=0.5, entropy=entropy
    )
    right, right_entropies = _softmax_chunk(
        plain, index, grads, temperature=0.7, softcap=None, scale=0.5, entropy=entropy
    )
    torch.testing.assert_close(logps, right)
    assert (entropies is None) == (not entropy)
    if entropy:
        torch.testing.assert_close(entropies, right_entropies, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(
        ours,
        plain,
        atol=1e-6,
        rtol={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype],
    )


def test_the_kernel_takes_no_rows_and_tells_of_a_token_that_is_none():
    assert softmax_chunk(
        torch.zeros(0, 5, device=DEVICE), torch.zeros(0, dtype=torch.long, device=DEVICE)
    )[0].shape == (0,)
    assert softmax_chunk(torch.zeros(3, 5, device=DEVICE), torch.tensor([-1, 4, 5], device=DEVICE))[
        0
    ].isnan().tolist() == [True, False, True]


def test_log_probs_and_gradients_are_those_of_autograd():
    "Beside torch's own log-softmax in float64."
    torch.manual_seed(0)
    logits = torch.randn(4, 33, device=DEVICE)
    index, grads = torch.tensor([0, 5, 32, 7], device=DEVICE), torch.randn(4, device=DEVICE)
    wide = logits.double().requires_grad_()
    right = (wide / 0.5).log_softmax(-1).gather(1, index[:, None]).squeeze(1)
    (slope,) = torch.autograd.grad(right @ grads.double(), wide)
    logps, _ = softmax_chunk(logits, index, grads, temperature=0.5)
    torch.testing.assert_close(logps.double(), right.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.double(), slope, rtol=1e-5, atol=1e-6)
