"""Only what was examined is trained on, unless a person insists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.core.errors import IsolationError
from posttrain.observe.journal import read_notes
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes

WEAK = """
[[tasks]]
objective = "Digit in x{number}?"
checks = [{{ kind = "{kind}", params = {{ {params} }} }}]
oracle = {{ answer = "{number}" }}
limits = {{ max_tokens = 4 }}
"""
SMALL = (
    "sft.steps=0", "rl.steps=1", "rl.prompts_per_step=2", "rl.group_size=2", "evals.at=[]",
    "domains.watch=[]", 'domains.train=[{name="own.toml"}]',
)  # fmt: skip


@pytest.fixture
def posttrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., tuple]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path / "runs"))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main.run(arguments)
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


def lay(kind: str, params: str) -> None:
    tasks = [
        WEAK.format(number=n, kind=kind, params=params.replace("N", str(n))) for n in range(10)
    ]
    Path("own.toml").write_text('name = "own"\n' + "".join(tasks))


def train(posttrain: Callable[..., tuple], *more: str) -> tuple[int, str, str]:
    named = () if "--run" in more else ("--run", "own")
    chosen = [word for each in SMALL for word in ("--set", each)]
    return posttrain("train", "--preset", "smoke", *more, *named, *chosen)


def test_a_domain_that_pays_attacks_is_trained_on_by_force_alone(
    tmp_path: Path, posttrain: Callable[..., tuple]
) -> None:
    lay("not_longer", "max_chars = 8")
    code, _, said = train(posttrain)
    assert code == 2
    assert "not admitted to training: own.toml (" in said
    assert "next:  posttrain domains check own.toml tells all; --force trains on it" in said
    assert not (tmp_path / "runs/own").exists()
    code, told, said = train(posttrain, "--force")
    assert code == 0, said
    assert "Domain own.toml is not admitted: " in told
    warned = [note.data["message"] for note in read_notes(tmp_path / "runs/own/journal")
              if note.kind == "warning"]  # fmt: skip
    assert len(warned) == 1
    assert warned[0].startswith("Domain own.toml is not admitted: ")


def test_a_sound_domain_is_examined_once(tmp_path: Path, posttrain: Callable[..., tuple]) -> None:
    lay("numeric", 'answer = "N"')
    code, told, said = train(posttrain)
    assert code == 0, said
    assert "warning" not in told
    (kept,) = (tmp_path / "runs/admissions").glob("*.json")
    assert json.loads(kept.read_text())["domain"] == "own"
    kept.write_text(kept.read_text().replace('"flaky": 0', '"flaky": 2'))
    code, _, said = train(posttrain, "--run", "other")
    assert (code, "2 oracles earned another reward" in said) == (2, True), "the report was kept"
    lay("numeric", 'answer = "N", absolute = 0')
    assert "checking own.toml" in posttrain("domains", "check", "own.toml")[2]
    assert len(list((tmp_path / "runs/admissions").glob("*.json"))) == 2, (
        "other checks, other report"
    )


def test_a_machine_without_sandboxes_is_told_as_such_and_not_as_an_unsound_domain(
    tmp_path: Path, posttrain: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(self: object) -> None:
        raise IsolationError("no user namespaces here.", "posttrain doctor tells more")

    monkeypatch.setattr(BubblewrapSandboxes, "capabilities", none)
    chosen = [*SMALL[:-1], 'domains.train=[{name="terminal.permissions"}]', 
              "sandbox.driver=bubblewrap"]  # fmt: skip
    words = [word for each in chosen for word in ("--set", each)]
    code, _, said = posttrain("train", "--preset", "smoke", "--run", "own", *words)
    assert (code, "error: no user namespaces here." in said) == (3, True), said
    assert not (tmp_path / "runs/own").exists()


def test_a_report_of_an_examination_that_failed_is_not_kept(
    tmp_path: Path, posttrain: Callable[..., tuple]
) -> None:
    lay("judge", 'rubric = ["It is right."]')
    text = Path("own.toml").read_text().replace('"judge", ', '"judge", place = "judge", ')
    exact = 'checks = [{ kind = "not_longer", params = { max_chars = 9 } }, {'
    Path("own.toml").write_text(text.replace("checks = [{", exact))
    code, told, _ = posttrain("domains", "check", "own.toml", "--per-level", "1")
    assert (code, "was built without" in told) == (1, True), told
    assert not list((tmp_path / "runs").rglob("admissions/*.json"))
