"""Configuration: precedence, origins, and errors that name every bad key (BR-70)."""

from __future__ import annotations

import json
import tomllib
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from posttrain.core.config import Resolved, Settings, load
from posttrain.core.errors import ConfigError


class Mode(StrEnum):
    SYNC = "sync"
    ASYNC = "async"


class Optim(Settings):
    lr: float = 1e-3
    clip: float | None = None


class Train(Settings):
    learning_rate: float = 1e-5
    num_epochs: int = 1
    betas: tuple[float, ...] = (0.9, 0.99)
    mode: Mode = Mode.SYNC
    optim: Optim = Optim()


class DomainChoice(Settings):
    name: str
    weight: float = 1.0


class Run(Settings):
    name: str = "run"
    seed: int = 0
    train: Train = Train()
    optim: Optim = Optim()
    domains: tuple[DomainChoice, ...] = ()
    weights: dict[str, float] = Field(default_factory=dict)


def write(folder: Path, text: str, name: str = "demo.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Run, file=write(folder, text))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_later_sources_win_and_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    preset = write(tmp_path, "seed = 1\n[train]\nnum_epochs = 2\nlearning_rate = 2e-5\n", "p.toml")
    file = write(tmp_path, "[train]\nnum_epochs = 3\nlearning_rate = 3e-5\n[optim]\nlr = 1.0\n")
    resolved = load(
        Run,
        preset=preset,
        file=file,
        environment={"POSTTRAIN_TRAIN__NUM_EPOCHS": "4", "POSTTRAIN_CACHE": "/x", "HOME": "/y"},
        overrides=["train.learning_rate=5e-5"],
    )
    run = resolved.value
    assert (run.seed, run.train.num_epochs, run.train.learning_rate, run.optim.lr) == (
        1, 4, 5e-5, 1.0,
    )  # fmt: skip
    assert str(resolved.origin("name")) == "default"
    assert str(resolved.origin("seed")) == "preset p:1"
    assert str(resolved.origin("optim", "lr")) == f"{file}:5"
    assert str(resolved.origin("optim", "clip")) == "default"  # its section was named, it was not
    assert str(resolved.origin("train", "num_epochs")) == (
        "environment variable POSTTRAIN_TRAIN__NUM_EPOCHS"
    )
    assert str(resolved.origin("train", "learning_rate")) == "--set"


def test_the_dump_says_every_value_with_its_origin_and_loads_back_equal(tmp_path: Path) -> None:
    text = '[[domains]]\nname = "gcd"\n[weights]\n"rg.gcd" = 2.0\n[train]\nmode = "async"\n'
    resolved = load(Run, file=write(tmp_path, text), overrides=["name=a # b"])
    dump = resolved.dump()
    assert 'mode = "async"  # ' in dump
    assert "lr = 0.001  # default" in dump
    assert "# clip is not set  # default" in dump
    again = load(Run, file=write(tmp_path, dump, "again.toml"))
    assert again.value == resolved.value


def test_toml_lists_fill_tuples_and_text_fills_enums(tmp_path: Path) -> None:
    run = load(Run, file=write(tmp_path, '[train]\nbetas = [0.5, 1]\nmode = "async"\n')).value
    assert run.train.betas == (0.5, 1.0)
    assert run.train.mode is Mode.ASYNC


def test_the_number_1e_minus_5_is_read_as_a_number(tmp_path: Path) -> None:
    assert load(Run, file=write(tmp_path, "[train]\nlearning_rate = 1e-5\n")).value.train == Train()
    assert load(Run, overrides=["train.learning_rate=1e-5"]).value.train.learning_rate == 0.00001
    environment = {"POSTTRAIN_TRAIN__LEARNING_RATE": "1e-5"}
    assert load(Run, environment=environment).value.train.learning_rate == 0.00001


@pytest.mark.parametrize(
    ("text", "key", "line", "hint"),
    [
        (
            "[train]\nlearning_rat = 1",
            "train.learning_rat",
            2,
            "did you mean 'train.learning_rate'?",
        ),
        ("[optim]\nlrr = 1.0", "optim.lrr", 2, "did you mean 'optim.lr'?"),
        ("[train]\nnum-epochs = 2", "train.num-epochs", 2, "did you mean 'train.num_epochs'?"),
        ("learning_rate = 1.0", "learning_rate", 1, "section [train]: 'train.learning_rate'"),
        ("[optim]\nnum_epochs = 1", "optim.num_epochs", 2, "it belongs to section [train]"),
        ("[train]\nseed = 1", "train.seed", 2, "it belongs to the top level: 'seed'"),
        ("[trian]\nnum_epochs = 1", "trian.num_epochs", 2, "did you mean 'train.num_epochs'?"),
        ("zzzz = 1", "zzzz", 1, "the top level knows: domains, name, "),
        (
            "[[domains]]\nname = 'a'\n[[domains]]\nname = 'b'\nwieght = 1.0",
            "domains[1].wieght",
            5,
            "did you mean 'domains.weight'?",
        ),
    ],
)
def test_an_unknown_key_is_named_with_place_and_nearest_name(
    tmp_path: Path, text: str, key: str, line: int, hint: str
) -> None:
    message = refusal(tmp_path, text)
    assert f"unknown key '{key}' in {tmp_path / 'demo.toml'} line {line}" in message
    assert hint in message


def test_all_bad_keys_are_named_at_once(tmp_path: Path) -> None:
    text = (
        "learning_rate = 1e-5\nseed = 1\nseed = 2\n"
        "[train]\nlearning_rat = 1\nnum-epochs = 2\nnum_epochs = [1, 2]\n[optim]\nlrr = 3\n"
    )
    message = refusal(tmp_path, text)
    for part in (
        "6 settings do not fit",
        "duplicate key 'seed'",
        "line 3; it is already set in line 2",
        "unknown key 'learning_rate'",
        "unknown key 'train.learning_rat'",
        "unknown key 'train.num-epochs'",
        "unknown key 'optim.lrr'",
        "'train.num_epochs' in",
        "got [1, 2]",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed = [1]", "'seed' in"),
        ('seed = "1"', "valid integer"),
        ("seed = 1.5", "got 1.5"),
        ("seed = true", "got true"),
        ("name = 3", "valid string"),
        ("[train]\nlearning_rate = nan", "finite number"),
        ('[train]\nmode = "fast"', "'sync' or 'async'"),
        ("train = 3", "'train' in"),
        ("[[domains]]\nweight = 1.0", "'domains[0].name' has no default"),
        ("seed = ", "is not TOML"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "override", ["train.learning_rat=1", "seed=1.5", "seed", "=3", "train=1", "seed=x"]
)
def test_overrides_get_the_same_checks(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load(Run, overrides=[override])


def test_the_same_override_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="duplicate key 'seed' in --set"):
        load(Run, overrides=["seed=1", "seed=2"])


def test_a_misspelt_environment_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment variable POSTTRAIN_TRAIN__STEPZ"):
        load(Run, environment={"POSTTRAIN_TRAIN__STEPZ": "1"})


def test_an_environment_variable_with_one_underscore_is_refused_not_ignored() -> None:
    told = r"POSTTRAIN_TRAIN_NUM_EPOCHS is no setting \(did you mean 'POSTTRAIN_TRAIN__NUM_EPOCHS'"
    with pytest.raises(ConfigError, match=told):
        load(Run, environment={"POSTTRAIN_TRAIN_NUM_EPOCHS": "2"})
    with pytest.raises(ConfigError, match="did you mean 'POSTTRAIN_TRAIN__NUM_EPOCHS'"):
        load(Run, environment={"POSTTRAIN_TRAIN_NUM_EPOCH": "2"})


def test_typed_text_stays_text_where_text_is_wanted() -> None:
    assert load(Run, overrides=["name=123"]).value.name == "123"
    assert load(Run, overrides=["name=a b"]).value.name == "a b"
    assert load(Run, overrides=['name="q"']).value.name == "q"
    assert load(Run, overrides=['weights."rg.gcd"=2']).value.weights == {"rg.gcd": 2.0}


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load(Run, file=tmp_path / "none.toml")


@given(st.integers(), st.floats(0, 1e300), st.text(max_size=8))
def test_any_value_survives_dump_and_load(seed: int, rate: float, name: str) -> None:
    run = Run(seed=seed, name=name, train=Train(learning_rate=rate))
    dump = Resolved(value=run, origins={}).dump()
    assert Run.model_validate_json(json.dumps(tomllib.loads(dump))) == run
