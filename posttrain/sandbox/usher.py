"""From the holder into a sandbox: a fork of the holder that starts commands in it.

One usher a live sandbox. It goes to the sandbox's control groups and namespaces, but for that of
processes, which it only hands on to its children; so it stays out of the commands' sight and reach.
Everything that could still look out is given up before the first command exists: descriptors,
capabilities, the right to new ones, and forbidden system calls. It joins the groups last: what a
sandbox has used up cannot keep it from entering. For each order it spawns the command, waits for
it, and tells its end. It takes the commands' limits upon itself, since a spawned process can only
inherit them; a fork that sets them for itself costs four times as much. The one thing that must
stay true: nothing but `os._exit` ends this code.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from posttrain.sandbox import kernel, spec
from posttrain.sandbox.pipes import memory_file

_STATUS = struct.Struct("=i")
_LINE, _INIT, _COUNTERS, _GROUPS = 3, 4, 5, 6
"""Descriptors while entering: the line, the sandbox's first process, the folder of what is counted
for each user, and from there on the entrances of its control groups.
"""
_NOT_FOUND, NOT_EXECUTABLE = 127, 126
READY = b"r"
"""What an usher says once it is in."""
_LONGEST_ORDER = 1 << 16
"""Bytes of what a maker of ushers is told."""
_PASSED_ON = (signal.SIGPIPE, signal.SIGXFSZ)
"""What Python ignores and commands do not."""
_SPARE_BYTES = 16 << 20
"""What an usher may need beyond its size. A limit on memory that leaves less is raised to that."""
_FILES = 5
"""Descriptors that come with an order: standard input, output, error, where the end is told, and
the order itself as a file.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run and within which limits."""

    argv: tuple[bytes, ...]
    stdin: bytes
    timeout_s: float
    cap_bytes: int
    """Of each output stream."""
    limits: Mapping[str, int]
    variables: Mapping[str, str]
    """On top of those that every command has."""


class Ushers:
    """Makes ushers, by way of a process that does nothing else. Who forks pays for it afterwards,
    with a fault for every page that it writes to, and the holder writes to many.
    """

    def __init__(self, seccomp: bytes | None) -> None:
        self._seccomp = seccomp
        self._maker: socket.socket | None = None

    def start(
        self, init: int, *, groups: Sequence[str], port: int | None
    ) -> tuple[socket.socket, int]:
        """Make an usher to the namespaces of a process given by pidfd, that joins control groups by
        these files; returns the line to it and its number. It says `READY` or what went wrong, with
        a socket along that listens on the sandbox's loopback for a proxy, where a port is given.
        This process must have one thread.

        Raises:
            OSError: no process could be made.
        """
        order = json.dumps([groups, port]).encode()
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):  # A maker that was lost is replaced.
                told = self._ask(order, [theirs.fileno(), init])
                if told:
                    (pid,) = _STATUS.unpack(told)
                    return ours, pid
        ours.close()
        raise OSError(errno.EAGAIN, "no process could be made")

    def _ask(self, order: bytes, files: Sequence[int]) -> bytes:
        """What the maker answers; empty where there is none any more."""
        with contextlib.suppress(OSError):
            if self._maker is None:
                self._maker = _maker(self._seccomp)
            socket.send_fds(self._maker, [order], files)
            if told := self._maker.recv(_STATUS.size):
                return told
        if self._maker is not None:
            self._maker.close()
        self._maker = None
        return b""


def order(line: socket.socket, command: Command, files: Sequence[int]) -> None:
    """Ask for a command over (standard input, output, error, where its end is told).

    Raises:
        OSError: the usher is gone.
    """
    words = [os.fsdecode(word) for word in command.argv]
    variables = dict(command.variables)
    text = json.dumps({"argv": words, "limits": command.limits, "variables": variables})
    number = memory_file("order", text.encode("ascii"))
    try:
        socket.send_fds(line, [b"o"], [*files, number])
    finally:
        os.close(number)


def exit_code(told: bytes) -> int | None:
    """The exit code as a shell tells it; None where the usher was ended before it could tell."""
    if not told:
        return None
    code = os.waitstatus_to_exitcode(_STATUS.unpack(told)[0])
    return code if code >= 0 else 128 - code


def end_of(code: int) -> bytes:
    """What is told of a command that ended with an exit code."""
    return _STATUS.pack(code << 8)


# --- inside the fork --------------------------------------------------------------------------


def _maker(seccomp: bytes | None) -> socket.socket:
    """Fork the process that forks ushers; returns the line to it."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        if os.fork() == 0:
            try:
                gc.disable()
                _keep((theirs.fileno(),))
                _make(socket.socket(fileno=_LINE), seccomp)
            finally:
                os._exit(0)
    return ours


def _make(orders: socket.socket, seccomp: bytes | None) -> None:
    """Fork an usher for each order, until the holder hangs up or none can be forked. What is the
    same for all is done here, once.
    """
    os.putenv("PATH", spec.PATH)
    kernel.forget_arguments()
    least_bytes = _size_bytes() + _SPARE_BYTES
    while True:
        text, files, _, _ = socket.recv_fds(orders, _LONGEST_ORDER, 2)
        if not text:
            return
        groups, port = json.loads(text)
        pid = os.fork()
        if pid == 0:
            _serve(files, groups, port, seccomp, least_bytes)
        for number in files:
            os.close(number)
        orders.send(_STATUS.pack(pid))


def _serve(
    files: Sequence[int],
    group_files: Sequence[str],
    port: int | None,
    seccomp: bytes | None,
    least_bytes: int,
) -> NoReturn:
    """An usher's whole life; `files` are its line and the pidfd."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        groups = [os.open(file, os.O_WRONLY) for file in group_files]
        _keep((*files, os.open("/proc/sys/user", os.O_PATH), *groups))
        _enter()
        os.chdir(spec.WORKSPACE)
        doors = [] if port is None else [_listening(port)]
        kernel.drop_capabilities()
        kernel.hide_memory()
        kernel.no_new_privileges()
        if seccomp is not None:
            kernel.filter_calls(seccomp)
        orders = socket.socket(fileno=_LINE)
        socket.send_fds(orders, [READY], doors)
        for number in range(_GROUPS, _GROUPS + len(groups)):
            os.write(number, b"0")
        os.closerange(_LINE + 1, os.sysconf("SC_OPEN_MAX"))
        _attend(orders, least_bytes)
    except BaseException as error:
        os.write(_LINE, repr(error).encode()[:1000])
    finally:
        os._exit(0)


def _size_bytes() -> int:
    """Address space of this process (proc(5))."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _enter() -> None:
    """Go in, and bound what the sandbox may have of what is counted for each user."""
    kernel.enter_namespaces_of(_INIT, kernel.CLONE_NEWNS)
    options = f"max={spec.MAX_TERMINALS},mode=620,ptmxmode=666"
    flags = kernel.MS_REMOUNT | kernel.MS_NOSUID | kernel.MS_NOEXEC
    kernel.mount("", "/dev/pts", "", flags, options)
    kernel.enter_namespaces_of(_INIT)
    for name, most in spec.COUNTERS.items():
        with contextlib.suppress(FileNotFoundError):
            number = os.open(name, os.O_WRONLY, dir_fd=_COUNTERS)
            os.write(number, str(most).encode())
            os.close(number)


def _listening(port: int) -> int:
    """A socket in the sandbox's network namespace, listening, by descriptor."""
    return socket.create_server(("127.0.0.1", port), backlog=128).detach()


def _keep(numbers: Sequence[int]) -> None:
    """Keep descriptors behind three empty standard ones; close all others."""
    empty = os.open(os.devnull, os.O_RDWR)
    kept = (empty, empty, empty, *numbers)
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, len(kept)) for number in kept]
    for target, number in enumerate(copies):
        os.dup2(number, target, inheritable=False)
    os.closerange(len(copies), os.sysconf("SC_OPEN_MAX"))


def _attend(line: socket.socket, least_bytes: int) -> None:
    """Take orders and tell ends until the holder hangs up."""
    waiting = select.poll()
    waiting.register(_LINE, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}
    while True:
        for number, _ in waiting.poll():
            if number != _LINE:
                waiting.unregister(number)
                pid, told = running.pop(number)
                os.close(number)
                _tell(told, os.waitpid(pid, 0)[1])
                continue
            data, files, _, _ = socket.recv_fds(line, 1, _FILES)
            if not data:
                return
            for number in files:
                os.set_inheritable(number, False)
            *standard, told, text = files
            started, code = _start(text, standard, least_bytes)
            if started is None:
                _tell(told, code << 8)
            else:
                number = os.pidfd_open(started)
                running[number] = (started, told)
                waiting.register(number, select.POLLIN)
            for number in (*standard, text):
                os.close(number)


def _tell(told: int, status: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # it was let go before it was given its input
        os.write(told, _STATUS.pack(status))
    os.close(told)


def _start(text: int, standard: Sequence[int], least_bytes: int) -> tuple[int | None, int]:
    """The command's process; None and an exit code where there is none, which is the command's
    failure and told as a shell does: the sandbox may be full of processes.
    """
    argv = [b""]
    try:
        with open(text, "rb", closefd=False) as file:
            asked = json.loads(file.read())
        argv = [os.fsencode(word) for word in asked["argv"]]
        _bound(asked["limits"], least_bytes)
        actions = [(os.POSIX_SPAWN_DUP2, number, n) for n, number in enumerate(standard)]
        variables = {**spec.VARIABLES, **asked["variables"]}
        pid = os.posix_spawnp(
            argv[0], argv, variables, file_actions=actions, setsid=True, setsigdef=_PASSED_ON
        )
    except FileNotFoundError as error:
        _complain(standard[2], argv[0], error)
        return None, _NOT_FOUND
    except (OSError, ValueError, MemoryError) as error:
        _complain(standard[2], argv[0], error)
        return None, NOT_EXECUTABLE
    return pid, 0


def _bound(limits: Mapping[str, int], least_bytes: int) -> None:
    """Limit this process and with it its children, once and for all: a sandbox's commands have all
    the same limits. Of open files the machine may grant less.
    """
    for name, value in limits.items():
        value = max(value, least_bytes) if name == "RLIMIT_AS" else value
        if name == "RLIMIT_NOFILE":
            value = min(value, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(getattr(resource, name), (value, value))


def _complain(where: int, name: bytes, error: BaseException) -> None:
    reason = error.strerror if isinstance(error, OSError) else None
    os.write(where, name + f": {reason or error}\n".encode())
