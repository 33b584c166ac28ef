"""What the tests of training share: rows, groups, a tiny model, a device that runs at once."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

from posttrain.core.ports import Work
from posttrain.core.task import Description, Place, Task
from posttrain.core.trajectory import AttemptKey, Group, Row, Trajectory
from posttrain.core.verdict import Component, Outcome, StopReason, Verdict
from posttrain.engine.model import full_attention

T = TypeVar("T")
TASK = Task(domain="toy", level=0, seed=0, description=Description(objective="toy"))


class InlineDevice:
    """Runs a generator to its end at once and remembers what kind of work it was."""

    def __init__(self) -> None:
        self.kinds: list[Work] = []
        self.items: list[int] = []

    async def run(self, kind: Work, items: Generator[None, None, T]) -> T:
        self.kinds.append(kind)
        self.items.append(0)
        while True:
            try:
                next(items)
            except StopIteration as stop:
                return stop.value
            self.items[-1] += 1


def row(prompt: Sequence[int], reply: Sequence[int], *, mask=None, logprobs=None) -> Row:
    """A prompt and a reply; `mask` and `logprobs` are about the reply."""
    mask = [True] * len(reply) if mask is None else mask
    logprobs = [-1.0] * len(reply) if logprobs is None else logprobs
    length = len(prompt) + len(reply)
    return Row(
        ids_T=(*prompt, *reply),
        mask_T=(False,) * len(prompt) + tuple(mask),
        logprobs_T=(0.0,) * len(prompt)
        + tuple(x if m else 0.0 for x, m in zip(logprobs, mask, strict=True)),
        versions_T=(0,) * length,
        kv_versions_T=(0,) * length,
    )


def member(
    rows: Sequence[Row], reward: float | None, *, number: int = 0, stop=StopReason.FINISHED
) -> Trajectory:
    """A judged attempt; reward None is a failed verifier."""
    part = Component(name="check", place=Place.DETERMINISTIC, value=reward)
    return Trajectory(
        key=AttemptKey(run="test", draw=0, member=number),
        task=TASK,
        rows=tuple(rows),
        stop=stop,
        outcome=Outcome.VERIFIER_FAILED if reward is None else Outcome.SCORED,
        verdict=None if reward is None else Verdict(components=(part,)),
    )


def group(members: Sequence[Trajectory], *, draw: int = 0) -> Group:
    return Group(draw=draw, task=TASK, members=tuple(members))


def random_groups(
    number: int, *, seed: int = 0, size: int = 4, vocab: int = 300, longest: int = 5
) -> list[Group]:
    """Groups with shared prompts, some equal replies, masked gaps and mixed rewards."""
    chance = random.Random(seed)
    groups = []
    for draw in range(number):
        prompt = [chance.randrange(vocab) for _ in range(chance.randint(4, 9))]
        members = []
        for index in range(size):
            reply = [chance.randrange(3) for _ in range(chance.randint(1, longest))]
            mask = [True] + [chance.random() < 0.8 for _ in reply[1:]]
            logprobs = [-5.0 - chance.random() for _ in reply]
            reward = [1.0, 0.0, 0.5, None][index] if index < 4 else float(chance.random() < 0.5)
            rows = [row(prompt, reply, mask=mask, logprobs=logprobs)]
            members.append(member(rows, reward, number=index))
        groups.append(group(members, draw=draw))
    return groups


def plain_logprobs(model, of: Row, *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of every token after the first, one row at a time, nothing shared."""
    ids = torch.tensor(of.ids_T)
    positions = torch.arange(len(ids))
    logits = model.logits(model.hidden(ids, positions, full_attention(positions)))
    wide = logits if logits.dtype == torch.float64 else logits.float()
    table = (wide[:-1] / temperature).log_softmax(-1)
    return table.gather(1, ids[1:, None])[:, 0]


def gradient(model) -> torch.Tensor:
    """All gradients as one vector; parameters without one count as zero."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )


def snapshot(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def unchanged(model, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
