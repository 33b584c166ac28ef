import os
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError, VerifierError, WorkerError
from posttrain.core.task import Check
from posttrain.verify import state as states
from posttrain.verify.kinds import Subject, Tools
from posttrain.verify.state import normalised, state
from posttrain.verify.structure import same_json


@pytest.fixture
def value(find):
    def run(name, path, **params):
        check = Check(kind="state", params={"assert": name, "path": path} | params)
        return find(state, check).value

    return run


def test_a_file_is_compared_as_the_check_says(value, workspace):
    (workspace / "a.txt").write_text("b \na\n\n")
    assert value("file_equals", "a.txt", expected="b \na\n\n") == 1.0
    assert value("file_equals", "a.txt", expected="b \na") == 0.0
    assert value("file_equals", "a.txt", expected="b \na", normalise="strip") == 1.0
    assert value("file_equals", "a.txt", expected="b\na", normalise="lines") == 1.0
    assert value("file_equals", "a.txt", expected="a\nb", normalise="lines") == 0.0
    assert value("file_equals", "a.txt", expected="a\nb", normalise="sorted_lines") == 1.0


@pytest.mark.parametrize("name", ["file_equals", "document_equals"])
def test_a_missing_file_is_the_attempts_doing(name, value, workspace):
    (workspace / "folder.json").mkdir()
    assert value(name, "none.json", expected="x") == 0.0
    assert value(name, "folder.json", expected="x") == 0.0


def test_a_link_to_the_right_content_is_no_file(value, workspace, tmp_path):
    (tmp_path / "outside").write_text("x")
    (workspace / "link").symlink_to(tmp_path / "outside")
    (workspace / "folder").symlink_to(tmp_path)
    assert value("file_equals", "link", expected="x") == 0.0
    assert value("file_equals", "folder/outside", expected="x") == 0.0


def test_too_large_or_undecodable_files_pay_nothing(value, workspace, monkeypatch):
    (workspace / "bytes").write_bytes(b"ok\xff")
    assert value("file_equals", "bytes", expected="ok") == 0.0
    monkeypatch.setattr(states, "MAX_FILE_BYTES", 4)
    (workspace / "large").write_text("12345")
    (workspace / "small").write_text("1234")
    assert value("file_equals", "large", expected="12345") == 0.0
    assert value("file_equals", "small", expected="1234") == 1.0


def test_json_is_compared_by_value_and_type(value, workspace):
    (workspace / "a.json").write_text('{"b": [1, true], "a": null}')
    assert value("document_equals", "a.json", expected={"a": None, "b": [1, True]}) == 1.0
    assert value("document_equals", "a.json", expected={"a": None, "b": [1, 1]}) == 0.0
    (workspace / "bad.json").write_text("{" + "[" * 100_000)
    assert value("document_equals", "bad.json", expected={}) == 0.0


def test_absence_is_absence_of_anything(value, workspace):
    (workspace / "file").write_text("")
    (workspace / "folder").mkdir()
    (workspace / "dangling").symlink_to("nowhere")
    assert value("file_absent", "none") == 1.0
    assert value("file_absent", "none/deeper") == 1.0
    assert value("file_absent", "folder/none") == 1.0
    for name in ("file", "folder", "dangling", "dangling/below"):
        assert value("file_absent", name) == 0.0


def test_modes_are_octal(value, workspace):
    (workspace / "run.sh").write_text("")
    os.chmod(workspace / "run.sh", 0o750)
    assert value("file_mode", "run.sh", expected="750") == 1.0
    assert value("file_mode", "run.sh", expected="0750") == 1.0
    assert value("file_mode", "run.sh", expected="755") == 0.0
    assert value("file_mode", "none", expected="755") == 0.0


def test_a_tree_must_hold_just_what_it_held(value, workspace):
    (workspace / "d" / "e").mkdir(parents=True)
    (workspace / "d" / "a").write_text("1")
    (workspace / "d" / "e" / "b").write_text("2")
    files = {"a": "1", "e/b": "2"}
    assert value("tree_unchanged", "d", expected=files) == 1.0
    assert value("tree_unchanged", ".", expected={"d/a": "1", "d/e/b": "2"}) == 1.0
    assert value("tree_unchanged", "d", expected=files | {"e/b": "3"}) == 0.0
    assert value("tree_unchanged", "d", expected=files | {"c": ""}) == 0.0
    assert value("tree_unchanged", "d", expected={"a": "1"}) == 0.0
    assert value("tree_unchanged", "d", expected={"a": "1"}, **{"except": ["e/b"]}) == 1.0
    (workspace / "d" / "e" / "link").symlink_to("b")
    assert value("tree_unchanged", "d", expected=files) == 0.0


def test_too_many_entries_pay_nothing(value, workspace, monkeypatch):
    monkeypatch.setattr(states, "MAX_ENTRIES", 2)
    for name in "abc":
        (workspace / name).write_text("")
    assert value("file_absent", "d") == 0.0
    (workspace / "c").unlink()
    assert value("file_absent", "d") == 1.0


@pytest.fixture
def database(workspace):
    connection = sqlite3.connect(workspace / "shop.db")
    connection.execute("CREATE TABLE item (name TEXT, price REAL, data BLOB)")
    connection.executemany(
        "INSERT INTO item VALUES (?, ?, ?)", [("pen", 2, b"\x01"), ("ink", 3.5, None)]
    )
    connection.commit()
    yield connection
    connection.close()


QUERY = "SELECT name, price FROM item"


def test_rows_are_compared_in_order_unless_said_otherwise(value, database):
    rows = [["ink", 3.5], ["pen", 2]]
    assert value("sqlite_rows", "shop.db", query=QUERY + " ORDER BY name", expected=rows) == 1.0
    assert value("sqlite_rows", "shop.db", query=QUERY, expected=rows) == 0.0
    assert (
        value("sqlite_rows", "shop.db", query=QUERY, expected=rows, normalise="sorted_lines") == 1.0
    )
    assert value("sqlite_rows", "shop.db", query=QUERY, expected=[]) == 0.0


def test_rows_still_in_the_write_ahead_log_count(value, workspace, database):
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("INSERT INTO item VALUES ('nib', 1, NULL)")
    database.commit()
    assert (workspace / "shop.db-wal").stat().st_size > 0
    count = "SELECT count(*) FROM item"
    assert value("sqlite_rows", "shop.db", query=count, expected=[[3]]) == 1.0


def test_a_broken_database_pays_nothing(value, workspace, database):
    (workspace / "no.db").write_text("this is no database, although it is a file")
    assert value("sqlite_rows", "no.db", query=QUERY, expected=[]) == 0.0
    assert value("sqlite_rows", "none.db", query=QUERY, expected=[]) == 0.0
    assert value("sqlite_rows", "shop.db", query="SELECT * FROM gone", expected=[]) == 0.0


def test_a_view_that_never_ends_pays_nothing(value, database, monkeypatch, tmp_path):
    """A reader that was killed at its time limit left its copy of the database."""
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setenv("TMPDIR", str(copies))
    monkeypatch.setattr(states, "QUERY_CPU_S", 1)
    database.execute("DROP TABLE item")
    database.execute(
        "CREATE VIEW item AS WITH RECURSIVE n(name) AS (SELECT 1 UNION ALL SELECT name + 1 FROM n)"
        " SELECT count(*) AS name, 0 AS price FROM n"
    )
    database.commit()
    assert value("sqlite_rows", "shop.db", query=QUERY, expected=[]) == 0.0
    assert not list(copies.iterdir())


def test_a_busy_machine_makes_no_verifier_failure_of_a_slow_view(
    value, database, tools, monkeypatch
):
    """Two neighbours a core let ten seconds pass before three of processor time were used."""
    allowed_s = []

    async def call(self, function, *arguments, timeout_s):
        allowed_s.append((arguments[-1], timeout_s))
        return {"refused": "its reader ended with -9"}

    monkeypatch.setattr(type(tools.workers), "call", call)
    assert value("sqlite_rows", "shop.db", query=QUERY, expected=[]) == 0.0
    assert value("sqlite_rows", "shop.db", query=QUERY, expected=[], timeout_s=20) == 0.0
    assert allowed_s == [(3, 300.0), (3, 20.0)]


RUINOUS = {
    "a number that is no JSON value": "SELECT 'pen' AS name, 9e999 AS price",
    "a cell larger than any memory": "SELECT 'pen' AS name, zeroblob(999000000) AS price",
    "more rows than anybody reads": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 "
    "FROM n WHERE i < 20000) SELECT i AS name, i AS price FROM n",
    "more bytes than the disk has": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 "
    "FROM n WHERE i < 9000) SELECT hex(zeroblob(90000)) || i AS name, 1 AS price FROM n",
}


@pytest.mark.parametrize("name", RUINOUS)
def test_a_database_that_ruins_its_reader_pays_nothing(name, value, database):
    """A policy chose `verifier_failed` over reward 0 by what it wrote into its database."""
    database.execute("DROP TABLE item")
    database.execute(f"CREATE VIEW item AS {RUINOUS[name]}")
    database.commit()
    assert value("sqlite_rows", "shop.db", query=QUERY, expected=[]) == 0.0


def test_a_lost_worker_is_an_error_not_a_zero(find, database, monkeypatch):
    monkeypatch.setattr(states, "SQLITE_READER", "posttrain.verify.state:gone")
    params = {"assert": "sqlite_rows", "path": "shop.db", "query": QUERY, "expected": []}
    with pytest.raises(WorkerError):
        find(state, Check(kind="state", params=params))


def test_an_unknown_assertion_names_the_nearest(find):
    check = Check(kind="state", params={"assert": "file_equal", "path": "a"})
    with pytest.raises(UsageError, match="did you mean 'file_equals'"):
        find(state, check)
    check = Check(kind="state", params={"assert": "file_equals", "path": "a", "expcted": ""})
    with pytest.raises(UsageError, match="did you mean 'expected'"):
        find(state, check)


def test_without_a_sealed_workspace_there_is_no_verdict(make_attempt, clock):
    import asyncio

    check = Check(kind="state", params={"assert": "file_absent", "path": "a"})
    subject = Subject(trajectory=make_attempt("done"))
    with pytest.raises(VerifierError, match="no sealed"):
        asyncio.run(state(check, subject, Tools(clock=clock)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(JSON, JSON)
def test_json_equality_is_equality_with_strict_types(one, other):
    def typed(value):
        if isinstance(value, dict):
            return {key: typed(item) for key, item in value.items()}
        return [typed(item) for item in value] if isinstance(value, list) else (type(value), value)

    assert same_json(one, one)
    assert same_json(one, other) == (typed(one) == typed(other)) == same_json(other, one)


@given(st.lists(st.text("ab ", max_size=3), max_size=4))
def test_sorted_lines_forget_the_order_and_nothing_else(lines):
    text, turned = "\n".join(lines).strip(), "\n".join(reversed(lines)).strip()
    same = sorted(line.rstrip() for line in text.split("\n"))
    assert normalised(text, "sorted_lines") == same
    if "" not in {line.strip() for line in lines}:
        stripped = [line.strip() for line in lines]
        assert normalised("\n".join(stripped), "sorted_lines") == normalised(
            "\n".join(reversed(stripped)), "sorted_lines"
        )
    assert turned is not None
