"""The sampler over HTTP against the stand-in, and what it does when a server misbehaves."""

import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from rollout.test_stand_in import moved
from small_runs import ROWS, digits, one_thread, small_config, small_model, without_clocks  # noqa: F401

from grpo_nb import GRPOConfig, GRPOTrainer
from grpo_nb.model.adapters import add_adapters, resolve_targets
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampler import Sampler
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.rollout.server import Address, ServerError, VLLMServer, request_seeds
from grpo_nb.rollout.stand_in import Refusal, StandIn, serving

PARAMS = SamplingParams(max_tokens=6, n=2, seed=3)
PROMPTS = [[7, 8], [9], [7, 8], [5, 6, 7]]


@pytest.fixture
def start(tmp_path):
    "A function that starts a stand-in, which ends with the test."
    with ExitStack() as stack:

        def start(cls=StandIn, **settings):
            given = {"name": "small", "lora_dir": tmp_path, "max_loras": 2, **settings}
            stand_in = cls(*small_model(), **given)
            return stand_in, stack.enter_context(serving(stand_in))

        yield start


def sampler_of(urls, tmp_path, **others):
    sampler = VLLMServer(
        urls, folder=tmp_path / "run", **{"stop_token_ids": (1,), "wait_s": 5, **others}
    )
    sampler.pause_s = 0.01
    return sampler


class Faulty(StandIn):
    "A stand-in that does something else for its first completions."

    faults = []

    def completions(self, asked):
        answer = super().completions(asked)
        fault = self.faults.pop(0) if self.faults else None
        return answer if fault is None else fault(answer)


def refusing(status):
    def refuse(answer):
        raise Refusal(status, "as planned")

    return refuse


def aborting(answer):
    answer["choices"][-1]["finish_reason"] = "abort"
    return answer


# what is drawn


def test_completions_are_the_engines_with_the_versions_that_drew_them(start, tmp_path):
    _, url = start()
    sampler, model = sampler_of(url, tmp_path), moved(small_model()[0])
    assert isinstance(sampler, Sampler) and sampler.takes_token_ids and sampler.holds_weights
    base = sampler.generate(PROMPTS, PARAMS)
    sampler.publish(model, 4)
    drawn = sampler.generate(PROMPTS, PARAMS)
    seeds, tokenizer = request_seeds(3, 3), small_model()[1]
    params = replace(PARAMS, n=4, seed=seeds[0], stop_token_ids=(1,))
    for rollout, of, version in ((base, small_model()[0], 0), (drawn, model, 4)):
        wanted = RolloutEngine(of, tokenizer).generate([[7, 8]], params)
        rows, width = [0, 1, 4, 5], wanted.mask.shape[1]  # both places of the prompt
        assert torch.equal(rollout.completion_ids[rows, :width], wanted.completion_ids)
        assert torch.equal(rollout.logps[rows, :width], wanted.logps)
        assert [rollout.finish_reasons[row] for row in rows] == wanted.finish_reasons
        assert rollout.versions.tolist() == [version] * 8
    assert rollout.prompt_ids == [ids for ids in PROMPTS for _ in range(2)]
    torch.manual_seed(5)
    first = sampler.generate(PROMPTS, replace(PARAMS, seed=None))
    second = sampler.generate(PROMPTS, replace(PARAMS, seed=None))
    torch.manual_seed(5)
    again = sampler.generate(PROMPTS, replace(PARAMS, seed=None))
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert not torch.equal(first.completion_ids, second.completion_ids)
    greedy = sampler.generate([[7, 8]], replace(PARAMS, temperature=0, n=3))
    assert len({tuple(row) for row in greedy.completion_ids.tolist()}) == 1
    tokenizer = small_model()[1]
    sampler.tokenizer = tokenizer
    ended = sampler.generate(PROMPTS, replace(PARAMS, stop=["1", "2"], max_tokens=30))
    for row in range(8):
        ids = ended.completion_ids[row][ended.mask[row]]
        assert not re.search("[12]", tokenizer.decode(ids[:-1]))
        assert ended.finish_reasons[row] == "stop" or not re.search("[12]", tokenizer.decode(ids))


class SaysNothing(StandIn):
    "A server without --return-sampling-mask: its route answers, and says nothing of a cut."

    def generate(self, asked):
        answer = super().generate(asked)
        return {"choices": [{**one, "sampling_mask": None} for one in answer["choices"]]}


@pytest.mark.parametrize("server", [StandIn, SaysNothing])
def test_what_top_k_has_left_comes_with_the_completions(start, tmp_path, server):
    sampler, model = sampler_of(start(server)[1], tmp_path), moved(small_model()[0])
    sampler.publish(model, 0)
    for cut in (dict(top_k=4, temperature=0.7), dict(top_k=4, top_p=0.8), dict(top_p=0.8)):
        params = replace(PARAMS, **cut)
        drawn = sampler.generate(PROMPTS, params)
        if server is SaysNothing or not params.top_k:
            assert drawn.survivors is None
            continue
        seeds = request_seeds(3, 3)
        alone = replace(params, n=4, seed=seeds[0], stop_token_ids=(1,))
        wanted = RolloutEngine(model, small_model()[1]).generate([[7, 8]], alone)
        rows, width = [0, 1, 4, 5], wanted.mask.shape[1]
        left = drawn.survivors[rows, :width]
        most = wanted.survivors.shape[-1]
        assert torch.equal(left[..., :most], wanted.survivors) and (left[..., most:] == -1).all()
        assert torch.equal(drawn.logps[rows, :width], wanted.logps)
        assert (drawn.log_mass == 0).all()


def test_a_cut_server_and_its_trainer_agree(start, tmp_path):
    _, url = start()
    config = small_config(
        tmp_path / "out",
        **dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=url, top_k=3),
        **dict(max_steps=3, learning_rate=3e-2, guard_every=1, max_completion_length=6),
    )
    model, tokenizer = small_model()
    trainer = GRPOTrainer(
        model,
        digits,
        config,
        ROWS,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    records = [r for r in trainer.log_history if "sampling/gap_mean" in r]
    assert len(records) == 3 and max(r["sampling/gap_max"] for r in records) < 1e-5
    assert all(r["guard/gap_mean"] < 1e-5 for r in records)


def test_versions_leave_the_server_before_their_files_leave_the_disk(start, tmp_path):
    stand_in, url = start(max_loras=3)
    sampler, model = sampler_of(url, tmp_path, max_loras=3), moved(small_model()[0])
    names = []
    for version in (0, 2, 4, 6):
        sampler.publish(model, version)
        names.append(sampler.current[0])
        sampler.publish(model, version)  # an evaluation of the same weights
        assert sampler.current[0] == names[-1]
    assert list(stand_in.adapters.folders) == names[2:] and len(set(names)) == 4
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(names[1:])
    assert set(sampler.generate([[7]], PARAMS, version=4).versions.tolist()) == {4}
    with pytest.raises(ValueError, match="version 2 is no longer on the servers, which hold 4, 6"):
        sampler.generate([[7]], PARAMS, version=2)
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(1)
    sampler.publish(model, 6)  # other weights under the same count
    assert sampler.current[0] not in names
    sampler.close()
    assert not stand_in.adapters.folders and not list((tmp_path / "run").iterdir())
    sampler.publish(model, 0)  # a second run counts from 0 again
    assert sampler.current[0] not in names and sampler.generate([[7]], PARAMS).versions[0] == 0


def test_a_version_that_is_drawn_with_is_not_unloaded(start, tmp_path):
    stand_in, url = start(max_loras=3)
    sampler, model = sampler_of(url, tmp_path), moved(small_model()[0])
    sampler.publish(model, 0)
    before = sampler.generate(PROMPTS, PARAMS)
    old = sampler.current[0]
    stand_in.lock.acquire()
    drawn = []
    thread = threading.Thread(target=lambda: drawn.append(sampler.generate(PROMPTS, PARAMS)))
    thread.start()
    while not sampler.users[old]:
        time.sleep(0.01)
    stand_in.lock.release()
    sampler.publish(model, 1)
    thread.join()
    assert torch.equal(drawn[0].completion_ids, before.completion_ids)
    assert drawn[0].versions.tolist() == [0] * 8
    sampler.publish(moved(small_model()[0], 2), 2)
    assert old not in stand_in.adapters.folders


# servers that misbehave


def test_what_passes_is_asked_again_and_never_trained_on(start, tmp_path):
    stand_in, url = start(Faulty)
    sampler = sampler_of(url, tmp_path)
    wanted = sampler.generate(PROMPTS, PARAMS)
    stand_in.faults = [refusing(503), aborting, refusing(500), aborting]
    drawn = sampler.generate(PROMPTS, PARAMS)
    assert not stand_in.faults and torch.equal(drawn.completion_ids, wanted.completion_ids)
    assert set(drawn.finish_reasons) <= {"stop", "length"}
    sampler.retries, stand_in.faults = 1, [aborting] * 99
    with pytest.raises(ServerError, match="in 2 attempts .it broke off.*GET /health"):
        sampler.generate([[7]], PARAMS)
    stand_in.faults = []
    with pytest.raises(ServerError, match="refuses a request .400.: .*model's longest sequence"):
        sampler.generate([[7]], replace(PARAMS, max_tokens=10**6))


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda one: one.pop("token_ids"), "no token_ids"),
        (lambda one: one.update(logprobs=None), "no logprobs"),
        (lambda one: one["token_ids"].append(7), "gave"),
        (lambda one: one["logprobs"]["token_logprobs"].__setitem__(0, -9999.0), "minus infinity"),
        (lambda one: one.update(prompt_token_ids=[0, 7]), "another prompt"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_ends_the_run(start, tmp_path, change, sentence):
    stand_in, url = start(Faulty)
    sampler = sampler_of(url, tmp_path)

    def fault(answer):
        change(answer["choices"][0])
        return answer

    stand_in.faults = [fault]
    with pytest.raises(ServerError, match=sentence):
        sampler.generate([[7]], PARAMS)


class Cut(dict):
    "An answer in whose middle the connection ends."

    def items(self):
        raise TimeoutError  # upon which http.server closes the connection


class Mortal(StandIn):
    "A stand-in that remembers what it is asked, and breaks off in the middle of an answer."

    dies_after = None  # completions

    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        self.calls = []

    def load_lora_adapter(self, asked):
        self.calls.append("load")
        return super().load_lora_adapter(asked)

    def completions(self, asked):
        self.calls.append("completions")
        answer = super().completions(asked)
        if self.dies_after is not None and self.count > self.dies_after:
            return Cut(answer)
        return answer


def mortal(folder, **settings):
    return Mortal(
        *small_model(), **{"name": "small", "lora_dir": folder, "max_loras": 2, **settings}
    )


MANY = [[7 + n % 5, 8 + n % 3, 9 + n] for n in range(12)]


def test_three_servers_share_the_tokens_and_one_dies_while_it_answers(start, tmp_path):
    (first, a), (second, b), (third, c) = (start(Mortal, max_loras=2) for _ in range(3))
    sampler, model = sampler_of([a, b, c], tmp_path), moved(small_model()[0])
    sampler.publish(model, 1)
    assert all(one.adapters.folders for one in (first, second, third))
    drawn = sampler.generate(MANY, PARAMS)
    alone = sampler_of(a, tmp_path / "alone")
    alone.publish(model, 1)
    assert torch.equal(alone.generate(MANY, PARAMS).logps, drawn.logps)  # in float32
    alone.close()
    shares = [one.calls.count("completions") for one in (second, third)]
    assert min(shares) > 3 and all(one.asked == 0 for one in sampler.addresses)
    second.dies_after = second.count + 1
    with pytest.warns(
        UserWarning, match=f"{b} is left aside: it gave no answer .*other servers go on"
    ):
        again = sampler.generate(MANY, PARAMS)
    assert torch.equal(again.completion_ids, drawn.completion_ids)
    assert torch.equal(again.logps, drawn.logps)
    began, asked = time.monotonic(), len(second.calls)
    sampler.publish(moved(small_model()[0], 2), 2)  # without the second, and without waiting for it
    assert sampler.generate(MANY, PARAMS).versions.tolist() == [2] * 24
    assert time.monotonic() - began < 5 and len(second.calls) == asked


def test_a_longer_request_counts_for_more():
    sampler = object.__new__(VLLMServer)
    sampler.addresses, sampler.lock = [Address("a"), Address("b")], threading.Lock()
    with sampler.picked(1000) as long, sampler.picked(10) as short, sampler.picked(10) as other:
        assert (long.host, short.host, other.host) == ("a", "b", "b")
        with sampler.picked(10, before=other) as elsewhere:
            assert elsewhere.host == "a"
        long.failed_at, long.aside_s = time.monotonic(), 9
        with sampler.picked(10, before=other) as last:
            assert last.host == "b"


def test_a_server_that_comes_back_has_the_present_version_before_it_is_asked(tmp_path):
    first, second, model = mortal(tmp_path), mortal(tmp_path), moved(small_model()[0])
    with serving(first) as url:
        with serving(second) as gone:
            sampler = sampler_of(f"{url}, {gone}", tmp_path)
            sampler.publish(model, 1)
            before = sampler.generate(PROMPTS, PARAMS)
            assert second.count > 1
        with pytest.warns(UserWarning, match=f"{gone} is left aside"):
            assert torch.equal(
                sampler.generate(PROMPTS, PARAMS).completion_ids, before.completion_ids
            )
        sampler.publish(moved(small_model()[0], 2), 2)
        wanted, port = sampler.generate(PROMPTS, PARAMS), int(gone.rsplit(":", 1)[1])

        def returned(stand_in):
            "What it is asked when the time comes to try it again."
            stand_in.calls.clear()
            with serving(stand_in, port=port):
                sampler.addresses[1].aside_s = 0.0
                drawn = sampler.generate(PROMPTS, PARAMS)
            sampler.addresses[1].ready = False
            assert torch.equal(drawn.completion_ids, wanted.completion_ids)
            return stand_in.calls[2:]  # after two questions about its log-probs

        # restarted: without adapters; cut off: with one that has left the window meanwhile
        assert returned(mortal(tmp_path))[:2] == ["load", "completions"]
        assert returned(second)[:2] == ["load", "completions"]
        assert list(second.adapters.folders) == [sampler.current[0]]
        # restarted by mistake, with another model or other log-probs: it is not asked
        with pytest.warns(UserWarning, match="is left aside: .*it has the model 'other' now"):
            assert not returned(mortal(tmp_path, name="other"))
        assert not returned(mortal(tmp_path, logprobs_mode="raw_logprobs"))
    sampler.retries = 1
    with pytest.raises(ServerError, match=r"127.0.0.1:\d+ gave no completions in 3 attempts"):
        sampler.generate(PROMPTS, PARAMS)
    with pytest.raises(ServerError, match="no longer answers"):
        sampler.publish(model, 3)


def test_one_that_is_busy_for_a_while_is_not_waited_for(start, tmp_path):
    (busy, a), (_, b) = start(Faulty), start()
    sampler = sampler_of([a, b], tmp_path)
    wanted, busy.faults = sampler.generate(MANY, PARAMS), [refusing(503)] * 99
    sampler.pause_s, began = 60.0, time.monotonic()
    assert torch.equal(sampler.generate(MANY, PARAMS).completion_ids, wanted.completion_ids)
    left = len(busy.faults)
    assert time.monotonic() - began < 30 and 99 - left <= len(MANY)
    sampler.generate(MANY, PARAMS)
    assert len(busy.faults) == left  # left alone for some seconds
    busy.faults, sampler.addresses[0].aside_s = [], 0.0
    asked = busy.count
    sampler.generate(MANY, PARAMS)
    assert busy.count > asked


def test_one_that_hangs_is_asked_for_so_long_and_then_another(start, tmp_path):
    (stuck, a), (_, b) = start(), start()
    sampler = sampler_of([a, b], tmp_path)
    wanted, sampler.addresses[0].timeout_s = sampler.generate(PROMPTS, PARAMS), 0.3
    with stuck.lock, pytest.warns(UserWarning, match=f"{a} is left aside: .*timed out"):
        assert torch.equal(sampler.generate(PROMPTS, PARAMS).logps, wanted.logps)


def test_requests_can_be_cut_from_another_thread(start, tmp_path):
    stand_in, url = start()
    sampler, errors = sampler_of(url, tmp_path), []

    def draw():
        try:
            sampler.generate(PROMPTS, PARAMS)
        except ServerError as error:
            errors.append(str(error))

    with stand_in.lock:
        thread = threading.Thread(target=draw)
        thread.start()
        while not any(one.connections for one in sampler.under_way):
            time.sleep(0.01)
        sampler.interrupt()
        thread.join(5)
        assert not thread.is_alive() and "dropped" in errors[0]
    sampler.addresses[0].timeout_s, sampler.retries = 0.2, 0
    with stand_in.lock, pytest.raises(ServerError, match="timed out"):
        sampler.generate(PROMPTS, PARAMS)


def test_a_server_with_other_flags_is_refused(start, tmp_path):
    for settings, publish, sentence in (
        (dict(logprobs_mode="raw_logprobs"), False, "--logprobs-mode processed_logprobs"),
        (dict(lora_dir=None), True, "start it with --enable-lora --max-lora-rank 8 --max-loras 2"),
        (dict(max_lora_rank=1), True, "up to rank 1 and this one has 2: .*--max-lora-rank 8"),
        (dict(max_loras=1), True, "start it with --max-loras 2"),
        (dict(api_key="secret"), False, "401.*Bearer"),
    ):
        _, url = start(**settings)
        with pytest.raises(ServerError, match=sentence):
            sampler = sampler_of(url, tmp_path)
            if publish:
                sampler.publish(moved(small_model()[0]), 0)
    _, url = start(api_key="secret")
    assert sampler_of(url, tmp_path, api_key="secret").base == "small"
    with pytest.raises(ServerError, match="no server answers at http://127.0.0.1:9 .*vllm serve"):
        sampler_of("http://127.0.0.1:9", tmp_path, wait_s=0)
    for wrong in ("ftp://a", "http://", ""):
        with pytest.raises(ValueError, match="address"):
            sampler_of(wrong, tmp_path)


def test_what_cannot_be_served_is_refused(start, tmp_path):
    _, url = start()
    sampler = sampler_of(url, tmp_path)
    with pytest.raises(ValueError, match="GptOssForCausalLM is trained as a whole"):
        sampler.publish(small_model()[0], 0)
    for others, sentence in (
        (dict(use_dora=True), "use_dora=True"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(alpha_pattern={"q_proj": 3}), "alpha_pattern"),
    ):
        model = small_model()[0]
        model = add_adapters(model, 2, resolve_targets(model, ["q_proj"]), **others)
        with pytest.raises(ValueError, match=sentence):
            sampler.publish(model, 0)
    model = small_model()[0]
    model = add_adapters(model, 2, resolve_targets(model, ["mlp.experts.down_proj"]))
    with pytest.raises(ValueError, match="both matrices or of none"):
        sampler.publish(model, 0)


def test_no_proxy_is_asked(start, tmp_path, monkeypatch):
    _, url = start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Address(url).ask("/health")[0] == 200


# a run


def trainer_on(url, folder, **changes):
    config = small_config(
        folder, use_vllm=True, vllm_mode="server", vllm_server_base_url=url, **changes
    )
    adapter = LoraConfig(
        r=2,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model, tokenizer = small_model()
    return GRPOTrainer(model, digits, config, ROWS, processing_class=tokenizer, peft_config=adapter)


def test_a_run_samples_from_the_server_and_goes_on_after_a_stop(start, tmp_path):
    stand_in, url = start()
    given = dict(max_steps=4, save_strategy="steps", save_steps=2)
    whole = trainer_on(url, tmp_path / "whole", **given)
    whole.train()
    records = without_clocks(whole.log_history)
    assert len(records) == 4 and all(one["sampling/gap_mean"] < 1e-6 for one in records)
    assert not stand_in.adapters.folders
    assert not list((tmp_path / "whole/.vllm_adapters").iterdir())
    more = trainer_on(url, tmp_path / "whole", **given)
    more.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert without_clocks(more.log_history) == records
    assert more.evaluate(ROWS[:2])["eval_reward"] > 0  # the adapter is published once more


def test_settings_that_contradict_use_vllm_are_refused(tmp_path):
    config = small_config(tmp_path, use_vllm=True, vllm_mode="server")
    model, tokenizer = small_model()
    with pytest.raises(ValueError, match="trained as a whole"):
        GRPOTrainer(model, digits, config, ROWS, processing_class=tokenizer)
    with pytest.raises(ValueError, match="rollout_func draws the completions, so use_vllm"):
        GRPOTrainer(
            moved(model), digits, config, ROWS, processing_class=tokenizer, rollout_func=print
        )


def test_a_users_script_against_a_server_in_another_process(tmp_path):
    command = [sys.executable, "-m", "grpo_nb", "serve", "tiny", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--lora-dir", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        url = re.search(r"http://\S+:\d+", server.stdout.readline())[0]
        model, tokenizer = tiny_gpt_oss()
        config = GRPOConfig(
            output_dir=str(tmp_path / "out"),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            max_completion_length=6,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        )
        adapter = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        trainer = GRPOTrainer(
            model, digits, config, ROWS, processing_class=tokenizer, peft_config=adapter
        )
        trainer.train()
        records = trainer.log_history
        assert [record["step"] for record in records] == [1, 2, 3]
        assert all(record["sampling/gap_mean"] < 1e-6 for record in records)
        assert all(record["grad_norm"] > 0 for record in records)
    finally:
        server.terminate()
        assert server.wait(20) == 143
        server.stdout.close()


def test_only_the_first_process_writes_and_all_draw_with_its_version(start, tmp_path):
    stand_in, url = start(max_loras=3)
    said, model = [], moved(small_model()[0])

    def tell(value):
        said.append(value)
        return value

    first = sampler_of(url, tmp_path, share=tell)
    other = sampler_of(url, tmp_path, process=1, share=lambda value: said[-1])
    for version in (0, 1, 2):
        for one in (first, other):
            one.publish(model, version)
        assert other.generate([[7]], PARAMS).versions.tolist() == [version] * 2
    assert other.current == first.current and list(stand_in.adapters.folders) == [first.current[0]]
    said.append((None, "the disk is full"))
    with pytest.raises(ServerError, match="the disk is full"):
        other.publish(model, 3)
    other.close()
    assert stand_in.adapters.folders and first.generate([[7]], PARAMS).versions[0] == 2
