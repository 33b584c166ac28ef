"""What `domains check` is run with: workers, sandboxes, a verifier; no model.

Tool tasks are played with the byte tokenizer of a tiny random model, so no model needs to be
fetched. The one thing that must stay true: code of a domain runs in killable workers only, and
the two sides of a determinism check in two different processes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from posttrain.core.clock import RealClock
from posttrain.core.errors import PosttrainError
from posttrain.core.ports import Executor, Policy
from posttrain.domains.catalogue import DomainSpec, Entry
from posttrain.domains.supply import Supply
from posttrain.engine import model
from posttrain.evals.admission import Admission, Examiner, player
from posttrain.rollout.answer import AnswerExecutor
from posttrain.rollout.render import Renderer
from posttrain.rollout.tokenizer import TransformersTokenizer
from posttrain.rollout.toolloop import ToolExecutor
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack


async def examine(
    entries: Sequence[Entry], *, per_level: int, side_by_side: int = 2
) -> AsyncIterator[Admission]:
    """The report on each domain, as they are done."""
    async with _examiner(side_by_side) as (supply, examiner):
        room = asyncio.Semaphore(side_by_side)

        async def one(entry: Entry) -> Admission:
            async with room:
                try:
                    keys = await supply.keys([DomainSpec(name=entry.name)])
                    return await examiner.examine(keys, per_level=per_level)
                except PosttrainError as error:
                    return Admission(domain=entry.name, tasks=0, distinct=0, error=str(error))

        tasks = [asyncio.create_task(one(entry)) for entry in entries]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _examiner(processes: int) -> AsyncIterator[tuple[Supply, Examiner]]:
    clock = RealClock()
    async with AsyncExitStack() as stack:
        makers = await stack.enter_async_context(ProcessWorkers(processes=processes))
        others = await stack.enter_async_context(ProcessWorkers(processes=processes))
        attempts = await stack.enter_async_context(BubblewrapSandboxes())
        checks = await stack.enter_async_context(BubblewrapSandboxes())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        tokenizer = model.load_tokenizer(model.random_model(Path(folder) / "model"))
        renderer = Renderer(TransformersTokenizer(tokenizer))
        verifier = Stack(Tools(clock=clock, workers=others, sandboxes=checks))

        def executors(policy: Policy) -> dict[str, Executor]:
            return {
                "answer": AnswerExecutor(policy, renderer, clock),
                "tools": ToolExecutor(policy, renderer, clock, attempts),
            }

        play = player(executors, renderer, verifier, clock)
        supply = Supply(makers)
        yield supply, Examiner(supply, Supply(others), verifier, clock, play=play)
