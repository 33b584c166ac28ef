"""The stdin/stdout judge: a program, inputs, and what it should print for each.

A checker that runs in a fresh sandbox; standard library only. Each case has a process and a folder
of its own, in the order of the list, which no program knows. The one thing that must stay true: a
case counts only if its process ended by itself with exit code 0.
"""

from __future__ import annotations

import os

from posttrain.verify.comparison import alike, printed
from posttrain.verify.nursery import Suppressed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from posttrain.verify.harness import Order, Ran

MAX_TIME_OUTS = 3
"""After so many the other cases fail unseen: a program that hangs costs no more."""
_FAULTS = (NameError, ImportError, ModuleNotFoundError)
"""What no output makes of a checker."""


def check(order: Order) -> dict[str, Any]:
    """The record of all cases."""
    params = order.params
    cases, failed, passed, late = params["cases"], {}, 0, 0
    judge = _judge(order)
    for index, given, expected in cases:
        if late == MAX_TIME_OUTS:
            failed[str(index)] = "not run"
            continue
        ran = play(order, given)
        late += ran.timed_out
        why = _trouble(ran, params["max_output_bytes"]) or (
            "" if judge(given, printed(ran.stdout), expected) else "wrong output"
        )
        passed += not why
        if why:
            failed[str(index)] = why
    share = passed / len(cases)
    return {
        "value": share if params["pays"] == "share" else float(share == 1.0),
        "ran": len(cases),
        "passed": passed,
        "evidence": {"failed": failed, "timed_out": late, "seed": params["seed"]},
    }


def play(order: Order, given: str) -> Ran:
    """One run of the candidate on an input."""
    params = order.params
    place = os.path.join(order.artefacts, params["path"])
    own = {"source": params["program"]} if params["argv"] is None else {}
    argv = [word.replace("{program}", place) for word in params["argv"] or ["{program}"]]
    return order.run(
        argv, stdin=given.encode(), timeout_s=params["timeout_s"],
        memory_bytes=params["memory_bytes"], **own,
    )  # fmt: skip


def _trouble(ran: Ran, max_bytes: int) -> str:
    if ran.timed_out:
        return "timed out"
    if ran.exit_code != 0:
        return f"ended with {ran.exit_code}"
    if len(ran.stdout) > max_bytes:
        return f"printed more than {max_bytes} bytes"
    return "" if printed(ran.stdout) is not None else "printed no text"


def _judge(order: Order) -> Callable[[str, Any, str], bool]:
    """The comparison, or the check's own `accepts(given, found, expected)`. Where that hangs or
    fails at what was found, and not in the same way at what is expected, the output is wrong.
    """
    params = order.params
    if params["checker"] is None:
        bounds = {"absolute": params["absolute"], "relative": params["relative"]}
        return lambda given, found, expected: alike(expected, found, params["compare"], **bounds)
    space: dict[str, Any] = {"__name__": "checker"}
    exec(compile(params["checker"], "checker", "exec"), space)
    accepts = space["accepts"]
    with Suppressed(Exception):
        _, given, expected = params["cases"][0]
        accepts(given, expected, expected)

    def judge(given: str, found: Any, expected: str) -> bool:
        with order.exposed():
            try:
                return accepts(given, found, expected) is True
            except Exception as error:
                failure = error
        if type(failure) in _FAULTS:
            raise failure
        try:
            accepts(given, expected, expected)
        except Exception as error:
            if expected and _way(error) == _way(failure):
                raise
        return False

    return judge


def _way(error: Exception) -> tuple[type, list[int]]:
    """How something failed: the kind of error, and the lines it came through."""
    lines, trace = [], error.__traceback__ and error.__traceback__.tb_next
    while trace:
        lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return type(error), lines
