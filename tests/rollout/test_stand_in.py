"""The stand-in server: what it draws is the engine's, and what it refuses."""

import json
import os
import socket
from http.client import HTTPConnection
from urllib.parse import urlencode, urlsplit

import pytest
import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save
from small_runs import one_thread, small_model  # noqa: F401

from grpo_nb.model.adapters import add_adapters, resolve_targets
from grpo_nb.model.export import save_adapter
from grpo_nb.rollout.addresses import Address
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.rollout.stand_in import StandIn, open_server, raw_logps, serving


def moved(model, seed=0, r=2, **others):
    "The model with adapters on attention and experts that do something."
    model = add_adapters(model, r, resolve_targets(model, "all"), **others)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def ask(url, route, body=None, headers=(), raw=None):
    "Status and answer of one request."
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=30)
    data = raw if raw is not None else None if body is None else json.dumps(body)
    kind = {"Content-Type": "application/json"} if data is not None else {}
    connection.request("GET" if data is None else "POST", route, data, {**kind, **dict(headers)})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text) if text.startswith("{") else text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def url(folder):
    stand_in = StandIn(*small_model(), name="small", lora_dir=folder, max_loras=2, max_lora_rank=8)
    with serving(stand_in) as url:
        yield url


def load(url, name, path):
    return ask(url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def test_the_base_and_two_versions_draw_what_the_engine_draws(url, folder):
    _, tokenizer = small_model()
    body = {"prompt": [[7, 8], [9]], "n": 3, "max_tokens": 6, "seed": 11, "logprobs": 0}
    body |= {"return_token_ids": True, "temperature": 0.8, "top_k": 9, "prompt_logprobs": 0}
    params = SamplingParams(max_tokens=6, n=3, seed=11, temperature=0.8, top_k=9)
    models = {"small": small_model()[0], "v1": moved(small_model()[0], 1)}
    models["v2"] = moved(small_model()[0], 2, r=4)
    for name in ("v1", "v2"):
        save_adapter(models[name], folder / name)
        assert load(url, name, folder / name)[0] == 200
    for name in ("v1", "small", "v2", "v1"):
        status, answer = ask(url, "/v1/completions", {**body, "model": name})
        wanted = RolloutEngine(models[name], tokenizer).generate(body["prompt"], params)
        assert status == 200 and len(answer["choices"]) == 6
        for row, one in enumerate(answer["choices"]):
            size = int(wanted.lengths[row])
            assert one["token_ids"] == wanted.completion_ids[row, :size].tolist()
            assert one["logprobs"]["token_logprobs"] == wanted.logps[row, :size].tolist()
            assert one["finish_reason"] == wanted.finish_reasons[row]
        prompt = answer["choices"][0]["prompt_logprobs"]
        assert prompt[1]["8"]["logprob"] == pytest.approx(float(raw_logps(models[name], [7, 8])))
    assert load(url, "v3", folder / "v1")[0] == 400  # two are all it holds
    for name in ("v1", "v2"):
        assert ask(url, "/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
    assert [one["id"] for one in ask(url, "/v1/models")[1]["data"]] == ["small"]
    again = ask(url, "/v1/completions", {**body, "model": "small"})[1]
    wanted = RolloutEngine(small_model()[0], tokenizer).generate(body["prompt"], params)
    assert again["choices"][0]["logprobs"]["token_logprobs"][0] == float(wanted.logps[0, 0])


def test_no_path_leads_out_of_the_folder(url, folder, tmp_path):
    outside = save_adapter(moved(small_model()[0]), tmp_path / "outside")
    (folder / "link").symlink_to(outside)
    linked = folder / "linked files"
    linked.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (linked / name).symlink_to(outside / name)
    other_link = folder / "one file"
    save_adapter(moved(small_model()[0]), other_link)
    (other_link / "more.json").symlink_to(outside / "adapter_config.json")
    pickled = folder / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_bytes((outside / "adapter_config.json").read_bytes())
    (pickled / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for path in (
        outside,
        folder / "link",
        linked,
        other_link,
        folder / ".." / outside.relative_to(folder.parent.parent)
        if outside.is_relative_to(folder.parent.parent)
        else "/etc",
        os.path.relpath(outside),
        f"{folder}\0{outside}",
        "",
        "/",
    ):
        assert load(url, "evil", path)[0] == 400, path
    assert load(url, "evil", pickled)[0] == 404 and load(url, "evil", folder / "none")[0] == 404
    assert load(url, "../evil", folder)[0] == 400 and load(url, None, folder)[0] == 400
    assert len(ask(url, "/v1/models")[1]["data"]) == 1
    closed = StandIn(*small_model())
    with serving(closed) as other:
        assert load(other, "v1", outside)[0] == 404
        assert ask(other, "/server_info")[1]["vllm_config"]["lora_config"] is None


def test_an_adapter_that_vllm_would_not_serve_is_refused(url, folder):
    for name, others in (("large", dict(r=16)), ("dora", dict(use_dora=True))):
        model = small_model()[0]
        targets = resolve_targets(model, ["q_proj"])
        save_adapter(add_adapters(model, others.pop("r", 2), targets, **others), folder / name)
        status, answer = load(url, name, folder / name)
        assert status == 400 and answer["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize(
    "status, body",
    [
        (404, {"model": "other", "prompt": [[7]]}),
        (400, {"model": "small"}),
        (400, {"model": "small", "prompt": []}),
        (400, {"model": "small", "prompt": [[]]}),
        (400, {"model": "small", "prompt": [["7"]]}),
        (400, {"model": "small", "prompt": [[10**6]]}),
        (400, {"model": "small", "prompt": [[7]], "temperature": -1}),
        (400, {"model": "small", "prompt": [[7]], "max_tokens": 10**9}),
        (400, {"model": "small", "prompt": [[7]], "logit_bias": {"7": 100}}),
        (400, {"model": "small", "prompt": [[7]], "stop_token_ids": ["a"]}),
        (400, {"model": "small", "prompt": [[7]], "max_tokens": 0}),
        (400, {"model": "small", "prompt": [[7]], "n": 10**30}),
        (400, {"model": "small", "prompt": [[7]], "temperature": 10**30}),
        (400, {"model": "small", "prompt": "\ud800"}),
    ],
)
def test_a_wrong_request_is_refused_in_vllms_form(url, status, body):
    given, answer = ask(url, "/v1/completions", body)
    assert given == status == answer["error"]["code"] and answer["error"]["message"]


@pytest.mark.parametrize(
    "route, body, said",
    [
        ("/v1/unload_lora_adapter", {"lora_name": {}}, "'lora_name' is {}"),
        ("/v1/unload_lora_adapter", {}, "'lora_name' is None"),
        ("/inference/v1/generate", {"sampling_params": [3]}, "'sampling_params' is [3]: give a"),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": [1]}, "'kwargs' is [1]: give a"),
        ("/v1/completions", {"prompt": [[7]], "max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_a_part_of_the_wrong_kind_is_named(url, route, body, said):
    status, answer = ask(url, route, body)
    assert status == 400 and said in answer["error"]["message"]


def test_what_is_no_request_at_all(url):
    assert ask(url, "/v1/completions", raw="{")[0] == 400
    assert ask(url, "/v1/completions", raw="[1]")[0] == 400
    assert ask(url, "/v1/completions", raw="[" * 100_000)[0] == 400
    assert ask(url, "/v1/completions", raw="{}", headers={"Content-Type": "text/plain"})[0] == 400
    assert ask(url, "/v1/completions", raw="{}", headers={"Content-Length": "9" * 20})[0] == 413
    assert ask(url, "/v1/completions")[0] == 404 and ask(url, "/nothing", {})[0] == 404
    assert ask(url, "/health") == (200, "") and "grpo_nb" in ask(url, "/version")[1]["version"]


def test_a_token_is_asked_for_beyond_this_machine():
    model = small_model()
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org"):
        with pytest.raises(ValueError, match="there is no token: give --api-key"):
            open_server(StandIn(*model), host)
    with serving(StandIn(*model, api_key="secret")) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, answer = ask(url, "/v1/models", headers=headers)
            assert status == 401 and "Bearer" in answer["error"]["message"]
            assert ask(url, "/sleep", {}, headers=headers)[0] == 401
        assert ask(url, "/v1/models", headers={"Authorization": "Bearer secret"})[0] == 200
        assert ask(url, "/health")[0] == 200


def test_asleep_it_draws_nothing(url):
    body = {"model": "small", "prompt": [[7]], "max_tokens": 1}
    assert ask(url, "/sleep?level=1", {})[0] == 200
    assert ask(url, "/is_sleeping")[1] == {"is_sleeping": True}
    assert ask(url, "/v1/completions", body)[0] == 503
    assert ask(url, "/wake_up", {})[0] == 200 and ask(url, "/v1/completions", body)[0] == 200


def test_what_a_page_in_a_browser_can_send_is_refused(url, folder):
    save_adapter(moved(small_model()[0]), folder / "page")
    body = {"lora_name": "evil", "lora_path": str(folder / "page")}
    query, page = urlencode(body), {"Origin": "http://example.org"}
    as_text, as_json = {"Content-Type": "text/plain"}, {"Content-Type": "application/json"}
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    for route in (f"{load}?{query}", f"{unload}?lora_name=evil", "/sleep", "/sleep?level=1"):
        for headers in (as_text, {"Content-Type": ""}, {**as_text, **page}):
            assert ask(url, route, raw="", headers=headers)[0] in (400, 403), (route, headers)
    for raw in ("", "{}", json.dumps(body)):  # a query is not read, whatever else is sent
        assert "takes no query" in str(ask(url, f"{load}?{query}", raw=raw, headers=as_json))
    for origin in ("http://example.org", "null", "http://127.0.0.1:9"):
        status, answer = ask(url, load, body, headers={"Origin": origin})
        assert status == 403 and f"a page of {origin}" in answer["error"]["message"]
        assert ask(url, "/v1/models", headers={"Origin": origin})[0] == 403
    assert len(ask(url, "/v1/models")[1]["data"]) == 1
    assert ask(url, "/is_sleeping")[1] == {"is_sleeping": False}


def test_our_own_client_sleeps_and_wakes_it(url):
    address = Address(url)
    for route in ("/sleep?level=1", "/wake_up?tags=weights", "/wake_up", "/reset_prefix_cache"):
        assert address.ask(route, {})[0] == 200
    assert address.ask("/server_info?config_format=json")[0] == 200


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs an IPv6 loopback address")
def test_it_listens_at_an_ipv6_address():
    with serving(StandIn(*small_model()), "::1") as url:
        assert url.startswith("http://[::1]:")
        assert Address(url).ask("/health")[0] == ask(url, "/health")[0] == 200
    with serving(StandIn(*small_model()), "localhost") as url:
        assert url.startswith("http://localhost:") and ask(url, "/health")[0] == 200


def test_of_an_adapter_that_cannot_be_read_nothing_stays(tmp_path):
    for name in ("whole", "changed"):
        save_adapter(moved(small_model()[0]), tmp_path / name)
    file = tmp_path / "changed/adapter_model.safetensors"
    tensors = read_tensors(file.read_bytes())
    first, *others = tensors
    contents = {
        "is missing: send a whole adapter": {name: tensors[name] for name in others},
        "is not one of the model's": {**tensors, "base_model.model.lora_A.weight": torch.ones(1)},
        "size mismatch": {**tensors, first: torch.ones(1, 1)},
        "header": None,
    }
    stand_in = StandIn(*small_model(), lora_dir=tmp_path)
    base = stand_in.adapters.model
    with serving(stand_in) as url:
        for others in (0, 1):  # adapters that are held already
            for said, content in contents.items():
                file.write_bytes(b"no tensors" if content is None else save(content))
                status, answer = load(url, "evil", tmp_path / "changed")
                assert status == 400 and said in answer["error"]["message"]
                held = getattr(stand_in.adapters.model, "peft_config", {})
                assert len(held) == len(stand_in.adapters.folders) == others
            if not others:
                assert stand_in.adapters.model is base
                assert load(url, "good", tmp_path / "whole")[0] == 200
        assert load(url, "evil", tmp_path / "whole")[0] == 200  # its name is free
