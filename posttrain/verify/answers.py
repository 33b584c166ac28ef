r"""Final answers: where they stand in a reply, and when two of them are equal.

Not a symbolic mathematics system: it knows text, numbers and choices. The one thing that must stay
true: an answer that is empty, echoes the prompt, offers several candidates or cannot be parsed is
equal to nothing. Equality is not symmetric: the gold answer comes first and is trusted to parse.

Decisions, each a test:

- Where: `line`, the first line after the task's prefix (a fixed place, so that prose after it is no
  second answer); `reply`, all of it; `boxed`, the last complete \boxed{} or \fbox{} only.
- Text: equal after trimming; case counts unless the check says otherwise; runs of white space are
  one space, and composed and decomposed letters one (NFC).
- Numbers: exactly. `1,234` is grouped digits, `1,23` is no number; `50%` is 1/2; `1 1/2` is 3/2;
  `−3` is -3; `3e2` and `3 × 10^2` are 300. With units, and compared: `quantities`.
- Choices: a label, bare, in brackets, or followed by punctuation or a dash and its text; a second
  label anywhere makes it no answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from posttrain.core.errors import UsageError

MAX_NUMBER_CHARS = 120
"""Longer texts are no numbers."""
MAX_EXPONENT = 400
"""Powers of ten beyond this are no numbers: they would cost memory, not tell anything."""


class Where(StrEnum):
    """Where in a reply the final answer stands."""

    LINE = "line"
    REPLY = "reply"
    BOXED = "boxed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An extracted answer, or why there is none."""

    text: str | None
    refusal: str = ""
    """`empty`, `no complete box`; '' where there is an answer."""


def extract(reply: str, *, prefix: str = "", where: Where = Where.LINE) -> Answer:
    r"""The final answer of a reply. A reply that repeats the task's prefix starts after it.

    >>> extract(" 42\nbecause 6 x 7", prefix="Answer:").text
    '42'
    >>> extract(r"\boxed{8}, no: \boxed{\frac{3}{\sqrt{2}}}", where=Where.BOXED).text
    '\\frac{3}{\\sqrt{2}}'
    """
    text = reply.strip()
    if prefix.strip() and text.startswith(prefix.strip()):
        text = text[len(prefix.strip()) :].strip()
    if where is Where.BOXED:
        content = last_box(text)
        if content is None:
            return Answer(text=None, refusal="no complete box")
        text = content.strip()
    elif where is Where.LINE:
        text = text.split("\n", 1)[0].strip()
    return Answer(text=text) if text else Answer(text=None, refusal="empty")


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed{} or \fbox{}, braces nested; None where the last is not closed.

    >>> last_box(r"\fbox{17}"), last_box(r"\boxed{3} and \boxed{5")
    ('17', None)
    """
    starts = list(_BOX.finditer(text))
    if not starts:
        return None
    begin, depth = starts[-1].end(), 1
    for index in range(begin, len(text)):
        escaped = text[index - 1] == "\\"
        if text[index] == "{" and not escaped:
            depth += 1
        elif text[index] == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return text[begin:index]
    return None


def same_text(gold: str, answer: str, *, ignore_case: bool = False) -> bool:
    """Equality of text: trimmed, runs of white space as one space; case counts by default.

    >>> same_text("New  York", "New York"), same_text("Yes", "yes")
    (True, False)
    """
    left, right = (unicodedata.normalize("NFC", " ".join(one.split())) for one in (gold, answer))
    if ignore_case:
        left, right = left.casefold(), right.casefold()
    return bool(left) and left == right


# --- numbers ----------------------------------------------------------------------------------

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<mantissa>{_DECIMAL})"
    r"(?:[eE](?P<e>[+-]?[0-9]{1,4})|\s*[x*×]\s*10\s*(?:\^|\*\*)\s*(?P<ten>[+-]?[0-9]{1,4}))?"
)
_FRACTION = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>{_DIGITS})\s+)?(?P<top>{_DECIMAL})\s*/\s*"
    rf"(?P<sign2>[+-]?)(?P<bottom>{_DECIMAL})"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_THIN = "\u2009"
_GROUPS = re.compile(rf"(?<=[0-9]){_THIN}(?=[0-9]{{3}}(?![0-9]))")
_PLAIN = str.maketrans({"−": "-", "\u00a0": " ", "\u202f": _THIN})


def number(text: str) -> Fraction | None:
    r"""The one number that a text is, exactly; None where it is none, or more than one.

    >>> [str(number(t)) for t in ("1,234.50", "-3/4", r"$\frac{1}{3}$", "7.5%", "1.5e3", "8 or 9")]
    ['2469/2', '-3/4', '1/3', '3/40', '1500', 'None']
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    plain = unwrapped(text)
    value, rest = leading(plain)
    if rest in ("%", r"\%") and value is not None:
        return value / 100
    return value if not rest else None


def leading(plain: str) -> tuple[Fraction | None, str]:
    r"""The number that a text begins with, and what follows it; None where it begins with none.

    >>> leading("1 1/2 km"), leading("1e6"), leading("km")
    ((Fraction(3, 2), 'km'), (Fraction(1000000, 1), ''), (None, 'km'))
    """
    match = _FRACTION.match(plain)
    value = None if match is None else _ratio(match)
    if match is None:
        match = _NUMBER.match(plain)
        value = None if match is None else _decimal(match)
    return value, plain[match.end() :].strip() if match else plain


def unwrapped(text: str) -> str:
    """Without mathematics delimiters, emphasis, a closing full stop and typographic variants."""
    plain = text.translate(_PLAIN).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), ("**", "**"), ("`", "`")):
        if len(plain) > len(opening) and plain.startswith(opening):
            plain = plain[len(opening) :].removesuffix(closing).strip()
    plain = plain.removesuffix(".").strip()
    plain = _GROUPS.sub("", plain.replace("{,}", ",").replace(r"\,", _THIN)).replace(_THIN, " ")
    plain = plain.replace(r"\times", "×")
    plain = re.sub(r"\^\{([+-]?[0-9]+)\}", r"^\1", plain)
    return _LATEX_FRACTION.sub(lambda m: f" {m[1]}/{m[2]}", plain).strip()


def _decimal(match: re.Match[str]) -> Fraction | None:
    exponent = int(match["e"] or match["ten"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = Fraction(match["mantissa"].replace(",", "")) * Fraction(10) ** exponent
    return -value if match["sign"] == "-" else value


def _ratio(match: re.Match[str]) -> Fraction | None:
    """`a/b` and `w a/b`, the sign before the whole or before the numerator or denominator."""
    parts = (match["whole"] or "0", match["top"], match["bottom"])
    whole, top, bottom = (Fraction(part.replace(",", "")) for part in parts)
    if bottom == 0:
        return None
    value = whole + top / bottom
    negative = (match["sign"] == "-") != (match["sign2"] == "-")
    return -value if negative else value


# --- choices ----------------------------------------------------------------------------------


def choice(text: str, labels: Sequence[str]) -> str | None:
    r"""The one label that a text chooses; None where it chooses none, or names a second one.

    Labels of one letter are matched without case at the head and with case after it, so that the
    article in "C: a dog" is no second choice.

    >>> [choice(t, "ABCD") for t in ("(C)", "C - 12 m", r"\text{C}", "b.", "C or D", "C, not A")]
    ['C', 'C', 'C', 'B', None, None]
    """
    plain = _TEXT.sub(r"\1", text).strip().strip("*`$").strip()
    found = None
    for label in sorted(labels, key=len, reverse=True):
        head = re.match(
            rf"\(?\[?{re.escape(label)}(?=$|[)\].:,;!]|\s[-–—]\s)[)\]]?[.:,;]?", plain, re.I
        )
        if head:
            found, rest = label, plain[head.end() :]
            break
    if found is None:
        return None
    for label in labels:
        flags = re.NOFLAG if len(label) == 1 else re.I
        if label != found and re.search(rf"(?<!\w){re.escape(label)}(?!\w)", rest, flags):
            return None
    return found


def same_choice(gold: str, answer: str, labels: Sequence[str]) -> bool:
    """Whether the answer chooses the label `gold`.

    Raises:
        UsageError: `gold` is none of the labels.
    """
    if gold not in labels:
        raise UsageError(f"wanted one of {list(labels)} as gold choice, got {gold!r:.80}.")
    return choice(answer, labels) == gold
