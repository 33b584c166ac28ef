"""Pipes to a process and the process itself, as awaitables of the running event loop.

The one thing that must stay true: every descriptor opened here is closed by `close`, whatever the
process did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

_MOST_LEFT_BYTES = 1 << 20
"""What is read of a pipe after its command's end; more than a pipe holds (pipe(7))."""


class Process:
    """A process known by descriptor, so that its number cannot be mistaken."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self.descriptor, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self.descriptor)
        if not self.ended.done():
            self.ended.set_result(None)

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Let it go."""
        asyncio.get_running_loop().remove_reader(self.descriptor)
        os.close(self.descriptor)


class Pipe:
    """A pipe with one end for a process (`inner`) and one for us (`outer`)."""

    def __init__(self, *, inward: bool) -> None:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self.inner, self.outer = (read_end, write_end) if inward else (write_end, read_end)
        os.set_blocking(self.outer, False)

    def drain(self, feed: Callable[[bytes], None]) -> None:
        """Hand whatever comes to `feed`, until `drain_rest` or the other end's close."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            with contextlib.suppress(BlockingIOError):
                data = os.read(self.outer, 1 << 16)
                feed(data)
                if not data:
                    loop.remove_reader(self.outer)

        loop.add_reader(self.outer, readable)

    def drain_rest(self, feed: Callable[[bytes], None]) -> None:
        """Hand on what the pipe still holds, and stop. Others may hold its other end open."""
        asyncio.get_running_loop().remove_reader(self.outer)
        left = _MOST_LEFT_BYTES
        with contextlib.suppress(BlockingIOError):
            while left > 0 and (data := os.read(self.outer, 1 << 16)):
                feed(data)
                left -= len(data)

    async def feed(self, data: bytes) -> None:
        """Write everything, then close; a reader that went away ends it quietly."""
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            while view:
                try:
                    view = view[os.write(self.outer, view) :]
                except BlockingIOError:
                    await ready(self.outer, writing=True)
        self.close_outer()

    async def word(self) -> bytes:
        """What comes first, in one piece; empty at the end."""
        await ready(self.outer)
        return os.read(self.outer, 1 << 12)

    async def line(self) -> bytes:
        """The first line that comes; empty at the end."""
        text = bytearray()
        while b"\n" not in text:
            await ready(self.outer)
            data = os.read(self.outer, 1 << 12)
            if not data:
                return b""
            text += data
        return bytes(text.partition(b"\n")[0])

    def rest(self) -> bytes:
        """Everything that came, once its writers are gone."""
        text = bytearray()
        self.drain_rest(text.extend)
        return bytes(text)

    def close_outer(self) -> None:
        """Close our end."""
        if self.outer >= 0:
            asyncio.get_running_loop().remove_reader(self.outer)
            asyncio.get_running_loop().remove_writer(self.outer)
            os.close(self.outer)
            self.outer = -1

    def close_inner(self) -> None:
        """Close the process's end here, once the process has it."""
        if self.inner >= 0:
            os.close(self.inner)
            self.inner = -1

    def close(self) -> None:
        """Close whatever is open."""
        self.close_inner()
        self.close_outer()


async def ready(number: int, *, writing: bool = False) -> None:
    """Until a descriptor can be read, or written."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    (loop.add_writer if writing else loop.add_reader)(number, event.set)
    try:
        await event.wait()
    finally:
        (loop.remove_writer if writing else loop.remove_reader)(number)


def memory_file(name: str, data: bytes) -> int:
    """A file in memory for a process to read, by descriptor."""
    number = os.memfd_create(name, os.MFD_CLOEXEC)
    os.write(number, data)
    os.lseek(number, 0, os.SEEK_SET)
    return number
