"""A run folder made of attempts that a test describes, through the real ledger and journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.core import codec, events
from posttrain.core.events import Note
from posttrain.core.task import Description, Place, Task, ToolCall
from posttrain.core.trajectory import AttemptKey, Trajectory, Turn
from posttrain.core.verdict import Component, Outcome, Verdict
from posttrain.observe.journal import FileJournal
from posttrain.observe.ledger import FileLedger

RUN = "reviewed"


def part(
    value: float | None,
    *,
    name: str = "exact",
    place: Place = Place.DETERMINISTIC,
    gate: bool = False,
) -> Component:
    return Component(
        name=name, place=place, value=value, gate=gate, verifier=f"{name}@1#00", evidence={"n": 7}
    )


@dataclass
class Made:
    """One attempt."""

    reward: float | None = 1.0
    domain: str = "a"
    text: str = "Answer: 42"
    components: Sequence[Component] = ()
    calls: tuple[ToolCall, ...] = ()
    phase: str = "rl"

    def components_(self) -> tuple[Component, ...]:
        return tuple(self.components) or (part(self.reward),)


@dataclass
class Writer:
    """Appends to a run folder; each group is a draw."""

    folder: Path
    draw: int = 0
    keys: list[str] = field(default_factory=list)

    def group(self, *made: Made, seed: int | None = None) -> list[str]:
        first = made[0]
        drawn = events.Drawn(
            draw=self.draw, domain=first.domain, level=0,
            seed=self.draw if seed is None else seed, size=len(made), phase=first.phase,
        )  # fmt: skip
        told: list[events.LedgerEvent] = [drawn]
        keys = [AttemptKey(run=RUN, draw=self.draw, member=m) for m in range(len(made))]
        told += [events.Entered(key=k.hex, draw=k.draw, member=k.member) for k in keys]
        journal = FileJournal(self.folder / "journal")
        told += [self._finished(journal, k, one, drawn) for k, one in zip(keys, made, strict=True)]
        journal.close()
        self.ledger(*told)
        self.draw += 1
        self.keys += [key.hex for key in keys]
        return [key.hex for key in keys]

    def groups(self, groups: Iterable[Sequence[Made]]) -> None:
        for group in groups:
            self.group(*group)

    def ledger(self, *told: events.LedgerEvent) -> None:
        with FileLedger(self.folder / "ledger.jsonl") as ledger:
            for event in told:
                ledger.append(event)

    def reverified(self, key: str, reward: float) -> None:
        """As it is written where verdicts are renewed."""
        journal = FileJournal(self.folder / "journal")
        verdict = Verdict(components=(replace(part(reward), verifier="exact@2#11"),))
        place = journal.write(Note(kind="verdict", key=key, data=codec.to_json(verdict)))
        journal.close()
        told = {
            "kind": "reverified", "key": key, "outcome": "scored", "reward": reward,
            "verifier": "exact@2#11", "place": place,
        }  # fmt: skip
        with (self.folder / "ledger.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")

    def _finished(
        self, journal: FileJournal, key: AttemptKey, made: Made, drawn: events.Drawn
    ) -> events.Finished:
        task = Task(
            domain=drawn.domain, level=0, seed=drawn.seed,
            description=Description(objective=f"task {drawn.seed}", constraints=("Be brief.",)),
        )  # fmt: skip
        turns = (
            Turn(text=made.text, tool_calls=made.calls, observations=("seen",) * len(made.calls)),
        )
        outcome = Outcome.INFRA_FAILED if made.reward is None else Outcome.SCORED
        verdict = Verdict(components=made.components_())
        trajectory = Trajectory(key=key, task=task, turns=turns, outcome=outcome, verdict=verdict)
        data = codec.to_json(trajectory)
        place = journal.write(Note(kind="trajectory", key=key.hex, data=data))
        return events.Finished(
            key=key.hex, outcome=str(outcome), reward=made.reward, stop="finished", num_tokens=3,
            oldest_version=0, place=place,
        )  # fmt: skip
