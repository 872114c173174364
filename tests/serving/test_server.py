"""The sampler over HTTP against the stand-in, and what it does when a server misbehaves."""

import re
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from serving.test_stand_in import moved
from small_runs import ROWS, digits, one_thread, small_config, small_model, without_clocks  # noqa: F401

from grpo_nb import GRPOConfig, GRPOTrainer
from grpo_nb.model.adapters import add_adapters, resolve_targets
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampler import Sampler
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.serving.addresses import ServerError
from grpo_nb.serving.server import VLLMServer
from grpo_nb.serving.stand_in import Refusal, StandIn, serving
from grpo_nb.serving.vllm_requests import request_seeds

PARAMS = SamplingParams(max_tokens=6, n=2, seed=3)
PROMPTS = [[7, 8], [9], [7, 8], [5, 6, 7]]


def sampler_of(urls, tmp_path, **others):
    sampler = VLLMServer(
        urls, folder=tmp_path / "run", **{"stop_token_ids": (1,), "wait_s": 5, **others}
    )
    sampler.servers.pause_s = 0.01
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
        assert torch.allclose(rollout.logps[rows, :width], wanted.logps, atol=1e-5)
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


# servers that misbehave


def test_what_passes_is_asked_again_and_never_trained_on(start, tmp_path):
    stand_in, url = start(Faulty)
    sampler = sampler_of(url, tmp_path)
    wanted = sampler.generate(PROMPTS, PARAMS)
    stand_in.faults = [refusing(503), aborting, refusing(500), aborting]
    drawn = sampler.generate(PROMPTS, PARAMS)
    assert not stand_in.faults and torch.equal(drawn.completion_ids, wanted.completion_ids)
    assert set(drawn.finish_reasons) <= {"stop", "length"}
    sampler.servers.retries, stand_in.faults = 1, [aborting] * 99
    with pytest.raises(ServerError, match="in 2 attempts .it broke off.*GET /health"):
        sampler.generate([[7]], PARAMS)
    stand_in.faults = []
    with pytest.raises(ServerError, match="refuses a request .400: .*model's longest sequence"):
        sampler.generate([[7]], replace(PARAMS, max_tokens=10**6))


@pytest.mark.long
def test_what_passes_while_a_server_is_looked_at_is_asked_again(start, tmp_path):
    class Busy(Faulty):
        faults = [refusing(503), aborting, refusing(500)]

    stand_in, url = start(Busy)
    sampler = sampler_of(url, tmp_path)
    assert not stand_in.faults and sampler.base == "small"
    retries, sampler.servers.retries, stand_in.faults = sampler.servers.retries, 1, [aborting] * 99
    with pytest.raises(ServerError, match="drew nothing in 2 attempts .it broke off.*GET /health"):
        sampler.check_logprobs(sampler.addresses[0])
    sampler.servers.retries = retries
    stand_in.faults, sampler.addresses[0].ready = [aborting, refusing(503)], False  # it returns
    assert sampler.generate([[7]], PARAMS).versions.tolist() == [0, 0] and not stand_in.faults


@pytest.mark.parametrize(
    "said", ["<html>", {}, None, [], {"data": []}, {"data": ["a"]}, {"data": [{"id": 3}]}]
)
def test_what_is_no_vllm_server_is_refused_in_a_sentence(start, tmp_path, said, monkeypatch):
    _, url = start()
    monkeypatch.setattr(StandIn, "models", lambda self, asked: said)
    with pytest.raises(ServerError, match="is no vLLM server: /v1/models answered .*vllm serve"):
        sampler_of(url, tmp_path)


@pytest.mark.parametrize("said", ["<html>", {}, None, {"choices": [3]}, {"choices": [{}]}])
def test_answers_without_completions_are_refused_in_a_sentence(start, tmp_path, said, monkeypatch):
    _, url = start()
    monkeypatch.setattr(StandIn, "completions", lambda self, asked: said)
    with pytest.raises(ServerError, match=f"{url}: an answer of it has no completions"):
        sampler_of(url, tmp_path)


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
    alone = sampler_of(a, tmp_path / "alone", max_loras=1)  # it publishes once
    alone.publish(model, 1)
    assert torch.allclose(alone.generate(MANY, PARAMS).logps, drawn.logps, atol=1e-5)
    alone.close()
    shares = [one.calls.count("completions") for one in (second, third)]
    assert min(shares) > 3 and all(one.asked == 0 for one in sampler.addresses)
    second.dies_after = second.count + 1
    with pytest.warns(
        UserWarning, match=f"{b} is left aside: it gave no answer .*other servers go on"
    ):
        again = sampler.generate(MANY, PARAMS)
    assert torch.equal(again.completion_ids, drawn.completion_ids)
    assert torch.allclose(again.logps, drawn.logps, atol=1e-5)
    began, asked = time.monotonic(), len(second.calls)
    sampler.publish(moved(small_model()[0], 2), 2)  # without the second, and without waiting for it
    assert sampler.generate(MANY, PARAMS).versions.tolist() == [2] * 24
    assert time.monotonic() - began < 5 and len(second.calls) == asked


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
        assert list(second.adapters.folders) == [sampler.versions.current[0]]
        # restarted by mistake, with another model or other log-probs: it is not asked
        with pytest.warns(UserWarning, match="is left aside: .*it has the model 'other' now"):
            assert not returned(mortal(tmp_path, name="other"))
        assert not returned(mortal(tmp_path, logprobs_mode="raw_logprobs"))
    sampler.servers.retries = 1
    with pytest.raises(ServerError, match=r"127.0.0.1:\d+ gave no completions in 3 attempts"):
        sampler.generate(PROMPTS, PARAMS)
    with pytest.raises(ServerError, match="did not load the adapter in 2 attempts"):
        sampler.publish(model, 3)


def test_one_that_is_busy_for_a_while_is_not_waited_for(start, tmp_path):
    (busy, a), (_, b) = start(Faulty), start()
    sampler = sampler_of([a, b], tmp_path)
    wanted, busy.faults = sampler.generate(MANY, PARAMS), [refusing(503)] * 99
    sampler.servers.pause_s, began = 60.0, time.monotonic()
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
        drawn = sampler.generate(PROMPTS, PARAMS)
        assert torch.equal(drawn.completion_ids, wanted.completion_ids)


def test_one_that_lets_the_time_pass_is_named_at_once_and_asked_once_more(start, tmp_path):
    stand_in, url = start(Mortal)
    sampler, model = sampler_of(url, tmp_path), moved(small_model()[0])
    address, named = sampler.addresses[0], "took a request and gave no answer in 0.3 seconds"
    address.timeout_s, began = 0.3, time.monotonic()
    with stand_in.lock, pytest.warns(UserWarning, match=f"{named}.*vllm_request_timeout"):
        with pytest.raises(ServerError, match="no completions in 2 attempts .*timed out"):
            sampler.generate([[7]], PARAMS)
    assert time.monotonic() - began < 5
    address.told, address.ready = False, True
    stand_in.calls.clear()
    with stand_in.lock, pytest.warns(UserWarning, match=named):
        with pytest.raises(
            ServerError, match="did not load the adapter in 2 attempts .timed out.*request_timeout"
        ):
            sampler.publish(model, 1)
    assert stand_in.calls == ["load"] * 2
    address.told, address.ready = False, True
    with stand_in.lock, pytest.warns(UserWarning, match=named):
        with pytest.raises(ServerError, match="drew nothing in 2 attempts .*timed out"):
            sampler.check_logprobs(address)


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
    sampler.addresses[0].timeout_s, sampler.servers.retries = 0.2, 0
    with stand_in.lock, pytest.raises(ServerError, match="timed out"):
        sampler.generate(PROMPTS, PARAMS)


def test_a_server_with_other_flags_is_refused(start, tmp_path):
    for settings, publish, sentence in (
        (dict(logprobs_mode="raw_logprobs"), False, "--logprobs-mode processed_logprobs"),
        (dict(lora_dir=None), True, "start it with --enable-lora --max-lora-rank 8 --max-loras 2"),
        (dict(max_lora_rank=1), True, "up to rank 1 and this one has 2: .*--max-lora-rank 8"),
        (dict(max_loras=1), True, "start it with --max-loras 2"),
        (dict(api_key="secret"), False, "401.*Bearer.*vllm_server_api_key, or --api-key"),
    ):
        _, url = start(**settings)
        with pytest.raises(ServerError, match=sentence):
            sampler = sampler_of(url, tmp_path)
            if publish:
                sampler.publish(moved(small_model()[0]), 0)
    _, url = start(api_key="secret")
    assert sampler_of(url, tmp_path, api_key="secret").base == "small"
    nobody = "no server answers at http://127.0.0.1:9 .*`VLLM_[A-Z_]*=1 vllm serve MODEL --enable-"
    with pytest.raises(
        ServerError, match=f"{nobody}.*`, or give its address .vllm_server_base_url"
    ):
        sampler_of("http://127.0.0.1:9", tmp_path, wait_s=0)


def test_the_sentence_of_a_failed_load_has_the_adapters_own_rank(start, tmp_path, monkeypatch):
    stand_in, url = start()
    stand_in.lora_dir = tmp_path / "elsewhere"
    monkeypatch.setattr("grpo_nb.serving.adapter_versions.settings_of", lambda info: None)
    model = small_model()[0]
    model = add_adapters(model, 48, resolve_targets(model, ["q_proj"]))
    with pytest.raises(
        ServerError, match="`VLLM_[A-Z_]*=1 vllm serve MODEL .*--max-lora-rank 64 .*that folder"
    ):
        sampler_of(url, tmp_path).publish(model, 0)


def test_where_to_look_is_said_once(start, tmp_path):
    stand_in, url = start()
    sampler = sampler_of(url, tmp_path, retries=0)
    sampler.addresses[0].ready, sampler.addresses[0].timeout_s = False, 0.3
    with stand_in.lock, pytest.raises(ServerError, match="gave no completions") as caught:
        sampler.generate([[7]], PARAMS)
    assert str(caught.value).count("Look at its log") == 1


def test_servers_that_compute_different_things_are_refused(start, tmp_path):
    (_, a), (second, b) = start(), start()
    assert sampler_of([a, b], tmp_path).base == "small"
    with torch.no_grad():
        for weight in second.adapters.model.parameters():
            weight.mul_(1.01)  # less than what tells two checkpoints apart
        assert sampler_of([a, b], tmp_path).base == "small"
        second.adapters.model.lm_head.weight.copy_(
            torch.randn_like(second.adapters.model.lm_head.weight)
        )
    with pytest.raises(ServerError, match=f"{a} and {b} both have a model 'small', and .* nats"):
        sampler_of([a, b], tmp_path)
    sampler_of([a, b], tmp_path, whole=True)  # its weights take the place of both


# a run


def trainer_on(url, folder, whole=False, **changes):
    config = small_config(
        folder, use_vllm=True, vllm_mode="server", vllm_server_base_url=url, **changes
    )
    adapter = LoraConfig(
        r=2,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model, tokenizer = small_model()
    given = {} if whole else dict(peft_config=adapter)
    return GRPOTrainer(model, digits, config, ROWS, processing_class=tokenizer, **given)


def test_a_run_samples_from_the_server_and_goes_on_after_a_stop(start, alone, tmp_path):
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


def test_an_evaluation_leaves_nothing_on_the_server(start, tmp_path):
    trainer = trainer_on(start()[1], tmp_path, max_steps=1)
    for work in (lambda: trainer.evaluate(ROWS[:1]), trainer.train):
        work()
        address = trainer.vllm.addresses[0]
        assert len(trainer.vllm.servers.names(address)) == 1
        assert not list((tmp_path / ".vllm_adapters").glob("policy*"))
    trainer.evaluate(ROWS[:1])
    assert len(trainer.vllm.servers.names(address)) == 1


def test_settings_that_contradict_use_vllm_are_refused(tmp_path):
    config = small_config(tmp_path, use_vllm=True, vllm_mode="server")
    model, tokenizer = small_model()
    with pytest.raises(ValueError, match="rollout_func draws the completions, so use_vllm"):
        GRPOTrainer(
            moved(model), digits, config, ROWS, processing_class=tokenizer, rollout_func=print
        )


@pytest.mark.long
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
