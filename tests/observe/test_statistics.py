import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.observe.statistics import (
    Interval,
    holm,
    mcnemar_exact,
    paired_permutation,
    quantile,
    wilson,
)


def test_wilson_solves_its_defining_equation() -> None:
    # the bounds p are where |p̂ - p| = z · sqrt(p (1 - p) / n)
    z = 1.959963984540054
    for successes, n in ((1, 10), (8, 10), (37, 128), (127, 128)):
        interval = wilson(successes, n)
        for bound in (interval.low, interval.high):
            assert abs(successes / n - bound) == pytest.approx(
                z * math.sqrt(bound * (1 - bound) / n), rel=1e-9
            )
        assert interval.low < successes / n < interval.high


def test_wilson_agrees_with_published_values() -> None:
    # Newcombe 1998, table I: 81/263, 15/148, 0/20, 1/29
    for successes, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        interval = wilson(successes, n)
        assert interval.low == pytest.approx(low, abs=5e-5)
        assert interval.high == pytest.approx(high, abs=5e-5)


def test_wilson_at_the_edges() -> None:
    assert wilson(0, 0) == Interval(0.0, 1.0)
    assert wilson(0, 5).low == 0.0
    assert wilson(5, 5).high == 1.0
    assert wilson(5, 10, 0.99).low < wilson(5, 10, 0.9).low
    with pytest.raises(UsageError, match="successes"):
        wilson(3, 2)
    with pytest.raises(UsageError, match="confidence"):
        wilson(1, 2, 95)


def test_mcnemar_equals_brute_force_over_all_outcomes() -> None:
    for n in range(1, 11):
        outcomes = [sum(bits) for bits in itertools.product((0, 1), repeat=n)]
        for b in range(n + 1):
            extreme = sum(abs(2 * ones - n) >= abs(2 * b - n) for ones in outcomes)
            assert mcnemar_exact(b, n - b) == pytest.approx(extreme / 2**n)


def test_mcnemar_by_hand() -> None:
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(0, 5) == 2 / 32
    assert mcnemar_exact(5, 0) == 2 / 32
    assert mcnemar_exact(3, 3) == 1.0
    assert mcnemar_exact(2, 10) == pytest.approx(2 * (1 + 12 + 66) / 4096)
    assert 0 < mcnemar_exact(100, 1000) < 1e-150


def test_holm_by_hand() -> None:
    adjusted = holm({"d": 0.04, "a": 0.01, "c": 0.03, "b": 0.005})
    assert adjusted == pytest.approx({"d": 0.06, "a": 0.03, "c": 0.06, "b": 0.02})
    assert list(adjusted) == ["d", "a", "c", "b"]
    assert holm({"x": 0.6, "y": 0.7}) == {"x": 1.0, "y": 1.0}
    assert holm({}) == {}


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=8))
def test_holm_never_lowers_keeps_order_and_stays_below_bonferroni(p: dict[str, float]) -> None:
    adjusted = holm(p)
    for name, value in p.items():
        assert value <= adjusted[name] <= min(1.0, len(p) * value) + 1e-12 or value == 0
        for other, there in p.items():
            if value < there:
                assert adjusted[name] <= adjusted[other]


def _brute_permutation(strata: dict[str, list[float]]) -> float:
    names = [name for name, values in strata.items() if values]

    def statistic(flat: list[float]) -> float:
        total, at = 0.0, 0
        for name in names:
            size = len(strata[name])
            total += sum(flat[at : at + size]) / size
            at += size
        return total / max(1, len(names))

    flat = [value for name in names for value in strata[name]]
    observed = abs(statistic(flat))
    totals = [
        abs(statistic([s * v for s, v in zip(signs, flat, strict=True)]))
        for signs in itertools.product((1, -1), repeat=len(flat))
    ]
    return sum(total >= observed - 1e-9 for total in totals) / len(totals)


@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), max_size=3),
        max_size=3,
    )
)
def test_permutation_equals_full_enumeration_when_small(strata: dict[str, list[float]]) -> None:
    assert paired_permutation(strata) == pytest.approx(_brute_permutation(strata))


def test_permutation_with_one_binary_stratum_is_mcnemar() -> None:
    differences = [1.0] * 9 + [-1.0] * 2 + [0.0] * 30
    assert paired_permutation({"only": differences}) == pytest.approx(mcnemar_exact(9, 2))


def test_sampled_permutation_agrees_with_exact_and_is_reproducible() -> None:
    strata = {"a": [1.0] * 40 + [-1.0] * 28 + [0.0] * 5, "b": [1.0] * 30 + [-1.0] * 26}
    exact = paired_permutation(strata, rounds=4_000)  # 69 × 57 = 3,933 distinct patterns
    sampled = paired_permutation(strata, seed=3, rounds=3_900)
    assert sampled == paired_permutation(strata, seed=3, rounds=3_900)
    assert sampled != exact
    assert sampled == pytest.approx(exact, abs=0.03)


def test_sampled_permutation_is_never_zero() -> None:
    strong = {name: [1.0 + 0.01 * i for i in range(40)] for name in "abcd"}
    assert paired_permutation(strong, rounds=999) == pytest.approx(1 / 1000)


def test_permutation_p_is_valid_under_the_null() -> None:
    chance = random.Random(5)
    small = 0
    for repeat in range(200):
        strata = {n: [chance.choice((-1.0, 0.0, 1.0)) for _ in range(12)] for n in "abc"}
        small += paired_permutation(strata, seed=repeat, rounds=199) <= 0.1
    assert small <= 34  # 20 expected, standard deviation 4.2


def test_quantile_by_hand() -> None:
    assert quantile([7], 0.3) == 7
    assert quantile([10, 0], 0.25) == 2.5
    assert quantile([1, 2, 3, 4, 5], 1.0) == 5
    assert quantile([1, 2, 3, 4, 5], 0.9) == pytest.approx(4.6)
    with pytest.raises(UsageError):
        quantile([], 0.5)
