"""The line to a process: answers that nobody waits for any more."""

import asyncio
import functools
import os
import socket

from posttrain.sandbox import wire
from posttrain.sandbox.channel import ROOT, Channel, spawn


def main() -> None:
    """The process: answers every request with a descriptor, which is the writing end of a pipe of
    the test's, once it was told to.
    """
    line = wire.take_line()
    decoder, wait = wire.Decoder(), []
    while data := line.recv(1 << 16):
        for frame in decoder.feed(data):
            if frame.head["op"] == "wait":
                wait.append(frame.head["id"])
                continue
            for number in (*wait, frame.head["id"]):
                read_end, write_end = os.pipe()
                head = {"id": number, "files": 1}
                socket.send_fds(line, [wire.encode(head)], [write_end])
                os.close(write_end)
                os.set_inheritable(read_end, False)
            wait.clear()


def test_what_comes_with_an_answer_is_closed_if_nobody_takes_it():
    start = functools.partial(
        spawn, "tests.sandbox.test_channel", options=(), search=[ROOT], variables={}
    )  # fmt: skip
    channel = Channel(start, name="a peer of a test")

    async def body():
        await channel.request({"op": "go"})
        left = asyncio.ensure_future(channel.request({"op": "wait"}))
        await asyncio.sleep(0)
        left.cancel()
        before = len(os.listdir("/proc/self/fd"))
        frame = await channel.request({"op": "go"})
        assert len(os.listdir("/proc/self/fd")) == before + 1
        taken = frame.files[0].take()
        del frame
        os.close(taken)
        assert len(os.listdir("/proc/self/fd")) == before
        channel.close()
        await channel.closed()

    asyncio.run(body())
