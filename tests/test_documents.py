"""What the documents show is so: the README's configuration, the examples, the lists of fields."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from posttrain.cli import main, sources
from posttrain.core import codec
from posttrain.core.task import Artefact, Check, Environment, Limits
from posttrain.domains import catalogue, taskset
from posttrain.sandbox import drivers
from posttrain.verify import segments, state, text
from posttrain.verify.stack import BUILT_IN

ROOT = Path(__file__).parents[1]
TASKS = (ROOT / "docs" / "TASKS.md").read_text(encoding="utf-8")
CHECKS = (ROOT / "docs" / "CHECKS.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shown(start: str) -> str:
    """The indented block of the README that begins with a line."""
    lines = README[README.index(f"    {start}\n") :].splitlines()
    block = []
    for line in lines:
        if line and not line.startswith("    "):
            break
        block.append(line[4:])
    return "\n".join(block)


def test_the_configuration_of_the_readme_can_teach_its_shell_domain(tmp_path: Path) -> None:
    """Eleven shell domains had eleven of thirteen shares, and no reference solution was shown."""
    (text, _) = shown("[domains]").split(".venv/bin/posttrain train")
    file = tmp_path / "mine.toml"
    file.write_text(text)
    config = sources.resolve("laptop", file, ["rl.minutes=30"]).value
    assert config.sft.steps == config.train.sft.total_steps == 20
    names = {spec.name: spec.weight for spec in config.domains.train}
    assert names["terminal.permissions"] < 1 <= config.sft.weights["terminal.permissions"]
    for spec in (*config.domains.train, *config.domains.watch):
        (entry,) = catalogue.chosen(spec)
        assert catalogue.describe(entry.reference.replace("examples/", f"{ROOT}/examples/"))


@pytest.mark.parametrize("kind", [Check, Artefact, Environment, Limits])
def test_every_field_of_what_authors_write_is_documented(kind: type) -> None:
    internal = {"assets_sha256", "version"}
    for field in dataclasses.fields(kind):
        assert field.name in internal or f"`{field.name}" in TASKS, f"{kind.__name__}.{field.name}"


def listed(head: str) -> set[str]:
    """The names in the first column of a table of the page of checks."""
    table = CHECKS[CHECKS.index(f"| {head} |") :].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_key_kind_assertion_rule_and_unit_is_documented_and_no_other() -> None:
    for key in taskset._TASK_KEYS:
        assert f"`{key}`" in TASKS, key
    assert listed("kind") == set(BUILT_IN)
    assert listed("`assert`") == set(state._ASSERTIONS)
    assert listed("`rule`") == set(text.RULES)
    assert listed("`unit`") == set(segments.UNITS)


def test_the_page_of_checks_shows_one_of_each_kind() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", CHECKS, re.S)
    checks = [codec.from_json(Check, one) for one in tomllib.loads(block)["checks"]]
    assert {check.kind for check in checks} == set(BUILT_IN)


EXAMPLES = {
    "tasks.toml": ("my.tasks", 2), "checks.toml": ("my.checks", 2),
    "shell_domain.py:COUNTING": ("my.counting", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_keeps_the_contract_of_domains(name: str) -> None:
    path = str(ROOT / "examples" / name)
    told = catalogue.describe(path)
    assert (told["name"], told["levels"]) == EXAMPLES[name]
    assert catalogue.contract(path, [[seed, level] for seed in range(12) for level in (0, 1)]) == []


def test_the_examples_are_sound(capsys: pytest.CaptureFixture[str]) -> None:
    """Their oracles earn 1, and what deserves nothing earns 0, in the sandbox."""
    problem = asyncio.run(drivers.probe("bubblewrap")).problem
    if problem:
        pytest.skip(problem)
    paths = [str(ROOT / "examples" / name) for name in EXAMPLES]
    code = main.run(["domains", "check", *paths, "--per-level", "4"])
    assert code == 0, capsys.readouterr()


def test_the_example_of_a_shell_domain_has_enough_tasks_to_hold_some_out() -> None:
    path = str(ROOT / "examples" / "shell_domain.py:COUNTING")
    for level in (0, 1):
        assert len(catalogue.pool(path, level, 0, 48, "heldout", 0.2)) == 48
