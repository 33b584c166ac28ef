import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.verify import answers
from posttrain.verify.answers import Where
from posttrain.verify.quantities import same_amount


def test_line_takes_the_first_line_after_the_prefix():
    assert answers.extract("Answer: 7 \nIt is 7, or 8.", prefix="Answer:").text == "7"
    assert answers.extract(" 7\n8", prefix="Answer:").text == "7"
    assert answers.extract("\n\n 7").text == "7"


def test_reply_keeps_every_line():
    assert answers.extract(" 1 2\n3 4 ", where=Where.REPLY).text == "1 2\n3 4"


@pytest.mark.parametrize("reply", ["", "  \n\t", "Answer:", "Answer:  \n"])
def test_an_empty_reply_has_no_answer(reply):
    assert answers.extract(reply, prefix="Answer:").text is None
    assert answers.extract(reply, prefix="Answer:").refusal == "empty"


def test_only_the_last_box_counts_and_it_counts_whole():
    """BR-29: first box in evaluation, last in training; nested braces cut; other box commands."""

    def boxed(text):
        return answers.extract(text, where=Where.BOXED).text

    assert boxed(r"\boxed{8}, no, slip: \boxed{9}") == "9"
    assert boxed(r"\boxed{\frac{3}{\sqrt{2}}}") == r"\frac{3}{\sqrt{2}}"
    assert boxed(r"\fbox{17}") == "17"
    assert boxed(r"\boxed{5") is None
    assert boxed(r"\boxed{4} and \boxed{5") is None
    assert boxed(r"\boxed{}") is None
    assert answers.same_choice("C", boxed(r"\boxed{\text{C}}"), "ABCD")
    assert answers.same_choice("C", boxed(r"\boxed{C: 12 m}"), "ABCD")
    assert not same_amount("9", boxed(r"\boxed{8 or 9}"))
    hedge = " ".join(rf"\boxed{{{n}}}" for n in range(1, 10))
    assert not same_amount("4", boxed(hedge))
    assert same_amount("9", boxed(hedge))


def test_escaped_braces_do_not_close_a_box():
    assert answers.last_box(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"


def test_text_equality_states_its_case_rule():
    assert answers.same_text("New York", " New   York ")
    assert not answers.same_text("yes", "Yes")
    assert answers.same_text("yes", "YES", ignore_case=True)
    assert not answers.same_text("", "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", Fraction(42)),
        ("-61", Fraction(-61)),
        ("−61", Fraction(-61)),
        ("+5", Fraction(5)),
        ("- 5", Fraction(-5)),
        ("1,234,567", Fraction(1234567)),
        ("1{,}234", Fraction(1234)),
        ("1,234.5", Fraction(2469, 2)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("3/-4", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"-\dfrac{1}{3}", Fraction(-1, 3)),
        (r"$\frac{244}{607}$", Fraction(244, 607)),
        ("$244/607$", Fraction(244, 607)),
        ("**12**", Fraction(12)),
        (r"\(12\)", Fraction(12)),
        ("$5", Fraction(5)),
        ("7.5%", Fraction(3, 40)),
        (r"7.5\%", Fraction(3, 40)),
        ("1.5e3", Fraction(1500)),
        ("2e-7", Fraction(2, 10**7)),
        ("3 × 10^2", Fraction(300)),
        (r"3 \times 10^{-2}", Fraction(3, 100)),
    ],
)
def test_a_number_is_read_exactly(text, value):
    assert answers.number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "-", ".", "abc", "8 or 9", "8, 9", "8 9", "1,23", "1,2345", "12,34,567", "1_000",
        "1/0", "1/2/3", "{4,9}", "x = 5", "5 m", "±5", "inf", "nan", "1e999999", "1e5000",
        "0x10", "١٢", "１２", "--5", "5-", "1" * 200, "1/3^{80}", "4\\sqrt{2}", "%", "5%%", "$$",
    ],
)  # fmt: skip
def test_what_is_not_one_number_is_none(text):
    assert answers.number(text) is None


def test_numeric_equality_is_exact_unless_a_tolerance_is_stated():
    """BR-30: matches on rounded values, tiny values, subsets and unparsable pairs."""
    same = same_amount
    assert not same("1e-7", "2e-7")
    assert not same("2e-7", "1e-7")
    assert not same("1/3", "0.33333")
    assert same("1/3", "0.33333", relative=1e-4)
    assert not same("4", "{4,9}")
    assert not same("4", r"4\sqrt{2}")
    assert not same("5", r"\pm 5")
    assert not same("214", "214.01")
    assert same("100", "100.4", absolute=0.5)
    assert not same("0", "0.001", relative=0.5)


def test_a_gold_answer_that_is_no_number_is_the_tasks_mistake():
    with pytest.raises(UsageError, match="gold"):
        same_amount("x", "x")
    with pytest.raises(UsageError, match="gold choice"):
        answers.same_choice("E", "E", "ABCD")
    with pytest.raises(UsageError, match="tolerances"):
        same_amount("1", "1", relative=math.nan)


def test_comparison_works_in_every_thread():
    """BR-26: a limit built on an alarm signal worked in the main thread only."""
    cases = [("1/3", r"\frac{1}{3}"), (r"7.5\%", r"7.5\%"), ("2", "3")]

    def compare_all():
        return [same_amount(gold, answer) for gold, answer in cases]

    right = [True, True, False]
    assert compare_all() == right
    with ThreadPoolExecutor(8) as pool:
        assert [future.result() for future in [pool.submit(compare_all) for _ in range(8)]] == [
            right
        ] * 8
    assert asyncio.run(asyncio.to_thread(compare_all)) == right


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("C", "C"), ("c", "C"), ("(C)", "C"), ("C.", "C"), ("C) because", "C"), ("[C]", "C"),
        ("**C**", "C"), (r"\text{C}", "C"), ("C: 12 m", "C"), ("C: a dog", "C"),
        ("C or D", None), ("C, D", None), ("C: not A", None), ("A B C D", None), ("Cat", None),
        ("The answer is C", None), ("", None), ("E", None),
    ],
)  # fmt: skip
def test_a_choice_is_one_label(text, label):
    assert answers.choice(text, "ABCD") == label


def test_word_labels_are_choices_too():
    assert answers.choice("yes", ("Yes", "No")) == "Yes"
    assert answers.choice("Yes, because all whales swim", ("Yes", "No")) == "Yes"
    assert answers.choice("Yes. No.", ("Yes", "No")) is None
    assert answers.choice("no, yes", ("Yes", "No")) is None
    assert answers.choice("Nobody", ("Yes", "No")) is None


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_equals_its_own_writing(value):
    assert answers.number(str(value)) == value
    assert same_amount(str(value), str(value))
    assert not same_amount(str(value), str(value + 1))


@given(st.integers(-(10**12), 10**12))
def test_grouping_digits_does_not_change_a_number(value):
    assert answers.number(f"{value:,}") == value


@given(st.text(max_size=150))
def test_no_text_makes_the_parser_raise(text):
    answers.number(text)
    answers.last_box(text)
    answers.choice(text, "ABCD")


@given(st.text(alphabet="ab{}\\", max_size=12).filter(lambda t: "\\" not in t))
def test_a_box_returns_what_balanced_text_was_put_into_it(text):
    depth, balanced = 0, True
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        balanced = balanced and depth >= 0
    if balanced and depth == 0:
        assert answers.last_box(rf"so \boxed{{{text}}} it is") == text
