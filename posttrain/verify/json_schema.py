"""The kind `json_schema`: is what was said, or left in a file, JSON that a schema allows?

The schema is the task's and trusted to be decent, the instance is not: a worker evaluates it, and
is killed where a `pattern` and a hostile text keep it. The one thing that must stay true: a schema
that is none, or refers to what is not in it, is the task's mistake and never a reward of 0.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import referencing
from jsonschema.validators import SPECIFICATIONS, validator_for
from referencing.jsonschema import DRAFT202012

from posttrain.core.errors import UsageError
from posttrain.core.task import Check, Json
from posttrain.verify import documents
from posttrain.verify.decided import decided
from posttrain.verify.documents import Unreadable
from posttrain.verify.kinds import Subject, Tools, allowed, seconds_of
from posttrain.verify.layers import Finding
from posttrain.verify.structure import same_json
from posttrain.verify.submission import submitted

JUDGE = "posttrain.verify.json_schema:judged"
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
FRAMES = 60
"""Python frames that a level of the instance may take; a schema that takes more has no end."""


async def json_schema(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Whether JSON satisfies a schema, and is a value.

    Params: `schema` (its `$schema` names the draft, 2020-12 without; nothing is fetched), `answer`
    (the value it must be as well; 1 and 1.0 are one number, 1 and true are not), `formats` (also
    hold to `format`; default false), `where` (`reply`, all of it, or `block`, its only fenced
    block) or `path` (a declared file), `timeout_s`.
    """
    allowed(check, "schema", "answer", "formats", "where", "path", "timeout_s")
    schema, formats = check.params.get("schema"), check.params.get("formats", False)
    if not isinstance(schema, (bool, Mapping)):
        raise UsageError(f"check 'json_schema' wants a table as 'schema', got {schema!r:.80}.")
    if not isinstance(formats, bool):
        raise UsageError(f"check 'json_schema' wants true or false as 'formats', got {formats!r}.")
    try:
        text = await submitted(check, subject, "json")
    except Unreadable as error:
        return Finding(value=0.0, evidence={"refused": str(error)})
    answer = [check.params["answer"]] if "answer" in check.params else []
    found = await decided(
        tools, JUDGE, (text, schema, formats, answer), ("null", schema, formats, answer),
        timeout_s=seconds_of(check),
    )  # fmt: skip
    if found.refused:
        return Finding(value=0.0, evidence={"refused": found.refused})
    if "fault" in found.answer:
        raise UsageError(f"check 'json_schema' wants a JSON Schema: {found.answer['fault']}.")
    why = found.answer["why"]
    return Finding(value=float(not why), evidence={"refused": why} if why else {})


# --- in a worker ----------------------------------------------------------------------------------


class _Fault(Exception):
    """The schema is none."""


def judged(text: str, schema: Json, formats: bool, answer: Json) -> Json:
    """`{"why": …}`, '' where the text is an instance (and the only element of `answer`, if it has
    one), or `{"fault": …}` of the schema; for workers only.
    """
    try:
        validator = _validator(json.dumps(schema), formats)
    except _Fault as fault:
        return {"fault": str(fault)}
    try:
        instance = documents.json_value(text)
    except Unreadable as error:
        return {"why": str(error)}
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(usual + FRAMES * documents.MAX_DEPTH)
    try:
        wrong = next(validator.iter_errors(instance), None)
    except RecursionError:
        return {"fault": "it refers to itself without an end"}
    finally:
        sys.setrecursionlimit(usual)
    if wrong is not None:
        return {"why": f"{wrong.json_path[:200]}: {wrong.message[:300]}"}
    if answer and not same_json(answer[0], instance):
        return {"why": f"another value: {text[:300]}"}
    return {"why": ""}


@functools.lru_cache(maxsize=256)
def _validator(text: str, formats: bool) -> Any:
    """A validator of a schema that is one, and refers to nothing outside."""
    schema = json.loads(text)
    kind: Any = validator_for(schema, default=None)
    if isinstance(schema, bool) or "$schema" not in schema:
        kind = jsonschema.Draft202012Validator
    if kind is None:
        raise _Fault(f"the draft {schema['$schema']!r:.80} is not known")
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise _Fault(f"at {error.json_path}: {error.message:.300}") from None
    try:
        resource = referencing.Resource.from_contents(schema, default_specification=DRAFT202012)
        resolver = SPECIFICATIONS.resolver_with_root(resource)
        used = set(_looked_up(resource, resolver))
    except referencing.exceptions.Unresolvable as error:
        raise _Fault(f"it refers to {error.ref!r:.200}, which is not in it") from None
    unchecked = used - set(kind.FORMAT_CHECKER.checkers) if formats else ()
    if unchecked:
        raise _Fault(f"the formats {sorted(unchecked)} cannot be checked here")
    return kind(
        schema,
        registry=referencing.Registry(),
        format_checker=kind.FORMAT_CHECKER if formats else None,
    )


def _looked_up(resource: Any, resolver: Any) -> Iterator[str]:
    """Follows every reference within a schema; gives the formats that it names."""
    if isinstance(resource.contents, Mapping):
        for keyword in REFERENCES:
            if isinstance(resource.contents.get(keyword), str):
                resolver.lookup(resource.contents[keyword])
        if isinstance(resource.contents.get("format"), str):
            yield resource.contents["format"]
    for inner in resource.subresources():
        yield from _looked_up(inner, resolver.in_subresource(inner))
