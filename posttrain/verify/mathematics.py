r"""Checks of kind `math`: whether the reply's final answer is the gold expression.

Symbolic mathematics is done in a worker and never in this process. The one thing that must stay
true: a gold answer that is a written number is equal to written numbers only, so an expression that
is still to be worked out (`17 \times 23`, `\sqrt{16}`) is no answer.
"""

from __future__ import annotations

from posttrain.core.errors import VerifierError
from posttrain.core.task import Check, Json
from posttrain.verify import answers
from posttrain.verify.answers import Where
from posttrain.verify.kinds import Subject, Tools, allowed, asked, final_answer, seconds_of, text_of
from posttrain.verify.layers import Finding

SAME = "posttrain.verify.symbolic:same"
TIMEOUT_S = 3.0
"""Seconds a comparison may take where the check names no `timeout_s`."""
MAX_CHARS = 500
"""Longer answers are none."""


async def math(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Params: `answer`, `where`, `timeout_s`. An answer at which the worker hangs or dies pays 0 as
    with `reasoning_gym`.

    Raises:
        VerifierError: there are no workers. WorkerError: the gold answer cannot be parsed.
    """
    allowed(check, "answer", "where", "timeout_s")
    gold = text_of(check, "answer")
    given = final_answer(check, subject, Where.LINE, gold=gold)
    if given.text is None:
        return Finding(value=0.0, evidence={"refused": given.refusal})
    if len(given.text) > MAX_CHARS:
        return Finding(value=0.0, evidence={"refused": f"longer than {MAX_CHARS} characters"})
    if answers.number(gold) is not None:
        right = answers.same_number(gold, given.text)
        return Finding(value=float(right), evidence={"answer": given.text})
    if tools.workers is None:
        raise VerifierError("symbolic mathematics wants workers; this stack was built without.")
    workers = tools.workers

    async def compared(text: str, limit_s: float) -> Json:
        return await workers.call(SAME, gold, text, timeout_s=limit_s)

    said, refused = await asked(compared, given.text, gold, seconds_of(check, TIMEOUT_S))
    evidence = {"answer": given.text} | ({"refused": refused} if refused else {})
    return Finding(value=float(said is True), evidence=evidence)
