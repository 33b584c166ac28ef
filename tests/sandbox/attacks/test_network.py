"""Reaching anything but oneself (BR-42)."""

import contextlib
import os
import socket

from posttrain.core.task import Environment, Network
from tests.sandbox.attacks.attack import Family
from tests.sandbox.attacks.probe import Held, variants

FAMILY = Family("network")
ALONE = "a network namespace with nothing in it but loopback"


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


@FAMILY.attack("connect to a server on the host's loopback", held_by=ALONE)
def connect_to_host(given):
    socket.create_connection(("127.0.0.1", given["port"]), timeout=2).close()


@FAMILY.attack(
    "send something outside, or to the metadata service",
    held_by=ALONE,
    optional="a machine with a way outside",
)
def send_outside(given):
    def send(address):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            out.connect((address, 9))  # Which sends nothing, but needs a way there.

    variants(lambda: send("192.0.2.1"), lambda: send("169.254.169.254"))


def ask_for_name(given):
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.sendto(given["marker"].encode(), ("127.0.0.1", given["resolver"]))
    with contextlib.suppress(OSError):
        socket.getaddrinfo(given["marker"] + ".example.test", 80)


@FAMILY.attack(
    "carry something out by asking a resolver for a name",
    held_by=ALONE + "; no resolver is named inside",
)
async def ask_resolver(place):
    await place.run(ask_for_name)
    with contextlib.suppress(BlockingIOError):
        while place.resolver.recv(4096) != place.marker.encode():
            pass
        return
    raise Held("nothing came")


@FAMILY.attack("connect to an abstract socket of the host", held_by=ALONE)
def connect_to_abstract(given):
    with socket.socket(socket.AF_UNIX) as out:
        out.connect("\0" + given["abstract"])


@FAMILY.attack(
    "connect to a socket that is a file of the host",
    held_by="none of the host's files but /usr and a small /etc are inside",
)
def connect_to_file(given):
    with socket.socket(socket.AF_UNIX) as out:
        out.connect(given["socket"])


@FAMILY.attack(
    "make packets by hand, or read all that pass",
    held_by="no capabilities, and seccomp: no packet sockets",
    root=True,
)
def make_packets(given):
    variants(
        lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
        lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close(),
    )


@FAMILY.attack(
    "list the host's network interfaces",
    held_by=ALONE,
    optional="a machine with interfaces",
)
def list_interfaces(given):
    if not {name for _, name in socket.if_nameindex()} - {"lo"}:
        raise Held("only loopback")


@FAMILY.attack(
    "reach the host's loopback through the proxy of a task whose network is open",
    held_by="the proxy connects to public addresses only",
    control="the same address without a proxy",
    environment=Environment(network=Network(open=True)),
)
def reach_by_proxy(given):
    way = os.environ.get("http_proxy", "").rpartition("/")[2]
    if not way:
        socket.create_connection(("127.0.0.1", given["port"]), timeout=2).close()
        return
    host, _, port = way.partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as line:
        line.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % given["port"])
        answer = line.recv(4096).split(b"\r\n")[0].decode()
    if " 200 " not in answer:
        raise Held(answer)
