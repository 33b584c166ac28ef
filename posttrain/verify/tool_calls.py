"""The kind `tool_calls`: are the calls of an attempt the expected ones?

Matched as in the Berkeley Function Calling Leaderboard (Patil et al., ICML 2025; "AST evaluation"):
lists of possible values for each parameter, types as the tool's schema says. It carries out no
call. The one thing that must stay true: one call too many, one too few or one that differs pays 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from posttrain.core.errors import UsageError
from posttrain.core.task import Check, Json
from posttrain.verify import written_calls
from posttrain.verify.decided import decided
from posttrain.verify.documents import Unreadable
from posttrain.verify.kinds import Subject, Tools, allowed, seconds_of
from posttrain.verify.layers import Finding
from posttrain.verify.structure import same_json
from posttrain.verify.submission import submitted
from posttrain.verify.written_calls import Call

JUDGE = "posttrain.verify.tool_calls:judged"
PLACES = ("calls", "reply", "block")
ORDERS = ("any", "given")
OMITTED = ""
"""Among the possible values: the parameter may be left out."""
MAX_CALLS = 256
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "char": (str,), "integer": (int,), "long": (int,), "int": (int,),
    "number": (int, float), "float": (int, float), "double": (int, float),
    "boolean": (bool,), "array": (list,), "tuple": (list,), "arraylist": (list,),
    "object": (dict,), "dict": (dict,), "hashmap": (dict,), "null": (type(None),),
}  # fmt: skip
"""Names of types in lower case, as JSON Schema and the leaderboard have them. A type with another
name (`any`) allows every value; it is the possible values that decide."""


async def tool_calls(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Whether the calls are the expected ones, and no others.

    Params: `expected` (a list of calls, each `{name: {parameter: [possible values]}}`; "" among the
    values: may be left out; [] where no call is right), `order` (`any`, as for parallel calls, or
    `given`), `tools` (each `name` and `parameters`, a JSON Schema; those of the task's description
    without it), `ignore` (names of tools whose calls do not count), `loose_text` (case, spaces and
    punctuation of texts do not count, as in the leaderboard), `where` (`calls`, the attempt's own;
    `reply` or `block`, as written there; by default `reply` for tasks that are answered once, else
    `calls`), `timeout_s`.
    """
    allowed(check, "expected", "order", "tools", "ignore", "loose_text", "where", "timeout_s")
    order = _order(check, subject)
    default = "reply" if subject.task.executor == "answer" else "calls"
    where = check.params.get("where", default)
    if where not in PLACES:
        raise UsageError(f"check 'tool_calls' wants 'where' in {PLACES}, got {where!r:.80}.")
    given: Json
    if where == "calls":
        turns = subject.trajectory.turns
        given = [[one.name, one.arguments] for turn in turns for one in turn.tool_calls]
    else:
        try:
            placed = Check(kind=check.kind, params={"where": where})
            given = await submitted(placed, subject, "python", "json")
        except Unreadable as error:
            return Finding(value=0.0, evidence={"refused": str(error)})
    sound: Json = [] if where == "calls" else "[]"
    found = await decided(tools, JUDGE, (given, order), (sound, order), timeout_s=seconds_of(check))
    why = found.refused or found.answer["why"]
    if not why and not order["expected"] and not subject.reply.strip():
        why = "empty"
    return Finding(value=float(not why), evidence={"refused": why} if why else {})


def _order(check: Check, subject: Subject) -> dict[str, Json]:
    """What the worker is told.

    Raises:
        UsageError: the parameters are of no use.
    """
    params = check.params
    listed = [{"name": one.name, "parameters": one.parameters}
              for one in subject.task.description.tools]  # fmt: skip
    schemas: dict[str, Json] = {}
    told = params.get("tools", listed)
    if not isinstance(told, (list, tuple)):
        raise UsageError(f"check 'tool_calls' wants a list as 'tools', got {told!r:.80}.")
    for one in told:
        if not isinstance(one, Mapping) or not isinstance(one.get("name"), str):
            raise UsageError(f"check 'tool_calls' wants tools with a name, got {one!r:.80}.")
        schemas[one["name"]] = one.get("parameters", {})
    expected, order = params.get("expected"), params.get("order", "any")
    if not isinstance(expected, (list, tuple)):
        raise UsageError(f"check 'tool_calls' wants a list of calls as 'expected', got "
                         f"{expected!r:.80}.")  # fmt: skip
    for call in expected:
        _ensure(call, schemas)
    if order not in ORDERS:
        raise UsageError(f"check 'tool_calls' wants 'order' in {ORDERS}, got {order!r:.80}.")
    ignore, loose = params.get("ignore", ()), params.get("loose_text", False)
    if not isinstance(ignore, (list, tuple)) or not isinstance(loose, bool):
        raise UsageError("check 'tool_calls' wants names as 'ignore', true or false as "
                         "'loose_text'.")  # fmt: skip
    for one in ignore:
        if not isinstance(one, str) or any(one in call for call in expected):
            raise UsageError(f"check 'tool_calls' wants names of tools of which no call is "
                             f"expected as 'ignore', got {one!r:.80}.")  # fmt: skip
    return {"expected": expected, "ordered": order == "given", "schemas": schemas,
            "ignore": list(ignore), "loose": loose}  # fmt: skip


def _ensure(call: Json, schemas: Mapping[str, Json]) -> None:
    """Refuse an expected call that no attempt could make.

    Raises:
        UsageError: it has not one name of a tool, or values that are no lists.
    """
    if not isinstance(call, Mapping) or len(call) != 1:
        raise UsageError(f"wanted an expected call as {{name: {{parameter: [values]}}}}, got "
                         f"{call!r:.80}.")  # fmt: skip
    ((name, values),) = call.items()
    if name not in schemas:
        raise UsageError(f"an expected call is of {name!r:.80}, which is none of the tools.",
                         f"name one of {', '.join(sorted(schemas))}.")  # fmt: skip
    if not isinstance(values, Mapping):
        raise UsageError(f"wanted parameters of {name!r} with their possible values.")
    known = _properties(schemas[name])
    for key, possible in values.items():
        if key not in known:
            raise UsageError(f"{name!r} has no parameter {key!r:.80}.")
        if not isinstance(possible, (list, tuple)) or not possible:
            raise UsageError(f"wanted a list of possible values of {name}.{key}, got "
                             f"{possible!r:.80}.")  # fmt: skip
    for key in _required(schemas[name]):
        if key not in values:
            raise UsageError(f"{name!r} requires {key!r}, of which no possible value is given.")


def _properties(schema: Json) -> Mapping[str, Json]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _required(schema: Json) -> Sequence[str]:
    found = schema.get("required") if isinstance(schema, Mapping) else None
    return found if isinstance(found, (list, tuple)) else ()


# --- in the worker ----------------------------------------------------------------------------


def judged(given: Json, order: Mapping[str, Json]) -> dict[str, Json]:
    """Why calls (a list of name and arguments, or the text that has them) are not the expected
    ones; '' where they are. For workers only.
    """
    schemas, expected = order["schemas"], order["expected"]
    calls: list[Call]
    if isinstance(given, str):
        parameters = {name: list(_properties(schema)) for name, schema in schemas.items()}
        try:
            calls = written_calls.read(given, parameters)
        except Unreadable as error:
            none_expected = not expected and not _writes(given, schemas)
            return {"why": "" if none_expected else str(error)}
    else:
        calls = [(name, arguments) for name, arguments in given]
    calls = [call for call in calls if call[0] not in order["ignore"]]
    if len(calls) != len(expected):
        return {"why": f"wanted {len(expected)} calls, got {len(calls)}"}
    if len(calls) > MAX_CALLS:
        return {"why": f"more than {MAX_CALLS} calls"}
    faults = [
        [_fault(call, wanted, schemas, order["loose"]) for wanted in expected] for call in calls
    ]
    if order["ordered"] or len(calls) == 1:
        return {"why": next((row[n] for n, row in enumerate(faults) if row[n]), "")}
    unmatched = _unmatched(faults)
    return {"why": "" if unmatched is None else f"{calls[unmatched][0]}: {faults[unmatched][0]}"}


def _writes(text: str, schemas: Mapping[str, Json]) -> bool:
    """Whether prose holds what could be a call of one of the tools."""
    names = "|".join(map(re.escape, schemas))
    return bool(names) and bool(
        re.search(rf"(?:{names})\s*\(|\"name\"\s*:\s*\"(?:{names})\"", text)
    )


def _unmatched(faults: Sequence[Sequence[str]]) -> int | None:
    """The first call that finds no expected one of its own; None where all do (augmenting paths,
    as a call that fits two must not take the only one of another).
    """
    taken: dict[int, int] = {}

    def place(call: int, seen: set[int]) -> bool:
        for wanted, fault in enumerate(faults[call]):
            if not fault and wanted not in seen:
                seen.add(wanted)
                if wanted not in taken or place(taken[wanted], seen):
                    taken[wanted] = call
                    return True
        return False

    return next((call for call in range(len(faults)) if not place(call, set())), None)


def _fault(call: Call, wanted: Mapping[str, Json], schemas: Mapping[str, Json], loose: bool) -> str:
    """Why a call is not the wanted one."""
    name, arguments = call
    ((function, possible),) = wanted.items()
    if name != function:
        return f"wanted {function}, got {name:.80}"
    if not isinstance(arguments, Mapping):
        return "arguments that could not be read"
    schema = schemas[function]
    types = _properties(schema)
    for key, value in arguments.items():
        if key not in possible:
            return f"{key:.80}: not expected"
        if not _possible(possible[key], value, types[key], loose):
            return f"{key:.80}: {value!r:.80} is no possible value"
    for key, values in possible.items():
        if key not in arguments and (OMITTED not in values or key in _required(schema)):
            return f"{key:.80}: missing"
    return ""


def _possible(values: Sequence[Json], value: Json, schema: Json, loose: bool) -> bool:
    """Whether a value is one of the possible ones. It has the type that the schema says, unless the
    possible one has another (a name of something, where the schema says what that is).
    """
    fits = _fits(value, schema)
    return any(_equal(one, value, loose) and (fits or not _fits(one, schema)) for one in values)


def _fits(value: Json, schema: Json) -> bool:
    """Whether a value has the type that a schema says; whole numbers are numbers, never booleans.

    >>> _fits(3, {"type": "float"}), _fits(3.0, {"type": "integer"}), _fits(True, {"type": "long"})
    (True, False, False)
    """
    if not isinstance(schema, Mapping):
        return True
    told = schema.get("type", "any")
    names = told if isinstance(told, (list, tuple)) else [told]
    types = [TYPES.get(str(name).lower()) for name in names]
    if all(types) and not any(type(value) in (one or ()) for one in types):
        return False
    if isinstance(value, list):
        return all(_fits(one, schema.get("items", {})) for one in value)
    if isinstance(value, dict):
        inner = _properties(schema)
        return all(_fits(one, inner.get(key, {})) for key, one in value.items())
    return True


def _equal(wanted: Json, value: Json, loose: bool) -> bool:
    """Equality with a possible value. In one that is an object each name has a list of possible
    values of its own, where "" says that it may be left out.
    """
    if isinstance(wanted, Mapping) and isinstance(value, Mapping):
        if not set(value) <= set(wanted):
            return False
        return all(
            any(_equal(one, value[key], loose) for one in _several(possible))
            if key in value
            else OMITTED in _several(possible)
            for key, possible in wanted.items()
        )
    if isinstance(wanted, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(wanted) == len(value) and all(
            _equal(one, other, loose) for one, other in zip(wanted, value, strict=True)
        )
    if loose and isinstance(wanted, str) and isinstance(value, str):
        return _plain(wanted) == _plain(value)
    return same_json(wanted, value)


def _several(possible: Json) -> Sequence[Json]:
    return possible if isinstance(possible, (list, tuple)) else [possible]


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^'\"]", "", text).casefold()
