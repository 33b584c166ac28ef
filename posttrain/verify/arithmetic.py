"""Arithmetic programs, as text: plain expressions, and the step lists of FinQA (arXiv 2109.00122).

    (193.5 - 100) / 100
    subtract(193.5, const_100), divide(#0, const_100)

Steps are separated by commas, `#0` is the value of the first one, the last one's is the program's.
There are + - * / ^ (or **), brackets, `add`, `subtract`, `multiply`, `divide`, `exp`, `greater`
(yes or no), constants (`const_100`, `const_m1`) and `table_sum`, `table_average`, `table_max`,
`table_min` of a table's row (`table_sum(net sales, none)`). Parsed, never executed as code; exact
fractions throughout. The one thing that must stay true: its size bounds what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import regex

MAX_CHARS = 1_000
MAX_TOKENS = 200
MAX_DEPTH = 32
MAX_BITS = 4_096
MAX_EXPONENT = 64

Value = Fraction | bool
_TOKEN = regex.compile(
    r"\s*(?:table_(?P<fold>sum|average|max|min)\((?P<row>[^#]+?)\s*,\s*none\s*\)"
    r"|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)%?)|const_(?P<constant>m?\d{1,12})|\#(?P<step>\d{1,2})"
    r"|(?P<name>add|subtract|multiply|divide|exp|greater)\b|(?P<sign>\*\*|[-+*/^(),]))"
)
_FOLDS: Mapping[str, Callable[[Sequence[Fraction]], Fraction]] = {
    "sum": lambda row: sum(row, Fraction(0)),
    "average": lambda row: sum(row, Fraction(0)) / len(row),
    "max": max,
    "min": min,
}
_NAMES = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "exp": "^", "greater": ">"}


class NoProgram(ValueError):
    """A text is no program, or has no value; the message says why."""


@dataclass(frozen=True, slots=True)
class Number:
    """A literal, with its sign; `3.8%` is 0.038."""

    value: Fraction
    constant: bool = False
    """Whether it is named as one (`const_100`)."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table, by its first cell, folded into one number."""

    name: str
    fold: str


@dataclass(frozen=True, slots=True)
class _Step:
    index: int


@dataclass(frozen=True, slots=True)
class _Operation:
    sign: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class _Negative:
    inner: Node


Leaf = Number | Row
Node = Leaf | _Step | _Operation | _Negative
Of = Callable[[Leaf], Sequence[Fraction]]
"""The one number of a literal, all of a row."""


@dataclass(frozen=True, slots=True)
class Program:
    """Steps that were parsed."""

    steps: tuple[Node, ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every literal and row, in order."""
        return tuple(leaf for step in self.steps for leaf in _leaves(step))

    def value(self, of: Of) -> Value:
        """The last step's value, where `of` gives the one number of a literal and all of a row.

        >>> program("subtract(3, const_1), (#0 + 1)^2").value(lambda leaf: [leaf.value])
        Fraction(9, 1)

        Raises:
            NoProgram: a division by zero, a comparison that is calculated with, too large a number.
        """
        done: list[Value] = []
        for step in self.steps:
            done.append(_value(step, done, of))
        return done[-1]


def program(text: str) -> Program:
    """A program from its text.

    Raises:
        NoProgram: it is none.
    """
    if len(text) > MAX_CHARS:
        raise NoProgram(f"more than {MAX_CHARS} characters")
    reader = _Reader(text)
    steps = [reader.sum(0)]
    while reader.take(","):
        steps.append(reader.sum(0))
    if reader.tokens:
        raise NoProgram(f"odd at {reader.told()!r}")
    for number, step in enumerate(steps):
        if any(index >= number for index in _references(step)):
            raise NoProgram(f"step {number} refers to one that has no value yet")
    return Program(tuple(steps))


class _Reader:
    """Recursive descent over the tokens that are left."""

    def __init__(self, text: str) -> None:
        self.tokens: list[regex.Match[str]] = []
        place, text = 0, text.rstrip()
        while place < len(text):
            token = _TOKEN.match(text, place)
            if token is None:
                raise NoProgram(f"odd at {text[place : place + 20]!r}")
            self.tokens.append(token)
            place = token.end()
        if len(self.tokens) > MAX_TOKENS:
            raise NoProgram(f"more than {MAX_TOKENS} numbers and signs")
        self.tokens.reverse()

    def told(self) -> str:
        """The next token's text."""
        return self.tokens[-1][0].strip() if self.tokens else "the end"

    def take(self, *signs: str) -> str:
        """The next token, if it is one of these signs; else ''."""
        if self.tokens and self.tokens[-1]["sign"] in signs:
            return str(self.tokens.pop()["sign"])
        return ""

    def want(self, sign: str) -> None:
        """Refuses anything but this sign."""
        if not self.take(sign):
            raise NoProgram(f"wanted {sign!r}, got {self.told()!r}")

    def sum(self, depth: int) -> Node:
        """Terms with + and - between them."""
        if depth > MAX_DEPTH:
            raise NoProgram(f"more than {MAX_DEPTH} levels")
        node = self.product(depth)
        while sign := self.take("+", "-"):
            node = _Operation(sign, node, self.product(depth))
        return node

    def product(self, depth: int) -> Node:
        """Factors with * and / between them."""
        node = self.power(depth)
        while sign := self.take("*", "/"):
            node = _Operation(sign, node, self.power(depth))
        return node

    def power(self, depth: int) -> Node:
        """A signed base and its exponent; `-2^2` is -4."""
        if depth > MAX_DEPTH:
            raise NoProgram(f"more than {MAX_DEPTH} levels")
        if self.take("-"):
            inner = self.power(depth + 1)
            if isinstance(inner, Number):
                return Number(-inner.value, inner.constant)
            return _Negative(inner)
        node = self.atom(depth)
        if self.take("^", "**"):
            return _Operation("^", node, self.power(depth + 1))
        return node

    def atom(self, depth: int) -> Node:
        """A number, constant, step, row, call or bracket."""
        if self.take("("):
            node = self.sum(depth + 1)
            self.want(")")
            return node
        if not self.tokens or self.tokens[-1]["sign"]:
            raise NoProgram(f"wanted a number, got {self.told()!r}")
        token = self.tokens.pop()
        if token["name"]:
            self.want("(")
            left = self.sum(depth + 1)
            self.want(",")
            right = self.sum(depth + 1)
            self.want(")")
            return _Operation(_NAMES[token["name"]], left, right)
        if token["row"]:
            return Row(token["row"].strip(), token["fold"])
        if token["step"]:
            return _Step(int(token["step"]))
        if token["constant"]:
            return Number(Fraction(token["constant"].replace("m", "-")), constant=True)
        literal = token["number"]
        value = Fraction(literal.removesuffix("%"))
        return Number(value / 100 if literal.endswith("%") else value)


def _leaves(node: Node) -> Iterator[Leaf]:
    if isinstance(node, _Operation):
        yield from _leaves(node.left)
        yield from _leaves(node.right)
    elif isinstance(node, _Negative):
        yield from _leaves(node.inner)
    elif not isinstance(node, _Step):
        yield node


def _references(node: Node) -> Iterator[int]:
    if isinstance(node, _Operation):
        yield from _references(node.left)
        yield from _references(node.right)
    elif isinstance(node, _Negative):
        yield from _references(node.inner)
    elif isinstance(node, _Step):
        yield node.index


def _value(node: Node, done: Sequence[Value], of: Of) -> Value:
    if isinstance(node, _Step):
        return done[node.index]
    if isinstance(node, Number):
        return of(node)[0]
    if isinstance(node, Row):
        if not (row := of(node)):
            raise NoProgram(f"no numbers in the row {node.name!r:.80}")
        return _FOLDS[node.fold](row)
    if isinstance(node, _Negative):
        return -_number(node.inner, done, of)
    left, right = _number(node.left, done, of), _number(node.right, done, of)
    found = _applied(node.sign, left, right)
    if (
        isinstance(found, Fraction)
        and (found.numerator * found.denominator).bit_length() > MAX_BITS
    ):
        raise NoProgram("too large a number")
    return found


def _number(node: Node, done: Sequence[Value], of: Of) -> Fraction:
    found = _value(node, done, of)
    if isinstance(found, bool):
        raise NoProgram("a comparison is calculated with")
    return found


def _applied(sign: str, left: Fraction, right: Fraction) -> Value:
    if sign in "/^" and (right if sign == "/" else left or right >= 0) == 0:
        raise NoProgram("a division by zero")
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    if sign == "/":
        return left / right
    return left > right if sign == ">" else _raised(left, right)


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    """A power: exact for whole exponents, in floating point for others."""
    if abs(exponent) > MAX_EXPONENT:
        raise NoProgram(f"an exponent beyond {MAX_EXPONENT}")
    if exponent.denominator == 1:
        return base**exponent.numerator
    if base < 0:
        raise NoProgram("a root of a negative number")
    try:
        return Fraction(float(base) ** float(exponent))
    except (OverflowError, ValueError) as error:
        raise NoProgram(f"a power that is no number: {error}") from None
