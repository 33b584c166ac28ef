"""A whole run without torch: scripted parts behind the real driver, ledger and journal.

`weights` is a hash of everything that was ever trained, and a sampled token is a hash of (weights,
draw, member): whatever is lost, repeated or mixed up on the way shows in the last weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.core import seeds
from posttrain.core.clock import ManualClock
from posttrain.core.errors import CheckpointError, DomainError
from posttrain.core.events import Drawn, Evaluated, LedgerEvent, Note
from posttrain.core.ports import AttemptRequest, Example, StepReport, Work
from posttrain.core.task import Check, Description, Json, Place, Task
from posttrain.core.trajectory import Group, Row, Sampling, Trajectory, Turn
from posttrain.core.verdict import Component, Outcome, StopReason, Verdict
from posttrain.domains.mixture import Draw, Key
from posttrain.evals.metrics import Evaluation, Result
from posttrain.loop.driver import Driver, Ending
from posttrain.loop.moves import LoopPlan, Phase, PhasePlan
from posttrain.loop.parts import Parts, Records, Source, Tasks
from posttrain.loop.past import fold
from posttrain.loop.resume import prepare
from posttrain.observe.journal import FileJournal
from posttrain.observe.ledger import FileLedger

RUN = "scripted"


class Fuse:
    """Kills this process with SIGKILL at the n-th thing that reaches the disk."""

    def __init__(self, left: int = 0) -> None:
        self.left = left
        self.passed = 0

    def burn(self) -> None:
        self.passed += 1
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class FusedLedger(FileLedger):
    fuse: Fuse
    on_append: Callable[[LedgerEvent], None] = staticmethod(lambda event: None)

    def append(self, event: LedgerEvent) -> None:
        self.on_append(event)
        super().append(event)
        self.fuse.burn()

    def sync(self) -> None:
        """Nothing: what the operating system has survives SIGKILL, and fsync would take most of
        the time of these tests (`tests/observe` tests it).
        """


class FusedJournal(FileJournal):
    fuse: Fuse

    def sync(self) -> None:
        """As above."""

    def write(self, note: Note) -> str:
        place = super().write(note)
        self.fuse.burn()
        return place


@dataclass
class Watching:
    records: list[tuple[str, Mapping[str, Json]]] = field(default_factory=list)

    def record(self, kind: str, data: Mapping[str, Json]) -> None:
        self.records.append((kind, data))

    def of(self, kind: str) -> list[Mapping[str, Json]]:
        return [data for name, data in self.records if name == kind]


@dataclass
class ScriptedSource:
    """Domains by hash; with `total`, a finite set that is dry after so many draws."""

    domains: Sequence[str] = ("a", "b", "c")
    total: int | None = None

    def draw(self, number: int, *, without: frozenset[str]) -> Draw | None:
        able = [name for name in self.domains if name not in without]
        if not able or (self.total is not None and number >= self.total):
            return None
        seed = seeds.hashed("task", number)
        name = able[seed % len(able)]
        return Draw(number=number, key=Key(domain=name, level=0, reference=name), seed=seed)


@dataclass
class ScriptedTasks:
    broken: frozenset[str] = frozenset()

    async def task(self, drawn: Drawn) -> Task:
        await asyncio.sleep(0)
        if drawn.domain in self.broken:
            raise DomainError(f"domain {drawn.domain!r} raised KeyError: 'x'")
        return Task(
            domain=drawn.domain,
            level=drawn.level,
            seed=drawn.seed,
            description=Description(objective=f"task {drawn.seed}"),
            checks=(Check(kind="exact"),),
        )


class ScriptedModel:
    """Trainer and engine over one 'storage'."""

    def __init__(self, fuse: Fuse) -> None:
        self.weights = "start"
        self.step = 0
        self.version = 0
        self.lineage: list[int] = [0]
        self.batches: list[list[int]] = []
        self.prompts: list[list[str]] = []
        """Objectives of each RL step's groups, in the order of their draws."""
        self.fuse = fuse
        self.fail_step: Exception | None = None
        self.fail_save: Exception | None = None
        self.max_age = 0
        self.bound = 0

    async def rl_step(self, groups: Sequence[Group], *, version: int) -> StepReport:
        rows = [row for group in groups for member in group.members for row in member.rows]
        self.prompts.append([group.task.description.objective for group in groups])
        for group in groups:
            for member in group.members:
                for version in member.versions():
                    age = len(self.lineage) - 1 - self.lineage.index(version)
                    self.max_age = max(self.max_age, age)
        return await self._step(rows, [group.draw for group in groups])

    async def sft_step(self, examples: Sequence[Example]) -> StepReport:
        return await self._step([example.row for example in examples], [])

    async def _step(self, rows: Sequence[Row], draws: list[int]) -> StepReport:
        for _ in range(3):
            await asyncio.sleep(0)
        if self.fail_step is not None:
            raise self.fail_step
        self.step += 1
        self.batches.append(draws)
        self.weights = seeds.hex_key(self.weights, *(i for row in rows for i in row.ids_T))
        return StepReport(step=self.step, loss=0.5, num_tokens=len(rows), num_sequences=len(rows))

    async def publish(self, *, version: int, parent: int) -> None:
        if version != self.lineage[-1]:  # else it was loaded just now
            assert version > self.version, "versions rise"
            assert parent == self.lineage[-1], "a version follows the one it was made from"
            self.lineage.append(version)
        self.version = version
        self.fuse.burn()

    async def save(self, directory: Path, *, extra: Mapping[str, Json]) -> None:
        if self.fail_save is not None:
            raise self.fail_save
        self.fuse.burn()
        aside = directory.with_name("." + directory.name)
        aside.mkdir(parents=True, exist_ok=True)
        state = {"weights": self.weights, "step": self.step, "lineage": self.lineage}
        (aside / "state.json").write_text(json.dumps({**state, "extra": dict(extra)}))
        self.fuse.burn()
        if directory.exists():
            (directory / "state.json").unlink()
            directory.rmdir()
        aside.rename(directory)
        self.fuse.burn()

    async def load(self, directory: Path) -> Mapping[str, Json]:
        try:
            state = json.loads((directory / "state.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory.name} is damaged") from error
        self.weights, self.step = state["weights"], state["step"]
        self.lineage = state["lineage"]
        extra: Mapping[str, Json] = state["extra"]
        return extra


@dataclass
class ScriptedGroups:
    """Attempts whose tokens depend on the weights and on the key, and on nothing else."""

    model: ScriptedModel
    oracle: bool = False
    failing: Mapping[str, str] = field(default_factory=dict)
    """Domain → error of all its attempts."""
    delay: Callable[[int], int] = lambda draw: 1
    """Turns of the event loop an attempt of a draw takes."""
    hold: asyncio.Event | None = None

    async def run(
        self,
        requests: Sequence[AttemptRequest],
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> Group:
        members = []
        for request in requests:
            weights, version = self.model.weights, self.model.version
            for _ in range(self.delay(request.key.draw)):
                await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
            members.append(self.made(request, weights, version))
            if on_finished is not None:
                on_finished(members[-1])
        return Group(draw=requests[0].key.draw, task=requests[0].task, members=tuple(members))

    def made(self, request: AttemptRequest, weights: str, version: int) -> Trajectory:
        key = request.key
        token = seeds.hashed("oracle" if self.oracle else weights, key.draw, key.member) % 10_000
        drawn_by = -1 if self.oracle else version
        row = Row(
            ids_T=(1, token),
            mask_T=(False, True),
            logprobs_T=(0.0, -0.5),
            versions_T=(-1, drawn_by),
            kv_versions_T=(-1, drawn_by),
        )
        trajectory = Trajectory(
            key=key,
            task=request.task,
            rows=(row,),
            turns=(Turn(text=str(token), num_sampled_tokens=1),),
            stop=StopReason.FINISHED,
            tries=request.tries,
            timings_s={"generate": 0.1, "verify": 0.01},
        )
        error = self.failing.get(request.task.domain)
        if error is not None:
            return replace(trajectory, outcome=Outcome.VERIFIER_FAILED, error=error)
        value = 1.0 if self.oracle else float(token % 2)
        part = Component(name="exact", place=Place.DETERMINISTIC, value=value)
        return trajectory.judged(Verdict(components=(part,)), Outcome.SCORED)


@dataclass
class Checkpoints:
    directory: Path
    keep: int = 100

    def place(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"step-{step:06d}"

    def retire(self, step: int) -> None:
        pass


@dataclass
class World:
    """One process's view of a run on disk. Built afresh for each start."""

    directory: Path
    staleness: int = 0
    steps: int = 4
    sft_steps: int = 1
    save_every: int = 2
    points: frozenset[str] = frozenset({"base", "rl"})
    fuse: Fuse = field(default_factory=Fuse)
    source: Source = field(default_factory=ScriptedSource)
    tasks: Tasks = field(default_factory=ScriptedTasks)
    failing: Mapping[str, str] = field(default_factory=dict)
    delay: Callable[[int], int] = lambda draw: 1 + draw % 3
    rl_seconds: float | None = None
    hold_alarms: bool = True
    groups_per_step: int = 2
    size: int = 2
    config: str = "c"
    evaluate_every: int = 0
    held_out: Mapping[str, int] = field(default_factory=dict)
    """Domain → how many of its hundred held-out tasks pass."""

    def __post_init__(self) -> None:
        self.model = ScriptedModel(self.fuse)
        self.watching = Watching()
        self.clock = ManualClock()
        self.evaluated: list[tuple[str, str]] = []
        self.policy = ScriptedGroups(self.model, failing=self.failing, delay=self.delay)
        self.driver: Driver | None = None
        self.on_append: Callable[[LedgerEvent], None] = lambda event: None

    @property
    def plan(self) -> LoopPlan:
        sft = PhasePlan(phase=Phase.SFT, steps=self.sft_steps, groups=2, size=1)
        rl = PhasePlan(
            phase=Phase.RL,
            steps=self.steps,
            groups=self.groups_per_step,
            size=self.size,
            max_staleness=self.staleness,
        )
        return LoopPlan(
            phases=(sft, rl), points=self.points, save_every=self.save_every,
            evaluate_every=self.evaluate_every,
        )  # fmt: skip

    async def evaluate(self, here: Evaluated) -> Evaluation:
        await asyncio.sleep(0)
        self.evaluated.append((here.point, self.model.weights))
        scored = Outcome.SCORED
        results = tuple(
            Result(task=f"{name}/{n}", domain=name, outcome=scored, reward=float(n < passed))
            for name, passed in self.held_out.items() for n in range(100)
        )  # fmt: skip
        return Evaluation(suite="s", weights=here.point, sampling=Sampling(), results=results)

    def parts(self, ledger: FusedLedger, journal: FusedJournal) -> Parts:
        return Parts(
            run=RUN,
            directory=self.directory,
            records=Records(
                ledger=ledger, journal=journal, recorder=self.watching, clock=self.clock
            ),
            sources=dict.fromkeys(Phase, self.source),
            tasks=self.tasks,
            groups={
                Phase.SFT: ScriptedGroups(self.model, oracle=True),
                Phase.RL: self.policy,
            },
            sampling=dict.fromkeys(Phase, Sampling()),
            trainer=self.model,
            sinks=(self.model,),
            handing_over=lambda version, parent: contextlib.nullcontext(),
            checkpoints=Checkpoints(self.directory),
            evaluate=self.evaluate,
            busy_s=lambda: dict.fromkeys(Work, 0.0),
            hold_alarms=self.hold_alarms,
            rl_seconds=self.rl_seconds,
        )

    async def start(self) -> Ending:
        with FusedLedger(self.directory / "ledger.jsonl") as ledger:
            ledger.fuse = self.fuse
            ledger.on_append = self.appended  # type: ignore[method-assign]
            journal = FusedJournal(self.directory / "journal")
            journal.fuse = self.fuse
            try:
                past = fold(ledger.events())
                parts = self.parts(ledger, journal)
                config = {"run": {"name": self.config, "seed": 0}}
                self.driver = await prepare(parts, self.plan, past, config=config)
                return await self.driver.run()
            finally:
                journal.close()

    def appended(self, event: LedgerEvent) -> None:
        if self.driver is not None:
            self.driver.check()
        self.on_append(event)

    def run(self) -> Ending:
        return asyncio.run(self.start())
