"""The worker process: takes calls from its line, one at a time, until the line closes.

Its standard output and error go nowhere, so a print cannot corrupt an answer. It imports what the
called function's module needs and nothing else of this project. The one thing that must stay true:
each request gets one answer: "loaded" for the name of a function, its result for its arguments, or
an error.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.sandbox import kernel, wire


def main() -> None:
    """Serve calls."""
    line = wire.take_line()
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    frames = _frames(line)
    order = next(frames).head
    kernel.signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != order["parent"]:
        return
    memory_bytes = order["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for frame in frames:
        line.sendall(_answer(frame))


def _frames(line: socket.socket) -> Iterator[wire.Frame]:
    decoder = wire.Decoder()
    while data := line.recv(1 << 16):
        yield from decoder.feed(data)


def _answer(frame: wire.Frame) -> bytes:
    """Answer one request. Whatever ours raises is told, `BaseException` included."""
    stage = "could not be loaded:"
    try:
        function = _load(frame.head["function"])
        if not frame.body:
            return wire.encode({"loaded": True})
        stage = "raised"
        return wire.encode({"result": _json(function(*json.loads(frame.body)))})
    except BaseException as error:
        return wire.encode({"error": f"{stage} {_story(error)}"})


def _load(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _json(value: Any) -> Any:
    """The value itself, if it is a JSON value all through."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise ValueError(f"answered {value}, which is no JSON value")
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json(item) for key, item in value.items()}
    raise TypeError(f"answered a {type(value).__name__}, which is no JSON value")


def _story(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be read)"
    return f"{type(error).__name__}: {text[:2000]}"
