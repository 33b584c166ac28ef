import asyncio
from dataclasses import replace

import pytest

from posttrain.core.clock import ManualClock
from posttrain.core.errors import DomainError
from posttrain.core.task import Check, Description, Environment, Lane, Oracle, OracleTurn, Task
from posttrain.core.trajectory import Row, Turn
from posttrain.core.verdict import Outcome
from posttrain.domains.mixture import Key
from posttrain.evals import metrics
from posttrain.evals.metrics import Constant
from posttrain.evals.registry import Registry
from posttrain.evals.suite import GREEDY, Evaluator, Suite, build, spoken
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack


def addition(seed, level=0, *, domain="sum"):
    gold = str(seed % 3)
    return Task(domain=domain, level=level, seed=seed, private={"answer": gold},
                description=Description(objective=f"What is {seed} modulo three?"),
                checks=(Check(kind="exact", params={"answer": gold}),))  # fmt: skip


class Sums:
    """A supply of tasks; `size` distinct ones, the same at every level."""

    def __init__(self, size=100):
        self.size = size

    async def pool(self, key, *, root_seed, count):
        numbers = range(min(count, self.size))
        return tuple(addition(n, key.level, domain=key.domain) for n in numbers)

    async def oracles(self, key, tasks):
        return tuple(Oracle(turns=(OracleTurn(text=f" {t.private['answer']}"),)) for t in tasks)


class Saying:
    """Attempts that all say one thing and are judged for real; counts how many run at once."""

    def __init__(self, verifier, text="1"):
        self.verifier, self.text, self.requests = verifier, text, []
        self.running = self.most = 0

    async def attempt(self, request):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        row = Row(
            ids_T=(1,), mask_T=(True,), logprobs_T=(0.0,), versions_T=(0,), kv_versions_T=(0,)
        )
        said = replace(spoken(request.task, self.text), key=request.key, rows=(row,))
        verdict = await self.verifier.verify(said, None)
        self.running -= 1
        if request.key.draw == 3:
            return replace(said, outcome=Outcome.VERIFIER_FAILED, error="hung")
        return said.judged(verdict, Outcome.SCORED)


@pytest.fixture
def clock():
    return ManualClock(auto_jump=True)


@pytest.fixture
def stack(clock):
    return Stack(Tools(clock=clock))


def built(count, *, levels=(0,), supply=None, domains=("a",)):
    keys = [Key(domain=name, level=n, reference=name) for name in domains for n in levels]
    return asyncio.run(build(keys, per_domain=count, supply=supply or Sums()))


def test_a_suite_spreads_its_count_over_the_levels_without_duplicates():
    suite = built(5, levels=(0, 1))
    assert [task.level for task in suite.tasks] == [0, 0, 0, 1, 1]
    assert len({task.content_key for task in suite.tasks}) == 5
    assert suite.golds == (" 0", " 1", " 2", " 0", " 1")


def test_each_domain_gets_its_own_count():
    suite = built(3, domains=("a", "b"))
    assert [task.domain for task in suite.tasks] == ["a"] * 3 + ["b"] * 3


def test_a_small_question_space_gives_what_it_has_at_every_level():
    assert len(built(8, supply=Sums(size=3)).tasks) == 3
    shared = built(8, levels=(0, 1), supply=Sums(size=6))
    assert [task.level for task in shared.tasks] == [0, 0, 0, 0, 1, 1]


def test_a_domain_without_a_heldout_task_is_told():
    with pytest.raises(DomainError, match="a has no held-out task"):
        built(8, supply=Sums(size=0))


def test_the_hash_covers_checks_and_order_and_nothing_else():
    one = built(3)
    assert built(3).sha256 == one.sha256
    stricter = replace(one.tasks[0], checks=(Check(kind="exact", params={"answer": "x"}),))
    for tasks in (one.tasks[:2], one.tasks[::-1], (stricter, *one.tasks[1:])):
        assert Suite(tasks=tasks, golds=()).sha256 != one.sha256


@pytest.fixture
def run(clock, stack, tmp_path):
    def go(suite, *, text="1", registry=None, weights="w", on_finished=None):
        attempts = Saying(stack, text)
        evaluator = Evaluator(attempts, stack, clock, registry=registry, max_concurrent=4)
        result = asyncio.run(
            evaluator.evaluate(suite, weights=weights, slot="eval", on_finished=on_finished)
        )
        return result, attempts

    return go


def test_each_task_is_tried_once_greedily_in_the_eval_lane(run):
    suite = built(12)
    evaluation, attempts = run(suite)
    assert [request.task for request in attempts.requests] == list(suite.tasks)
    assert {request.lane for request in attempts.requests} == {Lane.EVAL}
    assert {request.slot for request in attempts.requests} == {"eval"}
    assert {request.sampling for request in attempts.requests} == {GREEDY}
    assert len({request.key.hex for request in attempts.requests}) == 12
    assert attempts.most == 4
    assert [result.task for result in evaluation.results] == [task.id for task in suite.tasks]


def test_a_lost_verdict_leaves_the_denominator(run):
    """BR-25."""
    score = metrics.scores(run(built(6))[0])["a"]
    assert (score.scored, score.lost) == (5, 1)
    assert score.passed == 2  # seeds 1 and 4


def test_the_best_constant_answer_stands_beside(run):
    evaluation, _ = run(built(4))
    assert evaluation.constants == {"a": Constant(text="0", rate=0.5)}


def test_a_domain_of_tools_has_no_constant_answer(stack, clock):
    task = replace(addition(1), executor="tools", environment=Environment())
    evaluator = Evaluator(Saying(stack), stack, clock)
    assert asyncio.run(evaluator.constants(Suite(tasks=(task,), golds=("Done.",)))) == {}


def test_results_are_remembered_by_suite_weights_and_sampling(run, tmp_path):
    registry = Registry(tmp_path)
    suite = built(3)
    first, attempts = run(suite, registry=registry)
    again, none = run(suite, registry=registry, text="2")
    other, _ = run(suite, registry=registry, text="2", weights="v")
    assert again == first
    assert len(attempts.requests) == 3
    assert none.requests == []
    assert other.results != first.results


def test_an_evaluation_that_lost_attempts_is_not_remembered(run, tmp_path):
    suite = built(5)
    run(suite, registry=Registry(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_people_get_the_same_samples_whether_it_ran_or_was_remembered(run, tmp_path):
    registry, seen, again = Registry(tmp_path), [], []
    suite = built(3)
    first, _ = run(suite, registry=registry, on_finished=seen.append)
    run(suite, registry=registry, on_finished=again.append)
    assert len(seen) == 3
    assert again == list(first.samples) == [replace(one, rows=()) for one in seen[:2]]


def test_a_spoken_text_is_an_attempt_of_one_turn():
    assert spoken(addition(1), "x").turns == (Turn(text="x"),)
