"The server that stands in for the Hugging Face Hub answers the client's own calls."

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from grpo_nb.training.local_hub import LocalHub


def test_what_was_uploaded_lies_there_byte_for_byte(tmp_path):
    (tmp_path / "sent").mkdir()
    files = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 500}
    for name, data in files.items():
        (tmp_path / "sent" / name).write_bytes(data)
    before = constants.ENDPOINT
    with LocalHub(tmp_path / "hub") as hub:
        assert constants.ENDPOINT == hub.url and constants.HF_HUB_DISABLE_XET
        api = HfApi(endpoint=hub.url, token=hub.token)
        api.create_repo("mine/model")
        api.upload_folder(repo_id="mine/model", folder_path=tmp_path / "sent")
    there = tmp_path / "hub" / "mine" / "model" / "main"
    assert {name: (there / name).read_bytes() for name in files} == files
    assert constants.ENDPOINT == before


def test_another_token_opens_nothing(tmp_path):
    with LocalHub(tmp_path) as hub:
        with pytest.raises(HfHubHTTPError, match="401"):
            HfApi(endpoint=hub.url, token="hf_other").create_repo("mine/model")
    assert not (tmp_path / "mine").exists()
