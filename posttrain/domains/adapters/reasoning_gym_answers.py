"""Which answers may reach the scorers of reasoning-gym at all.

Nine of its scorers evaluate the answer as a program, and some count "nan" as right. This decides
by the text alone, before any scorer sees it; whether an answer is right is not its matter. The one
thing that must stay true: nothing that passes can call, look up or import anything.
"""

from __future__ import annotations

import re
from fractions import Fraction

from posttrain.domains.adapters import reasoning_gym_levels as table

MAX_CHARS = 20_000
_NO_NUMBER = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)
_LITERAL = re.compile(r"""[\w\s,'"\[\]-]*""")
_FORMULA = re.compile(r"[A-Za-z0-9_\s+*/().,=-]*")
_CALLED = re.compile(r"([A-Za-z_]\w*)\s*\(")
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh", "asin", "acos", "atan"}
    | {"exp", "log", "ln", "sqrt", "Abs"}
)
_SHAPES = {
    "advanced_geometry": re.compile(r"[-+]?[\d.]+\s*°?|\(?\s*[-+]?[\d.]+\s*,\s*[-+]?[\d.]+\s*\)?"),
    "fraction_simplification": re.compile(
        r"\$?\s*(?:\\[dt]?frac\{-?\d+\}\{-?\d+\}|-?\d+\s*/\s*-?\d+)\s*\$?"
    ),
    "polynomial_equations": re.compile(r"[-+]?\d+(?:\.\d*)?(?:\s*,\s*[-+]?\d+(?:\.\d*)?)*"),
    "quantum_lock": re.compile(r"[A-Ca-c](?:(?:\s|→|->|,)+[A-Ca-c])*"),
    "sokoban": re.compile(r"[LRUDlrud\s]+"),
}
"""All of an answer must look like this: the scorers pick what suits them out of anything."""
_LARGE_EXPONENT = re.compile(r"\d\.?[eE][+-]?\d{4,}")
_SIDE_BY_SIDE = re.compile(r"[\w)]\s+[\w(]")
_LARGE_POWER = re.compile(r"\*\*\s*\(?\s*-?\s*(?:\d{3,}|[\w.]+\s*\)?\s*\*\*)")


def passes(generator: str, answer: str, *, gold: str, question: str) -> bool:
    """Whether an answer is one at all: not empty, no echo of the question, no disguised number,
    and, where the scorer would evaluate it, plain data or a plain formula.

    >>> passes("countdown", "(3 + 4)*5", gold="35", question="?")
    True
    >>> passes("countdown", "().__class__", gold="35", question="?")
    False
    >>> passes("coin_flip", "0", gold="0.375", question="?")  # paid for its first digit
    False
    >>> passes("quantum_lock", "I cannot", gold="C → A", question="?")  # and for C and A
    False
    >>> passes("polynomial_equations", "1.0, 2.0 or 3.0, 4.0", gold="1.0, 4.0", question="?")
    False
    >>> passes("advanced_geometry", "(1.5, 2.0), 21.6°", gold="(1.5, 2.0)", question="?")
    False
    >>> passes("simple_integration", "x**2 or x**3", gold="x**2 + C", question="?")
    False
    >>> passes("fraction_simplification", "1/2 or 3/4", gold="1/2", question="?")
    False
    """
    if not answer or len(answer) > MAX_CHARS or (question and question in answer):
        return False
    if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(gold):
        return False
    if any(character.isdecimal() and not character.isascii() for character in answer):
        return False  # int() reads the digits of every script; nobody asked for them
    if _LARGE_EXPONENT.search(answer):
        return False  # a number with as many digits as that takes all the time there is
    if generator in _SHAPES:
        return _SHAPES[generator].fullmatch(answer) is not None
    if generator == "time_intervals":
        return _outline(answer) == _outline(gold)
    if generator == "coin_flip":
        return _is_near(answer, gold)
    if generator in table.READ_AS_PYTHON:
        return _LITERAL.fullmatch(answer) is not None
    if generator in table.READ_BY_SYMPY:
        return _is_formula(answer)
    return True


def _outline(text: str) -> str:
    """A duration without its digits: `2 days, 3:04` and `1 day, 13:00` are alike."""
    return re.sub(r"\d+", "0", " ".join(text.lower().split())).replace("days", "day")


def _is_near(answer: str, gold: str) -> bool:
    """Whether a number or fraction is the gold one, within the scorer's own tolerance."""
    try:
        return abs(Fraction(answer.replace(",", "")) - Fraction(gold.replace(",", ""))) <= 1e-4
    except (ValueError, ZeroDivisionError):
        return False


def _is_formula(answer: str) -> bool:
    """Arithmetic over numbers and names, with known functions, and powers below 1,000. Nothing
    stands beside another without an operator: no `or` between two formulas.
    """
    if not _FORMULA.fullmatch(answer) or "__" in answer or re.search(r"\.\s*[A-Za-z_]", answer):
        return False
    if _SIDE_BY_SIDE.search(answer):
        return False
    if any(name not in _FUNCTIONS for name in _CALLED.findall(answer)):
        return False
    return not _LARGE_POWER.search(answer)
