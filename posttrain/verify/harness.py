"""Runs inside a fresh sandbox: carries out one checker and reports once, on a channel of its own.

Standard library and modules of the same sort (`nursery` and what checkers import) only; they are
copied into the sandbox as text. Its order (nonce, checker source, parameters, reply) comes by
standard input, so that no file, argument or environment variable holds it. Before it reads that it
makes itself unreadable to other processes and forks the nursery, from which candidates are forked.
The one thing that must stay true: what the attempt left runs only in processes that can neither
read the order nor write the record.

Standard error has the nonce, and then `+` whenever a candidate is about to have its say, `-` when
all is as it was before that: what it left is removed, nothing of this process or the nursery is
changed. So a harness that ends on `+` was ended by what it ran. Each run begins in a new folder,
also its home, that holds the check's files and nothing else. Elsewhere (/tmp) a run finds what
earlier ones left, unless the order `sweeps`: the place to hand a compiled program on, and no place
for anything a verdict rests on.

A checker is Python source that defines `check(order)`; `order` is an `Order`. It returns a number
in [0, 1], a bool, or a mapping with `value` and, for suites, `expected`, `ran`, `passed`, and
optionally `evidence`. An exception is its own failure and pays nothing, so it opens no file that
an attempt or a run left: `order.artefacts` and `Ran.folder` read them whatever they are.

Every import here is paid for by each verdict: the costly ones wait until they are needed.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import binascii
import os
import resource
import sys

from posttrain.verify.folders import (
    WRITABLE,
    Copies,
    Folder,
    lay,
    modes,
    new_place,
    remove,
    restore,
    swept,
    unnamed,
)
from posttrain.verify.nursery import (
    MAX_OUTPUT_BYTES,
    NOT_EXECUTABLE,
    Channel,
    Nursery,
    NurseryEnded,
    Suppressed,
    dumps,
    hide,
    loads,
    nurse,
    remove_shared,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

MAX_RECORD_CHARS = 60_000
"""Evidence that would make the record longer is left out of it."""
ARTEFACTS = "/artefacts"
"""Where a sandbox shows what an attempt left, if it is mounted; a command may name it in any case.
"""
_LIMITS = 16
"""How many the kernel has of each process (RLIM_NLIMITS)."""
_WALL_FACTOR = 4
"""Wall limit over CPU limit: a busy machine must not turn a right program into a wrong one."""


class Ran:
    """What a candidate process did."""

    def __init__(
        self, exit_code: int, stdout: bytes, timed_out: bool, folder: Folder, cpu_s: float = 0.0
    ) -> None:
        self.exit_code = exit_code
        """Negative: the number of the signal that ended it; 127: not there; 126: not a program, or
        earlier runs left no room for the check's files."""
        self.stdout = stdout
        self.timed_out = timed_out
        self.folder = folder
        """Where it began; removed when the next run begins."""
        self.cpu_s = cpu_s

    def __repr__(self) -> str:
        return f"Ran({self.exit_code}, {self.stdout!r}, timed_out={self.timed_out})"


class Order:
    """What a checker is given."""

    def __init__(self, given: Mapping[str, Any], nursery: Nursery) -> None:
        self.artefacts = Folder(given["artefacts"])
        """What the attempt left."""
        self.reply: str = given["reply"]
        self.params: Mapping[str, Any] = given.get("params", {})
        self.files: Mapping[str, str] = given["files"]
        """The check's files: path → text, as every run finds them."""
        self._nursery = nursery
        self._last: list[Folder] = []
        self._sweeps = bool(given.get("sweeps")) and os.getcwd() == WRITABLE[0]
        self._modes = modes()
        self._bounds = self._found_bounds()
        if given.get("copies") is not None:
            self.artefacts = Copies(new_place())
            self.artefacts.contents = {
                path: binascii.a2b_base64(data) for path, data in given["copies"].items()
            }

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 2.0, **more: Any
    ) -> Ran:
        """Run a candidate to its end, in a new folder with the check's files: `timeout_s` of CPU
        time, four times that of wall time. `source`: the Python program it is, `argv` being its
        `sys.argv`, run in a process like a new interpreter's; `memory_bytes`: of each process.

        Its output is cut at 1 MiB. Every process it started is dead when this returns.
        """
        with unnamed() as given, unnamed() as said:
            given.write(stdin)
            given.seek(0)
            fds = (given.fileno(), said.fileno())
            with self.begun(argv, fds, timeout_s=timeout_s, **more) as begun:
                ran = begun.end(timeout_s * _WALL_FACTOR)
            said.seek(0)
            ran.stdout = said.read(MAX_OUTPUT_BYTES)
            return ran

    def begun(
        self,
        argv: Sequence[str],
        fds: tuple[int, int],
        *,
        timeout_s: float,
        source: str | None = None,
        memory_bytes: int = 0,
    ) -> Begun:
        """A candidate with these descriptors as its input and output; it runs in a `with` block."""
        folder = Folder(new_place())
        head = {
            "argv": list(argv), "folder": folder, "cpu_s": timeout_s, "memory": memory_bytes,
            "python": source is not None,
        }  # fmt: skip
        return Begun(self, self._nursery, head, fds, source or "")

    def exposed(self) -> Exposed:
        """A block in which what a candidate made is looked at: by what may hang or die of that."""
        return Exposed(self)

    @property
    def is_exposed(self) -> bool:
        """Whether a candidate has its say."""
        return self._nursery.told == "+"

    def expose(self) -> None:
        """From now on what ends or hinders this process is the candidate's doing."""
        self._nursery.tell("+")

    def recover(self) -> None:
        """Until now. Everything is as it was before.

        Raises:
            NurseryEnded: it cannot be made so.
        """
        restore(self._modes)
        if self._sweeps:
            remove_shared()
        if (self._sweeps and not swept()) or self._found_bounds() != self._bounds:
            raise NurseryEnded
        self._nursery.tell("-")

    def _found_bounds(self) -> list[Any]:
        """What any process of the same user can change of this one and the nursery; none where the
        kernel does not say.
        """
        with Suppressed(OSError):
            return [
                [os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid),
                 *(resource.prlimit(pid, number) for number in range(_LIMITS))]
                for pid in (os.getpid(), self._nursery.pid)
            ]  # fmt: skip
        return []

    def lay(self, folder: Folder) -> None:
        """The check's files in a new folder, and the copies of what was left in theirs."""
        while self._last:
            remove(self._last.pop())
        self._last.append(folder)
        lay(folder, self.files)
        if isinstance(self.artefacts, Copies):
            remove(self.artefacts)
            lay(self.artefacts, self.artefacts.contents)


class Exposed:
    """As `Order.exposed` says."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __enter__(self) -> None:
        self._order.expose()

    def __exit__(self, *exception: object) -> None:
        self._order.recover()


class Begun:
    """A candidate, from its start to its end."""

    def __init__(
        self,
        order: Order,
        nursery: Nursery,
        head: Mapping[str, Any],
        fds: tuple[int, int],
        source: str,
    ) -> None:
        self._order = order
        self._nursery = nursery
        self._head = head
        self._fds = fds
        self._source = source
        self._pid = 0
        self.ran: Ran | None = None
        """Once it has ended."""

    def __enter__(self) -> Begun:
        self._order.expose()
        try:
            self._order.lay(self._head["folder"])
            with unnamed() as program:
                program.write(self._source.encode("utf-8", "replace"))
                program.seek(0)
                self._pid = self._nursery.start(self._head, (*self._fds, program.fileno()))
        except OSError:
            self.ran = Ran(NOT_EXECUTABLE, b"", False, self._head["folder"])
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is told where the nursery has ended, which is raised again then."""
        self.end(0.0)
        self._order.recover()

    def end(self, wall_s: float) -> Ran:
        """Wait for its end, at most so long; then it is killed, and all it started in any case."""
        if self.ran is None:
            code, cpu_s, late = self._nursery.ended(self._pid, wall_s)
            timed_out = late or code == -_signal.SIGXCPU
            self.ran = Ran(code, b"", timed_out, self._head["folder"], cpu_s)
        return self.ran


# --- the order ----------------------------------------------------------------------------------


def _command(given: Mapping[str, Any], order: Order) -> dict[str, Any]:
    words = [_shown(word, order.artefacts) for word in given["command"]]
    ended = order.run(words, timeout_s=float(given["timeout_s"]))
    if ended.timed_out or not 0 <= ended.exit_code < NOT_EXECUTABLE:
        return {"error": f"failed: command ended with {ended.exit_code}, wanted 0 to 125"}
    return {"value": float(ended.exit_code == 0)}


def _shown(word: str, artefacts: str) -> str:
    """A word of a command, with the place where what was left is found in this sandbox."""
    inside = word == ARTEFACTS or word.startswith(f"{ARTEFACTS}/")
    return artefacts + word[len(ARTEFACTS) :] if inside else word


def _checked(given: Mapping[str, Any], order: Order) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "checker"}
    exec(compile(given["source"], "checker", "exec"), space)
    if not callable(space.get("check")):
        return {"error": "defines no check(order)"}
    result = space["check"](order)
    record = dict(result) if hasattr(result, "keys") else {"value": float(result)}
    if len(dumps(record)) > MAX_RECORD_CHARS:
        record["evidence"] = {"left out": f"it made a record of over {MAX_RECORD_CHARS}"}
    return record


def _carry_out(given: Mapping[str, Any], order: Order) -> dict[str, Any]:
    """The record of one order; an exception of the checker is its own failure, unless a candidate
    has its say.
    """
    act: Callable[..., dict[str, Any]] = _command if "command" in given else _checked
    try:
        return act(given, order)
    except NurseryEnded:
        raise
    except BaseException as error:
        if order.is_exposed:
            raise NurseryEnded from error
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1].lineno
        return {"error": f"failed: {type(error).__name__} in line {where}: {error}"}


def main() -> NoReturn:
    """Read the order, carry it out, write one record, and end; with 0 where that was possible.
    What is left in memory is not cleared away: that would take longer than a candidate.
    """
    hide()
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        ours.close()
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.close(null)
        os._exit(nurse(theirs))
    theirs.close()
    given = loads(sys.stdin.buffer.read())
    channel, progress = Channel(os.dup(1)), os.dup(2)
    nursery = Nursery(ours, pid, progress=progress, nonce=given["nonce"])
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    try:
        record = {"nonce": given["nonce"], **_carry_out(given, Order(given, nursery))}
    except NurseryEnded:
        os._exit(3)
    channel.write(dumps(record) + "\n")
    os._exit(0)
