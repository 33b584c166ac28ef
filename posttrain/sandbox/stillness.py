"""Bringing all processes of a sandbox to a stand, and letting them go on.

Their control group does it where it can: in the kernel, whatever they do. Without it each is sent a
signal, which one that forks without pause, or is woken by another, may outrun. The one thing that
must stay true: `begin` says that all stand still only where nothing moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from posttrain.sandbox import cgroups
from posttrain.sandbox.pipes import Process

_MOST_ROUNDS, _PAUSE_S = 100, 0.002
"""Of signals, and of looks at a group that is being frozen: a process stops once it was next to run
and the kernel has done what it does for it.
"""


class Stillness:
    """Of one sandbox, its usher included."""

    def __init__(self, first: int, usher: Process, *, freezer: str | None) -> None:
        """`first` is the first process inside, which only waits and is left alone; `freezer` the
        folder of their group in the v2 hierarchy.
        """
        self._first = first
        self._usher = usher
        self._space = _space(first)
        self._freezer = freezer
        self._begun = False

    async def begin(self) -> bool:
        """Stop the usher, so that nothing begins, and all others; whether all stand still."""
        self._begun = True
        if self._freezer is None:
            return await self._stop_each()
        cgroups.freeze(self._freezer)
        for _ in range(_MOST_ROUNDS):
            if cgroups.stands_still(self._freezer):
                return True
            await asyncio.sleep(_PAUSE_S)
        return False

    def end(self) -> None:
        """Let them go on. Idempotent."""
        begun, self._begun = self._begun, False
        if begun and self._freezer is not None:
            cgroups.thaw(self._freezer)
        elif begun:
            for pid in self._members()[0]:
                _signal(pid, signal.SIGCONT)

    async def _stop_each(self) -> bool:
        """Two rounds in a row have to find that all stand still and nobody is new: a child that one
        had before it stopped may have come after the list was read.
        """
        settled: set[int] = set()
        for _ in range(_MOST_ROUNDS):
            members, missed = self._members()
            running = [pid for pid in members if not _is_stopped(pid)]
            if not running and not missed and settled.issuperset(members):
                return True
            settled = set() if running or missed else set(members)
            for pid in running:
                _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(_PAUSE_S)
        return False

    def _members(self) -> tuple[list[int], bool]:
        """The usher and the processes inside, and whether some ended before it was known where they
        were: they may have left children that are not in the list.
        """
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        spaces = {pid: _space(pid) for pid in numbers if pid not in (self._first, self._usher.pid)}
        inside = [pid for pid, space in spaces.items() if space == self._space]
        usher = [] if self._usher.ended.done() else [self._usher.pid]
        return [*usher, *inside], None in spaces.values()


def _space(pid: int) -> int | None:
    """Which process namespace a process is in; None where it ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped or dead (proc(5)): the first may be dead while
    others run. A process that is gone may have left a child.
    """
    try:
        return all(
            _state(f"/proc/{pid}/task/{thread}/stat") in (b"T", b"Z", b"X")
            for thread in os.listdir(f"/proc/{pid}/task")
        )
    except OSError:
        return False


def _state(file: str) -> bytes:
    with open(file, "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
