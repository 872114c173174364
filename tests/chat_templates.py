"Released chat templates, which TRL ships, and a small tokenizer that knows their special tokens."

import re
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
SPECIAL = (
    r"<[|｜][^<>{}'\"\s]+?[|｜]>|<[|][a-z_]+>|<[a-z_]+[|]>|<(?:start|end)_of_turn>"
    r"|<(?:bos|eos|s|/s|end_of_utterance|image)>|\[/?[A-Z_]{3,}\]"
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\n\n")  # no special ones


def byte_tokenizer(template, eos="<|endoftext|>", bos=None, **others):
    "A token for each byte, one for each special token of the template, and a few that are added."
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    special = sorted({*re.findall(SPECIAL, template or ""), eos, bos} - {None})
    whole.add_special_tokens([AddedToken(one, special=True) for one in special])
    whole.add_tokens([AddedToken(one, special=False) for one in PLAIN])
    names = {"eos_token": eos, "bos_token": bos, "pad_token": eos} | others
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, **names)
    tokenizer.chat_template = template
    return tokenizer
