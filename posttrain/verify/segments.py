r"""Parts of a text as they are counted: graphemes, words, sentences, paragraphs, lines, items.

No linguistics: each part is defined by Unicode properties and a few signs, as its function says.
The one thing that must stay true: what is not seen (zero-width characters, marks, empty items)
counts as nothing.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from typing import Literal

import regex

UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}"
"""Scripts without spaces in which a character counts as a word, as word processors have it."""
_LETTER = rf"[[\p{{L}}\p{{N}}]--[{UNSPACED}]]"
_WORD = regex.compile(
    rf"[{UNSPACED}][ー々\p{{M}}]*"
    rf"|{_LETTER}[{_LETTER}\p{{M}}]*"
    rf"(?:(?:[.'’‐\-_]|(?<=\d),(?=\d)){_LETTER}[{_LETTER}\p{{M}}]*)*",
    regex.V1,
)
_SAID = regex.compile(r"[\p{L}\p{N}]")
_SIGN = r"\p{Extended_Pictographic}[\ufe0e\ufe0f\U0001f3fb-\U0001f3ff]{0,2}"
_UNSEEN = regex.compile(
    r"[[\p{Default_Ignorable_Code_Point}\u2800]--[\u200d\ufe0e\ufe0f]]"
    rf"|(?<!{_SIGN})[\u200d\ufe0e\ufe0f]",
    regex.V1,
)
"""Joiners and variation selectors are seen within emoji, by what becomes of them."""
_ITEM = regex.compile(r"^[ \t]*[-*+•‣◦][ \t]+\S", regex.M)
_RULER = regex.compile(r"^[ \t]*(?:[-*_][ \t]*){3,}$", regex.M)
_HEADING = regex.compile(r"^#{1,6}[ \t]+\S", regex.M)
_STARTS = regex.compile(r"^[ \t]*(?:[-*+•‣◦]|\d{1,3}[.)]|#{1,6})[ \t]+", regex.M)
_STOP = regex.compile(r"[.!?…]+[\"'”’)\]»*_]*(?=\s|$)|[。！？｡]+[」』”’）]*")
_SHORT = regex.compile(
    r"(?:^|[\s(\"“])(?:\p{Lu}|(?:\p{L}\.)+\p{L}|"
    r"(?i:mr|mrs|ms|dr|prof|st|vs|fig|vol|approx|cf|ca|bzw|usw))$"
)


def visible(text: str, form: Literal["NFC", "NFKC"] = "NFC") -> str:
    r"""The text in a Unicode normal form (`NFC`, `NFKC`), without what nobody sees, such as
    zero-width spaces, joiners, soft hyphens and empty Braille; those within emoji stay.

    >>> visible("a\u200bb\u00ad\u200d"), visible("ﬁt", "NFKC"), len(visible("👩‍👧"))
    ('ab', 'fit', 3)
    """
    return str(_UNSEEN.sub("", unicodedata.normalize(form, text)))


def characters(text: str) -> int:
    r"""Graphemes (UAX #29, extended), white space between others included.

    >>> characters(" né 👩‍👩‍👧 "), characters("e\u0301")
    (4, 1)
    """
    return len(regex.findall(r"\X", text.strip()))


def words(text: str) -> int:
    """Runs of letters, digits and marks, held together by full stops, apostrophes, hyphens and
    underscores within, and by commas between digits; a character of Han, Hiragana or Katakana is a
    word. Other scripts without spaces (Thai, Lao, Khmer, Burmese) are counted by runs.

    >>> words("It's a well-known 1,234.5 — e.g. naïve."), words("東京タワー"), words("- * …")
    (6, 4, 0)
    """
    return len(_WORD.findall(text))


def sentences(text: str) -> int:
    r"""What ends in . ! ? … before white space, or in 。 ！ ？, or with its paragraph, list item or
    heading, and says something. Not after an initial or one of a few abbreviations.

    >>> sentences("Dr. A. B. Smith came. Did he? Yes!"), sentences("one\ntwo\n\nthree")
    (3, 2)
    """
    return sum(_sentences(block) for block in paragraphs_of(_STARTS.sub("\n\n", text)))


def _sentences(block: str) -> int:
    count, begin = 0, 0
    for stop in _STOP.finditer(block):
        said = block[begin : stop.start()]
        last = not block[stop.end() :].strip()
        if stop[0] == "." and not last and _SHORT.search(said[-12:]):
            continue
        count += bool(_SAID.search(said))
        begin = stop.end()
    return count + bool(_SAID.search(block[begin:]))


def paragraphs_of(text: str) -> list[str]:
    """What stands between blank lines and says something."""
    return [part for part in regex.split(r"\n[ \t]*\n", text) if _SAID.search(part)]


def paragraphs(text: str) -> int:
    r"""What stands between blank lines and says something.

    >>> paragraphs("a\nb\n\n \n***\n\nc")
    2
    """
    return len(paragraphs_of(text))


def lines(text: str) -> int:
    """Lines with something on them."""
    return sum(not line.isspace() for line in text.splitlines() if line)


def bullets(text: str) -> int:
    r"""Lines that begin with -, *, +, •, ‣ or ◦, white space and something.

    >>> bullets("- a\n * b\n-c\n- \n* * *")
    2
    """
    return len(_ITEM.findall(_RULER.sub("", text)))


def headings(text: str) -> int:
    """Lines that begin with one to six #, white space and something."""
    return len(_HEADING.findall(text))


UNITS: Mapping[str, Callable[[str], int]] = {
    "characters": characters, "words": words, "sentences": sentences, "paragraphs": paragraphs,
    "lines": lines, "bullets": bullets, "headings": headings,
}  # fmt: skip
"""What can be counted, by name."""
