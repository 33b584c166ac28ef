"""A call into a worker over what an attempt said or left: an answer, or the attempt's refusal.

Not for calls whose input is all the task's: there, a worker that fails has failed. The one thing
that must stay true: neither can a policy choose to go without a verdict, by something at which the
worker hangs or dies, nor does a busy machine decide anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.errors import VerifierError, WorkerError
from posttrain.core.task import Json
from posttrain.verify.kinds import Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What came of a call."""

    answer: Json = None
    refused: str = ""
    """Why no answer came, which is the attempt's doing; '' where one did."""


async def decided(
    tools: Tools, function: str, given: Sequence[Json], sound: Sequence[Json], *, timeout_s: float
) -> Decided:
    """The worker's answer to the arguments `given`. Where it hangs or dies at them twice, the
    second time with twice the time, and in between not at the arguments `sound`, which are the
    same but for the attempt's share, that is the attempt's doing.

    Raises:
        VerifierError: the stack has no workers.
        WorkerError: it fails at the sound arguments as well.
    """
    workers = tools.workers
    if workers is None:
        raise VerifierError(f"{function} wants workers, but this stack was built without.")
    try:
        return Decided(answer=await workers.call(function, *given, timeout_s=timeout_s))
    except WorkerError:
        await workers.call(function, *sound, timeout_s=timeout_s)
    try:
        return Decided(answer=await workers.call(function, *given, timeout_s=2 * timeout_s))
    except WorkerError as error:
        return Decided(refused=f"no answer came of it: {error.message}")
