"""Tool calls that a reply writes: Python call syntax, parsed and never evaluated, or JSON.

It knows nothing of what was expected. The one thing that must stay true: a text is calls from end
to end, or it is none; nothing in it is looked up, called or computed.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Mapping, Sequence

from posttrain.core.task import Json
from posttrain.verify import documents
from posttrain.verify.documents import Unreadable

MAX_CHARS = 65_536
Call = tuple[str, Mapping[str, Json]]
"""Name of the function and its arguments."""


def read(text: str, parameters: Mapping[str, Sequence[str]]) -> list[Call]:
    """The calls of a text: `f(a=1)`, several of them in a list, on lines or with `;` between, or
    JSON, `{"name": "f", "arguments": {"a": 1}}` or a list of such. A positional argument is named
    by the function's parameters, in order; tuples are lists.

    >>> read("[f(1, b=[-2.5]), g.h()]", {"f": ["a", "b"]})
    [('f', {'a': 1, 'b': [-2.5]}), ('g.h', {})]

    Raises:
        Unreadable: it is something else, or something more.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable(f"more than {MAX_CHARS} characters")
    told = text.strip()
    if told.startswith(("{", "[")):
        try:
            return of_json(documents.read(told, "json", header=False))
        except Unreadable:
            if told.startswith("{"):
                raise
    return _python(told, parameters)


def of_json(value: Json) -> list[Call]:
    """Calls as JSON has them.

    Raises:
        Unreadable: no object with `name` and `arguments`, or no list of such.
    """
    found: list[Call] = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict) or set(one) != {"name", "arguments"}:
            raise Unreadable("a call is an object with 'name' and 'arguments' and nothing else")
        if not isinstance(one["name"], str) or not isinstance(one["arguments"], dict):
            raise Unreadable("a call's name is text, its arguments are an object")
        found.append((one["name"], one["arguments"]))
    return found


def _python(text: str, parameters: Mapping[str, Sequence[str]]) -> list[Call]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"no calls in Python or JSON: {type(error).__name__}") from None
    found: list[Call] = []
    for statement in statements:
        if not isinstance(statement, ast.Expr):
            raise Unreadable("something that is no call")
        value = statement.value
        several = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
        found += [_call(one, parameters) for one in several]
    return found


def _call(node: ast.expr, parameters: Mapping[str, Sequence[str]]) -> Call:
    if not isinstance(node, ast.Call):
        raise Unreadable("something that is no call")
    name, arguments = _name(node.func), dict[str, Json]()
    known = parameters.get(name, ())
    if len(node.args) > len(known):
        raise Unreadable(f"{name}: more positional arguments than parameters")
    pairs: list[tuple[str | None, ast.expr]] = list(zip(known, node.args, strict=False))
    pairs += [(keyword.arg, keyword.value) for keyword in node.keywords]
    for key, value in pairs:
        if key is None or key in arguments:
            raise Unreadable(f"{name}: arguments are unpacked or given twice")
        arguments[key] = _value(value)
    return name, arguments


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise Unreadable("a function without a name")


def _value(node: ast.expr) -> Json:
    try:
        return _json(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        raise Unreadable("an argument that is no plain value") from None


def _json(value: object) -> Json:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_json(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json(one) for key, one in value.items()}
    raise ValueError(value)
