"""The chat templates that TRL ships, with a small tokenizer, and what becomes of tools in them."""

import re
from pathlib import Path

from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.rollout.turns import TurnSampler, turn_with

MARK = re.compile(r"<\|[^|<>\n]{1,30}\|?>|<\w{1,30}\|>|<｜[^｜]+｜>")
ENDS = ["<|im_end|>", "<|eot_id|>", "<|eot|>", "<turn|>", "<|return|>", "<|user|>"]


class Nothing:
    "A sampler that is never asked."

    takes_token_ids = True
    generate = publish = close = None


def look_up(word: str, count: int = 1) -> str:
    """
    Look up a word.

    Args:
        word: which
        count: how often
    """
    return f"{count} of {word}"


def shipped(training: bool = False) -> dict[str, str]:
    "Name and text of each template; without those that TRL has changed for training."
    import trl

    files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    return {f.stem: f.read_text() for f in files if training or not f.stem.endswith("_training")}


def tokenizer_for(template: str):
    "One token a character, and one for each mark of the template."
    tokenizer = tiny_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    marks = sorted({*MARK.findall(template), "<|return|>"})
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])  # not special
    tokenizer.eos_token = next(end for end in ENDS if end in marks)
    tokenizer.bos_token = "<|start|>" if "<|start|>" in marks else tokenizer.eos_token
    tokenizer.chat_template = template
    return tokenizer


def renders(tokenizer) -> bool:
    "Whether the template shows the model a tool, and writes a call of it."
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "this"}}}
    try:
        before, turn = turn_with([call], tokenizer, {})
    except Exception:
        return False
    return all("look_up" in tokenizer.decode(ids) for ids in (before, turn))


def verdict(tokenizer) -> str:
    "What a run with tools makes of a tokenizer: round-trips, or the sentence that refuses it."
    try:
        TurnSampler(Nothing(), tokenizer, [look_up], stop_token_ids=[tokenizer.eos_token_id])
    except ValueError as error:
        return f"refused: {error}"
    return "round-trips"


def verdicts() -> dict[str, str]:
    "The same of each template that TRL ships."
    return {name: verdict(tokenizer_for(text)) for name, text in shipped().items()}
