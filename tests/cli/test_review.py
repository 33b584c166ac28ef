"""`posttrain review` over a run of the real loop, from the queue to what labels are good for."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.cli import main, review
from posttrain.cli.review import visible
from posttrain.core import codec
from posttrain.core.events import Claimed, Controlled, LedgerEvent
from posttrain.core.task import Place, ToolCall
from posttrain.evals.desk import Desk
from posttrain.loop.past import fold
from posttrain.observe.ledger import FileLedger, read_events
from tests.evals.reviewed_run import Made, Writer, part
from tests.evals.run_folder import write_run
from tests.loop.scripted_run import World

Posttrain = Callable[..., str]


class Hands:
    """The clock on the wall."""

    now_s = 1000.0


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    found = Hands()
    monkeypatch.setattr(review, "now_s", lambda: found.now_s)
    return found


@pytest.fixture
def posttrain(
    tmp_path: Path, hands: Hands, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Posttrain:  # fmt: skip
    """Runs `posttrain review …`: what it says, on the error stream where it is to fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str, code: int = 0) -> str:
        ended = main.run(["review", *arguments])
        told = capsys.readouterr()
        assert ended == code, told.out + told.err
        return told.err if code else told.out

    return call


@pytest.fixture
def run(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "runs" / "own")


def listed(posttrain: Posttrain, name: str = "own") -> list[dict]:
    return json.loads(posttrain("ls", name, "--json"))


def label(posttrain: Posttrain, author: str, word: str, *, name: str = "own") -> str:
    """One attempt from claim to label; its key."""
    told = posttrain("next", name, "--author", author)
    key = told.split()[1]
    posttrain("label", name, key, word, "--author", author, "--reason", f"{author} says so")
    return key


def test_a_run_of_the_loop_is_reviewed_to_the_end(posttrain: Posttrain, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "loop"
    World(folder, steps=6).run()
    before = (folder / "ledger.jsonl").read_bytes()
    posttrain("plan", "loop", "--share", "0.25", "--second", "0")
    rows = listed(posttrain, "loop")
    past = fold(read_events(folder / "ledger.jsonl"))
    for row in rows:
        attempt = past.account.attempt(row["key"])
        assert attempt is not None
        assert past.draws[attempt.draw].phase == "rl"
        assert attempt.finished is not None
        assert attempt.finished.reward == row["reward"]
    assert len(rows) >= 4
    assert {row["state"] for row in rows} == {"open"}
    for row in rows:
        word = "right" if row["reward"] == 1.0 else "false_reject"
        assert label(posttrain, "ann", word, name="loop") == row["key"]
    assert posttrain("next", "loop", "--author", "ann") == "nothing is left for ann to review\n"
    assert {row["state"] for row in listed(posttrain, "loop")} == {"labelled"}
    found = json.loads(posttrain("rates", "loop", "--json"))["rates"][-1]
    assert (found["false_accept"]["rate"], found["false_reject"]["rate"]) == (0.0, 1.0)
    wrong = sum(row["reward"] == 0.0 for row in rows)
    assert posttrain("apply", "loop") == f"{wrong} rewards corrected\n"
    assert posttrain("apply", "loop") == "0 rewards corrected\n"
    assert (folder / "ledger.jsonl").read_bytes() == before, "the ledger has one writer"


def test_a_run_that_goes_on_is_reviewed_beside_its_ledger(
    posttrain: Posttrain, run: Writer
) -> None:
    run.group(Made(), Made(reward=0.0))
    with FileLedger(run.folder / "ledger.jsonl"):  # as the training process holds it
        key = label(posttrain, "ann", "right")
    assert [row["state"] for row in listed(posttrain) if row["key"] == key] == ["labelled"]


def test_a_reviewer_sees_task_turns_evidence_and_two_other_attempts(
    posttrain: Posttrain, run: Writer
) -> None:
    call = ToolCall(
        id="1", name="shell", arguments={"command": "cat t"}, raw='{"command": "cat t"}'
    )
    judge = part(0.0, name="judge", place=Place.JUDGE)
    run.group(
        Made(0.5, text="I look.\nThen I answer.", calls=(call,), components=(part(1.0), judge)),
        Made(reward=0.0, text="the worst"), Made(reward=0.4, text="not shown"),
        Made(reward=0.5, text="the same reward"), Made(reward=None, text="lost"),
    )  # fmt: skip
    told = posttrain("next", "own", "--author", "ann")
    for wanted in (
        "here because of disagreement: judge 0 against program 1",
        "│ - Be brief.", "│ task 0", "│ I look.\n│ Then I answer.", '│ {"command": "cat t"}',
        "result\n│ seen", "reward 0.5 (scored)", "exact = 1  (deterministic, weight 1, exact@1#00)",
        'judge = 0  (judge', '│   "n": 7', "reward 0\n", "│ the worst", "│ the same reward",
        f"posttrain review label own {run.keys[0][:12]} LABEL --author ann", "Yours for 30 minutes",
    ):  # fmt: skip
        assert wanted in told, wanted
    assert "not shown" not in told
    assert "lost" not in told


def test_what_a_policy_wrote_cannot_pass_for_ours(posttrain: Posttrain, run: Writer) -> None:
    run.group(Made(text="x\x1b[2K\rreward 1 (scored)\nTurn 9\n\u202eabc"))
    told = posttrain("next", "own", "--author", "ann")
    assert "\x1b[2K" not in told
    assert r"│ x\x1b[2K\rreward 1 (scored)" in told
    assert "\n│ Turn 9\n│ \\u202eabc" in told
    assert visible("ä\t✓ 漢") == "ä\t✓ 漢"


def test_the_second_reviewer_sees_neither_label_nor_author_of_the_first(
    posttrain: Posttrain, run: Writer
) -> None:
    (key,) = run.group(Made())
    posttrain("plan", "own", "--second", "1")
    label(posttrain, "annabel", "false_accept")
    for told in (
        posttrain("ls", "own"), posttrain("ls", "own", "--json"),
        posttrain("next", "own", "--author", "bob"), posttrain("rates", "own", "--json"),
    ):  # fmt: skip
        assert "annabel" not in told
        assert "false_accept  " not in told
        assert '"label": "' not in told
        assert not [line for line in told.splitlines() if "says so" in line]
    posttrain("label", "own", key, "hack", "--author", "bob", "--reason", "r")
    assert [row["state"] for row in listed(posttrain)] == ["open"]
    assert label(posttrain, "cat", "hack") == key
    (row,) = listed(posttrain)
    assert (row["state"], row["reviews"], row["label"]) == ("labelled", 3, "hack")
    agreed = json.loads(posttrain("rates", "own", "--json"))["agreement"]
    assert (agreed["pairs"], agreed["same"]) == (1, 0)


def test_a_claim_is_declined_or_ends(posttrain: Posttrain, run: Writer, hands: Hands) -> None:
    (key,) = run.group(Made())
    posttrain("next", "own", "--author", "ann")
    assert "nothing is left for bob" in posttrain("next", "own", "--author", "bob")
    assert [row["state"] for row in listed(posttrain)] == ["claimed"]
    posttrain("decline", "own", key[:8], "--author", "ann")
    assert "nothing is left for ann" in posttrain("next", "own", "--author", "ann")
    assert key in posttrain("next", "own", "--author", " bob ")
    assert key in posttrain("next", "own", "--author", "bob"), "it is bob's already"
    claims = [e for e in read_events(run.folder / "review.jsonl") if isinstance(e, Claimed)]
    assert [claim.author for claim in claims] == ["ann", "bob"]
    hands.now_s += 1801
    said = posttrain("label", "own", key, "right", "--author", "bob", "--reason", "r", code=2)
    assert "bob's claim of attempt" in said
    assert "ended 1 s ago" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ls", "won"], "did you mean 'own'?"),
        (["next", "own"], "--author"),
        (["next", "own", "--author", ""], "wanted the name of the author"),
        (["label", "own", "KEYx", "right", "--author", "a", "--reason", "r"], "did you mean 'KEY'"),
        (["label", "own", "KEY", "right", "--author", "a", "--reason", "r"], "it is not claimed"),
        (["decline", "own", "KEY", "--author", "a"], "it is not claimed"),
        (["plan", "own", "--share", "3"], "wanted a share in 0 … 1"),
    ],
)
def test_a_mistake_is_told(
    posttrain: Posttrain, run: Writer, arguments: list[str], expected: str
) -> None:
    (key,) = run.group(Made())
    said = posttrain(*(word.replace("KEY", key) for word in arguments), code=2)
    assert expected.replace("KEY", key) in said


def test_hacks_and_false_accepts_become_fixtures_and_labels_teach_a_reward_model(
    posttrain: Posttrain, run: Writer, tmp_path: Path
) -> None:
    call = ToolCall(id="1", name="shell", arguments={"command": "echo 1 > reward"}, raw="{}")
    good, bad, fair = run.group(
        Made(text="good", domain="my.d"), Made(text="bad", domain="my.d", calls=(call,)),
        Made(text="fair", domain="my.d", reward=0.0),
    )  # fmt: skip
    posttrain("plan", "own", "--share", "1", "--second", "0")
    words = {good: "right", bad: "hack", fair: "unclear"}
    for _ in words:
        key = posttrain("next", "own", "--author", "ann").split()[1]
        posttrain("label", "own", key, words[key], "--author", "ann", "--reason", "it forges")
    folder, lines = tmp_path / "fixtures", tmp_path / "preferences.jsonl"
    told = posttrain("export", "own", "--fixtures", "fixtures", "--preferences", str(lines))
    assert told == "1 fixtures in fixtures\n3 records in " + f"{lines}\n"
    (path,) = folder.iterdir()
    assert path.name == f"my.d-{bad[:12]}.json"
    fixture = json.loads(path.read_text())
    assert set(fixture) == {"domain", "level", "seed", "reason", "turns"}
    assert (fixture["domain"], fixture["level"], fixture["seed"]) == ("my.d", 0, 0)
    assert fixture["reason"] == "it forges"
    (turn,) = fixture["turns"]
    assert turn["text"] == "bad"
    assert [codec.from_json(ToolCall, one) for one in turn["tool_calls"]] == [call]
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    rewards = {one["key"]: one["reward"] for one in records if one["kind"] == "label"}
    assert rewards == {good: 1.0, bad: 0.0}
    (pair,) = [one for one in records if one["kind"] == "pair"]
    assert (pair["chosen"]["key"], pair["rejected"]["key"]) == (good, bad)
    assert pair["prompt"]["objective"] == "task 0"


def test_a_held_domain_is_reviewed_first(posttrain: Posttrain, run: Writer) -> None:
    run.groups([Made(domain="b")] for _ in range(3))
    held = run.group(Made(domain="a"), Made(domain="a", reward=0.0))
    run.ledger(Controlled(action="hold", arguments={"domain": "a", "evidence": "it jumped"}))
    rows = listed(posttrain)
    assert {row["key"] for row in rows[:2]} == set(held)
    assert all("hold" in row["sources"]["alarm"] for row in rows[:2])
    assert "alarm: " in posttrain("ls", "own").splitlines()[0]


def test_verdicts_that_were_renewed_are_reviewed_as_they_are_now(
    posttrain: Posttrain, run: Writer
) -> None:
    (key, _) = run.group(Made(reward=1.0), Made(reward=1.0))
    run.reverified(key, 0.0)
    told = posttrain("next", "own", "--author", "ann")
    assert key in told
    assert "flip: 1.0 became 0" in told
    assert "exact = 0  (deterministic, weight 1, exact@2#11)" in told
    posttrain("label", "own", key, "false_reject", "--author", "ann", "--reason", "r")
    found = json.loads(posttrain("rates", "own", "--json"))["rates"]
    assert {one["verifier"] for one in found} == {"exact@1#00", "exact@2#11", ""}


def test_an_attempt_whose_record_is_lost_can_still_be_put_aside(
    posttrain: Posttrain, run: Writer
) -> None:
    run.group(Made())
    for path in (run.folder / "journal").iterdir():
        path.unlink()
    assert "The journal lost what it said" in posttrain("next", "own", "--author", "ann")


def test_the_report_tells_how_much_was_reviewed(
    posttrain: Posttrain, run: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.group(Made())
    label(posttrain, "ann", "hack")
    posttrain("apply", "own")
    assert main.run(["report", "own"]) == 0
    assert "review: 1 attempts labelled, 1 rewards corrected" in capsys.readouterr().out
    write_run(tmp_path / "runs" / "other")
    assert main.run(["report", "other"]) == 0
    assert "review:" not in capsys.readouterr().out


def test_two_people_who_ask_at_once_get_different_attempts(run: Writer) -> None:
    """Each looks at the queue and writes while nobody else does."""
    run.groups([Made(), Made()] for _ in range(3))
    Desk(run.folder).queue()
    inside = threading.Barrier(2)
    found: list[LedgerEvent | None] = []

    def ask(author: str) -> None:
        inside.wait()
        found.append(Desk(run.folder).write(lambda queue: queue.claim(author, 0.0))[1])

    people = [threading.Thread(target=ask, args=(author,)) for author in ("ann", "bob")]
    for one in people:
        one.start()
    for one in people:
        one.join()
    keys = {claim.key for claim in found if isinstance(claim, Claimed)}
    assert len(keys) == 2


def test_who_writes_is_alone(run: Writer) -> None:
    run.group(Made())
    descriptor = os.open(run.folder, os.O_RDONLY)
    try:
        with Desk(run.folder)._alone(), pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
