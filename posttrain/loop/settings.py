"""The configuration of a run: one section a part, in the order a person reads them.

Not a place for defaults of a part that has its own settings class. The one thing that must stay
true: a run is a function of this record and of its seed; nothing else chooses anything.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.core.config import Settings
from posttrain.domains.catalogue import DomainSpec
from posttrain.domains.mixture import HELDOUT_SHARE
from posttrain.engine.settings import EngineSettings
from posttrain.evals.metrics import SANDBOX_TASKS, TASKS
from posttrain.train.settings import TrainSettings


class RunSettings(Settings):
    """What the run is called, and what it may cost."""

    name: str = "run"
    """Name of the run's folder under `runs/`; part of every attempt's identity."""
    seed: int = Field(default=0, ge=0)
    """Root of every stream of chance."""
    save_every: int = Field(default=20, ge=1)
    """Optimiser steps between checkpoints; the end of a phase is always saved."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints that stay on disk, newest first."""
    workspaces_mib: int = Field(default=2048, ge=0)
    """What all attempts left in their sandboxes may take on disk, for judging them again; beyond
    that the oldest are let go, those of domains on hold and under review last."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Price of this machine, for the report; None: no price is shown."""


class ModelSettings(Settings):
    """What is trained."""

    name: str = "smollm2-135m"
    """A fetched model (`smollm2-135m`, or `owner/name` of the Hugging Face hub), a local folder, or
    `random` (tiny, untrained)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What engine and trainer compute in; master weights are float32 always."""


class DomainsSettings(Settings):
    """What is practised, and what is watched for forgetting."""

    train: tuple[DomainSpec, ...] = ()
    """Domains whose tasks are trained on (their held-out tasks are evaluated)."""
    watch: tuple[DomainSpec, ...] = ()
    """Domains that are evaluated and never trained on."""
    anchor: tuple[DomainSpec, ...] = ()
    """Domains whose training tasks, with the starting model's own replies, hold the weights
    (`train.anchor_weight`)."""
    anchor_tasks: int = Field(default=64, ge=1)
    """Tasks of the anchor, over all its domains."""
    heldout_share: float = Field(default=HELDOUT_SHARE, gt=0, lt=1)
    """Share of the tasks, by hash of their content, that training never sees."""
    task_timeout_s: float = Field(default=30.0, gt=0)
    """What making one task may take before its domain counts as failing."""


class SftSettings(Settings):
    """The supervised phase on oracle trajectories, before RL."""

    steps: int = Field(default=0, ge=0)
    """Optimiser steps; 0: no such phase."""
    examples_per_step: int = Field(default=32, ge=1)
    """Oracle trajectories in one step."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    """Domain of the mixture → its share of this phase's draws, instead of its weight there; 0
    leaves it out."""


class RlSettings(Settings):
    """The phase of reinforcement learning from verified outcomes."""

    steps: int = Field(default=100, ge=0)
    """Optimiser steps at most; 0: no such phase."""
    minutes: float | None = Field(default=None, gt=0)
    """Time of training (evaluations and saves not counted) after which the phase ends; None: no
    such limit."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Groups in one step."""
    group_size: int = Field(default=8, ge=2)
    """Attempts at one task that are compared with one another."""
    max_staleness: int = Field(default=0, ge=0)
    """Updates that may lie between sampling a token and training on it. 0: synchronous; from 1
    on, the next batch is generated while one trains."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training attempts."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens of one turn at most; a task's own limits apply beside it."""
    tries: int = Field(default=3, ge=1)
    """Executions of one attempt, all layers together, before an infrastructure failure is final."""
    hold_alarms: bool = True
    """Train no more on a domain whose rewards jump as gamed ones do, until `posttrain release`;
    false: only warn. Very fast honest learning can look alike (docs/VERIFICATION.md)."""


class EvalSettings(Settings):
    """Held-out evaluation."""

    tasks: int = Field(default=TASKS, ge=1)
    """Held-out tasks of a domain; all there are where it has fewer."""
    sandbox_tasks: int = Field(default=SANDBOX_TASKS, ge=1)
    """Held-out tasks of a domain whose tasks run in a sandbox."""
    at: tuple[Literal["base", "sft", "rl"], ...] = ("base", "sft", "rl")
    """Points of the run at which the suite is run."""
    every: int | None = Field(default=None, ge=1)
    """RL steps after which the suite is run as well, and a checkpoint made; None: only at those
    points."""


class SandboxSettings(Settings):
    """Processes beside the model."""

    driver: Literal["auto", "bubblewrap", "container"] = "auto"
    """What makes sandboxes; `auto`: bubblewrap, or, where it cannot work, containers."""
    workers: int = Field(default=1, ge=1)
    """Killable processes that make tasks and score answers."""
    max_verifications: int = Field(default=8, ge=1)
    """Verdicts worked out at once."""


class JudgeSettings(Settings):
    """The model that marks replies where a domain asks for a judge."""

    url: str = ""
    """Base of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; '': no judge."""
    model: str = ""
    """Name of the model there. Not one of the family that is trained: it would favour its own."""
    key_variable: str = ""
    """Environment variable that holds the key; '': none is sent."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time one request may take."""


class RunConfig(Settings):
    """The resolved configuration of a run."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    domains: DomainsSettings = DomainsSettings()
    sft: SftSettings = SftSettings()
    rl: RlSettings = RlSettings()
    train: TrainSettings = TrainSettings()
    judge: JudgeSettings = JudgeSettings()
    evals: EvalSettings = EvalSettings()
    sandbox: SandboxSettings = SandboxSettings()
