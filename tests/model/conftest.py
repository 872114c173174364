"Checkpoints that several files of tests load."

import pytest


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    "A tiny gpt-oss in the layout of the released files, in shards."
    from checkpoints import write_released

    return write_released(tmp_path_factory.mktemp("released") / "model")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    "What transformers itself saves, in bfloat16."
    from grpo_nb.model.tiny import tiny_gpt_oss

    folder = tmp_path_factory.mktemp("plain")
    model, tokenizer = tiny_gpt_oss()
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
