"""Builds a run from its configuration: the only file that knows every part.

It decides nothing and holds no logic of its own beyond who is handed to whom. The one thing that
must stay true: whatever is opened here is closed when the run is left, however it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.core import events, seeds
from posttrain.core.clock import RealClock
from posttrain.core.containment import Sandboxes
from posttrain.core.errors import ConfigError, DomainError, LedgerError, UsageError
from posttrain.core.events import Note
from posttrain.core.ports import Clock, Executor, Policy, Recorder, Work
from posttrain.core.trajectory import Sampling
from posttrain.domains.mixture import Key
from posttrain.domains.supply import Supply
from posttrain.evals.metrics import Evaluation
from posttrain.evals.registry import Registry
from posttrain.evals.suite import Evaluator
from posttrain.loop.anchor import anchor_rows
from posttrain.loop.drawing import SupplyTasks, sources
from posttrain.loop.driver import Driver, Ending
from posttrain.loop.heldout import HeldOut
from posttrain.loop.judging import open_judge
from posttrain.loop.model import Model, environment, load_model, trainer_of
from posttrain.loop.moves import LoopPlan, Phase, PhasePlan
from posttrain.loop.parts import Parts, Records
from posttrain.loop.past import Past, fold
from posttrain.loop.resume import prepare
from posttrain.loop.settings import RunConfig
from posttrain.observe.index import REVIEWS
from posttrain.observe.journal import FileJournal
from posttrain.observe.kept import KeptWorkspaces, Spared, reviewed
from posttrain.observe.ledger import FileLedger
from posttrain.observe.workspaces import keeping
from posttrain.rollout.answer import AnswerExecutor
from posttrain.rollout.group import Groups, Keep, Retries
from posttrain.rollout.oracle import OracleExecutor
from posttrain.rollout.render import Renderer
from posttrain.rollout.toolloop import ToolExecutor
from posttrain.sandbox import drivers
from posttrain.sandbox.egress import Exchange
from posttrain.sandbox.pool import PoolSettings
from posttrain.sandbox.pooled import PooledSandboxes, room
from posttrain.sandbox.source import Source
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.train.checkpoint import RotatingCheckpoints
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack

UNLIMITED = 1 << 20
"""Tokens of an oracle's turn: only the task's own limits hold for it."""


def plan_of(config: RunConfig) -> LoopPlan:
    """What the configuration asks the loop to do."""
    sft = PhasePlan(
        phase=Phase.SFT, steps=config.sft.steps, groups=config.sft.examples_per_step, size=1
    )
    rl = PhasePlan(
        phase=Phase.RL,
        steps=config.rl.steps,
        groups=config.rl.prompts_per_step,
        size=config.rl.group_size,
        max_staleness=config.rl.max_staleness,
    )
    points = frozenset(config.evals.at)
    return LoopPlan(
        phases=(sft, rl),
        points=points,
        evaluate_every=config.evals.every,
        save_every=config.run.save_every,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What attempts are made with."""

    supply: Supply
    train_keys: tuple[Key, ...]
    watch_keys: tuple[Key, ...]
    anchor_keys: tuple[Key, ...]
    groups: Groups
    oracles: Groups
    verifier: Stack
    tasks: SupplyTasks
    sandboxed: frozenset[str]
    """Domains whose tasks run in a sandbox."""


class Run:
    """One run, opened. `train` is used once."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        *,
        records: Records,
        past: Past,
        model: Model,
        world: World,
    ) -> None:
        self._config = config
        self._directory = directory
        self._records = records
        self._past = past
        self._model = model
        self._world = world
        self._trainer = trainer_of(config, model)
        self._heldout = _heldout(config, directory, records, model, world)
        self._checkpoints = RotatingCheckpoints(
            directory=directory / "checkpoints", run=config.run.name, keep=config.run.keep
        )
        self._driver: Driver | None = None

    async def train(self) -> Ending:
        """Train from where the run stands to its end, with the evaluations in between.

        Raises:
            CheckpointError: the run has checkpoints and none can be read.
            LedgerError: the ledger cannot be written.
        """
        config, world = self._config, self._world
        self._checkpoints.sweep()
        facts = environment(config, self._model)
        self._records.journal.write(Note(kind="environment", data=facts))
        if config.train.anchor_weight and not self._past.saved:
            rows = await anchor_rows(
                world.anchor_keys,
                count=config.domains.anchor_tasks,
                supply=world.supply,
                groups=world.groups,
                sampling=_sampling(config),
            )
            await self._trainer.set_anchor(rows)
        self._driver = await prepare(
            self._parts(),
            plan_of(config),
            self._past,
            config=config.model_dump(mode="json"),
        )
        return await self._driver.run()

    async def evaluate(self, point: str) -> Evaluation:
        """Run the held-out suite on the weights as they are, and write the result down."""
        past = self._past
        return await self._heldout.evaluate(
            events.Evaluated(point=point, step=past.account.step, version=past.lineage.current)
        )

    async def restore(self) -> None:
        """Load the run's newest checkpoint, for an evaluation without training.

        Raises:
            UsageError: there is none yet.
            CheckpointError: it cannot be read.
        """
        if not self._past.saved:
            raise UsageError(f"{self._directory} has no checkpoint yet.", "train it first")
        saved = self._past.saved[-1]
        await self._trainer.load(self._directory / saved.path)
        self._past.lineage.rewind(saved.version)
        await self._model.engine.publish(version=saved.version, parent=0)

    def interrupt(self) -> bool:
        """As `Driver.interrupt`; False: the run has not begun, and nobody was asked."""
        if self._driver is not None:
            self._driver.interrupt()
        return self._driver is not None

    def _parts(self) -> Parts:
        config, world, engine = self._config, self._world, self._model.engine
        minutes = config.rl.minutes

        return Parts(
            run=config.run.name,
            directory=self._directory,
            records=self._records,
            sources=sources(
                world.train_keys, root_seed=config.run.seed, sft_weights=config.sft.weights
            ),
            tasks=world.tasks,
            groups={Phase.SFT: world.oracles, Phase.RL: world.groups},
            sampling={Phase.SFT: Sampling(max_tokens=UNLIMITED), Phase.RL: _sampling(config)},
            trainer=self._trainer,
            sinks=(engine,),
            handing_over=engine.handing_over,
            checkpoints=self._checkpoints,
            evaluate=self._heldout.evaluate,
            busy_s=lambda: {Work(kind): s for kind, s in engine.stats().busy_s.items()},
            hold_alarms=config.rl.hold_alarms,
            rl_seconds=None if minutes is None else 60.0 * minutes,
        )


@asynccontextmanager
async def open_run(
    config: RunConfig, directory: Path, *, resume: bool, recorder: Recorder,
    warnings: Sequence[str] = (),
) -> AsyncIterator[Run]:  # fmt: skip
    """A run in its folder, ready to train or to evaluate. `warnings` go into its record.

    Raises:
        UsageError: the folder holds a run and `resume` is not asked for; unknown domains.
        PreflightError: no model, or no sandboxes although a domain needs them.
        LedgerError: the ledger cannot be opened, or is empty beside checkpoints.
    """
    clock = RealClock()
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(FileLedger(directory / "ledger.jsonl"))
        journal = FileJournal(directory / "journal")
        stack.callback(journal.close)
        records = Records(ledger=ledger, journal=journal, recorder=recorder, clock=clock)
        past = fold(ledger.events())
        if past.starts and not resume:
            raise UsageError(
                f"{directory} holds a run already.", f"posttrain train --resume {directory.name}"
            )
        if resume and not past.starts and any((directory / "checkpoints").glob("step-*")):
            raise LedgerError(
                f"The ledger {directory / 'ledger.jsonl'} is empty, though there are checkpoints.",
                "restore the ledger from a copy, or start a new run.",
            )

        def warn(message: str) -> None:
            journal.write(Note(kind="warning", data={"message": message}))

        torn = f"A last ledger line was cut by a crash and left out: {ledger.torn[:80]!r}"
        for message in (*warnings, *([torn] if ledger.torn else ())):
            warn(message)
        model = load_model(config, directory)
        stack.enter_context(model.engine)
        loop = asyncio.get_running_loop()
        kept = KeptWorkspaces(
            directory, max_bytes=config.run.workspaces_mib << 20,
            spared=lambda: Spared(domains=past.held, keys=reviewed(directory / REVIEWS)),
            tell=lambda message: loop.call_soon_threadsafe(warn, message),
        )  # fmt: skip
        world = await _world(config, model, journal, stack, keeping(kept))
        yield Run(config, directory, records=records, past=past, model=model, world=world)


def _heldout(
    config: RunConfig, directory: Path, records: Records, model: Model, world: World
) -> HeldOut:
    evaluator = functools.partial(
        Evaluator,
        world.groups,
        world.verifier,
        records.clock,
        max_concurrent=config.engine.max_batch,
    )
    few = dict.fromkeys(world.sandboxed, config.evals.sandbox_tasks)
    return HeldOut(
        world.train_keys,
        watch=world.watch_keys,
        count=lambda domain: few.get(domain, config.evals.tasks),
        supply=world.supply,
        evaluator=evaluator(),
        remembering=evaluator(registry=Registry(directory.parent / "evaluations")),
        pin=model.engine.pin,
        named=lambda version: f"{config.run.name}@{version}" if version else model.sha256,
        records=records,
    )


async def _world(
    config: RunConfig, model: Model, journal: FileJournal, stack: AsyncExitStack, keep: Keep
) -> World:
    """Workers, sandboxes, domains, executors and the verifier."""
    clock, domains = RealClock(), config.domains
    makers = await stack.enter_async_context(ProcessWorkers(processes=config.sandbox.workers))
    scorers = await stack.enter_async_context(ProcessWorkers(processes=config.sandbox.workers))
    source, sandboxes = await open_sandboxes(stack, clock, config.sandbox.driver, journal)
    supply = Supply(makers, timeout_s=domains.task_timeout_s, heldout_share=domains.heldout_share)
    train_keys = await supply.keys(domains.train)
    watch_keys = await supply.keys(domains.watch)
    anchor_keys = await supply.keys(domains.anchor)
    _refuse_overlap(train_keys, watch_keys, anchor_keys)
    tasks = SupplyTasks(
        supply,
        train_keys,
        root_seed=config.run.seed,
        max_context_tokens=model.decoder.shape.max_context,
    )
    sandboxed = await sandboxed_domains([*train_keys, *watch_keys], supply, source)
    chat = await open_judge(stack, config.judge, clock)
    verifier = Stack(Tools(clock=clock, workers=scorers, sandboxes=sandboxes, chat=chat))
    executors = executors_over(model.renderer, clock, sandboxes)
    oracle = OracleExecutor(tasks.oracle, executors, model.renderer)
    groups = functools.partial(
        Groups,
        verifier=verifier,
        clock=clock,
        retries=Retries(attempts=config.rl.tries),
        max_verifications=config.sandbox.max_verifications,
        keep=keep,
    )
    return World(
        supply=supply,
        train_keys=train_keys,
        watch_keys=watch_keys,
        anchor_keys=anchor_keys,
        groups=groups(executors(model.engine)),
        oracles=groups(dict.fromkeys(executors(model.engine), oracle)),
        verifier=verifier,
        tasks=tasks,
        sandboxed=sandboxed,
    )


async def open_sandboxes(
    stack: AsyncExitStack, clock: Clock, driver: str, journal: FileJournal | None = None
) -> tuple[Source, PooledSandboxes]:
    """The driver, and the one pool over it for attempts and checks; requests are journaled."""

    def tell(exchange: Exchange) -> None:
        if journal is not None:
            journal.write(Note(kind="network", data=asdict(exchange)))

    source = await drivers.choose(driver, tell)
    stack.push_async_callback(source.close)
    pool = PooledSandboxes(source, clock, PoolSettings(max_alive=room()))
    return source, await stack.enter_async_context(pool)


def executors_over(
    renderer: Renderer, clock: Clock, sandboxes: Sandboxes
) -> Callable[[Policy], dict[str, Executor]]:
    """The executors by name, over whatever policy they are asked for."""

    def executors(policy: Policy) -> dict[str, Executor]:
        return {
            "answer": AnswerExecutor(policy, renderer, clock),
            "tools": ToolExecutor(policy, renderer, clock, sandboxes),
        }

    return executors


def _refuse_overlap(train: Sequence[Key], watch: Sequence[Key], anchor: Sequence[Key]) -> None:
    if not train:
        raise ConfigError("domains.train names no domain.", "see `posttrain domains ls`")
    named = {"train": train, "watch": watch, "anchor": anchor}
    where: dict[str, str] = {}
    for section, keys in named.items():
        for domain in dict.fromkeys(key.domain for key in keys):
            if domain in where:
                raise ConfigError(
                    f"domain {domain!r} is in domains.{where[domain]} and in domains.{section}.",
                    "name it in one of them; what is watched must not be trained on",
                )
            where[domain] = section


async def sandboxed_domains(keys: Sequence[Key], supply: Supply, source: Source) -> frozenset[str]:
    """The domains whose tasks run in a sandbox; that one can be made here is tried before any
    work. A domain that cannot make a task is left to the loop, which quarantines it.

    Raises:
        IsolationError: a domain needs sandboxes, and this machine can make none.
    """
    found = set()
    for key in {key.domain: key for key in keys}.values():
        with contextlib.suppress(DomainError):
            (task,) = await supply.drawn(key, root_seed=0, numbers=[0])
            if task.environment is not None:
                found.add(key.domain)
    if found:
        await source.capabilities()
    return frozenset(found)


def _sampling(config: RunConfig) -> Sampling:
    return Sampling(
        temperature=config.rl.temperature,
        max_tokens=config.rl.max_tokens,
        seed=seeds.hashed(config.run.seed, "sampling"),
    )
