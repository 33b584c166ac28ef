"""A line to a process this one keeps: requests out, answers in, from any event loop.

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
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from posttrain.core.errors import SandboxError
from posttrain.sandbox import wire

Answer = concurrent.futures.Future[wire.Frame]
Listener = Callable[[str, bytes], None]
_MOST_FILES = 16
_SEND_HERE_BYTES = 1 << 16
"""Larger requests are sent from a thread, since sending them may block."""


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
        number, answer = self.begin()
        await self.send(number, head, body)
        return await asyncio.wrap_future(answer)

    def begin(self) -> tuple[int, Answer]:
        """A number for a request, and where its answer will be."""
        number = next(self._numbers)
        return number, self._expect(number)

    def listen(self, number: int, listener: Listener) -> None:
        """Tell the listener, on the running loop, what comes ahead of a request's answer."""
        loop = asyncio.get_running_loop()

        def tell(name: str, data: bytes) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(listener, name, data)

        self._listeners[number] = tell

    async def send(self, number: int, head: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a request; a small one is sent when this first yields."""
        data = wire.encode({**head, "id": number}, body)
        if len(data) <= _SEND_HERE_BYTES:
            self._send(data)
        else:
            await asyncio.to_thread(self._send, data)

    def post(self, head: Mapping[str, Any]) -> Answer:
        """Send a small request now; its answer may be awaited or left."""
        number, answer = self.begin()
        self._send(wire.encode({**head, "id": number}))
        return answer

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
