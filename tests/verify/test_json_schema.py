import asyncio
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.errors import UsageError, VerifierError, WorkerError
from posttrain.core.task import Check
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.json_schema import json_schema, judged
from posttrain.verify.kinds import Subject, Tools
from posttrain.verify.stack import Stack

PERSON = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer"}},
    "additionalProperties": False,
}
SUITE = Path(__file__).parents[3] / "shared" / "data" / "json_schema_suite" / "groups.jsonl.gz"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.fixture
def value(find):
    def run(reply, schema=PERSON, **params):
        check = Check(kind="json_schema", params={"schema": schema} | params)
        return find(json_schema, check, reply).value

    return run


def test_a_reply_that_is_an_instance_is_paid(value):
    assert value('{"name": "Ada", "age": 36}') == 1.0
    assert value(' {"name": "Ada"}\n') == 1.0
    assert value('{"name": ""}') == 0.0
    assert value('{"name": "Ada", "aged": 36}') == 0.0


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "Ada",
        '{"name": "Ada"} and more',
        '{"name": "Ada"}{"name": "Eve"}',
        '```json\n{"name": "Ada"}\n```',
        '{"name": "Eve", "name": "Ada"}',
        "{'name': 'Ada'}",
        '{"name": "Ada",}',
        '{"name": "Ada", "age": NaN}',
        '{"name": "Ada", "age": 1e999}',
        '// Ada\n{"name": "Ada"}',
    ],
)
def test_what_is_nearly_json_is_none(reply, value):
    assert value(reply) == 0.0


def test_numbers_without_end_are_no_numbers_even_where_anything_goes(value):
    for reply in ("NaN", "Infinity", "-Infinity", "1e999", "[" * 101 + "]" * 101):
        assert value(reply, schema=True) == 0.0
    assert value("[" * 100 + "]" * 100, schema=True) == 1.0


def test_the_only_block_is_the_answer_where_the_check_says_so(value):
    block = '```json\n{"name": "Ada"}\n```\n'
    assert value(f"Here:\n{block}Done.", where="block") == 1.0
    assert value(block + block, where="block") == 0.0
    assert value('{"name": "Ada"}', where="block") == 0.0


def test_a_declared_file_is_read_instead_of_the_reply(value, workspace):
    (workspace / "out.json").write_text('{"name": "Ada"}')
    (workspace / "bytes").write_bytes(b'"\xff"')
    assert value("", path="out.json") == 1.0
    assert value('{"name": "Ada"}', path="none.json") == 0.0
    assert value("", schema=True, path="bytes") == 0.0
    with pytest.raises(UsageError, match="both 'path' and 'where'"):
        value("", path="out.json", where="reply")


def test_the_answer_is_compared_by_type_but_1_and_1_0_are_one_number(value):
    assert value("1.0", schema=True, answer=1) == 1.0
    assert value("true", schema=True, answer=1) == 0.0
    assert value("[1, 2]", schema=True, answer=[2, 1]) == 0.0
    assert value("null", schema=True, answer=None) == 1.0
    assert value("0", schema=True, answer=None) == 0.0
    assert value("9007199254740993", schema=True, answer=9007199254740992.0) == 0.0


def test_formats_are_held_to_only_where_the_check_says_so(value):
    schema = {"format": "ipv4"}
    assert value('"300.1.1.1"', schema) == 1.0
    assert value('"300.1.1.1"', schema, formats=True) == 0.0
    with pytest.raises(UsageError, match=r"\['shoe-size'\] cannot be checked"):
        value('"43"', {"items": {"format": "shoe-size"}}, formats=True)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("object", "wants a table as 'schema'"),
        ({"type": "objekt"}, r"at \$.type"),
        ({"pattern": "("}, r"at \$.pattern"),
        ({"$schema": "https://example.org/own"}, "draft 'https://example.org/own' is not known"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "refers to '/"),
        ({"items": {"$ref": "https://example.org/b.json"}}, "refers to 'https://example.org/b.js"),
        ({"$ref": "#"}, "without an end"),
    ],
)
def test_a_bad_schema_is_the_tasks_mistake_whatever_the_reply(schema, told, value):
    with pytest.raises(UsageError, match=told):
        value("1", schema)


def test_parameters_are_looked_at(value):
    with pytest.raises(UsageError, match="did you mean 'schema'"):
        value("1", scema=True)
    with pytest.raises(UsageError, match="no 'where' 'line'"):
        value("1", where="line")
    with pytest.raises(UsageError, match="'formats'"):
        value("1", formats="yes")


def test_the_draft_is_the_one_that_the_schema_names(value):
    prefixed = {"items": [{"type": "integer"}], "additionalItems": False}
    assert value("[1, 2]", {"$schema": DRAFT_7, **prefixed}) == 0.0
    with pytest.raises(UsageError, match=r"at \$.items"):  # no list in 2020-12
        value("[1, 2]", prefixed)


def test_what_failed_is_named_by_its_place():
    found = judged('{"a": [1, "x"]}', {"properties": {"a": {"items": {"type": "integer"}}}}, 0, [])
    assert found["why"].startswith("$.a[1]: 'x' is not of type 'integer'")


def test_a_text_on_which_a_pattern_never_ends_pays_0(make_attempt):
    """A policy could choose `verifier_failed` over reward 0 by what it wrote."""
    check = Check(kind="json_schema", params={"schema": {"pattern": "^(a+)+$"}, "timeout_s": 0.5})

    async def verdict(reply):
        async with ProcessWorkers() as workers:
            tools = Tools(clock=RealClock(), workers=workers)
            return await Stack(tools).verify(make_attempt(reply, checks=[check]), None)

    found = asyncio.run(verdict(f'"{"a" * 60}!"'))
    assert (found.reward, found.errors) == (0.0, ())
    assert "ran past its time limit" in found.components[0].evidence["refused"]
    assert asyncio.run(verdict('"aaaa"')).reward == 1.0


def test_without_workers_or_with_broken_ones_there_is_no_verdict(make_attempt, clock):
    class Broken:
        async def call(self, function, *arguments, timeout_s):
            raise WorkerError("died")

    subject = Subject(trajectory=make_attempt("1"))
    check = Check(kind="json_schema", params={"schema": True})
    with pytest.raises(VerifierError, match="wants workers"):
        asyncio.run(json_schema(check, subject, Tools(clock=clock)))
    with pytest.raises(WorkerError):
        asyncio.run(json_schema(check, subject, Tools(clock=clock, workers=Broken())))


@pytest.mark.skipif(not SUITE.exists(), reason="no shared data")
def test_it_agrees_with_the_test_suite_of_json_schema():
    """Optional parts and remote references aside; five instances are of schemas with `\\p{…}`,
    which Python's patterns do not have: they are refused, not misread.
    """
    counts = Counter()
    for line in gzip.decompress(SUITE.read_bytes()).splitlines():
        group = json.loads(line)
        schema = group["schema"]
        if group["file"].startswith("optional/") or "localhost:1234" in json.dumps(schema):
            continue
        if group["draft"] == "draft7" and isinstance(schema, dict):
            schema = {"$schema": DRAFT_7, **schema}
        for test in group["tests"]:
            found = judged(json.dumps(test["data"]), schema, False, [])
            if "fault" in found:
                assert r"\p{" in json.dumps(schema).replace("\\\\", "\\"), found
            counts["fault" if "fault" in found else (found["why"] == "") == test["valid"]] += 1
    assert counts == {True: 2135, "fault": 5}
