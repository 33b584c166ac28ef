"""Ctrl-C and SIGTERM while a run works: they wait for the event loop instead of landing anywhere.

It stops nothing; whoever listens decides what a signal means. The one thing that must stay true: no
signal raises in the middle of opening or closing something.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code of a command that a person stopped, as shells have it."""

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


@contextmanager
def held() -> Iterator[None]:
    """Signals wait inside, except within `heard`; one that still waits at the end comes then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def heard(listener: Callable[[], None]) -> Iterator[None]:
    """Within `held`, on the running event loop: for each signal the loop calls `listener`."""
    import asyncio

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, listener)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        for number in SIGNALS:
            loop.remove_signal_handler(number)
