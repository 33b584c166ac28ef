"""The plan of the house, enforced: floors, purity, size, words (DESIGN section 3, STYLE).

Every import counts, lazy and type-only ones included. A failure names the file and the rule.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "posttrain"

FLOORS = {
    "core": 0,
    "engine": 1, "sandbox": 1, "schedule": 1, "observe": 1,
    "domains": 2, "verify": 2, "rollout": 2, "train": 2,
    "evals": 3, "gateway": 3, "cluster": 3,
    "loop": 4, "dashboard": 4,
    "plan": 5,
    "cli": 6,
}  # fmt: skip

PURE = {
    "core": "task trajectory verdict events ports containment errors config seeds clock codec keys "
    "toml",
    "engine": "request blocks radix batcher speculate",
    "sandbox": "spec pool moves egress",
    "schedule": "lanes staleness budget affinity stragglers device account",
    "observe": "statistics cost",
    "domains": "domain catalogue mixture epochs",
    "verify": "layers guards drift signals monitor answers arithmetic segments structure",
    "rollout": "attempt render wire tools",
    "train": "advantages pack",
    "evals": "kills metrics mutants gate summary plots review selection rates",
    "gateway": "router quota",
    "loop": "state moves shelf health settings",
    "plan": "workload hardware simulate memory",
}
"""Files marked ◇; those that do not exist yet are checked once they do."""

DECLARES_ASYNC = {"core/containment.py", "core/ports.py", "core/clock.py"}
"""Protocols with `async def`, and the clock that sleeps for everybody else."""

READS_FILES = {"core/config.py"}
"""Reads the configuration files a person named, at start-up only."""

DOING = {
    "asyncio", "concurrent", "ctypes", "fcntl", "http", "importlib", "io", "mmap",
    "multiprocessing", "os", "requests", "select", "selectors", "shutil", "signal", "socket",
    "socketserver", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "urllib",
    "numpy", "torch", "transformers", "safetensors", "tokenizers", "ray", "starlette", "uvicorn",
}  # fmt: skip
"""Modules that do something, or are heavy; a pure file imports none of them."""

FILE_CALLS = {"open", "read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink"}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "shared", "base"}
MAY_PRINT = {"cli"}

FILES = sorted(PACKAGE.rglob("*.py"))
PROGRAM = [*FILES, *sorted((ROOT / "bench").glob("*.py"))]
PURE_FILES = [
    path
    for part, names in PURE.items()
    for name in names.split()
    if (path := PACKAGE / part / f"{name}.py").exists()
]


def short(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def part_of(path: Path) -> str:
    """The part a file belongs to; '' for the package's own `__init__`."""
    inner = path.relative_to(PACKAGE).parts
    return inner[0] if len(inner) > 1 else ""


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module a file imports, with its line; relative ones resolved."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
                base = ".".join([*package, base]).rstrip(".")
            yield base, node.lineno
            if base == "posttrain":
                yield from ((f"posttrain.{name.name}", node.lineno) for name in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            yield str(node.args[0].value), node.lineno  # type: ignore[attr-defined]


def _is_import_call(node: ast.Call) -> bool:
    """`importlib.import_module("…")` and `__import__("…")` with a fixed name."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    fixed = bool(node.args) and isinstance(node.args[0], ast.Constant)
    return name in ("import_module", "__import__") and fixed


@pytest.mark.parametrize("path", FILES, ids=short)
def test_imports_run_downward_and_never_sideways(path: Path) -> None:
    part = part_of(path)
    if not part:
        return
    assert part in FLOORS, f"{part} stands on no floor"
    for module, line in imports_of(path):
        names = module.split(".")
        if names[0] != "posttrain" or len(names) == 1 or names[1] not in FLOORS:
            continue
        other = names[1]
        allowed = other == part or FLOORS[other] < FLOORS[part]
        assert allowed, f"{short(path)}:{line} imports {module}: {part} may not import {other}"


@pytest.mark.parametrize("path", FILES, ids=short)
def test_every_import_of_ours_names_a_module_that_exists(path: Path) -> None:
    """Lazy imports would otherwise fail only when their line is reached."""
    for module, line in imports_of(path):
        if module.split(".")[0] == "posttrain":
            target = ROOT.joinpath(*module.split("."))
            exists = target.with_suffix(".py").exists() or target.is_dir() or len(
                module.split(".")) <= 1  # fmt: skip
            assert exists, f"{short(path)}:{line} imports {module}, which does not exist"


@pytest.mark.parametrize("path", FILES, ids=short)
def test_core_imports_the_standard_library_and_pydantic_only(path: Path) -> None:
    if part_of(path) != "core":
        return
    for module, line in imports_of(path):
        top = module.split(".")[0]
        allowed = top in sys.stdlib_module_names or module.startswith("posttrain.core")
        pydantic = path.name in ("config.py", "keys.py") and top in ("pydantic", "pydantic_core")
        assert allowed or pydantic, f"{short(path)}:{line} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=short)
def test_only_one_file_knows_ray(path: Path) -> None:
    tops = {module.split(".")[0] for module, _ in imports_of(path)}
    assert "ray" not in tops or short(path) == "cluster/ray.py"


@pytest.mark.parametrize("path", PURE_FILES, ids=short)
def test_a_pure_file_neither_waits_nor_touches_the_outside(path: Path) -> None:
    name = short(path)
    for module, line in imports_of(path):
        top = module.split(".")[0]
        clock = name == "core/clock.py" and top == "asyncio"
        assert clock or top not in DOING, f"{name}:{line} imports {module}"
    for node in ast.walk(tree_of(path)):
        waits = isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
        if waits:
            assert name in DECLARES_ASYNC, f"{name}:{node.lineno} is asynchronous"
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            reads = called in FILE_CALLS
            assert not reads or name in READS_FILES, f"{name}:{node.lineno} calls {called}"


@pytest.mark.parametrize("path", PURE_FILES, ids=short)
def test_a_pure_file_takes_time_and_chance_from_outside(path: Path) -> None:
    if short(path) == "core/clock.py":
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = getattr(node.func.value, "id", "")
            called = f"{owner}.{node.func.attr}"
            wrong = owner == "time" or (owner == "random" and node.func.attr != "Random")
            assert not wrong, f"{short(path)}:{node.lineno} calls {called}"


@pytest.mark.parametrize("path", PROGRAM, ids=short)
def test_files_and_functions_stay_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{short(path)} has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            where = f"{short(path)}:{node.lineno} {node.name}"
            assert length <= MAX_FUNCTION_LINES, f"{where} has {length} lines"


def public_without_docstring(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") or _needs_none(node):
            continue
        if ast.get_docstring(node) is None:
            yield f"{prefix}{node.name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef):
            yield from public_without_docstring(node.body, f"{node.name}.")


def _needs_none(node: ast.stmt) -> bool:
    """Setters and overloads speak through what they belong to."""
    marks = getattr(node, "decorator_list", [])
    return any(getattr(m, "attr", getattr(m, "id", "")) in ("overload", "setter") for m in marks)


@pytest.mark.parametrize("path", FILES, ids=short)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), f"{short(path)} does not say what it is"
    missing = list(public_without_docstring(tree.body))
    assert not missing, f"{short(path)}: no docstring at {', '.join(missing)}"


@pytest.mark.parametrize("path", PROGRAM, ids=short)
def test_no_exception_is_caught_blindly_or_swallowed(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            where = f"{short(path)}:{node.lineno}"
            assert node.type is not None, f"{where}: bare except"
            broad = getattr(node.type, "id", "") in ("Exception", "BaseException")
            silent = all(isinstance(inner, ast.Pass) for inner in node.body)
            assert not (broad and silent), f"{where}: swallows everything"


@pytest.mark.parametrize("path", FILES, ids=short)
def test_only_the_command_line_prints(path: Path) -> None:
    if part_of(path) in MAY_PRINT:
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            raise AssertionError(f"{short(path)}:{node.lineno} prints")


@pytest.mark.parametrize("path", FILES, ids=short)
def test_files_and_folders_are_nouns_of_the_domain(path: Path) -> None:
    for name in path.relative_to(PACKAGE).with_suffix("").parts:
        assert name.lower() not in BANNED_NAMES, f"{short(path)}: '{name}' says nothing"


def test_no_pure_file_is_forgotten() -> None:
    """The list above names real files; a renamed one must not fall out of it unseen."""
    core = {path.stem for path in PACKAGE.joinpath("core").glob("*.py")} - {"__init__"}
    assert core == set(PURE["core"].split())
