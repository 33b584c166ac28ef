import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.verify import guards

OBJECTIVE = "Find the greatest common divisor of 641 and 595 and give only that."


@pytest.mark.parametrize("reply", ["", " ", "\n\t", "\u200b", "\x00", "\ufeff \u2060", "\u3164",
                                   "\u2800\ufe0f\u034f"])  # fmt: skip
def test_nothing_visible_is_empty(reply):
    assert guards.not_empty(reply).value == 0.0


@pytest.mark.parametrize("reply", ["0", "-", "é", "$", "?"])
def test_anything_visible_is_not_empty(reply):
    assert guards.not_empty(reply).value == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        OBJECTIVE,
        OBJECTIVE.upper(),
        OBJECTIVE.replace(" ", "\n  "),
        f"You asked: {OBJECTIVE} The answer is 1",
        OBJECTIVE.removesuffix(" give only that."),
    ],
)
def test_an_echo_is_refused_however_it_is_laid_out(reply):
    assert guards.not_echo(reply, OBJECTIVE).reason == "echo of the prompt"


@pytest.mark.parametrize("reply", ["1", "641", "greatest common divisor", "641 and 595", ""])
def test_an_honest_short_answer_from_the_prompt_is_let_through(reply):
    assert guards.not_echo(reply, OBJECTIVE).value == 1.0


def test_surplus_text_is_refused_beyond_the_cap_and_says_so():
    assert guards.not_longer(" 12345 ", 5).value == 1.0
    assert guards.not_longer("123456", 5).reason == "6 characters, at most 5 are allowed"


@pytest.mark.parametrize(
    "character", ["\x00", "\x1b", "\x7f", "\x9b", "\u202e", "\ue000", "\ud800"]
)
def test_control_characters_are_refused(character):
    assert guards.printable(f"4{character}2").reason == f"character U+{ord(character):04X}"


def test_ordinary_white_space_is_printable():
    assert guards.printable("4\t2\r\n").value == 1.0


@given(st.text(max_size=40), st.lists(st.sampled_from(["a", "b", "c"]), min_size=41, max_size=60))
def test_a_reply_shorter_than_the_objective_can_not_be_its_echo(reply, words):
    assert guards.not_echo(reply[:30], " ".join(words)).value == 1.0


@given(st.text(max_size=80), st.text(max_size=20), st.text(max_size=20))
def test_the_whole_objective_is_an_echo_wherever_it_stands(objective, before, after):
    if len(objective.split()) >= guards.MIN_ECHO_WORDS:
        assert guards.not_echo(f"{before} {objective} {after}", objective).value == 0.0
