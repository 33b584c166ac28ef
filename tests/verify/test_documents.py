import contextlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.verify.documents import Unreadable, block, format_of, json_value, read

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(JSON)
def test_json_is_read_as_it_was_written(value):
    assert json_value(json.dumps(value)) == value
    assert json_value(json.dumps(value, ensure_ascii=False, indent=1)) == value


@given(st.text("[]{}\",:0123456789.eE-+ NaInfity/*'tru\\", max_size=12))
def test_what_is_read_is_what_the_library_reads_without_its_liberties(text):
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    try:
        found = json_value(text)
    except Unreadable:
        found = None
    if found is not None:
        assert found == expected
    elif expected is not None:
        assert "N" in text or "I" in text or not math.isfinite(_largest(expected)) or "{" in text


def _largest(value):
    if isinstance(value, list):
        return max(map(_largest, value), default=0.0)
    return abs(value) if isinstance(value, int | float) else 0.0


def test_a_block_is_the_only_one_that_is_closed_and_of_the_language():
    assert block("a\n```json\n{\n}\n```\nb", "json") == "{\n}\n"
    assert block("```\n1\n``` \n```python\n2\n```", "json") == "1\n"
    assert block("```JSON  \n```\n", "json") == ""
    for text in ("1", "```json\n1", "```json 1```", "```\n1\n```\n```\n2\n```", "a ```\n1\n```"):
        with pytest.raises(Unreadable, match="fenced blocks, wanted one"):
            block(text, "json")


def test_many_openings_cost_no_time():
    with pytest.raises(Unreadable):
        block("```json\n" * 100_000, "json")


GOOD = {
    "toml": ("a = 1\n[b]\nc = [1.5, true, 2020-01-02T03:04:05]",
             {"a": 1, "b": {"c": [1.5, True, "2020-01-02T03:04:05"]}}),
    "yaml": ("a: 1\nb:\n- x\n- {c: null, d: 2020-01-02}\n5: yes\n",
             {"a": 1, "b": ["x", {"c": None, "d": "2020-01-02"}], "5": True}),
    "csv": ('a,b\n1,"x,y"\n\n', [["a", "b"], ["1", "x,y"]]),
    "tsv": ("a\tb\n1\t2\n", [["a", "b"], ["1", "2"]]),
    "ini": ("[s]\nKey = %value\n[DEFAULT]\na = 1\n", {"s": {"Key": "%value"},
                                                      "DEFAULT": {"a": "1"}}),
    "json": ('{"a": [1]}', {"a": [1]}),
}  # fmt: skip


@pytest.mark.parametrize("how", GOOD)
def test_a_document_is_a_value(how):
    text, value = GOOD[how]
    assert read(text, how) == value


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("toml", "a = 1\na = 2"),
        ("toml", "a ="),
        ("toml", "a = " + "[" * 5000),
        ("yaml", "a: 1\na: 2"),
        ("yaml", "a: &x [1]\nb: *x"),
        ("yaml", "a: !!python/object/apply:os.system ['true']"),
        ("yaml", "a: 1\n---\nb: 2"),
        ("yaml", "[" * 3000),
        ("yaml", "? [1, 2]\n: 3"),
        ("yaml", "1: a\n'1': b"),
        ("yaml", "1: a\n0x1: b"),
        ("yaml", "yes: a\ntrue: b"),
        ("yaml", "1: a\n1.0: b"),
        ("yaml", "a: 1\n<<: {a: 2}"),
        ("yaml", "2020-99-99"),
        ("yaml", "a: !!binary aGk="),
        ("csv", 'a,"b'),
        ("ini", "[a]\nb = 1\n[a]\nc = 2"),
        ("ini", "[a]\nb = 1\nb = 2"),
        ("ini", "b = 1"),
        *((how, f"\ufeff{text}") for how, (text, _) in GOOD.items()),
    ],
)
def test_what_its_format_does_not_allow_is_no_document(how, text):
    with pytest.raises(Unreadable):
        read(text, how)


def test_no_section_of_an_ini_file_speaks_for_the_others():
    """A section named NUL was the parser's own of defaults: its options stood in all sections."""
    assert read("[\0]\nport = 80\n[s]\n", "ini") == {"\0": {"port": "80"}, "s": {}}


def test_rows_with_a_header_are_objects():
    assert read("a,b\n1,2\n", "csv", header=True) == [{"a": "1", "b": "2"}]
    for text in ("", "a,a\n1,2", "a,b\n1", "a,b\n1,2,3"):
        with pytest.raises(Unreadable):
            read(text, "csv", header=True)


def test_the_format_is_told_by_the_name_or_by_the_task():
    assert (format_of("a/b.JSON"), format_of("x.yml")) == ("json", "yaml")
    with pytest.raises(UsageError, match="tells no format"):
        format_of("out.txt")
    with pytest.raises(UsageError, match="did you mean 'json'"):
        read("", "jsn")


PARTS = ["a", "b", ":", " ", "\n", "-", "[", "]", "{", "}", ",", "=", '"', "'", "1", ".", "#", "&x",
         "*x", "!!set", "!!omap", "!!int", "!!timestamp", "<<", "?", "|", "2020-02-30", "1e999",
         "\t", "\0", "[s]", "~", ".inf", "1_0", "0x", "12:30:45", "%", "é", "\u2028"]  # fmt: skip


@settings(max_examples=400)
@given(st.lists(st.sampled_from(PARTS), max_size=10).map("".join), st.booleans())
def test_whatever_is_left_is_a_document_or_none(text, header):
    """What raises here a policy could choose over reward 0."""
    for how in GOOD:
        with contextlib.suppress(Unreadable):
            json.dumps(read(text, how, header=header), allow_nan=False)
