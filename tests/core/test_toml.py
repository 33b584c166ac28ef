"""TOML with line numbers."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core import toml

TEXT = """\
name = "demo"  # a comment

[train]
steps = 3
"odd key" = 1
rates = [
  1e-5,
  2.0,
]
optim.lr = 0.1

[[domains]]
name = "gcd"

[[domains]]
name = "lcm"
text = '''
[not.a.section]
steps = 9
'''
[domains.levels]
easy = 1
"""


def test_every_key_and_section_has_its_line() -> None:
    document = toml.read(TEXT)
    assert document.tree == tomllib.loads(TEXT)
    assert document.duplicates == []
    lines = document.lines
    assert lines["name",] == 1
    assert lines["train",] == 3
    assert lines["train", "odd key"] == 5
    assert lines["train", "rates"] == 6
    assert lines["train", "optim", "lr"] == 10
    assert lines["domains", 0, "name"] == 13
    assert lines["domains", 1, "text"] == 17
    assert lines["domains", 1, "levels", "easy"] == 22
    assert ("not", "a", "section") not in lines


def test_all_duplicates_are_reported_not_only_the_first() -> None:
    document = toml.read("a = 1\nb = 2\na = 3\n[s]\nx = 1\n[s]\nx = 2\nb = 3\n")
    found = [
        (toml.dotted(twice.path), twice.first_line, twice.line) for twice in document.duplicates
    ]
    assert found == [("a", 1, 3), ("s", 4, 6), ("s.x", 5, 7)]
    assert document.tree == {"a": 1, "b": 2, "s": {"x": 1, "b": 3}}


def test_a_section_named_after_its_own_subsection_is_no_duplicate() -> None:
    text = "[a.b]\nx = 1\n[[a.c]]\ny = 1\n[a]\nz = 1\n"
    assert toml.read(text).duplicates == []


@pytest.mark.parametrize("text", ["a = ", "a = [1\nb = 2", "[a\nb = 1", "a = 1\na.b = 2", "= 3"])
def test_broken_text_is_refused(text: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        toml.read(text)


_plain = (
    st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
)
_tree = st.recursive(
    _plain | st.lists(_plain, max_size=3),
    lambda inner: st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=6), inner, max_size=3
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("ab.-é \"'\n\x7f", max_size=4), _tree, max_size=4))
def test_what_is_written_reads_back_equal(tree: dict[str, object]) -> None:
    assert toml.read(toml.write(tree)).tree == tree
