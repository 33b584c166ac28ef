import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.core.events import Note
from posttrain.observe.journal import FileJournal, decode_note, encode_note, read_notes


def _strict(line: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_record_is_read_back_at_its_place(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal")
    notes = [Note(kind="step", data={"loss": 0.5 * i}, wall_s=1.0 + i) for i in range(5)]
    places = [journal.write(note) for note in notes]
    assert [journal.read(place) for place in places] == notes
    assert list(read_notes(tmp_path / "journal")) == notes
    journal.sync()
    journal.close()
    again = FileJournal(tmp_path / "journal")
    assert again.read(places[3]) == notes[3]
    assert again.write(Note(kind="later")).startswith("2:0:")
    assert [note.kind for note in read_notes(tmp_path / "journal", kind="later")] == ["later"]
    assert again.stats().written == 1
    again.close()


def test_the_journal_stamps_the_wall_time(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    note = journal.read(journal.write(Note(kind="step")))
    assert note is not None
    assert note.wall_s > 1.6e9
    journal.close()


def test_segments_rotate_by_size(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, segment_bytes=200)
    places = [journal.write(Note(kind="step", data={"i": i}, wall_s=1.0)) for i in range(12)]
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert len(sizes) > 2
    assert all(200 <= size < 300 for size in sizes[:-1])
    assert {place.split(":")[0] for place in places} == {str(i + 1) for i in range(len(sizes))}
    assert [note.data["i"] for note in read_notes(tmp_path)] == list(range(12))
    assert all(journal.read(place) is not None for place in places)
    journal.close()


def test_non_finite_numbers_keep_their_kind_in_strict_json() -> None:
    # BR-68: loss = [1.0, NaN, +inf, 2.0, -inf], and a metric that is NaN only
    nan, inf = math.nan, math.inf
    note = Note(kind="step", data={"loss": [1.0, nan, inf, 2.0, -inf], "kl": nan}, wall_s=1.0)
    line = encode_note(note)
    assert _strict(line)["data"]["loss"][1:3] == [{"$float": "nan"}, {"$float": "inf"}]
    data = decode_note(line).data
    assert math.isnan(data["loss"][1])
    assert [data["loss"][i] for i in (0, 2, 3, 4)] == [1.0, inf, 2.0, -inf]
    assert math.isnan(data["kl"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_any_json_value_makes_the_round_trip(data: dict[str, Any]) -> None:
    line = encode_note(Note(kind="x", data=data, wall_s=1.0))
    assert "\n" not in line
    _strict(line)
    assert decode_note(line).data == data


@pytest.mark.parametrize(
    "place", ["", "1", "1:2", "a:b:c", "9:0:10", "1:-5:3", "1:0:3", "1:0:9999"]
)
def test_a_bad_place_reads_as_none(tmp_path: Path, place: str) -> None:
    journal = FileJournal(tmp_path)
    journal.write(Note(kind="step", wall_s=1.0))
    assert journal.read(place) is None
    journal.close()


def test_what_is_no_json_is_lost_and_counted(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    assert journal.write(Note(kind="step", data={"x": object()})) == ""
    assert journal.stats().lost == 1
    assert "step" in journal.stats().last_error
    with pytest.raises(UsageError):
        encode_note(Note(kind="step", data={"x": object()}))
    journal.close()


def test_a_full_disk_loses_and_counts_and_the_journal_goes_on(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    first = journal.write(Note(kind="a", wall_s=1.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = int(first.split(":")[2])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
        assert journal.write(Note(kind="b", data={"text": "x" * 100}, wall_s=1.0)) == ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert journal.stats().lost == 1
    journal.write(Note(kind="c", wall_s=1.0))
    assert [note.kind for note in read_notes(tmp_path)] == ["a", "c"]
    journal.close()


def test_an_unusable_folder_never_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    journal = FileJournal(tmp_path / "file" / "journal")
    assert [journal.write(Note(kind="a")) for _ in range(3)] == ["", "", ""]
    journal.sync()
    assert journal.stats().lost == 3
    journal.close()


def test_a_last_line_cut_off_is_ignored(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    for i in range(3):
        place = journal.write(Note(kind="a", data={"i": i}, wall_s=1.0))
    journal.close()
    path = tmp_path / "000001.jsonl"
    path.write_bytes(path.read_bytes()[:-4])
    assert [note.data["i"] for note in read_notes(tmp_path)] == [0, 1]
    assert FileJournal(tmp_path).read(place) is None


def test_a_record_nested_too_deep_is_lost_and_counted(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(5_000):
        nested = [nested]
    journal = FileJournal(tmp_path)
    assert journal.write(Note(kind="deep", data={"x": nested})) == ""
    assert journal.stats().lost == 1
    journal.close()
