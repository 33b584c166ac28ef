"""Rows to micro-batches: every distinct prefix once, logits only where a token is trained.

Not tensors: plain tuples that `batch` turns into them. Rows that begin alike (a group's attempts
behind their prompt, examples behind the wording of their domain) become one `Tree`: what they share
is its root, each distinct remainder a branch that continues the root's positions. Which rows share
is what gives the fewest tokens. Inputs after the last trained token predict nothing and are left
out, so branches that differ only in their last token are one branch.

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
    """One trained token; `version`: the oldest weights that had part in it, its context's too."""

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
    for group, judged in zip(groups, advantages, strict=True):
        for member, advantage in zip(group.members, judged.values, strict=True):
            rows = [row for row in member.rows if trained_indices(row)]
            if advantage is None or not rows:
                continue
            trainables += [
                Trainable(row=row, sequence=sequence, advantage=advantage,
                          silent=judged.flat and not keep_flat)
                for row in rows
            ]  # fmt: skip
            sequence += 1
    return trainables


def from_examples(examples: Sequence[Example]) -> list[Trainable]:
    """Rows of every example that has a trained token and a weight above 0."""
    return [
        Trainable(row=example.row, sequence=index, weight=example.weight)
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

    Rows too many for the budget become several trees, their root repeated in each.
    """
    planted: list[_Planted] = []
    for shared in _trees(_strands(t for t in trainables if not t.silent)):
        planted += [_grown(shared.root, bundle) for bundle in _bundled(shared, budget)]
    planted.sort(key=lambda p: (len(p.tree.root), p.tree.root, p.tree.branches, _order(p)))
    return _filled(planted, budget)


def lined_up(trainables: Sequence[Trainable], *, budget: int) -> list[MicroBatch]:
    """Micro-batches that keep the order of the rows and share nothing between them; targets come
    row by row.
    """
    strands = [_Strand(_inputs(trainable.row), [trainable]) for trainable in trainables]
    return _filled([_grown(0, [strand]) for strand in strands], budget)


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


# --- who shares with whom ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Strand:
    """Inputs that still predict something, with every row that has them or a beginning of them."""

    inputs: tuple[int, ...]
    members: list[Trainable]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Strands that share their first `root` tokens."""

    root: int
    strands: list[_Strand]


@dataclass(slots=True)
class _Node:
    """Strands with a common beginning of `depth` tokens, and the cheapest way to plant them."""

    depth: int
    strands: list[_Strand] = field(default_factory=list)
    cost: int = 0
    """Tokens of `trees`."""
    trees: list[_Shared] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)

    def settle(self) -> _Node:
        """Choose: every child on its own, or a tree rooted here for those that gain by it."""
        alone = sum(child.cost for child in self.children)
        joining = [child for child in self.children if child.joined(self.depth) < child.cost]
        together = self.depth + sum(min(c.cost, c.joined(self.depth)) for c in self.children)
        self.strands = [strand for child in self.children for strand in child.strands]
        if together < alone:
            shared = _Shared(self.depth, [strand for c in joining for strand in c.strands])
            staying = [c for c in self.children if c.joined(self.depth) >= c.cost]
            apart = [tree for child in staying for tree in child.trees]
            self.cost, self.trees = together, [shared, *apart]
        else:
            self.cost, self.trees = alone, [tree for c in self.children for tree in c.trees]
        return self

    def joined(self, depth: int) -> int:
        """Tokens of its strands as branches of a root of `depth` tokens."""
        return sum(len(strand.inputs) - depth for strand in self.strands)


def _inputs(row: Row) -> tuple[int, ...]:
    """Everything that still predicts a trained token."""
    return row.ids_T[: trained_indices(row)[-1]]


def _strands(trainables: Iterable[Trainable]) -> list[_Strand]:
    """Distinct inputs, sorted; a beginning of another is no strand of its own."""
    ordered = sorted(
        trainables,
        key=lambda t: (_inputs(t.row), t.row.ids_T, t.row.logprobs_T, t.advantage, t.weight),
    )
    strands: list[_Strand] = []
    for trainable in reversed(ordered):  # a beginning of any later one is one of the next
        inputs = _inputs(trainable.row)
        if strands and strands[-1].inputs[: len(inputs)] == inputs:
            strands[-1].members.append(trainable)
        else:
            strands.append(_Strand(inputs, [trainable]))
    return strands[::-1]


def _trees(strands: Sequence[_Strand]) -> list[_Shared]:
    """The forest of fewest tokens whose trees are a root and branches.

    Walks the tree of common beginnings bottom up: sorted strands, and a stack of the open nodes
    on the way to the current one.
    """
    stack = [_Node(0)]
    for index, strand in enumerate(strands):
        leaf = _Node(len(strand.inputs), [strand], len(strand.inputs))
        leaf.trees = [_Shared(leaf.depth, [strand])]
        following = strands[index + 1].inputs if index + 1 < len(strands) else ()
        depth = _alike(strand.inputs, following)
        if depth > stack[-1].depth:
            stack.append(_Node(depth))
        stack[-1].children.append(leaf)
        while stack[-1].depth > depth:
            settled = stack.pop().settle()
            if stack[-1].depth < depth:
                stack.append(_Node(depth))
            stack[-1].children.append(settled)
    return stack[0].settle().trees


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _bundled(shared: _Shared, budget: int) -> list[list[_Strand]]:
    """Branches of one root, short ones first, cut where the budget ends and where padding them to
    the longest would cost more than another copy of the root.
    """
    bundles: list[list[_Strand]] = []
    room = tokens = 0
    for strand in sorted(shared.strands, key=lambda s: (len(s.inputs), s.inputs)):
        length = len(strand.inputs) - shared.root
        padding = length * len(bundles[-1]) - tokens if bundles else 0
        if not bundles or length > room or padding > PADDING_PER_TOKEN * shared.root:
            bundles.append([])
            room, tokens = budget - shared.root, 0
        bundles[-1].append(strand)
        room -= length
        tokens += length
    return bundles


PADDING_PER_TOKEN = 8
"""Padding of branches that costs as much as a token: it takes part in attention alone."""


# --- trees with their targets -----------------------------------------------------------------


def _grown(root: int, bundle: Sequence[_Strand]) -> _Planted:
    """One tree with its targets. A single branch continues the root itself."""
    shared = bundle[0].inputs[:root]
    branches = [strand.inputs[root:] for strand in bundle if len(strand.inputs) > root]
    tree = (
        Tree(root=shared + branches[0])
        if len(branches) == 1
        else Tree(root=shared, branches=tuple(branches))
    )
    plant = _Planted(tree)
    start = root
    for strand in bundle:
        for trainable in reversed(strand.members):
            plant.targets += _targets(trainable, root, start, plant.num_rows)
            plant.num_rows += 1
        start += len(strand.inputs) - root
    return plant


def _targets(trainable: Trainable, root: int, start: int, sequence: int) -> list[Target]:
    """Targets of a row whose inputs after the first `root` begin at `start` of its tree.

    The token at index i of the row is predicted by the input at i - 1, which stands at i - 1 within
    the root and at `start + (i - 1 - root)` after it.
    """
    row = trainable.row
    return [
        Target(
            place=i - 1 if i <= root else start + i - 1 - root,
            id=row.ids_T[i],
            behaviour=row.logprobs_T[i],
            version=min(row.versions_T[i], row.kv_versions_T[i]),
            advantage=trainable.advantage,
            weight=trainable.weight,
            sequence=sequence,
        )
        for i in trained_indices(row)
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
