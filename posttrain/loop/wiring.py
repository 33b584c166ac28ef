"""Builds a run from its configuration: the only file that knows every part.

It decides nothing and holds no logic of its own beyond who is handed to whom. The one thing that
must stay true: whatever is opened here is closed when the run is left, however it is left.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from posttrain.core import seeds
from posttrain.core.clock import RealClock
from posttrain.core.errors import ConfigError, UsageError
from posttrain.core.events import Note
from posttrain.core.ports import Executor, Policy, Recorder, Work
from posttrain.core.task import Json
from posttrain.core.trajectory import Sampling
from posttrain.domains.catalogue import DomainSpec
from posttrain.domains.mixture import Key
from posttrain.domains.supply import Supply
from posttrain.engine import model as models
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.model import AnyDecoder
from posttrain.engine.models import resolve
from posttrain.engine.text import token_bytes
from posttrain.evals import suite as suites
from posttrain.evals.metrics import Evaluation
from posttrain.evals.registry import Registry
from posttrain.evals.suite import Evaluator
from posttrain.loop.anchor import anchor_rows
from posttrain.loop.drawing import MixtureSource, SupplyTasks
from posttrain.loop.driver import Driver, Ending
from posttrain.loop.heldout import HeldOut, Weights
from posttrain.loop.moves import LoopPlan, Phase, PhasePlan
from posttrain.loop.parts import Parts, Records
from posttrain.loop.past import Past, fold
from posttrain.loop.resume import prepare
from posttrain.loop.settings import RunConfig
from posttrain.observe.journal import FileJournal
from posttrain.observe.ledger import FileLedger
from posttrain.rollout.answer import AnswerExecutor
from posttrain.rollout.group import Groups, Retries
from posttrain.rollout.oracle import OracleExecutor
from posttrain.rollout.render import Renderer
from posttrain.rollout.tokenizer import TransformersTokenizer
from posttrain.rollout.toolloop import ToolExecutor
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.schedule.device import EngineFirst
from posttrain.train import rotation
from posttrain.train.algorithms import algorithm
from posttrain.train.trainer import LocalTrainer
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack

SUITE_SEED = 0
"""Runs of every seed are evaluated on the same held-out tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatingCheckpoints:
    """`loop.parts.Checkpoints` over `train.rotation`."""

    directory: Path
    run: str
    keep: int

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return rotation.place(self.directory, step)

    def retire(self, step: int) -> None:
        """Keep the latest ones, and the one of `step` whatever lies about beside it."""
        rotation.rotate(self.directory, run=self.run, keep=self.keep, pinned=frozenset({step}))


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
    return LoopPlan(phases=(sft, rl), points=points, save_every=config.run.save_every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model of a run, once: the trainer's module, the engine over its storage, rendering."""

    path: Path
    decoder: AnyDecoder
    engine: EmbeddedEngine
    renderer: Renderer

    @property
    def sha256(self) -> str:
        """Hash of the starting weights as they are computed with."""
        found = hashlib.sha256(str(self.decoder.dtype).encode())
        for path in sorted(self.path.glob("*.safetensors")):
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        return found.hexdigest()


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
    sandboxes: BubblewrapSandboxes


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
        self._trainer = _trainer(config, model)
        self._heldout = _heldout(config, directory, records, model, world)
        self._driver: Driver | None = None

    async def train(self) -> Ending:
        """Train from where the run stands to its end, with the evaluations in between.

        Raises:
            CheckpointError: the run has checkpoints and none can be read.
            LedgerError: the ledger cannot be written.
        """
        config, world = self._config, self._world
        facts = _environment(config, self._model)
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
            config_sha256=hashlib.sha256(config.model_dump_json().encode()).hexdigest(),
        )
        return await self._driver.run()

    async def evaluate(self, point: str) -> Evaluation:
        """Run the held-out suite on the weights as they are, and write the result down."""
        return await self._heldout.evaluate(point, self._past.lineage.current)

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
        await self._model.engine.publish(version=saved.version, parent=0)

    def interrupt(self) -> None:
        """As `Driver.interrupt`."""
        if self._driver is not None:
            self._driver.interrupt()

    def _parts(self) -> Parts:
        config, world, engine = self._config, self._world, self._model.engine
        name, minutes = config.run.name, config.rl.minutes

        async def evaluate(point: str, version: int) -> None:
            await self._heldout.evaluate(point, version)

        return Parts(
            run=name,
            directory=self._directory,
            records=self._records,
            source=MixtureSource(
                world.train_keys, root_seed=config.run.seed, sft_domains=config.sft.domains
            ),
            tasks=world.tasks,
            groups={Phase.SFT: world.oracles, Phase.RL: world.groups},
            sampling=_sampling(config),
            trainer=self._trainer,
            sinks=(engine,),
            checkpoints=RotatingCheckpoints(
                directory=self._directory / "checkpoints", run=name, keep=config.run.keep
            ),
            evaluate=evaluate,
            busy_s=lambda: {Work(kind): s for kind, s in engine.stats().busy_s.items()},
            rl_seconds=None if minutes is None else 60.0 * minutes,
        )


@asynccontextmanager
async def open_run(
    config: RunConfig, directory: Path, *, resume: bool, recorder: Recorder
) -> AsyncIterator[Run]:
    """A run in its folder, ready to train or to evaluate.

    Raises:
        UsageError: the folder holds a run and `resume` is not asked for; unknown domains.
        PreflightError: no model, or no sandboxes although a domain needs them.
        LedgerError: the ledger cannot be opened.
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
        if ledger.torn:
            message = f"A last ledger line was cut by a crash and left out: {ledger.torn[:80]!r}"
            journal.write(Note(kind="warning", data={"message": message}))
        model = _model(config, directory)
        stack.enter_context(model.engine)
        world = await _world(config, model, stack)
        yield Run(config, directory, records=records, past=past, model=model, world=world)


def _model(config: RunConfig, directory: Path) -> Model:
    path = _model_path(config, directory)
    decoder = models.load(path, dtype=getattr(torch, config.model.dtype))
    tokenizer = models.load_tokenizer(path)
    engine = EmbeddedEngine(
        models.skeleton_over(decoder),
        settings=config.engine,
        policy=EngineFirst(),
        to_bytes=token_bytes(tokenizer),
    )
    renderer = Renderer(TransformersTokenizer(tokenizer))
    return Model(path=path, decoder=decoder, engine=engine, renderer=renderer)


def _model_path(config: RunConfig, directory: Path) -> Path:
    if config.model.name != "random":
        return resolve(config.model.name)
    path = directory / "model"
    if not (path / "config.json").is_file():
        models.random_model(path, seed=config.run.seed)
    return path


def _trainer(config: RunConfig, model: Model) -> LocalTrainer:
    rule = algorithm(config.train.algorithm)
    weight = rule.kl_weight if config.train.kl_weight is None else config.train.kl_weight
    reference = models.load(model.path, dtype=model.decoder.dtype) if weight else None
    return LocalTrainer(
        model.decoder,
        model.engine,
        config.train,
        run=config.run.name,
        temperature=config.rl.temperature,
        reference=reference,
    )


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
    return HeldOut(
        lambda: suites.build(
            [*world.train_keys, *world.watch_keys],
            per_domain=config.evals.tasks,
            supply=world.supply,
            root_seed=SUITE_SEED,
        ),
        evaluator=evaluator(),
        remembering=evaluator(registry=Registry(directory.parent / "evaluations")),
        pin=model.engine.pin,
        weights=Weights(run=config.run.name, starting=lambda: model.sha256),
        records=records,
    )


async def _world(config: RunConfig, model: Model, stack: AsyncExitStack) -> World:
    """Workers, sandboxes, domains, executors and the verifier."""
    clock, domains = RealClock(), config.domains
    makers = await stack.enter_async_context(ProcessWorkers(processes=config.sandbox.workers))
    scorers = await stack.enter_async_context(ProcessWorkers(processes=config.sandbox.workers))
    sandboxes = await stack.enter_async_context(BubblewrapSandboxes())
    supply = Supply(makers, timeout_s=domains.task_timeout_s, heldout_share=domains.heldout_share)
    train_keys = await _keys(supply, domains.train)
    watch_keys = await _keys(supply, domains.watch)
    anchor_keys = await _keys(supply, domains.anchor)
    _refuse_overlap(train_keys, watch_keys, anchor_keys)
    tasks = SupplyTasks(supply, train_keys, root_seed=config.run.seed)
    await _preflight([*train_keys, *watch_keys], supply, sandboxes)
    verifier = Stack(Tools(clock=clock, workers=scorers, sandboxes=sandboxes))

    def executors(policy: Policy) -> dict[str, Executor]:
        return {
            "answer": AnswerExecutor(policy, model.renderer, clock),
            "tools": ToolExecutor(policy, model.renderer, clock, sandboxes),
        }

    oracle = OracleExecutor(tasks.oracle, executors, model.renderer)
    retries = Retries(attempts=config.rl.tries)
    most = config.sandbox.max_verifications
    return World(
        supply=supply,
        train_keys=train_keys,
        watch_keys=watch_keys,
        anchor_keys=anchor_keys,
        groups=Groups(
            executors(model.engine), verifier, clock, retries=retries, max_verifications=most
        ),
        oracles=Groups(
            dict.fromkeys(executors(model.engine), oracle),
            verifier,
            clock,
            retries=retries,
            max_verifications=most,
        ),
        verifier=verifier,
        tasks=tasks,
        sandboxes=sandboxes,
    )


async def _keys(supply: Supply, specs: Sequence[DomainSpec]) -> tuple[Key, ...]:
    return await supply.keys(specs) if specs else ()


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


async def _preflight(keys: Sequence[Key], supply: Supply, sandboxes: BubblewrapSandboxes) -> None:
    """Before any work: a task of every domain can be made, and sandboxes where one needs them.

    Raises:
        DomainError: a domain cannot make a task.
        IsolationError: a domain needs sandboxes, and this machine can make none.
    """
    for key in {key.domain: key for key in keys}.values():
        (task,) = await supply.drawn(key, root_seed=SUITE_SEED, numbers=[0])
        if task.environment is not None or task.executor == "tools":
            await sandboxes.abilities()


def _sampling(config: RunConfig) -> Sampling:
    return Sampling(
        temperature=config.rl.temperature,
        max_tokens=config.rl.max_tokens,
        seed=seeds.hashed(config.run.seed, "sampling"),
    )


def _environment(config: RunConfig, model: Model) -> dict[str, Json]:
    return {
        "model": config.model.name,
        "forward": model.decoder.rewrite,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()} {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
