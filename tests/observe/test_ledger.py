import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from posttrain.core.errors import LedgerError
from posttrain.core.events import Dropped, Entered, LedgerEvent, Saved, Trained
from posttrain.observe.ledger import FileLedger, read_events

EVENTS: tuple[LedgerEvent, ...] = (
    Entered(key="aa", draw=0, member=0),
    Entered(key="bb", draw=0, member=1),
    Trained(step=1, version=1, keys=("aa",)),
    Dropped(keys=("bb",), reason="infra_failed: engine “lost”"),
    Saved(step=1, version=1, next_draw=1, path="checkpoints/step-000001"),
)


@contextmanager
def full_disk_after(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow past `size_bytes` (writes stop half-way)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_events_come_back_in_order_and_across_openings(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.jsonl"
    with FileLedger(path) as ledger:
        for event in EVENTS[:3]:
            ledger.append(event)
        ledger.sync()
        cut = ledger.offset
        assert tuple(ledger.events()) == EVENTS[:3]
    with FileLedger(path) as ledger:
        assert ledger.offset == cut == path.stat().st_size
        for event in EVENTS[3:]:
            ledger.append(event)
        assert tuple(ledger.events()) == EVENTS
        assert not ledger.torn
    assert tuple(read_events(path, offset=cut)) == EVENTS[3:]


def test_every_possible_tear_keeps_exactly_the_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with FileLedger(path) as ledger:
        for event in EVENTS:
            ledger.append(event)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends)
        assert tuple(read_events(path)) == EVENTS[:kept]
        with FileLedger(path) as ledger:
            assert bool(ledger.torn) == (size not in (0, *ends))
            ledger.append(EVENTS[0])
            assert tuple(ledger.events()) == (*EVENTS[:kept], EVENTS[0])


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with FileLedger(path) as ledger:
        ledger.append(EVENTS[0])
        size = ledger.offset
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    with FileLedger(path) as ledger:
        assert ledger.offset == size
        assert ledger.torn.startswith("xxx")


def test_two_writers_are_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with FileLedger(path), pytest.raises(LedgerError, match="one writer"):
        FileLedger(path)
    FileLedger(path).close()


def test_a_killed_writer_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    program = (
        "import os, sys, pathlib\n"
        "from posttrain.core.events import Entered\n"
        "from posttrain.observe.ledger import FileLedger\n"
        "ledger = FileLedger(pathlib.Path(sys.argv[1]))\n"
        "ledger.append(Entered(key='aa', draw=0, member=0))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -9
    with FileLedger(path) as ledger:
        assert tuple(ledger.events()) == EVENTS[:1]


def test_a_full_disk_raises_and_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with FileLedger(path) as ledger:
        ledger.append(EVENTS[0])
        size = ledger.offset
        with full_disk_after(size + 10), pytest.raises(LedgerError, match="Next: free space"):
            ledger.append(EVENTS[1])
        assert path.stat().st_size == ledger.offset == size
        ledger.append(EVENTS[2])  # room again
        assert tuple(ledger.events()) == (EVENTS[0], EVENTS[2])


def test_an_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(LedgerError, match=r"Cannot open the ledger .*file/ledger.jsonl"):
        FileLedger(tmp_path / "file" / "ledger.jsonl")


def test_a_damaged_line_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with FileLedger(path) as ledger:
        ledger.append(EVENTS[0])
        place = ledger.offset
    with path.open("ab") as file:
        file.write(b'{"kind": "nonsense"}\n')
    with pytest.raises(LedgerError, match=f"damaged at byte {place}"):
        list(read_events(path))


def test_a_missing_ledger_is_a_ledger_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="Cannot read"):
        list(read_events(tmp_path / "none.jsonl"))
