"""Guards: cheap looks at a reply that come before any judgement of it.

Not verifiers: passing a guard earns nothing. Each takes the reply and gives 1.0 (let it through) or
0.0 with the reason; where a domain declares one as a gate, a 0.0 ends the verdict at reward 0. The
one thing that must stay true: a guard never refuses an honest short answer that happens to occur in
the prompt.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from posttrain.verify import segments

ECHO_SHARE = 0.8
"""A reply that holds this share of the objective, word for word and in one piece, is an echo."""
MIN_ECHO_WORDS = 4
"""Objectives shorter than this are echoed by coincidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What a guard decided; `reason` is '' where it lets the reply through."""

    reason: str = ""

    @property
    def value(self) -> float:
        """1.0: let through; 0.0: refused."""
        return 0.0 if self.reason else 1.0


def not_empty(reply: str) -> Passage:
    r"""Refuses a reply without a letter, digit or symbol (white space, invisible characters).

    >>> not_empty(" \u200b\n").value, not_empty("0").value
    (0.0, 1.0)
    """
    seen = segments.visible(reply)
    visible = any(unicodedata.category(character)[0] in "LNPSM" for character in seen)
    return Passage() if visible else Passage(reason="empty")


def not_echo(reply: str, objective: str) -> Passage:
    """Refuses a reply that holds (nearly) the whole objective; case and white space don't count.

    >>> not_echo("what is 2 + 2 times 3?  8", "What is 2 + 2 times 3?").reason
    'echo of the prompt'
    >>> not_echo("2", "What is 2 + 2 times 3?").value
    1.0
    """
    words, said = objective.casefold().split(), reply.casefold().split()
    if len(words) < MIN_ECHO_WORDS:
        return Passage()
    needed = max(MIN_ECHO_WORDS, round(ECHO_SHARE * len(words)))
    joined = f" {' '.join(said)} "
    for start in range(len(words) - needed + 1):
        if f" {' '.join(words[start : start + needed])} " in joined:
            return Passage(reason="echo of the prompt")
    return Passage()


def not_longer(reply: str, max_chars: int) -> Passage:
    """Refuses surplus text beyond a cap in characters."""
    if len(reply.strip()) <= max_chars:
        return Passage()
    return Passage(reason=f"{len(reply.strip())} characters, at most {max_chars} are allowed")


def printable(reply: str) -> Passage:
    r"""Refuses control, private-use and direction-changing characters (tab and newline may be).

    >>> printable("a\tb\n").value, printable("4\x1b[2K5").value, printable("4\u202e5").value
    (1.0, 0.0, 0.0)
    """
    for character in reply:
        unusual = unicodedata.category(character) in ("Cc", "Co", "Cs", "Cn")
        if (unusual and character not in "\t\n\r") or character in "\u202a\u202b\u202d\u202e\u2066":
            return Passage(reason=f"character U+{ord(character):04X}")
    return Passage()
