"""Opens an examiner of domains: workers, sandboxes and a verifier, no run and no model.

It decides nothing (`evals.admission` does). The one thing that must stay true: the two sides of a
determinism check run in different worker processes.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from posttrain.core.clock import RealClock
from posttrain.domains.supply import Supply
from posttrain.engine import model as models
from posttrain.evals import leaks
from posttrain.evals.admission import Examiner
from posttrain.evals.played import player
from posttrain.loop.judging import open_judge
from posttrain.loop.settings import RunConfig
from posttrain.loop.wiring import executors_over, open_sandboxes
from posttrain.rollout.render import Renderer
from posttrain.rollout.tokenizer import TransformersTokenizer
from posttrain.sandbox.source import Source
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack


@asynccontextmanager
async def open_examiner(
    config: RunConfig, *, processes: int
) -> AsyncIterator[tuple[Supply, Examiner, Source]]:
    """An examiner of domains, the supply of their keys, and what makes its sandboxes, as a run of
    this configuration would have them. Tool tasks are played with the byte tokenizer of a tiny
    random model, so that none needs to be fetched.
    """
    clock, domains = RealClock(), config.domains
    supplied = functools.partial(
        Supply, timeout_s=domains.task_timeout_s, heldout_share=domains.heldout_share
    )
    async with AsyncExitStack() as stack:
        makers = await stack.enter_async_context(ProcessWorkers(processes=processes))
        others = await stack.enter_async_context(ProcessWorkers(processes=processes))
        source, sandboxes = await open_sandboxes(stack, clock, config.sandbox.driver)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        tokenizer = models.load_tokenizer(models.random_model(Path(folder) / "model"))
        renderer = Renderer(TransformersTokenizer(tokenizer))
        chat = await open_judge(stack, config.judge, clock)
        verifier = Stack(Tools(clock=clock, workers=others, sandboxes=sandboxes, chat=chat))
        play = player(executors_over(renderer, clock, sandboxes), renderer, verifier, clock)
        supply, search = supplied(makers), leaks.searcher(sandboxes)
        examiner = Examiner(supply, supplied(others), verifier, clock, play=play, search=search)
        yield supply, examiner, source
