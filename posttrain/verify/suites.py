"""Hidden suites of tests, pytest-style or unittest, over a candidate's functions.

A checker that runs in a fresh sandbox; standard library only. The suite is executed anew for each
test, in the order of the list, which no candidate knows, with a candidate of its own. Calls cross
to the candidate's process (`calls`), so nothing that the candidate does to classes, modules or the
interpreter is seen here. A `direct` suite is executed in the candidate's process instead, where it
can be deceived: that is what `weak` evidence says. The one thing that must stay true: a test counts
as passed only if it ran to its end and neither skipped nor expected to fail.

Of pytest there is a stand-in: `raises`, `approx`, `fail`, `mark.parametrize` and `tmp_path`.
"""

from __future__ import annotations

import itertools
import os
import sys

from posttrain.verify.calls import Candidate
from posttrain.verify.comparison import near
from posttrain.verify.nursery import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from posttrain.verify.harness import Order

MAX_TIME_OUTS = 3
"""After so many the other tests fail unseen."""
_DIRECT = "from posttrain.verify.suites import answer; answer()"
_FUNCTION = type(lambda: None)


class SuiteFault(BaseException):
    """The suite itself cannot be judged by."""


class _Outcome:
    """How a test ended."""

    def __init__(self, why: str, *, ran: bool = True, late: bool = False) -> None:
        self.why, self.ran, self.late = why, ran, late


def check(order: Order) -> dict[str, Any]:
    """The record of all tests."""
    params = order.params
    names = params["tests"]
    test = _directly if params["direct"] else _by_calls
    outcomes: dict[str, _Outcome] = {}
    for name in names:
        late = sum(outcome.late for outcome in outcomes.values())
        outcomes[name] = _Outcome("not run") if late == MAX_TIME_OUTS else test(order, name)
    failed = {name: outcome.why for name, outcome in outcomes.items() if outcome.why}
    share = 1.0 - len(failed) / len(names)
    return {
        "value": share if params["pays"] == "share" else float(not failed),
        "ran": sum(outcome.ran for outcome in outcomes.values()),
        "passed": len(names) - len(failed),
        "evidence": {
            "failed": failed, "seed": params["seed"],
            "timed_out": sum(outcome.late for outcome in outcomes.values()),
        },
    }  # fmt: skip


def _by_calls(order: Order, name: str) -> _Outcome:
    params = order.params
    setup = {"path": params["path"], "module": params["module"], "adapter": None,
             "source": params["program"]}  # fmt: skip
    with Candidate(order, setup, params["timeout_s"]) as candidate:
        sys.modules[params["module"]] = _Proxy(params["module"], candidate)
        try:
            candidate.open()
            why = _carried_out(params["suite"], name, params["tests"])
        except SuiteFault:
            raise
        except BaseException as error:
            why = f"import failed: {_told(error)}"
        if candidate.unsendable:
            raise SuiteFault(candidate.unsendable)
        if ended := candidate.ended:
            return _Outcome(str(ended), ran=ended.timed_out, late=ended.timed_out)
        return _Outcome(why)


def _directly(order: Order, name: str) -> _Outcome:
    params = order.params
    told = {key: params[key] for key in ("path", "module", "program", "suite", "tests")}
    ran = order.run(
        [os.path.join(order.artefacts, params["path"])],
        source=_DIRECT, stdin=dumps(told | {"test": name}).encode(),
        timeout_s=params["timeout_s"], memory_bytes=params["memory_bytes"],
    )  # fmt: skip
    try:
        record = loads(ran.stdout)
        complete = ran.exit_code == 0 and set(record) == {"test", "why"} and record["test"] == name
    except (ValueError, TypeError):
        complete = False
    if not complete:
        why = "ran out of time" if ran.timed_out else f"no record, exit code {ran.exit_code}"
        return _Outcome(why, ran=ran.timed_out, late=ran.timed_out)
    return _Outcome(str(record["why"]))


def answer() -> None:
    """Be the process of one test of a direct suite."""
    told = loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    os.dup2(2, 1)
    try:
        module = sys.modules[told["module"]] = type(sys)(told["module"])
        module.__dict__["__file__"] = told["path"]
        exec(compile(told["program"], told["path"], "exec"), module.__dict__)
        why = _carried_out(told["suite"], told["test"], told["tests"])
    except BaseException as error:
        why = _told(error)
    with open(channel, "w", encoding="utf-8") as report:
        report.write(dumps({"test": told["test"], "why": why}))


class _Proxy(type(sys)):  # type: ignore[misc]
    """The candidate's module as a suite sees it: every name is a function that is called there. As
    from a generator (PEP 479) no StopIteration comes of one: it would end a `map` of the suite's
    before its time.
    """

    def __init__(self, name: str, candidate: Candidate) -> None:
        super().__init__(name)
        self.__dict__["_candidate"] = candidate

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        candidate: Candidate = self.__dict__["_candidate"]

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return candidate.call(name, args, kwargs)
            except (StopIteration, StopAsyncIteration) as error:
                raise RuntimeError(f"{name} raised {type(error).__name__}") from None

        return call


# --- tests --------------------------------------------------------------------------------------


def _carried_out(suite: str, name: str, expected: list[str]) -> str:
    """Why a test failed; empty: it passed."""
    sys.modules["pytest"] = _stand_in()
    space: dict[str, Any] = {"__name__": "suite", "__file__": "suite.py"}
    exec(compile(suite, "suite", "exec"), space)
    found = dict(_collected(space))
    if set(found) != set(expected):
        odd = sorted(set(found) ^ set(expected))
        raise SuiteFault(f"the suite's text and what it defines differ in the tests {odd}")
    try:
        return found[name]()
    except SuiteFault:
        raise
    except BaseException as error:
        return _told(error)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _collected(space: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], str]]]:
    cases = getattr(sys.modules.get("unittest"), "TestCase", ())
    for name, thing in space.items():
        if isinstance(thing, _FUNCTION) and name.startswith("test"):
            yield name, _later(_plain, thing)
        if not isinstance(thing, type) or thing.__module__ != "suite":
            continue
        unit = bool(cases) and issubclass(thing, cases)
        if unit or name.startswith("Test"):
            for inner in filter(lambda inner: inner.startswith("test"), dir(thing)):
                yield f"{name}.{inner}", _later(_unit if unit else _method, thing, inner)


def _later(run: Callable[..., str], *arguments: Any) -> Callable[[], str]:
    return lambda: run(*arguments)


def _plain(function: Any, *bound: Any) -> str:
    """A test function, with every combination of its parameters."""
    sets = getattr(function, "parameter_sets", [])
    ran = 0
    for combination in itertools.product(*sets):
        values = {key: item for part in combination for key, item in part.items()}
        code, defaults = function.__code__, function.__defaults__ or ()
        wanted = code.co_varnames[len(bound) : code.co_argcount - len(defaults)]
        if "tmp_path" in wanted:
            import pathlib
            import tempfile

            values["tmp_path"] = pathlib.Path(tempfile.mkdtemp())
        if function(*bound, **{key: values[key] for key in wanted}) is not None:
            raise SuiteFault(f"{function.__name__} gives something back: what it checks is unseen")
        ran += 1
    return "" if ran else "no parameters, so nothing ran"


def _method(owner: type, name: str) -> str:
    case = owner()
    before, after = (getattr(case, f"{word}_method", None) for word in ("setup", "teardown"))
    if before:
        before()
    try:
        return _plain(getattr(owner, name), case)
    finally:
        if after:
            after()


def _unit(owner: Any, name: str) -> str:
    import unittest

    result = unittest.TestResult()
    unittest.TestSuite([owner(name)]).run(result)
    odd = [*result.skipped, *result.expectedFailures, *result.unexpectedSuccesses]
    troubles = [text for _, text in (*result.errors, *result.failures)]
    if result.testsRun == 1 and not odd and not troubles:
        return ""
    return (troubles or ["skipped or expected to fail"])[0].strip()[-300:]


# --- the stand-in for pytest ----------------------------------------------------------------------


class _Raises:
    def __init__(self, expected: Any, match: str | None) -> None:
        self.expected, self.match = expected, match
        self.value: BaseException | None = None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if error is None:
            raise AssertionError(f"did not raise {self.expected}")
        if not isinstance(error, self.expected):
            return False
        import re

        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError(f"{error} does not match {self.match!r}")
        self.value = error
        return True


def _raises(expected: Any, *call: Any, match: str | None = None) -> _Raises:
    raises = _Raises(expected, match)
    if call:
        with raises:
            call[0](*call[1:])
    return raises


class _Approx:
    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.expected, self.bounds = expected, (rel, abs)

    def __eq__(self, found: object) -> bool:
        return self._near(self.expected, found)

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def _near(self, one: Any, other: Any) -> bool:
        if isinstance(one, dict):
            return isinstance(other, dict) and one.keys() == other.keys() and all(
                self._near(item, other[key]) for key, item in one.items())  # fmt: skip
        if isinstance(one, (list, tuple)):
            return type(one) is type(other) and len(one) == len(other) and all(
                map(self._near, one, other))  # fmt: skip
        if type(other) not in (int, float):
            return bool(one == other)
        relative, absolute = self.bounds
        return near(one, other, max(relative * abs(one), absolute))


def _parametrize(names: Any, rows: Any, **ignored: Any) -> Callable[[Any], Any]:
    keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
    sets = [dict(zip(keys, row if len(keys) > 1 else (row,))) for row in rows]  # noqa: B905

    def mark(function: Any) -> Any:
        function.parameter_sets = [sets, *getattr(function, "parameter_sets", [])]
        return function

    return mark


def _fail(reason: str = "failed") -> None:
    raise AssertionError(reason)


def _stand_in() -> Any:
    pytest = type(sys)("pytest")
    mark = type(sys)("mark")
    mark.__dict__["parametrize"] = _parametrize
    pytest.__dict__.update(raises=_raises, approx=_Approx, fail=_fail, mark=mark)
    return pytest
