"""Starts a Python process of ours with one descriptor and a clean environment.

Spawned, never forked: nothing of this process's memory, threads or devices is in it. The one thing
that must stay true: of this process's environment it gets only the variables named by the caller.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

LINE = 3
"""Descriptor under which the process finds its end of the line."""
_PROGRAM = (
    "import sys; sys.path.extend(p for p in sys.argv[2:] if p not in sys.path); "
    "import importlib; importlib.import_module(sys.argv[1]).main()"
)


def take_line() -> socket.socket:
    """The process's end of the line, out of reach of whatever it starts; every other descriptor
    above the three standard ones is closed.
    """
    os.closerange(LINE + 1, os.sysconf("SC_OPEN_MAX"))
    os.set_inheritable(LINE, False)
    return socket.socket(fileno=LINE)


def spawn(
    module: str,
    descriptor: int,
    *,
    options: Sequence[str],
    search: Sequence[str],
    variables: Mapping[str, str],
) -> int:
    """Run `main()` of a module in a new session; returns the process's number.

    `options` are the interpreter's, `search` extends its module path. Output goes nowhere, errors
    where ours go.
    """
    arguments = [sys.executable, *options, "-c", _PROGRAM, module, *search]
    return os.posix_spawn(
        sys.executable,
        arguments,
        dict(variables),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, descriptor, LINE),
        ],
        setsid=True,
        setsigdef=(signal.SIGINT, signal.SIGPIPE, signal.SIGTERM),
        setsigmask=(),
    )
