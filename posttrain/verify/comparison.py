"""How what a program printed is compared with what it should print; standard library only, pure.

It is copied into sandboxes, and runs nothing. The one thing that must stay true: output that is no
text, or holds something beyond what is compared, equals nothing.
"""

from __future__ import annotations

import math

WAYS = ("exact", "lines", "tokens", "numbers")
"""`exact`: every character; `lines`: but for white space at the ends of lines and of the text;
`tokens`: but for white space; `numbers`: tokens, those that are numbers within a tolerance.
"""


def printed(data: bytes) -> str | None:
    """Output as text; None where it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def alike(
    expected: str, found: str, way: str, *, absolute: float = 0.0, relative: float = 0.0
) -> bool:
    r"""Whether output is what was expected, in one of the `WAYS`.

    >>> alike("1 2\n", "1 2 \n\n", "lines"), alike("a b", "a\nb", "tokens")
    (True, True)
    >>> alike("0.5 x", "0.5000001 x", "numbers", absolute=1e-6), alike("1", "nan", "numbers")
    (True, False)
    """
    if way == "exact":
        return expected == found
    if way == "lines":
        return _lines(expected) == _lines(found)
    wanted, given = expected.split(), found.split()
    if way == "tokens":
        return wanted == given
    return len(wanted) == len(given) and all(
        _near(one, other, absolute, relative) for one, other in zip(wanted, given)  # noqa: B905
    )  # fmt: skip


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _near(expected: str, found: str, absolute: float, relative: float) -> bool:
    if expected == found:
        return True
    try:
        wanted, given = float(expected), float(found)
    except ValueError:
        return False
    return near(wanted, given, max(absolute, relative * abs(wanted)))


def near(expected: float, found: float, bound: float) -> bool:
    """Whether two numbers are equal, or both finite and at most so far apart.

    >>> near(1.0, 1.5, 0.5), near(float("inf"), 7.0, float("inf")), near(0.0, float("nan"), 1.0)
    (True, False, False)
    """
    return expected == found or (
        math.isfinite(expected) and math.isfinite(found) and abs(expected - found) <= bound
    )
