"""A candidate against a reference, over inputs that are generated as it is judged.

A checker that runs in a fresh sandbox; standard library only. Generator and reference run before
any candidate does, so that none can hinder them; the candidate in a process of its own for each
input, which it is sent a copy of. The one thing that must stay true: what is compared is what the
reference made of its own copy, strict about types.
"""

from __future__ import annotations

import sys

from posttrain.verify.calls import Candidate, CandidateEnded, CandidateError, decode, encode, same
from posttrain.verify.comparison import alike, printed
from posttrain.verify.nursery import Suppressed
from posttrain.verify.streams import play

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from posttrain.verify.harness import Order

    _Expect = Callable[[Any], Any]
    """What the reference makes of an input; an exception that it raises is given."""
    _Differ = Callable[[Any, Any], str]
    """Why the candidate fails on an input, beside what is expected; '' where it does not."""

MAX_TIME_OUTS = 3
"""After so many the other inputs fail unseen."""
MAX_SHRINKS = 40
"""Runs of the candidate spent on a smaller failing input."""
ADAPTER = "call"
"""Function of an adapter: it is given the candidate's module and the arguments."""


class ReferenceFault(Exception):
    """The reference or the generator cannot be judged by."""


def check(order: Order) -> dict[str, Any]:
    """The record of all inputs."""
    import random

    params = order.params
    generate = _function(params["generator"], "generate")
    inputs = [generate(random.Random(f"{params['seed']} {n}")) for n in range(params["count"])]
    if params["calls"]:
        inputs = [tuple(given) for given in inputs]
    expect, differ = (_by_calls if params["calls"] else _by_streams)(order)
    pairs = [(given, expect(given)) for given in inputs]
    failing, why, late = [], "", 0
    for given, expected in pairs:
        if late == MAX_TIME_OUTS:
            failing.append(given)
            continue
        if trouble := differ(given, expected):
            why = why or trouble
            failing.append(given)
            late += trouble == "timed out"
    evidence = {"seed": params["seed"], "timed_out": late}
    if failing:
        smallest, why = (failing[0], why) if late else _shrunk(failing[0], why, expect, differ)
        evidence |= {"input": repr(smallest)[:1000], "why": why}
    share = 1.0 - len(failing) / len(inputs)
    return {
        "value": share if params["pays"] == "share" else float(not failing),
        "ran": len(inputs),
        "passed": len(inputs) - len(failing),
        "evidence": evidence,
    }


def _function(source: str, name: str) -> Callable[..., Any]:
    space: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), space)
    found: Callable[..., Any] = space[name]
    return found


def _by_calls(order: Order) -> tuple[_Expect, _Differ]:
    params = order.params
    setup = {key: params[key] for key in ("path", "module", "adapter")}
    setup["source"] = params["program"]
    name = params["function"]
    reference = type(sys)("reference")
    exec(compile(params["reference"], "reference", "exec"), reference.__dict__)
    if params["adapter"]:
        name, adapter = ADAPTER, _function(params["adapter"], ADAPTER)
        called: Callable[..., Any] = lambda *args: adapter(reference, *args)  # noqa: E731
    else:
        called = getattr(reference, name)

    def expect(given: Any) -> Any:
        try:
            return decode(encode(called(*decode(encode(given)))))
        except Exception as error:
            if type(error).__module__ != "builtins":
                raise ReferenceFault(
                    f"on {given!r:.200}: {type(error).__name__}: {error}"
                ) from None
            return error

    def differ(given: Any, expected: Any) -> str:
        found: Any
        with Candidate(order, setup, params["timeout_s"]) as candidate:
            try:
                candidate.open()
                found = candidate.call(name, given, {})
            except CandidateEnded as ended:
                return "timed out" if ended.timed_out else str(ended)
            except BaseException as error:
                found = error
        return _difference(expected, found, params["tolerance"])

    return expect, differ


def _difference(expected: Any, found: Any, tolerance: float) -> str:
    if isinstance(expected, Exception) or isinstance(found, BaseException):
        alike = type(expected) is type(found) and not isinstance(found, CandidateError)
    else:
        alike = same(expected, found, tolerance)
    return "" if alike else f"wanted {expected!r:.300}, got {found!r:.300}"


def _by_streams(order: Order) -> tuple[_Expect, _Differ]:
    params = order.params

    def expect(given: Any) -> str:
        ran = order.run(
            ["reference"], source=params["reference"], stdin=given.encode(),
            timeout_s=params["timeout_s"], memory_bytes=params["memory_bytes"],
        )  # fmt: skip
        if ran.exit_code != 0 or ran.timed_out:
            raise ReferenceFault(f"the reference ended with {ran.exit_code} on {given!r:.200}")
        return ran.stdout.decode()

    def differ(given: Any, expected: str) -> str:
        ran = play(order, given)
        if ran.timed_out:
            return "timed out"
        found = printed(ran.stdout)
        bounds = {"absolute": params["tolerance"]}
        ended = ran.exit_code == 0 and found is not None
        if ended and alike(expected, found or "", params["compare"], **bounds):
            return ""
        return f"wanted {expected!r:.300}, got {found!r:.300} and exit code {ran.exit_code}"

    return expect, differ


def _shrunk(given: Any, why: str, expect: _Expect, differ: _Differ) -> tuple[Any, str]:
    """A smaller input on which the candidate fails too, and how. Those that the reference does not
    take are left out.
    """
    spent, better = 0, True
    while better:
        better = False
        for smaller in _smaller(given):
            spent += 1
            if spent > MAX_SHRINKS:
                return given, why
            with Suppressed(Exception):
                expected = expect(smaller)
                if not isinstance(expected, Exception) and (trouble := differ(smaller, expected)):
                    given, why, better = smaller, trouble, True
                    break
    return given, why


def _smaller(value: Any) -> Iterator[Any]:
    """Values a step simpler, the boldest first; tuples keep their length."""
    one: Any = value  # of whatever type, it is taken apart as a sequence
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        if value:
            yield type(value)(0)
            yield type(value)(value / 2) if isinstance(value, float) else int(value / 2)
    elif isinstance(value, (str, bytes, list)):
        half = len(one) // 2
        if half:
            yield one[:half]
            yield one[half:]
        for index in range(len(one)):
            yield one[:index] + one[index + 1 :]
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(one):
            for smaller in _smaller(item):
                yield one[:index] + type(one)((smaller,)) + one[index + 1 :]
