r"""Equality of mathematical expressions, in a worker process: parsed by math-verify's LaTeX parser.

Not for the verifying process: expressions of a policy may take for ever. No limit of time is here.
The one thing that must stay true: what cannot be parsed is equal to nothing, and a gold answer that
cannot be parsed raises.
"""

from __future__ import annotations

import functools
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import (
    NormalizationConfig,
    latex2sympy,
    normalize_latex,
)
from math_verify.grader import should_treat_as_complex

_LATEX = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)


def same(gold: str, answer: str) -> bool:
    """Whether two expressions are equal.

    Raises:
        ValueError: `gold` cannot be parsed.
    """
    expected = _gold(gold)
    try:
        given = _parsed(answer)
    except Exception:
        return False
    return _equal(expected, given)


@functools.lru_cache(maxsize=1024)
def _gold(text: str) -> Any:
    try:
        found = _parsed(text)
    except Exception as error:
        raise ValueError(f"wanted an expression as gold answer, got {text!r:.80}.") from error
    if not _equal(found, found):
        raise ValueError(f"gold answer {text!r:.80} is not equal to itself.")
    return found


def _parsed(text: str) -> Any:
    plain = normalize_latex(text.replace("−", "-"), _LATEX)
    if r"\approx" in plain:
        raise ValueError("an approximation is no answer")
    complex_too = should_treat_as_complex(plain)
    return latex2sympy(plain, is_real=not complex_too, normalization_config=None)


def _equal(gold: Any, given: Any) -> bool:
    """Equality by the form of the gold answer; a number may be named by one symbol before it."""
    equations = isinstance(gold, sympy.Eq), isinstance(given, sympy.Eq)
    if all(equations):
        return (
            _proportional(gold.lhs - gold.rhs, given.lhs - given.rhs)
            if _plain(gold, given)
            else gold.lhs == given.lhs and _equal(gold.rhs, given.rhs)
        )
    if equations[1] and given.lhs.is_Symbol:
        return _equal(gold, given.rhs)
    if equations[0] and gold.lhs.is_Symbol:
        return _equal(gold.rhs, given)
    if isinstance(gold, sympy.FiniteSet) and isinstance(given, sympy.FiniteSet):
        left = list(given.args)
        for one in gold.args:
            match = next((other for other in left if _equal(one, other)), None)
            if match is None:
                return False
            left.remove(match)
        return not left
    if isinstance(gold, sympy.Interval) and isinstance(given, sympy.Interval):
        open_ = (gold.left_open, gold.right_open) == (given.left_open, given.right_open)
        return bool(open_) and _equal(gold.start, given.start) and _equal(gold.end, given.end)
    if isinstance(gold, sympy.Tuple) and isinstance(given, sympy.Tuple):
        return len(gold) == len(given) and all(map(_equal, gold, given))
    if isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr):
        return _zero(gold, given)
    return type(gold) is type(given) and bool(gold == given)


def _plain(*equations: Any) -> bool:
    return all(isinstance(side, sympy.Expr) for one in equations for side in one.args)


def _zero(gold: Any, given: Any) -> bool:
    if gold == given:
        return gold is not sympy.nan and gold is not sympy.zoo
    exact = (sympy.nsimplify(one, rational=True) for one in (gold, given))
    return bool(sympy.simplify(next(exact) - next(exact)) == 0)


def _proportional(gold: Any, given: Any) -> bool:
    if sympy.expand(gold) == 0 or sympy.expand(given) == 0:
        return False
    ratio = sympy.simplify(gold.doit() / given.doit())
    return bool(ratio.is_number) and ratio.is_finite is True and ratio != 0
