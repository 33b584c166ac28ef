"""The worker process: takes calls from its line, one at a time, until the line closes.

Its standard output and error go nowhere, so a print cannot corrupt an answer. It imports what the
called function's module needs and nothing else of this project. The one thing that must stay true:
each call gets one "loaded" or error frame, and then one result or error frame.
"""

from __future__ import annotations

import importlib
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.sandbox import child, kernel, wire


def main() -> None:
    """Serve calls."""
    line = child.take_line()
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
        _serve(line, frame.head["function"], frame.head["arguments"])


def _frames(line: socket.socket) -> Iterator[wire.Frame]:
    decoder = wire.Decoder()
    while data := line.recv(1 << 16):
        yield from decoder.feed(data)


def _serve(line: socket.socket, name: str, arguments: list[Any]) -> None:
    """Answer one call. Whatever ours raises is told, `BaseException` included."""
    try:
        function = _load(name)
    except BaseException as error:
        line.sendall(wire.encode({"error": f"could not be loaded: {_story(error)}"}))
        return
    line.sendall(wire.encode({"loaded": True}))
    try:
        answer = wire.encode({"result": _json(function(*arguments))})
    except BaseException as error:
        answer = wire.encode({"error": f"raised {_story(error)}"})
    line.sendall(answer)


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
