from __future__ import annotations

import pytest

from posttrain.core.errors import EngineError, IllegalTransitionError
from posttrain.core.trajectory import FinishReason
from posttrain.engine.request import Request, State
from tests.engine.asking import ask


def letters(token: int) -> bytes:
    return bytes((token,))


def decoding(**sampling: object) -> Request:
    """A request of two prompt tokens that is ready to take its first token."""
    request = Request(ask([1, 2], **sampling), order=1, to_bytes=letters)  # type: ignore[arg-type]
    request.move(State.PREFILLING)
    request.compute(2, version=3)
    return request


def take(request: Request, text: str, *, version: int = 3) -> None:
    for letter in text.encode():
        request.accept(letter, -1.0, version=version)
        request.check()
        if request.finish is None:
            request.compute(1, version=version)


def test_the_stop_id_is_kept_and_ends_the_request():
    request = decoding(stop_ids=(ord("!"),))
    take(request, "ab!")
    assert request.result().ids == tuple(b"ab!")
    assert request.result().finish is FinishReason.STOP


def test_the_length_limit_ends_the_request():
    request = decoding(max_tokens=2)
    take(request, "ab")
    assert request.result().finish is FinishReason.LENGTH


def test_a_stop_on_the_last_allowed_token_counts_as_a_stop():
    request = decoding(max_tokens=2, stop_ids=(ord("b"),))
    take(request, "ab")
    assert request.result().finish is FinishReason.STOP


def test_a_stop_string_across_token_borders_ends_the_request_and_its_tokens_are_kept():
    request = decoding(stop_strings=("###",))
    take(request, "a#b###")
    assert request.result().ids == tuple(b"a#b###")
    assert request.result().finish is FinishReason.STOP


def test_a_stop_string_in_the_prompt_does_not_count():
    request = Request(ask(b"#", stop_strings=("##",)), order=1, to_bytes=letters)
    request.move(State.PREFILLING)
    request.compute(1, version=0)
    take(request, "#")
    assert request.finish is None


def test_each_token_says_its_version_and_the_oldest_behind_it():
    request = decoding(max_tokens=4)
    take(request, "ab", version=3)
    take(request, "cd", version=5)
    assert request.result().versions == (3, 3, 5, 5)
    assert request.result().kv_versions == (3, 3, 3, 3)


def test_a_request_computed_again_after_an_update_has_only_new_keys():
    request = decoding(max_tokens=4)
    take(request, "ab", version=3)
    request.put_back()
    request.move(State.PREFILLING)
    request.compute(4, version=5)
    take(request, "c", version=5)
    assert request.versions == [3, 3, 5]
    assert request.kv_versions == [3, 3, 5]


def test_an_illegal_transition_tells_the_story_of_the_request():
    request = decoding(max_tokens=1)
    take(request, "a")
    with pytest.raises(IllegalTransitionError, match="1 of 1 tokens sampled"):
        request.put_back()


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        (ask([]), "without ids"),
        (ask([1], max_tokens=0), "max_tokens is 0"),
        (ask([1], stop_strings=("x",)), "need a tokenizer"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(asked, wrong):
    with pytest.raises(EngineError, match=wrong):
        Request(asked, order=1)
