import asyncio

import pytest

from posttrain.core.errors import UsageError
from posttrain.core.task import Artefact, ArtefactKind, Check
from posttrain.verify.declared import Declared
from posttrain.verify.execution import program
from posttrain.verify.state import state

OUT = Artefact(name="out", kind=ArtefactKind.FILE, path="d/out.txt")
PART = Artefact(name="part", kind=ArtefactKind.TREE, path="part")
PROBE = Artefact(name="seen", kind=ArtefactKind.PROBE, command="ls")


class Sealed:
    """Remembers what it is asked for."""

    def __init__(self, **files):
        self.files, self.asked = files, []

    async def read(self, path, *, max_bytes):
        self.asked.append(path)
        data = self.files.get(path)
        return None if data is None else data[:max_bytes]

    async def entries(self, *, max_entries):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("path", "declared"),
    [("d/out.txt", True), ("/workspace/d/out.txt", True), ("d//out.txt", True), ("d", False),
     ("d/out.txt-wal", True), ("part", True), ("part/a/b", True), ("partly", False),
     ("other.txt", False), (".", False)],
)  # fmt: skip
def test_what_is_declared_is_seen(path, declared):
    assert Declared(Sealed(), (OUT, PART, PROBE)).declares(path) is declared
    assert Declared(Sealed(), (Artefact(name="a", kind=ArtefactKind.TREE, path="."),)).declares(
        path
    )
    assert not Declared(Sealed(), (PROBE,)).declares(path)


def test_reading_what_is_not_declared_is_the_authors_mistake(find, workspace):
    (workspace / "other.txt").write_text("x")
    one = Check(
        kind="state", params={"assert": "file_equals", "path": "other.txt", "expected": "x"}
    )
    with pytest.raises(UsageError, match="does not declare"):
        find(state, one, artefacts=(OUT,))
    other = Artefact(name="o", kind=ArtefactKind.FILE, path="other.txt")
    assert find(state, one, artefacts=(other,)).value == 1.0


LOOK = """
import os
def check(order):
    found = order.run(["sh", "-c", 'cd "$0" && find . -type f | sort', order.artefacts]).stdout
    order.run(["sh", "-c", 'echo bad > "$0/d/out.txt"; touch "$0/more"', order.artefacts])
    again = order.run(["cat", order.artefacts + "/d/out.txt"]).stdout
    read = [order.artefacts.read_text(path) for path in ("d/out.txt", "secret.txt", "d")]
    return {"value": float(again == b"42"), "evidence": {"found": found.decode(), "read": read}}
"""


def test_a_program_finds_copies_of_declared_files_alone_and_anew_in_each_run(find, workspace):
    (workspace / "d").mkdir()
    (workspace / "d" / "out.txt").write_text("42")
    (workspace / "secret.txt").write_text("x")
    found = find(program, Check(kind="program", params={"source": LOOK}), artefacts=(OUT,))
    assert found.value == 1.0
    assert found.evidence["evidence"] == {"found": "./d/out.txt\n", "read": ["42", None, None]}
    assert (workspace / "d" / "out.txt").read_text() == "42"


def test_a_command_names_copies_as_it_names_a_mount(find, workspace):
    (workspace / "d").mkdir()
    command = ["grep", "-qx", "42", "/artefacts/d/out.txt"]
    one = Check(kind="program", params={"command": command})
    assert find(program, one, artefacts=(OUT,)).value == 0.0
    (workspace / "d" / "out.txt").write_text("42\n")
    assert find(program, one, artefacts=(OUT,)).value == 1.0


def test_links_and_large_files_are_not_copied(find, workspace):
    (workspace / "d").mkdir()
    (workspace / "real").write_text("42")
    (workspace / "d" / "out.txt").symlink_to("../real")
    source = "def check(order): return order.artefacts.read_text('d/out.txt') is None"
    one = Check(kind="program", params={"source": source})
    assert find(program, one, artefacts=(OUT,)).value == 1.0
    (workspace / "d" / "out.txt").unlink()
    (workspace / "d" / "out.txt").write_bytes(bytes((8 << 20) + 1))
    assert find(program, one, artefacts=(OUT,)).value == 1.0


def test_copies_are_bounded_together_in_the_order_of_the_declarations():
    many = [Artefact(name=n, kind=ArtefactKind.FILE, path=n) for n in "abc"]
    sealed = Sealed(**dict.fromkeys("abc", bytes(7 << 20)))
    assert list(asyncio.run(Declared(sealed, many).copies())) == ["a", "b"]


def test_a_flood_of_undeclared_files_hides_nothing(find, workspace, monkeypatch):
    """Entries are listed up to a limit: what lay beyond it would have been absent."""
    (workspace / "d").mkdir()
    monkeypatch.setattr("posttrain.verify.state.MAX_ENTRIES", 20)
    for number in range(50):
        (workspace / f"{number}").touch()
    (workspace / "d" / "out.txt").touch()
    one = Check(kind="state", params={"assert": "file_absent", "path": "d/out.txt"})
    assert find(state, one, artefacts=(OUT,)).value == 0.0
