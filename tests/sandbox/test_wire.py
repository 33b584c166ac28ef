import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.sandbox.wire import Decoder, Frame, FrameError, encode

FRAMES = st.lists(
    st.tuples(st.dictionaries(st.text(), st.integers() | st.text()), st.binary(max_size=50))
)


@settings(max_examples=40)
@given(FRAMES, st.integers(1, 30))
def test_frames_come_back_whatever_the_pieces(frames, size):
    data = b"".join(encode(head, body) for head, body in frames)
    decoder, got = Decoder(), []
    for start in range(0, len(data), size):
        got += decoder.feed(data[start : start + size])
    assert got == [Frame(head, body) for head, body in frames]


@given(st.binary(min_size=8, max_size=60))
def test_garbage_is_an_error_or_waits_for_more(data):
    try:
        frames = list(Decoder().feed(data))
    except FrameError:
        return
    assert all(isinstance(frame.head, dict) for frame in frames)


@pytest.mark.parametrize("text", [b"[1]", b"nul", b"NaN", b'{"x": NaN}', b"\xff"])
def test_a_head_that_is_no_json_object_is_refused(text):
    with pytest.raises(FrameError):
        list(Decoder().feed(len(text).to_bytes(4, "big") + bytes(4) + text))


def test_an_absurd_length_is_refused_before_it_is_buffered():
    with pytest.raises(FrameError, match="announced"):
        list(Decoder().feed(b"\xff" * 8))
