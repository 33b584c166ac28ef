import asyncio
import json

import pytest

from posttrain.core import codec
from posttrain.core.clock import ManualClock
from posttrain.core.containment import ExecResult
from posttrain.core.errors import EngineError, LedgerError
from posttrain.core.ports import Attempted, AttemptRequest
from posttrain.core.task import Limits
from posttrain.core.trajectory import AttemptKey, Sampling, Trajectory, Turn
from posttrain.core.verdict import Outcome, StopReason, Verdict
from posttrain.rollout.answer import AnswerExecutor
from posttrain.rollout.group import Groups, Retries
from posttrain.rollout.toolloop import ToolExecutor
from tests.rollout.doubles import (
    Judge,
    MemorySandboxes,
    MemorySealed,
    Sayings,
    answer_task,
    renderer,
    request,
    tool_task,
    verdict,
)

RIGHT = Judge(lambda trajectory, sealed: verdict(float(trajectory.final_text.strip() == "42")))


def groups_over(policy, *, verifier=RIGHT, clock=None, retries=None, sandboxes=None, **options):
    clock = clock or ManualClock(auto_jump=True)
    executors = {
        "answer": AnswerExecutor(policy, renderer(), clock),
        "tools": ToolExecutor(policy, renderer(), clock, sandboxes or MemorySandboxes()),
    }
    return Groups(executors, verifier, clock, retries=retries, **options)


def requests(count, task=None, draw=7):
    task = task or answer_task()
    keys = (AttemptKey(run="r", draw=draw, member=member) for member in range(count))
    return [AttemptRequest(key=key, task=task, sampling=Sampling()) for key in keys]


# --- verdict and outcome ----------------------------------------------------------------------


def test_attempt_runs_to_its_verdict():
    groups = groups_over(Sayings(" 42"))
    trajectory = asyncio.run(groups.attempt(request(answer_task())))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0)
    assert set(trajectory.timings_s) == {"generate", "queue", "verify"}
    assert groups.stats().outcomes == {Outcome.SCORED: 1}
    groups.check()


def test_group_keeps_its_members_in_order_and_tells_of_each_once():
    told = []
    groups = groups_over(Sayings(" 42", " 41", " 42"))
    group = asyncio.run(groups.run(requests(3), told.append))
    assert [member.key.member for member in group.members] == [0, 1, 2]
    assert group.rewards == (1.0, 0.0, 1.0)
    assert sorted(trajectory.key.member for trajectory in told) == [0, 1, 2]


def test_crashed_grader_takes_the_sample_out_and_is_no_zero():
    """BR-25: rewards [1, 0, none, 1]."""
    answers = iter([verdict(1.0), verdict(0.0), verdict(None, error="grader died"), verdict(1.0)])
    groups = groups_over(Sayings(" 42"), verifier=Judge(lambda *_: next(answers)))
    group = asyncio.run(groups.run(requests(4)))
    assert group.rewards == (1.0, 0.0, None, 1.0)
    third = group.members[2]
    assert (third.outcome, third.error) == (Outcome.VERIFIER_FAILED, "exact: grader died")


def raises(error):
    def judge(trajectory, sealed):
        raise error

    return Judge(judge)


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        (raises(RuntimeError("boom")), "the verifier raised RuntimeError: boom"),
        (raises(TimeoutError()), "the verifier raised TimeoutError"),
        (Judge(lambda *_: Verdict()), "nothing was judged"),
    ],
)
def test_verifier_that_says_nothing_is_a_failed_verifier(verifier, reason):
    groups = groups_over(Sayings(" 42"), verifier=verifier)
    trajectory = asyncio.run(groups.attempt(request(answer_task())))
    assert (trajectory.outcome, trajectory.error) == (Outcome.VERIFIER_FAILED, reason)
    assert trajectory.reward is None


def test_empty_reply_is_the_policys_failure_and_asks_no_verifier():
    verifier = Judge(lambda *_: verdict(1.0))
    groups = groups_over(Sayings(" "), verifier=verifier)
    trajectory = asyncio.run(groups.attempt(request(answer_task())))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.POLICY_FAILED, 0.0)
    assert verifier.seen == 0


def test_silent_tool_attempt_is_judged_by_what_it_left():
    sandboxes = MemorySandboxes()
    verifier = Judge(lambda trajectory, sealed: verdict(float("done" in sealed.files)))
    groups = groups_over(
        Sayings("```sh\ntouch done\n```", ""), verifier=verifier, sandboxes=sandboxes
    )
    trajectory = asyncio.run(groups.attempt(request(tool_task())))
    assert trajectory.reward == 1.0
    assert sandboxes.sealed[0].closed == 1


def test_running_out_of_time_with_the_file_written_earns_the_reward():
    """BR-25: a time-out the policy can cause is graded on the state it left, not discarded."""
    clock = ManualClock(auto_jump=True)

    def run(files, argv, stdin, timeout_s):
        files["answer.txt"] = b"42"
        clock.advance(timeout_s)
        return ExecResult(exit_code=None, stdout="", stderr="", timed_out=True)

    verifier = Judge(lambda _, sealed: verdict(float(sealed.files.get("answer.txt") == b"42")))
    groups = groups_over(
        Sayings("```sh\necho 42 > answer.txt; sleep 60\n```"),
        verifier=verifier, clock=clock, sandboxes=MemorySandboxes(run),
    )  # fmt: skip
    task = tool_task(limits=Limits(max_turns=8, time_s=5.0))
    trajectory = asyncio.run(groups.attempt(request(task)))
    assert trajectory.stop is StopReason.TIME_LIMIT
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0)


def test_sandbox_is_returned_before_the_verifier_is_asked():
    sandboxes = MemorySandboxes()
    returned = []

    def judge(trajectory, sealed):
        returned.append(sandboxes.returned)
        return verdict(1.0)

    groups = groups_over(Sayings("Done."), verifier=Judge(judge), sandboxes=sandboxes)
    asyncio.run(groups.attempt(request(tool_task())))
    assert returned == [1]


def test_sealed_workspace_is_closed_although_the_verifier_raises():
    sandboxes = MemorySandboxes()
    groups = groups_over(Sayings("Done."), verifier=raises(OSError("x")), sandboxes=sandboxes)
    asyncio.run(groups.attempt(request(tool_task())))
    assert [sealed.closed for sealed in sandboxes.sealed] == [1]


def test_verifications_at_once_are_limited():
    class Slow:
        def __init__(self):
            self.now = self.most = 0

        async def verify(self, trajectory, sealed):
            self.now += 1
            self.most = max(self.most, self.now)
            await clock.sleep(1.0)
            self.now -= 1
            return verdict(1.0)

    clock, verifier = ManualClock(auto_jump=True), Slow()
    groups = groups_over(Sayings(" 42"), verifier=verifier, clock=clock, max_verifications=2)
    group = asyncio.run(groups.run(requests(6)))
    assert verifier.most == 2
    assert group.rewards == (1.0,) * 6


# --- retries (BR-24) --------------------------------------------------------------------------


class Server:
    """A policy behind a server: A is always refused, B is slow, C fails twice."""

    def __init__(self, clock):
        self.clock = clock
        self.asked = {"A": 0, "B": 0, "C": 0}
        self.finished_s = {}
        self._sayings = Sayings(" 42")

    async def sample(self, request):
        name = next(n for n in self.asked if renderer().prompt(named(n)) == request.ids)
        self.asked[name] += 1
        await self.clock.sleep({"A": 0.005, "B": 0.3, "C": 0.01}[name])
        if name == "A" or (name == "C" and self.asked["C"] < 3):
            raise EngineError(f"400 bad request of {name}")
        self.finished_s[name] = self.clock.now_s()
        return await self._sayings.sample(request)


def named(name):
    task = answer_task()
    return answer_task(domain=name, prefix=f"{name}:", description=task.description)


def make_all(names):
    clock = ManualClock(auto_jump=True)
    server = Server(clock)
    groups = groups_over(server, clock=clock)

    async def body():
        runs = [groups.run(requests(1, named(n), draw=i)) for i, n in enumerate(names)]
        return await asyncio.gather(*runs)

    made = asyncio.run(body())
    return server, {name: group.members[0] for name, group in zip(names, made, strict=True)}, groups


def test_each_attempt_has_one_budget_of_requests():
    server, made, groups = make_all("ABC")
    assert server.asked == {"A": 3, "B": 1, "C": 3}
    assert made["A"].outcome is Outcome.INFRA_FAILED
    assert made["A"].error == "400 bad request of A"
    assert [made[name].reward for name in "BC"] == [1.0, 1.0]
    assert [made[name].tries for name in "ABC"] == [3, 1, 3]
    assert server.finished_s["B"] == pytest.approx(0.3)
    assert groups.stats().retries == 4


def test_run_of_nothing_but_refusals_ends_with_the_servers_message():
    server, made, _ = make_all("A")
    assert made["A"].error == "400 bad request of A"
    assert server.clock.now_s() < 5.0


def test_resumed_attempt_has_what_is_left_of_its_budget():
    policy = Sayings(EngineError("down"))
    trajectory = asyncio.run(groups_over(policy).attempt(request(answer_task(), tries=2)))
    assert (len(policy.requests), trajectory.tries) == (2, 3)


def test_verifier_failures_are_not_retried():
    policy = Sayings(" 42")
    groups = groups_over(policy, verifier=raises(OSError("x")))
    asyncio.run(groups.attempt(request(answer_task())))
    assert len(policy.requests) == 1


def test_pauses_grow_and_are_bounded():
    clock = ManualClock(auto_jump=True)
    retries = Retries(attempts=5, pause_s=1.0, max_pause_s=3.0)
    groups = groups_over(Sayings(EngineError("down")), clock=clock, retries=retries)
    asyncio.run(groups.attempt(request(answer_task())))
    assert clock.now_s() == 1.0 + 2.0 + 3.0 + 3.0


def test_unknown_executor_is_named_with_the_nearest_and_not_retried():
    groups = groups_over(Sayings(" 42"))
    trajectory = asyncio.run(groups.attempt(request(answer_task(executor="anwser"))))
    assert trajectory.outcome is Outcome.INFRA_FAILED
    assert "did you mean 'answer'?" in str(trajectory.error)
    assert trajectory.tries == 1


def test_executor_that_raises_against_its_contract_is_an_infrastructure_failure():
    class Rude:
        async def run(self, request):
            raise KeyError("x")

    groups = Groups({"answer": Rude()}, RIGHT, ManualClock(auto_jump=True))
    trajectory = asyncio.run(groups.attempt(request(answer_task())))
    assert trajectory.error == "answer: KeyError: 'x'"
    assert trajectory.tries == 3


def test_executor_that_does_not_count_its_tries_has_the_same_budget():
    class Forgetful:
        runs = 0

        async def run(self, request):
            self.runs += 1
            lost = Outcome.INFRA_FAILED
            return Attempted(
                trajectory=Trajectory(key=request.key, task=request.task, outcome=lost)
            )

    executor = Forgetful()
    groups = Groups({"answer": executor}, RIGHT, ManualClock(auto_jump=True))
    trajectory = asyncio.run(groups.attempt(request(answer_task())))
    assert (executor.runs, trajectory.tries) == (3, 3)


# --- cancellation -----------------------------------------------------------------------------


class Gate:
    """A policy that answers the first requests and leaves the others waiting."""

    def __init__(self, answers):
        self.answers = answers
        self.waiting = 0
        self._sayings = Sayings(" 42")

    async def sample(self, request):
        if self.answers:
            self.answers -= 1
            return await self._sayings.sample(request)
        self.waiting += 1
        await asyncio.Event().wait()


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


def test_cancelled_group_tells_of_every_member_exactly_once():
    told = []

    async def body():
        policy = Gate(answers=1)
        groups = groups_over(policy)
        running = asyncio.create_task(groups.run(requests(3), told.append))
        await until(lambda: policy.waiting == 2 and told)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        groups.check()
        assert groups.stats().running == 0

    asyncio.run(body())
    outcomes = {trajectory.key.member: trajectory.outcome for trajectory in told}
    cancelled = Outcome.CANCELLED
    assert outcomes == {0: Outcome.SCORED, 1: cancelled, 2: cancelled}
    assert len(told) == 3
    assert all(trajectory.reward is None for trajectory in told[1:])


def test_group_cancelled_before_it_began_still_tells_of_its_members():
    told = []

    async def body():
        groups = groups_over(Sayings(" 42"))
        running = asyncio.create_task(groups.run(requests(2), told.append))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(body())
    assert [trajectory.outcome for trajectory in told] == [Outcome.CANCELLED] * 2


def test_cancellation_during_verification_closes_the_seal():
    sandboxes = MemorySandboxes()

    class Hanging:
        async def verify(self, trajectory, sealed):
            await asyncio.Event().wait()

    async def body():
        groups = groups_over(Sayings("Done."), verifier=Hanging(), sandboxes=sandboxes)
        running = asyncio.create_task(groups.attempt(request(tool_task())))
        await until(lambda: groups.stats().verifying == 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        assert groups.stats().verifying == 0

    asyncio.run(body())
    assert sandboxes.sealed[0].closed == 1


def test_ledger_that_cannot_be_written_ends_the_group():
    def tell(trajectory):
        raise LedgerError("disk full")

    async def body():
        groups = groups_over(Gate(answers=1))
        await groups.run(requests(3), tell)

    with pytest.raises(LedgerError, match="disk full"):
        asyncio.run(body())


# --- what is stored ---------------------------------------------------------------------------


def test_every_text_of_a_trajectory_can_be_stored():
    class Dirty:
        async def run(self, request):
            turn = Turn(text="a\ud800", observations=("\udfff",))
            return Attempted(
                trajectory=Trajectory(
                    key=request.key, task=request.task, turns=(turn,), artefacts={"x": ["\ud800"]}
                ),
                sealed=MemorySealed({}),
            )

    judge = Judge(lambda *_: verdict(None, error="bad \ud83d"))
    groups = Groups({"answer": Dirty()}, judge, ManualClock())
    trajectory = asyncio.run(groups.attempt(request(answer_task())))
    stored = json.dumps(codec.to_json(trajectory), ensure_ascii=False).encode()
    assert codec.from_json(Trajectory, json.loads(stored)) == trajectory
    assert trajectory.turns[0].text == "a�"
    assert trajectory.stop is StopReason.FINISHED
