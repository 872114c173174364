"Pictures in prompts: what transformers' models and processors do with them, and what is refused."

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from seeing_models import FAMILIES, asked, dots, processor_of, seeing
from seen_by_others import EVERY, READ, ROWS, seen_by_others

from grpo_nb.model.loading import load_model
from grpo_nb.model.pictures import (
    AS_DATA,
    SIGHTS,
    PictureProcessor,
    SeenPrompt,
    as_picture,
    has_pictures,
    joined,
    load_processor,
    picture_inputs,
    pixels_of,
    rows_of,
    sight_of,
    thumbnails,
    with_pictures,
    without_token,
)
from grpo_nb.model.stored_weights import towers
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.rollout import pad_left
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.training.data import many_prompt_token_ids, prompt_token_ids
from grpo_nb.training.policy_logprobs import (
    TrainingBatch,
    completion_logps,
    plain_completion_logps,
)

COMPLETIONS = [[65, 66, 67], [70], [80, 81, 82, 83], [90, 91]]


def prompts_of(processor, rows=ROWS):
    return [prompt_token_ids(with_pictures(row), processor) for row in rows]


def alone(model, prompt, drawn=()):
    "What transformers' model is called with for one row, without padding."
    ids = torch.tensor([[*prompt, *drawn]])
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    kind = model.config.model_type
    if pixels := getattr(prompt, "pixels", None):
        given |= {name: pixels[name] for name in SIGHTS[kind].tensors if name in pixels}
        if SIGHTS[kind].kinds:
            given[SIGHTS[kind].kinds] = (ids == model.config.image_token_id).long()
    return given


def batch_of(prompts, drawn=COMPLETIONS):
    "The completions above as rows of a batch."
    T = max(map(len, drawn))
    ids = torch.tensor([c + [0] * (T - len(c)) for c in drawn])
    mask = torch.arange(T) < torch.tensor([[len(c)] for c in drawn])
    zeros = torch.zeros(len(ids))
    return TrainingBatch(*pad_left(prompts), ids, mask, mask, zeros, pixels=pixels_of(prompts))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FAMILIES)
def test_completions_are_those_of_transformers_generate(kind):
    model, processor = seeing(kind)
    prompts = prompts_of(processor)
    engine = RolloutEngine(model, processor.tokenizer)
    found = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    shown = set()
    for row, prompt in enumerate(prompts):
        their = model.generate(
            **alone(model, prompt),
            max_new_tokens=6,
            do_sample=False,
            suppress_tokens=[model.config.image_token_id],
        )[0, len(prompt) :].tolist()
        mine = found.completion_ids[row][found.mask[row]].tolist()
        assert mine == their[: len(mine)] and len(mine) in (len(their), 6)
        shown.add(tuple(mine))
    assert len(shown) > 1, "what is seen changes what is said"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probs_are_transformers(kind):
    "Of rows that are read together, padded on the left, with pictures of unlike sizes."
    model, processor = seeing(kind)
    prompts = prompts_of(processor)
    batch = batch_of(prompts)
    with torch.no_grad():
        ours, _ = completion_logps(model, batch)
        plain = plain_completion_logps(model, batch)
        pieces = torch.cat(
            [
                torch.nn.functional.pad(part, (0, ours.shape[1] - part.shape[1]))
                for rows in (slice(0, 1), [1, 2], torch.tensor([False, False, False, True]))
                for part in completion_logps(model, batch.rows(rows))[:1]
            ]
        )
        for row, (prompt, drawn) in enumerate(zip(prompts, COMPLETIONS)):
            logits = model(**alone(model, prompt, drawn)).logits[0, len(prompt) - 1 : -1]
            theirs = logits.log_softmax(-1).gather(-1, torch.tensor(drawn)[:, None])[:, 0]
            for mine in (ours, plain, pieces):
                torch.testing.assert_close(mine[row, : len(drawn)], theirs, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "idefics3", "mistral3"])
def test_each_row_has_its_own_pictures(kind):
    model, processor = seeing(kind)
    prompts = prompts_of(processor, [asked(dots(1)), asked(dots(4, seed=3))])
    other = SeenPrompt(prompts[0], prompts[1].pixels)
    assert list(other) == list(prompts[1]), "the texts are equal"
    engine = RolloutEngine(model, processor.tokenizer)
    found = engine.generate([*prompts, other], SamplingParams(temperature=0, max_tokens=5))
    said = [ids[kept].tolist() for ids, kept in zip(found.completion_ids, found.mask)]
    assert said[1] == said[2]
    given = torch.tensor([[65, 66, 67]] * 3)
    mask = torch.ones_like(given).bool()
    rows = [*prompts, other]
    batch = TrainingBatch(
        *pad_left(rows), given, mask, mask, torch.zeros(3), pixels=pixels_of(rows)
    )
    with torch.no_grad():
        logps, _ = completion_logps(model, batch)
    torch.testing.assert_close(logps[1], logps[2], rtol=0, atol=1e-5)
    assert (logps[0] - logps[1]).abs().max() > 1e-3


def tower_of(model):
    "What reads the pictures' patches."
    return next(iter(towers(model).values()))


IN_A_ROW = [kind for kind in FAMILIES if kind != "gemma3"]  # pictures look ahead in a Gemma 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", IN_A_ROW)
def test_a_prompt_and_its_pictures_stand_once_in_a_row(kind):
    "As rows each for itself, gradients too; an equal text with another picture is another prompt."
    model, processor = seeing(kind)
    prompts = prompts_of(processor)
    darker = {n: x / 2 if x.is_floating_point() else x for n, x in prompts[0].pixels.items()}
    copied = SeenPrompt(prompts[0], {n: x.clone() for n, x in prompts[0].pixels.items()})
    prompts = [*(prompts[i] for i in (0, 1, 0, 2, 1)), copied, prompts[3]]
    batch = batch_of([*prompts, SeenPrompt(prompts[0], darker)], [*COMPLETIONS, *COMPLETIONS[::-1]])
    weights = torch.randn(batch.completion_ids.shape, generator=torch.Generator().manual_seed(0))
    read, found = [], []

    def note(module, inputs, given):
        held = [
            x
            for x in (*inputs, *given.values())
            if torch.is_tensor(x) and x.dtype.is_floating_point
        ]
        read.append(len(held[0]))

    hook = tower_of(model).register_forward_pre_hook(note, with_kwargs=True)
    for row in (False, True):
        if row:
            model.set_attn_implementation({"text_config": "sink"})
        logps, _ = completion_logps(model, batch)
        (logps * weights).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((logps.detach(), grads))
        model.zero_grad()
    hook.remove()
    (logps, grads), (in_row, grads_in_row) = found
    torch.testing.assert_close(in_row, logps, rtol=0, atol=1e-5)
    assert grads.keys() == grads_in_row.keys() and any(
        n.startswith(tuple(towers(model))) for n in grads
    )
    for name, grad in grads.items():
        close = 1e-5 * max(1.0, grad.abs().max().item())
        torch.testing.assert_close(grads_in_row[name], grad, rtol=0, atol=close, msg=name)
    linear = kind.startswith("qwen3_5")  # its state would run on from text to text
    assert read[1] == read[0] if linear else 1.5 * read[1] < read[0]


@pytest.mark.filterwarnings("ignore")
def test_towers_do_not_take_causal_attention(tmp_path):
    model, processor = seeing("qwen3_vl")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded, _ = load_model(tmp_path, max_seq_length=64, attn_implementation="sink")
    assert loaded.config.get_text_config()._attn_implementation == "sink"
    assert loaded.config.vision_config._attn_implementation == "sdpa"
    batch = batch_of(prompts_of(processor))
    with torch.no_grad():
        expected, _ = completion_logps(model, batch)
        found, _ = completion_logps(loaded, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    model.set_attn_implementation("sink")
    with pytest.raises(ValueError, match="look in both directions"):
        completion_logps(model, batch)


@pytest.mark.filterwarnings("ignore")
def test_the_sampler_tells_the_trainers_log_probs():
    "Also where the placeholder is likely, which it never draws."
    model, processor = seeing("qwen3_vl")
    image = model.config.image_token_id
    with torch.no_grad():
        model.lm_head.weight[image] = model.lm_head.weight[45] * 1.01
    prompts = [p for p in prompts_of(processor, [ROWS[0], ROWS[1]]) for _ in range(8)]
    engine = RolloutEngine(model, processor.tokenizer)
    found = engine.generate(prompts, SamplingParams(temperature=0.7, max_tokens=8, seed=0))
    assert not (found.completion_ids[found.mask] == image).any()
    zeros = torch.zeros(len(prompts))
    batch = TrainingBatch(
        *pad_left(prompts),
        found.completion_ids,
        found.mask,
        found.mask,
        zeros,
        pixels=pixels_of(found.prompt_ids),
    )
    with torch.no_grad():
        logps, _ = completion_logps(model, batch, temperature=0.7)
        logits = model(**alone(model, prompts[0])).logits[0, -1]
    assert (logits / 0.7).softmax(-1)[image] > 0.001, "it would have been drawn"
    torch.testing.assert_close(found.logps, logps, rtol=0, atol=1e-5)


def test_without_token_against_torch():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    left, more = without_token(logits, 2, 0.5)
    whole = (logits / 0.5).log_softmax(-1)
    torch.testing.assert_close(
        ((left / 0.5).log_softmax(-1) + more[:, None])[:, [0, 3]], whole[:, [0, 3]]
    )
    assert left[:, 2].isneginf().all()


@pytest.mark.parametrize("kind", READ)
def test_our_processor_gives_what_transformers_gives(kind):
    "Transformers' wants torchvision; what it gave is stored, every 31st number of its pixels."
    made, stored = processor_of(kind), seen_by_others()["prompts"][kind]
    parts = made.tokenizer, made.image_processor
    ours = PictureProcessor(*parts, kind, patch_pixels=8, image_seq_len=4)
    for row, its in zip([row for row in ROWS if row["images"]], stored, strict=True):
        mine = prompt_token_ids(with_pictures(row), ours)
        assert list(mine) == its["ids"]
        assert {n: [*mine.pixels[n].shape] for n in SIGHTS[kind].tensors} == its["shapes"]
        for name, kept in its["pixels"].items():
            found = mine.pixels[name].flatten()[::EVERY].double()
            kept = torch.tensor(kept, dtype=torch.double)
            torch.testing.assert_close(found, kept, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "idefics3", "mistral3", "smolvlm"])
def test_a_processor_is_loaded_by_name(kind, tmp_path):
    model, processor = seeing(kind)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = load_processor(str(tmp_path))
    first, again = (prompt_token_ids(with_pictures(ROWS[1]), one) for one in (processor, loaded))
    assert list(first) == list(again)
    for name in SIGHTS[kind].tensors:
        one, other = first.pixels[name].float(), again.pixels[name].float()
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)  # torchvision rounds otherwise


def test_pictures_in_every_form(tmp_path):
    picture = dots(2)
    picture.save(tmp_path / "a.png")
    held = io.BytesIO()
    picture.save(held, "PNG")
    forms = [
        picture,
        np.array(picture),
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        {"bytes": held.getvalue(), "path": None},
        {"bytes": None, "path": str(tmp_path / "a.png")},
    ]
    for form in forms:
        assert as_picture(form).tobytes() == picture.tobytes()
    assert as_picture(Image.new("L", (4, 4))).mode == "RGB"


def test_thumbnails_are_small_and_keep_their_shape():
    row = {"prompt": "<image><image>", "images": [dots(1, 400, 100), dots(1, 20, 30)]}
    prompts = with_pictures(row), with_pictures(asked(*row["images"]))
    for prompt in prompts:
        data = [one.removeprefix(AS_DATA) for one in thumbnails(prompt)]
        small = [Image.open(io.BytesIO(base64.b64decode(one))).size for one in data]
        assert small == [(96, 24), (20, 30)]
    assert thumbnails("text") == thumbnails([{"role": "user", "content": "hi"}]) == []


def test_pictures_of_columns_go_where_trl_puts_them():
    from trl.data_utils import prepare_multimodal_messages

    one, two = dots(1), dots(2)
    place = {"type": "image"}
    prompts = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, place, place]}],
        [{"role": "user", "content": [place, {"type": "text", "text": "a"}]}]
        + [{"role": "assistant", "content": "b"}, {"role": "user", "content": [place]}],
    ]
    for prompt in prompts:
        mine = with_pictures({"prompt": prompt, "images": [one, two]})
        theirs = prepare_multimodal_messages(prompt, images=[one, two])
        for message, its in zip(mine, theirs, strict=True):
            if isinstance(message["content"], str):
                assert its["content"] == [{"type": "text", "text": message["content"]}]
            else:
                assert message["content"] == its["content"]


def test_pictures_are_found():
    text = [{"prompt": [{"role": "user", "content": "hi"}]}]
    part = {"type": "image", "image": dots(1)}
    inside = [{"prompt": [{"role": "user", "content": [part]}]}]
    assert not has_pictures(text, ["prompt"]) and has_pictures(inside, ["prompt"])
    assert has_pictures(text, ["prompt", "image"]) and has_pictures(text, ["images"])
    assert with_pictures(inside[0]) is inside[0]["prompt"]


PLACE = {"type": "image"}


def says(content, **columns):
    return {"prompt": [{"role": "user", "content": content}], **columns}


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prompt": "how many?", "image": dots(1)}, "as text it has 0 times '<image>'"),
        ({"prompt": "<image><image>", "image": dots(1)}, "has 1 pictures, and as text it has 2"),
        (says([{"type": "text", "text": "a"}], images=[dots(1)]), "have no place for them"),
        (says([PLACE], images=[dots(1), dots(2)]), "has 2 pictures .* have 1 places"),
        (says([PLACE]), "has 0 pictures .* have 1 places"),
        (says("a", image=7), "cannot be read"),
        (says("a", image="/nowhere.png"), "cannot be read"),
    ],
)  # fmt: skip
def test_wrong_rows_are_sentences(row, words):
    processor = processor_of("idefics3")
    with pytest.raises(ValueError, match=words):
        prompt_token_ids(with_pictures(row), processor)


def test_a_template_without_places_and_a_tokenizer_alone_are_sentences():
    processor = processor_of("idefics3")
    with pytest.raises(ValueError, match="reads texts alone"):
        prompt_token_ids(with_pictures(ROWS[0]), processor.tokenizer)
    processor.tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="it has 0 times '<image>'"):
        prompt_token_ids(with_pictures(ROWS[0]), processor)


def test_models_without_sight_are_sentences():
    with pytest.raises(ValueError, match="GptOssForCausalLM reads none"):
        sight_of(tiny_gpt_oss()[0])
    model, _ = seeing("gemma3")
    model.config.model_type = "other"
    with pytest.raises(ValueError, match="what a other takes .* take one of qwen2_vl"):
        sight_of(model)


def test_a_prompt_that_is_written_already():
    processor = processor_of("idefics3")
    one, other = ({"prompt": "<image>?", "image": dots(n)} for n in (1, 2))
    first, again = with_pictures(one), with_pictures(other)
    assert first != again and first == with_pictures(dict(one))
    read = many_prompt_token_ids([first, first, again], processor)
    assert read[0] == read[1] == read[2] and read[0].pixels is read[1].pixels
    assert not torch.equal(read[0].pixels["pixel_values"], read[2].pixels["pixel_values"])


def test_rows_of_pixels():
    one, two = {"a": torch.ones(1)}, {"a": torch.zeros(1)}
    held = [one, None, two]
    assert rows_of(held, slice(1, 3)) == [None, two] and rows_of(held, [2, 0]) == [two, one]
    assert rows_of(held, torch.tensor([False, True, False])) is None
    assert rows_of(None, [0]) is None and pixels_of([[1], [2]]) is None


def test_joined_pads_with_zeros():
    sight = SIGHTS["idefics3"]
    parts = [
        {"pixel_values": torch.ones(1, 1, 3, 2, 2)},
        {"pixel_values": torch.ones(1, 2, 3, 4, 1)},
    ]
    whole = joined([parts[0], None, parts[1]], sight, dtype=torch.bfloat16)["pixel_values"]
    assert whole.shape == (2, 2, 3, 4, 2) and whole.dtype == torch.bfloat16
    assert whole.sum() == 12 + 24


def test_places_in_rows_and_columns():
    "After a picture of 2 by 3 vectors text goes on three places later, and not six."
    model, processor = seeing("qwen3_vl")
    prompt = prompts_of(processor, ROWS[:1])[0]
    ids, mask = pad_left([prompt, prompt[:3]])
    given, ahead = picture_inputs(model, [prompt.pixels, None], ids, mask)
    assert given["position_ids"].shape == (3, 2, len(prompt)) and ahead.tolist() == [[3 - 6], [0]]
