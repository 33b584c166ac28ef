"""Calls of a candidate's functions across a process border, and the plain values that cross it.

Both sides: `serve` is what runs in the candidate's process, `Candidate` asks it; standard library
only, copied into sandboxes. What the serving side says is data of the candidate's, whatever it
claims to be. The one thing that must stay true: what `Candidate.call` gives consists of objects of
exact built-in types, made here.
"""

from __future__ import annotations

import _socket
import os
import sys
import time

from posttrain.verify.comparison import near
from posttrain.verify.nursery import Suppressed, dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from posttrain.verify.harness import Order

MAX_REPLY_BYTES = 1 << 20
MEMORY_BYTES = 400 << 20
"""Address space of a candidate, where its check does not say."""
_WALL_FACTOR = 4
_SERVING = "from posttrain.verify.calls import serve; serve()"
_MAX_PLAIN_INT = 1 << 63
_MAPPINGS = ("OrderedDict", "defaultdict", "Counter")
"""Kinds of dictionaries that cross as dictionaries."""


class Unplain(Exception):
    """A value that is not made of None, booleans, numbers, texts, bytes, lists, tuples,
    dictionaries and sets only.
    """


# --- values -------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """A plain value as JSON.

    >>> encode((1, {2: b"x"})), encode({True})
    ({'t': [1, {'d': [[2, {'b': 'x'}]]}]}, {'s': [True]})

    Raises:
        Unplain: it is none.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if abs(value) < _MAX_PLAIN_INT else {"i": hex(value)}
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple:
        return {"t": [encode(item) for item in value]}
    if kind in (set, frozenset):
        return {"s" if kind is set else "f": sorted(map(encode, value), key=dumps)}
    if kind is bytes:
        return {"b": value.decode("latin-1")}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is dict or (kind.__module__ == "collections" and kind.__name__ in _MAPPINGS):
        return {"d": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    raise Unplain(f"{kind.__name__} is no plain value")


def decode(node: Any) -> Any:
    """The value of an encoding.

    >>> decode(encode((1, {2: b"x"}))), decode(encode(float("inf")))
    ((1, {2: b'x'}), inf)

    Raises:
        ValueError, TypeError: it is none.
    """
    if isinstance(node, list):
        return [decode(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((mark, inner),) = node.items()
    if mark == "i":
        return int(inner, 16)
    if mark == "b":
        return inner.encode("latin-1")
    if mark == "c":
        return complex(*inner)
    if mark == "d":
        return {decode(key): decode(item) for key, item in inner}
    return {"t": tuple, "s": set, "f": frozenset}[mark](decode(item) for item in inner)


def same(expected: Any, found: Any, tolerance: float = 0.0) -> bool:
    """Equality of plain values, strict about types at every depth; NaN equals NaN. Floats may
    differ by the tolerance, relative to the expected one or to 1.

    >>> same([1], [True]), same((1.0,), (1.0 + 1e-9,), 1e-6), same({1: [2]}, {1: [2]})
    (False, True, True)
    """
    if type(expected) is not type(found):
        return False
    if isinstance(expected, float):
        nan = expected != expected and found != found
        return nan or near(expected, found, tolerance * max(1.0, abs(expected)))
    if isinstance(expected, (list, tuple)):
        pairs = zip(expected, found)  # noqa: B905 - lengths are compared first
        return len(expected) == len(found) and all(same(a, b, tolerance) for a, b in pairs)
    if isinstance(expected, dict):
        wanted, given = _by_text(expected), _by_text(found)
        return wanted.keys() == given.keys() and all(
            same(item, given[key], tolerance) for key, item in wanted.items()
        )
    return bool(expected == found) and dumps(encode(expected)) == dumps(encode(found))


def _by_text(items: Mapping[Any, Any]) -> dict[str, Any]:
    return {dumps(encode(key)): item for key, item in items.items()}


# --- asking -------------------------------------------------------------------------------------


class CandidateEnded(BaseException):
    """The candidate's process ended, or ran out of time, instead of answering."""

    def __init__(self, *, timed_out: bool) -> None:
        super().__init__("ran out of time" if timed_out else "ended its process")
        self.timed_out = timed_out


class CandidateError(Exception):
    """The candidate raised something that is no built-in exception, or gave no plain value."""


class Candidate:
    """A candidate's module in a process of its own, which lives as long as a `with` block. Setup:
    `source`, `path`, `module`, and `adapter` (text, or none).
    """

    def __init__(self, order: Order, setup: Mapping[str, Any], timeout_s: float) -> None:
        self._setup = setup
        self._channel, self._theirs = _socket.socketpair()
        self._null = os.open(os.devnull, os.O_RDWR)
        self._begun = order.begun(
            [os.path.join(order.artefacts, setup["path"])],
            (self._theirs.fileno(), self._null),
            timeout_s=timeout_s,
            source=_SERVING,
            memory_bytes=order.params["memory_bytes"],
        )
        self._due_s = time.monotonic() + timeout_s * _WALL_FACTOR
        self._buffer = b""
        self.unsendable = ""
        """Why an argument could not be sent: the caller's fault."""
        self.ended: CandidateEnded | None = None

    def __enter__(self) -> Candidate:
        self._begun.__enter__()
        self._theirs.close()
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()
        os.close(self._null)
        self._begun.__exit__()

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the function gives; a built-in exception that it raises is raised here.

        Raises:
            CandidateEnded, CandidateError, Unplain (of an argument).
        """
        try:
            request = {"f": name, "a": encode(list(args)), "k": encode(dict(kwargs))}
        except Unplain as error:
            self.unsendable = f"{name} is given what cannot be sent: {error}"
            raise
        return self._answer(request)

    def open(self) -> None:
        """Have the module executed; as `call` otherwise."""
        self._answer(self._setup)

    def _answer(self, request: Mapping[str, Any]) -> Any:
        try:
            self._left()
            self._channel.sendall(dumps(request).encode() + b"\n")
            while b"\n" not in self._buffer:
                self._left()
                data = self._channel.recv(1 << 16)
                self._buffer += data
                if not data or len(self._buffer) > MAX_REPLY_BYTES:
                    break
        except OSError as error:
            ran = self._begun.end(0.0)
            raise self._end(isinstance(error, TimeoutError) or ran.timed_out) from None
        line, found, self._buffer = self._buffer.partition(b"\n")
        if not found:
            raise self._end(self._begun.end(1.0).timed_out)
        return _read(line)

    def _end(self, timed_out: bool) -> CandidateEnded:
        self.ended = CandidateEnded(timed_out=timed_out)
        return self.ended

    def _left(self) -> None:
        self._channel.settimeout(max(1e-6, self._due_s - time.monotonic()))


def _read(line: bytes) -> Any:
    """What a reply says, which the candidate may have written itself."""
    try:
        reply = loads(line)
        if "v" in reply:
            return decode(reply["v"])
        kind, text = map(str, reply["e"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CandidateError(f"no reply: {type(error).__name__}") from None
    raise _exception(kind, text)


def _exception(kind: str, text: str) -> BaseException:
    import builtins

    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, BaseException):
        with Suppressed(TypeError):
            error = known.__new__(known)
            error.args = (text,)
            return error
    return CandidateError(f"{kind}: {text}")


# --- serving ------------------------------------------------------------------------------------


def serve() -> None:
    """Answer calls that come by the socket that is standard input, until it is closed."""
    channel = os.dup(0)
    os.dup2(1, 0)
    module = type(sys)("candidate")
    for line in open(channel, "rb", closefd=False):  # noqa: SIM115 - it goes with the process
        try:
            request = loads(line)
            if "source" in request:
                module, value = _executed(request), None
            else:
                function = getattr(module, request["f"])
                value = function(*decode(request["a"]), **decode(request["k"]))
            answer = dumps({"v": encode(value)})
        except BaseException as error:
            answer = dumps({"e": [type(error).__name__, str(error)[:1000]]})
        _write(channel, answer.encode() + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _executed(setup: Mapping[str, Any]) -> Any:
    """The candidate's module, or an adapter to it, whose `call` is given it first."""
    found = _module(setup["module"], setup["path"], setup["source"])
    if not setup["adapter"]:
        return found
    adapter = _module("adapter", "adapter", setup["adapter"])
    call = adapter.call
    adapter.__dict__["call"] = lambda *args: call(found, *args)
    return adapter


def _module(name: str, path: str, source: str) -> Any:
    module = sys.modules[name] = type(sys)(name)
    module.__dict__["__file__"] = path
    exec(compile(source, path, "exec"), module.__dict__)
    return module
