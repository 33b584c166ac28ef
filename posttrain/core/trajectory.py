"""The record of one attempt: token rows for the trainer, turns for people, outcome for both.

A `Row` is one exact token sequence with the context that was used when sampling. Append-only
templates give one row per attempt; templates that rewrite history give one row per turn. The one
thing that must stay true: `ids` are the ids the engine saw and sampled, never re-tokenised text.

Legend of suffixes: _T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from posttrain.core import seeds
from posttrain.core.task import Json, Lane, Task, ToolCall
from posttrain.core.verdict import Outcome, StopReason, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the turn; the id is part of what was sampled."""
    stop_strings: tuple[str, ...] = ()
    """Text that ends the turn, across token borders; the tokens that complete it are kept."""
    seed: int = 0
    """With the position this fixes the random number of each token, whatever else runs."""


class FinishReason(StrEnum):
    """Why sampling of one turn ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the engine sampled for one request; all tuples have one entry per sampled token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Processed (after temperature, top-k, top-p) natural log-probabilities."""
    versions: tuple[int, ...]
    """Weight version that sampled the token."""
    kv_versions: tuple[int, ...]
    """Oldest weight version among the keys and values the token attended to."""
    finish: FinishReason
    active_s: float | None = None
    """Seconds the engine worked on this request, queueing and other work left out; None: it does
    not say, and sampling then does not count towards a time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence. Entries of all `_T` tuples belong together; length T."""

    ids_T: tuple[int, ...] = ()
    mask_T: tuple[bool, ...] = ()
    """True where the token was sampled by the policy (or written by an oracle) and is trained."""
    logprobs_T: tuple[float, ...] = ()
    """Behaviour log-probability where `mask_T`, 0.0 elsewhere."""
    versions_T: tuple[int, ...] = ()
    """Weight version where `mask_T`, -1 for tokens that no version sampled."""
    kv_versions_T: tuple[int, ...] = ()
    media: tuple[str, ...] = ()
    """Content hashes of media in the prompt, in order."""

    def __post_init__(self) -> None:
        lengths = {len(self.ids_T), len(self.mask_T), len(self.logprobs_T),
                   len(self.versions_T), len(self.kv_versions_T)}  # fmt: skip
        assert len(lengths) == 1, f"row with columns of unequal length: {sorted(lengths)}"

    def given(self, ids: tuple[int, ...]) -> Row:
        """The row with given tokens behind it: mask 0, no log-probability, no version."""
        none = len(ids) * (-1,)
        return replace(
            self,
            ids_T=self.ids_T + ids,
            mask_T=self.mask_T + len(ids) * (False,),
            logprobs_T=self.logprobs_T + len(ids) * (0.0,),
            versions_T=self.versions_T + none,
            kv_versions_T=self.kv_versions_T + none,
        )

    def sampled(self, sampled: Sampled) -> Row:
        """The row with sampled tokens behind it."""
        return replace(
            self,
            ids_T=self.ids_T + sampled.ids,
            mask_T=self.mask_T + len(sampled.ids) * (True,),
            logprobs_T=self.logprobs_T + sampled.logprobs,
            versions_T=self.versions_T + sampled.versions,
            kv_versions_T=self.kv_versions_T + sampled.kv_versions,
        )

    @property
    def prompt_length(self) -> int:
        """Number of leading tokens before the first trained one (all tokens if none is)."""
        return self.mask_T.index(True) if True in self.mask_T else len(self.mask_T)

    @property
    def num_trained(self) -> int:
        """Number of tokens with mask 1."""
        return sum(self.mask_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model reply and what came back, for people and for reports."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    observations: tuple[str, ...] = ()
    """One per tool call, in order."""
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    generate_s: float = 0.0
    execute_s: float = 0.0
    finish: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptKey:
    """Identity of an attempt: executed, retried, stored and trained at most once under it."""

    run: str
    draw: int
    """Running number of the sampling decision."""
    member: int
    """Index within the group."""

    @property
    def hex(self) -> str:
        """24 hexadecimal digits."""
        return seeds.hex_key(self.run, self.draw, self.member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt, from task to verdict."""

    key: AttemptKey
    task: Task
    rows: tuple[Row, ...] = ()
    turns: tuple[Turn, ...] = ()
    stop: StopReason = StopReason.FINISHED
    outcome: Outcome | None = None
    """None until the attempt is judged."""
    verdict: Verdict | None = None
    lane: Lane = Lane.TRAIN
    tries: int = 1
    error: str | None = None
    """What failed, where the outcome is not `scored`."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """`malformed_calls`, `unknown_tools`, `refused_calls`, …"""
    timings_s: Mapping[str, float] = field(default_factory=dict)
    """`generate`, `execute`, `verify`, `queue`: active seconds of each."""
    artefacts: Mapping[str, Json] = field(default_factory=dict)
    """Small evidence about what was left (sizes, hashes, probe output)."""

    @property
    def reward(self) -> float | None:
        """The verdict's reward, 0.0 for `policy_failed`, None for everything without signal."""
        if self.outcome is Outcome.POLICY_FAILED:
            return 0.0
        if self.outcome is Outcome.SCORED and self.verdict is not None:
            return self.verdict.reward
        return None

    @property
    def final_text(self) -> str:
        """Text of the last turn; '' if there is none."""
        return self.turns[-1].text if self.turns else ""

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled."""
        return sum(turn.num_sampled_tokens for turn in self.turns)

    def versions(self) -> tuple[int, ...]:
        """Distinct weight versions of the trained tokens, ascending."""
        pairs = ((v, m) for r in self.rows for v, m in zip(r.versions_T, r.mask_T, strict=True))
        return tuple(sorted({version for version, trained in pairs if trained}))

    def judged(self, verdict: Verdict, outcome: Outcome) -> Trajectory:
        """The same attempt with its judgement."""
        return replace(self, verdict=verdict, outcome=outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The attempts at one task that are compared with one another."""

    draw: int
    task: Task
    members: tuple[Trajectory, ...]

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """One per member; None where there is no signal."""
        return tuple(member.reward for member in self.members)
