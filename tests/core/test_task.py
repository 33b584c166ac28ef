"""The network of a task: what may be listed, what is refused and how it is said."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core import codec
from posttrain.core.errors import UsageError
from posttrain.core.task import Environment, Network, is_host


def test_nothing_is_reached_by_default() -> None:
    assert Environment().network == Network(allow=(), open=False)
    assert not Network().reaches_out
    assert Network(open=True).reaches_out
    assert Network(allow=("a.example.org:443",)).reaches_out


@pytest.mark.parametrize(
    ("entry", "target"),
    [
        ("a.example.org:443", ("a.example.org", 443)),
        ("*.example.org:80", ("*.example.org", 80)),
        ("xn--bcher-kva.example:8080", ("xn--bcher-kva.example", 8080)),
        ("_dmarc.a-b.example.org:1", ("_dmarc.a-b.example.org", 1)),
        ("1.1.1.1:65535", ("1.1.1.1", 65535)),
        ("[2606:4700::1111]:443", ("2606:4700::1111", 443)),
        ("4chan.org:443", ("4chan.org", 443)),
    ],
)
def test_names_wildcards_and_addresses_are_listed_with_their_port(entry, target) -> None:
    assert Network(allow=(entry,)).targets == (target,)


@pytest.mark.parametrize(
    "entry",
    [
        "", ":443", "a.example.org", "a.example.org:", "a.example.org:0", "a.example.org:65536",
        "a.example.org:0443", "a.example.org:+443", "a.example.org:４43", "a.example.org:443 ",
        " a.example.org:443", "a.example.org:443\n",
        "A.example.org:443", "a.example.org.:443", "a..org:443", ".a.example.org:443", "-a.org:443",
        "a-.org:443", "bücher.example:443", "K.example:443", "localhost:80", "*:443", "*.org:443",
        "*.*.example.org:443", "a.*.org:443", "**.example.org:443", "*example.org:443",
        "https://a.example.org:443", "a.example.org:443/simple", "user@a.example.org:443",
        "a.example.org:https",
        "127.1:80", "2130706433:80", "0x7f.0.0.1:80", "127.0.0.01:80", "10.0.0.0/8:80",
        "1.1.1.1.:80", "[1.1.1.1]:80", "2606:4700::1111:443", "[2606:4700:0::1111]:443",
        "[2606:4700::ABCD]:443", "[fe80::1%eth0]:80", "[]:80", "[::]x:80", "a.0x7f:80",
        "a" * 64 + ".org:80", "a." * 126 + "org:80", 443, None,
    ],
)  # fmt: skip
def test_whatever_could_be_read_in_two_ways_is_refused(entry) -> None:
    with pytest.raises(UsageError, match=r"wanted 'host:port' in network.allow, got .* Next: "):
        Network(allow=("a.example.org:443", entry))


def test_a_text_in_place_of_a_list_is_no_list_of_letters() -> None:
    with pytest.raises(UsageError, match="wanted a tuple of 'host:port'"):
        Network(allow="a.example.org:443")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="wanted a list, got str: 'a"):
        codec.from_json(Network, {"allow": "a.example.org:443"})
    with pytest.raises(TypeError, match="wanted a list, got str: 'echo hi'"):
        codec.from_json(Environment, {"setup": "echo hi"})


def test_open_and_a_list_contradict_each_other() -> None:
    with pytest.raises(UsageError, match=r"network\.open allows every public host"):
        Network(open=True, allow=("a.example.org:443",))


def test_an_environment_survives_json_and_reads_what_knew_no_network() -> None:
    environment = Environment(network=Network(allow=("a.example.org:443", "*.example.org:80")))
    plain = json.loads(json.dumps(codec.to_json(environment)))
    assert plain["network"] == {"allow": ["a.example.org:443", "*.example.org:80"], "open": False}
    assert codec.from_json(Environment, plain) == environment
    del plain["network"]
    assert codec.from_json(Environment, plain) == Environment()
    with pytest.raises(TypeError, match="unknown field 'alow' of Network"):
        codec.from_json(Environment, {"network": {"alow": []}})
    with pytest.raises(TypeError, match="wanted bool, got str"):
        codec.from_json(Environment, {"network": {"open": "no"}})


@given(st.text() | st.from_regex(r"[a-zA-Z0-9.:*\[\]_-]*:[0-9]{1,5}", fullmatch=True))
def test_what_is_taken_is_written_as_it_is_compared(entry) -> None:
    try:
        ((host, port),) = Network(allow=(entry,)).targets
    except UsageError:
        return
    assert is_host(host.removeprefix("*."))
    assert host == host.lower()
    assert 0 < port < 65_536
    assert entry == (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
