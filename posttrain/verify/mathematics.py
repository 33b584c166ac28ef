r"""Checks of kind `math`: whether the reply's final answer is the gold expression.

Symbolic mathematics is done in a worker and never in this process. The one thing that must stay
true: a gold answer that is a written number is equal to written numbers only, so an expression that
is still to be worked out (`17 \times 23`, `\sqrt{16}`) is no answer.
"""

from __future__ import annotations

import re

from posttrain.core.task import Check
from posttrain.verify import quantities
from posttrain.verify.answers import Where
from posttrain.verify.decided import decided
from posttrain.verify.kinds import Subject, Tools, allowed, final_answer, seconds_of, text_of
from posttrain.verify.layers import Finding

SAME = "posttrain.verify.symbolic:same"
TIMEOUT_S = 3.0
"""Seconds a comparison may take where the check names no `timeout_s`."""
MAX_CHARS = 500
"""Longer answers are none."""
_NAMED = re.compile(r"(?P<name>[A-Za-z])\s*=\s*(?P<value>.*)", re.S)


async def math(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Params: `answer`, `where`, `timeout_s`. An answer at which the worker hangs or dies, but not
    at the gold one, pays 0 (`decided`).

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
    name, value = _parts(gold)
    number = quantities.amount(value)
    if number is not None and number.unit in ("", quantities.PERCENT):
        called, text = _parts(given.text)
        right = (not name or not called or name == called) and quantities.same_amount(value, text)
        return Finding(value=float(right), evidence={"answer": given.text})
    asked = await decided(
        tools, SAME, (gold, given.text), (gold, gold),
        timeout_s=seconds_of(check, TIMEOUT_S),
    )  # fmt: skip
    evidence = {"answer": given.text} | ({"refused": asked.refused} if asked.refused else {})
    return Finding(value=float(asked.answer is True), evidence=evidence)


def _parts(text: str) -> tuple[str, str]:
    """The letter that a value is named by, '' where it is by none, and the value."""
    inner = text.strip().removeprefix("$").removesuffix("$") if text.count("$") == 2 else text
    match = _NAMED.fullmatch(inner.strip())
    return (match["name"], match["value"]) if match else ("", text)
