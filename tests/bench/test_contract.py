"""The bench contract: one JSON object last, tables rewritten in place, unknown names refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench import __main__ as bench


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("bench.sample")
    module.main = lambda quick: {"speed": 12.34567, "ratio": None, "quick_work": quick}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.sample", module)
    monkeypatch.setattr(bench, "names", lambda: ["sample"])


@pytest.mark.usefixtures("sample")
def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["sample", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {
        "bench": "sample", "quick": True, "speed": 12.34567, "ratio": None, "quick_work": True,
    }  # fmt: skip
    assert any("speed" in line and "12.35" in line for line in lines[:-1])
    assert any("ratio" in line and "not measured" in line for line in lines[:-1])


@pytest.mark.usefixtures("sample")
def test_an_unknown_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["sampel"]) == 2
    assert "did you mean 'sample'?" in capsys.readouterr().err


@pytest.mark.usefixtures("sample")
def test_a_table_is_written_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "BENCHMARKS.md"
    monkeypatch.setattr(bench, "PAGE", page)
    assert bench.main(["sample"]) == 0
    assert not page.exists()
    assert bench.main(["sample", "--write"]) == 0
    text = page.read_text()
    assert "`python -m bench sample` · " in text
    assert "| `speed` | 12.35 |" in text


def test_records_have_a_line_each() -> None:
    found = {"n": [1, 2.5], "none": [], "pair": {"a": 1, "b": 0.25}, "by": {"x": {"p": 0.001}}}
    assert bench.rows(found) == [
        ("n", "1, 2.5"), ("none", "none"), ("pair", "a 1 · b 0.25"), ("by x", "p 0.001"),
    ]  # fmt: skip


def test_a_table_is_replaced_where_it_stands_and_the_rest_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "BENCHMARKS.md"
    bench.rewrite(page, "a", "old a")
    bench.rewrite(page, "b", "old b")
    page.write_text(page.read_text() + "\nWords of a person.\n")
    bench.rewrite(page, "a", bench.section("a", {"speed": 2.0, "peers": {"x": "1.2"}}, command="c"))
    text = page.read_text()
    assert "old a" not in text
    assert "old b" in text
    assert "Words of a person." in text
    assert "| `speed` | 2 |" in text
    assert "peers: x 1.2" in text
    assert text.index("### a") < text.index("old b")
