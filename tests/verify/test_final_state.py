import asyncio
import sqlite3
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from posttrain.core.containment import ExecResult
from posttrain.core.errors import UsageError, VerifierError
from posttrain.core.task import Check, Environment
from posttrain.verify.declared import Declared
from posttrain.verify.final_state import final_state
from posttrain.verify.kinds import Subject
from tests.verify.conftest import FolderSealed


class Fresh:
    """A source whose sandboxes carry out actions that are Python functions of a folder."""

    def __init__(self, root, actions):
        self.root, self.actions = root, actions

    @asynccontextmanager
    async def lease(self, environment, *, beside=None, over=None):
        self.root.mkdir(exist_ok=True)
        yield self

    async def exec(self, argv, *, timeout_s=None, stdin=b""):
        try:
            self.actions[argv[-1]](self.root)
        except KeyError:
            return ExecResult(exit_code=127, stdout="", stderr="not found")
        return ExecResult(exit_code=0, stdout="", stderr="")

    async def seal(self):
        return FolderSealed(self.root)


def database(*rows, extra="", log=False):
    def make(folder):
        connection = sqlite3.connect(folder / "shop.db")
        if log:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(f"CREATE TABLE item (name, price, day); {extra}")
        connection.executemany("INSERT INTO item VALUES (?, ?, ?)", rows)
        connection.commit()
        return connection if log else connection.close()

    return make


def text(content, path="shop.json"):
    return lambda folder: (folder / path).write_text(content)


@pytest.fixture
def value(make_attempt, tools, workspace, tmp_path):
    def run(left, reference, path="shop.json", actions=("act",), **params):
        left(workspace)
        source = Fresh(tmp_path / "fresh", {"act": reference})
        attempt = make_attempt("done", environment=Environment())
        sealed = Declared(FolderSealed(workspace), attempt.task.artefacts)
        subject = Subject(trajectory=attempt, sealed=sealed)
        told = {"path": path, "actions": actions} | params
        check = Check(kind="final_state", params=told)
        finding = asyncio.run(final_state(check, subject, replace(tools, sandboxes=source)))
        return finding.value

    return run


def test_documents_are_compared_with_what_the_reference_leaves(value):
    gold = text('{"a": [1, 2], "at": "09:00"}')
    assert value(text('{"at": "09:00", "a": [1.0, 2]}'), gold) == 1.0
    assert value(text('{"at": "10:00", "a": [2, 1]}'), gold) == 0.0
    assert (
        value(text('{"at": "10:00", "a": [2, 1]}'), gold, ignore=["/at"], unordered=["/a"]) == 1.0
    )
    assert value(text('{"at": "09:00", "a": [1, 2], "more": 0}'), gold) == 0.0
    assert value(text("{"), gold) == value(text("\x00"), gold) == 0.0


PEN, INK = ("pen", 2, "mon"), ("ink", 3.5, "tue")


def test_rows_are_compared_in_any_order_without_ignored_columns(value, workspace):
    def worth(*rows, extra="", **params):
        for name in ("shop.db", "shop.db-wal", "../fresh/shop.db"):
            (workspace / name).unlink(missing_ok=True)
        gold = database(PEN, INK, INK)
        return value(database(*rows, extra=extra), gold, "shop.db", **params)

    assert worth(INK, PEN, INK) == 1.0
    assert worth(INK, PEN) == worth(PEN, PEN, INK) == 0.0
    late = ("ink", 3.5, "wed")
    assert worth(INK, PEN, late) == 0.0
    assert worth(INK, PEN, late, ignore=["/tables/item/*/day"]) == 1.0
    assert worth(INK, PEN, ("ink", 3.6, "tue")) == 0.0
    assert worth(INK, PEN, ("ink", 3.6, "tue"), absolute=0.2) == 1.0
    for extra in ("CREATE TABLE other (x);", "CREATE VIEW v AS SELECT 1;",
                  "CREATE TRIGGER t AFTER INSERT ON item BEGIN SELECT 1; END;"):  # fmt: skip
        assert worth(INK, PEN, INK, extra=extra) == 0.0
    assert worth(INK, PEN, INK, extra="CREATE INDEX i ON item (name);") == 1.0


def test_generated_columns_are_columns(value):
    """They stand in the rows and not in `table_info`: no such database could be compared."""
    more = "ALTER TABLE item ADD COLUMN twice AS (price * 2);"
    left = "INSERT INTO item VALUES ('ink', 3, 'wed');"
    gold = database(extra=more + left)
    assert value(database(extra=more + left), gold, "shop.db") == 1.0


def test_what_still_stands_in_the_write_ahead_log_counts(value):
    left = []
    assert value(lambda folder: left.append(database(PEN, log=True)(folder)), database(PEN),
                 "shop.db") == 1.0  # fmt: skip
    left[0].close()


def test_what_was_not_left_or_cannot_be_read_pays_nothing(value):
    assert value(lambda folder: None, text("{}")) == 0.0
    assert value(text("no database", "shop.db"), database(PEN), "shop.db") == 0.0


@pytest.mark.parametrize("reference", [lambda folder: None, text("{")])
def test_a_reference_without_a_state_is_an_error_and_never_a_zero(reference, value):
    with pytest.raises(VerifierError):
        value(text("{}"), reference)


def test_a_reference_action_that_fails_is_an_error(value):
    with pytest.raises(VerifierError, match="'gone' ended with exited"):
        value(text("{}"), text("{}"), actions=["act", "gone"])


@pytest.mark.parametrize(
    "params",
    [{"actions": "act"}, {"format": "xml"}, {"ignore": "/a"}, {"relative": -1}, {"path": "a.bin"},
     {"ignored": []}],
)  # fmt: skip
def test_what_the_task_declares_wrongly_is_an_error(params, value):
    with pytest.raises(UsageError):
        value(text("{}"), text("{}"), **params)


def test_who_is_cancelled_while_the_lease_ends_leaves_no_seal(
    make_attempt, tools, workspace, tmp_path
):
    closed = []

    class Ending(Fresh):
        @asynccontextmanager
        async def lease(self, environment, *, beside=None, over=None):
            self.root.mkdir()
            yield self
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

        async def seal(self):
            return Closed(self.root)

    class Closed(FolderSealed):
        async def close(self):
            closed.append(self)

    async def body():
        text("{}")(workspace)
        attempt = make_attempt("done", environment=Environment())
        sealed = Declared(FolderSealed(workspace), attempt.task.artefacts)
        check = Check(kind="final_state", params={"path": "shop.json", "actions": ["act"]})
        source = Ending(tmp_path / "fresh", {"act": text("{}")})
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(
                final_state(check, Subject(trajectory=attempt, sealed=sealed),
                            replace(tools, sandboxes=source))
            )  # fmt: skip

    asyncio.run(body())
    assert len(closed) == 1
