"""Checks of kind `reasoning_gym`: the scorer of the generator that made the task, in a worker.

The one thing that must stay true: foreign code (a domain's scorer) never runs in this process.
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.core.errors import UsageError, VerifierError
from posttrain.core.task import Check, Json
from posttrain.verify.answers import Where
from posttrain.verify.decided import decided
from posttrain.verify.kinds import Subject, Tools, allowed, final_answer, seconds_of, text_of
from posttrain.verify.layers import Finding

PAID_SCORE = 1.0 - 1e-6
"""Foreign scorers pay something for junk, and nearly all for what is nearly right; only a score of
at least this is paid, with 1."""
SCORER = "posttrain.domains.adapters.reasoning_gym:score"


async def reasoning_gym(check: Check, subject: Subject, tools: Tools) -> Finding:
    """The generator's own scorer, in a worker, trusted only at its top: 1 pays 1, anything less 0.

    Params: `dataset` (name), `entry` (as generated), `where`, `timeout_s`. The answer is the first
    line, or the whole reply where the generator's own answer has several lines. An answer at which
    the scorer hangs or dies, but not at the generator's own, pays 0 (`decided`).
    """
    allowed(check, "dataset", "entry", "where", "timeout_s")
    entry = check.params.get("entry")
    if not isinstance(entry, Mapping):
        raise UsageError(f"check 'reasoning_gym' wants the entry as generated, got {entry!r:.80}.")
    gold = str(entry.get("answer", "")).strip()
    given = final_answer(check, subject, Where.REPLY if "\n" in gold else Where.LINE, gold=gold)
    if given.text is None:
        return Finding(value=0.0, evidence={"refused": given.refusal})
    dataset = text_of(check, "dataset")
    asked = await decided(
        tools, SCORER, (dataset, entry, given.text), (dataset, entry, gold),
        timeout_s=seconds_of(check),
    )  # fmt: skip
    if asked.refused:
        return Finding(value=0.0, evidence={"answer": given.text, "refused": asked.refused})
    score = asked.answer
    return Finding(value=paid(score), evidence={"answer": given.text, "score": score})


def paid(score: Json) -> float:
    """What a foreign score is worth.

    Raises:
        VerifierError: it is no number in [0, 1].
    """
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise VerifierError(f"wanted a score in [0, 1], got {score!r:.80}.")
    return float(score >= PAID_SCORE)
