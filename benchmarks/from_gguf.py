"""A GGUF as a folder in transformers' form, and what it is: needs the package gguf.

    hf download Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF \\
        qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --local-dir gguf
    python benchmarks/from_gguf.py gguf/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf coder05
        coder05 can be given to gsm8k.py: every tensor is the dequantised one, rounded to bfloat16
    python benchmarks/from_gguf.py FILE.gguf
        what the file says of itself: name, architecture, tensors and numbers by type, sha256
    python benchmarks/from_gguf.py - FOLDER --tokenizer OTHER --texts test.jsonl
        FOLDER's tokenizer beside another of its family, given as a tokenizer.json: the tokens with
        equal ids, the merges, and in how many lines of a file the two differ
"""

import argparse
import hashlib
import json
from collections import Counter
from pathlib import Path

NAMES = ("general.name", "general.finetune", "general.architecture", "general.file_type")


def told(path):
    "What a GGUF says of itself, and its sha256."
    from gguf import GGUFReader

    reader, tensors, numbers = GGUFReader(path), Counter(), Counter()
    for tensor in reader.tensors:
        tensors[tensor.tensor_type.name] += 1
        numbers[tensor.tensor_type.name] += int(tensor.n_elements)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    fields = {name: reader.fields[name].contents() for name in NAMES if name in reader.fields}
    return fields | dict(
        sha256=digest,
        bytes=path.stat().st_size,
        tensors=dict(tensors.most_common()),
        numbers=dict(numbers.most_common()),
        bits_a_number=round(8 * path.stat().st_size / sum(numbers.values()), 2),
    )


def sum_of_bits(tensor):
    import torch

    return tensor.numel(), tensor.contiguous().view(torch.int16).long().sum().item()


def converted(path, folder):
    "Write the folder; its number of tensors, all equal to the dequantised ones in bfloat16."
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = dict(gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, **given)
    model.hf_quantizer, model.is_quantized = None, False  # else transformers 5 would not save it
    model.config.__dict__.pop("quantization_config", None)
    ours = {}  # by shape and sum of bits: llama's queries and keys change the order of their rows
    for tensor in model.state_dict().values():
        ours.setdefault(sum_of_bits(tensor), []).append(tensor.flatten())
    reader = GGUFReader(path)
    for tensor in reader.tensors:
        wanted = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
        wanted, same = wanted.flatten(), ours.get(sum_of_bits(wanted), [])
        if not any(torch.equal(wanted.sort().values, one.sort().values) for one in same):
            raise SystemExit(f"{tensor.name} is another in the model that transformers read")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, **given).save_pretrained(folder)
    return len(reader.tensors)


def compared(folder, other, texts):
    "Two tokenizers of a family."
    from tokenizers import Tokenizer

    paths = folder / "tokenizer.json", other
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    ours, theirs = [Tokenizer.from_file(str(path)) for path in paths]
    merges = [
        [m.split(" ") if isinstance(m, str) else m for m in file["model"]["merges"]]
        for file in files
    ]
    ids, other_ids = ours.get_vocab(), theirs.get_vocab()
    lines = texts.read_text(encoding="utf-8").splitlines() if texts else []
    return dict(
        tokens=(len(ids), len(other_ids)),
        with_equal_ids=sum(other_ids.get(token) == number for token, number in ids.items()),
        merges=tuple(map(len, merges)),
        merges_equal=merges[0] == merges[1],
        lines=len(lines),
        lines_that_differ=sum(ours.encode(x).ids != theirs.encode(x).ids for x in lines),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--tokenizer", type=Path, help="another tokenizer.json of the family")
    parser.add_argument("--texts", type=Path)
    given = parser.parse_args()
    if given.tokenizer:
        record = compared(given.folder, given.tokenizer, given.texts)
    else:
        record = told(given.gguf)
        if given.folder:
            record["tensors_equal"] = converted(given.gguf, given.folder)
    for name, value in record.items():
        print(f"{name:20} {value}")
