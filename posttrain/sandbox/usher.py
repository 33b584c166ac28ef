"""From the holder into a sandbox: a fork of the holder that starts commands in it.

One usher a live sandbox. It goes to the sandbox's control groups and namespaces, but for that of
processes, which it only hands on to its children; so it stays out of the commands' sight and reach.
Everything that could still look out is given up before the first command exists: descriptors,
capabilities, the right to new ones, and forbidden system calls. It joins the groups last: what a
sandbox has used up cannot keep it from entering. For each order it forks a child
that becomes the command, waits for it, and tells its end. The one thing that must stay true:
nothing but `os._exit` or a program's start ends this code.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from posttrain.sandbox import kernel, spec
from posttrain.sandbox.pipes import memory_file

_STATUS = struct.Struct("=i")
_LINE, _INIT, _COUNTERS, _GROUPS = 3, 4, 5, 6
"""Descriptors while entering: the line, the sandbox's first process, the folder of what is counted
for each user, and from there on the entrances of its control groups.
"""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
READY = b"r"
"""What an usher says once it is in."""
_FILES = 5
"""Descriptors that come with an order: standard input, output, error, where the end is told, and
the order itself as a file.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """What the usher goes through; numbers are descriptors of the holder."""

    init: int
    """Pidfd of the sandbox's first process."""
    groups: tuple[str, ...]
    """Files that a process writes to for joining the sandbox's control groups."""
    seccomp: bytes | None
    door: int
    """Port of the sandbox's loopback to listen on for a proxy; 0: none. The socket goes along with
    `READY`.
    """


def start(doors: Doors) -> tuple[socket.socket, int]:
    """Fork an usher; returns the line to it, on which it says `READY` or what went wrong, and its
    number. This process must have one thread.

    Raises:
        OSError: no process could be made.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        pid = os.fork()
        if pid == 0:
            _serve(doors, theirs.fileno())
    return ours, pid


def order(
    line: socket.socket,
    argv: Sequence[bytes],
    files: Sequence[int],
    *,
    limits: Mapping[str, int],
    variables: Mapping[str, str],
) -> None:
    """Ask for a command over (standard input, output, error, where its end is told); `variables`
    come on top of those that every command has.

    Raises:
        OSError: the usher is gone.
    """
    words = [os.fsdecode(word) for word in argv]
    text = json.dumps({"argv": words, "limits": limits, "variables": dict(variables)})
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


# --- inside the fork --------------------------------------------------------------------------


def _serve(doors: Doors, line: int) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kernel.forget_arguments()
        groups = [os.open(file, os.O_WRONLY) for file in doors.groups]
        _keep((line, doors.init, os.open("/proc/sys/user", os.O_PATH), *groups))
        _enter()
        os.chdir(spec.WORKSPACE)
        doors_out = _listening(doors.door)
        kernel.drop_capabilities()
        kernel.hide_memory()
        kernel.no_new_privileges()
        if doors.seccomp is not None:
            kernel.filter_calls(doors.seccomp)
        orders = socket.socket(fileno=_LINE)
        socket.send_fds(orders, [READY], doors_out)
        for number in range(_GROUPS, _GROUPS + len(groups)):
            os.write(number, b"0")
        os.closerange(_LINE + 1, os.sysconf("SC_OPEN_MAX"))
        _attend(orders)
    except BaseException as error:
        os.write(_LINE, repr(error).encode()[:1000])
    finally:
        os._exit(0)


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


def _listening(port: int) -> list[int]:
    """A socket in the sandbox's network namespace, listening, by descriptor."""
    if not port:
        return []
    door = socket.create_server(("127.0.0.1", port), backlog=128)
    return [door.detach()]


def _keep(numbers: Sequence[int]) -> None:
    """Keep descriptors behind three empty standard ones; close all others."""
    empty = os.open(os.devnull, os.O_RDWR)
    kept = (empty, empty, empty, *numbers)
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, len(kept)) for number in kept]
    for target, number in enumerate(copies):
        os.dup2(number, target, inheritable=False)
    os.closerange(len(copies), os.sysconf("SC_OPEN_MAX"))


def _attend(line: socket.socket) -> None:
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
            *standard, told, text = files
            with open(text, "rb") as file:
                asked = json.loads(file.read())
            started = _start(asked, standard)
            if started is None:
                _tell(told, _NOT_EXECUTABLE << 8)
            else:
                number = os.pidfd_open(started)
                running[number] = (started, told)
                waiting.register(number, select.POLLIN)
            for number in standard:
                os.close(number)


def _tell(told: int, status: int) -> None:
    os.write(told, _STATUS.pack(status))
    os.close(told)


def _start(asked: Mapping[str, Any], standard: Sequence[int]) -> int | None:
    """The child's number. That none could be made is the command's failure: the sandbox is full of
    processes.
    """
    argv = [os.fsencode(word) for word in asked["argv"]]
    try:
        pid = os.fork()
    except OSError as error:
        _complain(standard[2], argv[0], error)
        return None
    if pid == 0:
        _become(argv, asked, standard)
    return pid


def _become(argv: list[bytes], asked: Mapping[str, Any], standard: Sequence[int]) -> NoReturn:
    """Start the program; a failure is told as a shell does."""
    code = _NOT_EXECUTABLE
    try:
        for target, number in enumerate(standard):
            os.dup2(number, target)
        os.closerange(_LINE, os.sysconf("SC_OPEN_MAX"))
        os.setsid()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        for name, value in asked["limits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        os.execvpe(argv[0], argv, {**spec.VARIABLES, **asked["variables"]})
    except FileNotFoundError as error:
        code = _NOT_FOUND
        _complain(2, argv[0], error)
    except BaseException as error:
        _complain(2, argv[0], error)
    finally:
        os._exit(code)


def _complain(where: int, name: bytes, error: BaseException) -> None:
    reason = error.strerror if isinstance(error, OSError) else None
    os.write(where, name + f": {reason or error}\n".encode())
