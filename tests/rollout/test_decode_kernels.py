"""The decoding kernels against their formulas, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from recorded_calls import RecordedCalls

from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import decode_kernels, decode_ops, read_layers
from grpo_nb.rollout.decode_ops import DecodeState, Projection
from grpo_nb.rollout.decoder import Decoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def error(mine, formula):
    return ((mine - formula).norm() / formula.norm()).item()


@pytest.mark.parametrize("B", [1, 3, 17, 65])
@pytest.mark.parametrize("ranks", [(0, 0, 0), (2, 0, 3), (0, 4, 0)])
def test_three_products_of_one_input(B, ranks):
    generator = torch.Generator(DEVICE).manual_seed(B)

    def random(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE)

    projections = tuple(
        Projection(
            random(n, 24), random(n), *((random(r, 24), random(n, r)) if r else (None, None)), 0.5
        )
        for n, r in zip((16, 8, 8), ranks)
    )
    x, residual = random(B, 24), random(B, 32)
    for added in (None, residual):
        mine = decode_kernels.project(x, projections, added)
        assert error(mine, decode_ops.project(x, projections, added)) < 1e-5


def test_as_many_parts_as_keep_a_card_busy():
    parts = [decode_kernels._splits(n) for n in range(1, 1000)]
    assert parts == sorted(parts, reverse=True) and parts[0] == 32 and parts[-1] == 1
    assert all(n * p >= 264 or p == 32 for n, p in enumerate(parts, 1))


@pytest.mark.parametrize("ops", [decode_ops, decode_kernels], ids=["torch", "kernel"])
@pytest.mark.parametrize("stop", [(), (1,), (1, 4)])
def test_tokens_are_appended_to_what_goes_on(stop, ops):
    "Row by row, as a list would be; a full batch's spare rows stay as they are."
    state = DecodeState.start([5, 3, 4], max_tokens=2, device=DEVICE)
    state.seen = torch.zeros(4, 10, dtype=torch.bool, device=DEVICE)
    rows, ends = [[], [], []], torch.tensor(stop, dtype=torch.long, device=DEVICE)
    going = [True] * 3
    for drawn in ([7, 8, 1], [1, 9, 4], [4, 4, 4]):
        for i, token in enumerate(drawn):
            if going[i]:
                rows[i].append(token)
                going[i] = token not in stop and len(rows[i]) < 2
        tokens = torch.tensor([*drawn, 5, 6], device=DEVICE)
        numbers = torch.tensor([0, 1, 2, 3, 3], device=DEVICE)
        ops.append_tokens(numbers, tokens, -tokens.float(), ends, state)
    RecordedCalls(lambda: ops.append_tokens(numbers, tokens, -tokens.float(), ends, state))
    assert state.alive.tolist() == [*going, False] and not state.seen[3].any()
    assert state.counts.tolist() == [*map(len, rows), 0]
    assert state.lengths.tolist() == [4 + len(rows[0]), 2 + len(rows[1]), 3 + len(rows[2]), 0]
    assert state.last.tolist() == [*(row[-1] for row in rows), 0]
    for i, row in enumerate(rows):
        assert state.ids[i, : len(row)].tolist() == row
        assert (-state.logps[i, : len(row)]).tolist() == row
        assert state.seen[i].nonzero()[:, 0].tolist() == sorted({*row})


@pytest.mark.parametrize("B, E, top", [(1, 4, 2), (16, 2, 2), (16, 4, 1), (9, 8, 4), (40, 2, 1)])
def test_there_is_room_for_every_tile(B, E, top):
    "Also when all rows ask the same expert."
    logits = torch.randn(B, E)
    for z in (logits, torch.arange(E).float().expand(B, E).contiguous()):
        work = decode_kernels.schedule(z, top, torch.float32, rows=8)
        tiles = [(e, a, b) for e, a, b in work.items.T.tolist() if e >= 0]
        assert [n for _, a, b in tiles for n in range(a, b)] == list(range(B * top)) and all(
            b - a <= 8 for _, a, b in tiles
        )
        expected = z.topk(top).indices
        for e, a, b in tiles:
            assert all(e in expected[row] for row in work.token[a:b].tolist())


def test_a_wrong_kernel_fails_the_trial(monkeypatch):
    model = tiny_gpt_oss(num_hidden_layers=1, head_dim=32, sliding_window=16)[0].to(DEVICE)
    decoder, rows = Decoder(model, kernels=True), read_layers.rows_to_try(20, 16)
    with torch.no_grad():
        assert read_layers.difference(model, decoder, rows, 16) is None
        real = decode_kernels.moe
        monkeypatch.setattr(
            decode_kernels, "moe", lambda *a, **k: tuple(1.1 * x for x in real(*a, **k))
        )
        assert "after token 1" in read_layers.difference(model, decoder, rows, 16)


@pytest.mark.parametrize("rows", [1, 3])
def test_lists_of_a_schedule_begin_at_multiples_of_16_bytes(rows):
    "Else a kernel is compiled for each number of rows that makes them begin elsewhere."
    logits = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    work = decode_kernels.schedule(logits, 2, torch.float32)
    lists = (work.token, work.slot, *work.items)
    assert [x.data_ptr() % 16 for x in work.items] == [0, 0, 0] and work.items.shape[1] % 4
    assert all(x.stride() == (1,) for x in lists)
