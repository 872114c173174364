"Pictures over HTTP: what a vLLM server is sent for a conversation with pictures, and a run on one."

import base64
import io

import peft
import pytest
import torch
from PIL import Image
from seeing_models import asked, dots, seeing
from serving.test_server import sampler_of

from grpo_nb import GRPOConfig, GRPOTrainer
from grpo_nb.model.pictures import SeenPrompt, WrittenPrompt, with_pictures
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.serving import stand_in
from grpo_nb.serving.addresses import ServerError
from grpo_nb.serving.stand_in import StandIn, serving
from grpo_nb.training.data import prompt_token_ids
from grpo_nb.training.guard import SamplerMismatch

KIND = "gemma3"  # whose processor is transformers' own here
ROWS = [asked(dots(1 + i % 3, seed=i)) for i in range(4)]
ROWS.append(asked(dots(2), dots(3), text="which?"))
SETTINGS = """n max_tokens temperature top_p top_k min_p repetition_penalty seed stop_token_ids
    ignore_eos stop""".split()
# with these, fields of vLLM's ChatCompletionRequest
TOLD = """model messages add_generation_prompt continue_final_message chat_template_kwargs
    logit_bias logprobs top_logprobs return_token_ids presence_penalty frequency_penalty
    skip_special_tokens include_stop_str_in_output""".split()


class Sees(StandIn):
    "Answers a chat as vLLM does, with pictures out of their URLs; whatever else comes is refused."

    def completions(self, asked):
        if "messages" not in asked:
            return super().completions(asked)
        assert asked.keys() <= {*SETTINGS, *TOLD}, asked.keys() - {*SETTINGS, *TOLD}
        assert asked["logprobs"] is True and asked["return_token_ids"] is True
        assert asked["logit_bias"] == {str(self.adapters.model.config.image_token_id): -100}
        prompt = self.prompt_of(asked)
        params = stand_in.sampling_of({n: asked[n] for n in SETTINGS if n in asked}, ())
        with self.lock, self.adapters.using(self.adapter_of(asked)) as model:
            rollout, _ = self.draw(model, [prompt], params, {})
        return {"object": "chat.completion", "prompt_token_ids": list(prompt)} | {
            "choices": [
                {
                    "index": row,
                    "finish_reason": reason,
                    "message": {"role": "assistant", "content": ""},
                    "token_ids": rollout.completion_ids[row][rollout.mask[row]].tolist(),
                    "logprobs": {
                        "content": [
                            {"token": "?", "logprob": x, "top_logprobs": []}
                            for x in rollout.logps[row][rollout.mask[row]].tolist()
                        ]
                    },
                }
                for row, reason in enumerate(rollout.finish_reasons)
            ]
        }

    def prompt_of(self, asked):
        processor, pictures = seeing(KIND)[1], []
        for message in asked["messages"]:
            for part in message["content"] if isinstance(message["content"], list) else ():
                assert part.keys() == {"type", part["type"]}
                if part["type"] == "image_url":
                    head, _, data = part.pop("image_url")["url"].partition(",")
                    assert head == "data:image/png;base64"
                    pictures.append(Image.open(io.BytesIO(base64.b64decode(data))))
                    part["type"] = "image"
        assert asked["add_generation_prompt"] and not asked["continue_final_message"]
        made = processor.apply_chat_template(
            asked["messages"], add_generation_prompt=True, **asked["chat_template_kwargs"]
        )
        read = processor(text=[made], images=[pictures], return_tensors="pt")
        return SeenPrompt(read["input_ids"][0].tolist(), {"pixel_values": read["pixel_values"]})


class SeesOthers(Sees):
    "Its pictures are black."

    def prompt_of(self, asked):
        prompt = super().prompt_of(asked)
        prompt.pixels = {"pixel_values": -torch.ones_like(prompt.pixels["pixel_values"])}
        return prompt


class ReadsOtherwise(Sees):
    def prompt_of(self, asked):
        prompt = super().prompt_of(asked)
        return SeenPrompt([*prompt, 65], prompt.pixels)


@pytest.fixture
def chats(monkeypatch):
    monkeypatch.setattr(stand_in, "POST", [*stand_in.POST, "/v1/chat/completions"])


ADAPTER = peft.LoraConfig(
    r=2, target_modules=["q_proj"], init_lora_weights=False, exclude_modules=".*vision.*"
)


def adapted():
    model, processor = seeing(KIND)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(model, ADAPTER).eval(), processor


def server_of(folder, kind=Sees):
    model, processor = seeing(KIND)
    return serving(kind(model, processor.tokenizer, name="seer", lora_dir=folder, max_loras=4))


def test_completions_and_log_probs_are_those_of_the_engine(chats, tmp_path):
    model, processor = adapted()
    prompts = [prompt_token_ids(with_pictures(row), processor) for row in ROWS]
    params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=(257,))
    with server_of(tmp_path) as url:
        sampler = sampler_of(url, tmp_path, stop_token_ids=(257,))
        sampler.publish(model, 0)
        drawn = sampler.generate([*prompts, [65, 66]], params)
        with pytest.raises(ValueError, match="give the rows as messages"):
            text = WrittenPrompt("<start_of_image>?", [dots(1)])
            sampler.generate([prompt_token_ids(text, processor)], params)
    wanted = RolloutEngine(model, processor.tokenizer).generate([*prompts, [65, 66]], params)
    assert torch.equal(drawn.completion_ids, wanted.completion_ids)
    torch.testing.assert_close(drawn.logps, wanted.logps, rtol=0, atol=1e-5)
    assert drawn.prompt_ids[0].pixels is prompts[0].pixels


def test_another_reading_of_the_conversation_is_a_sentence(chats, tmp_path):
    model, processor = adapted()
    prompt = prompt_token_ids(with_pictures(ROWS[0]), processor)
    with server_of(tmp_path, ReadsOtherwise) as url:
        sampler = sampler_of(url, tmp_path)
        sampler.publish(model, 0)
        with pytest.raises(ServerError, match="reads the conversation and its pictures as"):
            sampler.generate([prompt], SamplingParams(max_tokens=2))


def run_on(folder, kind):
    model, processor = seeing(KIND)
    with server_of(folder, kind) as url:
        config = GRPOConfig(
            output_dir=str(folder / "out"),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            guard_every=1,
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            bf16=False,
        )
        trainer = GRPOTrainer(
            model,
            lambda completions, **columns: [-len(one[0]["content"]) for one in completions],
            config,
            ROWS,
            processing_class=processor,
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]),
        )
        trainer.train()
    return [one for one in trainer.log_history if "reward" in one]


@pytest.mark.filterwarnings("ignore")
def test_a_run_on_a_server_that_sees_and_its_guard(chats, tmp_path):
    records = run_on(tmp_path / "right", Sees)
    assert all(one["guard/gap_mean"] < 1e-4 for one in records) and records[-1]["grad_norm"] > 0
    with pytest.raises(SamplerMismatch):
        run_on(tmp_path / "wrong", SeesOthers)
