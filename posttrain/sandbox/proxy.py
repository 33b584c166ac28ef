"""The HTTP proxy through which the commands of an attempt reach what its task allows.

It serves, in this process, a socket that listens inside the sandbox's network namespace: a socket
stays in the namespace it was made in, so requests come from inside while connections leave from
here, nothing is mounted and nothing of ours runs inside, as a bind-mounted Unix socket would need.
`CONNECT` and plain HTTP, one request a connection; `egress` decides, `outside` connects. The one
thing that must stay true: nobody is asked about a host that the task does not allow, and whatever a
client sends or leaves out, its connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.core.clock import RealClock
from posttrain.core.errors import SandboxError
from posttrain.core.ports import Clock
from posttrain.core.task import Network
from posttrain.sandbox import egress
from posttrain.sandbox.egress import Exchange, Refusal, Request
from posttrain.sandbox.outside import Outside, cause

_PIECE_BYTES = 1 << 16
_LINGER_S = 1.0
"""So long a client may take to read its last answer."""
_ABRUPT = struct.pack("ii", 1, 0)
"""SO_LINGER (socket(7)): closing resets, so that what was broken off does not look complete."""
_PAUSE_S = 1.0
"""Between two tries to accept, where this process has no descriptor left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """What one sandbox may take of this process. Bytes and requests count over its whole life."""

    max_connections: int = 32
    """At a time; one more is answered with 429."""
    max_requests: int = 10_000
    """After these nothing listens any more."""
    max_bytes: int = 1 << 30
    """In each direction."""
    max_head_bytes: int = egress.MAX_HEAD_BYTES
    head_s: float = 10.0
    """For a request's head to come."""
    connect_s: float = 10.0
    """For a name to be resolved, and again for a connection to be made."""
    idle_s: float = 60.0
    """Without a byte in either direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyStats:
    """Numbers of a proxy."""

    listening: bool
    connections: int
    """Being served now."""
    requests: int
    bytes_out: int
    bytes_in: int


class Proxy:
    """Serves one sandbox. `start` and `close` it, or use it as a context manager.

    `listener` (`socket.socket(fileno=…)` of a descriptor) and `outside` belong to it from now on.
    `tell` is called once for every connection, in the event loop, when its request has ended or was
    refused; it must neither raise nor block.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        network: Network,
        tell: Callable[[Exchange], None],
        outside: Outside | None = None,
        limits: ProxyLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._listener = listener
        self._network = network
        self._tell = tell
        self._outside = outside or Outside()
        self._limits = limits or ProxyLimits()
        self._clock = clock or RealClock()
        self._serving: dict[asyncio.Task[None], socket.socket] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._listening = False
        self._requests = self._bytes_out = self._bytes_in = 0

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve from now on, in the running event loop.

        Raises:
            SandboxError: the socket does not listen.
        """
        if not self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise SandboxError("the proxy of a sandbox was given a socket that does not listen.")
        self._listener.setblocking(False)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # clients inherit it
        self._listen()

    async def close(self) -> None:
        """End every connection; idempotent. The listener is closed before the first wait."""
        self._stop_listening()
        self._listener.close()
        for task in self._serving:
            task.cancel()
        try:
            if self._serving:
                await asyncio.wait(tuple(self._serving))
        finally:
            self._outside.close()

    async def __aenter__(self) -> Proxy:
        self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def stats(self) -> ProxyStats:
        """Numbers so far."""
        return ProxyStats(
            listening=self._listening, connections=len(self._serving), requests=self._requests,
            bytes_out=self._bytes_out, bytes_in=self._bytes_in,
        )  # fmt: skip

    def check(self) -> None:
        """Invariants."""
        assert len(self._serving) <= self._limits.max_connections, "too many connections are served"
        assert self._requests <= self._limits.max_requests + 1, "too many requests were accepted"
        most = max(self._bytes_out, self._bytes_in)
        assert most <= self._limits.max_bytes, "too many bytes were passed on"

    def _listen(self) -> None:
        self._pause = None
        self._listening = True
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _stop_listening(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._listening:
            self._listening = False
            asyncio.get_running_loop().remove_reader(self._listener)

    # --- connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptor or memory is left
            self._stop_listening()
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self._listen)
            return
        client.setblocking(False)
        self._requests += 1
        told = Exchange()
        if self._requests > self._limits.max_requests:
            self._turn_away(client, told, f"all {self._limits.max_requests} requests were made.")
            self._stop_listening()
            self._listener.close()
        elif len(self._serving) >= self._limits.max_connections:
            self._turn_away(client, told, f"{len(self._serving)} connections are open already.")
        else:
            task = asyncio.get_running_loop().create_task(self._serve(client, told))
            self._serving[task] = client
            task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        """Closing is done here since a task that is cancelled early never runs."""
        self._serving.pop(task).close()

    def _turn_away(self, client: socket.socket, told: Exchange, reason: str) -> None:
        """Answer and close at once, so that a flood holds no descriptors."""
        refusal = Refusal(429, reason)
        told.refused(refusal)
        with client, contextlib.suppress(OSError):
            client.send(refusal.answer)
            client.recv(_PIECE_BYTES)  # closing over unread bytes would take the answer back
        self._tell(told)

    async def _serve(self, client: socket.socket, told: Exchange) -> None:
        last, began_s = b"", self._clock.now_s()
        try:
            await self._answer(client, told)
        except Refusal as refusal:
            told.refused(refusal)
            last = refusal.answer
        except OSError as error:
            told.reason = f"broken off: {cause(error)}."
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABRUPT)
            return
        finally:
            told.duration_s = self._clock.now_s() - began_s
            self._tell(told)
        await _part(client, last)

    async def _request(self, client: socket.socket) -> tuple[Request, bytes]:
        """The request and what came after its head."""
        loop, data, seen = asyncio.get_running_loop(), bytearray(), 0
        most = self._limits.max_head_bytes
        try:
            async with asyncio.timeout(self._limits.head_s):
                while (length := egress.head_length(data, seen=seen, most=most)) is None:
                    seen = len(data)
                    data += await loop.sock_recv(client, _PIECE_BYTES)
                    if len(data) == seen:
                        raise Refusal(400, f"wanted a request, got an end after {seen} bytes.")
        except TimeoutError as error:
            reason = f"wanted a request within {self._limits.head_s:g} s, got {len(data)} bytes."
            raise Refusal(408, reason) from error
        return egress.parse(bytes(data[:length])), bytes(data[length:])

    async def _answer(self, client: socket.socket, told: Exchange) -> None:
        """Read a request, ask for leave, connect, and pass on what both sides say."""
        request, rest = await self._request(client)
        told.method, told.host, told.port = request.method, request.host, request.port
        decision = egress.admit(self._network, request.host, request.port)
        if not decision.allowed:
            raise Refusal(403, decision.reason)
        upstream, told.address = await self._outside.connect(
            request.host, request.port, within_s=self._limits.connect_s
        )
        told.allowed = True
        failure: BaseException | None = None
        with upstream:
            try:
                await self._pass_on(client, upstream, told, request, rest)
            except* TimeoutError:
                idle = f"{self._limits.idle_s:g} s without a byte"
                failure = OSError(errno.ETIMEDOUT, idle)
            except* OSError as group:
                failure = group.exceptions[0]
        if failure is not None:
            raise failure
        told.reason = decision.reason

    async def _pass_on(
        self,
        client: socket.socket,
        upstream: socket.socket,
        told: Exchange,
        request: Request,
        rest: bytes,
    ) -> None:
        """Until both sides have ended or, without a tunnel, the answer has."""
        async with asyncio.timeout(self._limits.idle_s) as idle, asyncio.TaskGroup() as both:
            out = functools.partial(
                _flow, client, upstream, lambda size: self._count(told, idle, out=size)
            )
            back = functools.partial(
                _flow, upstream, client, lambda size: self._count(told, idle, back=size)
            )
            if request.is_tunnel:
                await asyncio.get_running_loop().sock_sendall(client, egress.ESTABLISHED)
                both.create_task(out(rest))
                await back()
            else:
                body = rest[: request.body_bytes]
                left = request.body_bytes - len(body)
                sending = both.create_task(out(request.head + body, left=left))
                await back()
                sending.cancel()

    def _count(self, told: Exchange, idle: asyncio.Timeout, *, out: int = 0, back: int = 0) -> None:
        """Bytes are about to pass, where they are no more than the sandbox has left."""
        most = self._limits.max_bytes
        if self._bytes_out + out > most or self._bytes_in + back > most:
            raise OSError(errno.EDQUOT, f"all {most} bytes of the sandbox were passed on")
        self._bytes_out += out
        self._bytes_in += back
        told.bytes_out += out
        told.bytes_in += back
        if not idle.expired():  # an expired one cannot be put off
            idle.reschedule(asyncio.get_running_loop().time() + self._limits.idle_s)


async def _flow(
    source: socket.socket,
    sink: socket.socket,
    count: Callable[[int], None],
    first: bytes = b"",
    *,
    left: int | None = None,
) -> None:
    """Send `first`, then `left` bytes of the source; None: all to its end, which the sink is told
    of, and so it is where the source ends early. `count` is told of every piece before it is sent
    and raises OSError where it must not be.
    """
    loop = asyncio.get_running_loop()
    piece = first
    while True:
        if piece:
            count(len(piece))
            await loop.sock_sendall(sink, piece)
        if left == 0:
            return
        most = _PIECE_BYTES if left is None else min(left, _PIECE_BYTES)
        piece = await loop.sock_recv(source, most)
        if not piece:
            break
        left = None if left is None else left - len(piece)
        await asyncio.sleep(0)  # sockets that are always ready would keep the loop
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


async def _part(client: socket.socket, last: bytes) -> None:
    """Say the last thing and let it arrive: closing over unread bytes would take it back."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_LINGER_S):
            await loop.sock_sendall(client, last)
            client.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(client, _PIECE_BYTES):
                await asyncio.sleep(0)  # the deadline would else never come
