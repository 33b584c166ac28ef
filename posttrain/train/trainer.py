"""The trainer: `core.ports.Trainer` on the compute thread it is handed.

It decides nothing about data or versions and owns no thread. Every micro-batch is one work item,
the update another, so engine steps can run in between. The one thing that must stay true: weights
change in one work item or not at all; a step that fails or has nothing to train on leaves every
bit of them as it was.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.core.clock import RealClock
from posttrain.core.errors import CheckpointError, ConfigError, NonFiniteError
from posttrain.core.ports import Clock, Device, Example, StepReport, Work
from posttrain.core.task import Json
from posttrain.core.trajectory import Group, Row
from posttrain.train import checkpoint
from posttrain.train.anchor import Anchor, anchored, divergence
from posttrain.train.batch import Batch, Model
from posttrain.train.objective import Objective, Plan
from posttrain.train.optimizer import MasterAdamW
from posttrain.train.pack import pack
from posttrain.train.rl import PolicyObjective
from posttrain.train.settings import OptimizerSettings, TrainSettings
from posttrain.train.sft import SupervisedObjective
from posttrain.train.tally import Tally

_LOWER = "lower the learning rate in the run's config.toml"


@dataclass(slots=True)
class _Progress:
    """Where training stands."""

    step: int = 0
    """Steps done, skipped ones included."""
    phase: str = ""
    """`rl` or `sft`: what the optimiser's moments are about."""
    phase_step: int = 0
    """Steps of the phase; the learning rate goes by it."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What the micro-batches of a step left behind."""

    loss: float
    tally: Tally
    num_inputs: int
    """Tokens that went through the model, anchor rows included."""

    @property
    def metrics(self) -> dict[str, float]:
        return {**self.tally.metrics(), "input_tokens": float(self.num_inputs)}


class LocalTrainer:
    """Full fine-tuning of one model, whose only trainer this is, on one device.

    `model` is shared: engines see its parameters through views of their own, and every update is
    in place. `reference` holds the starting weights and is needed only for an algorithm's KL.
    `temperature` is the one attempts are sampled with. Steps, saves and loads queue up behind one
    another.

    Raises:
        ConfigError: the algorithm is unknown, or its KL has no reference.
    """

    def __init__(
        self,
        model: Any,
        device: Device,
        settings: TrainSettings,
        *,
        run: str,
        temperature: float = 1.0,
        reference: Model | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._model, self._device, self._settings, self._run = model, device, settings, run
        self._clock = clock or RealClock()
        self._policy = PolicyObjective(settings, reference=reference, temperature=temperature)
        self._supervised = SupervisedObjective()
        model.requires_grad_(True)
        self._optimizer = MasterAdamW(model.named_parameters())
        self._kind = torch.promote_types(model.dtype, torch.float32)
        self._anchor: Anchor | None = None
        self._progress = _Progress()
        self._turn = asyncio.Lock()

    async def rl_step(self, groups: Sequence[Group], *, version: int) -> StepReport:
        """One policy-gradient step on groups, from the weights published as `version`.

        Metrics: `logprob_gap_*` is the engine's disagreement with the trainer, over the tokens
        that these very weights sampled; `policy_drift_*` how far the policy has moved since older
        tokens were sampled.

        Raises:
            NonFiniteError: a loss or gradient was not finite; no parameter changed.
        """
        plan = replace(self._policy.plan(groups), version=version)
        return await self._step("rl", self._settings.rl, plan, self._policy)

    async def sft_step(self, examples: Sequence[Example]) -> StepReport:
        """One supervised step.

        Raises:
            NonFiniteError: a loss or gradient was not finite; no parameter changed.
        """
        plan = self._supervised.plan(examples)
        return await self._step("sft", self._settings.sft, plan, self._supervised)

    async def set_anchor(self, rows: Sequence[Row]) -> None:
        """Hold on to what the weights say *now* at the masked tokens of these rows. Call it with
        the starting weights; a checkpoint brings its own anchor along.

        Raises:
            UsageError: no row has a masked token.
        """
        async with self._turn:
            work = anchored(self._model, rows, budget=self._settings.micro_batch_tokens)
            self._anchor = await self._device.run(Work.TRAIN, work)

    async def save(self, directory: Path, *, extra: Mapping[str, Json]) -> None:
        """Write weights, masters and moments, anchor, random state and `extra`, atomically.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
            NonFiniteError: a weight is not finite; nothing was written.
        """
        async with self._turn:
            await self._device.run(Work.TRAIN, self._saved(directory, extra))

    async def load(self, directory: Path) -> Mapping[str, Json]:
        """Restore all of it; returns `extra`.

        Raises:
            CheckpointError: incomplete, damaged or of another model; nothing changed.
        """
        async with self._turn:
            content = await self._device.run(Work.TRAIN, checkpoint.read(directory))
            self._check_model(directory, content)
            await self._device.run(Work.UPDATE, self._restored(content))
        return dict(content.state["extra"])

    # --- one step -----------------------------------------------------------------------------

    async def _step(
        self, phase: str, settings: OptimizerSettings, plan: Plan, objective: Objective
    ) -> StepReport:
        async with self._turn:
            started_s = self._clock.now_s()
            if self._settings.anchor_weight and self._anchor is None:
                raise ConfigError(
                    f"anchor_weight is {self._settings.anchor_weight} without anchor rows.",
                    "call set_anchor before the first step, or set train.anchor_weight = 0",
                )
            before = self._progress
            same = before.phase == phase
            after = _Progress(before.step + 1, phase, before.phase_step + 1 if same else 1)
            gathered, norm = None, None
            if plan.skipped is None:
                gathered = await self._device.run(
                    Work.TRAIN, self._gradients(plan, objective, after.step)
                )
                norm = await self._device.run(
                    Work.UPDATE, self._updated(settings, after, restart=not same)
                )
            self._progress = after
            return StepReport(
                step=after.step,
                loss=gathered.loss if gathered else None,
                grad_norm=norm,
                num_tokens=plan.num_tokens,
                num_sequences=plan.num_sequences,
                duration_s=self._clock.now_s() - started_s,
                skipped=plan.skipped,
                metrics={**plan.metrics, **(gathered.metrics if gathered else {})},
            )

    def _gradients(
        self, plan: Plan, objective: Objective, step: int
    ) -> Generator[None, None, _Gathered]:
        """Accumulate the gradient of the step, one micro-batch a work item."""
        settings, tally, total, num_inputs = self._settings, Tally(), 0.0, 0
        self._optimizer.zero()
        for micro in pack(plan.trainables, budget=settings.micro_batch_tokens):
            batch = Batch.of(micro, dtype=self._kind, version=plan.version)
            num_inputs += micro.num_tokens
            total += self._backward(objective.loss(self._model, batch, tally), step)
            yield
        if settings.anchor_weight and self._anchor is not None:
            for micro, targets in self._anchor.batches(
                step, count=settings.anchor_rows, budget=settings.micro_batch_tokens
            ):
                batch = Batch.of(micro, dtype=self._kind)
                num_inputs += micro.num_tokens
                kl_N = divergence(batch.logits(self._model)[batch.rows_N], targets)
                tally.mean("anchor_kl", kl_N.detach())
                loss = settings.anchor_weight * (batch.tokens.weight_N * kl_N).sum()
                total += self._backward(loss, step)
                yield
        return _Gathered(total, tally, num_inputs)

    def _backward(self, loss: torch.Tensor, step: int) -> float:
        """Add a micro-batch's gradient; returns its loss."""
        value = float(loss.detach())
        if not math.isfinite(value):
            self._optimizer.zero()
            raise NonFiniteError(
                f"the loss of step {step} is {value}; no weight was changed.", _LOWER
            )
        loss.backward()
        return value

    def _updated(
        self, settings: OptimizerSettings, progress: _Progress, *, restart: bool
    ) -> Generator[None, None, float]:
        """The update, one work item."""
        if restart:
            self._optimizer.restart()
        norm = self._optimizer.update(settings, step=progress.phase_step)
        yield
        return norm

    # --- checkpoints --------------------------------------------------------------------------

    def _saved(self, directory: Path, extra: Mapping[str, Json]) -> Generator[None, None, None]:
        progress = self._progress
        for name, parameter in self._model.named_parameters():
            if not parameter.isfinite().all():
                raise NonFiniteError(
                    f"{name} is not finite after step {progress.step}; the weights are not saved.",
                    _LOWER,
                )
        content = checkpoint.Content(
            tensors={"optimizer": {**self._optimizer.state(), "rng": torch.get_rng_state()}}
            | ({} if self._anchor is None else {"anchor": self._anchor.state()}),
            state={
                "run": self._run,
                "step": progress.step,
                "phase": progress.phase,
                "phase_step": progress.phase_step,
                "layout": {name: list(shape) for name, shape in self._optimizer.layout.items()},
                "extra": dict(extra),
            },
        )
        yield from checkpoint.write(directory, content, save_model=self._model.save_pretrained)

    def _check_model(self, directory: Path, content: checkpoint.Content) -> None:
        layout = {name: tuple(shape) for name, shape in content.state["layout"].items()}
        if layout == self._optimizer.layout:
            return
        odd = next(
            (n for n in {**layout, **self._optimizer.layout}
             if layout.get(n) != self._optimizer.layout.get(n)),
            "the order of parameters",
        )  # fmt: skip
        raise CheckpointError(
            f"{directory} belongs to another model: {odd} is {layout.get(odd)} there and "
            f"{self._optimizer.layout.get(odd)} here.",
            "resume with the model the run was started with",
        )

    def _restored(self, content: checkpoint.Content) -> Generator[None, None, None]:
        tensors = dict(content.tensors["optimizer"])
        torch.set_rng_state(tensors.pop("rng"))
        self._optimizer.restore(tensors)
        if "anchor" in content.tensors:
            self._anchor = Anchor.restored(content.tensors["anchor"])
        state = content.state
        self._progress = _Progress(state["step"], state["phase"], state["phase_step"])
        yield
