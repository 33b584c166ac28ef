"""The rules of the network: no spelling of a private address passes (BR-42)."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.task import Network
from posttrain.sandbox import egress
from posttrain.sandbox.egress import (
    Refusal,
    Request,
    admit,
    canonical,
    head_length,
    is_address,
    parse,
    reachable,
)

LISTED = Network(
    allow=("files.example.org:443", "*.example.net:80", "1.1.1.1:53", "[2606:4700::1111]:443")
)


def read(head: bytes) -> Request | Refusal:
    try:
        return parse(head)
    except Refusal as refusal:
        return refusal


def status_of(head: bytes) -> int:
    found = read(head)
    assert isinstance(found, Refusal)
    return found.status


# --- hosts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("files.example.org", 443),
        ("FILES.Example.ORG", 443),
        ("files.example.org.", 443),
        ("a.example.net", 80),
        ("a.b.c.example.net.", 80),
        ("1.1.1.1", 53),
        ("2606:4700::1111", 443),
        ("2606:4700:0:0:0:0:0:1111", 443),
        ("2606:4700::0:1111", 443),
    ],
)
def test_what_is_listed_is_admitted_in_its_plain_spellings(host, port) -> None:
    decision = admit(LISTED, host, port)
    assert decision.allowed
    assert "the task lists" in decision.reason


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("files.example.org", 80), ("files.example.org", 0), ("files.example.org", 443 + 65_536),
        ("example.org", 443), ("x.files.example.org", 443), ("files.example.org.evil.com", 443),
        ("filesXexample.org", 443), ("example.net", 80), (".example.net", 80),
        ("evilexample.net", 80), ("a.example.net", 443), ("*.example.net", 80),
        ("files.example.org..", 443), ("files..example.org", 443), ("files.example.org\0", 443),
        ("files.example.org\n", 443), ("files.example.org ", 443), ("files。example。org", 443),
        ("ﬁles.example.org", 443), ("files.example.orɡ", 443), ("", 443), (".", 443),
        ("evil.com#.example.net", 80), ("evil.com/.example.net", 80), ("e@a.example.net", 80),
        ("evil.com\\.example.net", 80), ("evil.com%00.example.net", 80), ("1.1.1.1.1", 53),
        ("0x1.1.1.1", 53), ("01.1.1.1", 53), ("16843009", 53), ("1.1.257", 53),
        ("::ffff:1.1.1.1", 53), ("[2606:4700::1111]", 443), ("2606:4700::1111%1", 443),
    ],
)  # fmt: skip
def test_everything_else_is_not(host, port) -> None:
    assert not admit(LISTED, host, port).allowed
    assert not admit(Network(), host, port).allowed


def test_letters_of_other_scripts_do_not_fold_into_listed_names() -> None:
    """`"K".lower()` (Kelvin sign) is an ASCII k."""
    network = Network(allow=("k.example.org:443",))
    assert admit(network, "K.example.org", 443).allowed
    assert not admit(network, "\N{KELVIN SIGN}.example.org", 443).allowed


def test_an_open_network_admits_every_well_formed_name() -> None:
    assert admit(Network(open=True), "anything.example.com", 8443).allowed
    assert not admit(Network(open=True), "anything.example.com", 65_536).allowed
    assert not admit(Network(open=True), "localhost", 80).allowed
    assert not admit(Network(open=True), "0x7f000001", 80).allowed


@given(st.text(max_size=60) | st.from_regex(r"[0-9a-fA-Fx.:%]{1,30}", fullmatch=True))
def test_a_canonical_host_is_its_own_spelling(host) -> None:
    try:
        once = canonical(host)
    except Refusal:
        return
    assert canonical(once) == once
    assert once.isascii()


# --- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "loopback"), ("127.255.255.254", "loopback"), ("::1", "loopback"),
        ("10.0.0.1", "private"), ("172.16.0.1", "private"), ("172.31.255.255", "private"),
        ("192.168.1.1", "private"), ("fc00::1", "private"), ("fdff::1", "private"),
        ("fec0::1", "private"), ("169.254.0.1", "link-local"), ("fe80::1", "link-local"),
        ("169.254.169.254", "metadata"), ("fd00:ec2::254", "metadata"),
        ("168.63.129.16", "metadata"), ("100.100.100.200", "metadata"), ("100.64.0.1", "carrier"),
        ("100.127.255.255", "carrier"), ("0.0.0.0", "unspecified"), ("0.1.2.3", "unspecified"),
        ("::", "unspecified"), ("224.0.0.1", "multicast"), ("239.255.255.255", "multicast"),
        ("ff02::1", "multicast"), ("240.0.0.1", "reserved"), ("255.255.255.255", "reserved"),
        ("192.0.0.1", "protocols"), ("192.0.2.1", "documentation"), ("198.18.0.1", "measurements"),
        ("198.51.100.1", "documentation"), ("203.0.113.1", "documentation"),
        ("2001:db8::1", "documentation"), ("3fff::1", "documentation"), ("192.88.99.1", "relay"),
        ("::ffff:127.0.0.1", "holds another"), ("::ffff:8.8.8.8", "holds another"),
        ("::127.0.0.1", "holds another"), ("2002:7f00:1::", "holds another"),
        ("2002:a00:1::1", "holds another"), ("64:ff9b:1::a00:1", "holds another"),
        ("2001:0:102:304:0:ffff:80ff:fffe", "protocols"), ("2001:10::1", "protocols"),
        ("64:ff9b::127.0.0.1", "way to a loopback"), ("64:ff9b::a9fe:a9fe", "way to a metadata"),
        ("64:ff9b::10.1.2.3", "way to a private"), ("100::1", "reserved"), ("5f00::1", "reserved"),
        ("4000::1", "reserved"), ("fe80::1%eth0", "one interface"), ("2606:4700::1%1", "one int"),
        ("files.example.org", "no address"), ("", "no address"), ("127.1", "no address"),
    ],
)  # fmt: skip
def test_no_address_but_a_public_one_is_reachable(address, kind) -> None:
    decision = reachable(address)
    assert not decision.allowed
    assert kind in decision.reason


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0",
        "128.0.0.1", "169.253.255.255", "172.15.255.255", "172.32.0.0", "192.167.255.255",
        "192.169.0.0", "223.255.255.255", "168.63.129.17", "2606:4700::1111", "2a00:1450::1",
        "2001:200::1", "2620:fe::fe", "64:ff9b::8.8.8.8",
    ],
)  # fmt: skip
def test_public_addresses_are_reachable(address) -> None:
    assert reachable(address).allowed


@settings(max_examples=500)
@given(st.ip_addresses())
def test_what_python_calls_special_is_never_reachable(address) -> None:
    if not reachable(str(address)).allowed:
        return
    inner = address
    if address in ipaddress.ip_network("64:ff9b::/96"):
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    assert inner.is_global
    for kind in ("private", "loopback", "link_local", "multicast", "unspecified", "reserved"):
        assert not getattr(inner, f"is_{kind}"), kind
    if inner.version == 6:
        assert inner.ipv4_mapped is None
        assert inner.sixtofour is None
        assert inner.teredo is None
        assert not inner.is_site_local


# --- no spelling of a private address passes --------------------------------------------------

PRIVATE = [
    ipaddress.ip_network(block)
    for block in (
        "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16",
        "100.64.0.0/10", "0.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4", "169.254.169.254/32",
    )
]  # fmt: skip


@st.composite
def private_addresses(draw) -> ipaddress.IPv4Address:
    block = draw(st.sampled_from(PRIVATE))
    return block[draw(st.integers(0, block.num_addresses - 1))]


NUMBERS = (str, hex, lambda n: f"0{n:o}", lambda n: f"0X{n:X}", lambda n: f"{n:012d}")


@st.composite
def ipv4_spellings(draw, address: ipaddress.IPv4Address) -> str:
    """As inet_aton(3) reads it: one to four parts, each in any base."""
    value, count = int(address), draw(st.integers(1, 4))
    parts = [(value >> (24 - 8 * place)) & 0xFF for place in range(count - 1)]
    parts.append(value & ((1 << (8 * (5 - count))) - 1))
    written = ".".join(draw(st.sampled_from(NUMBERS))(part) for part in parts)
    return written + draw(st.sampled_from(("", ".")))


@st.composite
def ipv6_spellings(draw, address: ipaddress.IPv4Address) -> str:
    value = int(address)
    high, low = value >> 16, value & 0xFFFF
    teredo = value ^ 0xFFFFFFFF
    text = draw(
        st.sampled_from(
            (
                f"::ffff:{address}", f"::FFFF:{high:x}:{low:x}", f"0:0:0:0:0:ffff:{address}",
                f"0000:0000:0000:0000:0000:ffff:{high:04x}:{low:04x}", f"::{address}",
                f"64:ff9b::{address}", f"64:ff9b::{high:x}:{low:x}", f"64:ff9b:1::{address}",
                f"2002:{high:x}:{low:x}::", f"2002:{high:x}:{low:x}::{address}",
                f"2001:0:808:808:0:ffff:{teredo >> 16:x}:{teredo & 0xFFFF:x}",
                f"2001::{teredo >> 16:x}:{teredo & 0xFFFF:x}", f"::ffff:0:{address}",
            )
        )
    )  # fmt: skip
    zone = draw(st.sampled_from(("", "%25lo", "%eth0", "%1")))
    return f"[{text}{zone}]"


@st.composite
def heads(draw) -> bytes:
    """A request that leads to a private address."""
    address = draw(private_addresses())
    host = draw(ipv4_spellings(address) | ipv6_spellings(address))
    trick = draw(
        st.sampled_from(
            ("{}", "files.example.org@{}", "files.example.org:443@{}", "{}@files.example.org@{}")
        )
    ).format(host, host)
    port = draw(st.sampled_from((80, 443, 8080)))
    if draw(st.booleans()):
        return f"CONNECT {trick}:{port} HTTP/1.1\r\nHost: files.example.org\r\n\r\n".encode()
    scheme = draw(st.sampled_from(("http", "HTTP")))
    target = draw(
        st.sampled_from(
            ("{}://{}:{}/", "{}://{}:{}?@files.example.org", "{}://{}:{}/@files.example.org/")
        )
    ).format(scheme, trick, port)
    return f"GET {target} HTTP/1.1\r\nHost: files.example.org\r\n\r\n".encode()


@settings(max_examples=600)
@given(heads())
def test_no_spelling_of_a_private_address_passes(head) -> None:
    request = read(head)
    if isinstance(request, Refusal):
        return
    decision = admit(Network(open=True), request.host, request.port)
    assert not decision.allowed or is_address(request.host), "it would be resolved"
    assert not decision.allowed or not reachable(request.host).allowed


def test_the_plain_spelling_is_read_so_that_the_test_above_tests_something() -> None:
    for host in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"):
        request = parse(f"CONNECT {host}:80 HTTP/1.1\r\n\r\n".encode())
        assert admit(Network(open=True), request.host, 80).allowed
        assert is_address(request.host)
        assert not reachable(request.host).allowed


# --- requests ---------------------------------------------------------------------------------


def test_a_tunnel_is_asked_for_by_host_and_port() -> None:
    head = b"CONNECT Files.Example.org:443 HTTP/1.1\r\nHost: other\r\nContent-Length: x\r\n\r\n"
    request = parse(head)
    assert (request.method, request.host, request.port) == ("CONNECT", "files.example.org", 443)
    assert request.is_tunnel
    assert request.head == b""
    assert request.body_bytes == 0


def test_a_plain_request_is_written_anew_for_its_host() -> None:
    """Host, length and connection are ours: no field of the client can contradict them."""
    request = parse(
        b"POST http://Files.example.org:8080/a%20b?c=d HTTP/1.1\r\n"
        b"Host: evil.example.com\r\nHost: other.example.com\r\n"
        b"Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic eDp5\r\n"
        b"Connection: X-Gone, content-length, close\r\nX-Gone: 1\r\nKeep-Alive: 5\r\n"
        b"Upgrade: websocket\r\nTE: trailers\r\nTrailer: X\r\n"
        b"X-Kept:  caf\xe9 \t\r\nContent-Length: 5\r\n\r\n"
    )
    assert (request.host, request.port, request.body_bytes) == ("files.example.org", 8080, 5)
    assert not request.is_tunnel
    assert request.head == (
        b"POST /a%20b?c=d HTTP/1.1\r\nHost: files.example.org:8080\r\nx-kept: caf\xe9\r\n"
        b"Content-Length: 5\r\nConnection: close\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("target", "line", "host"),
    [
        ("http://a.example.org", "GET / HTTP/1.0", "a.example.org"),
        ("http://a.example.org?q", "GET /?q HTTP/1.0", "a.example.org"),
        ("HTTP://A.example.org:80/x//y", "GET /x//y HTTP/1.0", "a.example.org"),
        ("http://a.example.org:81/\\@b", "GET /\\@b HTTP/1.0", "a.example.org:81"),
        ("http://[2606:4700:0::1]/", "GET / HTTP/1.0", "[2606:4700::1]"),
        ("http://[2606:4700::1]:81/", "GET / HTTP/1.0", "[2606:4700::1]:81"),
    ],
)
def test_a_target_in_absolute_form_gives_path_and_host(target, line, host) -> None:
    request = parse(f"GET {target} HTTP/1.0\r\n\r\n".encode())
    expected = f"{line}\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert request.head == expected.encode()


@pytest.mark.parametrize(
    "line",
    [
        "", "GET", "GET /", "GET / HTTP/1.1", "GET * HTTP/1.1", "GET //a.example.org/ HTTP/1.1",
        "GET a.example.org HTTP/1.1", "GET a.example.org:80 HTTP/1.1",
        "GET https://a.example.org/ HTTP/1.1", "GET ftp://a.example.org/ HTTP/1.1",
        "GET http:/a.example.org/ HTTP/1.1", "GET http:///a.example.org/ HTTP/1.1",
        "GET http:// HTTP/1.1", "GET http://:80/ HTTP/1.1", "GET http://a.example.org:/ HTTP/1.1",
        "GET http://a.example.org:0/ HTTP/1.1", "GET http://a.example.org:65536/ HTTP/1.1",
        "GET http://a.example.org:080/ HTTP/1.1", "GET http://a.example.org:80:80/ HTTP/1.1",
        "GET http://u@a.example.org/ HTTP/1.1", "GET http://u:p@a.example.org/ HTTP/1.1",
        "GET http://a.example.org@b.example.org/ HTTP/1.1", "GET http://a\\b.example.org/ HTTP/1.1",
        "GET http://a.example.org\\@b.example.org/ HTTP/1.1", "GET http://a%2eb.org/ HTTP/1.1",
        "GET http://a.example.org/#x HTTP/1.1", "GET http://a.example.org#@b.org/ HTTP/1.1",
        "GET http://[::1/ HTTP/1.1", "GET http://::1]/ HTTP/1.1", "GET http://[::1]x/ HTTP/1.1",
        "GET http://[127.0.0.1]/ HTTP/1.1", "GET http://[::1%25lo]/ HTTP/1.1",
        "GET http://a b.example.org/ HTTP/1.1", "GET  http://a.example.org/ HTTP/1.1",
        "GET http://a.example.org/  HTTP/1.1", "GET http://a.example.org/\tHTTP/1.1",
        "GET http://a.example.org/ HTTP/1.2", "GET http://a.example.org/ HTTP/2.0",
        "GET http://a.example.org/ HTTP/1.10", "GET http://a.example.org/ http/1.1",
        "GET http://a.example.org/ HTTP/1.1 ", " GET http://a.example.org/ HTTP/1.1",
        "get http://a.example.org/ HTTP/1.1", "G\0T http://a.example.org/ HTTP/1.1",
        "GET http://a.example.org/\xe9 HTTP/1.1", "GET http://b\xfccher.example/ HTTP/1.1",
        "CONNECT a.example.org HTTP/1.1", "CONNECT a.example.org: HTTP/1.1",
        "CONNECT :443 HTTP/1.1", "CONNECT http://a.example.org:443 HTTP/1.1",
        "CONNECT a.example.org:443/ HTTP/1.1", "CONNECT u@a.example.org:443 HTTP/1.1",
        "CONNECT a.example.org:443,b.example.org:443 HTTP/1.1", "CONNECT ::1:443 HTTP/1.1",
        "CONNECT localhost:443 HTTP/1.1", "CONNECT a.example.org:00443 HTTP/1.1",
        "PRI * HTTP/2.0", "\x16\x03\x01\x02",
    ],
)  # fmt: skip
def test_a_request_line_that_is_none_is_a_bad_request(line) -> None:
    assert status_of(line.encode("latin-1") + b"\r\nHost: a.example.org\r\n\r\n") == 400


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (" folded: x", 400), ("a: b\r\n folded", 400), ("a : b", 400), (": b", 400), ("a", 400),
        ("a\0: b", 400), ("a: b\0", 400), ("a: b\rHost: c", 400), ("a: b\nHost: c", 400),
        ("\xe9: b", 400), ("a: b\x7f", 400), ("\r\n", 400), ("a: b\r\n\r\nc: d", 400),
        ("Content-Length: 1\r\nContent-Length: 1", 400), ("Content-Length: 1, 1", 400),
        ("Content-Length: -1", 400), ("Content-Length: +1", 400), ("Content-Length: 0x1", 400),
        ("Content-Length:", 400), ("Content-Length: 1_0", 400), ("Content-Length: \xb2", 400),
        ("Content-Length: " + "9" * 16, 400), ("Transfer-Encoding: chunked", 411),
        ("transfer-encoding: identity", 411), ("TRANSFER-ENCODING:\tx\r\nContent-Length: 1", 411),
        ("\r\n".join(f"a{n}: b" for n in range(101)), 431),
    ],
)  # fmt: skip
def test_fields_that_could_be_read_in_two_ways_are_refused(fields, status) -> None:
    """Smuggling lives on heads whose length or end two readers see in different places."""
    head = f"POST http://a.example.org/ HTTP/1.1\r\n{fields}\r\n\r\n".encode("latin-1")
    assert status_of(head) == status


def test_methods_that_this_proxy_does_not_do_are_named() -> None:
    for method in ("TRACE", "PROPFIND", "X"):
        head = f"{method} http://a.example.org/ HTTP/1.1\r\n\r\n".encode()
        assert status_of(head) == 405


TEXT = st.text(st.characters(max_codepoint=0xFF), max_size=30)
LINES = st.lists(TEXT | st.sampled_from(("Host: a.org", "Content-Length: 3", "Connection: x")))
TARGETS = st.sampled_from(("http://", "http://a.example.org", "/", "a.example.org:443", ""))
REQUESTS = st.builds(
    lambda method, target, rest, version, lines: "\r\n".join(
        [f"{method} {target}{rest} {version}", *lines, "", ""]
    ).encode("latin-1"),
    st.sampled_from(("GET", "CONNECT", "POST")) | TEXT,
    TARGETS,
    TEXT,
    st.sampled_from(("HTTP/1.1", "HTTP/1.0")) | TEXT,
    LINES,
)


@settings(max_examples=500)
@given(REQUESTS | st.binary(max_size=80))
def test_reading_a_head_gives_a_request_or_a_refusal_and_nothing_else(head) -> None:
    request = read(head)
    if isinstance(request, Refusal):
        assert 400 <= request.status < 500
        assert request.answer.startswith(b"HTTP/1.1 4")
        assert request.answer.isascii()
        return
    assert canonical(request.host) == request.host
    assert 0 < request.port < 65_536
    if not request.is_tunnel:
        lines = request.head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        assert request.head.count(b"\r\n\r\n") == 1
        assert sum(line.lower().startswith(b"host:") for line in lines) == 1
        assert sum(line.lower().startswith(b"content-length:") for line in lines) <= 1
        assert not any(b"\r" in line or b"\n" in line or b"\0" in line for line in lines)
        assert head_length(request.head) == len(request.head)


@given(st.binary(max_size=40), st.binary(max_size=20), st.lists(st.integers(1, 9), min_size=1))
def test_the_end_of_a_head_is_found_whatever_the_pieces(line, rest, sizes) -> None:
    data = b"GET http://a.org/ HTTP/1.1\r\n" + line + b"\r\n\r\n" + rest

    def outcome(feed: list[int]) -> int | None:
        seen = 0
        try:
            for size in feed:
                found = head_length(data[: seen + size], seen=seen)
                if found is not None:
                    return found
                seen += size
        except Refusal as refusal:
            return -refusal.status
        return None

    pieces = [sizes[n % len(sizes)] for n in range(len(data))]
    assert outcome(pieces) == outcome([len(data)])


def test_a_head_is_bounded_and_refused_as_soon_as_it_is_none() -> None:
    def refused(data: bytes) -> int:
        with pytest.raises(Refusal) as caught:
            head_length(data, most=100)
        return caught.value.status

    assert head_length(b"", most=100) is None
    assert head_length(b"a" * 99, most=100) is None
    assert head_length(b"a" * 96 + b"\r\n\r\n" + b"b" * 500, most=100) == 100
    assert refused(b"a" * 100) == 431
    assert refused(b"a" * 97 + b"\r\n\r\n") == 431
    assert head_length(b"GET\r", most=100) is None
    for data in (b"\x16\x03\x01", b"GET / HTTP/1.0\n", b"GET\rX", b"a\r\n\nb", b"\x7f", b"a\0"):
        assert refused(data) == 400


def test_an_answer_cannot_be_bent_by_what_was_asked() -> None:
    with pytest.raises(Refusal) as caught:
        parse(b"GET x\r\nSet-Cookie: a HTTP/1.1\r\n\r\n")
    head, _, body = caught.value.answer.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 400 Bad Request", b"Content-Type: text/plain",
        b"Content-Length: %d" % len(body), b"Connection: close",
    ]  # fmt: skip
    assert b"\r" not in body
    with pytest.raises(Refusal) as caught:
        parse(b"GET \xff" + b"x" * 15_000 + b" HTTP/1.1\r\n\r\n")
    assert len(caught.value.answer) < 400
    assert Refusal(403, "a\r\nb é").answer.isascii()


def test_programs_inside_find_the_proxy_and_leave_their_own_servers_alone() -> None:
    assert egress.VARIABLES["https_proxy"] == "http://127.0.0.1:3128"
    assert {name.lower() for name in egress.VARIABLES} == {"http_proxy", "https_proxy", "no_proxy"}
    assert "127.0.0.1" in egress.VARIABLES["no_proxy"].split(",")
