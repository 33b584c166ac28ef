import asyncio

import pytest

from posttrain.core.errors import VerifierError, WorkerError
from posttrain.verify.decided import decided
from posttrain.verify.kinds import Tools


class Workers:
    """Answers where the time is long enough for what was given, and records the calls."""

    def __init__(self, **needed_s):
        self.needed_s, self.calls = needed_s, []

    async def call(self, function, given, *, timeout_s):
        self.calls.append((given, timeout_s))
        if timeout_s < self.needed_s[given]:
            raise WorkerError("it ran past its time limit.")
        return f"{given} is fine"


def outcome(clock, workers):
    tools = Tools(clock=clock, workers=workers)
    return asyncio.run(decided(tools, "m:f", ["reply"], ["sound"], timeout_s=10))


def test_an_answer_is_taken_at_once(clock):
    workers = Workers(reply=1, sound=1)
    assert outcome(clock, workers).answer == "reply is fine"
    assert workers.calls == [("reply", 10)]


def test_a_busy_machine_decides_nothing(clock):
    workers = Workers(reply=15, sound=1)
    assert outcome(clock, workers).answer == "reply is fine"
    assert workers.calls == [("reply", 10), ("sound", 10), ("reply", 20)]


def test_what_ends_a_sound_worker_twice_is_the_attempts_doing(clock):
    found = outcome(clock, Workers(reply=99, sound=1))
    assert (found.answer, found.refused) == (None, "no answer came of it: it ran past its time "
                                                   "limit.")  # fmt: skip


def test_a_worker_that_fails_at_what_is_sound_has_failed(clock):
    with pytest.raises(WorkerError):
        outcome(clock, Workers(reply=99, sound=99))
    with pytest.raises(VerifierError, match="wants workers"):
        outcome(clock, None)
