"""The network of a sandbox: none, or a proxy for what its task allows (BR-42)."""

import asyncio
import os
import socket
import threading
import uuid

import pytest

from posttrain.core.task import Environment, Network
from posttrain.sandbox import bubblewrap, outside, proxy
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.egress import Decision

FETCH = """
import sys, urllib.request, urllib.error
try: print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())
except urllib.error.HTTPError as error: print(error.code)
except OSError as error: print(type(error).__name__)
"""
DIRECT = """
import socket, sys
kind, where = sys.argv[1], sys.argv[2:]
try:
    if kind == "unix":
        socket.socket(socket.AF_UNIX).connect(where[0].replace("@", chr(0)))
    elif kind == "udp":
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.sendto(b"x", (where[0], int(where[1])))
    elif kind == "name":
        socket.getaddrinfo(where[0], 80)
    elif kind == "ping":
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
        s.sendto(bytes((8, 0, 0xF7, 0xFF, 0, 0, 0, 0)), (where[0], 0))
    else:
        socket.create_connection((where[0], int(where[1])), timeout=2)
    print("open")
except OSError as error: print(type(error).__name__)
"""


class Names:
    """A resolver that knows one name."""

    def __init__(self, known):
        self.known, self.asked = known, []

    async def addresses(self, host):
        self.asked.append(host)
        return self.known.get(host, [])

    def close(self):
        pass


@pytest.fixture
def web():
    """A server on the host's loopback; how often it was reached is counted."""
    listener = socket.create_server(("127.0.0.1", 0))
    reached = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                head = connection.recv(4096)
                reached.append(head)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1], reached
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def names(monkeypatch):
    """Sandboxes' proxies resolve one name to the host's loopback and may reach that."""
    names = Names({"tasks.example.org": ["127.0.0.1"]})

    def opened(listener, **given):
        way = outside.Outside(
            resolver=names, check=lambda address: Decision(allowed=True, reason="a test")
        )
        return proxy.Proxy(listener, outside=way, **given)

    monkeypatch.setattr(bubblewrap, "Proxy", opened)
    return names


def python(sandbox, source, *arguments):
    return sandbox.exec(("python3", "-c", source, *arguments))


def test_a_task_reaches_what_it_lists_through_the_proxy_and_nothing_else(machine, web, names):
    port, reached = web
    told = []
    environment = Environment(network=Network(allow=(f"tasks.example.org:{port}",)))

    async def body():
        async with BubblewrapSandboxes(tell=told.append) as source:
            async with source.lease(environment) as sandbox:
                good = f"http://tasks.example.org:{port}/x"
                assert (await python(sandbox, FETCH, good)).stdout == "hello\n"
                other = await python(sandbox, FETCH, f"http://other.example.org:{port}/")
                assert other.stdout == "403\n"
                assert names.asked == ["tasks.example.org"]
                direct = await python(sandbox, DIRECT, "tcp", "127.0.0.1", str(port))
                assert direct.stdout != "open\n"
                slow = await sandbox.exec(("sleep", "9"), timeout_s=0.2)
                assert slow.timed_out
                assert (await python(sandbox, FETCH, good)).stdout == "hello\n"
                sealed = await sandbox.seal()
            await sealed.close()

    asyncio.run(body())
    assert len(reached) == 2
    assert [(each.host, each.allowed) for each in told] == [
        ("tasks.example.org", True), ("other.example.org", False), ("tasks.example.org", True),
    ]  # fmt: skip


INSIDE = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
with socket.create_connection(listener.getsockname(), timeout=2) as line:
    listener.accept()[0].sendall(b"own")
    print(line.recv(3).decode())
"""


@pytest.fixture
def paths(tmp_path):
    """Sockets of the host that listen under a path, by where they are."""
    folders = [folder for folder in ("/run", "/tmp", str(tmp_path)) if os.access(folder, os.W_OK)]
    found = []
    for folder in folders:
        found.append(socket.socket(socket.AF_UNIX))
        found[-1].bind(f"{folder}/posttrain-{uuid.uuid4().hex}")
        found[-1].listen()
    names = [listener.getsockname() for listener in found]
    yield names
    for listener in found:
        listener.close()
    for name in names:
        os.unlink(name)


def test_sockets_under_paths_are_out_of_reach_and_the_own_loopback_works_BR_42(inside, paths):
    for path in paths:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(path)

    async def body(sandbox):
        for path in paths:
            assert (await python(sandbox, DIRECT, "unix", path)).stdout != "open\n"
        assert (await python(sandbox, DIRECT, "ping", "192.0.2.1")).stdout not in ("open\n", "")
        assert (await python(sandbox, INSIDE)).stdout == "own\n"

    inside(body)


def test_without_a_list_there_is_no_way_out(inside, web):
    port, reached = web
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0posttrain-probe")
    abstract.listen()
    resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    resolver.bind(("127.0.0.1", 0))
    resolver.setblocking(False)

    async def body(sandbox):
        for kind, *where in (
            ("tcp", "127.0.0.1", str(port)), ("tcp", "127.0.0.1", "3128"),
            ("tcp", "169.254.169.254", "80"), ("tcp", "192.0.2.1", "80"),
            ("unix", "@posttrain-probe"), ("name", "abc.example.test"),
        ):  # fmt: skip
            result = await python(sandbox, DIRECT, kind, *where)
            assert result.stdout.strip() not in ("open", ""), (kind, where, result)
        await python(sandbox, DIRECT, "udp", "127.0.0.1", str(resolver.getsockname()[1]))
        shown = await sandbox.exec(("env",))
        assert "proxy" not in shown.stdout.lower()

    try:
        inside(body)
        with pytest.raises(BlockingIOError):
            resolver.recv(10)
        assert reached == []
    finally:
        abstract.close()
        resolver.close()
