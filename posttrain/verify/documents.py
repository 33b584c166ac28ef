"""Documents as JSON values, read strictly: JSON, TOML, YAML, CSV, INI.

It opens no file and compares nothing. The one thing that must stay true: a text that its format
does not allow, or that says something twice, is no document; a reader that guessed would pay for
what the next program refuses to read.
"""

from __future__ import annotations

import configparser
import csv
import io
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

import yaml

from posttrain.core.errors import UsageError, nearest
from posttrain.core.task import Json

MAX_DEPTH = 100
"""Lists and objects within one another; RFC 8259, section 9, allows such a limit."""
ENDINGS: Mapping[str, str] = {
    "json": "json", "toml": "toml", "yaml": "yaml", "yml": "yaml", "csv": "csv", "tsv": "tsv",
    "ini": "ini", "cfg": "ini",
}  # fmt: skip
"""Format by the ending of a file's name."""
_FENCE = re.compile(r"```([A-Za-z0-9_+-]*)")


class Unreadable(ValueError):
    """A text is no document; the message says why."""


def read(text: str, how: str, *, header: bool = False) -> Json:
    r"""The value of a document. With `header`, CSV is a list of objects by the names of its first
    row. All that stands in CSV and INI is text; dates are ISO text, NaN and infinities are text.

    >>> read("a = 1.5\nb = 2020-01-02", "toml"), read("x,y\n1,2\n", "csv", header=True)
    ({'a': 1.5, 'b': '2020-01-02'}, [{'x': '1', 'y': '2'}])

    Raises:
        Unreadable: it is none.
        UsageError: an unknown format.
    """
    readers: Mapping[str, Callable[[str], Json]] = {
        "json": json_value,
        "toml": _toml,
        "yaml": _yaml,
        "csv": lambda text: _rows(text, ",", header=header),
        "tsv": lambda text: _rows(text, "\t", header=header),
        "ini": _ini,
    }
    if how not in readers:
        raise UsageError(
            f"no format {how!r}{nearest(how, readers)}.", f"name one of {', '.join(readers)}"
        )
    if text.startswith("\ufeff"):
        raise Unreadable("it begins with a byte order mark")
    return readers[how](text)


def format_of(path: str) -> str:
    """The format by a file's name.

    Raises:
        UsageError: its ending says none.
    """
    ending = path.rpartition(".")[2].lower()
    if ending not in ENDINGS:
        raise UsageError(f"the name {path!r} tells no format.", f"add 'format': {set(ENDINGS)}")
    return ENDINGS[ending]


def block(text: str, *languages: str) -> str:
    r"""The content of the only fenced block, which names one of the languages or none.

    >>> block("So:\n```json\n1\n```\nDone.", "json")
    '1\n'

    Raises:
        Unreadable: there is none, or several.
    """
    found: list[str] = []
    inside: list[str] | None = None
    counts = False
    for line in text.splitlines(keepends=True):
        if inside is None and (opening := _FENCE.fullmatch(line.rstrip())):
            inside, counts = [], opening[1].lower() in ("", *languages)
        elif inside is not None and line.rstrip() == "```":
            found += ["".join(inside)] if counts else []
            inside = None
        elif inside is not None:
            inside.append(line)
    if len(found) != 1:
        raise Unreadable(f"{len(found)} fenced blocks, wanted one")
    return found[0]


# --- JSON -----------------------------------------------------------------------------------------


def json_value(text: str) -> Json:
    """The one JSON value that a text is (RFC 8259), without what the RFC warns of: a name twice in
    an object, NaN and infinities, numbers beyond a double's range, more than `MAX_DEPTH` levels.

    >>> json_value(' {"a": [1, 1.0]} ')
    {'a': [1, 1.0]}

    Raises:
        Unreadable: it is none.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError:
        raise Unreadable(f"no JSON: more than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise Unreadable(f"no JSON: {error}") from None
    return _shallow(value)


def _once(pairs: Sequence[tuple[str, Json]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice!r:.80} stands twice in an object")
    return found


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is beyond the range of numbers")
    return value


def _shallow(value: Json) -> Json:
    """The value, if it has at most `MAX_DEPTH` levels."""
    level, depth = _nested([value]), 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} levels")
        level = _nested([inner for one in level for inner in _inside(one)])
    return value


def _nested(values: Sequence[Json]) -> list[Json]:
    return [value for value in values if isinstance(value, (list, Mapping))]


def _inside(value: Json) -> Sequence[Json]:
    return list(value.values()) if isinstance(value, Mapping) else value  # type: ignore[no-any-return]


# --- the others -----------------------------------------------------------------------------------


def _toml(text: str) -> Json:
    try:
        return _shallow(_plain(tomllib.loads(text)))
    except RecursionError:
        raise Unreadable(f"no TOML: more than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise Unreadable(f"no TOML: {error}") from None


def _yaml(text: str) -> Json:
    """YAML 1.1, as PyYAML's safe loader reads it: `no` is false, `010` is 8. Aliases are refused: a
    few of them name more than any memory holds.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        _named_once(node, set(), loader.construct_object)
        return None if node is None else _shallow(_plain(loader.construct_document(node)))
    except RecursionError:
        raise Unreadable(f"no YAML: more than {MAX_DEPTH} levels") from None
    except (yaml.YAMLError, *_ODD) as error:
        told = str(error).partition("\n")[0]
        raise Unreadable(told if isinstance(error, Unreadable) else f"no YAML: {told}") from None
    finally:
        loader.dispose()


_MERGE = "tag:yaml.org,2002:merge"
_ODD = (ValueError, OverflowError, TypeError, AttributeError, LookupError)
"""What PyYAML raises at values that are not what their tag says."""


def _named_once(node: Any, seen: set[int], value_of: Callable[[Any], Any]) -> None:
    """Refuses a node that stands in two places, and a name that stands twice in a mapping, however
    it is written (`1` and `0x1`).
    """
    if id(node) in seen:
        raise Unreadable("no YAML that is read here: it has an alias")
    seen.add(id(node))
    inner = node.value if node is not None and not isinstance(node.value, str) else ()
    pairs = [one for one in inner if isinstance(one, tuple)]
    keys = [key for key, _ in pairs if isinstance(key.value, str)]
    if any(key.tag == _MERGE for key in keys):
        raise Unreadable("no YAML that is read here: it merges a mapping into another")
    if len(set(map(value_of, keys))) != len(keys):
        raise Unreadable("no YAML: a name stands twice in a mapping")
    for one in (one for item in inner for one in (item if isinstance(item, tuple) else (item,))):
        _named_once(one, seen, value_of)


def _rows(text: str, delimiter: str, *, header: bool) -> Json:
    """Every row as a list of texts; empty lines are none."""
    try:
        found = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise Unreadable(f"no CSV: {error}") from None
    rows = [row for row in found if row]
    if not header:
        return rows
    if not rows or len(set(rows[0])) != len(rows[0]):
        raise Unreadable("no CSV with a header: no first row of different names")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(rows[0]):
            raise Unreadable(f"no CSV with a header: row {number} has {len(row)} cells")
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


_NOWHERE = "\n"
"""A section that no text can name."""


def _ini(text: str) -> Json:
    parser = configparser.ConfigParser(interpolation=None, default_section=_NOWHERE)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text)
    except (configparser.Error, ValueError) as error:
        told = str(error).partition("\n")[0]
        raise Unreadable(f"no INI: {told}") from None
    return {name: dict(parser[name]) for name in parser.sections()}


def _plain(value: Any) -> Json:
    """A value without what JSON does not have: dates, NaN, bytes, names that are no text."""
    if isinstance(value, dict):
        named = {key if isinstance(key, str) else json.dumps(_plain(key)): value[key]
                 for key in value}  # fmt: skip
        if len(named) != len(value):
            raise Unreadable("a name stands twice, once as text and once as something else")
        return {name: _plain(item) for name, item in named.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, (date, datetime, time)):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise Unreadable(f"a {type(value).__name__} is no value that is compared")
