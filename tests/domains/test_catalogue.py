from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from inprocess import InProcess

from posttrain.core import codec
from posttrain.core.errors import DomainError, UsageError
from posttrain.core.task import Task
from posttrain.domains import catalogue, outside
from posttrain.domains.catalogue import DomainSpec
from posttrain.domains.mixture import Split
from posttrain.domains.supply import Supply

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_domain.py"

BROKEN = """
import json


class Broken:
    name = "own.broken"
    levels = 1

    def task(self, seed, level):
        return json.loads("boom")

    def oracle(self, task):
        raise KeyError("nothing")


DOMAIN = Broken()
HALF = object()
"""


def test_the_catalogue_lists_every_family_once() -> None:
    names = [entry.name for entry in catalogue.entries()]
    assert len(names) == len(set(names))
    families = {entry.family for entry in catalogue.entries()}
    assert families >= {"toy", "terminal", "reasoning_gym", "easy"}
    assert len(catalogue.matching("reasoning_gym.*")) >= 100
    assert len(catalogue.matching("terminal.*")) >= 8


def test_no_catalogue_name_reads_as_a_path() -> None:
    """`terminal.json` once did, and could not be found."""
    for entry in catalogue.entries():
        assert not outside.is_path(entry.name)
        assert catalogue.find(entry.name) == entry


def test_listing_imports_no_domain_library() -> None:
    code = (
        "import sys; from posttrain.domains import catalogue; catalogue.entries();"
        "sys.exit(any(n.startswith(('reasoning_gym', 'numpy', 'sympy')) for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown domain 'easy.gdc' \(did you mean 'easy.gcd'"):
        catalogue.find("easy.gdc")
    with pytest.raises(UsageError, match=r"no domain matches 'nothing\.\*'"):
        catalogue.matching("nothing.*")
    with pytest.raises(UsageError, match="no source to apply them to"):
        catalogue.chosen(DomainSpec(name="easy.gcd", params={"max_value": 5}))
    with pytest.raises(UsageError, match="in the catalogue already"):
        catalogue.chosen(DomainSpec(name="easy.gcd", source="reasoning_gym.gcd"))
    with pytest.raises(UsageError, match=r"unknown domain 'terminal\.edits'"):
        catalogue.load("terminal.edits")
    with pytest.raises(UsageError, match=r"'terminal\.edit' takes no params"):
        catalogue.load({"name": "mine", "source": "terminal.edit", "params": {"a": 1}})


def test_worker_functions_speak_json() -> None:
    made = catalogue.tasks("toy.copy", [[1, 0], [2, 1]])
    assert [codec.from_json(Task, one).seed for one in made] == [1, 2]
    assert catalogue.oracles("toy.copy", made)[0]["turns"][0]["text"] in str(made[0])
    assert catalogue.describe("toy.copy") == {"name": "toy.copy", "levels": 3}
    assert catalogue.contract("toy.copy", [[1, 0], [1, 2]]) == []


def test_a_pool_is_distinct_and_apart_from_what_draws_give() -> None:
    held = catalogue.pool("toy.digit", 1, 5, 30, "heldout", 0.2)
    drawn = catalogue.drawn("toy.digit", 1, 5, list(range(100)), 0.2)
    questions = {one["description"]["objective"] for one in held}
    assert len(questions) == 30
    assert not questions & {one["description"]["objective"] for one in drawn}
    assert drawn[40:50] == catalogue.drawn("toy.digit", 1, 5, list(range(40, 50)), 0.2)


def test_a_raising_domain_is_a_domain_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BROKEN)
    name = f"{tmp_path}/own.py:DOMAIN"
    with pytest.raises(DomainError, match=r"own.broken \(seed 3, level 0\).*JSONDecodeError"):
        catalogue.tasks(name, [[3, 0]])
    given = catalogue.tasks("toy.copy", [[1, 0]])
    with pytest.raises(DomainError, match=r"toy.copy/0/1' raised KeyError.*\(own.py:13\)"):
        catalogue.oracles(name, given)

    supply = Supply(InProcess())
    (key,) = asyncio.run(supply.keys([DomainSpec(name=name)]))
    assert key.domain == "own.broken"
    with pytest.raises(DomainError) as caught:
        asyncio.run(supply.problems(key, [3]))
    told = "raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) (own.py:10)"
    assert str(caught.value) == f"domain 'own.broken' {told}"


def test_a_failing_call_names_its_domain_and_nothing_of_ours(tmp_path: Path) -> None:
    """`posttrain.domains.catalogue:drawn raised DomainError: …` stood in every such message."""
    (tmp_path / "set.toml").write_text(
        'name = "own.set"\n[[tasks]]\nobjective = "Say a."\noracle = { answer = "a" }\n'
        'checks = [{ kind = "exact", params = { answer = "a" } }]\n'
    )
    supply = Supply(InProcess(), heldout_share=1 - 1e-9)
    (key,) = asyncio.run(supply.keys([DomainSpec(name=f"{tmp_path}/set.toml")]))
    with pytest.raises(DomainError) as caught:
        asyncio.run(supply.drawn(key, root_seed=0, numbers=[0]))
    assert caught.value.message == "domain 'own.set': all 1 tasks of the set are held out."
    assert caught.value.next_step == "write more tasks, or set a smaller domains.heldout_share"


def test_what_is_wrong_with_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BROKEN)
    (tmp_path / "bad.py").write_text("1 // 0")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(UsageError, match="no file"):
        catalogue.load("nowhere.py:DOMAIN")
    with pytest.raises(UsageError, match=r"own.py has no 'broken'; its domains: DOMAIN\."):
        catalogue.load(f"{tmp_path}/own.py:broken")
    (tmp_path / "class.py").write_text(BROKEN.replace("DOMAIN = Broken()", ""))
    with pytest.raises(UsageError, match=r"class.py wants a name, .*; its domains: Broken\."):
        catalogue.load(f"{tmp_path}/class.py")
    (tmp_path / "none.py").write_text("HALF = object()")
    with pytest.raises(UsageError, match="holds no object with name, levels, task, oracle"):
        catalogue.load(f"{tmp_path}/none.py:X")
    with pytest.raises(UsageError, match="lacks"):
        catalogue.load(f"{tmp_path}/own.py:HALF")
    with pytest.raises(UsageError, match="is no TOML"):
        catalogue.load(f"{tmp_path}/bad.toml")
    with pytest.raises(DomainError, match=r"bad.py:X' raised ZeroDivisionError.* \(bad.py:1\)"):
        catalogue.load(f"{tmp_path}/bad.py:X")
    with pytest.raises(UsageError, match="no file"):
        asyncio.run(Supply(InProcess()).keys([DomainSpec(name="nowhere.toml")]))


def test_a_file_that_is_no_python_is_a_persons_mistake(tmp_path: Path) -> None:
    """It ended as a failed run (exit code 1) and left the run's folder behind."""
    (tmp_path / "bad.py").write_text("def domain(:")
    with pytest.raises(UsageError, match="SyntaxError: invalid syntax"):
        asyncio.run(Supply(InProcess()).keys([DomainSpec(name=f"{tmp_path}/bad.py:X")]))


FLOOD = """
from posttrain.domains.domain import answer_task

class Flood:
    name, levels, oracle = "own.flood", 1, None

    def task(self, seed, level):
        length = 5_000_000 if seed % 2 else 3_000_000
        return answer_task("x" * length, domain=self.name, seed=seed, level=level, answer="1")
"""


def test_a_domain_that_floods_is_a_domain_error(tmp_path: Path) -> None:
    """Tasks of 50 MB were tokenised in the run's own process, which died of it."""
    (tmp_path / "own.py").write_text(FLOOD)
    name = f"{tmp_path}/own.py:Flood"
    assert len(catalogue.tasks(name, [[2, 0]])) == 1
    with pytest.raises(DomainError, match=r"own.flood \(seed 3, level 0\).*5,000,"):
        catalogue.tasks(name, [[3, 0]])


def test_a_json_task_set_loads_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text(
        '{"name": "own.set", "tasks": [{"objective": "Say a.", "oracle": {"answer": "a"},'
        ' "checks": [{"kind": "exact", "params": {"answer": "a"}}]}]}'
    )
    told = catalogue.describe(f"{tmp_path}/set.json")
    (key,) = told.pop("set_keys")
    assert told == {"name": "own.set", "levels": 1}
    supply = Supply(InProcess(), heldout_share=1e-9)
    (found,) = asyncio.run(supply.keys([DomainSpec(name=f"{tmp_path}/set.json")]))
    assert found.set_key == key
    tasks = asyncio.run(supply.drawn(found, root_seed=0, numbers=[0, 1]))  # two epochs
    assert [task.description.objective for task in tasks] == ["Say a.", "Say a."]


def test_supply_resolves_names_patterns_levels_and_weights() -> None:
    workers = InProcess()
    supply = Supply(workers, timeout_s=5.0)
    specs = [
        DomainSpec(name="toy.*", levels=(0,), weight=2.0),
        DomainSpec(name="terminal.edit"),
    ]
    keys = asyncio.run(supply.keys(specs))
    assert [key.id for key in keys[:3]] == ["toy.copy/0", "toy.digit/0", "toy.sort/0"]
    assert [key.weight for key in keys] == [2.0, 2.0, 2.0, *[1 / 3] * 3]
    assert workers.calls == []
    tasks = asyncio.run(supply.pool(keys[0], root_seed=0, count=8, split=Split.HELDOUT))
    assert workers.calls == [("posttrain.domains.catalogue:pool", 40.0)]
    oracles = asyncio.run(supply.oracles(keys[0], tasks))
    assert [o.turns[0].text for o in oracles] == [t.private["answer"] for t in tasks]
    assert asyncio.run(supply.problems(keys[0], [1, 2])) == ()


def test_the_example_of_an_own_domain_keeps_the_contract() -> None:
    name = f"{EXAMPLE}:MULTIPLES"
    assert len(EXAMPLE.read_text().splitlines()) < 80
    assert (
        catalogue.contract(name, [[seed, level] for seed in range(20) for level in range(3)]) == []
    )
    for one in catalogue.tasks(name, [[seed, 1] for seed in range(20)]):
        params = one["checks"][0]["params"]
        space: dict = {}
        exec(params["source"], space)
        for reply, wanted in (
            (one["private"]["answer"], 1.0),
            ("", 0.0),
            (one["description"]["objective"], 0.0),
            (str(int(one["private"]["answer"]) + 1), 0.0),
        ):
            order = type("Order", (), {"reply": reply, "params": params["params"]})
            assert space["check"](order) == wanted
