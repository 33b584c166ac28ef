"""Kept workspaces stay within their budget, and what was let go can be told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.events import Claimed, Declined, Labelled
from posttrain.observe.kept import KeptWorkspaces, LetGoError, Spared, archive_of, reviewed
from posttrain.observe.ledger import FileLedger


def kept(folder: Path, max_bytes: int = 30, **more) -> KeptWorkspaces:
    return KeptWorkspaces(folder, max_bytes=max_bytes, **more)


def put(into: KeptWorkspaces, name: str, *, domain: str = "d", size: int = 10) -> str:
    sha256 = into.put(name.encode().ljust(size, b"."), domain=domain, key=name)
    into.check()
    return sha256


def there(folder: Path, hashes: list[str]) -> list[bool]:
    read = archive_of(folder)

    def is_there(sha256: str) -> bool:
        try:
            return bool(read(sha256))
        except LetGoError:
            return False

    return [is_there(one) for one in hashes]


def test_the_oldest_are_let_go_and_that_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    into = kept(tmp_path, tell=told.append)
    hashes = [put(into, name) for name in "abcde"]
    assert there(tmp_path, hashes) == [False, False, True, True, True]
    assert (into.stats().archives, into.stats().size_bytes, into.stats().let_go) == (3, 30, 2)
    assert len(told) == 1
    assert "run.workspaces_mib" in told[0]
    with pytest.raises(LetGoError, match=r"run\.workspaces_mib"):
        archive_of(tmp_path)(hashes[0])
    with pytest.raises(KeyError, match="no blob") as lost:
        archive_of(tmp_path)("0" * 64)
    assert not isinstance(lost.value, LetGoError)


def test_what_was_left_again_is_kept_once_and_is_new(tmp_path: Path) -> None:
    into = kept(tmp_path)
    hashes = [put(into, name) for name in "abc"]
    assert put(into, "a") == hashes[0]
    assert into.stats().size_bytes == 30
    put(into, "d")
    assert there(tmp_path, hashes) == [True, False, True]


def test_domains_on_hold_and_attempts_under_review_are_let_go_last(tmp_path: Path) -> None:
    into = kept(tmp_path, spared=lambda: Spared(domains={"held": "why"}, keys={"b"}))
    hashes = [put(into, name, domain="held" if name == "a" else "d") for name in "abcdef"]
    assert there(tmp_path, hashes) == [True, True, False, False, False, True]
    put(into, "large", domain="held", size=20)  # they go as well where nothing else is left
    assert there(tmp_path, hashes) == [False, True, False, False, False, False]
    assert into.stats().size_bytes == 30


def test_one_larger_than_the_budget_goes_at_once(tmp_path: Path) -> None:
    into = kept(tmp_path)
    hashes = [put(into, "a"), put(into, "b", size=31)]
    assert there(tmp_path, hashes) == [False, False]


def test_a_run_that_goes_on_knows_what_it_kept(tmp_path: Path) -> None:
    hashes = [put(kept(tmp_path), name) for name in "abc"]
    put(kept(tmp_path), "a")
    with (tmp_path / "workspaces.jsonl").open("a") as file:
        file.write('{"sha256": "cut by a cra')
    spared = lambda: Spared(keys={"b"})  # noqa: E731
    hashes.append(put(kept(tmp_path, spared=spared), "d"))
    assert there(tmp_path, hashes) == [True, True, False, True]
    assert kept(tmp_path).stats().let_go == 1
    (tmp_path / "workspaces.jsonl").unlink()  # as in runs from before there was one
    again = kept(tmp_path)
    assert again.stats().size_bytes == 30
    put(again, "e")


def test_under_review_is_what_people_claimed_or_labelled(tmp_path: Path) -> None:
    path = tmp_path / "review.jsonl"
    assert reviewed(path) == set()
    with FileLedger(path) as file:
        file.append(Claimed(key="a", author="x", wall_s=0.0, until_s=9.0))
        file.append(Labelled(key="b", label="right", author="x"))
        file.append(Declined(key="c", author="x", wall_s=0.0))
    assert reviewed(path) == {"a", "b"}


@given(
    puts=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 20)), max_size=25),
    budget=st.integers(0, 60),
)
def test_within_the_budget_after_whatever_came(tmp_path_factory, puts, budget) -> None:
    folder = tmp_path_factory.mktemp("run")
    for name, size in puts:  # each by a new process
        into = kept(folder, budget, spared=lambda: Spared(keys={"a", "b"}))
        into.put(name.encode().ljust(size, b"."), domain="d", key=name)
        into.check()
