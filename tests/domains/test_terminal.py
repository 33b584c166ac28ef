from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import workspace

from posttrain.core.task import Task
from posttrain.domains.domain import check_contract
from posttrain.domains.families import terminal

KINDS = sorted(terminal.KINDS)
EVERY = [(kind, level) for kind in KINDS for level in range(3)]


def task_of(kind: str, level: int, seed: int) -> Task:
    return terminal.domain(kind, name=f"terminal.{kind}").task(seed, level)


def commands_of(task: Task) -> list[str]:
    oracle = terminal.domain(task.domain.split(".")[1], name=task.domain).oracle(task)
    assert oracle.turns[-1].text
    assert not oracle.turns[-1].tool_calls
    return [str((c.arguments or {})["command"]) for t in oracle.turns for c in t.tool_calls]


@pytest.mark.parametrize(("kind", "level"), EVERY)
def test_the_oracle_earns_everything_and_doing_nothing_earns_nothing(
    kind: str, level: int, tmp_path: Path
) -> None:
    for seed in range(2):
        task = task_of(kind, level, seed)
        root = tmp_path / str(seed)
        root.mkdir()
        workspace.lay(task, root)
        assert workspace.reward(task, root) == 0.0
        workspace.run(commands_of(task), root)
        assert workspace.reward(task, root) == 1.0, task.description.objective


@pytest.mark.parametrize(("kind", "level"), EVERY)
def test_deleting_everything_and_another_tasks_solution_earn_nothing(
    kind: str, level: int, tmp_path: Path
) -> None:
    task = task_of(kind, level, 11)
    (tmp_path / "emptied").mkdir()
    workspace.lay(task, tmp_path / "emptied")
    workspace.run(["rm -rf -- *"], tmp_path / "emptied")
    assert workspace.reward(task, tmp_path / "emptied") == 0.0

    (tmp_path / "constant").mkdir()
    workspace.lay(task, tmp_path / "constant")
    other = commands_of(task_of(kind, level, 12))
    for command in other:
        subject = command.replace(";", "\n").splitlines()
        try_all(subject, tmp_path / "constant")
    if other != commands_of(task):
        assert workspace.reward(task, tmp_path / "constant") == 0.0


@pytest.mark.parametrize("level", range(3))
def test_an_archive_that_was_to_be_kept_is_kept(level: int, tmp_path: Path) -> None:
    """Keeping it was demanded and not checked."""
    task = task_of("archive", level, 3)
    workspace.lay(task, tmp_path)
    workspace.run([*commands_of(task), "rm *.tar.gz"], tmp_path)
    assert workspace.reward(task, tmp_path) == 0.0


def try_all(commands: list[str], root: Path) -> None:
    for command in commands:
        try:
            workspace.run([command], root)
        except AssertionError:
            continue


@pytest.mark.parametrize("kind", KINDS)
def test_level_0_is_short(kind: str) -> None:
    for seed in range(30):
        task = task_of(kind, 0, seed)
        assert len(task.description.objective.split()) < 60
        commands = commands_of(task)
        assert len(commands) <= 2
        assert all(len(command) <= 70 for command in commands), commands
        assert task.environment is not None
        assert len(task.environment.files) <= 6


@pytest.mark.parametrize(("kind", "level"), EVERY)
def test_tasks_keep_the_contract_and_differ_by_seed(kind: str, level: int) -> None:
    domain = terminal.domain(kind, name=f"terminal.{kind}")
    for seed in range(5):
        assert check_contract(domain, seed=seed, level=level) == ()
    assert len({task_of(kind, level, seed).content_key for seed in range(40)}) == 40


def test_no_two_kinds_share_a_template() -> None:
    """Objectives of different kinds have no long common run of words."""
    openings: dict[str, str] = {}
    for kind, level in EVERY:
        words = task_of(kind, level, 3).description.objective.split()
        plain = [w for w in words if w.isalpha() and w.islower()]
        for at in range(len(plain) - 5):
            run = " ".join(plain[at : at + 6])
            assert openings.setdefault(run, kind) == kind, run


def test_hidden_expectations_stay_out_of_the_prompt() -> None:
    for kind, level in EVERY:
        task = task_of(kind, level, 5)
        shown = task.description.objective + " ".join(task.description.constraints)
        for check in task.checks:
            if check.params["assert"] == "file_equals":
                assert check.params["expected"].strip() not in shown
