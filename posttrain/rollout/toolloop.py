"""The executor `tools`: replies and tool calls in a leased sandbox, sealed at the end.

Order: lease → turns → probes → seal → lease returned → files read from the seal. The one thing
that must stay true: `run` raises nothing but cancellation, and a sealed workspace is either handed
to the receiver or closed.
"""

from __future__ import annotations

import asyncio
import hashlib

from posttrain.core.containment import Sandbox, Sandboxes, Sealed
from posttrain.core.errors import DomainError
from posttrain.core.ports import Attempted, AttemptRequest, Clock, Policy
from posttrain.core.task import ArtefactKind, Environment, Json, Task, ToolCall
from posttrain.rollout import tools
from posttrain.rollout.attempt import Attempt
from posttrain.rollout.drive import Driver, story
from posttrain.rollout.moves import Event, Execute, Failed, Observed, TimedOut
from posttrain.rollout.render import Renderer
from posttrain.rollout.text import clean, head_and_tail

MAX_EVIDENCE_BYTES = 1 << 20
"""Longest file whose hash is recorded as evidence; verifiers read the file itself."""


class ToolExecutor:
    """Carries out tasks whose executor is `tools`."""

    def __init__(
        self, policy: Policy, renderer: Renderer, clock: Clock, sandboxes: Sandboxes
    ) -> None:
        self._driver = Driver(policy, renderer, clock)
        self._clock = clock
        self._sandboxes = sandboxes

    async def run(self, request: AttemptRequest) -> Attempted:
        """Make the attempt; infrastructure failures end as `infra_failed`, without a seal."""
        attempt = self._driver.open(request)
        evidence: dict[str, Json] = {}
        sealed: Sealed | None = None
        try:
            _refuse_unknown_kinds(request.task)
            async with self._sandboxes.lease(_environment(request.task)) as sandbox:
                await self._play(attempt, request, sandbox)
                if attempt.outcome is None:
                    evidence |= await _probe(sandbox, request.task)
                    sealed = await sandbox.seal()
            if sealed is not None:
                evidence |= await _files(sealed, request.task)
        except BaseException as error:
            if sealed is not None:
                await asyncio.shield(sealed.close())
                sealed = None
            if not isinstance(error, Exception):
                raise
            attempt.handle(Failed(error=story(error)))
        return Attempted(trajectory=attempt.trajectory(request, artefacts=evidence), sealed=sealed)

    async def _play(self, attempt: Attempt, request: AttemptRequest, sandbox: Sandbox) -> None:
        async def execute(instruction: Execute) -> Event:
            return await self._execute(instruction, request.task, sandbox)

        await self._driver.play(attempt, request, execute)

    async def _execute(self, instruction: Execute, task: Task, sandbox: Sandbox) -> Event:
        """Carry the calls out one after the other within the attempt's remaining time."""
        results: dict[str, str] = {}
        started_s = self._clock.now_s()
        most_s = _environment(task).exec_timeout_s
        for call in instruction.calls:
            spent_s = self._clock.now_s() - started_s
            left_s = instruction.timeout_s - spent_s
            if left_s <= 0:
                return TimedOut(results=results, duration_s=spent_s)
            command = _command(call, task)
            result = await sandbox.exec(
                command.argv, timeout_s=min(most_s, left_s), stdin=command.stdin
            )
            results[call.id] = tools.observe(result)
            if result.timed_out and left_s < most_s:
                return TimedOut(results=results, duration_s=self._clock.now_s() - started_s)
        return Observed(results=results, duration_s=self._clock.now_s() - started_s)


def _environment(task: Task) -> Environment:
    return task.environment or Environment()


def _refuse_unknown_kinds(task: Task) -> None:
    unknown = tools.unknown_kinds(task.description.tools)
    if unknown:
        kinds = ", ".join(tools.Kind)
        raise DomainError(f"task {task.id} lists a tool of kind {unknown[0]!r}; kinds: {kinds}.")


def _command(call: ToolCall, task: Task) -> tools.Command:
    tool = next(tool for tool in task.description.tools if tool.name == call.name)
    return tools.command(call, tool)


async def _probe(sandbox: Sandbox, task: Task) -> dict[str, Json]:
    """Run the task's own commands and keep what they said."""
    evidence: dict[str, Json] = {}
    for artefact in task.artefacts:
        if artefact.kind is ArtefactKind.PROBE:
            result = await sandbox.exec(
                ("bash", "-c", artefact.command), timeout_s=_environment(task).exec_timeout_s
            )
            evidence[artefact.name] = {
                "exit_code": result.exit_code,
                "timed_out": result.timed_out,
                "stdout": _kept(result.stdout, task),
                "stderr": _kept(result.stderr, task),
            }
    return evidence


async def _files(sealed: Sealed, task: Task) -> dict[str, Json]:
    """Size and hash of the files a task asks for, as they lie in the seal."""
    evidence: dict[str, Json] = {}
    for artefact in task.artefacts:
        if artefact.kind is ArtefactKind.FILE:
            data = await sealed.read(artefact.path, max_bytes=MAX_EVIDENCE_BYTES)
            evidence[artefact.name] = (
                {"missing": True}
                if data is None
                else {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            )
    return evidence


def _kept(text: str, task: Task) -> str:
    return head_and_tail(clean(text), _environment(task).max_output_bytes)
