from __future__ import annotations

import copy
import dataclasses
import tomllib

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.task import Network
from posttrain.domains import taskset
from posttrain.domains.domain import SHELL, check_contract

TEXT = """
name = "office.mixed"

[[tasks]]
objective = "What is 17 + 25?"
constraints = ["Reply with only the final answer."]
verification = "The number is compared."
prefix = "Answer:"
checks = [{ kind = "numeric", params = { answer = "42" } }]
oracle = { answer = "42" }

[[tasks]]
level = 1
objective = "Put the word done into state.txt and delete note.txt."
executor = "tools"
tools = ["shell"]
checks = [{ kind = "state", params = { assert = "file_absent", path = "note.txt" } }]
artefacts = [{ name = "state.txt", kind = "file", path = "state.txt" }]
environment = { files = { "note.txt" = "hello" } }
limits = { max_turns = 4, max_turn_tokens = 100 }
oracle = { commands = ["echo done > state.txt; rm note.txt"], closing = "Written." }
"""


def tree() -> dict:
    return tomllib.loads(TEXT)


def test_a_task_set_is_a_domain() -> None:
    domain = taskset.read(tree(), where="office.toml")
    assert (domain.name, domain.levels) == ("office.mixed", 2)
    for level in range(2):
        assert check_contract(domain, seed=3, level=level) == ()
    answer, shell = domain.task(0, 0), domain.task(9, 1)
    assert answer.description.verification == "The number is compared."
    assert domain.oracle(answer).turns[0].text == "42"
    assert shell.seed == 9
    assert shell.description.tools == (SHELL,)
    turns = domain.oracle(shell).turns
    assert turns[0].tool_calls[0].arguments == {"command": "echo done > state.txt; rm note.txt"}
    assert turns[1].text == "Written."


def test_a_task_has_its_oracle_under_any_seed_and_limits() -> None:
    """Limits that a run had lowered to what its model can take left a task without an oracle."""
    value = tree()
    value["tasks"][1]["level"] = 0
    domain = taskset.read(value, where="office.toml")
    for seed, wanted in ((86, "42"), (7, "")):
        task = domain.task(seed, 0)
        limits = dataclasses.replace(task.limits, max_context_tokens=2048)
        oracle = domain.oracle(dataclasses.replace(task, limits=limits))
        assert oracle.turns[0].text == wanted


def broken(change) -> str:
    value = copy.deepcopy(tree())
    change(value)
    with pytest.raises(ConfigError) as caught:
        taskset.read(value, where="office.toml")
    return str(caught.value)


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    def rename(record: dict, old: str, new: str) -> None:
        record[new] = record.pop(old)

    told = broken(lambda v: rename(v["tasks"][0], "objective", "objectiv"))
    assert told.startswith("office.toml, task 1: unknown key 'objectiv' (did you mean 'objective'")
    assert "'wieght' (did you mean 'weight'" in broken(
        lambda v: v["tasks"][0]["checks"][0].update(wieght=2)
    )
    assert "task 2, limits: unknown key 'max_turn'" in broken(
        lambda v: v["tasks"][1]["limits"].update(max_turn=2)
    )
    assert "unknown key 'taks' (did you mean 'tasks'" in broken(lambda v: v.update(taks=[]))
    assert "task 2, environment: unknown key 'file'" in broken(
        lambda v: v["tasks"][1]["environment"].update(file={})
    )
    told = broken(lambda v: v["tasks"][1]["environment"].update(network={"alow": []}))
    assert "task 2, environment, network: unknown key 'alow' (did you mean 'allow'" in told


def test_a_task_lists_what_of_the_network_it_may_reach() -> None:
    value = tree()
    assert not taskset.read(value, where="x").task(0, 1).environment.network.reaches_out
    value["tasks"][1]["environment"]["network"] = {"allow": ["a.example.org:443"]}
    task = taskset.read(value, where="x").task(0, 1)
    assert task.environment.network == Network(allow=("a.example.org:443",))

    def network(wanted: object) -> str:
        return broken(lambda v: v["tasks"][1]["environment"].update(network=wanted))

    assert (
        "task 2, environment, network: wanted 'host:port' in network.allow, got 'a.example.org'"
        in (network({"allow": ["a.example.org"]}))
    )
    assert "environment, network: wanted a list, got str" in network({"allow": "a.example.org:443"})
    assert "environment, network: wanted a table, got 'open'" in network("open")
    assert "wanted bool, got int" in network({"open": 1})


def test_what_is_missing_or_of_the_wrong_kind_is_told_with_its_place() -> None:
    assert "task 1: wanted 'oracle'" in broken(lambda v: v["tasks"][0].pop("oracle"))
    assert "task 1: wanted 'checks'" in broken(lambda v: v["tasks"][0].pop("checks"))
    assert "wanted at least one task" in broken(lambda v: v.update(tasks=[]))
    assert "wanted int, got str" in broken(lambda v: v["tasks"][0].update(level="one"))
    assert "exactly one of" in broken(lambda v: v["tasks"][0]["oracle"].update(commands=["a"]))
    assert "unknown tool 'shel'" in _usage(lambda v: v["tasks"][1].update(tools=["shel"]))
    assert "level 0 has no task" in broken(lambda v: v["tasks"].pop(0))


def _usage(change) -> str:
    value = copy.deepcopy(tree())
    change(value)
    with pytest.raises(ValueError, match="unknown tool") as caught:
        taskset.read(value, where="office.toml")
    return str(caught.value)


def test_a_task_of_another_set_has_no_oracle_here() -> None:
    domain = taskset.read(tree(), where="office.toml")
    value = tree()
    value["tasks"][0]["objective"] = "What is 1 + 1?"
    foreign = taskset.read(value, where="other.toml").task(0, 0)
    with pytest.raises(ConfigError, match="is no task of the set"):
        domain.oracle(foreign)
