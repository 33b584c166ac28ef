"""The version of a verifier's code: a hash of its source, taken without anybody's doing.

It covers the module of a kind and those of the same package that this one uses, the ones that are
copied into sandboxes included; not what other packages bring, nor a check's parameters. The one
thing that must stay true: code that judges otherwise has another fingerprint.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_CALLED = re.compile(r"\w+(\.\w+)+:\w+")


@functools.cache
def fingerprint(module: str) -> str:
    """8 hexadecimal digits for an imported module, by its name; '' where it has no source."""
    found = sources(module)
    text = "\0".join(f"{name}\0{found[name]}" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()[:8] if found else ""


def sources(module: str) -> dict[str, str]:
    """Text of a module and of those of its package that it imports, by name; {} without source."""
    package = module.rpartition(".")[0] or module
    found: dict[str, str] = {}
    todo = [module] if module and _text(module) else []
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = _text(name)
            todo += [one for one in _imported(found[name], package) if one.startswith(package)]
    return found


def _text(module: str) -> str:
    """Source of a module, imported here or in workers only; '' where it has none."""
    try:
        if module not in sys.modules:
            spec = importlib.util.find_spec(module)
            return Path(spec.origin).read_text("utf-8") if spec and spec.origin else ""
        return inspect.getsource(sys.modules[module])
    except (ImportError, KeyError, OSError, TypeError, ValueError):
        return ""


def _imported(source: str, package: str) -> Iterator[str]:
    """Names of imported modules, and of those whose functions (`module:name`) workers call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            told = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(told, package)
            names = (f"{base}.{one.name}" for one in node.names)
            yield from (name for name in (base, *names) if name in sys.modules)
        elif isinstance(node, ast.Constant) and _CALLED.fullmatch(str(node.value)):
            yield str(node.value).partition(":")[0]
