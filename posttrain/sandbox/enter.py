"""From the holder into a sandbox: what a fork of the holder does to become a command in it.

Two processes: the *usher* goes to the sandbox's namespaces, but for that of processes, which it
only hands on; so it stays out of the command's sight and reach, waits for it, and tells its end.
Its child is the command. Everything that could still look out is given up before the command
exists: descriptors, capabilities, the right to new ones, and forbidden system calls. The one thing
that must stay true: nothing but `os._exit` or a program's start ends this code.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from posttrain.sandbox import kernel, spec

_STATUS = struct.Struct("=i")
_TOLD, _INIT, _GROUPS = 3, 4, 5
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_PROBLEM = b"!"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """What the usher needs; numbers are descriptors of the holder."""

    argv: tuple[bytes, ...]
    stdin: int
    stdout: int
    stderr: int
    told: int
    """Where the command's end is told."""
    init: int
    """Pidfd of the sandbox's first process."""
    limits: Mapping[str, int]
    """Of every process, by their names in `resource`."""
    groups: tuple[str, ...]
    """Files that a process writes to for joining the sandbox's control groups."""
    seccomp: bytes | None


def start(entrance: Entrance) -> int:
    """Fork the usher; returns its number. This process must have one thread.

    Raises:
        OSError: no process could be made.
    """
    pid = os.fork()
    if pid == 0:
        _usher(entrance)
    return pid


def end_told(data: bytes) -> int | str:
    """What the usher told: the command's wait status, or why there was no command. An usher that
    was killed told nothing; its command is dead too.
    """
    if data.startswith(_PROBLEM):
        return data.removeprefix(_PROBLEM).decode("utf-8", "replace")
    return int(_STATUS.unpack(data)[0]) if data else int(signal.SIGKILL)


def _usher(entrance: Entrance) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _keep(entrance)
        kernel.hide_memory()
        kernel.enter_namespaces_of(_INIT)
        os.close(_INIT)
        kernel.drop_capabilities()
        kernel.no_new_privileges()
        if entrance.seccomp is not None:
            kernel.filter_calls(entrance.seccomp)
        os.write(_TOLD, _STATUS.pack(_outcome(entrance)))
    except BaseException as error:
        os.write(_TOLD, _PROBLEM + repr(error).encode()[:1000])
    finally:
        os._exit(0)


def _keep(entrance: Entrance) -> None:
    """Keep these descriptors in this order, and close all others."""
    wanted = [entrance.stdin, entrance.stdout, entrance.stderr, entrance.told, entrance.init]
    wanted += [os.open(file, os.O_WRONLY) for file in entrance.groups]
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, len(wanted)) for number in wanted]
    for target, number in enumerate(copies):
        os.dup2(number, target, inheritable=target < _TOLD)
    os.closerange(len(wanted), os.sysconf("SC_OPEN_MAX"))


def _outcome(entrance: Entrance) -> int:
    """The wait status of the command. That no process could be made is the command's failure:
    the sandbox is full of them.
    """
    try:
        pid = os.fork()
    except OSError as error:
        _complain(entrance.argv[0], error)
        return _NOT_EXECUTABLE << 8
    if pid == 0:
        _become(entrance)
    os.closerange(0, _TOLD)
    return os.waitpid(pid, 0)[1]


def _become(entrance: Entrance) -> NoReturn:
    """Start the program; a failure is told as a shell does."""
    code = _NOT_EXECUTABLE
    try:
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        for number in range(_GROUPS, _GROUPS + len(entrance.groups)):
            os.write(number, b"0")
        os.chdir(spec.WORKSPACE)
        for name, value in entrance.limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))
        os.execvpe(entrance.argv[0], entrance.argv, dict(spec.VARIABLES))
    except FileNotFoundError as error:
        code = _NOT_FOUND
        _complain(entrance.argv[0], error)
    except BaseException as error:
        _complain(entrance.argv[0], error)
    finally:
        os._exit(code)


def _complain(name: bytes, error: BaseException) -> None:
    reason = error.strerror if isinstance(error, OSError) else None
    os.write(2, name + f": {reason or error}\n".encode())
