"""Rows to micro-batches: every distinct prefix once, logits only where a token is trained.

Not tensors: plain tuples that `batch` turns into them. Rows of one family (a group's attempts)
that start with the same prompt become one `Tree`: the prompt is its root, each distinct remainder
a branch that continues the root's positions. Inputs after the last trained token predict nothing
and are left out, so branches that differ only in their last token are one branch.

The one thing that must stay true: the weights are fixed over the whole batch before it is cut, so
loss and gradient do not depend on the budget, the number of micro-batches or the order of arrival
(trees are sorted by content; even the bits agree for any order).

Legend of suffixes: _T input tokens of a micro-batch, _U positions whose logits are computed, _N
trained tokens (several may be predicted at one position).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from posttrain.core.ports import Example
from posttrain.core.trajectory import Group, Row
from posttrain.train.advantages import Advantages
from posttrain.train.algorithms import Normaliser


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """A row with what its tokens count for."""

    row: Row
    family: int
    """Rows of one family may share their prompt."""
    sequence: int
    """Attempt (or example) the row belongs to, numbered over the batch."""
    advantage: float = 1.0
    weight: float = 1.0
    """Weight of each trained token; the batch's normaliser is in it after `normalised`."""
    silent: bool = False
    """Counts in the normalisers but has no gradient: it is never packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A shared root and the branches that continue it."""

    root: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Input tokens of root and branches."""
        return len(self.root) + sum(len(branch) for branch in self.branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One trained token."""

    place: int
    """Input position that predicts it: in the tree while packing, in the micro-batch after."""
    id: int
    behaviour: float
    """Log-probability it was sampled with."""
    version: int
    advantage: float
    weight: float
    sequence: int
    """Row it belongs to, numbered within its micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass: trees one after another, each root before its branches."""

    trees: tuple[Tree, ...]
    targets: tuple[Target, ...]
    """`place` counts from the start of the micro-batch."""
    num_rows: int

    @property
    def ids_T(self) -> list[int]:
        """Token ids in layout order."""
        return [i for tree in self.trees for part in (tree.root, *tree.branches) for i in part]

    @property
    def positions_T(self) -> list[int]:
        """Position of each token in its own row."""
        positions: list[int] = []
        for tree in self.trees:
            start = len(tree.root)
            positions.extend(range(start))
            for branch in tree.branches:
                positions.extend(range(start, start + len(branch)))
        return positions

    @property
    def num_tokens(self) -> int:
        """Input tokens."""
        return sum(tree.num_tokens for tree in self.trees)


@dataclass(slots=True)
class _Planted:
    """A tree with the targets of its rows; places count from the root's first token."""

    tree: Tree
    targets: list[Target] = field(default_factory=list)
    num_rows: int = 0


# --- what is trained on -----------------------------------------------------------------------


def trained_indices(row: Row) -> list[int]:
    """Indices of the trained tokens; a row's very first token is none, as nothing predicts it."""
    return [i for i, trained in enumerate(row.mask_T) if trained and i]


def from_groups(
    groups: Sequence[Group], advantages: Sequence[Advantages], *, keep_flat: bool
) -> list[Trainable]:
    """Rows of every member that has an advantage and at least one trained token.

    Rows of flat groups are `silent` unless `keep_flat` (a KL term gives them a gradient).
    """
    trainables: list[Trainable] = []
    sequence = 0
    for family, (group, judged) in enumerate(zip(groups, advantages, strict=True)):
        for member, advantage in zip(group.members, judged.values, strict=True):
            rows = [row for row in member.rows if trained_indices(row)]
            if advantage is None or not rows:
                continue
            trainables += [
                Trainable(row=row, family=family, sequence=sequence, advantage=advantage,
                          silent=judged.flat and not keep_flat)
                for row in rows
            ]  # fmt: skip
            sequence += 1
    return trainables


def from_examples(examples: Sequence[Example]) -> list[Trainable]:
    """Rows of every example that has a trained token and a weight above 0."""
    return [
        Trainable(row=example.row, family=index, sequence=index, weight=example.weight)
        for index, example in enumerate(examples)
        if trained_indices(example.row) and example.weight > 0
    ]


def normalised(
    trainables: Sequence[Trainable], normaliser: Normaliser, *, constant_length: int = 1
) -> list[Trainable]:
    """The same rows with the normaliser of the whole batch worked into their weights.

    With weights w (1 unless an example has its own), n trained tokens a row and S sequences:
    token mean w / Σ(w·n); sequence mean w / (n of its sequence · Σ of w over sequences); constant
    w / (constant_length · Σ of w over sequences).
    """
    tokens: dict[int, int] = defaultdict(int)
    shares: dict[int, float] = {}
    for trainable in trainables:
        tokens[trainable.sequence] += len(trained_indices(trainable.row))
        shares[trainable.sequence] = trainable.weight
    total = sum(shares[s] * tokens[s] for s in sorted(tokens))
    sequences = sum(shares[s] for s in sorted(shares))

    def divisor(trainable: Trainable) -> float:
        if normaliser is Normaliser.TOKEN_MEAN:
            return total
        if normaliser is Normaliser.SEQUENCE_MEAN:
            return sequences * tokens[trainable.sequence]
        return sequences * constant_length

    return [
        replace(trainable, weight=trainable.weight / divisor(trainable)) for trainable in trainables
    ]


# --- packing ----------------------------------------------------------------------------------


def pack(trainables: Iterable[Trainable], *, budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `budget` input tokens; a longer single row gets one of its own.

    A group too large for the budget becomes several trees, its prompt repeated in each.
    """
    families: dict[tuple[int, tuple[int, ...]], list[Trainable]] = defaultdict(list)
    for trainable in trainables:
        if not trainable.silent:
            prompt = trainable.row.ids_T[: trained_indices(trainable.row)[0]]
            families[trainable.family, prompt].append(trainable)
    planted: list[_Planted] = []
    for (_, prompt), rows in families.items():
        planted += _plant(prompt, rows, budget)
    planted.sort(key=lambda p: (len(p.tree.root), p.tree.root, p.tree.branches, _order(p)))
    return _filled(planted, budget)


def lined_up(trainables: Sequence[Trainable], *, budget: int) -> list[MicroBatch]:
    """Micro-batches that keep the order of the rows and share nothing between them; targets come
    row by row.
    """
    planted = [
        _plant(trainable.row.ids_T[: trained_indices(trainable.row)[0]], [trainable], budget)[0]
        for trainable in trainables
    ]
    return _filled(planted, budget)


def _filled(planted: Sequence[_Planted], budget: int) -> list[MicroBatch]:
    """Trees into micro-batches, in order."""
    batches: list[list[_Planted]] = []
    room = 0
    for plant in planted:
        if plant.tree.num_tokens > room:
            batches.append([])
            room = max(budget, plant.tree.num_tokens)
        batches[-1].append(plant)
        room -= plant.tree.num_tokens
    return [_laid_out(batch) for batch in batches]


def _order(plant: _Planted) -> list[tuple[float, ...]]:
    return [(t.place, t.id, t.behaviour, t.version, t.advantage, t.weight) for t in plant.targets]


def _inputs(row: Row) -> tuple[int, ...]:
    """What follows the prompt and still predicts something."""
    trained = trained_indices(row)
    return row.ids_T[trained[0] : trained[-1]]


def _plant(prompt: tuple[int, ...], rows: list[Trainable], budget: int) -> list[_Planted]:
    """Trees of the rows that share a prompt, each within the budget where that is possible."""
    ordered = sorted(
        rows, key=lambda t: (_inputs(t.row), t.row.ids_T, t.row.logprobs_T, t.advantage, t.weight)
    )
    shoots: list[tuple[tuple[int, ...], list[Trainable]]] = []
    for trainable in reversed(ordered):  # a prefix of any later one is a prefix of the next
        inputs = _inputs(trainable.row)
        if shoots and shoots[-1][0][: len(inputs)] == inputs:
            shoots[-1][1].append(trainable)
        else:
            shoots.append((inputs, [trainable]))
    bundles: list[list[tuple[tuple[int, ...], list[Trainable]]]] = []
    room = 0
    for inputs, members in reversed(shoots):
        if len(inputs) > room or not bundles:
            bundles.append([])
            room = budget - len(prompt)
        bundles[-1].append((inputs, members))
        room -= len(inputs)
    return [_grown(prompt, bundle) for bundle in bundles]


def _grown(
    prompt: tuple[int, ...], bundle: list[tuple[tuple[int, ...], list[Trainable]]]
) -> _Planted:
    """One tree with its targets. A single branch continues the root itself."""
    branches = [inputs for inputs, _ in bundle if inputs]
    tree = (
        Tree(root=prompt + branches[0])
        if len(branches) == 1
        else Tree(root=prompt, branches=tuple(branches))
    )
    plant = _Planted(tree)
    start = len(prompt)
    for inputs, members in bundle:
        for trainable in reversed(members):
            plant.targets += _targets(trainable, start, plant.num_rows)
            plant.num_rows += 1
        start += len(inputs)
    return plant


def _targets(trainable: Trainable, start: int, sequence: int) -> list[Target]:
    """Targets of a row whose inputs after the prompt begin at `start` of its tree.

    The token at index i of the row is predicted by the input at i - 1: a prompt position for the
    first trained token, otherwise `start + (i - 1 - prompt_length)`.
    """
    row, indices = trainable.row, trained_indices(trainable.row)
    prompt = indices[0]
    return [
        Target(
            place=prompt - 1 if i == prompt else start + i - 1 - prompt,
            id=row.ids_T[i],
            behaviour=row.logprobs_T[i],
            version=row.versions_T[i],
            advantage=trainable.advantage,
            weight=trainable.weight,
            sequence=sequence,
        )
        for i in indices
    ]


def _laid_out(batch: list[_Planted]) -> MicroBatch:
    """Trees one after another; targets ordered by place."""
    targets: list[Target] = []
    start = num_rows = 0
    for plant in batch:
        targets += [
            replace(target, place=target.place + start, sequence=target.sequence + num_rows)
            for target in plant.targets
        ]
        start += plant.tree.num_tokens
        num_rows += plant.num_rows
    targets.sort(key=lambda target: target.place)
    return MicroBatch(
        trees=tuple(plant.tree for plant in batch), targets=tuple(targets), num_rows=num_rows
    )
