import asyncio
import contextlib
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.core.task import Check, Description, Tool, ToolCall
from posttrain.core.trajectory import Turn
from posttrain.verify import written_calls
from posttrain.verify.documents import Unreadable
from posttrain.verify.kinds import Subject
from posttrain.verify.tool_calls import _ensure, judged, tool_calls

BFCL = Path(__file__).parents[3] / "shared" / "data" / "bfcl"
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "limit": {"type": "number"},
            "places": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
    },
}  # fmt: skip
STOP = {"name": "stop.now", "parameters": {"properties": {}}}
CALL = {"weather": {"city": ["Oslo", "Oslo, Norway"], "days": [3, ""]}}


@pytest.fixture
def value(find):
    def run(reply, *expected, **params):
        params = {"expected": list(expected), "tools": [WEATHER, STOP]} | params
        return find(tool_calls, Check(kind="tool_calls", params=params), reply).value

    return run


@pytest.mark.parametrize(
    ("reply", "worth"),
    [
        ('weather(city="Oslo")', 1.0),
        ("weather('Oslo, Norway', 3)", 1.0),
        ('[weather(days=3, city="Oslo")]', 1.0),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}', 1.0),
        ('[{"name": "weather", "arguments": {"city": "Oslo"}}]', 1.0),
        ('weather(city="oslo")', 0.0),
        ('weather(city="Oslo", days=3.0)', 0.0),
        ('weather(city="Oslo", days="3")', 0.0),
        ('weather(city="Oslo", days=True)', 0.0),
        ('weather(city="Oslo", limit=1)', 0.0),
        ("weather(days=3)", 0.0),
        ('weather(city=["Oslo"])', 0.0),
        ('weather(city="Oslo"); stop.now()', 0.0),
        ('weather(city="Oslo") or weather(city="Rome")', 0.0),
        ('I call weather(city="Oslo")', 0.0),
        ('weather(city="Os" + "lo")', 0.0),
        ('weather(**{"city": "Oslo"})', 0.0),
        ('weather("Oslo", city="Oslo")', 0.0),
        ('{"name": "weather", "arguments": {"city": "Oslo"}, "arguments": {"city": "Rome"}}', 0.0),
        ("stop.now()", 0.0),
        ("", 0.0),
        ("(" * 5000, 0.0),
        ("weather(city=" + "-" * 20000 + "1)", 0.0),
        ("weather(limit=1e999)", 0.0),
    ],
)
def test_a_written_call_is_right_or_worth_nothing(reply, worth, value):
    assert value(reply, CALL) == worth


def test_whole_numbers_are_taken_for_fractions_and_not_the_reverse(value):
    expected = {"weather": {"city": ["Oslo"], "limit": [2.0], "places": [[1, 2]]}}
    assert value("weather(city='Oslo', limit=2, places=[1, 2])", expected) == 1.0
    assert value("weather(city='Oslo', limit=2.0, places=(1, 2))", expected) == 1.0
    assert value("weather(city='Oslo', limit=2, places=[1.0, 2])", expected) == 0.0
    assert value("weather(city='Oslo', limit=2, places=[2, 1])", expected) == 0.0


def test_parallel_calls_come_in_any_order_unless_it_is_given(value):
    wide, narrow = {"weather": {"city": ["a", "b"]}}, {"weather": {"city": ["a"]}}
    two = "[weather(city='{}'), weather(city='{}')]"
    assert value(two.format("a", "b"), wide, narrow) == 1.0
    assert value(two.format("b", "a"), wide, narrow) == 1.0
    assert value(two.format("a", "b"), narrow, wide, order="given") == 1.0
    assert value(two.format("b", "a"), narrow, wide, order="given") == 0.0
    assert value(two.format("b", "b"), wide, narrow) == 0.0
    assert value("weather(city='a')", wide, narrow) == 0.0


def test_where_no_call_is_right_something_else_is_said(value):
    assert value("None of the tools can do that.") == 1.0
    for reply in ("", " ", "stop.now()", "I try stop.now() first", '[{"name": "stop.now"}]',
                  '{"name": "other", "arguments": {}}'):  # fmt: skip
        assert value(reply) == 0.0, reply


def test_loose_text_forgives_what_the_leaderboard_forgives(value):
    assert value("weather(city='oslo  norway')", CALL, loose_text=True) == 1.0
    assert value("weather(city='Oslo2')", CALL, loose_text=True) == 0.0


def test_a_block_of_the_reply_can_hold_the_calls(value):
    reply = "I look.\n```python\nweather(city='Oslo')\n```\n"
    assert value(reply, CALL, where="block") == 1.0
    assert value(reply, CALL) == 0.0


def test_calls_that_were_made_count_all_together(make_attempt, tools):
    tool = Tool(kind="shell", description="", **WEATHER)
    right = ToolCall(id="1", name="weather", arguments={"city": "Oslo"})
    other = ToolCall(id="2", name="look", arguments={})
    broken = ToolCall(id="3", name="weather", arguments=None, error="no JSON")

    def worth(*calls, **params):
        made = make_attempt("done")
        task = replace(made.task, executor="tools",
                       description=Description(objective="x", tools=(tool,)))  # fmt: skip
        turns = tuple(Turn(text="", tool_calls=(call,)) for call in calls)
        subject = Subject(trajectory=replace(made, task=task, turns=(*turns, Turn(text="done"))))
        check = Check(kind="tool_calls", params={"expected": [CALL]} | params)
        return asyncio.run(tool_calls(check, subject, tools)).value

    assert worth(right) == 1.0
    assert worth() == worth(right, right) == worth(broken) == worth(right, other) == 0.0
    assert worth(right, other, ignore=["look"]) == 1.0


@pytest.mark.parametrize(
    "params",
    [
        {"expected": None},
        {"expected": [{"other": {}}]},
        {"expected": [{"weather": {"city": "Oslo"}}]},
        {"expected": [{"weather": {"city": []}}]},
        {"expected": [{"weather": {}}]},
        {"expected": [{"weather": {"city": ["a"], "speed": [1]}}]},
        {"expected": [CALL], "order": "some"},
        {"expected": [CALL], "where": "mind"},
        {"expected": [CALL], "tools": ["weather"]},
        {"expected": [CALL], "tools": 5},
        {"expected": [CALL], "ignore": [1]},
        {"expected": [CALL], "ignore": ["weather"]},
        {"expected": [CALL], "timeout_s": True},
        {"expected": [CALL], "timeout_s": float("inf")},
        {"expected": [CALL], "loose_text": "yes"},
        {"expected": [CALL], "odrer": "any"},
    ],
)
def test_what_the_task_declares_wrongly_is_an_error(params, find):
    params = {"tools": [WEATHER]} | params
    with pytest.raises(UsageError):
        find(tool_calls, Check(kind="tool_calls", params=params), "weather(city='Oslo')")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), PLAIN))
def test_a_call_written_in_python_or_json_reads_as_itself(arguments):
    python = f"f.g({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    assert written_calls.read(python, {}) == [("f.g", arguments)]
    text = json.dumps({"name": "f.g", "arguments": arguments})
    assert written_calls.read(text, {}) == [("f.g", arguments)]


@given(st.text(alphabet="fg(){}[]=,.'\"1:-\n ;x\x00\\", max_size=40))
def test_no_text_is_more_than_unreadable(text):
    with contextlib.suppress(Unreadable):
        written_calls.read(text, {"f": ["x"]})


# --- the leaderboard's own tasks ------------------------------------------------------------------

COUNTS = {
    "simple_python": (400, 400), "simple_java": (100, 100), "simple_javascript": (50, 50),
    "multiple": (200, 200), "parallel": (200, 200), "parallel_multiple": (198, 200),
    "live_simple": (256, 258), "live_multiple": (1051, 1053), "live_parallel": (16, 16),
    "live_parallel_multiple": (24, 24),
}  # fmt: skip
"""Paid oracles of tasks; six tasks have values of parameters that their tools do not have, or
no possible value."""


def lines(path):
    for place in (BFCL / f"{path}.jsonl", BFCL / f"{path}.jsonl.gz"):
        if place.exists():
            data = place.read_bytes()
            data = gzip.decompress(data) if place.suffix == ".gz" else data
            return [json.loads(line) for line in data.splitlines()]
    raise FileNotFoundError(path)


def chosen(value):
    """The first of the possible values, at every depth."""
    if isinstance(value, dict):
        firsts = {key: one[0] if isinstance(one, list) else one for key, one in value.items()}
        return {key: chosen(one) for key, one in firsts.items() if one != ""}
    return [chosen(one) for one in value] if isinstance(value, list) else value


def oracle(call, schemas):
    ((name, values),) = call.items()
    found = {}
    for key, possible in values.items():
        required = key in schemas[name].get("required", ())
        if possible[0] != "" or required:
            found[key] = chosen(next((one for one in possible if one != ""), ""))
    return name, found


def mutants(calls, expected):
    """Calls that are wrong, each in one way."""
    for n, (name, arguments) in enumerate(calls):
        for key, value in arguments.items():
            possible = expected[n][name][key]
            other = (not value if isinstance(value, bool) else value + 91
                     if isinstance(value, (int, float)) else [value, "zz"])  # fmt: skip
            if other not in possible:
                yield [*calls[:n], (name, arguments | {key: other}), *calls[n + 1 :]]
            typed = [value] if isinstance(value, str) else json.dumps(value)
            if typed not in possible:
                yield [*calls[:n], (name, arguments | {key: typed}), *calls[n + 1 :]]
            if "" not in possible:
                rest = {one: arguments[one] for one in arguments if one != key}
                yield [*calls[:n], (name, rest), *calls[n + 1 :]]
        yield [*calls[:n], (name, arguments | {"zz": 1}), *calls[n + 1 :]]
        yield [*calls[:n], (name + "_x", arguments), *calls[n + 1 :]]
        yield [*calls, (name, arguments)]
        yield [*calls[:n], *calls[n + 1 :]]


def order_of(expected, schemas, ordered=False):
    return {"expected": expected, "ordered": ordered, "schemas": schemas, "ignore": [],
            "loose": False}  # fmt: skip


@pytest.mark.skipif(not BFCL.exists(), reason="no shared data")
@pytest.mark.parametrize("category", COUNTS)
def test_possible_answers_of_the_leaderboard_pay_and_their_mutants_do_not(category):
    tasks = {task["id"]: task["function"] for task in lines(f"BFCL_v4_{category}")}
    paid, survived = 0, []
    for answer in lines(f"possible_answer/BFCL_v4_{category}"):
        schemas = {one["name"]: one["parameters"] for one in tasks[answer["id"]]}
        expected = answer["ground_truth"]
        try:
            for call in expected:
                _ensure(call, schemas)
        except UsageError:
            continue
        calls = [oracle(call, schemas) for call in expected]
        order = order_of(expected, schemas)
        written = json.dumps([{"name": n, "arguments": a} for n, a in calls])
        if judged(written, order)["why"]:
            survived.append((answer["id"], judged(written, order)["why"]))
            continue
        paid += 1
        survived += [(answer["id"], one) for one in mutants(calls, expected)
                     if not judged([list(call) for call in one], order)["why"]]  # fmt: skip
    assert (paid, len(tasks)) == COUNTS[category], survived
    assert survived == []


@pytest.mark.skipif(not BFCL.exists(), reason="no shared data")
@pytest.mark.parametrize(("category", "count"), [("irrelevance", 240), ("live_irrelevance", 884)])
def test_where_no_function_of_the_leaderboard_helps_any_call_pays_nothing(category, count):
    tasks = lines(f"BFCL_v4_{category}")
    assert len(tasks) == count
    for task in tasks:
        schemas = {one["name"]: one["parameters"] for one in task["function"]}
        order = order_of([], schemas)
        assert not judged("None of the functions can do that.", order)["why"]
        for name in schemas:
            assert judged(f"{name}()", order)["why"]
            assert judged([[name, {}]], order)["why"]


@pytest.mark.skipif(not BFCL.exists(), reason="no shared data")
@pytest.mark.parametrize("category", ["base", "long_context", "miss_func", "miss_param"])
def test_calls_of_several_turns_are_held_to_their_order(category):
    listed = [one for path in sorted((BFCL / "multi_turn_func_doc").glob("*.jsonl"))
              for one in map(json.loads, path.read_text().splitlines())]  # fmt: skip
    schemas = {one["name"]: one["parameters"] for one in listed}
    names = {name: list(schema["properties"]) for name, schema in schemas.items()}
    answers = lines(f"possible_answer/BFCL_v4_multi_turn_{category}")
    assert len(answers) == 200
    for answer in answers:
        calls = [call for turn in answer["ground_truth"] for one in turn
                 for call in written_calls.read(one, names)]  # fmt: skip
        expected = [{name: {key: [one] for key, one in given.items()}} for name, given in calls]
        order = order_of(expected, schemas, ordered=True)
        made = [list(call) for call in calls]
        assert not judged(made, order)["why"]
        assert judged(made[::-1], order)["why"] or made == made[::-1]
        assert judged(made[1:], order)["why"]
