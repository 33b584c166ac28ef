"""`reverify` and `rollback` over the real command line and the real parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.loop.past import fold
from posttrain.observe.ledger import read_events
from tests.sandbox.conftest import machine

__all__ = ["machine"]

SMALL = (
    "sft.steps=1", "sft.examples_per_step=4", "rl.prompts_per_step=2",
    "rl.group_size=4", "evals.tasks=2", "run.save_every=1", "run.keep=3", "engine.max_batch=8",
)  # fmt: skip
SHORT = '{ kind = "not_longer", params = { max_chars = 8 } }'
RIGHT = '{ kind = "exact", params = { answer = "DIGIT" } }'


def lay(path: Path, checks: str) -> None:
    tasks = [
        f'[[tasks]]\nobjective = "Digit in x{number}{number % 7}?"\n'
        f"checks = [{checks.replace('DIGIT', str(number % 7))}]\n"
        f'oracle = {{ answer = "{number % 7}" }}\nlimits = {{ max_tokens = 4 }}\n'
        for number in range(40)
    ]
    path.write_text('name = "own"\n' + "\n".join(tasks))


@pytest.fixture
def posttrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path / "runs"))

    def call(*arguments: str, code: int = 0) -> str:
        ended = main.run(arguments)
        told = capsys.readouterr()
        assert ended == code, told.out + told.err
        return told.err if code else told.out

    return call


def train(posttrain: Callable[..., str], domain: str, *more: str, level: str = "") -> None:
    own = (
        f'domains.train=[{{name="{domain}", levels=[{level}]}}]',
        "domains.watch=[]",
        *SMALL,
        *more,
    )
    chosen = [word for each in own for word in ("--set", each)]
    posttrain("train", "--preset", "smoke", "--run", "own", "--force", *chosen)


def test_a_weak_check_is_mended_and_its_steps_are_taken_back(
    tmp_path: Path, posttrain: Callable[..., str]
) -> None:
    tasks = tmp_path / "own.toml"
    lay(tasks, f"{SHORT.replace('}}', '} }')}, {RIGHT.replace('} }', '}, weight = 0.0 }')}")
    train(posttrain, str(tasks), "rl.steps=3")
    lay(tasks, RIGHT)
    told = json.loads(posttrain("reverify", "own", "--json"))
    assert told["judged"] == 4 + 3 * 8
    assert told["left_out"] == told["remarks"] == {}
    assert told["flipped"] == told["domains"]["own"]["pass → fail"] > 10, told
    assert set(told["affected_steps"]) <= {"2", "3", "4"}
    shown = posttrain("reverify", "own")
    assert "No step was trained on a reward that is another one now." in shown
    assert "own" in shown

    assert "run has no attempts at 'owm'" in posttrain("reverify", "own", "--domain", "owm", code=2)
    assert "cannot go back to 9" in posttrain("rollback", "own", "--to", "9", code=2)
    assert "is kept (there are: 2, 3)" in posttrain("rollback", "own", "--to", "1", code=2)
    said = posttrain("rollback", "own", "--to", "2", "--reason", "weak check")
    assert "goes back from step 4 to step 2" in said
    assert "next:  posttrain train --resume own" in said
    posttrain("train", "--resume", "own")
    past = fold(read_events(tmp_path / "runs/own/ledger.jsonl"))
    past.account.check()
    assert past.account.step == 4


def test_what_attempts_left_in_sandboxes_is_judged_the_same_again(
    machine, tmp_path: Path, posttrain: Callable[..., str]
) -> None:
    train(posttrain, "terminal.permissions", "rl.steps=0", level="0")
    told = json.loads(posttrain("reverify", "own", "--json"))
    assert told["judged"] == 4
    assert told["changed"] == 0
    assert told["domains"] == {"terminal.permissions": {"pass → pass": 4}}
    for blob in (tmp_path / "runs/own/blobs").rglob("*"):
        if blob.is_file():
            blob.write_bytes(b"damaged")
    told = json.loads(posttrain("reverify", "own", "--json"))
    assert told["judged"] == 0
    assert sum(told["left_out"].values()) == 4
