"""Sampling against transformers' own processors, and against the statistics that draws must
have."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_nb.rollout.sampling import (
    MOST_SURVIVORS,
    SamplingParams,
    SurvivorRecord,
    behind,
    draw,
    processed_log_probs,
    room_for_survivors,
    sample_recorded,
    sample_tokens,
    stream_numbers,
)


def theirs(
    logits,
    ids,
    padding,
    *,
    temperature=1.0,
    top_k=None,
    top_p=1.0,
    min_p=None,
    repetition_penalty=1.0,
):
    "transformers' processors in the order in which `generate` builds them."
    scores = logits.clone()
    if repetition_penalty != 1:  # row by row, without the padding
        penalty = RepetitionPenaltyLogitsProcessor(repetition_penalty)
        scores = torch.cat(
            [penalty(ids[i : i + 1, p:], scores[i : i + 1]) for i, p in enumerate(padding)]
        )
    if temperature != 1:
        scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return scores.log_softmax(-1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(2, 60),
    scale=st.sampled_from([0.5, 3.0, 12.0]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, 0, 1, 3, 100]),
    top_p=st.sampled_from([1e-3, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([None, 0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_same_distribution_as_transformers(seed, vocabulary, scale, **chosen):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocabulary, generator=g) * scale
    ids = torch.randint(vocabulary, (4, 5), generator=g)
    padding = torch.tensor([0, 1, 2, 4])
    seen = torch.zeros(4, vocabulary, dtype=torch.bool)
    for row, p in enumerate(padding):
        seen[row, ids[row, p:]] = True
    ours, expected = (
        processed_log_probs(logits, SamplingParams(**chosen), seen),
        theirs(logits, ids, padding, **chosen),
    )
    assert torch.equal(ours == -torch.inf, expected == -torch.inf)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_ties_are_kept_as_in_transformers():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, -1.0]])
    for chosen in (dict(top_k=2), dict(top_k=1), dict(min_p=math.exp(-1) - 1e-4), dict(min_p=1.0)):
        assert torch.equal(
            processed_log_probs(logits, SamplingParams(**chosen)) > -torch.inf,
            theirs(logits, None, None, **chosen) > -torch.inf,
        )


def test_the_smallest_set_that_is_exactly_as_likely_as_asked():
    "Half of the probability stands in one token, and the half is all that is kept."
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log()
    kept, expected = (
        which > -torch.inf
        for which in (
            processed_log_probs(logits, SamplingParams(top_p=0.5)),
            theirs(logits, None, None, top_p=0.5),
        )
    )
    assert kept.tolist() == expected.tolist() == [[False, True, False]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_log_probs_are_float32_and_sum_to_one(dtype):
    logits = (torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    logprobs = processed_log_probs(logits, SamplingParams(temperature=0.6, top_p=0.8))
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(3))
    torch.testing.assert_close(
        logprobs, theirs(logits.float(), None, None, temperature=0.6, top_p=0.8)
    )


def test_smallest_temperature_is_finite():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0)) * 50
    logprobs = processed_log_probs(logits, SamplingParams(temperature=1e-5))
    assert not logprobs.isnan().any() and torch.equal(logprobs.argmax(-1), logits.argmax(-1))


def test_inputs_are_not_changed():
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    seen = logits > 0
    before = logits.clone(), seen.clone()
    for t in (0, 0.7):
        sample_tokens(
            logits,
            SamplingParams(temperature=t, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.5),
            seen,
        )
    assert torch.equal(logits, before[0]) and torch.equal(seen, before[1])


@pytest.mark.parametrize(
    "chosen",
    [
        dict(),
        dict(temperature=2.0),
        dict(top_k=5, temperature=0.8),
        dict(top_p=0.7),
        dict(min_p=0.2),
    ],
)
def test_draws_follow_the_distribution(chosen):
    count, logits = 50_000, torch.randn(1, 12, generator=torch.Generator().manual_seed(1)) * 1.5
    logprobs = theirs(logits, None, None, **chosen)
    tokens, logps = sample_tokens(
        logits.expand(count, -1),
        SamplingParams(**chosen),
        generator=torch.Generator().manual_seed(2),
    )
    observed, possible = tokens.bincount(minlength=12), logprobs[0] > -torch.inf
    expected = count * logprobs[0].exp()
    assert observed[~possible].sum() == 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(
        2 * freedom
    )  # four standard deviations of a chi-square
    torch.testing.assert_close(logps, logprobs[0, tokens])


def test_streams_are_splitmix64():
    "Its first outputs for the seed 1234567, as the tests of other languages' libraries have them."
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    outputs += [4593380528125082431, 16408922859458223821]
    expected = [(bits >> 11) * 2**-53 for bits in outputs]
    keys = torch.full((5,), 1234567)
    assert stream_numbers(keys, torch.arange(5)).tolist() == expected
    late = behind(keys, [0, 1, 2, 3, 4])  # the same streams without their first numbers
    assert stream_numbers(late, torch.zeros(5)).tolist() == expected


@pytest.mark.parametrize("chosen", [dict(top_k=5), dict(top_p=0.999), dict(top_k=2000)])
def test_as_many_as_fit_are_kept_and_one_more_is_too_many(chosen):
    params = SamplingParams(**chosen)
    room = room_for_survivors(params)
    assert room == (5 + 16 if chosen == dict(top_k=5) else MOST_SURVIVORS)
    for left in (room, room + 1):  # so many tie for the first place
        logits = torch.full((1, 3000), -30.0)
        logits[0, 7 : 7 + left] = 0.0
        if params.top_k == 2000:
            logits[0, 7 + left :] = logits[0, :7] = -torch.inf
        token, logp, survivors = sample_recorded(logits, params, uniform=torch.tensor([0.3]))
        assert 7 <= int(token) < 7 + left
        torch.testing.assert_close(logp.exp(), torch.tensor([1 / left]))
        kept = sorted(survivors.ids[0].tolist())
        assert kept == ([*range(7, 7 + left)] if left == room else [-1] * room)
        plain = torch.log_softmax(logits, -1)[0, token]
        mass = torch.zeros(1) if left == room else plain - logp
        torch.testing.assert_close(survivors.log_mass, mass)


def test_a_record_is_as_wide_as_the_most_that_were_left():
    params = SamplingParams(top_k=3, max_tokens=2)
    record = SurvivorRecord.start(2, params, "cpu")
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    for at in range(2):
        record.put(torch.arange(2), at, sample_recorded(logits, params)[2])
    cut = record.cut(torch.tensor([[True, True], [True, False]]))
    assert [sorted(row) for row in cut.ids.flatten(0, 1).tolist()] == [
        [-1, 0, 1, 2],
        [-1, 0, 1, 2],
        [0, 1, 2, 3],
        [-1] * 4,
    ]


@pytest.mark.parametrize("number, token", [(0.0, 2), (1 - 2**-53, 4)])
def test_impossible_tokens_are_not_drawn_by_the_smallest_and_largest_random_number(
    monkeypatch, number, token
):
    logprobs = torch.full((3, 7), -torch.inf)
    logprobs[:, 2:5] = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8], [1 / 3] * 3]).log()
    monkeypatch.setattr(
        torch,
        "rand",
        lambda *shape, dtype=None, device=None, generator=None: torch.full(
            shape, number, dtype=dtype
        ),
    )
    assert draw(logprobs)[0].tolist() == [token] * 3


def test_the_smallest_top_p_leaves_the_likeliest_token():
    logits = torch.tensor([[0.1, 0.2, 0.1, 0.0]])
    assert processed_log_probs(logits, SamplingParams(top_p=1e-12)).tolist() == [
        [-math.inf, 0.0, -math.inf, -math.inf]
    ]


def test_rows_are_drawn_independently():
    logprobs = torch.full((40_000, 2), 0.5).log()
    tokens, _ = draw(logprobs, torch.Generator().manual_seed(0))
    pairs = (2 * tokens[::2] + tokens[1::2]).bincount(minlength=4) / 20_000
    assert (pairs - 0.25).abs().max() < 0.0125  # four standard deviations


def test_a_seed_repeats_and_the_global_generator_is_used_without_one():
    logprobs = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    one, two, three = (draw(logprobs, torch.Generator().manual_seed(s))[0] for s in (3, 3, 4))
    assert torch.equal(one, two) and not torch.equal(one, three)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    draw(logprobs, torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), state)
    first = draw(logprobs)[0]
    torch.set_rng_state(state)
    assert torch.equal(draw(logprobs)[0], first)


def test_greedy_takes_the_largest_penalised_logit_and_reports_the_plain_log_prob():
    logits = torch.randn(6, 15, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    seen = torch.zeros(6, 15, dtype=torch.bool).scatter(1, logits.argmax(-1, keepdim=True), True)
    params = SamplingParams(temperature=0, repetition_penalty=3.0, top_k=1, top_p=0.1)
    tokens, logps = sample_tokens(logits, params, seen)
    expected = theirs(
        logits.float(), seen.nonzero()[:, 1:], [0] * 6, repetition_penalty=3.0
    ).argmax(-1)
    assert torch.equal(tokens, expected) and not torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logps, torch.log_softmax(logits.float(), -1)[range(6), tokens])
    point_mass = processed_log_probs(logits, params, seen)
    assert torch.equal(point_mass.argmax(-1), expected) and torch.equal(
        point_mass.exp().sum(-1), torch.ones(6)
    )


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("temperature", None),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.2),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", None),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("n", 0),
        ("n", 1.0),
        ("seed", 1.5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", "ab"),
        ("stop", [""]),
        ("stop", [7]),
    ],
)
def test_senseless_settings_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"{name} is .*, and "):
        SamplingParams(**{name: value})


def test_settings_are_a_frozen_record():
    params = SamplingParams(stop_token_ids=[3, 4])
    assert (
        params.stop_token_ids == (3, 4)
        and SamplingParams(stop_token_ids=7).stop_token_ids == (7,)
        and SamplingParams(stop_token_ids=[]).stop_token_ids == ()
    )
    assert hash(params) == hash(SamplingParams(stop_token_ids=(3, 4)))
    with pytest.raises(AttributeError):
        params.temperature = 2.0
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_a_penalty_without_the_tokens_seen_is_refused():
    for t in (0, 1.0):
        with pytest.raises(ValueError, match="seen is None"):
            sample_tokens(torch.zeros(1, 3), SamplingParams(temperature=t, repetition_penalty=1.2))


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf")])
def test_a_number_that_no_float_holds_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is "):
        SamplingParams(**{name: value})
