import asyncio

import pytest

from posttrain.core.errors import UsageError
from posttrain.core.task import Check
from posttrain.verify.kinds import REPLY_KINDS, Subject, Tools


def value(kind, reply, attempt, clock, **params):
    check = Check(kind=kind, params=params)
    subject = Subject(trajectory=attempt(reply, prefix="Answer:", objective="Add one and one up."))
    finding = asyncio.run(REPLY_KINDS[kind](check, subject, Tools(clock=clock)))
    return finding.value


def test_an_exact_answer_is_paid_after_the_prefix(make_attempt, clock):
    assert value("exact", " two\n\nsince", make_attempt, clock, answer="two") == 1.0
    assert value("exact", "Answer: two", make_attempt, clock, answer="two") == 1.0
    assert value("exact", "Two", make_attempt, clock, answer="two") == 0.0
    assert value("exact", "Two", make_attempt, clock, answer="two", ignore_case=True) == 1.0
    assert value("exact", "two or three", make_attempt, clock, answer="two") == 0.0


def test_numbers_choices_and_boxes_are_compared_by_their_kind(make_attempt, clock):
    assert value("numeric", "2.0", make_attempt, clock, answer="2") == 1.0
    assert value("numeric", "2 3", make_attempt, clock, answer="2") == 0.0
    assert value("numeric", r"I say \boxed{2}", make_attempt, clock, answer="2", where="boxed") == 1
    assert value("choice", "B)", make_attempt, clock, answer="B", labels=["A", "B"]) == 1.0
    assert value("choice", "A B", make_attempt, clock, answer="B", labels=["A", "B"]) == 0.0


@pytest.mark.parametrize("kind", ["exact", "numeric"])
@pytest.mark.parametrize(
    "reply", ["", " \n", "Answer:", "Add one and one up.", "Add one and one up. 2"]
)
def test_empty_and_echoed_replies_pay_nothing(kind, reply, make_attempt, clock):
    assert value(kind, reply, make_attempt, clock, answer="2") == 0.0


def test_an_echo_that_is_the_right_answer_is_paid(make_attempt, clock):
    said = "Answer: Add one and one up."
    assert value("exact", said, make_attempt, clock, answer="Add one and one up.") == 1.0
    assert value("exact", said, make_attempt, clock, answer="Add one.") == 0.0


def test_an_unknown_or_missing_parameter_is_the_tasks_mistake(make_attempt, clock):
    with pytest.raises(UsageError, match="did you mean 'answer'"):
        value("exact", "2", make_attempt, clock, anser="2")
    with pytest.raises(UsageError, match="wants text as 'answer'"):
        value("exact", "2", make_attempt, clock)
    with pytest.raises(UsageError, match="'where'"):
        value("exact", "2", make_attempt, clock, answer="2", where="anywhere")
    with pytest.raises(UsageError, match="labels"):
        value("choice", "B", make_attempt, clock, answer="B")
    with pytest.raises(UsageError, match="labels"):
        value("choice", "B", make_attempt, clock, answer="B", labels=["A", "B", "b"])
    with pytest.raises(UsageError, match="labels"):
        value("choice", "B", make_attempt, clock, answer="B", labels=["", "B"])
    with pytest.raises(UsageError, match="'ignore_case'"):
        value("exact", "2", make_attempt, clock, answer="2", ignore_case="no")
    with pytest.raises(UsageError, match="wants text as 'answer'"):
        value("exact", "2", make_attempt, clock, answer=" ")


@pytest.mark.parametrize(
    ("said", "worth"),
    [("B", 1.0), ("(b)", 1.0), ("B: granite", 1.0), ("B - granite", 1.0), ("B – a rock", 1.0),
     ("B!", 1.0), ("B - C", 0.0), ("B – granite, or A", 0.0), ("B-C", 0.0), ("Option B", 0.0),
     ("C - granite, B", 0.0), ("\uff22", 0.0), ("\u0412", 0.0)],
)  # fmt: skip
def test_a_choice_is_a_label_and_perhaps_its_text(said, worth, make_attempt, clock):
    assert value("choice", said, make_attempt, clock, answer="B", labels=["A", "B", "C"]) == worth


def test_a_letter_is_the_same_composed_or_not(make_attempt, clock):
    assert value("exact", "cafe\u0301", make_attempt, clock, answer="caf\u00e9") == 1.0
    assert value("exact", "cafe", make_attempt, clock, answer="caf\u00e9") == 0.0


def test_guards_are_kinds_and_give_their_reason(make_attempt, clock):
    assert value("not_empty", "", make_attempt, clock) == 0.0
    assert value("not_echo", "add ONE and one up.", make_attempt, clock) == 0.0
    assert value("not_longer", "12345", make_attempt, clock, max_chars=4) == 0.0
    assert value("printable", "4\x1b", make_attempt, clock) == 0.0
    for kind, params in (("not_empty", {}), ("not_echo", {}), ("printable", {}),
                         ("not_longer", {"max_chars": 9})):  # fmt: skip
        assert value(kind, "2", make_attempt, clock, **params) == 1.0
