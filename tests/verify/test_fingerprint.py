import sys

import pytest

from posttrain.core.task import Place
from posttrain.core.verdict import Component
from posttrain.verify.fingerprint import fingerprint, sources
from posttrain.verify.stack import BUILT_IN


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of a kind, a module it uses, and one it does not; each call imports it anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "kinds_of_a_test"
    folder.mkdir()
    texts = {
        "__init__": "", "kind": "from kinds_of_a_test.used import LIMIT\n",
        "used": "from . import deep\nLIMIT = 1\n", "deep": "", "other": "",
    }  # fmt: skip

    def made(**more):
        for name in [name for name in sys.modules if name.startswith(folder.name)]:
            monkeypatch.delitem(sys.modules, name)
        for name, text in (texts | more).items():
            (folder / f"{name}.py").write_text(text)
        __import__(f"{folder.name}.kind")
        import linecache

        linecache.clearcache()
        fingerprint.cache_clear()
        return fingerprint(f"{folder.name}.kind")

    yield made
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_it_follows_the_code_of_a_kind_and_of_what_that_uses(package):
    before = package()
    assert len(before) == 8
    assert package() == before
    assert package(kind="import kinds_of_a_test.used as used\n# changed\n") != before
    assert package(used="from . import deep\nLIMIT = 2\n") != before
    assert package(deep="# changed\n") != before
    assert package(other="# changed\n") == before


def test_every_built_in_kind_has_one_and_shares_it_within_a_module():
    prints = {name: fingerprint(kind.__module__) for name, kind in BUILT_IN.items()}
    assert all(len(value) == 8 for value in prints.values())
    assert prints["stdio"] == prints["suite"] != prints["exact"]


def test_what_is_copied_into_sandboxes_counts():
    used = set(sources("posttrain.verify.code"))
    inside = {"harness", "nursery", "calls", "comparison", "streams", "suites", "differences"}
    assert {f"posttrain.verify.{name}" for name in inside} <= used


def test_the_version_leaves_the_parameters_out():
    for told, version in (("exact@1+5c07ae31#9f2c41d0", "exact@1+5c07ae31"),
                          ("exact@1#9f2c41d0", "exact@1"), ("", "")):  # fmt: skip
        component = Component(name="a", place=Place.RULE, value=1.0, verifier=told)
        assert component.verifier_version == version


def test_what_workers_call_by_name_counts_though_it_is_not_imported_here():
    assert "posttrain.verify.symbolic" in sources("posttrain.verify.mathematics")
