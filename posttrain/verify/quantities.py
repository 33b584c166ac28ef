r"""Amounts: a number with its sign, scale and unit, and when two of them are equal.

    12.5 km    -$3.2 million    45 %    25 °C    (1,250)

Units are Pint's (pint.readthedocs.io), and currencies, none of which converts into another. The one
thing that must stay true: an answer without the gold answer's unit, or with another one that does
not convert, is equal to nothing, unless the check says otherwise. `docs/CHECKS.md` has each
decision in a table that is a test.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.verify import answers

SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SYMBOLS = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR"}
CURRENCIES = (
    "USD = [US_dollar] = _ = dollar", "cent = USD / 100", "EUR = [euro] = _ = euro",
    "GBP = [pound_sterling]", "JPY = [yen] = _ = yen", "INR = [rupee] = _ = rupee",
)  # fmt: skip
"""As Pint defines units; `pound` is one of mass."""
MAX_UNIT_CHARS = 40
PERCENT = "%"

_FACTOR = r"[A-Za-zµμΩ°]+(?:\^[+-]?[1-9])?"
_UNIT = re.compile(rf"%|{_FACTOR}(?:(?:\s*[*·/]\s*|\s+per\s+|\s+){_FACTOR})*")
_SCALE = re.compile(rf"({'|'.join(SCALES)})\b\s*", re.I)
_SIGNS = re.escape("".join(SYMBOLS))
_BEFORE = re.compile(rf"([+-]?)\s*([{_SIGNS}])\s*(.*)", re.S)
_AFTER = re.compile(rf"(.*?)\s*([{_SIGNS}])", re.S)
_ROMAN = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\\circ\}?|\\degree|°)\s*")
_TYPED = str.maketrans({"²": "^2", "³": "^3", "⁻": "^-", "¹": "1"})


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of units."""

    value: Fraction
    unit: str = ""
    """As Pint reads it; '' for none, `%` for a percentage."""
    in_brackets: bool = False
    """Whether its sign was written as in accounts."""


def amount(text: str) -> Amount | None:
    r"""The one amount that a text is; None where it is none, or more than one.

    >>> [(str(one.value), one.unit) for one in map(amount, (r"-\$3.2 million", "12 km/h"))]
    [('-3200000', 'USD'), ('12', 'km/h')]
    """
    if len(text) > answers.MAX_NUMBER_CHARS:
        return None
    plain = _tidied(text)
    sign = unit = ""
    in_brackets = plain.startswith("(") and plain.endswith(")")
    if in_brackets:
        plain = plain[1:-1].strip()
    if match := _BEFORE.fullmatch(plain):
        sign, unit, plain = match[1], SYMBOLS[match[2]], match[3]
    elif match := _AFTER.fullmatch(plain):
        plain, unit = match[1], SYMBOLS[match[2]]
    value, rest = answers.leading(sign + plain)
    if value is None or (in_brackets and value < 0):
        return None
    if match := _SCALE.match(rest):
        value, rest = value * SCALES[match[1].lower()], rest[match.end() :]
    if rest:
        if unit or len(rest) > MAX_UNIT_CHARS or not _UNIT.fullmatch(rest):
            return None
        unit = rest
    return Amount(-value if in_brackets else value, unit, in_brackets)


def _tidied(text: str) -> str:
    """Without LaTeX and typography; a dollar sign that is not closed is one of money."""
    plain = _ROMAN.sub(r" \1 ", text.strip()).strip()
    plain = plain.replace(r"\%", "%").replace(r"\cdot", "·").replace("~", " ").translate(_TYPED)
    plain = re.sub(r"\s+\^", "^", _DEGREE.sub(" °", plain))
    opened = plain.startswith("$") and not (len(plain) > 1 and plain.endswith("$"))
    money = "$" if opened else ""
    plain = money + answers.unwrapped(plain[len(money) :])
    return plain.replace(r"\$", "$")


def same_amount(
    gold: str,
    answer: str,
    *,
    relative: float = 0.0,
    absolute: float = 0.0,
    optional: bool = False,
    percent: bool = False,
) -> bool:
    """Equality within max(relative × |gold|, absolute), in the gold answer's unit; exact where both
    are 0. `optional`: an answer without a unit has the gold answer's; `percent`: 45 % is 0.45.

    Raises:
        UsageError: `gold` is no amount, its unit is unknown, or a tolerance is negative.

    >>> same_amount("12.5 km", "12500 m"), same_amount("12.5 km", "12.5")
    (True, False)
    """
    expected = amount(gold)
    if expected is None or (expected.unit not in ("", PERCENT) and _unit(expected.unit) is None):
        raise UsageError(
            f"wanted a number, its unit one of Pint's, as gold answer, got {gold!r:.80}.",
            "leave off what is counted, or use kind 'exact'",
        )
    if not (0 <= relative < 1 and 0 <= absolute < float("inf")):
        raise UsageError(f"wanted tolerances of 0 or more, got {relative} and {absolute}.")
    if optional and percent:
        raise UsageError("wanted an optional unit or percentages as shares, got both.")
    given = amount(answer)
    if given is None or (given.in_brackets and not expected.in_brackets):
        return False
    value = _converted(given, expected.unit, optional=optional, percent=percent)
    bound = max(Fraction(relative) * abs(expected.value), Fraction(absolute))
    return value is not None and abs(value - expected.value) <= bound


def _converted(given: Amount, unit: str, *, optional: bool, percent: bool) -> Fraction | None:
    """The amount's number in a unit; None where it has none in it."""
    if given.unit == unit or (optional and not given.unit):
        return given.value
    if {given.unit, unit} == {"", PERCENT}:
        share = Fraction(1, 100) if given.unit else Fraction(100)
        return given.value * share if percent else None
    one, other = _unit(given.unit), _unit(unit)
    if not given.unit or not unit or one is None or other is None:
        return None
    found = _registry().Quantity(given.value, one)
    try:
        if (
            found.to_root_units().units
            != _registry().Quantity(Fraction(1), other).to_root_units().units
        ):
            return None
        return Fraction(found.to(other).magnitude)
    except (ValueError, TypeError, ArithmeticError, AttributeError):  # Pint's are of these
        return None


@functools.lru_cache(maxsize=1024)
def _unit(text: str) -> Any:
    """Pint's unit of this name; None where there is none."""
    import pint

    plain = re.sub(r"\s+per\s+", "/", text).replace("·", "*").replace("^", "**")
    plain = "percent" if plain == PERCENT else re.sub(r"\s+(?=[A-Za-zµμΩ°])(?<![*/])", "*", plain)
    try:
        return _registry().Unit(plain)
    except (pint.errors.PintError, ValueError, TypeError, AttributeError):
        return None


@functools.cache
def _registry() -> Any:
    import pint

    registry = pint.UnitRegistry(non_int_type=Fraction)
    for line in CURRENCIES:
        registry.define(line)
    return registry
