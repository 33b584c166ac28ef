"""What making an attempt costs beside the model: rollouts a second and event-loop lag.

A scripted policy and scripted sandboxes answer at once, the verifier says 1, and every trajectory
is written to a journal on disk, so what is left is ours: rendering, token rows, the attempt's state
machine, executors, groups. Two kinds of rollout: one reply, and three replies with two tool calls.

Not measured: HTTP, model, real sandboxes. `verifiers` and Inspect make the same two kinds of
rollout in environments of their own (`bench/peers/setup.sh NAME`), one process each as here, with
their own limits of concurrency. A ratio is our slowest concurrency over the fastest of theirs, of
any setting, for the kind that looks worse for us; it is null where the peer is missing.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench import _peers
from posttrain.core import codec
from posttrain.core.clock import RealClock
from posttrain.core.containment import ExecResult, Sealed
from posttrain.core.events import Note
from posttrain.core.ports import AttemptRequest, SampleRequest
from posttrain.core.task import Description, Limits, Place, Task, Tool
from posttrain.core.trajectory import AttemptKey, FinishReason, Sampled, Sampling, Trajectory
from posttrain.core.verdict import Component, Outcome, Verdict
from posttrain.observe.journal import FileJournal
from posttrain.rollout.answer import AnswerExecutor
from posttrain.rollout.group import Groups
from posttrain.rollout.render import Renderer
from posttrain.rollout.tokenizer import TransformersTokenizer
from posttrain.rollout.toolloop import ToolExecutor
from posttrain.sandbox.scripted import ScriptedSandboxes

CONCURRENCY = (64, 256, 512)
LAG_TICK_S = 0.005
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = Task(
    domain="bench.answer",
    level=0,
    seed=0,
    description=Description(
        objective="What is 40 + 2?", constraints=("Reply with only the final answer.",)
    ),
    prefix="Answer:",
)
SHELL = Tool(
    name="shell",
    description="Run a bash command.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}},
    kind="shell",
)
TOOLS = Task(
    domain="bench.tools",
    level=0,
    seed=0,
    description=Description(objective="Look twice, then say so.", tools=(SHELL,)),
    executor="tools",
    limits=Limits(max_turns=4),
)


class Told:
    """A policy with its replies ready: " 42", or two commands and a closing text."""

    def __init__(self, renderer: Renderer, task: Task) -> None:
        commands = [f"```sh\nlook {turn}\n```" for turn in range(2)]
        replies = [" 42"] if task is ANSWER else [*commands, "Done."]
        self._replies = [_sampled(renderer.reply_ids(text)) for text in replies]
        self._starts = renderer.raw("<|im_start|>")[0]
        self._first = renderer.prompt(task).count(self._starts)

    async def sample(self, request: SampleRequest) -> Sampled:
        turn = (request.ids.count(self._starts) - self._first) // 2
        return self._replies[turn]


def _sampled(ids: tuple[int, ...]) -> Sampled:
    return Sampled(
        ids=ids,
        logprobs=(-0.5,) * len(ids),
        versions=(0,) * len(ids),
        kv_versions=(0,) * len(ids),
        finish=FinishReason.STOP,
    )


class Satisfied:
    """A verifier that finds everything right, at once."""

    async def verify(self, trajectory: Trajectory, sealed: Sealed | None) -> Verdict:
        return Verdict(components=(Component(name="any", place=Place.GUARD, value=1.0),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement."""

    kind: str
    concurrent: int
    rollouts: int
    rollouts_per_s: float
    lag_ms_p99: float


def main(quick: bool) -> dict[str, Any]:
    """Measure every kind at every concurrency; the keys of the bench contract and all cells."""
    count = 1_000 if quick else 5_000
    cells = [
        measure(kind, concurrent, count)
        for kind in ("answer", "tools")
        for concurrent in CONCURRENCY
    ]
    for cell in cells:
        print(
            f"{cell.kind:7} {cell.concurrent:4} concurrent: {cell.rollouts_per_s:8.0f} rollouts/s, "
            f"loop lag p99 {cell.lag_ms_p99:6.1f} ms"
        )
    slowest = {
        kind: min(cell.rollouts_per_s for cell in cells if cell.kind == kind)
        for kind in ("answer", "tools")
    }
    found = {
        "rollouts_per_s": round(slowest["answer"], 1),
        "rollouts_per_s_tools": round(slowest["tools"], 1),
        "loop_lag_ms_p99": round(max(cell.lag_ms_p99 for cell in cells), 2),
        "cells": [codec.to_json(cell) for cell in cells],
    }
    return found | beside(slowest, quick=quick)


def beside(slowest: Mapping[str, float], *, quick: bool) -> dict[str, Any]:
    """What peers make of the same tasks, and the ratios of ours (rollouts a second by kind)."""
    work = {
        "objectives": {
            "answer": ANSWER.description.objective,
            "tools": TOOLS.description.objective,
        },
        "concurrency": CONCURRENCY[:1] if quick else CONCURRENCY,
        "count": 64 if quick else 1_000,
    }
    found: dict[str, Any] = {"peers": {}}
    for name in ("verifiers", "inspect"):
        told = _peers.set_to(name, f"{name}_rollouts.py", work)
        if told is not None:
            found[f"{name}_cells"] = told["cells"]
            found["peers"][name] = told["version"]
        found[f"ratio_vs_{name}"] = told and ratio(slowest, told["cells"])
    return found


def ratio(slowest: Mapping[str, float], cells: Sequence[Mapping[str, Any]]) -> float:
    """Our slowest over their fastest, of the kind that looks worse for us."""
    ratios: list[float] = [
        slowest[kind] / max(cell["rollouts_per_s"] for cell in cells if cell["kind"] == kind)
        for kind in slowest
    ]
    return round(min(ratios), 2)


def measure(kind: str, concurrent: int, count: int) -> Cell:
    """Make `count` rollouts, `concurrent` at a time, after a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(TOOLS if kind == "tools" else ANSWER, Path(folder))
        asyncio.run(bench.make(concurrent, min(count, 200)))
        started_s = time.perf_counter()
        lags_s = asyncio.run(bench.make(concurrent, count))
        spent_s = time.perf_counter() - started_s
    return Cell(
        kind=kind,
        concurrent=concurrent,
        rollouts=count,
        rollouts_per_s=count / spent_s,
        lag_ms_p99=1000.0 * lags_s[int(0.99 * (len(lags_s) - 1))],
    )


class Bench:
    """One task, made over and over."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._task = task
        self._renderer = Renderer(TransformersTokenizer(tokenizer()))
        self._journal = FileJournal(folder)
        self._draws = itertools.count()

    async def make(self, concurrent: int, count: int) -> list[float]:
        """The rollouts; returns the event loop's lags in seconds, ascending."""
        clock = RealClock()
        policy = Told(self._renderer, self._task)
        boxes = ScriptedSandboxes(lambda _: ExecResult(exit_code=0, stdout="ok\n", stderr=""))
        executors = {
            "answer": AnswerExecutor(policy, self._renderer, clock),
            "tools": ToolExecutor(policy, self._renderer, clock, boxes),
        }
        groups = Groups(executors, Satisfied(), clock)
        left = iter(range(count))
        lags_s: list[float] = []
        watching = asyncio.create_task(watch(lags_s))
        await asyncio.gather(*(self._one_after_another(groups, left) for _ in range(concurrent)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert groups.stats().outcomes == {Outcome.SCORED: count}, groups.stats()
        return sorted(lags_s)

    async def _one_after_another(self, groups: Groups, left: Iterator[int]) -> None:
        for _ in left:
            key = AttemptKey(run="bench", draw=next(self._draws), member=0)
            request = AttemptRequest(key=key, task=self._task, sampling=Sampling(max_tokens=64))
            trajectory = await groups.attempt(request)
            record: Mapping[str, Any] = codec.to_json(trajectory)
            self._journal.write(Note(kind="trajectory", key=key.hex, data=record))
            await asyncio.sleep(0)


async def watch(lags_s: list[float]) -> None:
    """Note how much later than asked for the event loop comes back."""
    while True:
        asked_s = time.perf_counter()
        await asyncio.sleep(LAG_TICK_S)
        lags_s.append(max(0.0, time.perf_counter() - asked_s - LAG_TICK_S))


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, under a ChatML template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = ("<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast
