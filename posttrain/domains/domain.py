"""What makes a domain easy to write: task and oracle builders, check values, the contract check.

The Domain protocol itself is `core.ports.Domain`: `name`, `levels`, `task(seed, level)` and
`oracle(task)`. This is no base class; a domain is any object with those four. The one thing that
must stay true: a builder puts the gold answer into `Task.private` and checks, nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from posttrain.core import codec
from posttrain.core.errors import UsageError, nearest
from posttrain.core.ports import Domain
from posttrain.core.task import (
    Artefact,
    Check,
    Description,
    Environment,
    Json,
    Limits,
    Oracle,
    OracleTurn,
    Place,
    Task,
    Tool,
    ToolCall,
)

ANSWER_ONLY = "Reply with only the final answer."
ANSWER_PREFIX = "Answer:"
"""Start of the assistant's turn; without it an untrained small model is never strictly right."""
GOLD = "answer"
"""Key of `Task.private` under which `answer_task` keeps the gold answer."""


def _tool(kind: str, argument: str, description: str) -> Tool:
    parameters = {
        "type": "object", "properties": {argument: {"type": "string"}}, "required": [argument],
    }  # fmt: skip
    return Tool(name=kind, description=description, parameters=parameters, kind=kind)


SHELL = _tool("shell", "command", "Run a bash command in the working folder.")
SHELL_SESSION = _tool(
    "shell_session", "command",
    "Run a bash command. Directory and exported variables stay for the next one.",
)  # fmt: skip
PYTHON_SESSION = _tool(
    "python_session", "code",
    "Run Python code. Variables stay for the next call; the value of a last expression is shown.",
)  # fmt: skip
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in (SHELL, SHELL_SESSION, PYTHON_SESSION)}
"""Tools that authors may name instead of spelling them out."""

# --- checks -----------------------------------------------------------------------------------


def exact(answer: str, *, ignore_case: bool = False) -> Check:
    """The answer must be this text, up to white space."""
    return Check(kind="exact", params={"answer": answer, "ignore_case": ignore_case})


def numeric(answer: int | float | str, *, absolute: float = 0.0) -> Check:
    """The answer must be this number, within an absolute tolerance."""
    return Check(kind="numeric", params={"answer": str(answer), "absolute": absolute})


def program(source: str, *, params: Mapping[str, Json] | None = None) -> Check:
    """A domain's own verification: Python text that defines `check(order)`, run in a sandbox of
    its own; `order.reply` is the last reply, `order.params` are these, and it returns 0 to 1. What
    the attempt left, and its task declares, it reads by `order.artefacts.read_text(path)`, which
    gives None for no text.
    """
    return Check(kind="program", params={"source": source, "params": dict(params or {})})


# --- answer tasks -----------------------------------------------------------------------------


def answer_task(
    objective: str,
    *,
    domain: str,
    seed: int,
    level: int,
    answer: str,
    check: Check | None = None,
    constraints: tuple[str, ...] = (ANSWER_ONLY,),
) -> Task:
    """A task of one reply. `check` defaults to the exact text of `answer`.

    The reply may take twice the gold answer's characters in tokens (12 at least): room for a
    different right answer, none for rambling.
    """
    max_tokens = max(12, 2 * len(answer) + 8)
    return Task(
        domain=domain,
        level=level,
        seed=seed,
        description=Description(
            objective=objective,
            constraints=constraints,
            verification="The final answer is compared by a program.",
        ),
        prefix=ANSWER_PREFIX,
        checks=(check if check is not None else exact(answer),),
        limits=Limits(
            max_tokens=max_tokens,
            max_turn_tokens=max_tokens,
            max_context_tokens=max(4096, len(objective) + max_tokens + 512),
        ),
        private={GOLD: answer},
    )


def answer_oracle(task: Task) -> Oracle:
    """The reference reply of a task made by `answer_task`: its gold answer."""
    return Oracle(turns=(OracleTurn(text=str(task.private[GOLD])),))


# --- shell tasks ------------------------------------------------------------------------------


def shell_task(
    objective: str,
    *,
    domain: str,
    seed: int,
    level: int,
    environment: Environment,
    checks: tuple[Check, ...],
    artefacts: tuple[Artefact, ...],
    commands: tuple[str, ...],
    constraints: tuple[str, ...] = (),
) -> Task:
    """A task of shell commands in a sandbox, judged by the files it leaves. `commands` solve it.

    A turn has room for the longest of them and 24 tokens more (a token is a character or longer);
    two turns are to spare.
    """
    turns = len(commands) + 2
    turn_tokens = 24 + max(map(len, commands))
    return Task(
        domain=domain,
        level=level,
        seed=seed,
        description=Description(
            objective=objective,
            constraints=constraints,
            verification="The files are inspected afterwards.",
            tools=(SHELL,),
        ),
        executor="tools",
        checks=checks,
        artefacts=artefacts,
        environment=environment,
        limits=Limits(
            max_turns=turns,
            max_turn_tokens=turn_tokens,
            max_tokens=turn_tokens * turns,
            time_s=60.0,
        ),
        private={"commands": list(commands)},
    )


def shell_oracle(task: Task, *, closing: str = "Done.") -> Oracle:
    """The reference trajectory of a task made by `shell_task`: one command a turn, then a text."""
    return command_oracle([str(one) for one in task.private["commands"]], closing=closing)


def command_oracle(commands: list[str], *, closing: str = "Done.") -> Oracle:
    """Turns that call the shell once each, and a closing text."""
    calls = [
        ToolCall(id=f"call_{number}", name=SHELL.name, arguments={"command": command})
        for number, command in enumerate(commands)
    ]
    turns = [OracleTurn(tool_calls=(call,)) for call in calls]
    return Oracle(turns=(*turns, OracleTurn(text=closing)))


# --- the contract -----------------------------------------------------------------------------


def check_contract(domain: Domain, *, seed: int, level: int) -> tuple[str, ...]:
    """What is wrong with the task of a seed at a level, as sentences; empty where all is right.

    It looks at the domain only: that the oracle earns reward 1 is for verification to say. What
    the domain raises passes through.
    """
    task = domain.task(seed, level)
    oracle = domain.oracle(task)
    found = [*_identity(domain, task, seed, level), *_substance(task), *_solution(task, oracle)]
    again = domain.task(seed, level)
    if codec.to_json(again) != codec.to_json(task):
        found.append(f"task({seed}, {level}) differs when made twice")
    elif codec.to_json(domain.oracle(again)) != codec.to_json(oracle):
        found.append("the oracle differs when asked twice")
    for label, value in (("task", task), ("oracle", oracle)):
        found += _plain(label, value)
    return tuple(found)


def _identity(domain: Domain, task: Task, seed: int, level: int) -> list[str]:
    wanted, came = (domain.name, seed, level), (task.domain, task.seed, task.level)
    if wanted != came:
        return [f"wanted a task of (domain, seed, level) {wanted}, got {came}"]
    return []


def _substance(task: Task) -> list[str]:
    found = []
    if not task.description.objective.strip():
        found.append("the objective is empty")
    if not any(check.place is not Place.GUARD for check in task.checks):
        found.append("there is no check beyond guards: nothing decides whether it is right")
    if task.executor == "tools" and not task.description.tools:
        found.append("the executor is 'tools', but the task allows no tool")
    if task.executor == "tools" and task.environment is None:
        found.append("the executor is 'tools', but there is no environment to call them in")
    return found


def _solution(task: Task, oracle: Oracle) -> list[str]:
    if not oracle.turns:
        return ["the oracle has no turns"]
    if len(oracle.turns) > task.limits.max_turns:
        wanted = f"{len(oracle.turns)} turns, but the limit is {task.limits.max_turns}"
        return [f"the oracle takes {wanted}"]
    names = [tool.name for tool in task.description.tools]
    for turn in oracle.turns:
        for call in turn.tool_calls:
            if call.name not in names:
                return [f"the oracle calls {call.name!r}, which the task does not allow"]
    return []


def _plain(label: str, value: Task | Oracle) -> list[str]:
    """Whether it survives JSON."""
    plain = codec.to_json(value)
    try:
        text = json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        return [f"the {label} is no JSON value: {error}"]
    if codec.to_json(codec.from_json(type(value), json.loads(text))) != plain:
        return [f"the {label} changes on its way through JSON (keys that are no text?)"]
    return []


def in_levels(domain: Domain, level: int) -> int:
    """The level, where the domain has it.

    Raises:
        UsageError: it does not.
    """
    if not 0 <= level < domain.levels:
        raise UsageError(
            f"domain {domain.name!r} has levels 0 to {domain.levels - 1}, got {level}."
        )
    return level


def tool_named(name: str) -> Tool:
    """A tool that authors may name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in TOOLS:
        raise UsageError(f"unknown tool {name!r}{nearest(name, TOOLS)}. Known: {', '.join(TOOLS)}.")
    return TOOLS[name]
