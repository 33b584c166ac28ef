from dataclasses import replace

import pytest

from posttrain.core.trajectory import Sampling
from posttrain.evals.registry import Registry, key


@pytest.fixture
def stored(tmp_path, evaluated):
    registry, one = Registry(tmp_path / "evals"), evaluated({"a": [1, None]}, constants={"a": 0.5})
    return registry, one, registry.put(one)


def asked(one):
    return {"suite": one.suite, "weights": one.weights, "sampling": one.sampling}


def test_an_evaluation_is_computed_once(stored):
    registry, one, _ = stored
    assert registry.get(**asked(one)) == one


def test_other_suites_weights_and_samplings_are_other_evaluations(stored):
    registry, one, _ = stored
    others = [{"suite": "t"}, {"weights": "v"}, {"sampling": Sampling(temperature=0.0, seed=1)}]
    for other in others:
        assert registry.get(**(asked(one) | other)) is None
    names = {key(**(asked(one) | other)) for other in ({}, *others)}
    assert len(names) == 4


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"suite": "s"}', '{"suit": 1}'])
def test_a_damaged_file_is_computed_again(damage, stored):
    registry, one, path = stored
    path.write_text(damage)
    assert registry.get(**asked(one)) is None
    registry.put(one)
    assert registry.get(**asked(one)) == one


def test_a_file_under_a_wrong_name_is_not_trusted(stored):
    registry, one, path = stored
    other = asked(one) | {"weights": "v"}
    path.rename(path.with_name(f"{key(**other)}.json"))
    assert registry.get(**other) is None


def test_a_failed_write_leaves_the_old_evaluation_and_nothing_else(stored, monkeypatch):
    registry, one, path = stored

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        registry.put(replace(one, duration_s=9.0))
    assert registry.get(**asked(one)) == one
    assert [file.name for file in path.parent.iterdir()] == [path.name]
