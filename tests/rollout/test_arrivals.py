"""Rows that come back while others are drawn: nobody waits, nothing is drawn twice, and what is
drawn depends on no company."""

import math
import signal
import sqlite3
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_decoders import ENDS, KINDS, as_recorded, in_pages
from small_runs import small_model

from grpo_nb.rollout.arrivals import Arrivals, Asked, in_rounds
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampler import drawn_elsewhere
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.rollout.turns import CallsOfOne, TurnSampler, event_loop
from grpo_nb.serving.server import VLLMServer
from grpo_nb.serving.stand_in import StandIn, serving

TEMPLATE = (
    "{% if tools %}8{% endif %}{% for m in messages %}{{ m.role[0] }}"
    "{% for c in m.tool_calls or [] %}7{% endfor %}{{ m.content }}"
    "<|return|>{% endfor %}{% if add_generation_prompt %}+{% endif %}"
)


def seven(who: int) -> str:
    """
    Answer.

    Args:
        who: the row
    """
    return "7"


def talker(sampler, tool=seven, turns=3, **others):
    "A conversation in which every turn is a call of the same tool, with the row's first token."

    def parse(ids, before, schemas):
        function = {"name": tool.__name__, "arguments": {"who": before[0]}}
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}

    tokenizer = small_model()[1]
    tokenizer.chat_template = TEMPLATE
    return TurnSampler(
        sampler,
        tokenizer,
        [tool],
        max_tool_calling_iterations=turns,
        parser=parse,
        stop_token_ids=ENDS,
        **others,
    )


class InRounds:
    "The same engine without a way of its own to draw arrivals."

    takes_token_ids = True

    def __init__(self, engine):
        self.model, self.generate = engine.model, engine.generate


def tokens(rollout):
    return [ids[m].tolist() for ids, m in zip(rollout.completion_ids, rollout.mask)]


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    delays=st.lists(st.sampled_from([0, 0, 0.001, 0.004]), min_size=1, max_size=9),
    threads=st.integers(1, 4),
    most=st.sampled_from([1, 2, None]),
)
def test_every_turn_is_drawn_once_and_in_order_whoever_takes_it(turns, delays, threads, most):
    drawn, lock = [], threading.Lock()

    class Sampler:
        def generate(self, prompts, params):
            given = {"prompt_ids": prompts, "completion_ids": prompts, "logprobs": None}
            return drawn_elsewhere(given, len(prompts), [0])

    def read(number, rollout, i, prefix):
        with lock:
            drawn.append((number, rollout.completion_ids[i, 0].item()))
            count = sum(n == number for n, _ in drawn)
        if count < turns[number]:
            calls = SimpleNamespace(ended=False, deadline=math.inf, count=count)

            def end():
                calls.ended = True
                arrivals.wake()

            threading.Timer(delays[(number + count) % len(delays)], end).start()
            return calls

    def go_on(number, calls):
        return Asked(number, [calls.count + 1], 1)

    first = [Asked(n, [1], 1) for n in range(len(turns))]
    arrivals = Arrivals(first, read, go_on, patience_s=0.002)
    work = lambda: in_rounds(Sampler(), arrivals, SamplingParams(max_tokens=1), most)  # noqa: E731
    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()
    for number, count in enumerate(turns):
        assert [turn for n, turn in drawn if n == number] == list(range(1, count + 1))


def test_what_is_late_goes_on_and_what_is_closed_gives_nothing():
    asked = [Asked(n, [1], 1) for n in range(2)]
    late = SimpleNamespace(ended=False, deadline=time.monotonic() + 0.05)
    arrivals = Arrivals(asked, lambda *_: late, lambda n, calls: Asked(n, [2], 1))
    began = time.monotonic()
    for one in arrivals.take():
        arrivals.give(one, None, 0)
    assert [one.ids for one in arrivals.take()] == [[2], [2]] and time.monotonic() - began < 5
    taken = []
    waits = threading.Thread(target=lambda: taken.append(arrivals.take()), daemon=True)
    waits.start()  # for rows that are being drawn
    assert arrivals.take(wait=False) == []
    arrivals.close()
    waits.join(5)
    assert taken == [[]]


WAYS = ["gpt-oss", "in pages", "modules", "server"]


@pytest.mark.parametrize("way", WAYS)
def test_a_row_whose_tool_is_slow_holds_nobody_up(way, tmp_path, monkeypatch):
    "The tool of the first row answers when the others have finished: in step it never would."
    counts, finished = {6: 0, 8: 0}, threading.Event()

    def tool(who: int) -> str:
        """
        Count, or wait.

        Args:
            who: the row
        """
        if who == 5:
            return "7" if finished.wait(20) else "8"
        counts[who] += 1
        if all(count == 3 for count in counts.values()):
            finished.set()
        return "9"

    def check(sampler):
        turns = talker(sampler, tool, timeout_s=60)  # so each row has a thread
        rollout = turns.generate([[5], [6], [8]], SamplingParams(max_tokens=400, seed=1))
        assert rollout.calls == [3, 3, 3] and sum(rollout.failures) == 0
        answers = [m["content"] for m in rollout.messages[0] if m["role"] == "tool"]
        assert answers == ["7"] * 3
        turns.close()

    if way == "server":
        stand_in = StandIn(*small_model(), name="small", lora_dir=tmp_path)
        with serving(stand_in) as url:
            check(VLLMServer(url, folder=tmp_path / "run", stop_token_ids=ENDS))
        return
    if way == "in pages":
        in_pages(monkeypatch)
    model = KINDS["gpt-oss"]()
    check(RolloutEngine(model, small_model()[1], through_modules=way == "modules"))


@pytest.mark.parametrize("way", WAYS)
def test_tools_run_one_after_the_other_in_the_thread_that_draws(way, tmp_path, monkeypatch):
    "A signal can be set, a database was opened here, and nobody else changes the counter."
    database, running = sqlite3.connect(":memory:"), []
    database.execute("create table seen (who)")

    def tool(who: int) -> str:
        """
        Note who asks.

        Args:
            who: the row
        """
        assert threading.current_thread() is threading.main_thread() and not running
        running.append(who)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(20)
        database.execute("insert into seen values (?)", [who])
        time.sleep(0.01)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        running.remove(who)
        x = torch.ones(1, requires_grad=True)
        return str((x * 7).sum().requires_grad)

    def check(sampler):
        rollout = talker(sampler, tool).generate([[5], [6], [8]], SamplingParams(max_tokens=400))
        assert (rollout.calls, rollout.failures) == ([3, 3, 3], [0, 0, 0])
        assert (
            sorted(database.execute("select * from seen")) == [(5,)] * 3 + [(6,)] * 3 + [(8,)] * 3
        )
        assert {m["content"] for m in rollout.messages[0] if m["role"] == "tool"} == {"True"}

    if way == "server":
        stand_in = StandIn(*small_model(), name="small", lora_dir=tmp_path)
        with serving(stand_in) as url:
            check(VLLMServer(url, folder=tmp_path / "run", stop_token_ids=ENDS))
        return
    if way == "in pages":
        in_pages(monkeypatch)
    model = KINDS["gpt-oss"]()
    check(RolloutEngine(model, small_model()[1], through_modules=way == "modules"))


@pytest.mark.parametrize("server", [False, True])
def test_ctrl_c_in_a_tool_ends_the_rollout(server, tmp_path):
    def tool(who: int) -> str:
        """
        Stop.

        Args:
            who: the row
        """
        signal.raise_signal(signal.SIGINT)
        return "7"

    def run(sampler):
        with pytest.raises(KeyboardInterrupt):
            talker(sampler, tool).generate([[5], [6]], SamplingParams(max_tokens=100))

    if not server:
        return run(RolloutEngine(KINDS["gpt-oss"](), small_model()[1]))
    with serving(StandIn(*small_model(), name="small", lora_dir=tmp_path)) as url:
        run(VLLMServer(url, folder=tmp_path / "run", stop_token_ids=ENDS))


@pytest.mark.parametrize("cut", [{}, dict(top_k=9, repetition_penalty=1.1), dict(temperature=0)])
@pytest.mark.parametrize("kind, page", [(k, p) for k in KINDS for p in (None, 4)])
def test_rows_that_join_draw_what_they_draw_in_rounds(kind, page, cut, monkeypatch):
    if page:
        in_pages(monkeypatch)
    engine = RolloutEngine(KINDS[kind](), small_model()[1], max_batch_size=3)  # fewer than rows
    prompts, params = [[5, 6], [6] * 5, [8], [9, 9]], SamplingParams(max_tokens=90, seed=3, **cut)
    joined, rounds = (talker(one).generate(prompts, params) for one in (engine, InRounds(engine)))
    assert tokens(joined) == tokens(rounds)
    assert params.temperature == 0 or joined.calls.count(3) > 1
    torch.testing.assert_close(joined.logps, rounds.logps, rtol=0, atol=3e-5, equal_nan=True)
    assert joined.versions.tolist() == [0] * 4
    if "top_k" in cut:
        assert torch.equal(joined.survivors.sort(-1).values, rounds.survivors.sort(-1).values)


@pytest.mark.parametrize("kind", ["gpt-oss", "modules"])
def test_a_row_is_the_same_text_in_any_company(kind):
    model = KINDS["gpt-oss"]()
    engine = RolloutEngine(model, small_model()[1], through_modules=kind == "modules")
    prompts, params = [[5, 6], [6] * 5, [8], [9, 9]], SamplingParams(max_tokens=60, seed=5)
    together = tokens(talker(engine).generate(prompts, params))
    for count in (1, 2, 3):
        assert tokens(talker(engine).generate(prompts[:count], params)) == together[:count]


def test_recorded_steps_end_a_turn_where_its_room_ends(monkeypatch):
    "As on a GPU: strides of steps, flags that are read late, rows that end by their count."
    in_pages(monkeypatch)
    engine = RolloutEngine(KINDS["gpt-oss"](), small_model()[1], max_batch_size=3)
    prompts, params = [[5, 6], [6] * 5, [8], [9, 9], [8, 9]], SamplingParams(max_tokens=33, seed=3)
    plain = talker(InRounds(engine), turns=9).generate(prompts, params)
    as_recorded(monkeypatch)
    sizes, give = [], Arrivals.give

    def noted(self, one, drawn, i, prefix=None):
        sizes.append((int(drawn.lengths[i]), one.max_tokens))
        give(self, one, drawn, i, prefix)

    monkeypatch.setattr(Arrivals, "give", noted)
    late = talker(engine, turns=9).generate(prompts, params)
    assert tokens(late) == tokens(plain) and max(late.calls) > 1
    assert all(size <= room for size, room in sizes)
    assert any(size == room < 33 for size, room in sizes)


@pytest.mark.parametrize("server", [False, True])
def test_an_error_between_two_turns_ends_all_of_it(server, tmp_path):
    def run(sampler):
        turns = talker(sampler)
        turns.read = fails
        with pytest.raises(ZeroDivisionError):
            turns.generate([[5], [6], [8]], SamplingParams(max_tokens=100, seed=1))

    def fails(*given):
        raise ZeroDivisionError

    before = threading.active_count()
    if server:
        stand_in = StandIn(*small_model(), name="small", lora_dir=tmp_path)
        with serving(stand_in) as url:
            run(VLLMServer(url, folder=tmp_path / "run", stop_token_ids=ENDS))
    else:
        run(RolloutEngine(KINDS["gpt-oss"](), small_model()[1]))
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_an_answer_is_there_before_its_thread_has_told_anybody():
    "Who asks may hold the lock that the thread needs to tell of its end."
    told = threading.Event()
    calls = [{"type": "function", "function": {"name": "seven", "arguments": {"who": 1}}}]
    one = CallsOfOne(calls, {"seven": seven}, event_loop(), None, told.wait).in_a_thread()
    while not one.ended:
        time.sleep(0.001)
    asks = threading.Thread(target=lambda: replies.extend(one.replies()), daemon=True)
    replies = []
    asks.start()
    asks.join(5)
    told.set()
    assert replies == [({"role": "tool", "name": "seven", "content": "7"}, False, False)]
