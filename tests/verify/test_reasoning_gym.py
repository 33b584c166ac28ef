import asyncio
import importlib

import pytest

from posttrain.core.errors import VerifierError, WorkerError
from posttrain.core.task import Check
from posttrain.verify import reasoning_gym
from posttrain.verify.kinds import Subject, Tools


class Scorer:
    """Workers whose scorer answers one thing and records what it was asked."""

    def __init__(self, score):
        self.score, self.calls = score, []

    async def call(self, function, *arguments, timeout_s):
        self.calls.append((function, arguments, timeout_s))
        return self.score


def scored(score, reply, attempt, clock, **params):
    check = Check(
        kind="reasoning_gym", params={"dataset": "gcd", "entry": {"answer": "1"}} | params
    )
    workers = Scorer(score)
    subject = Subject(trajectory=attempt(reply, objective="Find the one and only divisor."))
    finding = asyncio.run(
        reasoning_gym.reasoning_gym(check, subject, Tools(clock=clock, workers=workers))
    )
    return finding.value, workers.calls


def test_a_foreign_score_pays_only_at_its_top(make_attempt, clock):
    assert scored(1.0, "1", make_attempt, clock)[0] == 1.0
    assert scored(1 - 1e-9, "1", make_attempt, clock)[0] == 1.0
    assert scored(0.995, "1", make_attempt, clock)[0] == 0.0
    assert scored(0.5, "1", make_attempt, clock)[0] == 0.0


def test_the_scorer_gets_dataset_entry_and_answer_in_a_worker(make_attempt, clock):
    _, calls = scored(1.0, " 1 ", make_attempt, clock, timeout_s=3)
    assert calls == [(reasoning_gym.SCORER, ("gcd", {"answer": "1"}, "1"), 3.0)]


def test_an_answer_at_which_the_scorer_hangs_pays_0_unless_it_hangs_at_the_right_one_too(
    make_attempt, clock
):
    class Hanging(Scorer):
        async def call(self, function, *arguments, timeout_s):
            if arguments[2] in self.score:
                raise WorkerError("score ran past its time limit (10 s).")
            return 1.0

    check = Check(kind="reasoning_gym", params={"dataset": "gcd", "entry": {"answer": "1"}})
    subject = Subject(trajectory=make_attempt("1e999999999", objective="Find the divisor."))
    tools = Tools(clock=clock, workers=Hanging({"1e999999999"}))
    finding = asyncio.run(reasoning_gym.reasoning_gym(check, subject, tools))
    assert finding.value == 0.0
    assert "ran past its time limit" in finding.evidence["refused"]

    class Busy(Hanging):
        async def call(self, function, *arguments, timeout_s):
            if timeout_s <= 10.0:
                return await super().call(function, *arguments, timeout_s=timeout_s)
            return 1.0

    tools = Tools(clock=clock, workers=Busy({"1e999999999"}))
    finding = asyncio.run(reasoning_gym.reasoning_gym(check, subject, tools))
    assert finding.value == 1.0, "with twice the time it ended"
    tools = Tools(clock=clock, workers=Hanging({"1e999999999", "1"}))
    with pytest.raises(WorkerError):
        asyncio.run(reasoning_gym.reasoning_gym(check, subject, tools))


def test_one_line_is_the_answer_unless_the_gold_answer_has_several(make_attempt, clock):
    _, calls = scored(1.0, "1\nor rather 2", make_attempt, clock)
    assert calls[0][1][2] == "1"
    grid = {"answer": "1 2\n3 4"}
    _, calls = scored(1.0, "1 2\n3 4\n", make_attempt, clock, entry=grid)
    assert calls[0][1][2] == "1 2\n3 4"


@pytest.mark.parametrize("reply", ["", "Find the one and only divisor."])
def test_a_generous_scorer_is_not_even_asked_about_nothing(reply, make_attempt, clock):
    """Measured: eleven public scorers pay for an empty answer, 32 for the echoed prompt."""
    assert scored(1.0, reply, make_attempt, clock) == (0.0, [])


@pytest.mark.parametrize("score", [None, "1", True, -0.1, 1.1, float("nan")])
def test_a_score_that_is_no_share_is_the_scorers_failure(score, make_attempt, clock):
    with pytest.raises(VerifierError, match="wanted a score"):
        scored(score, "1", make_attempt, clock)


def test_the_scorer_that_is_called_by_name_exists():
    module, _, name = reasoning_gym.SCORER.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
