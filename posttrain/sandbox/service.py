"""What serves the holder over its line: requests in, answers and descriptors out.

It knows nothing of sandboxes. The one thing that must stay true: every request is answered, each in
its own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any, Protocol

from posttrain.core.errors import SandboxError
from posttrain.sandbox import wire


class Server(Protocol):
    """Who answers."""

    async def serve(
        self, head: Mapping[str, Any], body: bytes, reply: Reply
    ) -> tuple[dict[str, Any], bytes]:
        """Answer one request."""
        ...


class Reply:
    """What goes to the driver ahead of an answer and along with it."""

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


async def attend(connection: socket.socket, server: Server) -> None:
    """Serve until the driver closes its end, or its process is gone and with it that end."""
    line = connection.dup()
    reader, writer = await asyncio.open_connection(sock=connection)
    writer.transport.set_write_buffer_limits(0)
    decoder, tasks = wire.Decoder(), set()

    async def answer(frame: wire.Frame) -> None:
        number = frame.head["id"]
        reply = Reply(number, writer)
        try:
            head, body = await server.serve(frame.head, frame.body, reply)
            data = wire.encode({**head, "id": number}, body)
        except OSError as error:
            data = wire.encode({"id": number, "errno": error.errno, "error": str(error)})
        except SandboxError as error:
            told = {"error": error.message, "next_step": error.next_step}
            data = wire.encode({"id": number, **told})
        except Exception as error:  # The boundary of this process: every request is answered.
            told = {"error": f"{type(error).__name__}: {error}", "next_step": ""}
            data = wire.encode({"id": number, **told})
        await reply.send(data, line)

    while received := await reader.read(1 << 18):
        for frame in decoder.feed(received):
            task = asyncio.ensure_future(answer(frame))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
