"""What of the outside an attempt may reach, and how the proxy's requests are read (RFC 9110, 9112).

Pure: `proxy` resolves, connects and passes bytes on. Nothing here looks into a tunnel, so what is
said to a host that may be reached is not judged; nor is NAT64 known under prefixes that an operator
chose. The one thing that must stay true: what two readers could read differently is refused, and no
address but a public one is reachable, however it is spelt or wrapped in another.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from posttrain.core.task import Network, is_host

ADDRESS = ("127.0.0.1", 3128)
"""Where the proxy listens, inside the sandbox's network namespace."""
_URL = f"http://{ADDRESS[0]}:{ADDRESS[1]}"
_OWN = "localhost,127.0.0.1,::1"
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _URL),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), _OWN),
}
"""By which programs in a sandbox find the proxy; servers of their own they reach without it."""

MAX_HEAD_BYTES = 16_384
MAX_FIELDS = 100
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
"""Answer to `CONNECT` once the tunnel stands."""
_PHRASES = {
    400: "Bad Request", 403: "Forbidden", 405: "Method Not Allowed", 408: "Request Timeout",
    411: "Length Required", 429: "Too Many Requests", 431: "Request Header Fields Too Large",
    502: "Bad Gateway", 504: "Gateway Timeout",
}  # fmt: skip


class Refusal(ValueError):
    """A request that is answered with an error (HTTP `status`) instead of being passed on: 4xx
    where it may not pass, 5xx where it may and its target was not reached.
    """

    def __init__(self, status: int, reason: str, *, address: str | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.address = address
        """The address it is about; whoever asked is not told."""

    @property
    def answer(self) -> bytes:
        """The whole response."""
        body = f"{self.reason}\n".encode("ascii", "backslashreplace")
        head = (
            f"HTTP/1.1 {self.status} {_PHRASES[self.status]}\r\nContent-Type: text/plain\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode("ascii") + body


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether something may be reached, and why."""

    allowed: bool
    reason: str


@dataclass(slots=True, kw_only=True)
class Exchange:
    """The record of one request, for the journal; complete once the request has ended."""

    method: str | None = None
    """This, `host` and `port`: None where no request could be read."""
    host: str | None = None
    port: int | None = None
    address: str | None = None
    """What was connected to, or was refused for what it is; None: it did not come to that."""
    allowed: bool = False
    reason: str = "the sandbox was closed."
    """Which rule decided, or what broke it off."""
    bytes_out: int = 0
    """Bytes sent to the host."""
    bytes_in: int = 0
    """Bytes received from it."""
    duration_s: float = 0.0

    def refused(self, refusal: Refusal) -> None:
        """It ended in a refusal."""
        self.allowed = refusal.status >= 500
        self.reason, self.address = refusal.reason, refusal.address


# --- hosts ------------------------------------------------------------------------------------


def canonical(host: str) -> str:
    """The one spelling of a host, as `core.task.is_host` wants it; IPv6 comes without brackets.

    >>> canonical("Files.Example.ORG."), canonical("2606:4700:0:0::1111")
    ('files.example.org', '2606:4700::1111')

    Raises:
        Refusal: it is none, or readers would not agree on it (octal, zone ids, other scripts).
    """
    text = host.lower().removesuffix(".") if host.isascii() else ""
    if ":" in text and "%" not in text:
        try:
            text = str(ipaddress.IPv6Address(text))
        except ValueError:
            text = ""
    if not is_host(text):
        raise Refusal(400, f"wanted a host name or a plain address, got {host!a:.80}.")
    return text


def is_address(host: str) -> bool:
    """Whether a canonical host is an address, so that there is nothing to resolve."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def admit(network: Network, host: str, port: int) -> Decision:
    """Whether a task's network lets `host:port` be asked for, in whatever spelling. Where the name
    leads is another question: `reachable`.
    """
    try:
        name = canonical(host)
    except Refusal as refusal:
        return Decision(allowed=False, reason=refusal.reason)
    if not 0 < port < 65_536:
        return Decision(allowed=False, reason=f"{port} is no port.")
    if network.open:
        return Decision(allowed=True, reason="the task's network is open.")
    for listed, its_port in network.targets:
        if port == its_port and _covers(listed, name):
            return Decision(allowed=True, reason=f"the task lists {listed}:{port}.")
    return Decision(allowed=False, reason=f"the task does not list {name}:{port}.")


def _covers(listed: str, name: str) -> bool:
    return name.endswith(listed[1:]) if listed.startswith("*.") else name == listed


# --- addresses --------------------------------------------------------------------------------

_BLOCKS = (
    ("a metadata address", "169.254.169.254 168.63.129.16 192.0.0.192 100.100.100.200"),
    ("a metadata address", "fd00:ec2::254 fd20:ce::254"),
    ("a loopback address", "127.0.0.0/8 ::1"),
    ("a private address", "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7 fec0::/10"),
    ("a link-local address", "169.254.0.0/16 fe80::/10"),
    ("an address shared behind a carrier's NAT", "100.64.0.0/10"),
    ("an unspecified address", "0.0.0.0/8 ::"),
    ("a multicast address", "224.0.0.0/4 ff00::/8"),
    ("an address for documentation", "192.0.2.0/24 198.51.100.0/24 203.0.113.0/24"),
    ("an address for documentation", "2001:db8::/32 3fff::/20"),
    ("an address for measurements", "198.18.0.0/15"),
    ("an address for protocols", "192.0.0.0/24 2001::/23"),
    ("a relay's address", "192.88.99.0/24"),
    ("an address that holds another", "::/96 ::ffff:0:0/96 64:ff9b:1::/48 2002::/16"),
    ("a reserved address", "240.0.0.0/4"),
)
"""What may not be reached (IANA's special-purpose registries, clouds' metadata); of several the
first gives the reason. Teredo lies in 2001::/23, 6to4 is 2002::/16.
"""
_REFUSED = tuple(
    (ipaddress.ip_network(block), kind) for kind, blocks in _BLOCKS for block in blocks.split()
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""RFC 6052: the IPv4 address is the last 32 bits. Hosts without IPv4 reach all of it this way."""
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


def reachable(address: str) -> Decision:
    """Whether a resolved address may be connected to: public ones only. The reason is what kind of
    address it is.

    >>> reachable("::ffff:127.0.0.1").reason, reachable("64:ff9b::10.0.0.1").reason
    ('an address that holds another', 'a way to a private address')
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return Decision(allowed=False, reason="no address")
    if "%" in address:
        return Decision(allowed=False, reason="an address of one interface")
    for block, kind in _REFUSED:
        if parsed in block:
            return Decision(allowed=False, reason=kind)
    if parsed in _NAT64:
        inner = reachable(str(ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF)))
        return Decision(allowed=inner.allowed, reason=f"a way to {inner.reason}")
    if parsed.version == 6 and parsed not in _GLOBAL_UNICAST:
        return Decision(allowed=False, reason="a reserved address")
    return Decision(allowed=True, reason="a public address")


# --- requests ---------------------------------------------------------------------------------

_STOP = re.compile(rb"\r\n\r\n|\r(?=[^\n])|(?<!\r)\n|[^\t\r\n\x20-\x7e\x80-\xff]")
_REQUEST = re.compile(r"([A-Z]{1,16}) ([\x21-\x7e]+) HTTP/1\.([01])")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
_ABSOLUTE = re.compile(r"(?i:http)://([^/?#]*)([^#]*)")
_AUTHORITY = re.compile(r"(?:\[([^\]]*:[^\]]*)\]|([^:\[\]]+))(?::([1-9][0-9]{0,4}))?")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_DROPPED = frozenset(
    {
        "host", "content-length", "connection", "proxy-connection", "keep-alive", "te", "trailer",
        "upgrade", "proxy-authorization", "proxy-authenticate",
    }
)  # fmt: skip
"""Fields that end here: those of one hop, and those that are written anew."""

Fields = list[tuple[str, str]]
"""Names in lower case and values of a head's fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to the proxy."""

    method: str
    host: str
    """Canonical."""
    port: int
    head: bytes = b""
    """What the host is sent before the body; nothing for a tunnel."""
    body_bytes: int = 0

    @property
    def is_tunnel(self) -> bool:
        """Whether bytes of any kind go both ways (RFC 9110, 9.3.6)."""
        return self.method == "CONNECT"


def head_length(
    data: bytes | bytearray, *, seen: int = 0, most: int = MAX_HEAD_BYTES
) -> int | None:
    """Bytes of the request head that `data` begins with, its blank line included; None where it is
    not complete yet. The first `seen` bytes were looked at before.

    Raises:
        Refusal: it is longer than `most`, or no head: a line ends in a lone CR or LF, or a byte
            stands there that no head may hold.
    """
    found = _STOP.search(data, max(0, seen - 3))
    end = found.end() if found else len(data)
    if end > most or (found is None and end == most):
        raise Refusal(431, f"wanted a request head of at most {most} bytes.")
    if found is None:
        return None
    if found[0] != b"\r\n\r\n":
        raise Refusal(400, f"wanted an HTTP/1.1 request, got {found[0]!r} at byte {found.start()}.")
    return end


def parse(head: bytes) -> Request:
    """The request of a head with its blank line.

    Raises:
        Refusal: it is malformed, ambiguous, or nothing this proxy does.
    """
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    match = _REQUEST.fullmatch(first)
    if match is None:
        raise Refusal(400, f"wanted 'METHOD target HTTP/1.1', got {first!a:.80}.")
    method, target, minor = match.groups()
    fields = _fields(lines)
    if method == "CONNECT":
        host, port = _authority(target, default_port=None)
        return Request(method=method, host=host, port=port)
    if method not in _METHODS:
        raise Refusal(405, f"wanted one of {', '.join(_METHODS)}, CONNECT; got {method}.")
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise Refusal(
            400,
            f"wanted http://host/path as the target, got {target!a:.80}; this is a proxy, and "
            "https goes through CONNECT.",
        )
    host, port = _authority(absolute[1], default_port=80)
    length = _content_length(fields)
    path = absolute[2] if absolute[2].startswith("/") else f"/{absolute[2]}"
    written = [f"{method} {path} HTTP/1.{minor}", f"Host: {_host_field(host, port)}"]
    written += [f"{name}: {value}" for name, value in _passed(fields)]
    written += [] if length is None else [f"Content-Length: {length}"]
    text = "\r\n".join([*written, "Connection: close", "", ""])
    return Request(
        method=method, host=host, port=port, head=text.encode("latin-1"), body_bytes=length or 0
    )


def _fields(lines: list[str]) -> Fields:
    if len(lines) > MAX_FIELDS:
        raise Refusal(431, f"wanted at most {MAX_FIELDS} fields, got {len(lines)}.")
    fields = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise Refusal(400, f"wanted 'name: value' as a field, got {line!a:.80}.")
        fields.append((match[1].lower(), match[2].strip(" \t")))
    return fields


def _passed(fields: Fields) -> Iterator[tuple[str, str]]:
    """Fields for the host: those that no `Connection` field names (RFC 9110, 7.6.1) either."""
    listed = {
        name.strip().lower() for field, value in fields if field == "connection"
        for name in value.split(",")
    }  # fmt: skip
    for name, value in fields:
        if name not in _DROPPED and name not in listed:
            yield name, value


def _content_length(fields: Fields) -> int | None:
    """The one length of the body; None: no field tells of one, and there is none."""
    if any(name == "transfer-encoding" for name, _ in fields):
        raise Refusal(411, "wanted a Content-Length, got a Transfer-Encoding.")
    lengths = [value for name, value in fields if name == "content-length"]
    if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,15}", value) for value in lengths):
        raise Refusal(400, f"wanted one Content-Length, got {', '.join(lengths)!a:.80}.")
    return int(lengths[0]) if lengths else None


def _authority(text: str, *, default_port: int | None) -> tuple[str, int]:
    """Canonical host and port; no user information, no empty port, no leading zero."""
    match = _AUTHORITY.fullmatch(text)
    port = int(match[3]) if match and match[3] else default_port
    if match is None or port is None or port > 65_535:
        raise Refusal(400, f"wanted host:port, got {text!a:.80}.")
    return canonical(match[1] or match[2]), port


def _host_field(host: str, port: int) -> str:
    name = f"[{host}]" if ":" in host else host
    return name if port == 80 else f"{name}:{port}"
