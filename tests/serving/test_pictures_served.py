"Pictures over HTTP: what a vLLM server is sent for a conversation with pictures, and a run on one."

import base64
import io
import json

import peft
import pytest
import torch
from PIL import Image
from seeing_models import asked, dots, seeing, with_tools
from serving.test_server import sampler_of
from training.test_tools_that_show import Calls, bare

from grpo_nb import GRPOConfig, GRPOTrainer
from grpo_nb.model.pictures import SeenPrompt, WrittenPrompt, with_pictures
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.serving import stand_in
from grpo_nb.serving.addresses import ServerError
from grpo_nb.serving.stand_in import StandIn, serving
from grpo_nb.serving.vllm_requests import with_features
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
        told = {"object": "chat.completion", "prompt_token_ids": list(prompt)}
        message = {"role": "assistant", "content": ""}
        return told | {"choices": [{**one, "message": message} for one in self.choices(rollout)]}

    def choices(self, rollout):
        return [
            {
                "index": row,
                "finish_reason": reason,
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

    def render(self, asked):
        "As vLLM's renderer: token ids, and of each picture a hash, its place and its tensors."
        assert asked.keys() == {"model", "messages"}
        self.adapter_of(asked)
        told = dict(add_generation_prompt=True, continue_final_message=False)
        prompt = self.prompt_of({**asked, **told, "chat_template_kwargs": {}})
        marks = [self.tokenizer.convert_tokens_to_ids(f"<{x}_of_image>") for x in ("start", "end")]
        starts, ends = ([i for i, x in enumerate(prompt) if x == mark] for mark in marks)
        data = [json.dumps(one.tolist()) for one in prompt.pixels["pixel_values"]]
        places = [{"offset": a, "length": b + 1 - a} for a, b in zip(starts, ends)]
        features = {"mm_hashes": {"image": [str(hash(one)) for one in data]}}
        features |= {"mm_placeholders": {"image": places}, "kwargs_data": {"image": data}}
        return {"request_id": "?", "token_ids": [*prompt], "features": features}

    def generate(self, asked):
        "As vLLM: what stands at the places of pictures is not looked at, but counted."
        if "features" not in asked:
            return super().generate(asked)
        ids, seen = asked["token_ids"], asked["features"]
        place = self.adapters.model.config.image_token_id
        for one in seen["mm_placeholders"]["image"]:
            piece = ids[one["offset"] :][: one["length"]]
            assert piece == [place] * 4
        assert len(seen["kwargs_data"]["image"]) * 4 == ids.count(place)
        pixels = torch.tensor([json.loads(one) for one in seen["kwargs_data"]["image"]])
        params = asked["sampling_params"]
        assert params.keys() <= {*SETTINGS, *TOLD, "output_kind"}
        params = stand_in.sampling_of({n: params[n] for n in SETTINGS if n in params}, ())
        with self.lock, self.adapters.using(self.adapter_of(asked)) as model:
            prompt = SeenPrompt(ids, {"pixel_values": pixels})
            rollout, _ = self.draw(model, [prompt], params, {})
        return {"request_id": "?", "choices": self.choices(rollout)}


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
    more = ["/v1/chat/completions", "/v1/chat/completions/render"]
    monkeypatch.setitem(stand_in.ROUTES, "POST", [*stand_in.ROUTES["POST"], *more])


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


def test_token_ids_with_pictures_between_them(chats, tmp_path, monkeypatch):
    "A prompt that is written, and one that goes on behind a reply with pictures."
    model, processor = adapted()
    text = WrittenPrompt("<start_of_image>a<start_of_image>?", [dots(1), dots(3)])
    written, other = (prompt_token_ids(one, processor) for one in (text, with_pictures(ROWS[1])))
    later = SeenPrompt([65], {}).going_on([66, *other, 67, *written], [other, written])
    assert len(later.pixels["pixel_values"]) == len(later.pictures) == 3
    params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=(257, later.place))
    with server_of(tmp_path) as url:
        sampler = sampler_of(url, tmp_path)
        sampler.publish(model, 0)
        drawn = sampler.generate([written, later], params)
        monkeypatch.setattr(
            Sees, "render", lambda self, asked: {"token_ids": [1], "features": None}
        )
        with pytest.raises(ValueError, match="does not fit between them"):
            sampler.generate([later], params)
        monkeypatch.setitem(stand_in.ROUTES, "POST", stand_in.ROUTES["POST"][:-1])
        with pytest.raises(ServerError, match="need vLLM's --enable-scale-out"):
            sampler.generate([later], params)
    wanted = RolloutEngine(model, processor.tokenizer).generate([written, later], params)
    assert torch.equal(drawn.completion_ids, wanted.completion_ids)
    torch.testing.assert_close(drawn.logps, wanted.logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change, sentence", [
    ({"token_ids": [5, 8, 7, 8, 6]}, "fit between them .other tokens than here"),
    ({"token_ids": [5, 7, 9, 7, 6]}, "placeholders with marks between them"),
    ({"kwargs_data": {"image": [None]}}, "--mm-processor-cache-gb 0"),
    ({"kwargs_data": None}, "--mm-processor-cache-gb 0"),
    ({"mm_placeholders": {"image": []}}, "0 of 1 pictures"),
    ({"mm_placeholders": {}}, "fit between them .'image'"),
])  # fmt: skip
def test_what_a_server_makes_of_pictures_has_to_fit(change, sentence):
    body = {"prompt": [[1, 5, 7, 9, 7, 6, 5, 7, 7, 7, 6, 2]], "place": 7, "pictures": ["?"]}
    answer = {
        "token_ids": [3, 5, 7, 7, 7, 6],
        "features": {
            "mm_placeholders": {"image": [{"offset": 1, "length": 5}]},
            "kwargs_data": {"image": ["data"]},
        },
    }
    seen = with_features(body, answer)["features"]
    assert seen["mm_placeholders"] == {"image": [{"offset": 7, "length": 3}]}
    if ids := change.pop("token_ids", None):
        answer["token_ids"] = [3, *ids]
    answer["features"] |= change
    with pytest.raises(ValueError, match=sentence):
        with_features(body, answer)


def run_on(folder, kind, tools=None):
    model, processor = seeing(KIND)
    if tools:
        with_tools(processor)
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
            max_completion_length=60 if tools else 4,
            generation_kwargs={"eos_token_id": [*range(0, 256, 2)]} if tools else None,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            bf16=False,
        )
        trainer = GRPOTrainer(
            model,
            lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids],
            config,
            ROWS,
            processing_class=processor,
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]),
            tools=tools,
        )
        if tools:
            trainer.source.sampler.parser = Calls(processor.tokenizer, ["bare"])
        trainer.train()
    return [one for one in trainer.log_history if "reward" in one]


@pytest.mark.filterwarnings("ignore")
def test_a_run_on_a_server_that_sees_and_its_guard(chats, tmp_path):
    records = run_on(tmp_path / "right", Sees)
    assert all(one["guard/gap_mean"] < 1e-4 for one in records) and records[-1]["grad_norm"] > 0
    with pytest.raises(SamplerMismatch):
        run_on(tmp_path / "wrong", SeesOthers)


@pytest.mark.filterwarnings("ignore")
def test_a_run_with_tools_that_show_on_a_server(chats, tmp_path):
    records = run_on(tmp_path, Sees, [bare])
    assert all(one["sampling/gap_max"] < 1e-4 for one in records)
    assert records[-1]["tools/call_frequency"] > 1 and records[-1]["grad_norm"] > 0
    assert all(one["guard/gap_mean"] < 1e-4 for one in records)
