"""The verifier: runs a task's checks layer by layer and puts the verdict together.

It judges nothing itself: kinds find, `layers` decides what runs next and what a finding is worth.
Kinds come from this package and from the entry-point group `posttrain.checks`. The one thing that
must stay true: whatever a check does (raise, hang, answer nonsense), `verify` returns a verdict,
and a check that failed itself leaves the attempt without reward.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from posttrain.core.containment import Sealed
from posttrain.core.errors import UsageError, VerifierError, nearest
from posttrain.core.task import Check, Place, Task
from posttrain.core.trajectory import Trajectory
from posttrain.core.verdict import Component, Verdict
from posttrain.verify import layers
from posttrain.verify.citations import citations
from posttrain.verify.code import differential, stdio, suite
from posttrain.verify.declared import Declared
from posttrain.verify.execution import program
from posttrain.verify.final_state import final_state
from posttrain.verify.fingerprint import fingerprint
from posttrain.verify.geometry import geometry
from posttrain.verify.json_schema import json_schema
from posttrain.verify.judge import JUDGE, SAID, judge
from posttrain.verify.kinds import REPLY_KINDS, Kind, Subject, Tools
from posttrain.verify.layers import Finding
from posttrain.verify.mathematics import math
from posttrain.verify.reasoning_gym import reasoning_gym
from posttrain.verify.reward_model import reward_model
from posttrain.verify.state import state
from posttrain.verify.text import text
from posttrain.verify.tool_calls import tool_calls

ENTRY_POINT_GROUP = "posttrain.checks"
BUILT_IN: Mapping[str, Kind] = {
    **REPLY_KINDS,
    "reasoning_gym": reasoning_gym,
    "math": math,
    "program": program,
    "stdio": stdio,
    "suite": suite,
    "differential": differential,
    "state": state,
    "json_schema": json_schema,
    "text": text,
    "citations": citations,
    "tool_calls": tool_calls,
    "final_state": final_state,
    "geometry": geometry,
    "judge": judge,
    "reward_model": reward_model,
}

HANG_S = 180.0
"""A check that has not answered by then hangs. Far above every limit a check sets for what it
starts: it also covers the wait for a sandbox.
"""
PROGRAMS = (Place.DETERMINISTIC, Place.RULE)
GRACE_S = 5.0
"""How long a cancelled check may take to clean up before it is left behind."""


def registry() -> dict[str, Kind]:
    """All kinds by name: built in and installed.

    Raises:
        UsageError: an installed kind takes a name that is taken.
    """
    kinds = dict(BUILT_IN)
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name in kinds:
            raise UsageError(
                f"check kind {point.name!r} of {point.value} exists already.",
                "rename it in that package's entry points",
            )
        kinds[point.name] = point.load()
    return kinds


def version(task: Task) -> str:
    """Kinds, versions and code of a task's checks: `exact@1+51c07ae3 not_empty@1+9f2c41d0`."""
    kinds = _installed()
    judges = {layers.judged_by(check, _code(kinds.get(check.kind))) for check in task.checks}
    return " ".join(sorted(judges))


@functools.cache
def _installed() -> Mapping[str, Kind]:
    return registry()


def _code(kind: Kind | None) -> str:
    return fingerprint(getattr(kind, "__module__", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStats:
    """Counts since the stack was made."""

    verdicts: int = 0
    failed_checks: int = 0
    """Checks that failed themselves, hung ones included."""
    hung_checks: int = 0
    left_behind: int = 0
    """Hung checks that did not end when cancelled either."""
    verify_s: float = 0.0


class Stack:
    """`core.ports.Verifier` over a registry of kinds."""

    def __init__(
        self, tools: Tools, *, kinds: Mapping[str, Kind] | None = None, hang_s: float = HANG_S
    ) -> None:
        self._tools = tools
        self._kinds = registry() if kinds is None else kinds
        self._hang_s = hang_s
        self._left_behind: set[asyncio.Task[Finding]] = set()
        self._stats = {"verdicts": 0, "failed_checks": 0, "hung_checks": 0}
        self._verify_s = 0.0

    async def verify(self, trajectory: Trajectory, sealed: Sealed | None) -> Verdict:
        """All components, layer by layer; failures of checks are component errors."""
        started_s = self._tools.clock.now_s()
        checks = trajectory.task.checks
        faults = layers.faults(checks)
        if faults:
            return Verdict(components=(_unfit(faults),))
        left = None if sealed is None else Declared(sealed, trajectory.task.artefacts)
        subject = Subject(trajectory=trajectory, sealed=left)
        done: dict[int, Component] = {}
        while (plan := layers.plan(checks, done)).run:
            for index in plan.run:
                label = layers.name(checks, index)
                done[index] = await self._component(checks[index], label, subject)
        self._compare(subject.task.domain, list(done.values()))
        self._stats["verdicts"] += 1
        self._verify_s += self._tools.clock.now_s() - started_s
        return layers.verdict(done)

    def _compare(self, domain: str, components: Sequence[Component]) -> None:
        """Remember whether judges were of one mind with the programs beside them."""
        judges = [c for c in components if JUDGE in c.evidence]
        programs = [
            c.value
            for c in components
            if c.place in PROGRAMS and not c.gate and c.value is not None
        ]
        for component in judges if programs else ():
            self._tools.trust.compared(
                str(component.evidence[JUDGE]),
                domain,
                float(component.evidence[SAID]),
                sum(programs) / len(programs),
            )

    def stats(self) -> StackStats:
        """Counts so far."""
        return StackStats(
            **self._stats, left_behind=len(self._left_behind), verify_s=self._verify_s
        )

    def check(self) -> None:
        """Assert the invariants."""
        counts = self.stats()
        assert counts.left_behind <= counts.hung_checks <= counts.failed_checks, counts

    async def _component(self, check: Check, label: str, subject: Subject) -> Component:
        clock, kind = self._tools.clock, self._kinds.get(check.kind)
        started_s = clock.now_s()
        try:
            if kind is None:
                raise UsageError(
                    f"no check kind {check.kind!r}{nearest(check.kind, self._kinds)}.",
                    "name one of " + ", ".join(sorted(self._kinds)),
                )
            finding = await self._bounded(kind, check, subject)
            component = layers.judged(check, label, finding, clock.now_s() - started_s)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            component = layers.failed(check, label, text, clock.now_s() - started_s)
        self._stats["failed_checks"] += component.error is not None
        return replace(component, verifier=layers.provenance(check, _code(kind)))

    async def _bounded(self, kind: Kind, check: Check, subject: Subject) -> Finding:
        """The kind's finding, or VerifierError once it hangs. Cancels what it leaves."""
        work = asyncio.ensure_future(_found(kind, check, subject, self._tools))
        work.add_done_callback(self._forget)
        try:
            if await self._ended(work, self._hang_s):
                return work.result()
            self._stats["hung_checks"] += 1
            raise VerifierError(f"no answer within {self._hang_s:g} s.")
        finally:
            if not work.done():
                work.cancel()
                if not await self._ended(work, GRACE_S):
                    self._left_behind.add(work)

    async def _ended(self, work: asyncio.Task[Finding], limit_s: float) -> bool:
        """Wait for the work to end, at most `limit_s` of the injected clock."""
        await asyncio.sleep(0)
        if work.done():  # most checks never wait for anything
            return True
        alarm = asyncio.ensure_future(self._tools.clock.sleep(limit_s))
        try:
            await asyncio.wait({work, alarm}, return_when=asyncio.FIRST_COMPLETED)
            return work.done()
        finally:
            alarm.cancel()

    def _forget(self, work: asyncio.Task[Finding]) -> None:
        """An ended check is no longer left behind, and its late exception is taken note of."""
        self._left_behind.discard(work)
        if not work.cancelled():
            work.exception()


async def _found(kind: Kind, check: Check, subject: Subject, tools: Tools) -> Finding:
    finding: Any = await kind(check, subject, tools)
    if not isinstance(finding, Finding):
        raise VerifierError(f"kind {check.kind!r} answered {type(finding).__name__}, no Finding.")
    return finding


def _unfit(faults: tuple[str, ...]) -> Component:
    return Component(
        name="checks",
        place=Place.GUARD,
        value=None,
        error="the task's checks cannot pay: " + "; ".join(faults),
    )
