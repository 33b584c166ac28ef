from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.engine.model import load_tokenizer
from posttrain.engine.text import Detokenizer, StopWatch, token_bytes


def pieces_of(*tokens: bytes) -> tuple[list[str], str]:
    text = Detokenizer(tokens.__getitem__)
    return [text.push(index) for index in range(len(tokens))], text.flush()


def test_characters_split_across_tokens_appear_once_whole():
    """BR-19: halves of an emoji or accented letter became replacement characters."""
    pieces, tail = pieces_of(b"\xf0\x9f", b"\x98\x80", b"\xc3", b"\xa9")
    assert pieces == ["", "😀", "", "é"]
    assert tail == ""


def test_a_lone_tail_is_flushed_once_as_one_replacement_character():
    """BR-19, second part."""
    pieces, tail = pieces_of(b"a", b"\xe2\x82")
    assert pieces == ["a", ""]
    assert tail == "\ufffd"


def test_a_stray_byte_is_replaced_without_delaying_later_text():
    """BR-19, third part."""
    pieces, tail = pieces_of(b"a", b"\xff", b"b")
    assert pieces == ["a", "\ufffd", "b"]
    assert tail == ""


def test_one_stream_of_all_three_has_no_other_replacement_character():
    """BR-19: emoji, accented letter, stray byte in the middle, and a lone tail at the end."""
    tokens = (b"\xf0\x9f", b"\x98\x80", b"\xc3", b"\xa9", b"a\xff", b"b", b"\xe2\x82")
    pieces, tail = pieces_of(*tokens)
    assert pieces == ["", "😀", "", "é", "a\ufffd", "b", ""]
    assert tail == "\ufffd"
    assert "".join(pieces) + tail == b"".join(tokens).decode(errors="replace")


@given(data=st.binary(max_size=24), cuts=st.lists(st.integers(0, 24)))
def test_joined_deltas_equal_the_text_of_any_bytes_at_once(data: bytes, cuts: list[int]):
    """BR-19: streamed or not, the text is the same."""
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces, tail = pieces_of(*(data[a:b] for a, b in pairwise(borders)))
    assert "".join(pieces) + tail == data.decode(errors="replace")
    assert len(tail) <= 3, "more is held back than could still become one character"


@given(text=st.text(), cuts=st.lists(st.integers(0, 40)))
def test_joined_pieces_equal_the_whole_text_for_any_split(text: str, cuts: list[int]):
    data = text.encode()
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    tokens = [data[a:b] for a, b in pairwise(borders)]
    pieces, tail = pieces_of(*tokens)
    assert "".join(pieces) + tail == text


@given(text=st.text(alphabet="ab#", max_size=20), cuts=st.lists(st.integers(0, 20)))
def test_a_stop_string_is_seen_exactly_when_it_is_complete(text: str, cuts: list[int]):
    stops = ("##a", "b#b")
    watch = StopWatch(stops)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for first, last in pairwise(borders):
        complete = watch.push(text[first:last])
        seen = text[:last]
        # Complete now: some occurrence ends inside the newest piece.
        assert complete == any(stop in seen[max(0, first - len(stop) + 1) :] for stop in stops)


@settings(max_examples=50)
@given(text=st.text(max_size=30))
def test_token_bytes_of_a_byte_level_tokenizer_join_to_the_text(tiny: Path, text: str):
    tokenizer = load_tokenizer(tiny)
    to_bytes = token_bytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not set(ids) & set(tokenizer.all_special_ids):
        assert b"".join(map(to_bytes, ids)) == text.encode()


@settings(max_examples=50)
@given(ids=st.lists(st.integers(3, 322), max_size=12))
@example(ids=[320, 321, 322])
def test_deltas_of_any_ids_equal_the_tokenizers_own_text(tiny: Path, ids: list[int]):
    """BR-19 with a real tokenizer; three of its ids are added tokens that are plain text."""
    tokenizer = load_tokenizer(tiny)
    tokenizer.add_tokens(["naïve word", "日本", "<think>"])
    text = Detokenizer(token_bytes(tokenizer))
    streamed = "".join(map(text.push, ids)) + text.flush()
    assert streamed == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


def test_special_tokens_and_ids_beyond_the_tokenizer_have_no_bytes(tiny: Path):
    to_bytes = token_bytes(load_tokenizer(tiny))
    assert to_bytes(2) == b""
    assert to_bytes(100_000) == b""
