"""The keys a configuration class knows, and the nearest one to a wrong key.

It reads classes only; values and their sources are `core.config`'s. The one thing that must stay
true: what a hint names exists.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from posttrain.core.toml import KeyPath, dotted

_ALIKE = 0.6
_SHOWN = 12
"""Most names of a section that one message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One setting: its path, its type as written, its default and its description."""

    path: tuple[str, ...]
    kind: str
    default: Any
    required: bool
    description: str
    section: bool
    """True where it holds other settings."""


def known(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every setting of a class, sections before what they hold."""
    for name, info in model.model_fields.items():
        inner = _models(info.annotation)
        yield Key(
            path=(*path, name),
            kind=_kind(info.annotation),
            default=None if info.is_required() else info.get_default(call_default_factory=True),
            required=info.is_required(),
            description=info.description or "",
            section=bool(inner),
        )
        for section in inner:
            yield from known(section, (*path, name))


def hint(model: type[BaseModel], path: KeyPath) -> str:
    """What a person who wrote `path` may have meant: a near name in the same section, the same
    name in another section, or the names the section has.

    >>> from pydantic import create_model
    >>> Train = create_model("Train", num_epochs=(int, 1))
    >>> Run = create_model("Run", train=(Train, Train()))
    >>> hint(Run, ("train", "num-epochs"))
    " (did you mean 'train.num_epochs'?)"
    >>> hint(Run, ("trane", "num_epochs"))
    " (did you mean 'train.num_epochs'?)"
    >>> hint(Run, ("num_epochs",))
    "; it belongs to section [train]: 'train.num_epochs'"
    """
    names = tuple(str(key) for key in path if not isinstance(key, int))
    settings = list(known(model))
    siblings = [key.path for key in settings if key.path[:-1] == names[:-1]]
    others = [key.path for key in settings if key.path[:-1] != names[:-1]]
    wanted = _plain(names[-1])
    for candidate in siblings:
        if _plain(candidate[-1]) == wanted:
            return f" (did you mean '{dotted(candidate)}'?)"
    same = [path for path in others if _plain(path[-1]) == wanted]
    if same:
        path = max(same, key=lambda path: _likeness(dotted(names[:-1]), dotted(path[:-1])))
        if not siblings and _likeness(dotted(names[:-1]), dotted(path[:-1])) >= _ALIKE:
            return f" (did you mean '{dotted(path)}'?)"
        place = dotted(path[:-1])
        where = f"section [{place}]" if place else "the top level"
        return f"; it belongs to {where}: '{dotted(path)}'"
    near = _closest(names, siblings, _ALIKE) or _closest(names, others, 0.75)
    if near:
        return f" (did you mean '{dotted(near)}'?)"
    return _listing(names[:-1], siblings or [key.path for key in settings if len(key.path) == 1])


def _closest(
    names: tuple[str, ...], candidates: list[tuple[str, ...]], cutoff: float
) -> tuple[str, ...] | None:
    """The candidate whose last name is nearest; among equals the one whose section is nearest."""
    scored = [
        (_likeness(names[-1], path[-1]), _likeness(dotted(names), dotted(path)), path)
        for path in candidates
    ]
    likeness, _, path = max(scored, default=(0.0, 0.0, ()))
    return path if likeness >= cutoff else None


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, _plain(one), _plain(other)).ratio()


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _listing(section: tuple[str, ...], candidates: list[tuple[str, ...]]) -> str:
    names = sorted({path[-1] for path in candidates})
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    known_here = bool(section) and all(path[:-1] == section for path in candidates)
    where = f"section [{dotted(section)}]" if known_here else "the top level"
    return f"; {where} knows: {shown}" if names else ""


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The configuration classes inside a type, through optionals, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in _models(inner)]


def _kind(annotation: Any) -> str:
    """A type as a person reads it."""
    if typing.get_origin(annotation) is None and isinstance(annotation, type):
        return annotation.__name__
    text = str(annotation).replace("typing.", "").replace("collections.abc.", "")
    return ".".join(text.rsplit(".", 1)[-1:]) if "[" not in text else text
