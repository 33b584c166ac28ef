"""The proxy of a sandbox, on loopback alone: 127.0.0.2 and 127.0.0.3 stand for public addresses
(BR-42: a denied host causes no query; what is reached is what was checked).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from posttrain.core.errors import SandboxError
from posttrain.core.task import Network
from posttrain.sandbox import egress, outside, proxy
from posttrain.sandbox.egress import ESTABLISHED, Decision, Exchange
from posttrain.sandbox.outside import Outside, SystemResolver, public
from posttrain.sandbox.proxy import Proxy, ProxyLimits

PUBLIC, OTHER, PRIVATE = "127.0.0.2", "127.0.0.3", "127.0.0.1"
HOST = "files.example.org"
PATIENCE_S = 20.0
"""A test that hangs fails after this."""

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


def check(address: str) -> Decision:
    if address in (PUBLIC, OTHER):
        return Decision(allowed=True, reason="a public address")
    return egress.reachable(address)


@dataclass
class Names:
    """A resolver that answers a name's questions in order, the last answer again and again."""

    answers: dict[str, list[Sequence[str]]]
    asked: list[str] = field(default_factory=list)
    closed: bool = False
    gate: asyncio.Event | None = None

    async def addresses(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if self.gate is not None:
            await self.gate.wait()
        left = self.answers.get(host)
        if left is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return left.pop(0) if len(left) > 1 else left[0]

    def close(self) -> None:
        self.closed = True


@dataclass
class Host:
    """A server outside; `address` as `host:port` of the name that leads to it."""

    port: int
    visits: int = 0


@contextlib.asynccontextmanager
async def host(
    serve: Callable[[Reader, Writer], Awaitable[None]], address: str = PUBLIC, port: int = 0
) -> AsyncIterator[Host]:
    found = Host(port=0)
    tasks = set()

    async def visit(reader: Reader, writer: Writer) -> None:
        found.visits += 1
        tasks.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            try:
                await serve(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    server = await asyncio.start_server(visit, address, port)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Stage:
    """A proxy and its clients."""

    proxy: Proxy
    names: Names
    port: int
    told: asyncio.Queue[Exchange]

    @contextlib.asynccontextmanager
    async def client(self, data: bytes = b"") -> AsyncIterator[tuple[Reader, Writer]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def tunnel(self, port: int, name: str = HOST) -> AsyncIterator[tuple[Reader, Writer]]:
        async with self.client(connect(port, name)) as (reader, writer):
            assert await reader.readexactly(len(ESTABLISHED)) == ESTABLISHED
            yield reader, writer

    async def ask(self, data: bytes) -> bytes:
        async with self.client(data) as (reader, _):
            return await reader.read()

    async def status(self, data: bytes) -> int:
        answer = await self.ask(data)
        assert answer.startswith(b"HTTP/1.1 "), answer
        return int(answer.split()[1])


def connect(port: int, name: str = HOST) -> bytes:
    return f"CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def staged(
    *allow: str, names: Names | None = None, limits: ProxyLimits | None = None
) -> AsyncIterator[Stage]:
    listener = socket.create_server(("127.0.0.1", 0))
    names = names or Names({HOST: [(PUBLIC,)]})
    told: asyncio.Queue[Exchange] = asyncio.Queue()
    network = Network(allow=allow) if allow else Network(open=True)
    served = Proxy(
        listener, network=network, tell=told.put_nowait,
        outside=Outside(resolver=names, check=check), limits=limits,
    )  # fmt: skip
    port = listener.getsockname()[1]
    async with asyncio.timeout(PATIENCE_S), served:
        yield Stage(proxy=served, names=names, port=port, told=told)
        served.check()
    assert served.stats().connections == 0
    assert names.closed


def played(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()

    asyncio.run(main())


async def shout(reader: Reader, writer: Writer) -> None:
    """Upper case of each line; BYE at the end."""
    while line := await reader.readline():
        writer.write(line.upper())
        await writer.drain()
    writer.write(b"BYE")


async def silent(reader: Reader, writer: Writer) -> None:
    await reader.read()


def reset(writer: Writer) -> None:
    """Vanish: the other side gets a reset instead of an end."""
    found = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# --- what passes ------------------------------------------------------------------------------


def test_a_tunnel_passes_bytes_both_ways_and_each_end_by_itself():
    async def body():
        async with host(shout) as there, staged(f"{HOST}:{there.port}") as stage:
            async with stage.client(connect(there.port) + b"early\n") as (reader, writer):
                assert await reader.readexactly(len(ESTABLISHED)) == ESTABLISHED
                assert await reader.readline() == b"EARLY\n"
                writer.write(b"late\n")
                assert await reader.readline() == b"LATE\n"
                assert stage.told.empty()
                writer.write_eof()
                assert await reader.read() == b"BYE"
            told = await stage.told.get()
            assert (told.method, told.host, told.port) == ("CONNECT", HOST, there.port)
            assert told.allowed
            assert told.reason == f"the task lists {HOST}:{there.port}."
            assert (told.address, told.bytes_out, told.bytes_in) == (PUBLIC, 11, 14)
            assert told.duration_s >= 0
            assert stage.names.asked == [HOST]

    played(body)


def test_much_passes_in_both_directions_at_once():
    size = 3_000_000

    async def echo(reader, writer):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()

    async def body():
        async with host(echo) as there, staged(f"{HOST}:{there.port}") as stage:
            async with stage.tunnel(there.port) as (reader, writer):
                back = asyncio.ensure_future(reader.readexactly(size))
                data = bytes(range(250)) * (size // 250)
                writer.write(data)
                await writer.drain()
                assert await back == data
            told = await stage.told.get()
            assert (told.bytes_out, told.bytes_in) == (size, size)
            stats = stage.proxy.stats()
            assert (stats.bytes_out, stats.bytes_in, stats.requests) == (size, size, 1)

    played(body)


def test_a_plain_request_reaches_its_host_rewritten_and_its_answer_ends_the_connection():
    seen = []

    async def serve(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

    async def body():
        async with host(serve) as there, staged(f"*.example.org:{there.port}") as stage:
            answer = await stage.ask(
                f"GET http://{HOST}:{there.port}/a?b HTTP/1.1\r\nHost: evil.example.com\r\n"
                "Proxy-Authorization: Basic x\r\nAccept: */*\r\n\r\n".encode()
            )
            assert answer == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
            told = await stage.told.get()
            assert (told.method, told.host, told.port) == ("GET", HOST, there.port)
            assert told.bytes_in == len(answer)
            assert told.reason == f"the task lists *.example.org:{there.port}."
            assert seen == [
                f"GET /a?b HTTP/1.1\r\nHost: {HOST}:{there.port}\r\naccept: */*\r\n"
                "Connection: close\r\n\r\n".encode()
            ]

    played(body)


def test_a_body_passes_to_its_last_byte_and_no_further():
    """A second request behind the first would reach whatever its Host field names."""
    seen = []

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        seen.append(await reader.readexactly(100_000))
        writer.write(b"done")
        writer.write_eof()
        seen.append(await reader.read())

    async def body():
        async with host(serve) as there, staged(f"{HOST}:{there.port}") as stage:
            head = f"POST http://{HOST}:{there.port}/ HTTP/1.1\r\nContent-Length: 100000\r\n\r\n"
            more = b"GET / HTTP/1.1\r\nHost: other.example.org\r\n\r\n"
            async with stage.client(head.encode() + b"x" * 60_000) as (reader, writer):
                writer.write(b"x" * 40_000 + more)
                assert await reader.read() == b"done"
            await stage.told.get()
        assert seen == [b"x" * 100_000, b""]

    played(body)


def test_a_client_that_has_ended_its_side_still_gets_the_answer():
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nlate")

    async def body():
        async with host(serve) as there, staged(f"{HOST}:{there.port}") as stage:
            request = f"GET http://{HOST}:{there.port}/ HTTP/1.0\r\n\r\n".encode()
            async with stage.client(request) as (reader, writer):
                writer.write_eof()
                assert (await reader.read()).endswith(b"late")

    played(body)


def test_an_answer_that_comes_before_the_whole_body_ends_the_request():
    """As 413 does; nobody waits for the rest of the body."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")

    async def body():
        async with host(serve) as there, staged(f"{HOST}:{there.port}") as stage:
            head = f"POST http://{HOST}:{there.port}/ HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
            async with stage.client(head.encode() + b"x") as (reader, _):
                assert b"413" in await reader.read()
                told = await stage.told.get()
                assert told.reason == f"the task lists {HOST}:{there.port}."

    played(body)


def test_the_next_address_of_a_name_is_tried():
    async def body():
        async with host(shout, OTHER) as there:
            names = Names({HOST: [(PUBLIC, OTHER)]})
            async with (
                staged(f"{HOST}:{there.port}", names=names) as stage,
                stage.tunnel(there.port) as (reader, writer),
            ):
                writer.write_eof()
                assert await reader.read() == b"BYE"
                assert (await stage.told.get()).address == OTHER

    played(body)


# --- what does not ----------------------------------------------------------------------------


def test_a_denied_host_is_refused_without_any_question_BR_42():
    async def body():
        async with host(shout) as there, staged(f"{HOST}:{there.port}") as stage:
            for name, port in (
                ("abc.example.test", there.port), (HOST, there.port % 65_535 + 1),
                (f"x.{HOST}", there.port), (f"{HOST}.evil.example", there.port),
                (PUBLIC, there.port),
            ):  # fmt: skip
                assert await stage.status(connect(port, name)) == 403
                plain = f"GET http://{name}:{port}/ HTTP/1.1\r\nHost: {HOST}\r\n\r\n"
                assert await stage.status(plain.encode()) == 403
                for _ in range(2):
                    told = await stage.told.get()
                    assert (told.allowed, told.host, told.port) == (False, name, port)
                    assert told.reason == f"the task does not list {name}:{port}."
                    assert told.address is None
            assert stage.names.asked == []
            assert there.visits == 0

    played(body)


@pytest.mark.parametrize(
    "answer",
    [(PRIVATE,), ("10.0.0.1",), ("169.254.169.254",), ("fd00:ec2::254",), ("::ffff:127.0.0.1",),
     (PUBLIC, PRIVATE), (PUBLIC, OTHER, PUBLIC, OTHER, PUBLIC, "::1"), ("fe80::1%lo",),
     ("elsewhere.example.org",)],
)  # fmt: skip
def test_a_name_that_leads_to_a_private_address_is_refused(answer):
    async def body():
        async with host(shout) as there, host(shout, PRIVATE, there.port) as trap:
            names = Names({HOST: [answer]})
            async with staged(f"{HOST}:{there.port}", names=names) as stage:
                text = await stage.ask(connect(there.port))
                assert text.startswith(b"HTTP/1.1 403 ")
                told = await stage.told.get()
                assert not told.allowed
                assert told.address in answer
                assert told.address != PUBLIC
                assert told.address.encode() not in text, "addresses are none of the policy's"
            assert (there.visits, trap.visits) == (0, 0)

    played(body)


def test_a_private_address_is_refused_without_a_question_though_the_network_is_open():
    async def body():
        async with host(shout, PRIVATE) as trap, staged() as stage:
            for name in (PRIVATE, "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]"):
                assert await stage.status(connect(trap.port, name)) == 403
            for name in ("2130706433", "0x7f.1", "127.1", "localhost", "0177.0.0.1", "[::1%25lo]"):
                assert await stage.status(connect(trap.port, name)) == 400
            assert stage.names.asked == []
            assert trap.visits == 0

    played(body)


def test_a_name_that_changes_its_address_never_leads_to_the_private_one():
    """DNS rebinding: what was checked is what is connected, and each request is checked anew."""

    async def body():
        async with host(shout) as there, host(shout, PRIVATE, there.port) as trap:
            names = Names({HOST: [(PUBLIC,), (PRIVATE,)]})
            async with staged(f"{HOST}:{there.port}", names=names) as stage:
                async with stage.tunnel(there.port) as (reader, writer):
                    assert names.asked == [HOST]
                    writer.write_eof()
                    assert await reader.read() == b"BYE"
                assert (await stage.told.get()).address == PUBLIC
                assert await stage.status(connect(there.port)) == 403
                assert names.asked == [HOST, HOST]
            assert (there.visits, trap.visits) == (1, 0)

    played(body)


def test_what_cannot_be_reached_is_told_apart_from_what_may_not():
    async def body():
        with socket.create_server((PUBLIC, 0)) as taken:
            port = taken.getsockname()[1]
        names = Names({HOST: [(PUBLIC,)], "empty.example.org": [()]})
        async with staged(names=names) as stage:
            for name, reason in (
                (HOST, "Connection refused"), ("empty.example.org", "it has no address"),
                ("unknown.example.org", "Name or service not known"),
            ):  # fmt: skip
                answer = await stage.ask(connect(port, name))
                assert answer.startswith(b"HTTP/1.1 502 ")
                assert PUBLIC.encode() not in answer
                told = await stage.told.get()
                assert told.allowed
                assert told.reason == f"{name}:{port} cannot be reached: {reason}."

    played(body)


def test_a_resolver_that_never_answers_costs_a_limited_time():
    async def body():
        names = Names({}, gate=asyncio.Event())
        async with staged(names=names, limits=ProxyLimits(connect_s=0.01)) as stage:
            assert await stage.status(connect(443)) == 504
            told = await stage.told.get()
            assert (told.allowed, told.reason) == (True, f"{HOST}:443 does not answer.")

    played(body)


# --- hostile clients --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400), (b"SSH-2.0-x\r\n\r\n", 400),
        (b"\x05\x01\x00", 400), (b"\0" * 70_000, 400), (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.0\n\n", 400), (b"\r\n\r\n", 400), (b"CONNECT\r\n\r\n", 400),
        (b"CONNECT files.example.org:443 HTTP/1.1\r\n folded\r\n\r\n", 400),
        (b"TRACE http://files.example.org/ HTTP/1.1\r\n\r\n", 405),
        (b"POST http://files.example.org/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"A" * 16_384, 431), (b"A" * 5_000_000, 431),
    ],
)  # fmt: skip
def test_garbage_is_answered_and_the_connection_closed(garbage, status):
    async def body():
        async with staged() as stage:
            async with stage.client() as (reader, writer):
                sending = asyncio.ensure_future(send(writer, garbage))
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 %d " % status)
                await sending
            told = await stage.told.get()
            assert (told.method, told.host, told.port, told.allowed) == (None, None, None, False)
            assert stage.names.asked == []

    async def send(writer, data):
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()

    played(body)


def test_a_client_that_ends_before_its_request_is_told_so():
    async def body():
        async with staged() as stage:
            for data in (b"", b"CONNECT files"):
                async with stage.client(data) as (reader, writer):
                    writer.write_eof()
                    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
                reason = f"wanted a request, got an end after {len(data)} bytes."
                assert (await stage.told.get()).reason == reason

    played(body)


def test_a_head_that_trickles_in_runs_out_of_time():
    async def body():
        async with (
            staged(limits=ProxyLimits(head_s=0.02)) as stage,
            stage.client(b"CONNECT files.example.org:443 HTTP/1.1\r\nX: ") as (reader, writer),
        ):
            answer = asyncio.ensure_future(reader.read())
            while not answer.done():
                writer.write(b"x")
                await asyncio.sleep(0)
            assert (await answer).startswith(b"HTTP/1.1 408 ")
            assert "within 0.02 s" in (await stage.told.get()).reason

    played(body)


def test_more_connections_than_there_may_be_are_turned_away_and_room_is_made_again():
    async def body():
        async with host(silent) as there:
            limits = ProxyLimits(max_connections=2)
            async with staged(f"{HOST}:{there.port}", limits=limits) as stage:
                async with stage.tunnel(there.port), stage.tunnel(there.port):
                    for data in (b"", connect(there.port), connect(443)):
                        assert await stage.status(data) == 429
                        told = await stage.told.get()
                        assert told.reason == "2 connections are open already."
                        assert not told.allowed
                    with socket.create_connection(("127.0.0.1", stage.port)) as client:
                        client.sendall(connect(443))  # unread at the close, it would reset
                        client.setblocking(False)
                        loop = asyncio.get_running_loop()
                        answer = await loop.sock_recv(client, 1000)
                        assert answer.startswith(b"HTTP/1.1 429 ")
                        assert await loop.sock_recv(client, 1000) == b""
                        await stage.told.get()
                    stage.proxy.check()
                    assert stage.proxy.stats().connections == 2
                for _ in range(2):
                    await stage.told.get()
                async with stage.tunnel(there.port):
                    pass
                assert stage.names.asked == [HOST] * 3

    played(body)


def test_after_its_last_request_nothing_listens_for_a_sandbox():
    """So a flood ends costing this process anything."""

    async def body():
        async with host(silent) as there:
            limits = ProxyLimits(max_requests=2)
            async with staged(f"{HOST}:{there.port}", limits=limits) as stage:
                async with stage.tunnel(there.port) as (_, writer):
                    assert await stage.status(connect(443)) == 403
                    assert await stage.status(connect(there.port)) == 429
                    for _ in range(2):
                        with pytest.raises(ConnectionRefusedError):
                            await asyncio.open_connection("127.0.0.1", stage.port)
                    assert not stage.proxy.stats().listening
                    writer.write(b"still here")
                reasons = [(await stage.told.get()).reason for _ in range(3)]
                assert reasons[1] == "all 2 requests were made."
                assert stage.told.empty()

    played(body)


def test_bytes_are_counted_over_all_connections_in_each_direction():
    async def serve(reader, writer):
        writer.write(b"x" * 30_000)
        await silent(reader, writer)

    async def body():
        limits = ProxyLimits(max_bytes=80_000)
        async with host(serve) as there, staged(limits=limits) as stage:
            for allowed in (True, True, False):
                async with stage.tunnel(there.port) as (reader, _):
                    if allowed:
                        await reader.readexactly(30_000)
                    else:
                        with pytest.raises(ConnectionResetError):
                            await reader.read()
            reasons = [(await stage.told.get()).reason for _ in range(3)]
            assert "broken off: all 80000 bytes of the sandbox were passed on." in reasons
            stage.proxy.check()
            assert stage.proxy.stats().bytes_in <= 80_000

    played(body)


def test_a_connection_without_a_byte_is_ended():
    async def body():
        async with (
            host(silent) as there,
            staged(limits=ProxyLimits(idle_s=0.02)) as stage,
            stage.tunnel(there.port) as (reader, _),
        ):
            with pytest.raises(ConnectionResetError):
                await reader.read()
            told = await stage.told.get()
            assert (told.allowed, told.reason) == (True, "broken off: 0.02 s without a byte.")

    played(body)


def test_every_byte_puts_the_end_of_a_silent_connection_off(monkeypatch):
    deadlines = []
    make = asyncio.timeout

    def timeout(delay_s):
        made = make(delay_s)
        deadlines.extend([made] if delay_s == 33.25 else [])
        return made

    async def body():
        limits = ProxyLimits(idle_s=33.25)
        async with host(shout) as there, staged(limits=limits) as stage:
            monkeypatch.setattr(proxy.asyncio, "timeout", timeout)
            async with stage.tunnel(there.port) as (reader, writer):
                (deadline,) = deadlines
                for _ in range(3):
                    before = deadline.when()
                    writer.write(b"ping\n")
                    assert await reader.readline() == b"PING\n"
                    assert deadline.when() > before

    played(body)


def test_a_client_that_does_not_read_what_it_asked_for_is_ended():
    async def pour(reader, writer):
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()

    async def body():
        async with host(pour) as there, staged(limits=ProxyLimits(idle_s=0.05)) as stage:
            with socket.create_connection(("127.0.0.1", stage.port)) as client:
                client.sendall(connect(there.port))
                assert (await stage.told.get()).reason == "broken off: 0.05 s without a byte."

    played(body)


def test_a_client_that_vanishes_takes_its_connection_outside_along():
    ended = asyncio.Event()

    async def serve(reader, writer):
        try:
            await reader.read()
        finally:
            ended.set()

    async def body():
        async with host(serve) as there, staged() as stage:
            async with stage.tunnel(there.port) as (_, writer):
                reset(writer)
            await ended.wait()
            told = await stage.told.get()
            assert (told.allowed, told.reason) == (True, "broken off: Connection reset by peer.")
            async with stage.client(b"CONN") as (_, writer):
                await writer.drain()
                reset(writer)
            told = await stage.told.get()
            assert (told.allowed, told.reason) == (False, "broken off: Connection reset by peer.")

    played(body)


@pytest.mark.parametrize("plain", [False, True])
def test_a_host_that_vanishes_does_not_look_like_one_that_ended(plain):
    async def serve(reader, writer):
        await reader.readline()
        writer.write(b"half")
        await writer.drain()
        await reader.readuntil(b"go")
        reset(writer)

    async def body():
        async with host(serve) as there, staged() as stage:
            head = f"POST http://{HOST}:{there.port}/ HTTP/1.0\r\nContent-Length: 2\r\n\r\n"
            opening = head.encode() if plain else connect(there.port) + b"\n"
            async with stage.client(opening) as (reader, writer):
                await reader.readexactly(4 if plain else len(ESTABLISHED) + 4)
                writer.write(b"go")
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            told = await stage.told.get()
            assert (told.allowed, told.bytes_in) == (True, 4)
            assert told.reason == "broken off: Connection reset by peer."

    played(body)


@dataclass
class Spring:
    """A socket that is always ready."""

    left: int

    def recv(self, size: int) -> bytes:
        self.left -= 1
        assert self.left, "the event loop was never let go"
        return b"x" * size

    def send(self, data: bytes) -> int:
        return len(data)

    def shutdown(self, how: int) -> None:
        pass

    def gettimeout(self) -> float:
        return 0.0


def test_a_client_that_never_stops_sending_does_not_hold_the_event_loop(monkeypatch):
    """Sockets that are always ready answer `loop.sock_recv` without a turn of the loop."""
    monkeypatch.setattr(proxy, "_LINGER_S", 0.01)
    asyncio.run(proxy._part(Spring(1_000_000), b"last"))

    async def body():
        flow = proxy._flow(Spring(1_000_000), Spring(1), lambda size: None)
        passing = asyncio.ensure_future(flow)
        for _ in range(10):
            await asyncio.sleep(0)
        passing.cancel()
        await asyncio.wait([passing])
        assert passing.cancelled()

    played(body)


# --- life -------------------------------------------------------------------------------------


def test_closing_ends_what_is_served_and_lets_go_of_the_port():
    async def body():
        async with host(silent) as there, staged() as stage:
            async with stage.tunnel(there.port) as (reader, _), stage.client() as (other, _):
                while stage.proxy.stats().connections < 2:
                    await asyncio.sleep(0)
                await stage.proxy.close()
                await stage.proxy.close()
                assert await reader.read() == b""
                assert await other.read() == b""
                assert stage.names.closed
                told = [await stage.told.get() for _ in range(2)]
                assert {one.reason for one in told} == {"the sandbox was closed."}
                assert sorted(one.allowed for one in told) == [False, True]
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", stage.port)

    played(body)


def test_a_client_accepted_at_the_moment_of_closing_is_let_go():
    async def body():
        async with staged() as stage, stage.client() as (reader, _):
            stage.proxy._accept()
            await stage.proxy.close()
            assert await reader.read() == b""

    played(body)


def test_a_socket_that_does_not_listen_is_refused():
    async def body():
        with socket.socket() as idle:
            served = Proxy(idle, network=Network(), tell=print, outside=Outside(resolver=Names({})))
            with pytest.raises(SandboxError, match="does not listen"):
                served.start()
            await served.close()

    played(body)


class Starved(socket.socket):
    """No descriptor is left for the first client."""

    failures = 1

    def accept(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_lack_of_descriptors_is_waited_out(monkeypatch):
    monkeypatch.setattr(proxy, "_PAUSE_S", 0.001)

    async def body():
        listener = Starved()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        outside_ = Outside(resolver=Names({}))
        async with (
            asyncio.timeout(PATIENCE_S),
            Proxy(listener, network=Network(), tell=lambda told: None, outside=outside_),
        ):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(connect(443))
            assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
            writer.close()
            await writer.wait_closed()

    played(body)


# --- the way out ------------------------------------------------------------------------------


def test_the_system_is_asked_for_exactly_the_name(monkeypatch):
    """The final dot: no search list makes another name of it."""
    asked = []

    def getaddrinfo(name, port, **options):
        asked.append((name, port))
        found = [("1.1.1.1", 0), ("2606:4700::1111", 0, 0, 0), ("1.1.1.1", 0)]
        return [(0, options["type"], 6, "", address) for address in found]

    monkeypatch.setattr(outside.socket, "getaddrinfo", getaddrinfo)
    resolver = SystemResolver()
    found = asyncio.run(resolver.addresses(HOST))
    resolver.close()
    resolver.close()
    assert found == ("1.1.1.1", "2606:4700::1111")
    assert asked == [(b"files.example.org.", None)]


def test_an_address_of_this_machine_is_not_public_whatever_it_looks_like(monkeypatch):
    """Behind it are services that its firewall keeps from everybody else."""
    assert public("127.0.0.1").reason == "a loopback address"
    monkeypatch.setattr(egress, "reachable", lambda _: Decision(allowed=True, reason="public"))
    assert public("127.0.0.1").reason == "an address of the proxy's own machine"
    assert not public("127.0.0.1").allowed
    assert public("192.0.2.77").allowed
