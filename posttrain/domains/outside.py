"""Domains from outside: other installed packages, and people's own files.

A file is `path.py:NAME`, or a task set in TOML or JSON; a package announces its domains in the
entry-point group `posttrain.domains`. Loading runs code of others, so it happens in a killable
worker; only `is_path` and `announced` are for everybody. The one thing that must stay true: an
error names the file, what was wanted in it, and what came.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from posttrain.core.errors import UsageError
from posttrain.core.ports import Domain
from posttrain.domains import taskset

GROUP = "posttrain.domains"
"""Entry-point group: name → a domain, or a callable that makes one."""
_WANTED = ("name", "levels", "task", "oracle")
_MODULES = "posttrain_domain_"
"""Start of the names under which people's files are imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A domain that an installed package announces."""

    name: str
    package: str


def announced() -> tuple[Announced, ...]:
    """Every domain of other packages; their code is not loaded."""
    return tuple(
        Announced(name=point.name, package=point.dist.name if point.dist else point.module)
        for point in importlib.metadata.entry_points(group=GROUP)
    )


def load_announced(name: str) -> Domain:
    """The domain that a package announces under a name.

    Raises:
        UsageError: what it announces is no domain.
    """
    (point, *_) = importlib.metadata.entry_points(group=GROUP, name=name)
    return made(point.load())


def is_path(name: str) -> bool:
    """Whether a domain name is a path: `file.py:NAME`, `tasks.toml`, `tasks.json`; `file.py` is
    one too, to be told which names it has.

    >>> is_path("examples/my_domain.py:AREA"), is_path("easy.gcd")
    (True, False)
    """
    return ".py:" in name or name.endswith((".py", ".toml", ".json"))


def load(name: str) -> Domain:
    """The domain at a path.

    Raises:
        UsageError: no such file, no name or no such name in it (tells the names of its domains),
            or not a domain.
    """
    file, _, attribute = name.partition(".py:")
    path = Path(f"{file}.py") if attribute else Path(name)
    if not path.is_file():
        raise UsageError(f"no file {str(path)!r} for the domain {name!r}.")
    if path.suffix != ".py":
        return _task_set(path)
    module = _module(path)
    if attribute and hasattr(module, attribute):
        return made(getattr(module, attribute))
    lacking = f"{path} has no {attribute!r}" if attribute else f"{path} wants a name, {path}:NAME"
    names = _domains(module)
    if not names:
        raise UsageError(f"{lacking}; it holds no object with {', '.join(_WANTED)}.")
    raise UsageError(f"{lacking}; its domains: {', '.join(names)}.", f"name it {path}:{names[0]}")


def _domains(module: ModuleType) -> list[str]:
    """Names of the domains in a file: objects, or, where it has none, classes that make them."""
    held = {
        name: value
        for name, value in vars(module).items()
        if all(hasattr(value, part) for part in _WANTED)
    }
    return [name for name, value in held.items() if not isinstance(value, type)] or list(held)


def place(error: BaseException) -> str:
    """` (file.py:43)`: the innermost line of a person's own file that an error passed; '' where it
    passed none.
    """
    frames = traceback.walk_tb(error.__traceback__)
    own = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in frames
        if str(frame.f_globals.get("__name__")).startswith(_MODULES)
    ]
    return own[-1] if own else ""


def made(value: Any) -> Domain:
    """The domain that a value is, or that it makes when called.

    Raises:
        UsageError: it lacks a part of the Domain protocol.
    """
    if isinstance(value, type) or (callable(value) and not hasattr(value, "task")):
        value = value()
    lacking = [part for part in _WANTED if not hasattr(value, part)]
    if lacking:
        raise UsageError(
            f"wanted a domain with {', '.join(_WANTED)}; {value!r:.80} lacks {lacking}."
        )
    return cast("Domain", value)


def _module(path: Path) -> ModuleType:
    resolved = str(path.resolve())
    name = f"{_MODULES}{hashlib.sha256(resolved.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _task_set(path: Path) -> Domain:
    text = path.read_text(encoding="utf-8")
    try:
        tree = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is no {path.suffix[1:].upper()}: {error}") from error
    return taskset.read(tree, where=str(path))
