"""Seeds by hashing: every stream of chance is named, none is derived by addition.

Adding an index to a seed makes neighbouring streams overlap (measured on a public generator
library: 505 distinct questions in 5,000 draws). Hashing (root, name, index, …) does not. The one
thing that must stay true: the same names give the same seed on every machine and Python version.
"""

from __future__ import annotations

import hashlib
import random


def hashed(*parts: str | int) -> int:
    """A 63-bit non-negative seed from the given names and numbers.

    Parts are length-prefixed and typed, so ("ab", "c") and ("a", "bc") differ, and so do 1 and "1".

    >>> hashed(7, "gcd", 0) == hashed(7, "gcd", 0)
    True
    >>> hashed("ab", "c") == hashed("a", "bc")
    False
    """
    return int.from_bytes(_digest(parts)[:8], "big") >> 1


def hex_key(*parts: str | int) -> str:
    """A 24-digit hexadecimal identity from the given names and numbers (96 bits)."""
    return _digest(parts).hex()[:24]


def unit(*parts: str | int) -> float:
    """A number in [0, 1) from the given names and numbers; used to split data by hash."""
    return hashed(*parts) / 2.0**63


def stream(*parts: str | int) -> random.Random:
    """A `random.Random` seeded by `hashed`."""
    return random.Random(hashed(*parts))


def _digest(parts: tuple[str | int, ...]) -> bytes:
    state = hashlib.sha256()
    for part in parts:
        encoded = str(part).encode("utf-8")
        kind = b"i" if isinstance(part, int) else b"s"
        state.update(kind + len(encoded).to_bytes(4, "big") + encoded)
    return state.digest()
