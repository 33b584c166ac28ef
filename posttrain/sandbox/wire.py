"""Frames between this process and the processes it keeps: a JSON head and raw bytes.

A frame is two big-endian lengths, the head, the body. The one thing that must stay true: a peer
that sends garbage gives `FrameError` and never a frame.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import SandboxError

LINE = 3
"""Descriptor under which a process that we started finds its end of the line."""
_LENGTHS = struct.Struct("!II")
MAX_HEAD_BYTES = 64 << 20
MAX_BODY_BYTES = 256 << 20


class FrameError(ValueError):
    """What came is no frame."""


class Descriptor:
    """A descriptor that came along with a frame; closed with this unless somebody took it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def take(self) -> int:
        """The descriptor, which is the caller's from now on."""
        number, self._number = self._number, -1
        return number

    def __del__(self) -> None:
        if self._number >= 0:
            with contextlib.suppress(OSError):
                os.close(self._number)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    head: Mapping[str, Any]
    body: bytes = b""
    files: tuple[Descriptor, ...] = ()
    """What came along."""


def encode(head: Mapping[str, Any], body: bytes = b"") -> bytes:
    """The bytes of a frame.

    Raises:
        ValueError: the head holds NaN or infinity, or something is too large for a frame.
        TypeError: the head holds no JSON values.
    """
    text = json.dumps(head, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_HEAD_BYTES or len(body) > MAX_BODY_BYTES:
        raise FrameError(f"{len(text)} + {len(body)} bytes are too many for one frame")
    return _LENGTHS.pack(len(text), len(body)) + text + body


class Decoder:
    """Bytes in, frames out.

    >>> data = encode({"id": 1}, b"xy")
    >>> decoder = Decoder(); list(decoder.feed(data[:9])), list(decoder.feed(data[9:]))
    ([], [Frame(head={'id': 1}, body=b'xy', files=())])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes; yield every frame that is complete now.

        Raises:
            FrameError: the bytes are no frames.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            head_bytes, body_bytes = _LENGTHS.unpack_from(self._buffer)
            if head_bytes > MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
                raise FrameError(f"a frame of {head_bytes} + {body_bytes} bytes is announced")
            body_at = _LENGTHS.size + head_bytes
            if len(self._buffer) < body_at + body_bytes:
                return
            head = _head(bytes(self._buffer[_LENGTHS.size : body_at]))
            body = bytes(self._buffer[body_at : body_at + body_bytes])
            del self._buffer[: body_at + body_bytes]
            yield Frame(head, body)


def _head(text: bytes) -> Mapping[str, Any]:
    try:
        head = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise FrameError(f"the head of a frame is no JSON: {error}") from error
    if not isinstance(head, dict):
        raise FrameError(f"the head of a frame is a {type(head).__name__}, wanted an object")
    return head


def _refuse(name: str) -> None:
    raise FrameError(f"{name} is no JSON value")


def failure(error: Exception) -> dict[str, Any]:
    """The head that tells of a request that failed."""
    if isinstance(error, OSError):
        return {"errno": error.errno, "error": str(error)}
    if isinstance(error, SandboxError):
        return {"error": error.message, "next_step": error.next_step}
    return {"error": f"{type(error).__name__}: {error}", "next_step": ""}


def answered(frame: Frame) -> Frame:
    """The answer itself.

    Raises:
        OSError, SandboxError: the request failed.
    """
    if "errno" in frame.head:
        raise OSError(frame.head["errno"], frame.head["error"])
    if "error" in frame.head:
        raise SandboxError(frame.head["error"], frame.head["next_step"])
    return frame


def take_line() -> socket.socket:
    """The end of the line of a process that we started, out of reach of whatever it starts; every
    other descriptor above the three standard ones is closed.
    """
    os.closerange(LINE + 1, os.sysconf("SC_OPEN_MAX"))
    os.set_inheritable(LINE, False)
    return socket.socket(fileno=LINE)
