import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.verify.quantities import Amount, amount, same_amount


def test_an_amount_has_a_number_and_a_unit():
    assert amount("12.5 km") == Amount(Fraction(25, 2), "km")
    assert amount("$3.2 million") == Amount(Fraction(3_200_000), "USD")
    assert amount("(1,250)") == Amount(Fraction(-1250), in_brackets=True)
    assert amount("5 km or 6 km") is None
    assert amount("5" * 200 + " km") is None


@pytest.mark.parametrize(
    "unit", ["m^99999", "m**9**9", "m" * 41, "m)*(m", "__import__", "9", "m^-"]
)
def test_a_unit_is_a_short_product_of_small_powers(unit):
    assert amount(f"5 {unit}") is None


def test_conversion_is_exact():
    """Binary floating point has no 0.1 km: 100.00000000000001 m."""
    assert same_amount("0.1 km", "100 m")
    assert same_amount("1 mi", "1609.344 m")
    assert not same_amount("1 mi", "1609.3440000000001 m")
    assert same_amount("77 °F", "25 °C")
    assert not same_amount("77 °F", "25.0000000000000001 °C")


def test_tolerances_are_in_the_gold_answers_unit():
    assert same_amount("100 m", "0.1005 km", absolute=0.5)
    assert not same_amount("100 m", "0.1006 km", absolute=0.5)
    assert same_amount("0 °C", "274 K", absolute=1)


def test_a_tasks_mistakes_are_no_verdict():
    with pytest.raises(UsageError, match="gold answer"):
        same_amount("5 apples", "5 apples")
    with pytest.raises(UsageError, match="got both"):
        same_amount("5 %", "5", optional=True, percent=True)


AMOUNTS = st.from_regex(
    re.compile(r"[-−(]?[$€]?[0-9]{1,4}[.,/]?[0-9]{0,4}[)]? ?[a-zA-Zµ°%^*/· 0-9]{0,12}"),
    fullmatch=True,
)


@settings(max_examples=300, deadline=None)
@given(AMOUNTS | st.text(max_size=60))
def test_no_answer_makes_it_raise(text):
    for gold in ("5", "5 km", "45 %", "25 °C", "$5"):
        same_amount(gold, text)
        same_amount(gold, text, optional=True)


@given(st.fractions(max_denominator=10**4), st.sampled_from(["km", "°C", "kWh", "%", "USD", "m/s"]))
def test_an_amount_is_equal_to_its_own_writing_and_to_no_other(value, unit):
    assert same_amount(f"{value} {unit}", f"{value} {unit}")
    assert not same_amount(f"{value} {unit}", f"{value + 1} {unit}")
    assert not same_amount(f"{value} {unit}", f"{value}")
