import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.verify.arithmetic import NoProgram, Number, Row, program


def value(text, rows=None):
    return program(text).value(lambda leaf: (rows or {}).get(leaf) or [leaf.value])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("2 ^ 3 ^ 2", 512),
        ("2**-2", Fraction(1, 4)),
        ("-2^2", -4),
        ("8 / 4 / 2", 1),
        ("1 - 2 - 3", -4),
        ("-(1 + 2) * -3", 9),
        ("12.5%", Fraction(1, 8)),
        ("subtract(193.5, const_100), divide(#0, const_100)", Fraction(935, 1000)),
        ("exp(1.1, 2), multiply(#0, const_m1)", Fraction(-121, 100)),
        ("add(1, 2), add(3, 4), multiply(#0, #1)", 21),
        ("greater(2, 1)", True),
        ("greater(1, 1)", False),
        ("add(1, 2) + 3", 6),
        ("exp(4, 0.5)", 2),
    ],
)
def test_a_program_has_an_exact_value(text, expected):
    assert value(text) == expected


def test_rows_are_folded():
    rows = {Row("net sales ( 1 )", fold): [Fraction(n) for n in (4, 1, 1)]
            for fold in ("sum", "average", "max", "min")}  # fmt: skip
    for fold, expected in (("sum", 6), ("average", 2), ("max", 4), ("min", 1)):
        assert value(f"table_{fold}(net sales ( 1 ), none)", rows) == expected
    assert value("table_sum(net sales ( 1 ), none), divide(#0, const_2)", rows) == 3


@pytest.mark.parametrize(
    "text",
    [
        "", "1 +", "(1", "1)", "1 2", "#0", "add(1, 2), #1", "add(1)", "add(1, 2, 3)", "1 / 0",
        "0 ^ -1", "(-8) ^ 0.5", "9 ^ 65", "9^60^2", "1" * 1001, "(" * 40 + "1" + ")" * 40,
        "greater(1, 2) + 1", "__import__('os')", "1e5", "sum(1, 2)", "const_x", "1 if 1 else 2",
        "-" * 200 + "1", "10^64^1 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64"
        " * 10^64 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64 * 10^64",
    ],
)  # fmt: skip
def test_what_is_no_program_has_no_value(text):
    with pytest.raises(NoProgram):
        value(text)


def test_leaves_are_all_that_enters():
    found = program("add(3, const_2), #0 * -4% - table_max(a, none)").leaves
    assert found == (
        Number(Fraction(3)), Number(Fraction(2), True), Number(Fraction(-4, 100)), Row("a", "max"),
    )  # fmt: skip


EXPRESSIONS = st.recursive(
    st.integers(0, 20).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        "({0[0]} {0[1]} {0[2]})".format
    ),
    max_leaves=8,
)  # fmt: skip


@given(EXPRESSIONS)
def test_plain_expressions_have_the_value_that_python_gives_them(text):
    assert value(text) == eval(text)  # made of digits, brackets and three signs


@given(st.text("0123456789.+-*/^(),#% addconst_", max_size=30))
def test_no_text_does_anything_but_have_a_value_or_none(text):
    with contextlib.suppress(NoProgram):
        value(text)
