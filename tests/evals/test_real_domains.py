"""Suites and admission over the real supply: a domain's code in killable worker processes."""

import asyncio

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.task import Oracle
from posttrain.domains.catalogue import DomainSpec
from posttrain.domains.mixture import is_heldout, shared_content
from posttrain.domains.supply import Supply
from posttrain.evals.admission import Examiner
from posttrain.evals.suite import Evaluator, build
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack


async def never(task, oracle: Oracle):
    pytest.fail("an answer task is not played")


def test_a_built_in_domain_is_admitted_and_has_a_heldout_suite():
    async def body():
        async with ProcessWorkers() as one, ProcessWorkers() as two:
            stack = Stack(Tools(clock=RealClock(), workers=one))
            supply = Supply(one)
            keys = await supply.keys([DomainSpec(name="toy.sort")])
            examiner = Examiner(supply, Supply(two), stack, RealClock(), play=never, search=never)
            report = await examiner.examine(keys, per_level=2)
            assert report.admitted, report.reasons
            suite = await build(keys, per_domain=12, supply=supply)
            again = await build(keys, per_domain=12, supply=Supply(two))
            constants = await Evaluator(None, stack, RealClock()).constants(suite)
            trained = await supply.drawn(keys[0], root_seed=0, numbers=range(12))
            return suite, again, constants, trained

    suite, again, constants, trained = asyncio.run(body())
    assert len({shared_content(task) for task in suite.tasks}) == 12
    assert all(is_heldout(task) for task in suite.tasks)
    assert not any(is_heldout(task) for task in trained)
    assert suite.sha256 == again.sha256
    assert 0 < constants["toy.sort"].rate < 0.5
