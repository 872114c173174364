"""Servers over plain HTTP: which is asked, and what is no server."""

import socket
import time

import pytest

from grpo_nb.serving.addresses import PAUSED_S, Address, ServerError, Servers


def test_a_longer_request_counts_for_more():
    servers = Servers("a, b")
    with servers.picked(1000) as long, servers.picked(10) as short, servers.picked(10) as other:
        assert (long.host, short.host, other.host) == ("a", "b", "b")
        with servers.picked(10, before=other) as elsewhere:
            assert elsewhere.host == "a"
        servers.put_aside(long, "", PAUSED_S)
        with servers.picked(10, before=other) as last:
            assert last.host == "b"
    assert [one.asked for one in servers.addresses] == [0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        *("ftp://a", "http://", "", " , ", "http://h:99999", "h:abc", "http://[::1"),
        *("http://a\0", "http://a b", "http://a\x1b[2J"),
    ],
)
def test_what_is_no_address_is_refused(wrong):
    with pytest.raises(ValueError, match="address of a server.*such as http://127.0.0.1:8000"):
        Servers(wrong)
    with pytest.raises(ValueError, match=r"' , ' has no address of a server .vllm_"):
        Servers(" , ")


def test_the_v1_of_other_clients_is_taken_off():
    assert Address("http://h:8000/v1/").url == "http://h:8000"
    assert Address("https://h/one/v1").url == "https://h/one" and Address("h/v1x").path == "/v1x"


def test_an_account_in_an_address_is_sent_and_never_shown():
    from requests import Request

    url = "http://me:pass%40word@h:8000/v1"
    address, theirs = Address(url), Request("GET", url).prepare()
    assert address.headers["Authorization"] == theirs.headers["Authorization"]
    assert (address.url, address.host, address.port) == ("http://h:8000", "h", 8000)
    assert Address(url, "token").headers["Authorization"] == "Bearer token"
    with pytest.raises(ValueError) as error:
        Address("http://me:password@h:99999")
    assert "password" not in str(error.value)


def test_a_token_is_sent_without_the_end_of_its_line_and_never_shown(start):
    _, url = start(api_key="secret")
    assert Address(url, " secret\r\n").ask("/v1/models")[0] == 200
    assert "Authorization" not in Address(url, " \n").headers
    for wrong in ("very-secret\ntoken", "very-secret\u20ac"):
        with pytest.raises(ValueError, match="vllm_server_api_key.*cannot be sent") as caught:
            Address(url, wrong)
        assert "secret" not in str(caught.value)


def test_no_proxy_is_asked(start, monkeypatch):
    _, url = start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Address(url).ask("/health")[0] == 200


def nobody():
    "The address of a port at which nobody listens."
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


def test_a_server_that_goes_on_starting_is_waited_for():
    "It prints for longer than the time that is waited, then nothing; the wait ends after that."
    began, lines = time.monotonic(), []

    def progress():
        if time.monotonic() - began < 1.5:
            lines.append("loading")
        return len(lines)

    with pytest.raises(ServerError, match=r"no server answers .* within 0.6 seconds"):
        Servers(nobody(), progress=progress).wait(0.6, "vllm serve MODEL")
    assert 2.0 < time.monotonic() - began < 8
    began = time.monotonic()
    with pytest.raises(ServerError):
        Servers(nobody()).wait(0.6, "vllm serve MODEL")
    assert time.monotonic() - began < 2.0


def test_a_server_that_prints_for_ever_is_not_waited_for_for_ever():
    began, lines = time.monotonic(), []

    def progress():
        lines.append("no block found")
        return len(lines)

    with pytest.raises(ServerError, match="no server answers"):
        Servers(nobody(), progress=progress).wait(0.3, "vllm serve MODEL")
    assert 1.2 < time.monotonic() - began < 8
