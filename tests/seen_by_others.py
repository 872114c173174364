"""What transformers' processors and TRL's trainer make of pictures.

`python tests/seen_by_others.py` records it anew. That needs torchvision, and the tests that
compare with the record do not.
"""

import json
import sys
import tempfile
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.path[:0] = [str(here.parent), str(here), str(here / "training")]

from seeing_models import asked, dots, processor_of_transformers

RECORD = Path(__file__).parent / "data" / "seen_by_others.json"
READ = ("idefics3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4")
TRAINED = ("qwen2_5_vl", "qwen3_vl")
EVERY = 31  # of so many numbers one is kept
ROWS = [  # sizes, numbers and places of pictures differ, and one row has none
    asked(dots(2)),
    asked(dots(3, 16, 32, 1), dots(1, 8, 8), text="which?"),
    asked(text="hello there"),
    asked(dots(1, 32, 16)),
]


@cache
def seen_by_others():
    return json.loads(RECORD.read_text())


def prompts_of(kind):
    "Ids and pixels of the rows with pictures, as transformers' processor makes them."
    from grpo_nb.model.pictures import SIGHTS, with_pictures
    from grpo_nb.training.data import prompt_token_ids

    processor, found = processor_of_transformers(kind), []
    for row in ROWS:
        if row["images"]:
            prompt = prompt_token_ids(with_pictures(row), processor)
            tensors = {name: prompt.pixels[name] for name in SIGHTS[kind].tensors}
            found.append({
                "ids": list(prompt),
                "shapes": {name: list(x.shape) for name, x in tensors.items()},
                "pixels": {n: few(x.double()) for n, x in tensors.items()},
            })  # fmt: skip
    return found


def few(tensor):
    return [round(x, 6) for x in tensor.flatten()[::EVERY].tolist()]


def weights_of_trl(kind):
    "Weights after 20 updates."
    import trl
    from test_seeing import trained

    trl.trainer.grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    with tempfile.TemporaryDirectory() as folder:
        weights, _ = trained(trl, kind, folder, processor_of_transformers(kind))
    return {name: few(weight.double()) for name, weight in weights.items()}


def weights_with_tools(kind):
    "The same with a tool that answers with pictures, whose calls are read by a parser of ours."
    import trl
    from training.test_tools_that_show import trained_on_pictures_of_tools

    from grpo_nb.rollout.turns import parse_hermes

    def read(tokenizer, ids, **others):
        return parse_hermes(tokenizer.decode(ids, skip_special_tokens=True))

    inside, processor = trl.trainer.grpo_trainer, processor_of_transformers(kind)
    inside.shuffle_sequence_dict, inside.parse_response = (lambda batch: batch), read
    processor.tokenizer.response_template = "read by the function above"
    with tempfile.TemporaryDirectory() as folder:
        weights, log = trained_on_pictures_of_tools(trl, kind, folder, processor)
    assert log[-1]["tools/call_frequency"] == 0.75 and not log[-1]["tools/failure_frequency"]
    return {name: few(weight.double()) for name, weight in weights.items()}


def main():
    from importlib.metadata import version

    record = {
        "versions": {
            name: version(name) for name in ("transformers", "torch", "torchvision", "trl")
        },
        "prompts": {kind: prompts_of(kind) for kind in READ},
        "weights": {kind: weights_of_trl(kind) for kind in TRAINED},
        "with_tools": {kind: weights_with_tools(kind) for kind in TRAINED},
    }
    RECORD.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
