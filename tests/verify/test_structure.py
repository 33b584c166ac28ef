import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.core.task import Check
from posttrain.verify.state import state
from posttrain.verify.structure import Rules, compared, same_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", 1.0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=6,
)


def differences(expected, found, **rules):
    base = {"ignore": [], "unordered": [], "absolute": 0.0, "relative": 0.0, "texts": False}
    return compared(expected, found, Rules.of(**base | rules)).told


@given(JSON, JSON)
def test_values_differ_nowhere_just_where_they_are_equal(one, other):
    found = compared(one, other, Rules())
    assert (found.told == ()) == same_json(one, other) == (found.equal == found.places)
    assert compared(one, one, Rules()).told == ()
    assert 0 <= found.equal <= found.places


@given(st.lists(JSON, max_size=4), st.lists(JSON, max_size=4))
def test_lists_in_any_order_are_equal_where_a_permutation_is(one, other):
    equal = any(same_json(list(some), other) for some in itertools.permutations(one))
    assert (differences(one, other, unordered=[""]) == ()) == equal


@given(st.lists(st.integers(0, 9), max_size=5), st.lists(st.integers(0, 9), max_size=5))
def test_a_tolerance_pairs_as_many_as_can_be_paired(one, other):
    near = len(one) == len(other) and any(
        all(abs(a - b) <= 1 for a, b in zip(some, other, strict=True))
        for some in itertools.permutations(one)
    )
    assert (differences(one, other, unordered=[""], absolute=1) == ()) == near


def test_differences_are_named_by_their_place():
    expected = {"a": {"b/c": [1, 2]}, "d": "x", "e": {}}
    found = {"a": {"b/c": [1, 3, 4]}, "d": 1, "f": {"g": 1}}
    assert differences(expected, found) == (
        "/a/b~1c/1: wanted 2, got 3", "/a/b~1c/2: unexpected 4", '/d: wanted "x", got 1',
        "/e: missing", '/f: unexpected {"g": 1}',
    )  # fmt: skip


def test_ignored_places_and_inner_orders_are_no_differences():
    expected = {"items": [{"id": 1, "tags": ["a", "b"]}, {"id": 2, "tags": []}], "at": "now"}
    found = {"items": [{"id": 9, "tags": []}, {"id": 8, "tags": ["b", "a"]}], "at": "then"}
    rules = {"ignore": ["/at", "/items/*/id"], "unordered": ["/items", "/items/*/tags"]}
    assert differences(expected, found, **rules) == ()
    assert differences(expected, found, **rules, absolute=0.5) == ()
    assert differences([1, 2], [3], unordered=[""], ignore=["/*"]) == ()
    rules["unordered"] = ["/items"]
    assert differences(expected, found, **rules) != ()


def test_numbers_are_near_and_nothing_else_is():
    assert differences([100, 1.0], [101, 1.04], relative=0.05) == ()
    assert differences([100], [106], relative=0.05) == ("/0: wanted 100, got 106",)
    assert differences([1], [True], absolute=1) != ()
    assert differences(["1"], ["1.01"], absolute=1) != ()
    assert differences(["1"], ["1.01"], absolute=1, texts=True) == ()


@pytest.fixture
def value(find, workspace):
    def run(text, expected, name="out.json", **params):
        (workspace / name).write_text(text)
        more = {"assert": "document_equals", "path": name, "expected": expected} | params
        return find(state, Check(kind="state", params=more))

    return run


def test_documents_of_every_format_are_compared_by_value(value):
    assert value("b = 1.0\na = [1]", {"a": [1], "b": 1}, "x.toml").value == 1.0
    assert value("a: [1]\nb: 1", {"a": [1], "b": 1}, "x.yaml").value == 1.0
    assert value("n,v\nb,2\na,1.00\n", [{"n": "a", "v": "1"}, {"n": "b", "v": "2"}], "x.csv",
                 header=True, unordered=[""], absolute=0.001).value == 1.0  # fmt: skip
    assert value("n,v\na,1\n", [["n", "v"], ["a", "2"]], "x.csv").value == 0.0
    assert value("a\n1.0\n", [["a"], ["1"]], "x.csv").value == 0.0
    assert value("[s]\nk = 1", {"s": {"k": "1"}}, "x.conf", format="ini").value == 1.0
    assert value('{"a": 1, "a": 1}', {"a": 1}).evidence["found"].startswith("no JSON")


def test_a_share_is_paid_only_where_it_is_declared(value):
    found = value('{"a": 1, "b": 3, "c": 4}', {"a": 1, "b": 2})
    assert found.value == 0.0
    assert found.evidence == {"differences": ["/b: wanted 2, got 3", "/c: unexpected 4"]}
    found = value('{"a": 1, "b": 3, "c": 4}', {"a": 1, "b": 2}, pays="share")
    assert found.value == pytest.approx(1 / 3)
    assert value("{}", {"a": 1}, pays="share").value == 0.0
    assert value("[]", {"a": 1}, pays="share").value == 0.0


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"unordered": ["items"]}, "JSON Pointer"),
        ({"ignore": "/a"}, "a list of JSON Pointers"),
        ({"absolute": -1}, "a tolerance of 0 or more"),
        ({"relative": True}, "a tolerance of 0 or more"),
        ({"header": "yes"}, "true or false as 'header'"),
        ({"format": "xml"}, "no format 'xml'"),
        ({"pays": "some"}, "pays 'all' or 'share'"),
        ({"unorderd": []}, "did you mean 'unordered'"),
    ],
)
def test_what_a_task_declares_wrongly_is_its_mistake(params, told, value):
    with pytest.raises(UsageError, match=told):
        value("{}", {}, **params)
