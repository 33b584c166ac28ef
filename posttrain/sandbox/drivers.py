"""The drivers by name: one is chosen for a run, and each can be tried out.

The one thing that must stay true: a driver that a person named is used or its own error is raised;
no other one steps in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from posttrain.core.errors import IsolationError, PosttrainError
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.container import ContainerSandboxes
from posttrain.sandbox.egress import Exchange
from posttrain.sandbox.source import Abilities, Source

Tell = Callable[[Exchange], None]


def _unheard(exchange: Exchange) -> None:
    """Nobody listens."""


DRIVERS: Mapping[str, Callable[[Tell], Source]] = {
    "bubblewrap": lambda tell: BubblewrapSandboxes(tell=tell),
    "container": lambda tell: ContainerSandboxes(),
}
"""Best first. `tell` hears of requests that commands made of the network."""
AUTO = "auto"


async def choose(name: str, tell: Tell = _unheard) -> Source:
    """The driver of that name; `auto`: the first that works here, or, where none does, the best
    one, whose leases say why.
    """
    if name != AUTO:
        return DRIVERS[name](tell)
    for make in DRIVERS.values():
        driver = make(tell)
        try:
            await driver.abilities()
            return driver
        except IsolationError:
            await driver.close()
    return next(iter(DRIVERS.values()))(tell)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What `doctor` shows of a driver."""

    abilities: Abilities | None
    """None: nothing can be contained so here."""
    problem: str | None = None
    """One paragraph: what, why, next command."""


async def probe(name: str) -> Probe:
    """Try a driver out: lease a sandbox, run a command in it."""
    driver = DRIVERS[name](_unheard)
    try:
        abilities = await driver.abilities()
        async with driver.lease(Environment()) as sandbox:
            result = await sandbox.exec(("/bin/sh", "-c", "id -u"))
    except PosttrainError as error:
        return Probe(abilities=None, problem=str(error))
    finally:
        await driver.close()
    if not result.stdout.strip().isdigit() or int(result.stdout) == 0:
        return Probe(abilities=None, problem=f"a command in a sandbox gave {result!r}.")
    return Probe(abilities=abilities)
