"""What is asked of a server for a prompt, and which answers are trained on."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from serving.test_server import PARAMS, PROMPTS, Faulty, sampler_of
from serving.test_stand_in import moved
from small_runs import ROWS, digits, one_thread, small_config, small_model  # noqa: F401

from grpo_nb import GRPOTrainer
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.serving.addresses import ServerError
from grpo_nb.serving.stand_in import StandIn
from grpo_nb.serving.vllm_requests import request_seeds


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
        assert torch.allclose(drawn.logps[rows, :width], wanted.logps, atol=1e-5)
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
