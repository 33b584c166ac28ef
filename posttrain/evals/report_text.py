"""Shares, times, p-values and names as people read them, in the report and in the terminal.

It decides nothing and rounds for the eye only. The one thing that must stay true: a name is escaped
before anything is put into it.
"""

from __future__ import annotations

import re

from markupsafe import Markup


def breakable(name: str) -> Markup:
    """A name that may go on in the next line after a dot or an underscore; escaped.

    >>> breakable("easy.<b>_sum")
    Markup('easy.<wbr>&lt;b&gt;_<wbr>sum')
    """
    return Markup("<wbr>").join(re.split(r"(?<=[._])", name))


def percent(share: float) -> str:
    """A share in percent, for people.

    >>> percent(0.4766)
    '47.7 %'
    """
    return f"{100 * share:.1f} %"


def change(share: float) -> str:
    """A difference of two shares in percentage points, for people.

    >>> change(0.3281), change(-0.0312)
    ('+32.8', '−3.1')
    """
    return f"{100 * share:+.1f}".replace("-", "−")


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(5), duration(125), duration(7260)
    ('5.0 s', '2 min 05 s', '2 h 01 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def p_text(p: float | None) -> str:
    """A p-value for people.

    >>> p_text(0.0312), p_text(4e-9), p_text(None)
    ('0.031', '4e-09', '–')
    """
    if p is None:
        return "–"
    return f"{p:.2g}" if p >= 0.001 else f"{p:.0e}"
