"""Kinds of checks that look at the reply without starting anything: guards and answers.

A kind is a function from (check, subject, tools) to a finding; it may raise, which is then the
check's own failure and never a reward. It decides nothing about layers, gates or time limits. The
one thing that must stay true: a parameter that a kind does not know is refused.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from posttrain.core import seeds
from posttrain.core.containment import Sandboxes, Workers
from posttrain.core.errors import UsageError, nearest
from posttrain.core.ports import Chat, Clock, Scores
from posttrain.core.task import Check, Task
from posttrain.core.trajectory import Trajectory
from posttrain.verify import answers, guards, quantities
from posttrain.verify.answers import Where
from posttrain.verify.declared import Declared
from posttrain.verify.guards import Passage
from posttrain.verify.layers import Finding
from posttrain.verify.trust import Trust

WORKER_TIMEOUT_S = 10.0
"""Active seconds a call into a worker may take where the check names no `timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is judged: an attempt and what it left for checking, if it had a file system."""

    trajectory: Trajectory
    sealed: Declared | None = None

    @property
    def task(self) -> Task:
        """The task that was attempted."""
        return self.trajectory.task

    @property
    def reply(self) -> str:
        """Text of the attempt's last turn."""
        return self.trajectory.final_text


def hidden_seeds() -> Callable[[Trajectory], int]:
    """Seeds of hidden inputs under a secret of this process: the same for all members of a group,
    new with every draw, and not to be derived from anything a task holds.
    """
    secret = secrets.token_hex(16)
    return lambda attempt: seeds.hashed(secret, attempt.key.run, attempt.key.draw, attempt.task.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What kinds may use; a kind that lacks one fails, it never guesses."""

    clock: Clock
    seeds: Callable[[Trajectory], int] = field(default_factory=hidden_seeds)
    """Seed of what a check draws, kept in its evidence: who judges again gives the recorded one."""
    workers: Workers | None = None
    sandboxes: Sandboxes | None = None
    """The source of the attempts' sandboxes: only it can show what one of them left."""
    chat: Chat | None = None
    scores: Scores | None = None
    trust: Trust = field(default_factory=Trust)
    """How far judges and reward models are believed; it remembers."""


class Kind(Protocol):
    """One kind of check."""

    async def __call__(self, check: Check, subject: Subject, tools: Tools) -> Finding:
        """What the check finds; raises where it cannot tell."""
        ...


# --- parameters -------------------------------------------------------------------------------


def allowed(check: Check, *names: str) -> None:
    """Refuses a parameter that the kind does not know: an ignored one would be a silent lie.

    Raises:
        UsageError: an unknown parameter.
    """
    known = {"name", *names}
    for key in check.params:
        if key not in known:
            hint = nearest(key, known)
            raise UsageError(f"check {check.kind!r} has no parameter {key!r}{hint}.")


def text_of(check: Check, key: str) -> str:
    """A required text parameter.

    Raises:
        UsageError: missing or no text.
    """
    value = check.params.get(key)
    if not isinstance(value, str):
        raise UsageError(f"check {check.kind!r} wants text as {key!r}, got {value!r:.80}.")
    return value


def seconds_of(check: Check, default: float = WORKER_TIMEOUT_S) -> float:
    """The check's `timeout_s`: active seconds of what it starts."""
    value = check.params.get("timeout_s", default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise UsageError(f"check {check.kind!r} wants seconds as 'timeout_s', got {value!r:.80}.")
    return float(value)


# --- guards -----------------------------------------------------------------------------------


def _guard(look: Callable[[Check, Subject], Passage], *parameters: str) -> Kind:
    async def kind(check: Check, subject: Subject, tools: Tools) -> Finding:
        allowed(check, *parameters)
        passage = look(check, subject)
        return Finding(
            value=passage.value, evidence={"refused": passage.reason} if passage.reason else {}
        )

    return kind


def _not_longer(check: Check, subject: Subject) -> Passage:
    cap = check.params.get("max_chars")
    if not isinstance(cap, int) or cap <= 0:
        raise UsageError(f"guard 'not_longer' wants a number as 'max_chars', got {cap!r:.80}.")
    return guards.not_longer(subject.reply, cap)


# --- answers ----------------------------------------------------------------------------------


def final_answer(check: Check, subject: Subject, default: Where, *, gold: str) -> answers.Answer:
    """The reply's final answer; refused where the reply is empty or echoes the prompt, unless the
    right answer does as well.
    """
    reply, objective = subject.reply, subject.task.description.objective
    passage = guards.not_echo(reply, objective)
    if passage.reason and guards.not_echo(gold, objective).value:
        return answers.Answer(text=None, refusal=passage.reason)
    where = check.params.get("where", default.value)
    if where not in list(Where):
        wanted = [place.value for place in Where]
        raise UsageError(f"check {check.kind!r} wants 'where' in {wanted}, got {where!r:.80}.")
    return answers.extract(reply, prefix=subject.task.prefix, where=Where(where))


def _compared(
    compare: Callable[[Check, str], bool], *parameters: str, where: Where = Where.LINE
) -> Kind:
    async def kind(check: Check, subject: Subject, tools: Tools) -> Finding:
        allowed(check, "answer", "where", *parameters)
        given = final_answer(check, subject, where, gold=text_of(check, "answer"))
        if given.text is None:
            return Finding(value=0.0, evidence={"refused": given.refusal})
        return Finding(value=float(compare(check, given.text)), evidence={"answer": given.text})

    return kind


def _same_text(check: Check, given: str) -> bool:
    gold, ignore_case = text_of(check, "answer"), check.params.get("ignore_case", False)
    if not gold.strip():
        raise UsageError(f"check 'exact' wants text as 'answer', got {gold!r:.80}.")
    if not isinstance(ignore_case, bool):
        raise UsageError(
            f"check 'exact' wants true or false as 'ignore_case', got {ignore_case!r:.80}."
        )
    return answers.same_text(gold, given, ignore_case=ignore_case)


def _same_amount(check: Check, given: str) -> bool:
    unit, percent = check.params.get("unit", "required"), check.params.get("percent", False)
    if unit not in ("required", "optional") or not isinstance(percent, bool):
        raise UsageError(
            "check 'numeric' wants 'unit' as 'required' or 'optional' and 'percent' as true or "
            f"false, got {unit!r:.80} and {percent!r:.80}."
        )
    return quantities.same_amount(
        text_of(check, "answer"),
        given,
        relative=float(check.params.get("relative", 0.0)),
        absolute=float(check.params.get("absolute", 0.0)),
        optional=unit == "optional",
        percent=percent,
    )


def _same_choice(check: Check, given: str) -> bool:
    labels = check.params.get("labels")
    if not isinstance(labels, (list, tuple)) or not all(isinstance(one, str) for one in labels):
        raise UsageError(f"check 'choice' wants a list of texts as 'labels', got {labels!r:.80}.")
    plain = [one.strip().casefold() for one in labels]
    if "" in plain or len(set(plain)) != len(plain):
        raise UsageError(f"check 'choice' wants different texts as 'labels', got {labels!r:.80}.")
    return answers.same_choice(text_of(check, "answer"), given, labels)


REPLY_KINDS: Mapping[str, Kind] = {
    "not_empty": _guard(lambda check, subject: guards.not_empty(subject.reply)),
    "not_echo": _guard(
        lambda check, subject: guards.not_echo(subject.reply, subject.task.description.objective)
    ),
    "not_longer": _guard(_not_longer, "max_chars"),
    "printable": _guard(lambda check, subject: guards.printable(subject.reply)),
    "exact": _compared(_same_text, "ignore_case"),
    "numeric": _compared(_same_amount, "relative", "absolute", "unit", "percent"),
    "choice": _compared(_same_choice, "labels"),
}
