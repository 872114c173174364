"""Servers over plain HTTP: which is asked, and what is no server."""

import pytest

from grpo_nb.rollout.addresses import PAUSED_S, Address, Servers


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


@pytest.mark.parametrize("wrong", ["ftp://a", "http://", ""])
def test_what_is_no_address_is_refused(wrong):
    with pytest.raises(ValueError, match="address"):
        Servers(wrong)


def test_no_proxy_is_asked(start, monkeypatch):
    _, url = start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Address(url).ask("/health")[0] == 200
