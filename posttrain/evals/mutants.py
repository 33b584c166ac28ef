r"""Mutants of correct solutions: small changes of what is right, to see whether the checks notice.

Of a Python program one mutant for each operator and place, in the terms of mutation testing
(DeMillo, Lipton and Sayward 1978; the operators are those of Offutt et al. 1996 that Python has);
of an answer and of a reference solution such changes as an almost right attempt would hold. The one
thing that must stay true: a mutant differs from what it was made of. Whether it is wrong as well
nobody can tell from the text alone: some are equivalent.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from posttrain.core.task import Json, Oracle, OracleTurn

_BOUNDARIES: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_OPPOSITES: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
T = TypeVar("T")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.]*\w)")
_WORD = re.compile(r"[A-Za-z]{1,}")
_SEPARATORS = ("\n", ", ", ",", " ")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed program or answer."""

    operator: str
    where: str
    """What was changed, for people."""
    text: str


# --- programs -------------------------------------------------------------------------------------


def of_program(source: str) -> list[Mutant]:
    """Every mutant of a Python program, by its places in order.

    >>> [(m.operator, m.text) for m in of_program("x = a < 3")]  # doctest: +NORMALIZE_WHITESPACE
    [('statement', 'pass'), ('boundary', 'x = a <= 3'), ('comparison', 'x = a >= 3'),
     ('constant', 'x = a < 4'), ('constant', 'x = a < 2')]

    Raises:
        SyntaxError: it is no Python.
    """
    unchanged = ast.unparse(ast.parse(source))
    found: dict[str, Mutant] = {}
    for index, (node, parent) in enumerate(_places(ast.parse(source))):
        for number, (operator, _) in enumerate(_changes(node, parent)):
            tree = ast.parse(source)
            place, above = next(
                pair for at, pair in enumerate(_places(tree)) if at == index
            )  # the same place in a tree of its own
            list(_changes(place, above))[number][1]()
            text = ast.unparse(ast.fix_missing_locations(tree))
            line = getattr(node, "lineno", 0)
            if text != unchanged:
                found.setdefault(text, Mutant(operator, f"line {line}", text))
    return list(found.values())


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """All nodes with what they are in, in a fixed order."""
    yield tree, None
    for node in ast.walk(tree):
        yield from ((child, node) for child in ast.iter_child_nodes(node))


Change = tuple[str, Callable[[], object]]


def _changes(node: ast.AST, parent: ast.AST | None) -> Iterator[Change]:
    """Operators that apply at a node, and what carries each out."""

    def set_(name: str, value: object) -> Callable[[], object]:
        return lambda: setattr(node, name, value)

    match node:
        case ast.Compare(ops=[one, *rest]):
            for name, table in (("boundary", _BOUNDARIES), ("comparison", _OPPOSITES)):
                if type(one) in table:
                    yield name, set_("ops", [table[type(one)](), *rest])
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in _ARITHMETIC:
            yield "arithmetic", set_("op", _ARITHMETIC[type(operator)]())
        case ast.BoolOp(op=operator):
            yield "boolean", set_("op", ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if parent is not None:
            yield "negation", lambda: _put(parent, node, operand)
        case ast.Constant(value=bool() as value):
            yield "constant", set_("value", not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", set_("value", value + 1)
            yield "constant", set_("value", value - 1)
        case ast.Constant(value=str() as value) if not isinstance(parent, ast.Expr):
            yield "constant", set_("value", value + "x")
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "condition", set_("test", ast.UnaryOp(op=ast.Not(), operand=test))
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield "return value", set_("value", ast.Constant(value=None))
        case ast.Call(func=ast.Name(id="range"), args=[*first, last]):
            for operation in (ast.Add(), ast.Sub()):
                moved = ast.BinOp(left=last, op=operation, right=ast.Constant(value=1))
                yield "off by one", set_("args", [*first, moved])
    if _is_droppable(node) and parent is not None:
        yield "statement", lambda: _put(parent, node, ast.Pass())


def _is_droppable(node: ast.AST) -> bool:
    """Whether it is a statement that does something; returns and definitions are changed else."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    kinds = (ast.Assign, ast.AugAssign, ast.If, ast.For, ast.Break, ast.Continue, ast.Raise)
    return isinstance(node, kinds)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _put(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """A node in the place of another one."""
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list):
            value[:] = [new if one is old else one for one in value]


# --- answers and reference solutions --------------------------------------------------------------


def of_answer(text: str) -> list[Mutant]:
    """Answers that are almost this one.

    >>> [mutant.text for mutant in of_answer("B")], [m.text for m in of_answer("-3.5")]
    (['C'], ['-2.5', '3.5'])
    >>> [mutant.operator for mutant in of_answer("2 7 ab")]
    ['number', 'sign', 'word', 'item', 'order']
    """
    found: dict[str, Mutant] = {}

    def add(operator: str, where: str, new: str) -> None:
        if new.strip() != text.strip():
            found.setdefault(new, Mutant(operator, where, new))

    for at in list(_NUMBER.finditer(text))[-1:]:
        number, (begin, end) = at.group(), at.span()
        more = f"{float(number) + 1:g}" if "." in number else str(int(number) + 1)
        add("number", f"{number} → {more}", text[:begin] + more + text[end:])
        other = number[1:] if number.startswith("-") else f"-{number}"
        if float(number):
            add("sign", f"{number} → {other}", text[:begin] + other + text[end:])
    for at in list(_WORD.finditer(text))[-1:]:
        word, (begin, end) = at.group(), at.span()
        other = word[:-1] + _next(word[-1])
        add("word", f"{word} → {other}", text[:begin] + other + text[end:])
    for separator in _SEPARATORS:
        items = text.split(separator)
        if len(items) > 1:
            add("item", f"without {items[-1]!r:.40}", separator.join(items[:-1]))
            swapped = [items[1], items[0], *items[2:]]
            add("order", "the first two swapped", separator.join(swapped))
            break
    return list(found.values())


def _next(letter: str) -> str:
    """The next letter of the alphabet, the first after the last.

    >>> _next("a"), _next("Z")
    ('b', 'A')
    """
    first = "a" if letter.islower() else "A"
    return chr((ord(letter) - ord(first) + 1) % 26 + ord(first))


def of_oracle(oracle: Oracle, *, executor: str) -> list[tuple[str, Oracle]]:
    """What was changed, and the turns: of an `answer` its text; else the calls, each of which is
    left out once and changed in each of its arguments.
    """
    turns = oracle.turns
    if executor == "answer":
        changed = of_answer(turns[-1].text)
        return [
            (f"{one.operator}: {one.where}", _with(turns, -1, replace(turns[-1], text=one.text)))
            for one in changed
        ]
    found = []
    for index, turn in enumerate(turns):
        for number, call in enumerate(turn.tool_calls):
            others = (*turn.tool_calls[:number], *turn.tool_calls[number + 1 :])
            less = (replace(turn, tool_calls=others),) if others else ()
            left = Oracle(turns=(*turns[:index], *less, *turns[index + 1 :]))
            found.append((f"call: without {call.arguments!r:.60}", left))
            for what, arguments in _arguments(call.arguments or {}):
                calls = list(turn.tool_calls)
                calls[number] = replace(call, arguments=arguments)
                found.append((what, _with(turns, index, replace(turn, tool_calls=tuple(calls)))))
    return found


def _arguments(given: Mapping[str, Json]) -> Iterator[tuple[str, Mapping[str, Json]]]:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            continue
        for mutant in of_answer(str(value)):
            new: Json = mutant.text
            if not isinstance(value, str):
                new = type(value)(float(mutant.text))
            yield f"{mutant.operator}: {name}: {mutant.where}", {**given, name: new}


def _with(turns: Sequence[OracleTurn], index: int, turn: OracleTurn) -> Oracle:
    changed = list(turns)
    changed[index] = turn
    return Oracle(turns=tuple(changed))


def some(mutants: Sequence[T], most: int, *, seed: object) -> list[T]:
    """At most so many of them, the same for the same seed, in their order."""
    numbers = sorted(random.Random(str(seed)).sample(range(len(mutants)), min(most, len(mutants))))
    return [mutants[number] for number in numbers]
