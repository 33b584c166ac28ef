"""Opens an examiner of domains: workers, sandboxes and a verifier, no run and no model.

It decides nothing (`evals.admission` does). The one thing that must stay true: the two sides of a
determinism check run in different worker processes.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from posttrain.core.clock import RealClock
from posttrain.domains.supply import Supply
from posttrain.engine import model as models
from posttrain.evals import leaks
from posttrain.evals.admission import Examiner, player
from posttrain.loop.judging import open_judge
from posttrain.loop.settings import JudgeSettings
from posttrain.loop.wiring import executors_over, open_sandboxes
from posttrain.rollout.render import Renderer
from posttrain.rollout.tokenizer import TransformersTokenizer
from posttrain.sandbox import drivers
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack


@asynccontextmanager
async def open_examiner(
    judge: JudgeSettings, *, processes: int
) -> AsyncIterator[tuple[Supply, Examiner]]:
    """An examiner of domains, and the supply of their keys; no run and no model. Tool tasks are
    played with the byte tokenizer of a tiny random model, so that none needs to be fetched; the two
    sides of a determinism check run in different worker processes.
    """
    clock = RealClock()
    async with AsyncExitStack() as stack:
        makers = await stack.enter_async_context(ProcessWorkers(processes=processes))
        others = await stack.enter_async_context(ProcessWorkers(processes=processes))
        _, sandboxes = await open_sandboxes(stack, clock, drivers.AUTO)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        tokenizer = models.load_tokenizer(models.random_model(Path(folder) / "model"))
        renderer = Renderer(TransformersTokenizer(tokenizer))
        chat = await open_judge(stack, judge, clock)
        verifier = Stack(Tools(clock=clock, workers=others, sandboxes=sandboxes, chat=chat))
        play = player(executors_over(renderer, clock, sandboxes), renderer, verifier, clock)
        supply = Supply(makers)
        yield supply, Examiner(supply, Supply(others), verifier, clock, play=play,
                                search=leaks.searcher(sandboxes))  # fmt: skip
