"""What differs between two JSON values, place by place: any order, ignored places, tolerance.

It reads no document and pays nothing. The one thing that must stay true: without declared
exceptions two values differ nowhere exactly where `same_json` says that they are equal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from posttrain.core.errors import UsageError
from posttrain.core.task import Json
from posttrain.verify import answers

MAX_TOLD = 8
"""Differences that are told."""
MAX_TEXT = 120
WITHIN = "within what is told"

Path = tuple[str, ...]


def same_json(expected: Json, found: Json) -> bool:
    """Equality of JSON values: strict about types, except that 1 and 1.0 are one number.

    >>> same_json({"a": 1}, {"a": 1.0}), same_json([1], [True]), same_json(None, 0)
    (True, False, False)
    """
    if isinstance(expected, bool) or isinstance(found, bool) or expected is None or found is None:
        return expected is found
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return set(expected) == set(found) and all(
            same_json(value, found[key]) for key, value in expected.items()
        )
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(expected) == len(found) and all(map(same_json, expected, found))
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return expected == found
    return type(expected) is type(found) and bool(expected == found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What does not count as a difference. Places are JSON Pointers (RFC 6901) in which `*` stands
    for any name or index; the index within a list in any order is `*` alone.
    """

    ignore: tuple[Path, ...] = ()
    unordered: tuple[Path, ...] = ()
    absolute: float = 0.0
    relative: float = 0.0
    """Tolerances of numbers: max(absolute, relative × |expected|)."""
    texts: bool = False
    """Whether texts that are numbers are compared as such, within the tolerances: for formats that
    have nothing but text.
    """

    @classmethod
    def of(
        cls, ignore: Json, unordered: Json, *, absolute: Json, relative: Json, texts: bool
    ) -> Rules:
        """Rules as a task writes them.

        Raises:
            UsageError: no lists of JSON Pointers, or no tolerances.
        """
        for places in (ignore, unordered):
            if not isinstance(places, (list, tuple)):
                raise UsageError(f"wanted a list of JSON Pointers, got {places!r:.80}.")
        for bound in (absolute, relative):
            number = isinstance(bound, int | float) and not isinstance(bound, bool)
            if not number or not 0 <= bound < float("inf"):
                raise UsageError(f"wanted a tolerance of 0 or more, got {bound!r:.80}.")
        return cls(
            ignore=tuple(map(pointer, ignore)), unordered=tuple(map(pointer, unordered)),
            absolute=absolute, relative=relative, texts=texts and max(absolute, relative) > 0,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How two values compare."""

    told: tuple[str, ...]
    """The first differences, `/path: what`."""
    equal: int
    """Places (numbers, texts, empty lists, …) that are as expected."""
    places: int
    """All of them, those that are missing or too many included."""


def compared(expected: Json, found: Json, rules: Rules) -> Compared:
    """All differences, counted; the first of them told.

    >>> compared({"a": 1, "b": [1, 2]}, {"a": 1.0, "b": [2, 1]}, Rules(unordered=(("b",),))).told
    ()
    >>> compared({"a": 1, "b": 2}, {"b": 3, "c": 4}, Rules()).told
    ('/a: missing', '/b: wanted 2, got 3', '/c: unexpected 4')
    """
    told: list[str] = []
    equal = places = 0
    for path, what in _walk(expected, found, (), rules):
        places += 1
        equal += not what
        if what and what != WITHIN and len(told) < MAX_TOLD:
            told.append(f"{pointer_text(path)}: {what}")
    return Compared(told=tuple(told), equal=equal, places=places)


def pointer(text: Json) -> Path:
    """The names of a JSON Pointer.

    >>> pointer("/a~1b/*/0"), pointer("")
    (('a/b', '*', '0'), ())

    Raises:
        UsageError: it is none.
    """
    if not isinstance(text, str) or (text and not text.startswith("/")):
        raise UsageError(f"wanted a JSON Pointer such as '/items/*/id', got {text!r:.80}.")
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])


def pointer_text(path: Path) -> str:
    """The JSON Pointer of these names; `/` for the whole."""
    return "".join(f"/{part.replace('~', '~0').replace('/', '~1')}" for part in path) or "/"


# --- the walk -------------------------------------------------------------------------------------

Places = Iterator[tuple[Path, str]]
"""Every place with what is wrong there, '' where nothing is."""


def _walk(expected: Json, found: Json, path: Path, rules: Rules) -> Places:
    if _among(path, rules.ignore):
        return
    if isinstance(expected, Mapping) and isinstance(found, Mapping) and (expected or found):
        for name in (*expected, *(name for name in found if name not in expected)):
            yield from _either(expected, found, name, (*path, name), rules)
    elif _is_list(expected) and _is_list(found) and (expected or found):
        if _among(path, rules.unordered):
            yield from _any_order(expected, found, (*path, "*"), rules)
            return
        one, other = dict(enumerate(expected)), dict(enumerate(found))
        for index in range(max(len(one), len(other))):
            yield from _either(one, other, index, (*path, str(index)), rules)
    elif _same(expected, found, rules):
        yield path, ""
    else:
        yield path, f"wanted {shown(expected)}, got {shown(found)}"
        yield from _more(expected, path, rules)
        yield from _more(found, path, rules)


def _either(
    expected: Mapping[Json, Json], found: Mapping[Json, Json], key: Json, path: Path, rules: Rules
) -> Places:
    if key in expected and key in found:
        yield from _walk(expected[key], found[key], path, rules)
        return
    if not _among(path, rules.ignore):
        there = found[key] if key in found else expected[key]
        yield path, f"unexpected {shown(there)}" if key in found else "missing"
        yield from _more(there, path, rules)


def _more(value: Json, path: Path, rules: Rules) -> Places:
    """The places within a value that has no counterpart, but for the first, which stands for it."""
    for _ in list(_walk(value, value, path, rules))[1:]:
        yield path, WITHIN


def _any_order(expected: Sequence[Json], found: Sequence[Json], path: Path, rules: Rules) -> Places:
    if _among(path, rules.ignore):
        return
    left, over = _unmatched(expected, found, path, rules)
    lost, extra = set(left), set(over)
    for index, value in enumerate(expected):
        if index not in lost:
            yield from _walk(value, value, path, rules)
        else:
            yield path, f"missing {shown(value)}"
            yield from _more(value, path, rules)
    for index, value in enumerate(found):
        if index in extra:
            yield path, f"unexpected {shown(value)}"
            yield from _more(value, path, rules)


def _unmatched(
    expected: Sequence[Json], found: Sequence[Json], path: Path, rules: Rules
) -> tuple[list[int], list[int]]:
    """Indexes without a partner, of either list, in a largest matching."""
    if not rules.absolute and not rules.relative:
        wanted, given = [[_key(one, path, rules) for one in some] for some in (expected, found)]
        return _surplus(wanted, given), _surplus(given, wanted)
    mate: dict[int, int] = {}
    partner: dict[int, int] = {}
    fits = [
        [
            j
            for j, other in enumerate(found)
            if not any(w for _, w in _walk(one, other, path, rules))
        ]
        for one in expected
    ]
    left = [index for index in range(len(expected)) if not _augment(index, fits, mate, partner)]
    return left, [index for index in range(len(found)) if index not in partner]


def _augment(
    start: int, fits: Sequence[Sequence[int]], mate: dict[int, int], partner: dict[int, int]
) -> bool:
    """One more pair, along an alternating path (Kuhn's algorithm), breadth first. `mate` leads from
    expected to found ones, `partner` back.
    """
    came: dict[int, int] = {}
    todo = [start]
    for index in todo:
        for other in fits[index]:
            if other in came:
                continue
            came[other] = index
            if other in partner:
                todo.append(partner[other])
                continue
            free: int | None = other
            while free is not None:
                one = came[free]
                before = mate.get(one)
                partner[free], mate[one] = one, free
                free = before
            return True
    return False


def _surplus(some: Sequence[str], others: Sequence[str]) -> list[int]:
    room, over = Counter(others), []
    for index, key in enumerate(some):
        if room[key]:
            room[key] -= 1
        else:
            over.append(index)
    return over


def _key(value: Json, path: Path, rules: Rules) -> str:
    """The same text for values without a difference; only where there is no tolerance."""
    if _among(path, rules.ignore):
        return ""
    if isinstance(value, Mapping):
        inner = {name: _key(item, (*path, name), rules) for name, item in value.items()
                 if not _among((*path, name), rules.ignore)}  # fmt: skip
        return "{" + json.dumps(inner, sort_keys=True)
    if _is_list(value):
        if _among(path, rules.unordered):
            return "(" + json.dumps(sorted(_key(item, (*path, "*"), rules) for item in value))
        places = [(item, (*path, str(index))) for index, item in enumerate(value)]
        return "[" + json.dumps(
            [_key(item, at, rules) for item, at in places if not _among(at, rules.ignore)]
        )
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


def _same(expected: Json, found: Json, rules: Rules) -> bool:
    if same_json(expected, found):
        return True
    if rules.texts and isinstance(expected, str) and isinstance(found, str):
        one, other = answers.number(expected), answers.number(found)
        return one is not None and other is not None and _near(one, other, rules)
    number = (int, float)
    if isinstance(expected, bool) or isinstance(found, bool):
        return False
    return (
        isinstance(expected, number)
        and isinstance(found, number)
        and _near(Fraction(expected), Fraction(found), rules)
    )


def _near(expected: Fraction, found: Fraction, rules: Rules) -> bool:
    bound = max(Fraction(rules.absolute), Fraction(rules.relative) * abs(expected))
    return abs(expected - found) <= bound


def _among(path: Path, patterns: Sequence[Path]) -> bool:
    return any(
        len(one) == len(path) and all(w in ("*", p) for w, p in zip(one, path, strict=True))
        for one in patterns
    )


def _is_list(value: Json) -> bool:
    return isinstance(value, (list, tuple))


def shown(value: Json) -> str:
    """A value as it is told: JSON, cut."""
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"
