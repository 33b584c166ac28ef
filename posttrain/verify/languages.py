"""The language and script of a text.

The language is told by `py3langid` (n-grams of bytes, 140 languages, offline); how often it is
right is measured in docs/CHECKS.md. The one thing that must stay true: a text that is too short to
tell is of no language.
"""

from __future__ import annotations

from collections.abc import Sequence

import py3langid
import regex

from posttrain.core.errors import UsageError, nearest
from posttrain.verify.segments import paragraphs_of

MIN_LETTERS = 20
"""A text with fewer is of no language."""
MIN_PART_LETTERS = 60
"""Paragraphs with at least so many are judged one by one as well."""
ALIKE = (
    frozenset({"hr", "bs", "sr", "sh"}), frozenset({"id", "ms"}), frozenset({"no", "nb", "nn"}),
    frozenset({"zh", "wuu", "yue"}),
)  # fmt: skip
"""Languages that are not told apart: each counts as the others."""
_LETTERS = regex.compile(r"\p{L}[\p{L}\p{M}]*")
_OF_SCRIPTS = regex.compile(r"[\p{L}--[\p{Common}\p{Inherited}]]", regex.V1)


def known() -> frozenset[str]:
    """Codes (ISO 639) of the languages that are told."""
    return frozenset(code for code, _ in py3langid.rank(""))


def other_language(text: str, code: str) -> str:
    """Why a text is not in a language; '' where it is, whole and each long paragraph.

    >>> other_language("Das ist ein kurzer Satz in deutscher Sprache.", "de")
    ''
    >>> other_language("Das ist ein kurzer Satz in deutscher Sprache.", "fr")
    "language: 'de', wanted 'fr': Das ist ein kurzer Satz in deutscher Sprache"

    Raises:
        UsageError: an unknown language.
    """
    if code not in known():
        raise UsageError(f"no language {code!r}{nearest(code, known())}.", "name an ISO 639-1 code")
    same = {code}.union(*(group for group in ALIKE if code in group))
    parts = [text, *(part for part in paragraphs_of(text) if _size(part) >= MIN_PART_LETTERS)]
    for part in parts:
        if _size(part) < MIN_LETTERS:
            return f"language: {_size(part)} letters are too few to tell"
        if (found := told(part)) not in same:
            said = " ".join(_LETTERS.findall(part))
            return f"language: {found!r}, wanted {code!r}: {said[:60]}"
    return ""


def told(text: str) -> str:
    """The likeliest language of the words of a text."""
    return str(py3langid.classify(" ".join(_LETTERS.findall(text)))[0])


def _size(text: str) -> int:
    return sum(map(len, _LETTERS.findall(text)))


def other_script(text: str, names: Sequence[str], share: float) -> str:
    """Why less than a share of a text's letters are of these scripts; '' where that many are.

    >>> other_script("Привет, мир", ["Cyrillic"], 1.0), other_script("42", ["Latin"], 1.0)
    ('', 'script: no letters')

    Raises:
        UsageError: an unknown script.
    """
    try:
        wanted = regex.compile("[" + "".join(rf"\p{{Script={name}}}" for name in names) + "]")
    except regex.error as error:
        raise UsageError(
            f"no scripts {list(names)}: {error}.", "name them as Unicode does"
        ) from None
    letters = _OF_SCRIPTS.findall(text)
    if not letters:
        return "script: no letters"
    found = sum(bool(wanted.match(letter)) for letter in letters) / len(letters)
    return "" if found >= share else f"script: {found:.0%} of the letters, wanted {share:.0%}"
