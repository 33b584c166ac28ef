"""Plain data to JSON values and back, for every frozen dataclass of `core`.

Not a general serialiser: it knows dataclasses, enums, tuples, mappings, optionals and unions of
dataclasses (told apart by their field names). The one thing that must stay true:
`from_json(type(x), to_json(x)) == x`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar, Union, cast

T = TypeVar("T")

_PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types whose values are JSON values as they are (not their subclasses: enums are strings)."""


def to_json(value: Any) -> Any:
    """A value `json.dumps` accepts.

    >>> from posttrain.core.task import Message, Role
    >>> to_json(Message.of(Role.USER, "hi"))["parts"]
    [{'text': 'hi'}]
    """
    if type(value) in _PLAIN:
        return value
    names = _field_names(value.__class__)
    if names is not None:
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        plain = _PLAIN.issuperset(map(type, value))  # token rows are long
        return list(value) if plain else [to_json(item) for item in value]
    return value


def from_json(kind: type[T], value: Any) -> T:
    """The dataclass `kind` of a JSON value.

    Raises:
        TypeError: the value does not fit (unknown or missing field, wrong shape).
    """
    return cast("T", _read(kind, value))


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Names of a dataclass's fields; None for every other type."""
    return tuple(_hints(kind)) if dataclasses.is_dataclass(kind) else None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return {
        name: hint
        for name, hint in typing.get_type_hints(kind).items()
        if name in {field.name for field in dataclasses.fields(kind)}
    }


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is None or kind is type(None):
        return value
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value)
    if origin is tuple:
        if isinstance(value, str):  # it would become a tuple of letters
            raise TypeError(f"wanted a list, got str: {value!r:.80}")
        return tuple(_read(arguments[0], item) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return {key: _read(arguments[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(cast("type", kind), value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"wanted {kind.__name__}, got {type(value).__name__}: {value!r:.80}")
    return value


def _read_union(arguments: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in arguments:
        return None
    failures = []
    for kind in arguments:
        if kind is type(None):
            continue
        try:
            return _read(kind, value)
        except (TypeError, ValueError, AttributeError) as error:
            failures.append(str(error))
    raise TypeError("; ".join(failures))


def _read_dataclass(kind: type, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"wanted fields of {kind.__name__}, got {type(value).__name__}")
    hints = _hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise TypeError(f"unknown field {unknown[0]!r} of {kind.__name__}")
    return kind(**{name: _read(hints[name], item) for name, item in value.items()})
