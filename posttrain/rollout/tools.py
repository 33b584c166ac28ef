r"""Tool calls as text: how a policy writes them, how they are read, what they become.

Three formats. `hermes`, where the model's own template has it: `<tool_call>{"name": …,
"arguments": {…}}</tool_call>`. `shell`, where the task's only tool is a shell: a fenced block,

    ```sh
    ls -l
    ```

`line`, for all else: a line `call: {"name": …, "arguments": {…}}`. Nothing is carried out here.
The one thing that must stay true: `read(write(calls)) == calls`, and `read` never raises: what
cannot be read is a call with an error, which is answered with that error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from posttrain.core.containment import ExecResult
from posttrain.core.errors import nearest
from posttrain.core.task import Json, Tool, ToolCall
from posttrain.rollout.text import clean_value, head
from posttrain.sandbox import session

MAX_ERROR_CHARS = 500
"""Longest message about a call that could not be read or is refused."""
READ_BYTES = 1 << 20
"""Most that `read_file` reads; the observation keeps head and tail of it."""
MAX_DEPTH = 32
"""Arguments nested deeper are malformed: nobody means them, and records of them would have to be
walked by recursion.
"""


class CallFormat(StrEnum):
    """How tool calls are written."""

    HERMES = "hermes"
    SHELL = "shell"
    LINE = "line"


class Kind(StrEnum):
    """Tools that are carried out in an attempt's sandbox (`Tool.kind`)."""

    SHELL = "shell"
    """A command line in a shell of its own, in the workspace."""
    READ_FILE = "read_file"
    WRITE_FILE = "write_file"
    PYTHON = "python"
    """A program in an interpreter of its own."""
    SHELL_SESSION = "shell_session"
    """A command line where the one before left off: its directory and exported variables."""
    PYTHON_SESSION = "python_session"
    """Code in one interpreter, whose variables stay; the value of a last expression is shown."""


_ARGUMENTS: Mapping[Kind, tuple[str, ...]] = {
    Kind.SHELL: ("command",),
    Kind.READ_FILE: ("path",),
    Kind.WRITE_FILE: ("path", "content"),
    Kind.PYTHON: ("code",),
    Kind.SHELL_SESSION: ("command",),
    Kind.PYTHON_SESSION: ("code",),
}


class Refusal(StrEnum):
    """Why a call is answered without being carried out; also the name of its counter."""

    MALFORMED = "malformed_calls"
    UNKNOWN_TOOL = "unknown_tools"
    BAD_ARGUMENTS = "refused_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A call that is not carried out, and what the policy reads instead."""

    kind: Refusal
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a call runs in the sandbox."""

    argv: tuple[str, ...]
    stdin: bytes = b""


def format_for(tools: Sequence[Tool], *, hermes: bool) -> CallFormat:
    """The format for a task's tools under a template."""
    if hermes:
        return CallFormat.HERMES
    alone = len(tools) == 1 and tools[0].kind in (Kind.SHELL, Kind.SHELL_SESSION)
    return CallFormat.SHELL if alone else CallFormat.LINE


def describe(tools: Sequence[Tool], form: CallFormat) -> str:
    """What the policy is told about its tools where the template has no place for them."""
    if form is CallFormat.SHELL:
        lines = [tools[0].description] if tools[0].description else []
        lines.append("To run a command, write\n```sh\ncommand\n```")
    else:
        lines = [_signature(tool) for tool in tools]
        lines.append('To call a tool, write a line\ncall: {"name": "…", "arguments": {…}}')
    return "\n".join([*lines, "When you are done, reply without a call."])


def schema(tool: Tool) -> dict[str, Json]:
    """The tool in the shape chat templates take."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


def _signature(tool: Tool) -> str:
    arguments = ", ".join(tool.parameters.get("properties", {}))
    return f"{tool.name}({arguments}): {tool.description}" if tool.description else tool.name


# --- writing ----------------------------------------------------------------------------------


def write(calls: Sequence[ToolCall], form: CallFormat, *, tools: Sequence[Tool]) -> str:
    """The text a policy has to write for these calls."""
    return "\n".join(_written(call, form, tools) for call in calls)


def _written(call: ToolCall, form: CallFormat, tools: Sequence[Tool]) -> str:
    arguments = dict(call.arguments or {})
    if form is CallFormat.SHELL:
        command = str(arguments[_only_argument(tools[0])])
        runs = re.findall(r"^[^\S\n]*(`{3,})", command, re.MULTILINE)
        fence = "`" * (max(map(len, runs), default=2) + 1)
        return f"{fence}sh\n{command}\n{fence}"
    body = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    if form is CallFormat.LINE:
        return f"call: {body}"
    body = re.sub(r"<(/?tool_call>)", r"\\u003c\1", body)
    return f"<tool_call>\n{body}\n</tool_call>"


# --- reading ----------------------------------------------------------------------------------


def read(
    text: str, form: CallFormat, *, tools: Sequence[Tool], first: int = 1
) -> tuple[ToolCall, ...]:
    """All calls of a reply, in order, named c`first`, c`first + 1`, …; never raises."""
    if form is CallFormat.SHELL:
        found = _read_fences(text, tools[0])
    elif form is CallFormat.LINE:
        found = [_read_object(match[1].strip(" \t\r")) for match in _LINE.finditer(text)]
    else:
        found = _read_hermes(text)
    return tuple(ToolCall(id=f"c{first + index}", **parts) for index, parts in enumerate(found))


def read_arguments(raw: str) -> tuple[Mapping[str, Json] | None, str | None]:
    """The JSON object of an argument string, or None and what is wrong with it.

    >>> read_arguments('{"a": 1}')
    ({'a': 1}, None)
    >>> read_arguments('[1,2]')
    (None, 'wanted a JSON object, got a list')
    """
    try:
        value = json.loads(raw, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        return None, f"not valid JSON at character {error.pos}: {error.msg}"
    except (ValueError, RecursionError) as error:
        return None, head(f"not valid JSON: {error}", MAX_ERROR_CHARS)
    if not isinstance(value, dict):
        return None, f"wanted a JSON object, got {_KIND_NAMES.get(type(value), 'null')}"
    if _is_deep(value):
        return None, f"nested deeper than {MAX_DEPTH} levels"
    return clean_value(value), None


_LINE = re.compile(r"^call:(.*)$", re.MULTILINE)
_OPENING = re.compile(r"^ {0,3}(`{3,})(?:sh|bash|shell)[ \t\r]*$")
_KIND_NAMES = {
    list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean",
}  # fmt: skip


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse_constant(head(digits, 80))


def _is_deep(value: Json) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            if isinstance(outer, (dict, list))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _bad(raw: str, error: str, name: str = "") -> dict[str, Any]:
    return {"name": name, "arguments": None, "raw": raw, "error": error}


def _read_fences(text: str, tool: Tool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    lines = text.split("\n")
    line = 0
    while line < len(lines):
        opening = _OPENING.match(lines[line])
        line += 1
        if not opening:
            continue
        ends = (i for i in range(line, len(lines)) if lines[i].strip() == opening[1])
        end = next(ends, None)
        command = "\n".join(lines[line:end])
        if end is None:
            found.append(_bad(command, "the block is not closed", tool.name))
            break
        if not command.strip():
            found.append(_bad(command, "the block is empty", tool.name))
        else:
            arguments = {_only_argument(tool): command}
            found.append({"name": tool.name, "arguments": arguments, "raw": command})
        line = end + 1
    return found


def _read_hermes(text: str) -> list[dict[str, Any]]:
    found = []
    for piece in text.split("<tool_call>")[1:]:
        body, closing, _ = piece.partition("</tool_call>")
        if closing:
            found.append(_read_object(body.strip()))
        else:
            found.append(_bad(body, "<tool_call> is not closed"))
    return found


def _read_object(raw: str) -> dict[str, Any]:
    call, error = read_arguments(raw)
    if call is None:
        return _bad(raw, str(error))
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        return _bad(raw, 'wanted {"name": …, "arguments": {…}}, got no name')
    if isinstance(arguments, str):
        arguments, error = read_arguments(arguments)
    elif not isinstance(arguments, dict):
        arguments, error = read_arguments(json.dumps(arguments))
    if arguments is None:
        return _bad(raw, f"arguments: {error}", name)
    return {"name": name, "arguments": arguments, "raw": raw}


# --- carrying out -----------------------------------------------------------------------------


def refuse(call: ToolCall, tools: Sequence[Tool]) -> Refused | None:
    """Why a call is not carried out, or None where it is."""
    if call.arguments is None:
        return _refused(Refusal.MALFORMED, f"malformed call: {call.error}")
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        names = ", ".join(tool.name for tool in tools)
        hint = nearest(call.name, [tool.name for tool in tools])
        return _refused(
            Refusal.UNKNOWN_TOOL, f"no tool {head(call.name, 80)!r}{hint}. Tools: {names}"
        )
    problem = _misfit(call.arguments, tool)
    return _refused(Refusal.BAD_ARGUMENTS, f"{tool.name}: {problem}") if problem else None


def command(call: ToolCall, tool: Tool) -> Command:
    """What a call that was not refused runs; every kind is a process inside the sandbox, so
    whatever is wrong with it is the policy's to read.
    """
    arguments = {name: str(value) for name, value in (call.arguments or {}).items()}
    match Kind(tool.kind):
        case Kind.SHELL:
            return Command(argv=("bash", "-c", arguments[_only_argument(tool)]))
        case Kind.PYTHON:
            return Command(argv=("python3", "-c", arguments[_only_argument(tool)]))
        case Kind.SHELL_SESSION:
            return Command(argv=session.shell(arguments[_only_argument(tool)]))
        case Kind.PYTHON_SESSION:
            code = arguments[_only_argument(tool)]
            return Command(argv=session.python(), stdin=code.encode())
        case Kind.READ_FILE:
            path = arguments[_only_argument(tool)]
            return Command(argv=("head", "-c", str(READ_BYTES), "--", path))
        case Kind.WRITE_FILE:
            script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
            stdin = arguments["content"].encode()
            return Command(argv=("bash", "-c", script, "bash", arguments["path"]), stdin=stdin)


def observe(result: ExecResult) -> str:
    """What the policy reads about a command: output, errors, how it ended if not well, and before
    them whether what earlier ones had left running is gone.

    >>> observe(ExecResult(exit_code=137, stdout="", stderr="", out_of_memory=True))
    '[exit 137, out of memory]'
    """
    parts = ["[processes of earlier calls have ended; files are kept]"] * result.memory_lost
    parts += [part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip()]
    ends = []
    if result.timed_out:
        ends.append("timed out")
    elif result.exit_code is None:
        ends.append("killed")
    elif result.exit_code:
        ends.append(f"exit {result.exit_code}")
    ends += ["out of memory"] * result.out_of_memory + ["disk full"] * result.disk_full
    if ends:
        parts.append(f"[{', '.join(ends)}]")
    return "\n".join(parts) or "[no output]"


def identity(calls: Sequence[ToolCall]) -> str:
    """The same for the same set of calls, whatever the order of calls and argument keys."""
    return json.dumps(
        sorted(
            {
                json.dumps([call.name, call.raw if call.arguments is None else call.arguments],
                           sort_keys=True)
                for call in calls
            }
        )
    )  # fmt: skip


def unknown_kinds(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Kinds of tools that nothing here carries out."""
    return tuple(tool.kind for tool in tools if tool.kind not in set(Kind))


def _refused(kind: Refusal, message: str) -> Refused:
    return Refused(kind=kind, message=head(message, MAX_ERROR_CHARS))


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def _misfit(arguments: Mapping[str, Json], tool: Tool) -> str | None:
    """What is wrong with the arguments, or None; types, required and unknown names."""
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    required = _required(tool)
    for name in required:
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if properties and name not in properties:
            return f"no argument {head(name, 80)!r}{nearest(name, properties)}"
        wanted = str(properties.get(name, {}).get("type", "string" if name in required else ""))
        fits = isinstance(value, _TYPES.get(wanted, (object,)))
        if not fits or (isinstance(value, bool) and wanted in ("integer", "number")):
            return f"argument {name!r} must be of type {wanted}"
        if isinstance(value, str) and "\0" in value:
            return f"argument {name!r} holds a null character"
    return None


def _required(tool: Tool) -> tuple[str, ...]:
    named = tuple(tool.parameters.get("required", ()))
    if tool.kind not in set(Kind):
        return named
    built_in = _ARGUMENTS[Kind(tool.kind)]
    needed = (_only_argument(tool),) if len(built_in) == 1 else built_in
    return tuple(dict.fromkeys((*needed, *named)))


def _only_argument(tool: Tool) -> str:
    """The argument of a tool that takes one; authors may name it as they like."""
    properties = tuple(tool.parameters.get("properties", ()))
    return properties[0] if len(properties) == 1 else _ARGUMENTS[Kind(tool.kind)][0]
