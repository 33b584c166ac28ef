r"""Equality of mathematical expressions, in a worker process: parsed by math-verify's LaTeX parser.

Not for the verifying process: expressions of a policy may take for ever. No limit of time is here,
but what would only cost (towers of powers, large factorials) is refused before anything is worked
out. The one thing that must stay true: what cannot be parsed is equal to nothing, and a gold answer
that cannot be parsed raises. Gold comes first: it gives form and operations, the answer follows.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import sympy
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.latex2sympy2 import (
    ConversionConfig,
    NormalizationConfig,
    _Latex2Sympy,
    normalize_latex,
)
from latex2sympy2_extended.logic import And

MAX_NODES = 300
"""Larger trees are no expressions."""
MAX_POWER = 1_000
"""Larger exponents are none; those in an exponent are at most 10."""
MAX_FACTORIAL = 100
MAX_DEPTH = 20
"""More brackets within one another are none."""

_LATEX = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_READ = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
_SPACE = re.compile(r"\\[,;:! ]|~|\{\}")
_MIXED = re.compile(r"(?<![\d.}^_])(\d+)\s*\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
_BARE_FRACTION = re.compile(r"\\[dt]?frac\s*\d\s*\d")
_SIDE_BY_SIDE = re.compile(r"[\d.]\s+[\d.]")
_NAMED = re.compile(r"\\(?:begin|end|operatorname)\*?\s*\{[^{}]*\}|_\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_TO_BE_WORKED_OUT = (
    sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative, sympy.factorial,
    sympy.binomial,
)  # fmt: skip
_ORDERS = (
    sympy.StrictLessThan, sympy.StrictGreaterThan, sympy.LessThan, sympy.GreaterThan,
)  # fmt: skip
_STRICT = (sympy.StrictLessThan, sympy.StrictGreaterThan)
_COLLECTIONS = (sympy.FiniteSet, sympy.Union, And)


class NoExpressionError(ValueError):
    """A text is no expression; the message says why."""


def same(gold: str, answer: str) -> bool:
    """Whether two expressions are equal.

    Raises:
        ValueError: `gold` cannot be parsed.
    """
    expected = _gold(gold)
    if "".join(gold.split()) == "".join(answer.split()):
        return True
    try:
        given = _parsed(answer)
    except Exception:
        return False
    return _work(given) <= _work(expected) and _equal(expected, given)


@functools.lru_cache(maxsize=1024)
def _gold(text: str) -> Any:
    try:
        found = _parsed(text)
    except Exception as error:
        raise ValueError(
            f"wanted an expression as gold answer, got {text!r:.80}: {error}"
        ) from error
    if not _equal(found, found):
        raise ValueError(f"gold answer {text!r:.80} is not equal to itself.")
    return found


# --- reading --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    text = _SPACE.sub(" ", text.replace("−", "-"))
    if _depth(text) > MAX_DEPTH:
        raise NoExpressionError(f"more than {MAX_DEPTH} levels")
    if _SIDE_BY_SIDE.search(_BARE_FRACTION.sub("", text)):
        raise NoExpressionError("numbers stand side by side")
    words = set(_WORD.findall(_NAMED.sub(" ", text))) - {"and"}
    if words:
        raise NoExpressionError(f"{min(words)!r} is a word")
    plain = normalize_latex(_MIXED.sub(r"(\1+\\frac{\2}{\3})", text), _LATEX)
    if r"\approx" in plain:
        raise NoExpressionError("an approximation is no answer")
    tree = _tree(plain)
    if isinstance(tree, sympy.MatrixBase):
        tree = sympy.ImmutableMatrix(tree)
    for count, node in enumerate(sympy.preorder_traversal(tree)):
        if count >= MAX_NODES:
            raise NoExpressionError(f"more than {MAX_NODES} parts")
        _check(node)
    imaginary = {one: sympy.I for one in getattr(tree, "free_symbols", ()) if str(one) == "i"}
    return tree.xreplace(imaginary) if imaginary else tree


def _depth(text: str) -> int:
    """Levels of brackets, of whatever shape."""
    levels = itertools.accumulate((one in "([{") - (one in ")]}") for one in text)
    return max(levels, default=0)


class _Fast(_Latex2Sympy):  # type: ignore[misc]
    """A parse in ANTLR's SLL mode is the same as in the usual mode LL, or an error, and several
    times as fast (ANTLR 4, `PredictionMode.SLL`).
    """

    def create_parser(self, text: str) -> Any:
        parser = super().create_parser(text)
        parser._interp.predictionMode = PredictionMode.SLL
        return parser

    def parse_number(self, text: str) -> Any:
        """As before, but for whole numbers without a detour through SymPy's parser."""
        digits = text.replace(",", "")
        return sympy.Integer(int(digits)) if digits.isdecimal() else super().parse_number(text)


def _tree(plain: str) -> Any:
    try:
        return _Fast(None, is_real=True, config=_READ).parse(plain)
    except Exception:
        return _Latex2Sympy(None, is_real=True, config=_READ).parse(plain)


def _check(node: Any) -> None:
    """Refuses a part that has no value, or one that would cost more than it tells."""
    if node in (sympy.nan, sympy.zoo):
        raise NoExpressionError("a part has no value")
    if isinstance(node, (sympy.factorial, sympy.binomial)):
        if any(not one.free_symbols and not _at_most(one, MAX_FACTORIAL) for one in node.args):
            raise NoExpressionError(f"a factorial beyond {MAX_FACTORIAL}")
    elif isinstance(node, (sympy.Pow, sympy.exp)):
        exponent = node.args[-1]
        towers = any(
            isinstance(one, (sympy.Pow, sympy.exp, sympy.factorial)) and _is_large(one.args[-1])
            for one in sympy.preorder_traversal(exponent)
            if not one.free_symbols
        )
        if towers or (not exponent.free_symbols and not _at_most(exponent, MAX_POWER)):
            raise NoExpressionError(f"an exponent beyond {MAX_POWER}")


def _is_large(exponent: Any) -> bool:
    """Whether it is anything but a small exponent that is written out."""
    return not (exponent.is_Rational and abs(exponent) <= 10)


def _at_most(value: Any, limit: int) -> bool:
    return value.is_infinite is True or bool(abs(sympy.N(value, 8)) <= limit)


def _work(tree: Any) -> set[type]:
    """Operations that are still to be worked out: integrals, sums, ..., functions of numbers."""
    return {
        type(one)
        for one in sympy.preorder_traversal(tree)
        if isinstance(one, _TO_BE_WORKED_OUT)
        or (
            isinstance(one, sympy.Function)
            and not isinstance(one, sympy.exp)
            and not one.free_symbols
        )
    }


# --- comparing ------------------------------------------------------------------------------------


def _equal(gold: Any, given: Any) -> bool:
    """Equality by the form of the gold answer; a value may be named by one symbol before it."""
    equations = isinstance(gold, sympy.Eq), isinstance(given, sympy.Eq)
    if all(equations):
        return _same_equation(gold, given)
    if equations[1] and given.lhs.is_Symbol:
        return _equal(gold, given.rhs)
    if equations[0] and gold.lhs.is_Symbol:
        return _equal(gold.rhs, given)
    if isinstance(gold, _ORDERS) and isinstance(given, _ORDERS):
        alike = isinstance(gold, _STRICT) is isinstance(given, _STRICT)
        ratio = _ratio(gold.gts - gold.lts, given.gts - given.lts)
        return alike and ratio is not None and bool(ratio > 0)
    if isinstance(gold, sympy.Interval) and isinstance(given, sympy.Interval):
        open_ = (gold.left_open, gold.right_open) == (given.left_open, given.right_open)
        return bool(open_) and _equal(gold.start, given.start) and _equal(gold.end, given.end)
    if isinstance(gold, _COLLECTIONS) and type(gold) is type(given):
        return _matched(gold.args, given.args)
    if isinstance(gold, sympy.Tuple) and isinstance(given, sympy.Tuple):
        return len(gold) == len(given) and all(map(_equal, gold, given))
    if isinstance(gold, sympy.MatrixBase) and isinstance(given, sympy.MatrixBase):
        return bool(gold.shape == given.shape) and all(map(_equal, gold, given))
    if isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr):
        return _zero(gold, given)
    return type(gold) is type(given) and bool(gold == given)


def _matched(gold: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether each of the one is equal to one of the other, none left."""
    left = list(given)
    for one in gold:
        match = next((other for other in left if _equal(one, other)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _same_equation(gold: Any, given: Any) -> bool:
    """The same equation up to a factor; a solution (`x = 2`) is met by a solution only."""
    sides = (gold.lhs, gold.rhs, given.lhs, given.rhs)
    solved = gold.lhs.is_Symbol and not gold.rhs.free_symbols
    if solved or not all(isinstance(side, sympy.Expr) for side in sides):
        return bool(gold.lhs == given.lhs) and _equal(gold.rhs, given.rhs)
    return _ratio(gold.lhs - gold.rhs, given.lhs - given.rhs) is not None


def _ratio(gold: Any, given: Any) -> Any:
    """The number, not 0, that one is of the other; None where there is none."""
    if not (isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr)):
        return None
    if sympy.expand(gold) == 0 or sympy.expand(given) == 0:
        return None
    at = _point(gold, given, 31)
    ratio = sympy.expand(gold.xreplace(at) / given.xreplace(at))
    if not (ratio.is_number and ratio.is_finite and ratio != 0):
        return None
    return ratio if _zero(gold, ratio * given) else None


def _zero(gold: Any, given: Any) -> bool:
    if gold == given:
        return True
    if _differ(gold, given):
        return False
    one, other = (
        sympy.nsimplify(each, rational=True) if each.has(sympy.Float) else each
        for each in (gold, given)
    )
    difference = one - other
    if sympy.expand(difference) == 0:  # most that are equal: what follows is slow
        return True
    if sympy.expand(sympy.fraction(sympy.together(difference))[0]) == 0:
        return True
    return bool(sympy.simplify(difference) == 0)


def _point(gold: Any, given: Any, start: int) -> dict[Any, Any]:
    """Values for all symbols, the same for the same ones."""
    symbols = sorted(gold.free_symbols | given.free_symbols, key=str)
    return {one: sympy.Rational(7 * index + start, 13) for index, one in enumerate(symbols)}


def _differ(gold: Any, given: Any) -> bool:
    """Whether both have values at some point that are far apart: no simplification is needed."""
    at = _point(gold, given, 17)
    try:
        one, other = (each.evalf(20, subs=at) for each in (gold, given))
        if not (one.is_number and one.is_finite and other.is_number and other.is_finite):
            return False
        gap, *sizes = (sympy.N(abs(each), 8) for each in (one - other, one, other))
        return bool(gap > 1e-9 * max(sizes))
    except (TypeError, ValueError, ArithmeticError, NotImplementedError, AttributeError):
        return False
