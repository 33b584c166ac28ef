"""Kinds of checks that execute what a policy wrote: `stdio`, `suite`, `differential`.

The half on this side: what is the candidate, are the parameters fit, what is the record worth. The
other half (`streams`, `suites`, `differences`) runs in a fresh sandbox. The one thing that must
stay true: nothing that a candidate is judged by (expected output, tests, reference, seed) comes
into a process that runs it, but for a suite that says `direct` and is paid less for it.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from posttrain.core.errors import UsageError, VerifierError, nearest
from posttrain.core.task import Check, Json
from posttrain.verify import calls, comparison, differences, streams, suites
from posttrain.verify.execution import Work, carry_out, finding
from posttrain.verify.kinds import Subject, Tools, allowed, seconds_of, text_of
from posttrain.verify.layers import Finding

MAX_WALL_S = 50.0
"""Of one verdict; what is longer is tried once more with twice that, within a check's time."""
MAX_WEAK = 0.5
"""The most that a direct suite alone can be paid."""
CASE_CPU_S = 2.0
MAX_COUNT = 1_000
_WALL_FACTOR = 4
_OF_ALL = ("path", "timeout_s", "memory_bytes", "pays")
_OPENING = re.compile(r"```(?:python3?|py)[ \t]*", re.I)
_PYTEST = {"raises", "approx", "fail", "mark", "parametrize"}


async def stdio(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Whether a program prints the right thing for each input.

    Params: `cases` (a list of [input, expected]), `compare` (`comparison.WAYS`; default lines) with
    `absolute` and `relative` for numbers, or `checker` (Python that defines `accepts(given, found,
    expected)`, for cases with many right outputs); `path` (a declared file; without, the program is
    the Python block of the reply), `argv` (how to start it, `{program}` standing for its path;
    without, it is Python); `timeout_s` of CPU time a case, `memory_bytes`, `max_output_bytes`,
    `pays` (all, or the share of cases).
    """
    allowed(check, *_OF_ALL, "cases", "compare", "absolute", "relative", "checker", "argv",
            "max_output_bytes")  # fmt: skip
    params = check.params
    cases = _pairs(params.get("cases"))
    more = {
        "cases": [[number, *case] for number, case in enumerate(cases)],
        "argv": params.get("argv"), "checker": params.get("checker"),
        "compare": _one_of(check, "compare", ("lines", *comparison.WAYS)),
        "absolute": params.get("absolute", 0.0), "relative": params.get("relative", 0.0),
        "max_output_bytes": params.get("max_output_bytes", 1 << 16),
    }  # fmt: skip
    return await _judged(check, subject, tools, more, streams, len(cases))


async def suite(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Whether a hidden suite passes over the functions of the candidate's module.

    Params: `suite` (Python; pytest-style functions and classes, or unittest), `module` (the name it
    imports the candidate by; default solution), `path` and the others as for `stdio`, `timeout_s`
    of CPU time being that of a test. `direct`: execute it in the candidate's process, where it may
    use classes, generators and patches; its evidence then says `weak`, and unless the task has a
    `differential` gate, what it is worth is multiplied by `weak_cap` (at most 0.5).
    """
    allowed(check, *_OF_ALL, "suite", "module", "direct", "weak_cap")
    text, module = text_of(check, "suite"), str(check.params.get("module", "solution"))
    cap, direct = check.params.get("weak_cap", MAX_WEAK), bool(check.params.get("direct", False))
    if not isinstance(cap, int | float) or not 0 <= cap <= MAX_WEAK:
        raise UsageError(f"check 'suite' wants a 'weak_cap' from 0 to {MAX_WEAK}, got {cap!r:.80}.")
    if not module.isidentifier() or module in sys.stdlib_module_names | {"pytest"}:
        raise UsageError(f"check 'suite' wants a new name as 'module', got {module!r:.80}.")
    names = list(named_tests(text))
    more = {"suite": text, "module": module, "tests": names, "direct": direct}
    found = await _judged(check, subject, tools, more, suites, len(names))
    if not direct:
        return found
    checks = subject.task.checks
    beside = any(one.kind == "differential" and one.gate for one in checks)
    value = found.value if found.value is None or beside else found.value * cap
    return replace(found, value=value, evidence={**found.evidence, "weak": True})


async def differential(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Whether a candidate does what a reference does, over inputs that nobody has seen.

    Params: `generator` (Python that defines `generate(rng)`: the arguments as a tuple, or the input
    of a program as text), `reference` (Python), `function` (name of the function in both; without,
    both are programs), or `adapter` (Python that defines `call(module, *args)`, carried out with
    either module: for classes and generators); `count` of inputs (32), `tolerance` of floats;
    `path` and the others as for `stdio`. Values are compared strict about types, an exception by
    its type.
    """
    allowed(check, *_OF_ALL, "generator", "reference", "function", "adapter", "module", "count",
            "tolerance", "compare", "argv")  # fmt: skip
    params = check.params
    count = params.get("count", 32)
    if type(count) is not int or not 1 <= count <= MAX_COUNT:
        raise UsageError(f"check 'differential' wants 1 to {MAX_COUNT} as 'count', got {count!r}.")
    function, adapter = params.get("function"), params.get("adapter")
    more = {
        "generator": text_of(check, "generator"), "reference": text_of(check, "reference"),
        "function": function, "adapter": adapter, "calls": bool(function or adapter),
        "module": params.get("module", "solution"), "count": count, "argv": params.get("argv"),
        "tolerance": params.get("tolerance", 0.0), "max_output_bytes": 1 << 16,
        "compare": _one_of(check, "compare", ("lines", *comparison.WAYS)),
    }  # fmt: skip
    return await _judged(check, subject, tools, more, differences, count)


_MODULES = (comparison, calls, streams, suites, differences)
"""All that any of these checks needs: so one stock of sandboxes with a harness started ahead serves
every one of them.
"""


async def _judged(
    check: Check,
    subject: Subject,
    tools: Tools,
    more: Mapping[str, Json],
    checker: ModuleType,
    expected: int,
) -> Finding:
    program = await candidate(check, subject)
    if program is None:
        return Finding(value=0.0, evidence={"found": "no candidate", "expected": expected})
    timeout_s = seconds_of(check, CASE_CPU_S)
    memory = check.params.get("memory_bytes", 0 if more.get("argv") else calls.MEMORY_BYTES)
    params = {
        "program": program, "path": check.params.get("path", "solution.py"),
        "seed": tools.seeds(subject.trajectory), "timeout_s": timeout_s, "memory_bytes": memory,
        "pays": _one_of(check, "pays", ("all", "share")), **more,
    }  # fmt: skip
    for key in {"cases", "tests"} & params.keys():
        random.Random(params["seed"]).shuffle(params[key])
    work = Work(
        order={"source": f"from {checker.__name__} import check", "params": params, "sweeps": True},
        modules=_MODULES,
        limit_s=min(MAX_WALL_S, timeout_s * _WALL_FACTOR * expected),
        memory_bytes=max(512 << 20, memory + (112 << 20)),
    )
    return finding(await carry_out(work, subject, tools), expected)


def _one_of(check: Check, key: str, names: Sequence[str]) -> str:
    """A parameter that is one of these names; the first where it is not there."""
    value = check.params.get(key, names[0])
    if value not in names:
        hint = nearest(str(value), names)
        raise UsageError(f"check {check.kind!r} has no {key!r} {value!r:.80}{hint}.")
    return str(value)


def _pairs(cases: Json) -> Sequence[Json]:
    rows = cases if isinstance(cases, (list, tuple)) else ()
    if not rows or not all(isinstance(row, (list, tuple)) and len(row) == 2 for row in rows):
        raise UsageError(f"check 'stdio' wants 'cases' of [input, expected], got {cases!r:.80}.")
    return rows


# --- the candidate --------------------------------------------------------------------------------


async def candidate(check: Check, subject: Subject) -> str | None:
    """Text of what is judged: a declared file, or the code of the reply; None: there is none."""
    path, argv = check.params.get("path"), check.params.get("argv")
    if argv is not None and (path is None or not argv or not isinstance(argv, (list, tuple))):
        raise UsageError(f"check {check.kind!r} wants 'argv' as a list, for a file, got {argv!r}.")
    if path is None:
        return code_of(subject.task.prefix + subject.reply)
    if subject.sealed is None:
        raise VerifierError("the attempt left no sealed file system to look at.")
    data = await subject.sealed.read(text_of(check, "path"), max_bytes=calls.MAX_REPLY_BYTES)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None if argv is None else ""


def code_of(reply: str) -> str | None:
    r"""The Python block of a reply; None where there is none, or several that differ.

    >>> code_of("So:\n```python\nx = 1\n```\nDone."), code_of("x = 1")
    ('x = 1\n', None)
    """
    blocks = {block.strip("\n"): block for block in _blocks(reply)}
    return blocks.popitem()[1] if len(blocks) == 1 else None


def _blocks(reply: str) -> Iterator[str]:
    """Line by line, for a pattern would look from each opening to the end for what closes it."""
    inside: list[str] | None = None
    for line in reply.split("\n"):
        if inside is None:
            inside = [] if _OPENING.fullmatch(line) else None
        elif line.rstrip(" \t") != "```":
            inside.append(f"{line}\n")
        else:
            yield "".join(inside)
            inside = None


# --- the suite ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def named_tests(text: str) -> tuple[str, ...]:
    r"""Names of a suite's tests (`test_a`, `TestB.test_c`), from its text alone.

    >>> named_tests("def test_a(): pass\nclass TestB:\n    def test_c(self): pass")
    ('test_a', 'TestB.test_c')

    Raises:
        UsageError: there are none, or it uses what the stand-in for pytest does not have.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"check 'suite' wants Python as 'suite': {error}.") from error
    for what in _unsupported(tree):
        raise UsageError(
            f"a suite cannot use {what}.",
            f"of pytest there are {', '.join(sorted(_PYTEST))} and tmp_path; unittest is whole.",
        )
    names = tuple(_named(tree))
    if not names or len(set(names)) != len(names):
        raise UsageError(f"check 'suite' wants tests with names of their own, got {names}.")
    return names


def _named(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node.name
        unit = isinstance(node, ast.ClassDef) and any("TestCase" in ast.dump(b) for b in node.bases)
        if isinstance(node, ast.ClassDef) and (unit or node.name.startswith("Test")):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test"):
                    yield f"{node.name}.{inner.name}"


def _unsupported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="pytest"), attr=name) if name not in _PYTEST:
                yield f"pytest.{name}"
            case ast.Attribute(value=ast.Attribute(attr="mark"), attr=name) if name not in _PYTEST:
                yield f"pytest.mark.{name}"
            case ast.ImportFrom(module="pytest", names=names):
                yield from (f"pytest.{one.name}" for one in names if one.name not in _PYTEST)
            case ast.AsyncFunctionDef(name=name):
                yield f"the asynchronous {name}"
            case ast.FunctionDef(name="setup_module" | "teardown_module" | "setup_function"):
                yield node.name
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if function.name.startswith("test"):
            arguments = function.args.args[: len(function.args.args) - len(function.args.defaults)]
            given = {"self", "tmp_path", *_parameters(function)}
            yield from (f"the fixture {a.arg}" for a in arguments if a.arg not in given)


def _parameters(function: ast.FunctionDef) -> Iterator[str]:
    for mark in function.decorator_list:
        match mark:
            case ast.Call(args=[ast.Constant(value=str() as names), *_]):
                yield from (name.strip() for name in names.split(","))
            case ast.Call(args=[ast.List(elts=names) | ast.Tuple(elts=names), *_]):
                yield from (str(one.value) for one in names if isinstance(one, ast.Constant))
