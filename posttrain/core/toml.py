"""TOML text with the line of every key, and values written back as TOML.

Parsing itself is `tomllib`'s; this adds where each key stands and reports *every* duplicate rather
than the first. Not a general writer: it writes what a configuration holds. The one thing that must
stay true: `read(write(tree)).tree == tree` for trees of plain values without None.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root, such as `("train", "steps")`."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """A key that was set twice."""

    path: KeyPath
    first_line: int
    line: int


@dataclass(slots=True, kw_only=True)
class Document:
    """What a TOML text says. With duplicates, the first value of each key is in the tree."""

    tree: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """Line, from 1, of every key and section."""
    duplicates: list[Duplicate] = field(default_factory=list)


def read(text: str) -> Document:
    r"""The document of a TOML text.

    Raises:
        tomllib.TOMLDecodeError: the text is no TOML (for another reason than duplicate keys).

    >>> read("[train]\nsteps = 3").lines[("train", "steps")]
    2
    """
    document = Document()
    headers: dict[KeyPath, int] = {}
    try:
        for statement in _statements(text):
            _enter(document, statement, headers)
    except tomllib.TOMLDecodeError:
        tomllib.loads(text)
        raise
    if not document.duplicates:
        document.tree = tomllib.loads(text)
    return document


@dataclass(frozen=True, slots=True)
class _Statement:
    path: KeyPath
    value: Any
    line: int
    header: bool
    """True for `[section]` and `[[list]]` lines, which hold no value."""


def _enter(document: Document, statement: _Statement, headers: dict[KeyPath, int]) -> None:
    """Put the statement's values and lines into the document, or note what it repeats."""
    path, line = statement.path, statement.line
    for depth in range(1, len(path)):
        document.lines.setdefault(path[:depth], line)
    if statement.header:
        if path in headers:
            duplicate = Duplicate(path=path, first_line=headers[path], line=line)
            document.duplicates.append(duplicate)
        headers.setdefault(path, line)
        document.lines.setdefault(path, line)
        return
    for leaf, value in leaves(statement.value, path):
        if leaf in document.lines:
            first = document.lines[leaf]
            document.duplicates.append(Duplicate(path=leaf, first_line=first, line=line))
        else:
            document.lines[leaf] = line
            _insert(document.tree, leaf, value)


def _insert(tree: Any, path: KeyPath, value: Any) -> None:
    for key, following in itertools.pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(key, int):
            if key == len(tree):
                tree.append(empty)
            tree = tree[key]
        else:
            tree = tree.setdefault(key, empty)
        if not isinstance(tree, dict | list):
            return
    tree[path[-1]] = value


def _statements(text: str) -> Iterator[_Statement]:
    """Every `key = value` and `[section]` of the text, with its first line."""
    lines = text.split("\n")
    section: KeyPath = ()
    counts: dict[KeyPath, int] = {}
    index = 0
    while index < len(lines):
        first, chunk = index, lines[index]
        stripped = chunk.strip()
        index += 1
        if not stripped or stripped.startswith("#"):
            continue
        while (tree := _complete(chunk)) is None:
            if index == len(lines):
                raise tomllib.TOMLDecodeError(f"unfinished statement at line {first + 1}")
            chunk, index = f"{chunk}\n{lines[index]}", index + 1
        if stripped.startswith("["):
            section = _section(tree, counts)
            yield _Statement(section, None, first + 1, True)
        else:
            path, value = _single(tree)
            yield _Statement(section + path, value, first + 1, False)


def _complete(chunk: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(chunk)
    except tomllib.TOMLDecodeError:
        return None


def _single(tree: Mapping[str, Any]) -> tuple[KeyPath, Any]:
    """The path and value of a tree that one statement made (`a.b = {…}` stops at the value)."""
    path: list[str | int] = []
    value: Any = tree
    while isinstance(value, dict) and len(value) == 1:
        key, value = next(iter(value.items()))
        path.append(key)
    return tuple(path), value


def _section(tree: Mapping[str, Any], counts: dict[KeyPath, int]) -> KeyPath:
    """The path a header opens; `counts` remembers how many items each `[[list]]` has so far."""
    names, repeated = _single(tree)
    path: KeyPath = ()
    for depth, name in enumerate(names):
        path = (*path, name)
        if depth == len(names) - 1 and isinstance(repeated, list):
            counts[path] = counts.get(path, 0) + 1
        if path in counts:
            path = (*path, counts[path] - 1)
    return path


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is no section, with its path; an empty section counts as a value.

    >>> list(leaves({"train": {"steps": 3}}))
    [(('train', 'steps'), 3)]
    """
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif path:
        yield path, value


def dotted(path: KeyPath) -> str:
    """A path as a person writes it.

    >>> dotted(("domains", 0, "na me"))
    'domains[0]."na me"'
    """
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key_text(key)}"
    return text.removeprefix(".")


def key_text(key: str) -> str:
    """A key, quoted where TOML needs it."""
    return key if _BARE.fullmatch(key) else _string(key)


def value_text(value: Any) -> str:
    """A value as TOML on one line.

    Raises:
        TypeError: TOML has no such value.

    >>> value_text({"rate": 1e-05, "names": ["a", "b"], "on": True})
    '{rate = 1e-05, names = ["a", "b"], on = true}'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        pairs = (f"{key_text(key)} = {value_text(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    raise TypeError(f"TOML has no value of the type {type(value).__name__}")


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def write(tree: Mapping[str, Any], *, comments: Mapping[KeyPath, str] | None = None) -> str:
    """TOML text of a tree: plain keys first, then sections; a None is written as a comment.

    >>> print(write({"train": {"steps": 3}}, comments={("train", "steps"): "default"}), end="")
    [train]
    steps = 3  # default
    """
    return "\n".join(_blocks(tree, (), comments or {}))


def _blocks(tree: Mapping[str, Any], path: KeyPath, comments: Mapping[KeyPath, str]) -> list[str]:
    plain = {key: item for key, item in tree.items() if not isinstance(item, Mapping)}
    blocks = []
    if plain or (path and not tree):
        head = f"[{dotted(path)}]\n" if path else ""
        body = "".join(_line((*path, key), item, comments) for key, item in plain.items())
        blocks.append(head + body)
    for key, item in tree.items():
        if isinstance(item, Mapping):
            blocks += _blocks(item, (*path, key), comments)
    return blocks


def _line(path: KeyPath, value: Any, comments: Mapping[KeyPath, str]) -> str:
    comment = f"  # {comments[path]}" if path in comments else ""
    name = key_text(str(path[-1]))
    if value is None:
        return f"# {name} is not set{comment}\n"
    return f"{name} = {value_text(value)}{comment}\n"
