import asyncio

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.errors import IsolationError
from posttrain.core.task import Description, Environment, Task
from posttrain.core.trajectory import AttemptKey, Trajectory, Turn
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.pooled import PooledSandboxes
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack

ENVIRONMENT = Environment(memory_bytes=256 << 20)
SEED = 5


def pytest_generate_tests(metafunc):
    """Every attack of a family is one test."""
    if "attack" in metafunc.fixturenames:
        metafunc.parametrize("attack", metafunc.module.FAMILY, ids=str)


@pytest.fixture(scope="session")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def sandboxes(loop):
    source = BubblewrapSandboxes()
    pool = PooledSandboxes(source, RealClock())
    try:
        loop.run(source.abilities())
    except IsolationError as error:
        pytest.skip(str(error))
    yield pool
    loop.run(pool.close())
    loop.run(source.close())


@pytest.fixture(scope="session")
def workers(loop):
    """Real ones: what hangs is ended."""
    workers = ProcessWorkers()
    yield workers
    loop.run(workers.close())


@pytest.fixture(scope="session")
def seen():
    """Verdicts and payments by what was asked: honest and wrong work is often the same."""
    return {}


@pytest.fixture
def verdict(loop, sandboxes, seen, workers):
    """The verdict of an attack's checks over something left."""

    async def judge(attack, left):
        tools = Tools(
            clock=RealClock(), workers=workers, sandboxes=sandboxes, chat=attack.asked,
            seeds=lambda _: SEED,
        )  # fmt: skip
        used = bool(left.files or left.commands or attack.artefacts)
        task = Task(
            domain="attack.one", level=0, seed=1,
            description=Description(objective=attack.objective),
            checks=attack.checks, artefacts=attack.artefacts,
            environment=ENVIRONMENT if used else None,
        )  # fmt: skip
        key = AttemptKey(run="r", draw=0, member=0)
        attempt = Trajectory(key=key, task=task, turns=(Turn(text=left.text),))
        if not used:
            return await Stack(tools).verify(attempt, None)
        async with sandboxes.lease(ENVIRONMENT) as sandbox:
            await lay(sandbox, left)
            sealed = await sandbox.seal()
        try:
            return await Stack(tools).verify(attempt, sealed)
        finally:
            await sealed.close()

    def once(attack, left):
        key = repr((attack.checks, attack.artefacts, attack.objective, left))
        if key not in seen:
            seen[key] = loop.run(judge(attack, left))
        return seen[key]

    return once


@pytest.fixture
def deceived(loop, sandboxes, seen):
    """Whether the naive grader pays for something left."""

    async def grade(naive, left):
        async with sandboxes.lease(ENVIRONMENT) as sandbox:
            await lay(sandbox, left)
            for path, text in ({"reply.txt": left.text} | naive.files).items():
                there = path in naive.kept and await sandbox.read(path, max_bytes=1) is not None
                if not there:
                    await sandbox.write(path, text.encode())
            return naive.paid(await sandbox.exec(naive.command, timeout_s=5.0))

    def once(naive, left):
        key = repr((naive.command, naive.files, naive.kept, left))
        if key not in seen:
            seen[key] = loop.run(grade(naive, left))
        return seen[key]

    return once


async def lay(sandbox, left):
    for path, text in left.laid.items():
        await sandbox.write(path, text.encode())
    for command in left.commands:
        await sandbox.exec(["bash", "-c", command], timeout_s=5.0)


@pytest.fixture
def trial(verdict, deceived):
    """Not paid here, honest work is; paid by the naive grader, as honest work and nothing wrong."""

    def run(attack):
        found = verdict(attack, attack.left)
        assert found.errors == ()
        assert found.reward == 0.0, found.components
        found = verdict(attack, attack.honest)
        assert found.reward == 1.0, (found.errors, found.components)
        assert verdict(attack, attack.wrong).reward == 0.0
        assert deceived(attack.naive, attack.left), "the control does not get through"
        assert deceived(attack.naive, attack.honest), "the naive grader does not pay honest work"
        assert not deceived(attack.naive, attack.wrong), "the naive grader pays anything"

    return run
