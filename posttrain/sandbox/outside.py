"""The way out of a sandbox's proxy: a name is resolved once, its addresses are checked, one of them
is connected.

It decides nothing about names (`egress.admit` does, before). The one thing that must stay true: a
connection goes to an address that was checked, never to a name that might lead elsewhere by now.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from posttrain.sandbox import egress
from posttrain.sandbox.egress import Decision, Refusal

_MOST_ADDRESSES = 4
"""So many addresses of a name are tried."""


class Resolver(Protocol):
    """Addresses of names."""

    async def addresses(self, host: str) -> Sequence[str]:
        """All addresses of a name, best first.

        Raises:
            OSError: there are none, or nobody answers.
        """
        ...

    def close(self) -> None:
        """Let go; idempotent."""
        ...


class SystemResolver:
    """Asks the system, in two threads of its own: names that nobody answers for hold up neither
    another sandbox nor the rest of this process.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="resolver")

    async def addresses(self, host: str) -> Sequence[str]:
        """As the protocol says. The final dot keeps this machine's search list out of it."""
        ask = functools.partial(
            socket.getaddrinfo, f"{host}.".encode("ascii"), None, type=socket.SOCK_STREAM
        )
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

    def close(self) -> None:
        """Wait for no answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def public(address: str) -> Decision:
    """Whether an address is public (`egress.reachable`) and none of this machine's own.

    Raises:
        OSError: that could not be found out.
    """
    decision = egress.reachable(address)
    if decision.allowed and _is_own(address):
        return Decision(allowed=False, reason="an address of the proxy's own machine")
    return decision


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


class Outside:
    """The way out: names are resolved once, every address is checked, checked ones are connected.

    One address that may not be reached condemns its name.
    """

    def __init__(
        self, *, resolver: Resolver | None = None, check: Callable[[str], Decision] = public
    ) -> None:
        self._resolver = resolver or SystemResolver()
        self._check = check

    async def connect(self, host: str, port: int, *, within_s: float) -> tuple[socket.socket, str]:
        """A connection and the address it goes to. It takes twice `within_s` at most.

        Raises:
            Refusal: 403 an address may not be reached; 502, 504 it may, and nothing answers there.
        """
        try:
            async with asyncio.timeout(within_s):
                addresses = await self._addresses(host)
            for address in addresses:
                decision = self._check(address)
                if not decision.allowed:
                    reason = f"{host} leads to {decision.reason}."
                    raise Refusal(403, reason, address=address)
            return await _first(addresses[:_MOST_ADDRESSES], port, within_s=within_s)
        except TimeoutError as error:
            raise Refusal(504, f"{host}:{port} does not answer.") from error
        except OSError as error:
            reason = f"{host}:{port} cannot be reached: {cause(error)}."
            raise Refusal(502, reason) from error

    async def _addresses(self, host: str) -> Sequence[str]:
        found = (host,) if egress.is_address(host) else await self._resolver.addresses(host)
        if not found:
            raise OSError(errno.ENOENT, "it has no address")
        return found

    def close(self) -> None:
        """Ask nobody any more; idempotent."""
        self._resolver.close()


async def _first(
    addresses: Sequence[str], port: int, *, within_s: float
) -> tuple[socket.socket, str]:
    """A connection to the first address that answers within its share of the time."""
    failure: OSError | None = None
    for address in addresses:
        try:
            async with asyncio.timeout(within_s / len(addresses)):
                return await _connect(address, port), address
        except OSError as error:  # without the address, which its text may hold
            failure = OSError(error.errno, os.strerror(error.errno)) if error.errno else error
    assert failure is not None, "there was an address"
    raise failure


async def _connect(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        upstream.setblocking(False)
        upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(upstream, (address, port))
        stack.pop_all()
    return upstream


def cause(error: BaseException) -> str:
    """What went wrong, in the system's few words."""
    return getattr(error, "strerror", None) or type(error).__name__
