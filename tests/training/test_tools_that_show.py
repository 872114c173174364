"Tools that answer with pictures: tokens, log-probs and gradients are those of transformers."

import io
import json

import datasets
import numpy
import pytest
import torch
from seeing_models import FAMILIES, asked, dots, seeing, with_tools
from seen_by_others import EVERY, TRAINED, seen_by_others
from small_runs import weights_of
from training.test_seeing import ROWS as PICTURED
from training.test_seeing import batch_in, config_of, records_of

import grpo_nb
from grpo_nb import GRPOTrainer, SamplingParams
from grpo_nb.model.pictures import SIGHTS, pixels_of, with_pictures
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout.rollout import pad_left
from grpo_nb.rollout.sampler import drawn_elsewhere
from grpo_nb.rollout.turns import TurnSampler, as_call, as_message, content_of
from grpo_nb.training.data import prompt_token_ids
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps
from grpo_nb.training.report import pictures_of_sample, read_run, report_html

pytestmark = pytest.mark.filterwarnings("ignore")


def draw(count: int, words: str = "") -> list:
    """
    Draw dots.

    Args:
        count: how many
        words: said beside the picture
    """
    picture = dots(count, width=(24, 16, 32)[count % 3], seed=count)
    return [{"type": "image", "image": picture}, {"type": "text", "text": words}]


def both(count: int):
    """
    Draw twice.

    Args:
        count: how many dots
    """
    return [part for seed in (1, 2) for part in draw(count + seed, "and")]


def bare(count: int):
    """
    Draw dots, without a word.

    Args:
        count: how many
    """
    return dots(count, width=16, height=32)


def say(word: str) -> str:
    """
    Say a word.

    Args:
        word: which
    """
    return word


TOOLS = [draw, both, bare, say]
ROWS = [asked(dots(1), text="draw"), asked(text="both"), asked(dots(2, width=32), text="none")]
ROWS += [asked(text="say")]
TURNS = {  # what is asked -> the calls of each turn, and the last turn
    "draw": [
        [as_call("draw", {"count": 2, "words": "look"})],
        [as_call("bare", {"count": 1})],
        "3.",
    ],
    "both": [[as_call("both", {"count": 1}), as_call("say", {"word": "so"})], "five"],
    "none": ["I see."],
    "say": [[as_call("say", {"word": "ah"})], "aha"],
}


class Recites:
    "A sampler that draws the next of the turns above."

    takes_token_ids = True

    def __init__(self, tokenizer, always=None):
        self.tokenizer, self.always = tokenizer, always

    def generate(self, prompts, params):
        said = [self.tokenizer.decode(list(prompt)) for prompt in prompts]
        texts = [self.always or self.next_of(text) for text in said]
        ids = [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        given = dict(
            prompt_ids=prompts, completion_ids=ids, logprobs=[[-1.0] * len(i) for i in ids]
        )
        return drawn_elsewhere(given, len(prompts), params.stop_token_ids)

    def publish(self, model, version):
        pass

    def close(self):
        pass

    def next_of(self, text):
        name = next(name for name in TURNS if f"{name}<|end|>" in text)
        turn = TURNS[name][text.count("<|start|>a:") - 1]
        whole = self.tokenizer.apply_chat_template(
            [as_message("", turn) if isinstance(turn, list) else as_message(turn)], tokenize=False
        )
        return whole.removeprefix("<|start|>a:").removesuffix("\n")


def drawn_by(kind, rows=ROWS):
    "Completions of the rows, with the model and the processor."
    model, processor = seeing(kind)
    tokenizer = with_tools(processor).tokenizer
    given = dict(stop_token_ids=[tokenizer.eos_token_id], processor=processor)
    sampler = TurnSampler(Recites(tokenizer), tokenizer, TOOLS, **given)
    prompts = [with_pictures(row) for row in rows]
    shown = {"tools": sampler.tools.schemas}
    ids = [prompt_token_ids(prompt, processor, shown) for prompt in prompts]
    rollout = sampler.generate(ids, SamplingParams(max_tokens=400))
    rollout.prompts = prompts
    return model, processor, rollout, shown


def batch_of(rollout):
    kept = rollout.mask & rollout.written
    drawn = rollout.completion_ids, rollout.mask, kept, torch.zeros(len(kept))
    more = dict(pixels=pixels_of(rollout.prompt_ids), reply_pixels=rollout.reply_pixels)
    return TrainingBatch(*pad_left(rollout.prompt_ids), *drawn, **more)


def read_whole(model, processor, conversation, shown):
    "What transformers' model is called with for a conversation that the processor has read whole."
    text = processor.apply_chat_template(conversation, tokenize=False, **shown)
    parts = [p for m in conversation if isinstance(m["content"], list) for p in m["content"]]
    pictures = [part["image"] for part in parts if part["type"] == "image"]
    if not pictures:
        made = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return {"input_ids": made["input_ids"]}
    made = processor(text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt")
    sight = SIGHTS[model.config.model_type]
    given = {name: made[name] for name in ("input_ids", *sight.tensors) if name in made}
    if sight.kinds:
        given[sight.kinds] = (given["input_ids"] == model.config.image_token_id).long()
    return given


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_log_probs_and_gradients_are_those_of_the_whole_conversation(kind):
    "Each row read whole by the processor, and by transformers' model without padding."
    model, processor, rollout, shown = drawn_by(kind)
    assert rollout.calls == [2, 2, 0, 1] and rollout.failures == [0] * 4
    assert [bool(one) for one in rollout.reply_pixels] == [True, True, False, False]
    theirs = []
    for row, prompt in enumerate(rollout.prompts):
        given = read_whole(model, processor, [*prompt, *rollout.messages[row]], shown)
        own = [*rollout.prompt_ids[row], *rollout.completion_ids[row][rollout.mask[row]].tolist()]
        ids = given["input_ids"][0].tolist()
        assert ids[: len(own)] == own and processor.tokenizer.decode(ids[len(own) :]) == "\n"
        given["input_ids"] = given["input_ids"][:, : len(own)]
        if kinds := SIGHTS[kind].kinds:
            given[kinds] = given.get(kinds, torch.zeros(1, len(ids)).long())[:, : len(own)]
        start = len(rollout.prompt_ids[row])
        logps = model(**given).logits[0, start - 1 : -1].log_softmax(-1)
        theirs.append(logps.gather(-1, given["input_ids"][0, start:, None])[:, 0])
    batch = batch_of(rollout)
    ours, _ = completion_logps(model, batch)
    rtol = 1e-5 if "qwen3_5" in kind else 0  # a state of float32, in chunks that padding moves
    for row, one in enumerate(theirs):
        torch.testing.assert_close(ours[row, : len(one)], one, rtol=rtol, atol=1e-5)
    weights = [p for p in model.parameters() if p.requires_grad]
    kept = [batch.loss_mask[row, : len(one)] for row, one in enumerate(theirs)]
    sums = (
        sum((one * mask).sum() for one, mask in zip(theirs, kept)),
        (ours * batch.loss_mask).sum(),
    )
    count = batch.loss_mask.sum()
    expected, found = (torch.autograd.grad(x / count, weights, allow_unused=True) for x in sums)
    for mine, other in zip(found, expected):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=10 * rtol, atol=1e-5)


class Calls:
    "A parser for which each of the first two turns is a call, whatever its tokens are."

    def __init__(self, tokenizer, names=("draw", "both", "bare")):
        self.tokenizer, self.names = tokenizer, names

    def __call__(self, ids, before, schemas):
        if self.tokenizer.decode(before).count("<|start|>t:") > 1:
            return as_message("so be it")
        name = self.names[sum(ids) % len(self.names)]
        given = {} if name == "more" else {"count": ids[0] % 3 + 1}
        return as_message("", [as_call(name, given)])


def run_of(kind, folder, rows=ROWS, model=None, tools=TOOLS, **changes):
    "A run whose policy ends its turns soon, and calls a tool with most of them."
    made, processor = seeing(kind)
    tokenizer, ends = with_tools(processor).tokenizer, [*range(0, 256, 2)]
    usual = dict(
        max_completion_length=200,
        generation_kwargs={"eos_token_id": [*ends, tokenizer.eos_token_id]},
        per_device_train_batch_size=8,
        num_generations=4,
    )
    trainer = GRPOTrainer(
        model or made,
        lambda completion_ids, **columns: [float(sum(ids) % 7) for ids in completion_ids],
        config_of(folder, **usual | changes),
        rows,
        processing_class=processor,
        tools=tools,
    )
    trainer.source.sampler.parser = Calls(tokenizer)
    return trainer


@pytest.mark.parametrize("kind", FAMILIES)
def test_sampler_and_trainer_see_the_same(kind, tmp_path):
    "Two updates of a cycle, in micro-batches of half of it."
    trainer = run_of(
        kind, tmp_path, steps_per_generation=2, max_steps=4, gradient_accumulation_steps=1
    )
    batches = []
    collect = trainer.collector.collect
    trainer.collector.collect = lambda state: batches.append(collect(state)) or batches[-1]
    trainer.train()
    records = records_of(trainer)
    assert max(one["sampling/gap_max"] for one in records) < 1e-4
    assert all(one["grad_norm"] > 0 for one in records)
    assert records[-1]["tools/failure_frequency"] == 0 and records[-1]["tools/call_frequency"] > 1
    place = trainer.model.config.image_token_id
    for batch in batches:
        seen = batch.completion_ids == place
        assert seen.any() and not (seen & batch.loss_mask).any() and any(batch.reply_pixels)


def test_a_prompts_picture_is_read_once_and_each_reply_s_own(tmp_path):
    "With rows in one, whose run is that of rows each for itself."
    trained, read, batches = [], [], []
    for row in (False, True):
        model, _ = seeing("qwen3_vl")
        if row:
            model.set_attn_implementation({"text_config": "sink"})
        trainer = run_of("qwen3_vl", tmp_path, model=model, optim="sgd", max_steps=1)
        if row:
            tower = trainer.model.model.visual.patch_embed
            trainer.guard.check = lambda batch, state: (
                batches.append(batch)
                or tower.register_forward_pre_hook(lambda _, given: read.append(len(given[0])))
            )
        trainer.train()
        trained.append(weights_of(trainer.model))
    for name, weight in trained[0].items():
        torch.testing.assert_close(trained[1][name], weight, rtol=0, atol=1e-5, msg=name)
    (batch,) = batches
    once = {id(one): one for one in batch.pixels if one}
    whole = [*once.values(), *filter(None, batch.reply_pixels)]
    assert len(once) == 1 and {*read} == {sum(len(one["pixel_values"]) for one in whole)}


def test_a_checkpoint_in_the_middle_of_a_cycle_keeps_the_pictures(tmp_path):
    changes = dict(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
    )
    whole = run_of("qwen3_vl", tmp_path, **changes)
    whole.train()
    folder = tmp_path / "checkpoint-3"
    held = batch_in(torch.load(folder / "training_state.pt", weights_only=True))
    assert len(held["reply_pixels"]) == 8 and any(held["reply_pixels"])
    again = run_of("qwen3_vl", tmp_path / "again", **changes)
    again.train(resume_from_checkpoint=str(folder))
    for name, weight in weights_of(whole.model).items():
        assert torch.equal(weight, weights_of(again.model)[name]), name


def test_rewards_and_samples_have_the_pictures(tmp_path):
    trainer, seen = run_of("gemma3", tmp_path, ROWS[:2], max_steps=1, log_completions=True), []
    score = trainer.source.reward_funcs[0]

    def look(completions, **columns):
        seen.extend(completions)
        return score(completions=completions, **columns)

    trainer.source.use(reward_funcs=[look])
    trainer.train()
    parts = [p for m in seen[0] if m["role"] == "tool" for p in m["content"] if "image" in p]
    assert parts and all(part["image"].mode == "RGB" for part in parts)
    sample = trainer.samples[0]
    assert "tool: [picture]" in sample["completion"]
    assert len(json.loads(sample["reply_pictures"])) == len(parts)
    shown = pictures_of_sample(sample)
    assert len(shown) == len(parts) + 1 and f'<img src="{shown[-1]}"' in report_html(
        read_run(tmp_path)
    )
    assert trainer.evaluate(ROWS[:2])["eval_reward"] >= 0


def test_a_placeholder_that_is_drawn_ends_its_row(tmp_path):
    "It is trained as drawn, and nothing is looked for in its place."
    model, processor, rollout, _ = drawn_by("qwen3_vl")
    batch, place = batch_of(rollout), model.config.image_token_id
    row = 2  # its only turn ends in the placeholder
    last = int(rollout.lengths[row]) - 1
    expected, _ = completion_logps(model, batch)
    batch.completion_ids[row, last] = place
    for implementation in ("sdpa", "sink"):
        model.set_attn_implementation({"text_config": implementation})
        found, _ = completion_logps(model, batch)
        changed = (found - expected).abs() > 1e-5
        assert changed.nonzero().tolist() == [[row, last]]


def turns_of(kind, always, tools=TOOLS, sees=True):
    "A sampler all of whose turns are one text, and a prompt."
    _, processor = seeing(kind)
    tokenizer = with_tools(processor).tokenizer
    given = dict(stop_token_ids=[tokenizer.eos_token_id], processor=processor if sees else None)
    return TurnSampler(Recites(tokenizer, always), tokenizer, tools, **given), tokenizer


CALL = '<tool_call>{"name": "%s", "arguments": {%s}}</tool_call>'


def test_no_tool_is_called_behind_a_placeholder():
    sampler, tokenizer = turns_of("qwen3_vl", CALL % ("bare", '"count": 1') + "<|image_pad|>")
    rollout = sampler.generate([tokenizer("?").input_ids], SamplingParams(max_tokens=300))
    assert rollout.calls == [0] and rollout.finish_reasons == ["stop"]


def test_a_text_that_looks_like_a_picture_is_an_error():
    for kind, mark in (("qwen3_vl", "<|image_pad|>"), ("gemma3", "<start_of_image>")):
        sampler, tokenizer = turns_of(kind, CALL % ("say", f'"word": "{mark}"') + "<|end|>")
        sampler.limit = 1
        rollout = sampler.generate([tokenizer("?").input_ids], SamplingParams(max_tokens=300))
        assert rollout.failures == [1] and rollout.reply_pixels == [None]
        assert "stands for a picture" in rollout.messages[0][1]["content"]


def test_a_picture_that_cannot_be_read_is_an_error_of_the_tool():
    def broken() -> list:
        "Nothing to see."
        return [{"type": "image", "path": "/nowhere.png"}]

    sampler, tokenizer = turns_of("idefics3", CALL % ("broken", "") + "<|end|>", [broken])
    sampler.limit = 1
    rollout = sampler.generate([tokenizer("?").input_ids], SamplingParams(max_tokens=900))
    assert rollout.failures == [1] and "cannot be read" in rollout.messages[0][1]["content"]


def test_what_the_image_processor_refuses_is_an_error_of_the_tool():
    "And the run goes on, with what other tools said in the same turn."

    def thin() -> list:
        "A line."
        return dots(0, width=900, height=7).crop((0, 0, 900, 1))

    asks = CALL % ("thin", "") + CALL % ("say", '"word": "ah"') + "<|end|>"
    sampler, tokenizer = turns_of("qwen3_vl", asks, [thin, say])
    with pytest.raises(ValueError, match="aspect ratio must be smaller than 200"):
        sampler.processor.image_processor(images=[thin()])
    sampler.limit = 1
    rollout = sampler.generate([tokenizer("?").input_ids], SamplingParams(max_tokens=900))
    assert rollout.failures == [1] and rollout.reply_pixels == [None]
    first, second = (message["content"] for message in rollout.messages[0][1:3])
    assert "Qwen2VLImageProcessorPil does not take pictures of [(900, 1)] pixels" in first
    assert second == "ah"


def as_bytes(picture):
    "The file that a picture is."
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()


def part(value):
    return {"type": "image", "image": value}


PAIR = dots(1), dots(2, width=32)


@pytest.mark.parametrize("value, count", [
    (list(PAIR), 2),
    (("two", PAIR[0], "pictures", part(PAIR[1])), 2),
    ([part(numpy.asarray(PAIR[0])), part(PAIR[1].convert("RGBA"))], 2),
    ([part(as_bytes(PAIR[0])), part({"bytes": as_bytes(PAIR[1])})], 2),
    (part(PAIR[0]), 1),
])  # fmt: skip
def test_pictures_in_any_form_are_what_transformers_reads(value, count):
    def shows() -> list:
        "Look."
        return value

    sampler, tokenizer = turns_of("qwen3_vl", CALL % ("shows", "") + "<|end|>", [shows])
    sampler.limit = 1
    rollout = sampler.generate([tokenizer("?").input_ids], SamplingParams(max_tokens=900))
    made = sampler.processor.image_processor(images=PAIR[:count], return_tensors="pt")
    assert rollout.failures == [0]
    assert rollout.reply_pixels[0].keys() == made.keys()
    for name, found in rollout.reply_pixels[0].items():
        torch.testing.assert_close(found, made[name])


def test_a_reply_without_room_is_left_out_with_its_pictures():
    sampler, tokenizer = turns_of("gemma3", CALL % ("bare", '"count": 1') + "<|end|>")
    rollout = sampler.generate([tokenizer("?").input_ids], SamplingParams(max_tokens=70))
    assert rollout.calls == [1] and len(rollout.messages[0]) == 1
    assert rollout.reply_pixels == [None] and rollout.finish_reasons == ["stop"]


def test_who_cannot_see_what_a_tool_shows_is_a_sentence():
    asks = CALL % ("bare", '"count": 1') + "<|end|>"
    sampler, tokenizer = turns_of("qwen3_vl", asks, sees=False)
    with pytest.raises(ValueError, match=r"answered with a picture \(bare\), and nobody reads"):
        sampler.generate([tokenizer("?").input_ids], SamplingParams(max_tokens=300))
    sampler, tokenizer = turns_of("qwen3_vl", asks)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|image_pad|>", "")
    with pytest.raises(ValueError, match="has 1 pictures, and as text it has 0 times"):
        sampler.generate([tokenizer("?").input_ids], SamplingParams(max_tokens=300))


@pytest.mark.parametrize("value, content", [
    ([], "[]"),
    ([1, {"type": "text"}], "[1, {'type': 'text'}]"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ({"type": "image"}, "{'type': 'image'}"),
    ([{"type": "move"}], "[{'type': 'move'}]"),
    ([{"type": ["a", "b"]}], "[{'type': ['a', 'b']}]"),
    (None, "None"),
])  # fmt: skip
def test_what_is_no_picture_is_text(value, content):
    assert content_of(value) == content


class Board:
    "An environment that shows itself."

    def reset(self, **row):
        self.count = 1
        return dots(1)

    def more(self):
        "Draw one more."
        self.count += 1
        return dots(self.count)

    def get_reward(self):
        return float(self.count)


def test_an_environment_shows_itself(tmp_path):
    "In what `reset` gives and in what its methods answer."
    model, processor = seeing("gemma3")
    tokenizer, ends = with_tools(processor).tokenizer, [*range(0, 256, 2)]
    rows = [asked(dots(2), text="go"), asked(text="on")]
    trainer = GRPOTrainer(
        model,
        [],
        config_of(tmp_path, max_completion_length=150, generation_kwargs={"eos_token_id": ends}),
        rows,
        processing_class=processor,
        environment_factory=Board,
    )
    trainer.source.sampler.parser = Calls(tokenizer, ["more"])
    seen = []
    trainer.guard.check = lambda batch, state: seen.append(batch)
    trainer.train()
    counts = [len(one["pixel_values"]) for batch in seen for one in batch.pixels]
    assert {*counts} == {1, 2}, "with the picture of the row, if it has one"
    assert max(one["sampling/gap_max"] for one in records_of(trainer)) < 1e-4
    assert records_of(trainer)[0]["reward"] > 1 and any(seen[0].reply_pixels)


def test_trl_s_script_of_a_tool_that_shows(tmp_path):
    """What TRL asserts in test_train_with_tools_multimodal_response of its tests/
    test_grpo_trainer.py, where a script stands in place of `generate`."""
    model, processor = seeing("qwen3_5")
    tokenizer = with_tools(processor).tokenizer

    class Script(Recites):
        def generate(self, prompts, params):
            self.texts = (
                [CALL % ("bare", '"count": 1') + "<|end|>", "I know no tool<|end|>"]
                if len(prompts) == 2
                else ["Done!<|end|>"]
            )
            return super().generate(prompts, params)

        def next_of(self, text):
            return self.texts.pop(0)

    trainer = GRPOTrainer(
        model,
        lambda completions, **columns: [float(len(one)) for one in completions],
        config_of(
            tmp_path,
            learning_rate=0.1,
            max_steps=4,
            guard_every=0,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=200,
        ),
        [{"prompt": [{"role": "user", "content": "look"}]}] * 4,
        processing_class=processor,
        tools=[bare],
    )
    before = weights_of(trainer.model)
    trainer.source.sampler.sampler = Script(tokenizer)
    trainer.train()
    record = records_of(trainer)[-1]
    assert record["tools/call_frequency"] == 0.5 and record["tools/failure_frequency"] == 0
    after = weights_of(trainer.model)
    assert not [name for name in before if before[name].equal(after[name])]


def nothing(completions, **columns):
    return [0.0] * len(completions)


def test_a_model_by_name_brings_its_processor_where_a_tool_may_show(tmp_path):
    model, processor = seeing("idefics3")
    for one in (model, with_tools(processor)):
        one.save_pretrained(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": "look"}]}] * 4
    found = {}
    for tool in (draw, bare, say):
        trainer = GRPOTrainer(
            str(tmp_path / "model"), nothing, config_of(tmp_path), rows, tools=[tool]
        )
        found[tool.__name__] = trainer.processing_class, trainer.sees
    assert found["draw"][1] and found["bare"][1] and not found["say"][1]
    assert hasattr(found["bare"][0], "image_processor")
    assert not hasattr(found["say"][0], "image_processor")
    trainer = GRPOTrainer(
        tiny_gpt_oss()[0],
        nothing,
        config_of(tmp_path),
        rows,
        processing_class=processor.tokenizer,
        tools=[bare],
    )
    assert not trainer.sees, "a model of texts"


class ScriptOfTurns:
    "What eight completions say, turn by turn; three of four call a tool in their first turn."

    def __init__(self, tokenizer):
        self.tokenizer, self.said = tokenizer, 0

    def next_turns(self, count):  # ids of each
        texts = []
        for _ in range(count):
            self.said += 1
            call = CALL % ("draw", f'"count": {self.said % 3 + 1}, "words": "ah"')
            words = f"I see {self.said * 7919 % 97}."
            texts.append(call if count == 8 and self.said % 4 else words)
        return [self.tokenizer(f"{x}<|end|>", add_special_tokens=False).input_ids for x in texts]

    def generate(self, prompts=None, params=None, input_ids=None, **others):
        "For the sampler of ours, and in place of `generate` of a model."
        ids = self.next_turns(len(prompts if input_ids is None else input_ids))
        if input_ids is None:
            given = dict(prompt_ids=prompts, completion_ids=ids)
            given["logprobs"] = [[-1.0] * len(one) for one in ids]
            return drawn_elsewhere(given, len(prompts), params.stop_token_ids)
        rows = [torch.tensor(one) for one in ids]
        pad = self.tokenizer.pad_token_id
        whole = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        return torch.cat([input_ids, whole], 1)

    takes_token_ids = True

    def publish(self, model, version):
        pass

    def close(self):
        pass


def trained_on_pictures_of_tools(library, kind, folder, processor=None):
    "Weights after 20 updates on the completions of a script."
    model, own = seeing(kind)
    processor = with_tools(processor or own)
    for name, weight in model.named_parameters():
        if name.endswith(("k_proj.bias", "qkv.bias")):  # its gradient is rounding
            weight.requires_grad_(False)
    settings = dict(max_steps=20, learning_rate=1e-3, vllm_importance_sampling_correction=False)
    if library is grpo_nb:
        settings["guard_every"] = 0
    trainer = library.GRPOTrainer(
        model,
        lambda completion_ids, **columns: [float(sum(ids) % 11) for ids in completion_ids],
        args=config_of(folder, library, max_completion_length=200, **settings),
        train_dataset=datasets.Dataset.from_list(PICTURED),
        processing_class=processor,
        tools=[draw],
    )
    script = ScriptOfTurns(processor.tokenizer)
    if library is grpo_nb:
        trainer.source.sampler.sampler = script
    else:
        trainer.model.generate = script.generate
    trainer.train()
    return weights_of(trainer.model), records_of(trainer)


@pytest.mark.long
@pytest.mark.parametrize("kind", TRAINED)
def test_weights_are_those_that_trl_has_stored(kind, tmp_path):
    "Of its trainer with a tool that shows; every 31st number is kept."
    ours, log = trained_on_pictures_of_tools(grpo_nb, kind, tmp_path)
    theirs, began = seen_by_others()["with_tools"][kind], weights_of(seeing(kind)[0])
    assert ours.keys() == theirs.keys() and log[-1]["tools/call_frequency"] == 0.75
    for name, kept in theirs.items():
        mine = ours[name].flatten()[::EVERY]
        torch.testing.assert_close(mine, torch.tensor(kept), rtol=0, atol=1e-5, msg=name)
        assert "qkv.bias" in name or "k_proj.bias" in name or not began[name].equal(ours[name])
