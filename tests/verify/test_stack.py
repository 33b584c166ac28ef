import asyncio
import json
import math

import pytest

from posttrain.core.errors import UsageError, WorkerError
from posttrain.core.task import Check, Place
from posttrain.verify import stack as stacks
from posttrain.verify.fingerprint import fingerprint
from posttrain.verify.kinds import REPLY_KINDS, Tools
from posttrain.verify.layers import Finding
from posttrain.verify.stack import Stack


async def raising(check, subject, tools):
    raise WorkerError("the scorer died.")


async def hanging(check, subject, tools):
    await asyncio.Event().wait()


async def stubborn(check, subject, tools):
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if check.params["patience"].pop() == 0:
                raise


async def nan(check, subject, tools):
    return Finding(value=math.nan)


async def number(check, subject, tools):
    return 1.0


KINDS = {**REPLY_KINDS, "raising": raising, "hanging": hanging, "nan": nan, "number": number,
         "stubborn": stubborn}  # fmt: skip
RIGHT = Check(kind="exact", params={"answer": "two"})
WRONG = Check(kind="exact", params={"answer": "three"})
GATE = Check(kind="not_empty", place=Place.GUARD, gate=True)


@pytest.fixture
def verify(make_attempt, clock):
    def run(reply, *checks, **more):
        stack = Stack(Tools(clock=clock, **more), kinds=KINDS)
        return asyncio.run(stack.verify(make_attempt(reply, checks=checks), None))

    return run


def test_right_wrong_and_half_right(verify):
    assert verify("two", RIGHT).reward == 1.0
    assert verify("two", WRONG).reward == 0.0
    assert verify("two", RIGHT, WRONG).reward == 0.5


def test_a_closed_guard_ends_the_verdict_at_nothing(verify):
    verdict = verify("", RIGHT, GATE)
    assert [component.name for component in verdict.components] == ["not_empty"]
    assert verdict.reward == 0.0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raising", "WorkerError: the scorer died."),
        ("hanging", "no answer within 180 s"),
        ("nan", "wanted a value in [0, 1], got nan"),
        ("number", "answered float"),
        ("exakt", "did you mean 'exact'"),
    ],
)
def test_a_check_that_fails_itself_leaves_no_reward(kind, message, verify):
    """BR-25: a grader's crash or time-out became reward 0.0."""
    verdict = verify("two", Check(kind=kind), RIGHT)
    assert verdict.reward is None
    assert message in verdict.errors[0]
    assert verdict.components[0].value is None


def test_a_failed_check_stops_later_layers(verify):
    late = Check(kind="exact", params={"answer": "two"}, place=Place.RULE)
    verdict = verify("two", Check(kind="raising"), late)
    assert len(verdict.components) == 1


def test_a_task_without_a_judging_check_is_never_paid(verify):
    assert verify("two").reward is None
    assert verify("two", GATE).reward is None
    assert "only check" in verify("two", Check(kind="judge", place=Place.JUDGE)).errors[0]


def test_a_check_that_resists_cancellation_is_left_behind_and_counted(make_attempt, clock):
    async def body():
        stack = Stack(Tools(clock=clock), kinds=KINDS, hang_s=1.0)
        check = Check(kind="stubborn", params={"name": "stubborn", "patience": [0, 1]})
        verdict = await stack.verify(make_attempt("two", checks=[check]), None)
        assert verdict.reward is None
        assert stack.stats().hung_checks == stack.stats().left_behind == 1
        stack.check()
        for work in list(stack._left_behind):
            work.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stack.stats().left_behind == 0

    asyncio.run(body())


def test_cancelling_the_verdict_cancels_the_check(make_attempt, clock):
    ended = []

    async def noting(check, subject, tools):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(check.kind)

    async def body():
        stack = Stack(Tools(clock=clock), kinds={"noting": noting}, hang_s=1e9)
        attempt = make_attempt("two", checks=[Check(kind="noting")])
        verdict = asyncio.ensure_future(stack.verify(attempt, None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        verdict.cancel()
        with pytest.raises(asyncio.CancelledError):
            await verdict

    asyncio.run(body())
    assert ended == ["noting"]


def test_components_carry_where_they_come_from(verify):
    component = verify("two", RIGHT).components[0]
    assert component.verifier_version == f"exact@1+{fingerprint('posttrain.verify.kinds')}"
    assert component.verifier.startswith(f"{component.verifier_version}#")
    assert component.evidence == {"answer": "two"}
    assert json.dumps(dict(component.evidence))


def test_counts_are_kept(make_attempt, clock):
    async def body():
        stack = Stack(Tools(clock=clock), kinds=KINDS)
        for kind in ("exact", "raising"):
            check = Check(kind=kind, params={"answer": "two"})
            await stack.verify(make_attempt("two", checks=[check]), None)
            stack.check()
        assert stack.stats() == stacks.StackStats(verdicts=2, failed_checks=1)

    asyncio.run(body())


class Point:
    value = "other:kind"

    def __init__(self, name):
        self.name = name

    def load(self):
        return nan


def test_installed_kinds_join_the_built_in_ones_and_can_not_replace_them(monkeypatch):
    points = [Point("theirs")]
    monkeypatch.setattr(stacks.metadata, "entry_points", lambda group: points)
    assert stacks.registry()["theirs"] is nan
    points.append(Point("exact"))
    with pytest.raises(UsageError, match="'exact' of other:kind exists already"):
        stacks.registry()
