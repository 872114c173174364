"""A group's prompt once in a row: the layout against one made by hand, attention and a model's
logits against rows that repeat each prompt, values and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from grpo_nb.model.attention import sink_attention
from grpo_nb.model.shared_prefix import share
from grpo_nb.model.tiny import tiny_gpt_oss


def batch(prompts, completions, prompt_of):
    "Prompts padded on the left and completions on the right, with their masks."
    P, T = max(map(len, prompts)), max([1, *map(len, completions)])
    chosen = [prompts[u] for u in prompt_of]
    prompt_ids = torch.tensor([[0] * (P - len(p)) + p for p in chosen])
    prompt_mask = torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p in chosen]).bool()
    completion_ids = torch.tensor([c + [0] * (T - len(c)) for c in completions])
    completion_mask = torch.tensor([[1] * len(c) + [0] * (T - len(c)) for c in completions]).bool()
    return prompt_ids, prompt_mask, completion_ids, completion_mask


EXAMPLE = (
    [[1, 2, 3], [4, 5, 6, 7, 8]],
    [[5, 5, 1], [6], [], [7, 7, 7, 2], [9, 9]],
    [0, 1, 0, 1, 0],  # groups that do not lie together
)


@st.composite
def batches(draw):
    "Some prompts, each with at least one completion, in any order; tokens may equal the padding."
    tokens = st.integers(0, 5)
    prompts = draw(
        st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=3, unique_by=tuple)
    )
    others = draw(st.lists(st.integers(0, len(prompts) - 1), max_size=4))
    prompt_of = draw(st.permutations([*range(len(prompts)), *others]))
    completions = [draw(st.lists(tokens, max_size=4)) for _ in prompt_of]
    return prompts, completions, prompt_of


@settings(deadline=None, max_examples=80)
@given(given=batches())
def test_each_prompt_and_each_completion_stands_in_the_row_once(given):
    prompts, completions, prompt_of = given
    sharing = share(*batch(*given))
    row, positions = sharing.ids[0].tolist(), sharing.positions[0].tolist()
    U, P, B, T = sharing.shape
    assert (U, P, B) == (len(prompts), max(map(len, prompts)), len(completions))
    assert sum(sharing.groups) == B and sharing.prompts == sum(map(len, prompts))
    assert len(row) == sharing.prompts + sum(map(len, completions))
    order, at, found = sharing.order.tolist(), 0, []
    for count in sharing.groups:  # the prompts, in the order of their groups
        prompt = prompts[prompt_of[order[len(found)]]]
        assert row[at : at + len(prompt)] == prompt
        assert positions[at : at + len(prompt)] == list(range(len(prompt)))
        at, found = at + len(prompt), found + [prompt] * count
    for b, prompt in zip(order, found, strict=True):
        own = completions[b]
        assert prompts[prompt_of[b]] == prompt and row[at : at + len(own)] == own
        start = len(prompt)
        assert positions[at : at + len(own)] == list(range(start, start + len(own)))
        at += len(own)


@settings(deadline=None, max_examples=80)
@given(given=batches())
def test_every_completion_token_is_predicted_from_the_token_before_it(given):
    prompts, completions, prompt_of = given
    sharing = share(*batch(*given))
    T = sharing.shape[3]
    N = sharing.ids.shape[1]
    hidden = torch.stack([torch.arange(N), sharing.ids[0], sharing.positions[0]], 1)
    before, targets = sharing.predicting(hidden), sharing.targets().tolist()
    assert sorted(targets) == [b * T + t for b, c in enumerate(completions) for t in range(len(c))]
    for (_, token, position), target in zip(before.tolist(), targets, strict=True):
        b, t = divmod(target, T)
        whole = prompts[prompt_of[b]] + completions[b]
        place = len(prompts[prompt_of[b]]) + t
        assert (token, position) == (whole[place - 1], place - 1)


def test_what_belongs_to_a_prompt_is_spread_over_its_group():
    sharing = share(*batch(*EXAMPLE))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    spread = sharing.spread(x)
    assert sharing.groups == (3, 2) and spread.shape == (5, 3)
    assert torch.equal(spread, x[[0, 0, 0, 1, 1]])
    (gradient,) = torch.autograd.grad(spread.sum(), x)
    assert gradient[:, 0].tolist() == [3, 2]


def test_masks_are_made_once_for_each_window():
    sharing = share(*batch(*EXAMPLE))
    assert sharing.masks(4) is sharing.masks(4) and sharing.masks(None) is not sharing.masks(4)


def in_rows(x, sharing, given):
    "The row's tokens (1, heads, N, D) in rows (B, heads, P + T, D), in the batch's order."
    prompts, completions, prompt_of = given
    U, P, B, T = sharing.shape
    order, at, rows = sharing.order.tolist(), sharing.prompts, {}
    begin, start = 0, {}
    for u in dict.fromkeys(prompt_of[b] for b in order):
        start[u], begin = begin, begin + len(prompts[u])
    assert len(start) == U
    for b in order:
        u, own = prompt_of[b], len(completions[b])
        read = x[0, :, start[u] : start[u] + len(prompts[u])]
        row = torch.cat([read, x[0, :, at : at + own]], 1)
        rows[b] = F.pad(row, (0, 0, P - len(prompts[u]), T - own))
        at += own
    return torch.stack([rows[b] for b in range(B)])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
@settings(deadline=None, max_examples=20)
@given(given=batches(), seed=st.integers(0, 9))
def test_attention_is_that_of_rows_that_repeat_the_prompt(window, with_sinks, given, seed):
    tensors = batch(*given)
    sharing, N = share(*tensors), share(*tensors).ids.shape[1]
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    q, k, v = draw(1, 4, N, 8), draw(1, 2, N, 8), draw(1, 2, N, 8)
    sinks = draw(4) if with_sinks else None
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    ours = in_rows(sharing.attend(sink_attention, q, k, v, sinks, window), sharing, given)
    theirs = sink_attention(
        *(in_rows(x, sharing, given) for x in (q, k, v)),
        sinks,
        pad_lens=(~tensors[1]).sum(1),
        window=window,
    )
    P, drawn = sharing.shape[1], tensors[3][:, None, :, None]
    ours, theirs = (y[:, :, P:] * drawn for y in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.randn(ours.shape, generator=g, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        for y in (ours, theirs)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_model_s_logits_and_gradients_are_those_of_rows():
    prompt_ids, prompt_mask, completion_ids, completion_mask = batch(*EXAMPLE)
    model, _ = tiny_gpt_oss()
    model.set_attn_implementation("sink")
    B, T, P = *completion_ids.shape, prompt_ids.shape[1]
    sharing = share(prompt_ids, prompt_mask, completion_ids, completion_mask)
    hidden = model.model(
        input_ids=sharing.ids,
        position_ids=sharing.positions,
        attention_mask=torch.ones_like(sharing.ids),
        use_cache=False,
        sharing=sharing,
    ).last_hidden_state[0]
    ours = torch.zeros(B * T, model.config.vocab_size)
    ours = ours.index_copy(0, sharing.targets(), model.lm_head(sharing.predicting(hidden)))
    ours = ours.view(B, T, -1)
    mask = torch.cat([prompt_mask, completion_mask], 1)
    theirs = model(
        input_ids=torch.cat([prompt_ids, completion_ids], 1),
        attention_mask=mask.long(),
        position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).logits
    theirs = theirs[:, P - 1 : -1] * completion_mask[..., None]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    leaves = [p for name, p in model.named_parameters() if "layers" in name and p.dim() > 1]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (ours, theirs))):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-7


def test_equal_tokens_under_unequal_padding_are_two_prompts():
    "A prompt is its real tokens: one that begins with the padding's id stays itself."
    prompt_ids = torch.tensor([[0, 3], [0, 3]])
    prompt_mask = torch.tensor([[0, 1], [1, 1]]).bool()
    completion_ids, completion_mask = torch.tensor([[1], [1]]), torch.ones(2, 1).bool()
    sharing = share(prompt_ids, prompt_mask, completion_ids, completion_mask)
    assert sharing.groups == (1, 1) and sharing.prompts == 3
