"""Strict configuration: frozen models, sources with origins, errors that name the nearest key.

A part's configuration class derives from `Settings` and stands beside the part. It does no I/O and
imports no engine; `load` reads the files a person named and nothing else. The one thing that must
stay true: an unknown, misplaced, duplicated or ill-typed key stops the program (exit 2) before any
work, and the error names *all* such keys at once.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from posttrain.core import keys, toml
from posttrain.core.errors import ConfigError
from posttrain.core.toml import KeyPath


class Settings(BaseModel):
    """Base of every configuration class: frozen, unknown keys refused, no silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


T = TypeVar("T", bound=Settings)

ENVIRONMENT_PREFIX = "POSTTRAIN_"
"""`POSTTRAIN_TRAIN__STEPS=3` sets `train.steps`; a name without `__` is not a setting, and is
refused where it looks like one (`POSTTRAIN_TRAIN_STEPS`)."""
_LOOKS_LIKE = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value came from."""

    source: str
    """`default`, `preset demo`, a file name, `environment variable …` or `--set`."""
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    @property
    def phrase(self) -> str:
        """For messages: `demo.toml line 12`."""
        return self.source if self.line is None else f"{self.source} line {self.line}"


DEFAULT = Origin(source="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[T]):
    """A validated configuration and the origin of every value in it."""

    value: T
    origins: Mapping[KeyPath, Origin]

    @property
    def tree(self) -> dict[str, Any]:
        """All values, defaults included, as plain JSON values."""
        return self.value.model_dump(mode="json")

    def origin(self, *path: str | int) -> Origin:
        """Origin of the value at a path; for something inside a list, that of the list."""
        return _nearest_origin(self.origins, path)

    def dump(self) -> str:
        """The configuration as TOML, the origin of every value as a comment. Loading the text
        again gives an equal configuration.
        """
        comments = {path: str(self.origin(*path)) for path, _ in toml.leaves(self.tree)}
        return toml.write(self.tree, comments=comments)


def load(
    model: type[T],
    *,
    preset: Path | None = None,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Resolved[T]:
    """The configuration from default < preset < file < environment < overrides (`a.b=value`).

    Values of the environment and of overrides are read as TOML where they are TOML (`1e-5`,
    `true`, `["a", "b"]`) and as text otherwise.

    Raises:
        ConfigError: names every bad key with its place and the nearest right name.
    """
    problems: list[str] = []
    layers = []
    if preset is not None:
        layers.append(_file_layer(preset, f"preset {preset.stem}", problems))
    if file is not None:
        layers.append(_file_layer(file, str(file), problems))
    layers.append(_environment_layer(environment or {}, model, problems))
    layers.append(_override_layer(overrides, problems))
    merged = _Layer()
    for layer in layers:
        merged.cover(layer)
    value = _validate(model, merged, problems)
    if problems or value is None:
        raise ConfigError(_paragraph(problems), "posttrain config schema lists every setting.")
    return Resolved(value=value, origins=merged.named())


def _paragraph(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{problems[0]}."
    return f"{len(problems)} settings do not fit:\n" + "\n".join(f"  - {p}" for p in problems)


# --- layers -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Layer:
    """Values of one source, or of several merged."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    texts: dict[KeyPath, str] = field(default_factory=dict)
    """What was typed, for values that came as text."""

    def cover(self, upper: _Layer) -> None:
        """Lay `upper` over this: sections merge key by key, every other value is replaced."""
        for path, value in toml.leaves(upper.tree):
            for known in [known for known in self.origins if known[: len(path)] == path]:
                del self.origins[known]
            self.texts.pop(path, None)
            _put(self.tree, path, value)
        self.origins.update(upper.origins)
        self.texts.update(upper.texts)

    def named(self) -> dict[KeyPath, Origin]:
        """Origins of values. A section's own line is none: a key it does not hold is a default."""
        return {p: o for p, o in self.origins.items() if not isinstance(_at(self.tree, p), dict)}


def _at(tree: Any, path: KeyPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        inner = tree.get(str(key))
        if not isinstance(inner, dict):
            inner = tree[str(key)] = {}
        tree = inner
    tree[str(path[-1])] = value


def _file_layer(path: Path, source: str, problems: list[str]) -> _Layer:
    try:
        document = toml.read(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}.", "check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", "give a readable file.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}.", "correct that line.") from error
    for twice in document.duplicates:
        problems.append(
            f"duplicate key '{toml.dotted(twice.path)}' in {source} line {twice.line}; "
            f"it is already set in line {twice.first_line}"
        )
    origins = {key: Origin(source=source, line=line) for key, line in document.lines.items()}
    return _Layer(document.tree, origins)


def _environment_layer(
    environment: Mapping[str, str], model: type[Settings], problems: list[str]
) -> _Layer:
    layer = _Layer()
    paths = [[part.upper() for part in key.path] for key in keys.known(model) if not key.section]
    right = {"_".join(path): ENVIRONMENT_PREFIX + "__".join(path) for path in paths}
    for name in sorted(environment):
        inner = name.removeprefix(ENVIRONMENT_PREFIX)
        if inner != name and "__" in inner:
            path = tuple(inner.lower().split("__"))
            _typed(layer, path, environment[name], f"environment variable {name}")
        elif inner != name:
            for near in difflib.get_close_matches(inner, right, n=1, cutoff=_LOOKS_LIKE):
                problems.append(
                    f"environment variable {name} is no setting (did you mean '{right[near]}'?)"
                )
    return layer


def _override_layer(overrides: Sequence[str], problems: list[str]) -> _Layer:
    layer = _Layer()
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            ((path, _),) = toml.leaves(tomllib.loads(f"{key.strip()} = 0"))
        except (tomllib.TOMLDecodeError, ValueError) as error:
            raise ConfigError(f"--set wants section.key=value, got '{override}'.") from error
        if not equals:
            raise ConfigError(f"--set wants section.key=value, got '{override}' without a value.")
        if path in layer.origins:
            problems.append(f"duplicate key '{toml.dotted(path)}' in --set")
        _typed(layer, path, text.strip(), "--set")
    return layer


def _typed(layer: _Layer, path: KeyPath, text: str, source: str) -> None:
    """Enter a value that a person typed as text."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    _put(layer.tree, path, value)
    layer.origins[path] = Origin(source=source)
    layer.texts[path] = text


# --- validation -------------------------------------------------------------------------------


def _validate(model: type[T], merged: _Layer, problems: list[str]) -> T | None:
    """The validated model, or None after adding what is wrong to `problems`.

    Values go through JSON, whose strict mode takes a list for a tuple and text for an enum and
    still refuses text for a number.
    """
    try:
        return _parse(model, merged.tree)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    if _take_typed_text(merged, errors):
        return _validate(model, merged, problems)
    seen: dict[KeyPath, None] = {}
    for detail in errors:
        path = _real_path(merged.tree, detail)
        for line in _explain(model, merged, path, detail) if path not in seen else ():
            problems.append(line)
        seen[path] = None
    return None


def _parse(model: type[T], tree: Mapping[str, Any]) -> T:
    return model.model_validate_json(json.dumps(tree, default=str))


def _take_typed_text(merged: _Layer, errors: Sequence[ErrorDetails]) -> bool:
    """Where text was wanted and `--set name=123` read as a number: go back to what was typed."""
    changed = False
    for detail in errors:
        path = _real_path(merged.tree, detail)
        text = merged.texts.pop(path, None) if detail["type"] == "string_type" else None
        if text is not None:
            _put(merged.tree, path, text)
            changed = True
    return changed


def _real_path(tree: Any, detail: ErrorDetails) -> KeyPath:
    """The error's location without the tags pydantic adds for members of a union."""
    path: KeyPath = ()
    location = detail["loc"]
    for index, key in enumerate(location):
        missing = detail["type"] == "missing" and index == len(location) - 1
        inside = isinstance(tree, dict) and key in tree
        inside = inside or (isinstance(tree, list) and isinstance(key, int) and key < len(tree))
        if inside:
            tree = tree[key]
        if inside or missing:
            path = (*path, key)
    return path


def _explain(
    model: type[Settings], merged: _Layer, path: KeyPath, detail: ErrorDetails
) -> Iterator[str]:
    """What is wrong with one value, in a person's words."""
    if detail["type"] == "extra_forbidden":
        for inner, _ in toml.leaves(detail["input"], path):
            place = _nearest_origin(merged.origins, inner).phrase
            hint = keys.hint(model, inner)
            yield f"unknown key '{toml.dotted(inner)}' in {place}{hint}"
        return
    name = f"'{toml.dotted(path)}'" if path else "the configuration"
    origin = _nearest_origin(merged.origins, path)
    place = "" if origin == DEFAULT else f" in {origin.phrase}"
    if detail["type"] == "missing":
        yield f"{name} has no default and is not set{place and f' ({place.strip()})'}"
        return
    message = detail["msg"].removeprefix("Input ").removeprefix("Value error, ").rstrip(".")
    given = detail["input"]
    shown = "" if isinstance(given, Mapping) else f", got {json.dumps(given, default=str):.80}"
    yield f"{name}{place}: {message}{shown}"


def _nearest_origin(origins: Mapping[KeyPath, Origin], path: KeyPath) -> Origin:
    for depth in range(len(path), 0, -1):
        if path[:depth] in origins:
            return origins[path[:depth]]
    return DEFAULT
