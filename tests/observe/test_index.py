"""The index of a run: what it holds, reading on, and being made anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.core import events
from posttrain.core.errors import LedgerError, PreflightError
from posttrain.core.events import Note, decode
from posttrain.core.task import Place, ToolCall
from posttrain.observe import index
from posttrain.observe.index import Index, said, sketch
from posttrain.observe.journal import FileJournal
from posttrain.observe.ledger import FileLedger
from tests.evals.reviewed_run import Made, Writer, part

TABLES = (
    index.draws, index.attempts, index.components, index.reviews,
    index.evaluations, index.steps,
)  # fmt: skip


def held(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Everything in the index, brought up to date."""
    made = Index(folder)
    made.refresh()
    return {
        table.name: [dict(row._mapping) for row in made.rows(sa.select(table))] for table in TABLES
    }


def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=repr)


def anew(folder: Path) -> dict[str, list[dict[str, Any]]]:
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    return held(folder)


def attempt(folder: Path, key: str) -> dict[str, Any]:
    (row,) = [row for row in held(folder)["attempts"] if row["key"] == key]
    return row


@pytest.fixture
def run(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def test_an_attempt_is_found_with_everything_that_is_known_of_it(run: Writer) -> None:
    call = ToolCall(id="1", name="shell", arguments={"command": "ls"}, raw='{"command": "ls"}')
    gate = part(1.0, name="guard", place=Place.GUARD, gate=True)
    (key, other) = run.group(
        Made(domain="d", text="I look.", calls=(call,), components=(gate, part(1.0))),
        Made(reward=None, domain="d"),
    )
    run.ledger(
        events.Trained(step=3, version=1, keys=(key,)),
        events.Dropped(keys=(other,), reason="infra_failed: lost"),
    )
    row = attempt(run.folder, key)
    text = 'I look.\nshell {"command": "ls"}'
    wanted = {
        "draw": 0, "member": 0, "domain": "d", "level": 0, "seed": 0, "phase": "rl", "tries": 1,
        "outcome": "scored", "reward": 1.0, "first_reward": 1.0, "judged": 1, "stop": "finished",
        "tokens": 3, "step": 3, "dropped": None, "verifiers": "exact@1#00 guard@1#00",
        "chars": len(text), "sketch": "", "verdict_place": None,
    }  # fmt: skip
    assert {name: row[name] for name in wanted} == wanted
    assert 0 <= row["chance"] < 1
    lost = attempt(run.folder, other)
    assert (lost["outcome"], lost["reward"], lost["dropped"]) == (
        "infra_failed", None, "infra_failed: lost",
    )  # fmt: skip
    parts = [row for row in held(run.folder)["components"] if row["key"] == key]
    assert [(p["name"], p["place"], p["value"], p["gate"]) for p in parts] == [
        ("guard", "guard", 1.0, True), ("exact", "deterministic", 1.0, False),
    ]  # fmt: skip


def test_what_a_resume_took_back_is_untrained_again(run: Writer) -> None:
    first, second = run.group(Made())[0], run.group(Made())[0]
    run.ledger(
        events.Trained(step=1, version=1, keys=(first,)),
        events.Trained(step=2, version=2, keys=(second,)),
        events.Rewound(step=1, version=1),
    )
    assert [attempt(run.folder, key)["step"] for key in (first, second)] == [1, None]
    run.ledger(events.Trained(step=2, version=3, keys=(second,)))
    (run.folder / "index.sqlite").unlink()  # all of it in one reading
    assert [attempt(run.folder, key)["step"] for key in (first, second)] == [1, 2]


def test_an_attempt_that_is_made_again_has_nothing_of_its_first_end(run: Writer) -> None:
    (key,) = run.group(Made())
    assert len(held(run.folder)["components"]) == 1
    run.ledger(events.Entered(key=key, draw=0, member=0, tries=2))
    row = attempt(run.folder, key)
    assert (row["tries"], row["outcome"], row["reward"], row["ended"]) == (2, None, None, None)
    assert held(run.folder)["components"] == []


def test_a_later_verdict_counts_and_the_first_reward_is_kept(run: Writer) -> None:
    (key,) = run.group(Made(reward=1.0))
    place = attempt(run.folder, key)["place"]
    run.reverified(key, 0.0)
    row = attempt(run.folder, key)
    assert row["place"] == place, "what it said is where it was"
    assert (row["reward"], row["first_reward"], row["judged"]) == (0.0, 1.0, 2)
    assert row["verifiers"] == "exact@2#11"
    assert [p["verifier"] for p in held(run.folder)["components"]] == ["exact@2#11"]


def test_steps_evaluations_controls_and_labels_are_found(run: Writer) -> None:
    journal = FileJournal(run.folder / "journal")
    step = {"step": 1, "phase": "rl", "version": 1, "attempts": 4, "tokens": 9, "wall_s": 2.0}
    journal.write(Note(kind="step", data={**step, "metrics": {"loss": 0.5}}))
    journal.write(Note(kind="step", data={**step, "metrics": {"loss": float("nan")}}))
    counts = {"n": 4, "passed": 3, "lost": 1}
    evaluated = {"point": "rl", "weights": "w", "domains": {"d": {**counts, "results": []}}}
    journal.write(Note(kind="eval", data=evaluated))
    journal.write(Note(kind="stats", data={"step": 9}))
    journal.close()
    told = {"domain": "d", "evidence": "e"}
    run.ledger(
        events.Controlled(action="hold", arguments=told),
        events.Labelled(key="k", label="hack", author="ann", reason="r"),
    )
    with FileLedger(run.folder / "review.jsonl") as reviews:
        reviews.append(events.Claimed(key="k", author="bob", wall_s=1.0, until_s=2.0))
    found = held(run.folder)
    assert found["steps"] == [{**step, "loss": None}]
    assert found["evaluations"] == [{"point": "rl", "domain": "d", "weights": "w", **counts}]
    control, *reviewed = sorted(found["reviews"], key=lambda row: (row["file"], row["at"]))
    assert decode(control["event"]) == events.Controlled(action="hold", arguments=told)
    assert [(row["kind"], row["author"], row["label"]) for row in reviewed] == [
        ("labelled", "ann", "hack"), ("claimed", "bob", ""),
    ]  # fmt: skip


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_reading_on_gives_what_reading_at_once_gives(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], data: st.DataObject
) -> None:
    """Wherever reading stopped, in the middle of a line as well."""
    whole = Writer(tmp_path_factory.mktemp("whole"))
    for number in range(3):
        keys = whole.group(Made(reward=number / 2), Made(reward=None))
        whole.ledger(events.Trained(step=number + 1, version=number, keys=(keys[0],)))
    whole.ledger(events.Rewound(step=1, version=0))
    whole.reverified(whole.keys[0], 1.0)
    whole.ledger(events.Labelled(key=whole.keys[0], label="hack", author="ann"))
    with FileLedger(whole.folder / "review.jsonl") as reviews:
        for number in range(3):
            reviews.append(events.Labelled(key=whole.keys[number], label="right", author="bob"))
    grown = tmp_path_factory.mktemp("grown")
    (grown / "journal").symlink_to(whole.folder / "journal")
    names = ("ledger.jsonl", "review.jsonl")
    texts = {name: (whole.folder / name).read_bytes() for name in names}
    shares = sorted(data.draw(st.floats(0, 1)) for _ in cuts)
    for share in (*shares, 1.0):
        for name, text in texts.items():
            (grown / name).write_bytes(text[: round(share * len(text))])
        found = held(grown)
    wanted = held(whole.folder)
    assert {name: by_key(rows) for name, rows in found.items()} == {
        name: by_key(rows) for name, rows in wanted.items()
    }


def test_the_effects_of_a_batch_keep_their_order(
    run: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        keys = run.group(Made(), Made(reward=0.0))
        run.ledger(events.Trained(step=number + 1, version=1, keys=tuple(keys)))
    at_once = held(run.folder)
    monkeypatch.setattr(index, "BATCH", 1)
    assert anew(run.folder) == at_once


def test_a_ledger_that_was_cut_is_read_from_the_beginning(run: Writer) -> None:
    run.group(Made())
    path = run.folder / "ledger.jsonl"
    before = path.read_bytes()
    lost = run.group(Made())
    assert len(held(run.folder)["attempts"]) == 2
    path.write_bytes(before)
    assert [row["key"] for row in held(run.folder)["attempts"]] == run.keys[:1]
    run.draw = 5  # grown again beyond where it was cut, with something else
    new = [*run.group(Made(), Made()), *run.group(Made())]
    assert [row["key"] for row in held(run.folder)["attempts"]] == [run.keys[0], *new]
    assert lost[0] not in new


def test_an_index_of_another_schema_or_a_damaged_one_is_made_anew(
    run: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.group(Made())
    wanted = held(run.folder)
    path = run.folder / "index.sqlite"
    monkeypatch.setattr(index, "SCHEMA_VERSION", index.SCHEMA_VERSION + 1)
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE attempts")
        connection.exec_driver_sql("CREATE TABLE attempts (something INTEGER)")
    assert held(run.folder) == wanted
    path.write_bytes(b"this is no database" * 100)
    assert held(run.folder) == wanted


def test_nothing_is_read_twice(run: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    run.group(Made())
    wanted = held(run.folder)
    read: list[int] = []
    monkeypatch.setattr(Index, "_happened", lambda self, path, at, line: read.append(at) or [])
    assert held(run.folder) == wanted
    assert read == []


def test_a_reading_that_fails_leaves_the_index_as_it_was(run: Writer) -> None:
    run.group(Made())
    wanted = held(run.folder)
    more = run.group(Made())
    path = run.folder / "ledger.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "finished"}\n')
    with pytest.raises(LedgerError, match=f"damaged at byte {len(whole)}"):
        Index(run.folder).refresh()
    path.write_bytes(whole)
    assert wanted["attempts"][0] in held(run.folder)["attempts"]
    assert len(held(run.folder)["attempts"]) == 1 + len(more)


def test_a_lost_record_leaves_the_attempt_without_its_body(run: Writer) -> None:
    (key,) = run.group(Made())
    for path in (run.folder / "journal").iterdir():
        path.unlink()
    row = attempt(run.folder, key)
    assert (row["reward"], row["chars"], row["verifiers"]) == (1.0, None, "")


def test_what_is_no_text_is_held_all_the_same(run: Writer) -> None:
    """Half of a surrogate pair: a policy may bring one into an error."""
    broken = replace(part(None), error="wanted a number, got '\ud800é'")
    (key,) = run.group(Made(reward=None, text="\ud800" * 100, components=(broken,)))
    run.ledger(events.Dropped(keys=(key,), reason="verifier_failed: \udfff"))
    assert attempt(run.folder, key)["dropped"] == "verifier_failed: ?"
    assert held(run.folder)["components"][0]["error"] == "wanted a number, got '?é'"


def test_an_index_that_cannot_be_written_is_told(run: Writer) -> None:
    run.group(Made())
    (run.folder / "index.sqlite").mkdir()
    with pytest.raises(PreflightError, match="cannot be written"):
        Index(run.folder).refresh()


def test_a_reader_is_not_held_up_while_the_index_is_written(run: Writer) -> None:
    (key,) = run.group(Made())
    made = Index(run.folder)
    made.refresh()
    with made._engine.execution_options(writes=True).begin() as connection:
        connection.execute(sa.delete(index.attempts))
        assert [row.key for row in made.rows(sa.select(index.attempts.c.key))] == [key]


LONG = "First the list is sorted, then every second entry of it is taken and they are summed up. "


def test_almost_equal_texts_share_a_sketch_and_different_ones_do_not() -> None:
    assert sketch(LONG * 3) == sketch((LONG * 3).upper().replace(" ", "  "))
    near = [sketch(LONG * 3 + f"The result of case {number} is {number}.") for number in range(40)]
    assert max(near.count(one) for one in near) >= 10
    other = [sketch(f"{n} plus {n + 1} gives {2 * n + 1}, so I say {2 * n + 1} and "
                    f"check {3 * n} against {n * n} and {n ** 3}") for n in range(40)]  # fmt: skip
    assert len(set(other)) == 40
    assert sketch("x" * 11) == sketch("Answer: 42") == ""
    assert sketch("无" * 80) != ""


def test_what_was_said_holds_calls_that_did_not_parse() -> None:
    call = {"name": "shell", "arguments": None, "raw": "{oops"}
    other = {"name": "shell", "arguments": {"a": 1}, "raw": ""}
    turns = [{"text": "x", "tool_calls": [call, other]}, {"text": "y", "tool_calls": []}]
    assert said(turns) == 'x\nshell {oops\nshell {"a": 1}\ny'
