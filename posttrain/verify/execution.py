"""Checks that are programs: a command or a Python checker in a fresh sandbox.

Not a place for the attempt's own sandbox: what it left is mounted read-only at /artefacts, and the
program runs beside it in a pristine one. A candidate that ends or stops its own checker, twice, is
the policy's doing and pays 0: no policy may choose to go without a verdict. The one thing that must
stay true: a value is read only from a complete record that carries this call's nonce; everything
else is the check's failure.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import inspect
import json
import marshal
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from posttrain.core.containment import ExecResult
from posttrain.core.errors import UsageError, VerifierError
from posttrain.core.task import Check, Environment, Isolation, Json
from posttrain.sandbox.spec import Guards
from posttrain.verify import folders, harness, nursery
from posttrain.verify.harness import ARTEFACTS
from posttrain.verify.kinds import Subject, Tools, allowed, seconds_of
from posttrain.verify.layers import Finding

HARNESS = "harness.py"
INTERPRETER = ("python3", "-I", "-S", "-B")
"""Isolated: no site packages, no user site, no environment, no byte code left behind."""
JUDGING = (*INTERPRETER, HARNESS)
"""The command of every such sandbox; it is started ahead and waits for its order."""
MAX_RECORD_BYTES = 65_536
MAX_OPEN_FILES = 4 * Environment().max_open_files
"""The kernel lets a process hand descriptors on as long as not more than this are under way for its
user, who is the same in all sandboxes: what others there have under way must not end a harness.
"""
_ALLOWANCE_S = 5.0
"""Wall time beyond the checker's own limit before the call is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a harness is to carry out."""

    order: Mapping[str, Json]
    """`source` and `params` of a checker, or `command` and its `timeout_s`."""
    modules: Sequence[ModuleType] = ()
    """Modules of this package that the checker imports, in order; standard library only."""
    files: Mapping[str, str] = field(default_factory=dict)
    limit_s: float
    """Wall seconds for all of it."""
    memory_bytes: int = 512 << 20


async def program(check: Check, subject: Subject, tools: Tools) -> Finding:
    """What a command or a checker says of the artefacts and the reply.

    Params: either `source` (Python that defines `check(order)`, see `harness`) or `command` (argv;
    exit code 0 pays 1, up to 125 pays 0: cmp and grep end with 2 over a file that is missing or
    none; a signal, 126, 127 or a time-out is the check's failure; only for commands that never
    execute what the attempt left); `params` (for the source), `files` (path → text, laid anew in
    the folder each run begins in), `expected` (number of tests that must run and pass),
    `timeout_s`.
    """
    allowed(check, "source", "command", "params", "files", "expected", "timeout_s")
    limit_s = seconds_of(check)
    work = Work(order=_order(check, limit_s), files=_files(check), limit_s=limit_s)
    record = await carry_out(work, subject, tools)
    return finding(record, check.params.get("expected"))


async def carry_out(work: Work, subject: Subject, tools: Tools) -> Mapping[str, Json]:
    """The work's record. A time-out is tried once more, alone and with twice the time, before
    it counts: a busy machine must not decide. So is an end while a candidate ran.

    Raises:
        VerifierError: no complete record; SandboxError: the sandbox was lost.
    """
    if tools.sandboxes is None:
        raise VerifierError("a program wants sandboxes, but this stack was built without.")
    if subject.sealed is None and subject.task.environment is not None:
        raise VerifierError("the attempt left no sealed file system to look at.")
    limit_s = work.limit_s + _ALLOWANCE_S
    nonce = secrets.token_hex(16)
    result = await _exec(work, subject, tools, nonce, limit_s)
    first = _ended_by_candidate(result, nonce)
    if result.timed_out or first:
        limit_s *= 2 if result.timed_out else 1
        result = await _exec(work, subject, tools, nonce, limit_s)
    if first and _ended_by_candidate(result, nonce):
        return {"value": 0.0, "evidence": {"found": "a candidate that ends its checker"}}
    return read_record(result, nonce)


def _ended_by_candidate(result: ExecResult, nonce: str) -> bool:
    """Whether the harness came to its end, or to its time limit, while a candidate ran."""
    failed = result.timed_out or result.exit_code != 0
    return failed and nonce in result.stderr and result.stderr.endswith("+")


async def _exec(
    work: Work, subject: Subject, tools: Tools, nonce: str, limit_s: float
) -> ExecResult:
    assert tools.sandboxes is not None
    left, task = subject.sealed, subject.task
    mount = left.mount if left is not None else None
    if mount is not None and task.environment and Guards.of(task.environment).hidden:
        raise UsageError(
            "a tree is declared, in which a candidate would see what the task hides.",
            "declare the files that are looked at, and hand a check what it needs as parameters.",
        )
    order = {
        "nonce": nonce,
        "artefacts": ARTEFACTS,
        "copies": await left.copies() if left is not None and mount is None else {},
        "reply": subject.reply,
        "files": dict(work.files),
        **work.order,
    }
    if mount is not None:
        del order["copies"]
    environment = Environment(
        isolation=task.environment.isolation if task.environment else Isolation.NAMESPACE,
        files=bundle(nursery, folders, harness, *work.modules),
        memory_bytes=work.memory_bytes,
        max_output_bytes=MAX_RECORD_BYTES,
        max_open_files=MAX_OPEN_FILES,
    )
    async with tools.sandboxes.lease(environment, beside=mount, ahead=JUDGING) as sandbox:
        return await sandbox.exec(JUDGING, timeout_s=limit_s, stdin=json.dumps(order).encode())


def _order(check: Check, limit_s: float) -> dict[str, Json]:
    """Exactly one of a command and a source."""
    source, command = check.params.get("source"), check.params.get("command")
    if isinstance(source, str) and command is None:
        return {"source": source, "params": check.params.get("params", {})}
    if isinstance(command, (list, tuple)) and command and source is None:
        return {"command": [str(word) for word in command], "timeout_s": limit_s}
    raise UsageError("check 'program' wants either a 'source' (text) or a 'command' (argv).")


def _files(check: Check) -> dict[str, str]:
    """The check's files, all inside the folder they are laid in."""
    files: Mapping[str, str] = check.params.get("files", {})
    for path in files:
        if path.startswith("/") or ".." in path.split("/"):
            raise UsageError(f"check 'program' wants relative paths without '..', got {path!r}.")
    return dict(files)


_COMPILED, _SOURCES = "harness.compiled", "harness.sources"
_LOADER = """import binascii, marshal, sys
same = sys.modules['_frozen_importlib_external'].MAGIC_NUMBER == {magic!r}
with open({compiled!r} if same else {sources!r}) as file:
    modules = marshal.loads(binascii.a2b_base64(file.read()))
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    exec(code if same else compile(code, name, 'exec'), module.__dict__)
module = modules = None
sys.modules[{main!r}].main()
"""


@functools.cache
def bundle(*modules: ModuleType) -> Mapping[str, str]:
    """The files of a program of modules of this package, which import one another there as they do
    here. They come compiled as well, for an interpreter like this one: that takes a third of its
    start.
    """
    sources = [(module.__name__, inspect.getsource(module)) for module in modules]
    compiled = [
        (name, compile(text, name, "exec", dont_inherit=True, optimize=2)) for name, text in sources
    ]
    loader = _LOADER.format(
        magic=importlib.util.MAGIC_NUMBER, compiled=_COMPILED, sources=_SOURCES,
        main=harness.__name__,
    )  # fmt: skip
    return {HARNESS: loader, _COMPILED: _packed(compiled), _SOURCES: _packed(sources)}


def _packed(value: Any) -> str:
    return base64.b64encode(marshal.dumps(value, 4)).decode()


def read_record(result: ExecResult, nonce: str) -> Mapping[str, Any]:
    """The record of a call.

    Raises:
        VerifierError: time-out, wrong exit code, no single line, wrong nonce, or a checker's error.
    """
    if result.timed_out:
        raise VerifierError(
            f"the program ran past its time limit twice ({result.duration_s:.1f} s)."
        )
    if result.exit_code != 0 or result.truncated:
        raise VerifierError(
            f"no complete record: exit code {result.exit_code}, stderr {result.stderr[-300:]!r}"
        )
    try:
        record = json.loads(result.stdout)
    except ValueError as error:
        raise VerifierError(f"no record but {result.stdout[:200]!r}") from error
    if not isinstance(record, dict) or record.pop("nonce", None) != nonce:
        raise VerifierError("the record does not carry this call's nonce.")
    if "error" in record:
        raise VerifierError(f"the program {record['error']}")
    return record


def finding(record: Mapping[str, Json], expected: Json = None) -> Finding:
    """The finding of a record. Where tests are counted, a suite that did not run whole pays 0, and
    no suite pays more than the share that passed.

    >>> finding({"value": 1.0, "ran": 3, "passed": 3}, 5).value
    0.0
    """
    unknown = set(record) - {"value", "expected", "ran", "passed", "evidence"}
    if unknown or "value" not in record:
        raise VerifierError(f"wanted a record with 'value', got keys {sorted(record)}.")
    evidence = {key: record[key] for key in ("ran", "passed") if key in record}
    evidence["evidence"] = record.get("evidence", {})
    wanted = record.get("expected") if expected is None else expected
    if wanted is None:
        return Finding(value=record["value"], evidence=evidence)
    evidence["expected"] = wanted
    if not wanted > 0 or record.get("ran") != wanted:
        return Finding(value=0.0, evidence=evidence)
    return Finding(value=min(record["value"], record.get("passed", 0) / wanted), evidence=evidence)
