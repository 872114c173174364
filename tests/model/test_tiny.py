"model.tiny: a real gpt-oss of transformers, only small, and a tokenizer that tells the truth."

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedTokenizerFast,
)

from grpo_nb.model.tiny import SPECIAL_TOKENS, tiny_gpt_oss, tiny_tokenizer


def test_it_is_a_gpt_oss_with_all_its_parts():
    model, tokenizer = tiny_gpt_oss()
    assert (
        type(model) is GptOssForCausalLM
        and isinstance(tokenizer, PreTrainedTokenizerFast)
        and not model.training
    )
    assert {p.dtype for p in model.parameters()} == {
        torch.float32
    } and model.config.layer_types == ["sliding_attention", "full_attention"]
    names = {name.split(".", 3)[-1] for name, _ in model.named_parameters() if ".layers.0." in name}
    real = {
        name.split(".", 3)[-1]
        for name, _ in GptOssForCausalLM(
            GptOssConfig(
                vocab_size=8,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=8,
                num_local_experts=1,
                num_experts_per_tok=1,
            )
        ).named_parameters()
        if ".layers.0." in name
    }
    assert names == real and any("sinks" in name for name in names)
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 300_000


@pytest.mark.parametrize("layer, window", [(0, 8), (1, None)])
def test_one_layer_looks_back_eight_tokens_and_the_next_at_everything(layer, window):
    model, tokenizer = tiny_gpt_oss()
    ids = torch.tensor([tokenizer("1234567890+1234567890").input_ids])
    hidden = model.model.embed_tokens(ids).detach().requires_grad_()
    seen = []
    hook = model.model.layers[layer].self_attn.register_forward_hook(
        lambda module, inputs, output: seen.append(output[1])
    )
    model(inputs_embeds=hidden)
    hook.remove()
    weights = seen[0][0].mean(0)  # (queries, keys)
    reach = (weights[-1] > 0).nonzero()[:, 0]
    assert (
        len(reach) == (window or ids.shape[1]) and weights[-1].sum() < 1
    )  # the rest is in the sink


def test_the_seed_gives_the_weights_and_nothing_else_changes():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    (a, _), (b, _), (c, _) = tiny_gpt_oss(5), tiny_gpt_oss(5), tiny_gpt_oss(6)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters())
    ) and not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert tiny_gpt_oss(initializer_range=0.2)[0].lm_head.weight.std().item() == pytest.approx(
        0.2, rel=0.1
    )


def test_the_tokenizer():
    tokenizer = tiny_tokenizer()
    text = "12+34=46-*"
    ids = tokenizer(text).input_ids
    assert (
        len(ids) == len(text)
        and tokenizer.decode(ids) == text
        and len(set(tokenizer("0123456789+-*=").input_ids)) == 14
    )
    assert tokenizer.convert_ids_to_tokens(range(len(SPECIAL_TOKENS))) == SPECIAL_TOKENS
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.padding_side) == (
        "<|endoftext|>",
        "<|return|>",
        "left",
    )
    assert tokenizer("x").input_ids == [tokenizer.unk_token_id] and tokenizer(
        "<|return|>"
    ).input_ids == [tokenizer.eos_token_id]
    assert (
        tokenizer.decode(
            [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True
        )
        == text
    )
    assert tokenizer(["1", "123"], padding=True).input_ids == [
        [tokenizer.pad_token_id] * 2 + tokenizer("1").input_ids,
        tokenizer("123").input_ids,
    ]
    assert tiny_tokenizer("ab")("ab").input_ids == [7, 8]


def test_the_chat_template():
    tokenizer = tiny_tokenizer()
    chat = [{"role": "system", "content": "1"}, {"role": "user", "content": "2+3="}]
    asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(
        [*chat, {"role": "assistant", "content": "5"}], tokenize=False
    )
    assert (
        asked
        == "<|start|>s<|message|>1<|end|><|start|>u<|message|>2+3=<|end|><|start|>a<|message|>"
        and whole == asked + "5<|return|>"
    )
    assert tokenizer.unk_token_id not in tokenizer(whole).input_ids
    assert (
        tokenizer.apply_chat_template(
            [*chat, {"role": "assistant", "content": "5"}],
            tokenize=False,
            continue_final_message=True,
        )
        == asked + "5"
    )


def test_it_can_be_saved_and_loaded_by_others(tmp_path):
    model, tokenizer = tiny_gpt_oss(2, hidden_size=32, num_hidden_layers=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, its = (
        AutoModelForCausalLM.from_pretrained(tmp_path).eval(),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    ids = torch.tensor([tokenizer("12+34=").input_ids])
    assert (
        again.config.num_hidden_layers == 3
        and its("12+34=").input_ids == ids[0].tolist()
        and its.chat_template == tokenizer.chat_template
    )
    assert (
        torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)
        and again.generation_config.eos_token_id == tokenizer.eos_token_id
    )


def test_it_can_be_trained():
    model, tokenizer = tiny_gpt_oss()
    ids = torch.tensor([tokenizer("12+34=46").input_ids] * 2)
    model.train()
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(25):
        loss = model(ids, labels=ids).loss
        loss.backward()
        if not losses:
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
