"""One synchronous RL step (generate a batch of groups, train on it, publish) against TRL's.

Same model, prompts (the demo's own), group size, length limit and share of groups without variance
on both sides; rewards are given by position, so that no side's luck decides how much there is to
train on. TRL
runs in its own environment (`bench/peers/setup.sh trl`); without it the ratio is null.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench import _peers
from posttrain.core import seeds
from posttrain.engine import threads

DOMAINS = (
    "easy.basic_arithmetic",
    "easy.chain_sum",
    "easy.products",
    "easy.gcd",
    "easy.decimal_chain_sum",
    "reasoning_gym.number_sequence",
)
"""What the demo trains on, but for its tool domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What both sides do."""

    model: str
    prompts: int
    group: int
    max_tokens: int
    steps: int
    """Steps, the first of which warms up and is not counted."""

    @property
    def flat(self) -> list[bool]:
        """Groups without variance: every second one."""
        return [bool(index % 2) for index in range(self.prompts)]


def main(quick: bool) -> dict[str, Any]:
    """Measure both sides, one after the other."""
    job = Job(
        model="smollm2-135m",
        prompts=4 if quick else 16,
        group=8,
        max_tokens=8,
        steps=3,
    )
    return compare(job, only="bf16-micro-32" if quick else None)


def compare(job: Job, *, only: str | None = None) -> dict[str, Any]:
    """Both sides' times and their ratio; null where the peer is missing."""
    # In a process of its own, whose memory the peer can have afterwards.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        ours = process.submit(steps_of, job).result()
    found: dict[str, Any] = {
        "ratio_vs_trl": None,
        "step_s": median(step.total_s for step in ours),
        "generate_s": median(step.generate_s for step in ours),
        "train_s": median(step.train_s for step in ours),
        "attempts": job.prompts * job.group,
        "sampled_tokens": median(step.sampled_tokens for step in ours),
        "trained_inputs": median(step.trained_inputs for step in ours),
        "parity_mean": max(step.parity_mean for step in ours),
        "parity_max": max(step.parity_max for step in ours),
        "flat_share": sum(job.flat) / job.prompts,
    }
    peer = trl_steps(job, only=only)
    if peer is not None:
        times = {name: median(seconds) for name, seconds in peer["settings"].items()}
        best = min(times, key=lambda name: times[name])
        found |= {
            "ratio_vs_trl": times[best] / found["step_s"],
            "trl_step_s": times[best],
            "trl_best": best,
            "trl_all_s": times,
            "peers": {"trl": peer["version"]},
        }
    return found


def texts(job: Job, tokenizer: Any) -> list[list[str]]:
    """Rendered prompts of each step: tasks of the demo's domains that want an answer, in turn."""
    from posttrain.domains import catalogue
    from posttrain.rollout.render import Renderer
    from posttrain.rollout.tokenizer import TransformersTokenizer

    renderer = Renderer(TransformersTokenizer(tokenizer))
    domains = [catalogue.load(catalogue.find(name).reference) for name in DOMAINS]
    steps = []
    for step in range(job.steps):
        tasks = [
            domains[index % len(domains)].task(step * job.prompts + index, level=0)
            for index in range(job.prompts)
        ]
        steps.append([tokenizer.decode(renderer.prompt(task)) for task in tasks])
    return steps


# --- our side -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measured step."""

    generate_s: float
    train_s: float
    sampled_tokens: int
    trained_inputs: float
    parity_mean: float
    parity_max: float

    @property
    def total_s(self) -> float:
        return self.generate_s + self.train_s


def steps_of(job: Job) -> list[Step]:
    """Our steps, in this process."""
    threads.configure()
    return asyncio.run(our_steps(job))


async def our_steps(job: Job) -> list[Step]:
    """Steps after the first."""
    import torch

    from posttrain.engine.embedded import EmbeddedEngine
    from posttrain.engine.model import load, load_tokenizer, skeleton_over
    from posttrain.engine.models import resolve
    from posttrain.engine.settings import EngineSettings
    from posttrain.schedule.device import EngineFirst
    from posttrain.train.settings import TrainSettings
    from posttrain.train.trainer import LocalTrainer

    path = resolve(job.model)
    tokenizer = load_tokenizer(path)
    model = load(path, dtype=torch.bfloat16, verify=False)
    settings = EngineSettings(max_batch=job.prompts * job.group)
    with EmbeddedEngine(skeleton_over(model), settings=settings, policy=EngineFirst()) as engine:
        trainer = LocalTrainer(model, engine, TrainSettings(algorithm="dapo"), run="bench")
        found = []
        for number, prompts in enumerate(texts(job, tokenizer)):
            ids = [
                tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in prompts
            ]
            began = time.perf_counter()
            groups = await sampled_groups(job, engine, ids, end=tokenizer.eos_token_id, step=number)
            between = time.perf_counter()
            report = await trainer.rl_step(groups, version=number)
            await engine.publish(version=number + 1, parent=number)
            ended = time.perf_counter()
            assert report.loss is not None, f"nothing was trained: {report.skipped}"
            found.append(
                Step(
                    generate_s=between - began,
                    train_s=ended - between,
                    sampled_tokens=report.num_tokens,
                    trained_inputs=report.metrics["input_tokens"],
                    parity_mean=report.metrics["logprob_gap_mean"],
                    parity_max=report.metrics["logprob_gap_max"],
                )
            )
    return found[1:]


async def sampled_groups(
    job: Job, engine: Any, prompts: list[tuple[int, ...]], *, end: int, step: int
) -> list[Any]:
    """Sample every attempt and give it the reward of its position."""
    from posttrain.core.task import Description, Place, Task
    from posttrain.core.trajectory import AttemptKey, Group, Trajectory
    from posttrain.core.verdict import Component, Outcome, Verdict

    async def attempt(draw: int, member: int) -> Trajectory:
        row = await sampled_row(job, engine, prompts[draw], end=end, seed=(step, draw, member))
        value = 0.0 if job.flat[draw] else float(member % 2)
        check = Component(name="position", place=Place.DETERMINISTIC, value=value)
        return Trajectory(
            key=AttemptKey(run="bench", draw=draw, member=member),
            task=task,
            rows=(row,),
            outcome=Outcome.SCORED,
            verdict=Verdict(components=(check,)),
        )

    task = Task(domain="bench", level=0, seed=0, description=Description(objective="sums"))
    members = await asyncio.gather(
        *(attempt(draw, member) for draw in range(len(prompts)) for member in range(job.group))
    )
    return [
        Group(draw=draw, task=task, members=tuple(members[draw * job.group :][: job.group]))
        for draw in range(len(prompts))
    ]


async def sampled_row(
    job: Job, engine: Any, prompt: tuple[int, ...], *, end: int, seed: tuple[int, int, int]
) -> Any:
    """One attempt's row."""
    from posttrain.core.ports import SampleRequest
    from posttrain.core.trajectory import Row, Sampling

    sampling = Sampling(
        max_tokens=job.max_tokens, stop_ids=(end,), seed=seeds.hashed("bench", *seed)
    )
    drawn = await engine.sample(SampleRequest(ids=prompt, sampling=sampling))
    given, new = len(prompt), len(drawn.ids)
    return Row(
        ids_T=prompt + drawn.ids,
        mask_T=(False,) * given + (True,) * new,
        logprobs_T=(0.0,) * given + drawn.logprobs,
        versions_T=(-1,) * given + drawn.versions,
        kv_versions_T=(-1,) * given + drawn.kv_versions,
    )


# --- the peer -------------------------------------------------------------------------------------


def trl_steps(job: Job, *, only: str | None) -> Mapping[str, Any] | None:
    """Seconds of TRL's steps by setting, or None where its environment is missing."""
    from posttrain.engine.model import load_tokenizer
    from posttrain.engine.models import resolve

    path = resolve(job.model)
    work = {
        "model": str(path),
        "steps": texts(job, load_tokenizer(path)),
        "group": job.group,
        "max_tokens": job.max_tokens,
        "flat": job.flat,
    }
    options = [str(_peers.FOLDER / "trl_settings.toml"), *(["--only", only] if only else [])]
    return _peers.set_to("trl", "trl_step.py", work, *options)
