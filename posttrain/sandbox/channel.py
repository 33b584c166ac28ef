"""A line to a process this one keeps, and how that process serves it.

A thread of its own starts the process, reads its answers and collects it at its end; so the process
may ask the kernel to die with that thread, and a loop that lags delays nobody's time limits. The
one thing that must stay true: every request is answered, by the process or by its loss.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import posttrain
from posttrain.core.errors import SandboxError
from posttrain.sandbox import wire

Answer = concurrent.futures.Future[wire.Frame]
Listener = Callable[[str, bytes], None]
_MOST_FILES = 16
_SEND_HERE_BYTES = 1 << 16
"""Larger requests are sent from a thread, since sending them may block."""
ROOT = str(Path(posttrain.__file__).parents[1])
"""Folder that this package was imported from."""
_PROGRAM = (
    "import sys; root, module, *search = sys.argv[1:]; sys.path.insert(0, root); import posttrain; "
    "sys.path[:] = [*(p for p in sys.path[1:] if p not in search), *search]; "
    "import importlib; importlib.import_module(module).main()"
)
"""The process has this very package, whatever its search path holds before it."""


def spawn(
    module: str,
    descriptor: int,
    *,
    options: Sequence[str],
    search: Sequence[str],
    variables: Mapping[str, str],
) -> int:
    """Run `main()` of a module of ours in a new process and session; returns its number.

    Spawned, never forked: nothing of this process's memory, threads or devices is in it, and of its
    environment only `variables`. `options` are the interpreter's; what of its own module path is
    not in `search` comes before that. Output goes nowhere, errors where ours go.
    """
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *options, "-c", _PROGRAM, ROOT, module, *search],
        dict(variables),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, descriptor, wire.LINE),
        ],
        setsid=True,
        setsigdef=(signal.SIGINT, signal.SIGPIPE, signal.SIGTERM),
        setsigmask=(),
    )


class Channel:
    """One process and the requests it has not answered yet."""

    def __init__(self, start: Callable[[int], int], *, name: str) -> None:
        """`start` is given the process's end of the line and returns its number."""
        self._name = name
        self._socket, theirs = socket.socketpair()
        self._numbers = itertools.count(1)
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self._waiting: dict[int, Answer] = {}
        self._listeners: dict[int, Listener] = {}
        self._loss: SandboxError | None = None
        self.greeting = self._expect(0)
        self._thread = threading.Thread(
            target=self._live, args=(start, theirs), name=name, daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether the process is gone."""
        return self._loss is not None

    async def request(self, head: Mapping[str, Any], body: bytes = b"") -> wire.Frame:
        """The answer to a request. Cancelling gives up the answer, not the request.

        Raises:
            SandboxError: the process is gone.
        """
        return await asyncio.wrap_future(await self.send(head, body))

    async def send(
        self, head: Mapping[str, Any], body: bytes = b"", *, listen: Listener | None = None
    ) -> Answer:
        """Send a request, a small one before this first yields; returns where its answer will be.
        `listen` is told, on the running loop, what comes ahead of it.
        """
        data, answer = self._begin(head, body, listen)
        if len(data) <= _SEND_HERE_BYTES:
            self._send(data)
        else:
            await asyncio.to_thread(self._send, data)
        return answer

    def post(self, head: Mapping[str, Any]) -> Answer:
        """Send a small request now; its answer may be awaited or left."""
        data, answer = self._begin(head)
        self._send(data)
        return answer

    def _begin(
        self, head: Mapping[str, Any], body: bytes = b"", listen: Listener | None = None
    ) -> tuple[bytes, Answer]:
        number = next(self._numbers)
        data = wire.encode({**head, "id": number}, body)
        if listen is not None:
            self._listeners[number] = _on_this_loop(listen)
        return data, self._expect(number)

    def close(self) -> None:
        """Hang up: the process ends. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def closed(self) -> None:
        """Until the process has ended and was collected."""
        await asyncio.to_thread(self._thread.join)

    def _expect(self, number: int) -> Answer:
        answer = Answer()
        with self._lock:
            if self._loss is not None:
                answer.set_exception(self._loss)
            else:
                self._waiting[number] = answer
        return answer

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError), self._send_lock:
            self._socket.sendall(data)

    def _live(self, start: Callable[[int], int], theirs: socket.socket) -> None:
        ending = "it closed the line"
        pid = None
        try:
            with theirs:
                pid = start(theirs.fileno())
            self._listen()
        except (OSError, wire.FrameError) as error:
            ending = str(error)
        self.close()
        if pid is not None:
            _, status = os.waitpid(pid, 0)
            ending += f"; exit code {os.waitstatus_to_exitcode(status)}"
        with self._lock:
            self._loss = SandboxError(f"{self._name} is gone ({ending}).")
            left, self._waiting = self._waiting, {}
        for answer in left.values():
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                answer.set_exception(self._loss)
        with self._send_lock:
            self._socket.close()

    def _listen(self) -> None:
        decoder, files = wire.Decoder(), deque[wire.Descriptor]()
        while True:
            data, came, _, _ = socket.recv_fds(self._socket, 1 << 18, _MOST_FILES)
            if not data:
                return
            files += map(wire.Descriptor, came)
            self._deliver(decoder.feed(data), files)

    def _deliver(self, frames: Iterable[wire.Frame], files: deque[wire.Descriptor]) -> None:
        """Give each frame to whoever waits for it; nothing is kept here of one that nobody does."""
        for frame in frames:
            number = frame.head["id"]
            brought = tuple(files.popleft() for _ in range(frame.head.get("files", 0)))
            if "part" in frame.head:
                if number in self._listeners:
                    self._listeners[number](frame.head["part"], frame.body)
                continue
            self._listeners.pop(number, None)
            with self._lock:
                answer = self._waiting.pop(number, None)
            if answer is not None:
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    answer.set_result(replace(frame, files=brought))


def _on_this_loop(listener: Listener) -> Listener:
    loop = asyncio.get_running_loop()

    def tell(name: str, data: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(listener, name, data)

    return tell


# --- the process's side -----------------------------------------------------------------------


class Reply:
    """What goes to the other side ahead of an answer and along with it."""

    def __init__(self, number: int, writer: asyncio.StreamWriter) -> None:
        self._number = number
        self._writer = writer
        self.files: list[int] = []
        """Descriptors to go along, closed once they are gone."""

    def part(self, name: str, data: bytes) -> None:
        """Something ahead of the answer."""
        self._writer.write(wire.encode({"id": self._number, "part": name}, data))

    async def send(self, data: bytes, line: socket.socket) -> None:
        """The answer. Descriptors go with its first byte, so all before must have gone."""
        sent = 0
        try:
            while self.files and not sent:
                await self._writer.drain()
                with contextlib.suppress(BlockingIOError):
                    sent = socket.send_fds(line, [data], self.files)
        finally:
            for number in self.files:
                os.close(number)
        self._writer.write(data[sent:])


Serve = Callable[[Mapping[str, Any], bytes, Reply], Awaitable[tuple[dict[str, Any], bytes]]]
"""Answers one request: head and body."""


async def attend(connection: socket.socket, serve: Serve) -> None:
    """Answer every request, each in its own time, until the other side closes its end, or its
    process is gone and with it that end.
    """
    line = connection.dup()
    reader, writer = await asyncio.open_connection(sock=connection)
    writer.transport.set_write_buffer_limits(0)
    decoder, tasks = wire.Decoder(), set()

    async def answer(frame: wire.Frame) -> None:
        number = frame.head["id"]
        reply = Reply(number, writer)
        try:
            head, body = await serve(frame.head, frame.body, reply)
            data = wire.encode({**head, "id": number}, body)
        except Exception as error:  # The boundary of this process: every request is answered.
            data = wire.encode({**wire.failure(error), "id": number})
        await reply.send(data, line)

    while received := await reader.read(1 << 18):
        for frame in decoder.feed(received):
            task = asyncio.ensure_future(answer(frame))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
