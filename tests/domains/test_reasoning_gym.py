from __future__ import annotations

import asyncio
import datetime
import decimal
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from inprocess import InProcess

from posttrain.core import codec
from posttrain.core.errors import UsageError
from posttrain.core.task import Task
from posttrain.domains import catalogue
from posttrain.domains.adapters import reasoning_gym
from posttrain.domains.adapters import reasoning_gym_levels as table
from posttrain.domains.adapters.lossless import decode, encode
from posttrain.domains.adapters.reasoning_gym_answers import passes
from posttrain.domains.catalogue import DomainSpec
from posttrain.domains.domain import check_contract
from posttrain.domains.presets import PRESETS
from posttrain.domains.supply import Supply

SAMPLE = (
    "basic_arithmetic",
    "chain_sum",
    "fraction_simplification",
    "game_of_life_halting",
    "graph_color",
    "gsm_symbolic",
    "isomorphic_strings",
    "prime_factorization",
    "propositional_logic",
    "rubiks_cube",
    "simple_geometry",
    "time_intervals",
    "word_ladder",
)
EVERY = bool(os.environ.get("POSTTRAIN_ALL_DOMAINS"))
GENERATORS = sorted(reasoning_gym.LEVELS) if EVERY else SAMPLE
ORDER_OF_SETS = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note")


def paid(task: Task, answer: str) -> float:
    params = json.loads(json.dumps(task.checks[0].params))
    return reasoning_gym.score(params["dataset"], params["entry"], answer)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("generator", GENERATORS)
def test_the_oracle_is_paid_and_what_is_no_answer_is_not(generator: str) -> None:
    domain = reasoning_gym.domain(generator, name=f"reasoning_gym.{generator}")
    for level in range(domain.levels if EVERY else 1):
        for seed in range(3):
            task = codec.from_json(Task, codec.to_json(domain.task(seed, level)))
            assert check_contract(domain, seed=seed, level=level) == ()
            assert paid(task, domain.oracle(task).turns[0].text) == 1.0
            for junk in ("", "   ", "xyz", task.description.objective, "[", "1/0", "-"):
                if junk != task.private["answer"]:
                    assert paid(task, junk) == 0.0, junk


def test_what_is_offered_and_what_is_not_cover_the_library() -> None:
    from reasoning_gym.factory import DATASETS

    offered = set(reasoning_gym.LEVELS)
    assert offered | set(table.NOT_OFFERED) == set(DATASETS)
    assert not offered & set(table.NOT_OFFERED)
    assert offered >= table.COMPARED | table.READS_FILES | set(table.EXAMPLE_KEYS)
    assert len(offered) >= 100


def test_partial_credit_is_not_paid() -> None:
    task = reasoning_gym.domain("gcd", name="g").task(1, 0)
    right = task.private["answer"]
    assert paid(task, right) == 1.0
    assert paid(task, f"{right}1") == 0.0
    task = reasoning_gym.domain("game_of_life_halting", name="g").task(1, 0)
    other = {"True": "False", "False": "True"}[task.private["answer"]]
    assert paid(task, task.private["answer"].lower()) == 1.0
    assert paid(task, other) == 0.0
    with pytest.raises(UsageError, match=r"'gdc' \(did you mean 'gcd'"):
        reasoning_gym.score("gdc", {}, "1")


def test_levels_get_harder() -> None:
    domain = reasoning_gym.domain("chain_sum", name="c")
    lengths = [
        sum(len(domain.task(seed, level).description.objective) for seed in range(20))
        for level in (0, domain.levels - 1)
    ]
    assert lengths[0] < lengths[1]


def test_tasks_do_not_hang_on_the_hash_seed_or_the_shared_random_state() -> None:
    names = json.dumps(GENERATORS if EVERY else ORDER_OF_SETS)
    code = (
        "import json, random, hashlib; from posttrain.domains import catalogue;"
        "random.seed(); told = [catalogue.tasks('reasoning_gym.' + name, [[1, 0]])"
        f" for name in {names}];"
        "print(hashlib.sha256(json.dumps(told).encode()).hexdigest())"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    seen = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(seen) == 1


def test_a_generator_that_sets_the_precision_of_decimals_sets_its_own_alone() -> None:
    """`decimal_arithmetic` left its precision to all that came after it in the same process."""
    setting = {"level": 4}
    with decimal.localcontext(decimal.Context()):
        before = [
            reasoning_gym.generate("decimal_chain_sum", setting, seed=seed) for seed in range(8)
        ]
        for seed in range(4):
            reasoning_gym.generate("decimal_arithmetic", {"level": 0}, seed=seed)
        assert decimal.getcontext().prec == 28
        assert before == [
            reasoning_gym.generate("decimal_chain_sum", setting, seed=seed) for seed in range(8)
        ]


def test_a_kept_instance_yields_the_entries_of_a_new_one() -> None:
    for generator in ("spell_backward", "word_ladder"):
        setting = json.dumps({"level": 0})
        reasoning_gym._entry(generator, setting, 77)
        kept = reasoning_gym._entry(generator, setting, 5)
        reasoning_gym._kept.cache_clear()
        assert reasoning_gym._entry(generator, setting, 5) == kept


def test_levels_that_read_one_file_do_not_mix() -> None:
    domain = catalogue.load(catalogue.find("reasoning_gym.codeio").reference)
    alone = domain.task(3, level=0)
    domain.task(3, level=1)
    assert domain.task(3, level=0) == alone


def test_an_own_parameterisation_is_a_domain() -> None:
    supply = Supply(InProcess())
    spec = DomainSpec(
        name="gcd_small",
        source="reasoning_gym.gcd",
        params=({"max_value": 9}, {"max_value": 50}),
    )
    keys = asyncio.run(supply.keys([spec]))
    assert [key.id for key in keys] == ["gcd_small/0", "gcd_small/1"]
    (task,) = asyncio.run(supply.drawn(keys[0], root_seed=1, numbers=[3]))
    assert task.domain == "gcd_small"
    assert paid(task, task.private["answer"]) == 1.0
    (oracle,) = asyncio.run(supply.oracles(keys[0], [task]))
    assert oracle.turns[0].text == task.private["answer"]


def test_a_wrong_parameter_is_a_usage_error_with_the_nearest() -> None:
    for params, told in (
        ({"max_valeu": 9}, r"no parameter 'max_valeu' \(did you mean 'max_value'"),
        ({"min_value": 9, "max_value": 3}, "refuses"),
        ({"seed": 1}, "no parameter 'seed'"),
    ):
        spec = DomainSpec(name="mine", source="reasoning_gym.gcd", params=params)
        with pytest.raises(UsageError, match=told):
            asyncio.run(Supply(InProcess()).keys([spec]))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_are_sound_and_large_enough_for_a_suite(preset: str) -> None:
    name = f"easy.{preset}"
    levels = catalogue.find(name).levels
    assert levels == catalogue.load(name).levels
    assert catalogue.contract(name, [[1, level] for level in range(levels)]) == []
    count = 128 if EVERY else 16
    for level in range(levels):
        held = catalogue.pool(name, level, 0, count, "heldout", 0.2)
        assert len({one["description"]["objective"] for one in held}) == count


_PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
_RICH = (
    _PLAIN
    | st.fractions()
    | st.dates()
    | st.datetimes().map(lambda moment: moment.replace(fold=0))
    | st.times().map(lambda moment: moment.replace(fold=0))
    | st.frozensets(st.integers(), max_size=1).map(set)
)


@given(
    st.recursive(
        _RICH,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(_PLAIN | st.just("~"), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_lossless_json_gives_back_the_same_values_and_types(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert repr(back) == repr(value)


def test_lossless_json_takes_numpy_and_refuses_objects() -> None:
    import numpy as np

    assert encode({"a": np.int64(3), "b": np.array([1, 2])}) == {"a": 3, "b": [1, 2]}
    assert encode(np.float64(0.5)) == 0.5
    assert decode(encode((Fraction(1, 3), datetime.date(2020, 1, 2))))[0] == Fraction(1, 3)
    with pytest.raises(TypeError, match="wanted plain data, got object"):
        encode(object())


@pytest.mark.parametrize("generator", sorted(table.READ_AS_PYTHON | table.READ_BY_SYMPY))
def test_an_answer_is_never_run_as_a_program(generator: str, tmp_path: Path) -> None:
    """Nine scorers evaluate the answer; one that writes a file must be refused unread."""
    domain = reasoning_gym.domain(generator, name=generator)
    task, mark = domain.task(1, 0), tmp_path / "mark"
    assert paid(task, domain.oracle(task).turns[0].text) == 1.0
    opened = f"open({str(mark)!r}, 'w')"
    for attack in (
        opened,
        f"[{opened}]",
        f"[{opened}, 'a']",
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"().__class__.__base__.__subclasses__() or {opened}",
        "9**9**9**9",
        "(9**99)**(9**99)",
    ):
        assert paid(task, attack) == 0.0
        assert not mark.exists()


def test_an_unevaluated_integral_is_neither_an_answer_nor_a_gold_answer() -> None:
    """Seed 0 at this level once had `-Integral(x*cos(x), x) + C` as its gold answer."""
    domain = reasoning_gym.domain("intermediate_integration", name="i")
    task = domain.task(0, 2)
    assert "Integral" not in task.private["answer"]
    assert paid(task, task.private["answer"]) == 1.0
    integrand = decode(task.checks[0].params["entry"])["metadata"]["integrand"]
    assert paid(task, f"Integral({integrand}, x) + C") == 0.0


def test_what_is_not_a_number_is_not_right() -> None:
    task = reasoning_gym.domain("complex_arithmetic", name="c").task(1, 0)
    assert paid(task, task.private["answer"]) == 1.0
    for answer in ("nan", "NaN + 1.0i", "inf"):
        assert paid(task, answer) == 0.0


HEDGED = (
    "fraction_simplification", "intermediate_integration", "letter_jumble", "simple_integration",
    "polynomial_multiplication", "sokoban", "spell_backward", "time_intervals", "word_sorting",
)  # fmt: skip


@pytest.mark.parametrize("generator", HEDGED)
def test_a_right_answer_beside_a_wrong_one_is_no_answer(generator: str) -> None:
    """Their scorers took what suited them: the first number, the beginning, what parses."""
    domain = reasoning_gym.domain(generator, name=f"reasoning_gym.{generator}")
    for level in range(domain.levels):
        tasks = [domain.task(seed, level) for seed in range(3)]
        golds = [domain.oracle(task).turns[-1].text for task in tasks]
        for number, task in enumerate(tasks):
            assert paid(task, golds[number]) == 1.0
            if golds[number] != golds[number - 1]:
                assert paid(task, f"{golds[number]} or {golds[number - 1]}") == 0.0


def test_numbers_of_a_milliard_digits_reach_no_scorer() -> None:
    for generator in ("countdown", "coin_flip", "simple_integration", "gcd"):
        assert not passes(generator, "1e999999999", gold="3", question="?")
        assert not passes(generator, "7*1.E+99999", gold="3", question="?")


def test_digits_of_other_scripts_are_not_read_as_numbers() -> None:
    """`int()` reads them: an answer "٣" was paid where 3 is right."""
    assert passes("rectangle_count", "3", gold="3", question="?")
    assert not passes("rectangle_count", "\u0663", gold="3", question="?")


@pytest.mark.parametrize(
    ("generator", "told"),
    [
        ("advanced_geometry", "{gold}, 21.61°"),  # what followed the second comma was ignored
        ("polynomial_equations", "{gold} or 7.0, {gold}"),  # parts that are no number were ignored
        ("figlet_font", "{gold} or another"),  # ten right letters paid in full
    ],
)
def test_an_answer_with_another_one_behind_it_is_none(generator, told):
    """These scorers read as far as they like what they read. Right ones beside them are paid."""
    source = reasoning_gym.domain(generator, name=generator)
    tried = 0
    for level in range(3):
        for seed in range(4):
            task = source.task(seed, level)
            entry = task.checks[-1].params["entry"]
            gold = source.oracle(task).turns[-1].text
            assert reasoning_gym.score(generator, entry, gold) == 1.0
            assert reasoning_gym.score(generator, entry, told.format(gold=gold)) == 0.0
            tried += 1
    assert tried == 12
