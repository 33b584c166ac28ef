"""A run folder with a believable history, written through the real ledger and journal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.core import codec, events, seeds
from posttrain.core.events import Note
from posttrain.core.task import Description, Lane, Place, Task, ToolCall
from posttrain.core.trajectory import AttemptKey, Trajectory, Turn
from posttrain.core.verdict import Component, Outcome, Verdict
from posttrain.observe.journal import FileJournal
from posttrain.observe.ledger import FileLedger


@dataclass(frozen=True, kw_only=True)
class Story:
    """How one domain goes: rate at base, after SFT, after RL, and its best constant answer."""

    name: str
    rates: tuple[float, float, float]
    constant: float
    n: int = 128
    watched: bool = False


STORIES = (
    Story(name="rg.basic_arithmetic", rates=(0.15, 0.24, 0.48), constant=0.04),
    Story(name="rg.chain_sum", rates=(0.11, 0.15, 0.28), constant=0.05),
    Story(name="rg.gcd", rates=(0.18, 0.22, 0.37), constant=0.34),
    Story(name="rg.products", rates=(0.09, 0.13, 0.19), constant=0.03),
    Story(name="rg.fraction_simplification", rates=(0.22, 0.30, 0.41), constant=0.02),
    Story(name="terminal.find_and_edit", rates=(0.02, 0.29, 0.35), constant=0.0, n=48),
    Story(name="rg.lcm", rates=(0.17, 0.16, 0.18), constant=0.10, watched=True),
    Story(name="rg.letter_counting", rates=(0.57, 0.55, 0.53), constant=0.74, watched=True),
)

SHOWN_TASKS = 24
"""Tasks of each domain whose attempts are in the journal."""

CONFIG = """\
[run]
name = "{name}"  # --set
seed = 7  # preset demo:3

[model]
name = "smollm2-135m"  # preset demo:6

[rl]
steps = 40  # demo.toml:4

[domains]
train = [{{name = "rg.[bcgpf]*"}}, {{name = "terminal.*"}}]  # preset demo:10
watch = [{{name = "rg.lcm"}}, {{name = "rg.letter_counting"}}]  # preset demo:11
"""


def write_run(folder: Path, *, name: str = "synthetic", text: str = "Answer: 42") -> Path:
    """A finished run: 6 SFT steps, 40 RL steps, evaluations at three points."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(name=name))
    journal = FileJournal(folder / "journal")
    machine = {"python": "3.11.2", "torch": "2.13.0", "cores": 2}
    journal.write(Note(kind="environment", data=machine, wall_s=1.0))
    for index, point in enumerate(("base", "sft", "rl")):
        journal.write(Note(kind="eval", data=_eval_data(point, index), wall_s=1.0))
        _write_attempts(journal, index, text)
        if point == "base":
            _write_steps(journal, "sft", range(1, 7))
        if point == "sft":
            _write_steps(journal, "rl", range(7, 47))
    journal.close()
    _write_ledger(folder / "ledger.jsonl")
    return folder


def passed(story: Story, task: int, point: int) -> bool:
    """Whether a task is passed at a point: nested, so that what was gained stays gained."""
    return seeds.unit(story.name, task) < story.rates[point]


def _eval_data(point: str, index: int) -> dict[str, object]:
    domains = {}
    for story in STORIES:
        results = [
            {"task": f"{story.name}/0/{task}", "passed": passed(story, task, index)}
            for task in range(story.n)
        ]
        domains[story.name] = {
            "results": results,
            "constant": story.constant,
            "watch": story.watched,
        }
    return {"point": point, "domains": domains}


def _write_steps(journal: FileJournal, phase: str, steps: range) -> None:
    for step in steps:
        domains = {
            s.name: {
                "reward": min(1.0, max(0.0, _learning(s, step, phase))),
                "n": 20,
            }
            for s in STORIES
            if not s.watched
        }
        loss = math.nan if step == 20 else 1.6 / step + 0.02 * seeds.unit("loss", step)
        data = {
            "phase": phase,
            "step": step,
            "metrics": {"loss": loss, "grad_norm": 1 + seeds.unit("norm", step)},
            "domains": domains if phase == "rl" else {},
            "seconds": dict(generate=3.1, execute=0.6, verify=0.1, train=2.2, idle=0.3),
            "tokens": 1900 + int(300 * seeds.unit("tokens", step)),
        }
        journal.write(Note(kind="step", data=data, wall_s=float(step)))


def _learning(story: Story, step: int, phase: str) -> float:
    noise = 0.2 * (seeds.unit(story.name, "noise", step) - 0.5)
    return story.rates[1] + (story.rates[2] - story.rates[1]) * (step - 6) / 40 + noise


def _write_attempts(journal: FileJournal, point: int, text: str) -> None:
    for story in STORIES:
        for number in range(SHOWN_TASKS):
            attempt = _attempt(story, number, point, text)
            journal.write(Note(kind="trajectory", data=codec.to_json(attempt), wall_s=1.0))


def _attempt(story: Story, number: int, point: int, text: str) -> Trajectory:
    task = Task(
        domain=story.name,
        level=0,
        seed=number,
        description=Description(
            objective=f"What is {number} + {number + 3}?\nGive the number only. {text}",
            constraints=("One number.",),
        ),
    )
    good = passed(story, number, point)
    turns = (Turn(text=f"{text} ({'right' if good else 'wrong'} at {point})"),)
    if story.name.startswith("terminal"):
        call = ToolCall(id="1", name="shell", arguments={"command": f"grep -rn '{text}' ."})
        turns = (
            Turn(text="I look for it first.", tool_calls=(call,), observations=(f"./a:1: {text}",)),
            *turns,
        )
    part = Component(name="exact", place=Place.DETERMINISTIC, value=1.0 if good else 0.0)
    key = AttemptKey(run="synthetic", draw=number, member=point)
    made = Trajectory(key=key, task=task, turns=turns, lane=Lane.EVAL)
    return replace(made.judged(Verdict(components=(part,)), Outcome.SCORED))


def _write_ledger(path: Path) -> None:
    with FileLedger(path) as ledger:
        ledger.append(events.Started(run="synthetic", config_sha256="0" * 64))
        for step in range(1, 5):
            keys = tuple(f"{step}-{member}" for member in range(8))
            for member, key in enumerate(keys):
                ledger.append(events.Entered(key=key, draw=step, member=member))
                ledger.append(_finished(key, "infra_failed" if member == 7 else "scored"))
            ledger.append(events.Trained(step=step, version=step, keys=keys[:6]))
            ledger.append(events.Dropped(keys=keys[7:], reason="infra_failed"))
        ledger.append(events.Ended(reason="done"))
        ledger.sync()


def _finished(key: str, outcome: str) -> events.Finished:
    return events.Finished(
        key=key,
        outcome=outcome,
        reward=1.0 if outcome == "scored" else None,
        stop="finished",
        num_tokens=5,
        oldest_version=0,
        place="",
    )
