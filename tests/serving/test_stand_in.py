"""The stand-in server: what it draws is the engine's, and what it refuses."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlencode, urlsplit

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load as read_tensors
from safetensors.torch import save
from small_runs import one_thread, small_model  # noqa: F401

from grpo_nb.model.adapters import add_adapters, resolve_targets
from grpo_nb.model.export import save_adapter
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.serving.addresses import Address
from grpo_nb.serving.stand_in import StandIn, raw_logps, serving


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
        (400, {"model": "small", "prompt": [[7]] * 5, "n": 2**14}),
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
        ("/v1/load_lora_adapter", {"lora_name": "../a"}, "'lora_name' is '../a'"),
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
            serving(StandIn(*model), host).__enter__()
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
    for raw in ("", "{}"):  # a query is never read
        assert "'lora_name' is None" in str(ask(url, f"{load}?{query}", raw=raw, headers=as_json))
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


# what a client can ask of it has bounds

LONG = {"prompt": [[7]] * 8, "n": 64, "max_tokens": 90, "ignore_eos": True}


def started(url, head, body=b""):
    "A connection on which a request has been begun."
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=5)
    connection.sendall(b"\r\n".join([*head, b"", b""]) + body)
    return connection


def head_of(size, *others, route=b"/v1/completions"):
    kind = b"Content-Type: application/json"
    return [b"POST %s HTTP/1.1" % route, b"Content-Length: %d" % size, kind, *others]


def drawing(url, stand_in, body=LONG):
    "A connection whose request is being drawn."
    data = json.dumps(body).encode()
    connection = started(url, head_of(len(data)), data)
    wait_until(stand_in.lock.locked)
    return connection


def wait_until(there, seconds=10):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.01)


ALIKE = {"model": "small", "max_tokens": 6, "top_k": 20, "logprobs": 0, "return_token_ids": True}
DRAWN = [
    {"prompt": [[7, 8]], "n": 3, "seed": 11},
    {"prompt": [[9], [7, 8]], "n": 2, "seed": 12},
    {"prompt": [[5] * 9], "seed": 13},
    {"prompt": [[7, 8]], "n": 2, "seed": 11},
    {"prompt": [[6, 5]], "n": 2, "seed": 14},
    {"prompt": [[6, 5]], "n": 2, "seed": 15, "prompt_logprobs": 0},
]


class Counts(StandIn):
    "It says how many requests are drawn together."

    room = 512  # completions, beyond which memory is short

    def draw_for(self, group):
        self.groups = [*getattr(self, "groups", ()), len(group)]
        super().draw_for(group)

    def draw(self, model, prompts, *others):
        if len(prompts) > self.room:
            raise MemoryError("no room")
        return super().draw(model, prompts, *others)


def sent(url, stand_in, bodies, waiting):
    "Answers of requests that are sent at once."
    with ThreadPoolExecutor(len(bodies)) as pool:
        with stand_in.lock:
            asked = [pool.submit(ask, url, "/v1/completions", body) for body in bodies]
            wait_until(lambda: len(stand_in.wanted) == waiting)
        return [one.result() for one in asked]


def same(one, other):
    "Whether two answers have the same tokens, and log-probs that differ by roundings."
    assert one[0] == other[0] == 200
    pairs = list(zip(one[1]["choices"], other[1]["choices"], strict=True))
    for a, b in pairs:
        a, b = dict(a), dict(b)
        logps = [x.pop("logprobs")["token_logprobs"] for x in (a, b)]
        before = [x.pop("prompt_logprobs") for x in (a, b)]
        assert a == b and logps[0] == pytest.approx(logps[1], abs=1e-5)
        assert json.dumps(before[0])[:20] == json.dumps(before[1])[:20]
    return len(pairs)


def test_requests_sent_at_once_are_answered_as_one_by_one(start):
    stand_in, url = start(Counts)
    bodies = [{**ALIKE, **body} for body in DRAWN]
    alone = [ask(url, "/v1/completions", body) for body in bodies]
    assert stand_in.groups == [1] * 6 and stand_in.count == 6
    wrong = {**ALIKE, "prompt": [[10**6]], "seed": 1}  # it is refused, and waits for nobody
    *answers, refused = sent(url, stand_in, [*bodies, wrong], 6)
    assert stand_in.groups[6:] in ([5, 1], [1, 5]) and refused[0] == 400  # one wants more said
    assert [same(*pair) for pair in zip(answers, alone)] == [3, 4, 1, 2, 2, 2]
    assert stand_in.count == 12 and not stand_in.wanted


def test_what_wants_something_else_is_drawn_apart(start):
    stand_in, url = start(Counts)
    bodies = [{**ALIKE, **DRAWN[0]}, {**ALIKE, **DRAWN[0], "temperature": 0.7}]
    assert [one[0] for one in sent(url, stand_in, bodies, 2)] == [200, 200]
    assert stand_in.groups == [1, 1]


def test_where_rows_do_not_fit_together_each_half_is_drawn(start, monkeypatch):
    stand_in, url = start(Counts)
    bodies = [{**ALIKE, **body} for body in DRAWN[:5]]
    alone = [ask(url, "/v1/completions", body) for body in bodies]
    stand_in.groups, stand_in.room = [], 5
    large = {**ALIKE, "prompt": [[7]], "n": 6, "seed": 1}  # of its own it has no room
    *answers, refused = sent(url, stand_in, [*bodies, large], 6)
    assert refused[0] == 400 and "no room" in refused[1]["error"]["message"]
    assert all(same(*pair) for pair in zip(answers, alone)) and stand_in.groups[0] == 6
    monkeypatch.setattr("grpo_nb.serving.stand_in.MOST_DRAWN_TOGETHER", 6)
    stand_in.groups, stand_in.room = [], 6
    assert all(same(*pair) for pair in zip(sent(url, stand_in, bodies, 5), alone))
    assert sum(stand_in.groups) == 5  # none was drawn in halves


def test_one_that_leaves_does_not_hurt_those_that_wait_with_it(start):
    stand_in, url = start(Counts)
    bodies = [{**ALIKE, **body} for body in DRAWN[:3]]
    alone = [ask(url, "/v1/completions", body) for body in bodies]
    with ThreadPoolExecutor(3) as pool:
        with stand_in.lock:
            data = json.dumps({**ALIKE, "prompt": [[7]], "n": 400, "seed": 1}).encode()
            leaves = started(url, head_of(len(data)), data)
            wait_until(lambda: len(stand_in.wanted) == 1)
            asked = [pool.submit(ask, url, "/v1/completions", body) for body in bodies]
            wait_until(lambda: len(stand_in.wanted) == 4)
            leaves.close()
        answers = [one.result() for one in asked]
    assert [same(*pair) for pair in zip(answers, alone)] == [3, 4, 1]


def test_an_adapter_that_is_loaded_between_two_drawings_is_drawn_with(start, folder):
    stand_in, url = start(Counts, lora_dir=folder)
    model = moved(small_model()[0], 4)
    save_adapter(model, folder / "between", overwrite=True)
    bodies = [{**ALIKE, **body} for body in DRAWN[:3]]
    before = sent(url, stand_in, bodies, 3)
    assert load(url, "v1", folder / "between")[0] == 200
    later = [{**one, "model": "v1"} for one in bodies]
    answers = sent(url, stand_in, [*bodies, *later], 6)
    assert stand_in.groups == [3, 3, 3]
    for old, base, new, body in zip(before, answers, answers[3:], bodies):
        assert same(old, base)
        names = ("n", "seed", "max_tokens", "top_k")
        params = SamplingParams(**{name: body[name] for name in names if name in body})
        wanted = RolloutEngine(model, small_model()[1]).generate(body["prompt"], params)
        drawn = [one["token_ids"] for one in new[1]["choices"]]
        ids = zip(wanted.completion_ids.tolist(), wanted.lengths.tolist())
        assert drawn == [row[:size] for row, size in ids] and new[1] != base[1]


def test_a_client_that_leaves_frees_its_turn(start):
    stand_in, url = start(lora_dir=None)
    body = {**LONG, "n": 4096}
    for leaves in (drawing(url, stand_in, body), drawing(url, stand_in, body)):
        leaves.close()
    begin = time.monotonic()
    assert ask(url, "/v1/completions", {"prompt": [[7]], "max_tokens": 1})[0] == 200
    assert time.monotonic() - begin < 5 and stand_in.count == 1


def test_one_that_leaves_while_it_waits_is_not_drawn_for(start):
    stand_in, url = start()
    with stand_in.lock:
        data = json.dumps(LONG).encode()
        waits = started(url, head_of(len(data)), data)
        wait_until(lambda: len(stand_in.wanted) == 1)
        waits.close()
        wait_until(lambda: not stand_in.wanted)
    assert stand_in.count == 0


def test_the_token_is_looked_at_before_the_body_is_there(start):
    _, url = start(api_key="secret")
    for others in ((), (b"Authorization: Bearer other",)):
        with started(url, head_of(10**7, *others)) as connection:
            assert b" 401 " in connection.recv(100)
    key = b"Authorization: Bearer secret"
    with started(url, head_of(10**7, key, route=b"/nothing")) as connection:
        assert b" 404 " in connection.recv(100)
    long = b"Content-Length: " + b"9" * 5_000
    for wrong in (long, b"Content-Length: 1e3", b"Transfer-Encoding: chunked"):
        with started(url, [*head_of(2, key)[::2], key, wrong]) as connection:
            assert b" 413 " in connection.recv(100)


def test_a_connection_that_is_reset_is_no_traceback(start, capfd):
    stand_in, url = start()
    connection = started(url, [b"GET /health HTTP/1.1"])
    assert b" 200 " in connection.recv(100)
    reset = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    connection.close()
    assert ask(url, "/v1/completions", {"prompt": [[7]], "max_tokens": 1})[0] == 200
    time.sleep(0.1)
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_comes_in_time(monkeypatch, start):
    _, url = start()
    monkeypatch.setattr("grpo_nb.serving.stand_in.Handler.timeout", 0.2)
    with started(url, head_of(50), b"{") as stops:
        assert b" 408 " in stops.recv(100)
    assert ask(url, "/health")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "[::", "10.0.0.1"])
def test_a_name_that_was_made_to_lead_here_is_refused(url, host):
    status, answer = ask(url, "/v1/models", headers={"Host": host})
    assert status == 403 and "is not this machine" in answer["error"]["message"]
    for own in ("localhost:9", "127.0.0.1", "[::1]:80"):
        assert ask(url, "/v1/models", headers={"Host": own})[0] == 200


def test_a_pattern_of_an_adapter_is_peft_s(url, folder):
    model = get_peft_model(small_model()[0], LoraConfig(r=2, target_modules=r".*\.(q|v)_proj"))
    model.save_pretrained(folder / "soon")
    assert load(url, "soon", folder / "soon")[0] == 200
    assert ask(url, "/v1/unload_lora_adapter", {"lora_name": "soon"})[0] == 200


@pytest.mark.long
def test_sigterm_with_requests_under_way_is_no_crash(tmp_path):
    command = [sys.executable, "-m", "grpo_nb", "serve", "tiny", "--port", "0"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    try:
        url = process.stdout.readline().split(" at ")[1].split(",")[0]
        data = json.dumps({**LONG, "n": 4096}).encode()
        held = [started(url, head_of(len(data)), data) for _ in range(4)]
        time.sleep(0.5)
        process.terminate()
        said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said) == (143, ("", "")) and len(held) == 4
