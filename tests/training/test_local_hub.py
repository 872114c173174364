"The server that stands in for the Hugging Face Hub answers the client's own calls."

import hashlib
import json
from http.client import HTTPConnection

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from grpo_nb.training.hub import LocalHub


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


def send(hub, method, path, data=b"", token=None, headers=()):
    "Status and answer of a request that no client would send."
    connection = HTTPConnection("127.0.0.1", hub.port, timeout=10)
    given = {"Authorization": f"Bearer {token}"} if token else {}
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    connection.request(method, path, data, {**given, **dict(headers)})
    response = connection.getresponse()
    return response.status, response.read()


def committed(path, content="AAAA"):
    lines = [{"key": "header", "value": {"summary": "s"}}]
    lines += [{"key": "file", "value": {"path": path, "content": content}}]
    return "\n".join(map(json.dumps, lines)).encode()


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("path", ["../out", "a/../../../../out", "/tmp/out", "..", "", "a\0b", 5])
def test_no_file_of_a_commit_leaves_its_branch(tmp_path, path):
    with LocalHub(tmp_path / "hub") as hub:
        api = HfApi(endpoint=hub.url, token=hub.token)
        api.create_repo("me/model")
        before = files_below(tmp_path)
        status, _ = send(
            hub, "POST", "/api/models/me/model/commit/main", committed(path), hub.token
        )
        assert status == 400 and files_below(tmp_path) == before and not hub.commits
        api.create_commit(
            "me/model", [CommitOperationAdd("a/b.txt", b"whole")], commit_message="one"
        )
    assert (tmp_path / "hub/me/model/main/a/b.txt").read_bytes() == b"whole"


def test_no_name_of_a_repository_or_branch_leaves_the_folder(tmp_path):
    outside = tmp_path / "outside" / "main"
    outside.mkdir(parents=True)
    with LocalHub(tmp_path / "hub") as hub:
        HfApi(endpoint=hub.url, token=hub.token).create_repo("me/model")
        (tmp_path / "hub/me/model/link").symlink_to(outside)
        before = files_below(tmp_path)
        for route in ("..%2F/outside/commit/main", "../outside/commit/main"):
            send(hub, "POST", f"/api/models/{route}", committed("x"), hub.token)
        for branch in ("..%2F..%2F..%2Foutside%2Fmain", "link", ".."):
            for action in ("commit", "branch"):
                path = f"/api/models/me/model/{action}/{branch}"
                assert send(hub, "POST", path, committed("x"), hub.token)[0] in (400, 404)
        for name in ("../../new", "..", "a\0b"):
            body = {"name": name, "organization": "me"}
            assert send(hub, "POST", "/api/repos/create", body, hub.token)[0] == 400
        for action in ("__exit__", "answer", "put", "batch", "nothing"):
            path = f"/api/models/me/model/{action}/main"
            assert send(hub, "POST", path, b"{}", hub.token)[0] == 404
        assert send(hub, "POST", "/api/repos/create", b"[", hub.token)[0] == 400
        assert send(hub, "POST", "/", headers={"Content-Length": "-1"})[0] == 413
        assert files_below(tmp_path) == before


def test_a_large_file_is_taken_from_those_who_were_given_its_address(tmp_path):
    data = b"large" * 1000
    digest = hashlib.sha256(data).hexdigest()
    with LocalHub(tmp_path) as hub:
        for path in (f"/large/{digest}", f"/{digest}", f"/large/{'0' * 32}/{digest}"):
            assert send(hub, "PUT", path, data)[0] == 401 and not hub.large
        asked = {"objects": [{"oid": digest, "size": len(data)}]}
        path = "/me/model.git/info/lfs/objects/batch"
        assert send(hub, "POST", path, asked)[0] == 401
        _, said = send(hub, "POST", path, asked, hub.token)
        place = json.loads(said)["objects"][0]["actions"]["upload"]["href"]
        assert send(hub, "PUT", place.removeprefix(hub.url), data)[0] == 200
        assert hub.large == {digest: data}
