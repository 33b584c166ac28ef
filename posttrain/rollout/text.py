"""Text as it comes from models, tools and authors, made fit to be stored and tokenised.

It knows nothing of templates or tokens. The one thing that must stay true: what `clean` returns
can be encoded as UTF-8 and holds none of the marks that rendering reserves for itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CUT = "\U000f5eaf"
"""Private-use character at which rendered text is cut before it is encoded."""
PLACEHOLDER = "\U000f5eb0"
"""Private-use character that stands for an assistant turn whose tokens are known already."""

_UNFIT = re.compile(f"[\ud800-\udfff{CUT}{PLACEHOLDER}]")


def clean(text: str) -> str:
    r"""The text with surrogate pairs joined, and lone surrogates and reserved marks as U+FFFD.

    >>> clean("a\ud83d\ude00b\ud800")
    'a😀b�'
    """
    if text.isascii() or not _UNFIT.search(text):
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _UNFIT.sub("\ufffd", joined)


def clean_value(value: Any) -> Any:
    """A JSON value with every string in it cleaned, keys included."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): clean_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean_value(item) for item in value]
    return value


def head(text: str, max_chars: int) -> str:
    """The beginning of a text, marked where it was cut.

    >>> head("abcdef", 3)
    'abc…'
    """
    return text if len(text) <= max_chars else text[:max_chars] + "…"


def head_and_tail(text: str, max_chars: int) -> str:
    r"""Beginning and end of a text of which at most `max_chars` characters are kept.

    >>> head_and_tail("0123456789", 4)
    '01\n[6 characters left out]\n89'
    """
    left_out = len(text) - max_chars
    if left_out <= 0:
        return text
    first = max_chars - max_chars // 2
    tail = text[len(text) - max_chars // 2 :] if max_chars // 2 else ""
    return f"{text[:first]}\n[{left_out} characters left out]\n{tail}"
