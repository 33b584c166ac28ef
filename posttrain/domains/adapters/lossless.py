"""Python values as JSON without loss: tuples, sets, fractions, dates and keys that are no text.

For entries of foreign generators, whose scorers tell a tuple from a list; plain data of our own
goes through `core.codec`. The one thing that must stay true: `decode(encode(x)) == x`, types
included, for the values it takes (numbers and texts of NumPy become Python's).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from typing import Any

from posttrain.core.task import Json

_TAG = "~"
"""Key of a tagged value; a mapping that has it is itself tagged."""


def encode(value: Any) -> Json:
    """A JSON value.

    Raises:
        TypeError: a value of a kind it does not take.

    >>> encode({"a": (1, 2), 3: None})
    {'~': 'dict', 'v': [['a', {'~': 'tuple', 'v': [1, 2]}], [3, None]]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return encode(value.value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(item) for key, item in value.items()}
        return _tagged("dict", [[encode(key), encode(item)] for key, item in value.items()])
    if isinstance(value, tuple):
        return _tagged("tuple", [encode(item) for item in value])
    if isinstance(value, set | frozenset):
        return _tagged("set", [encode(item) for item in sorted(value, key=str)])
    return _scalar(value)


def _scalar(value: Any) -> Json:
    if isinstance(value, Fraction):
        return _tagged("fraction", str(value))
    for kind in (datetime.datetime, datetime.date, datetime.time):
        if isinstance(value, kind):
            return _tagged(kind.__name__, value.isoformat())
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if hasattr(value, "tolist"):
        return encode(value.tolist())
    raise TypeError(f"wanted plain data, got {type(value).__name__}: {value!r:.80}")


def _tagged(kind: str, value: Json) -> Json:
    return {_TAG: kind, "v": value}


def decode(value: Json) -> Any:
    """The Python value.

    >>> decode(encode({"a": (1, 2), 3: {4}}))
    {'a': (1, 2), 3: {4}}
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if _TAG not in value:
        return {key: decode(item) for key, item in value.items()}
    return _DECODERS[value[_TAG]](value["v"])


_DECODERS: Mapping[str, Any] = {
    "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "tuple": lambda items: tuple(decode(item) for item in items),
    "set": lambda items: {decode(item) for item in items},
    "fraction": Fraction,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}
