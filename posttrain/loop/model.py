"""The model of a run: one storage, the trainer's module and the engine over it, and rendering.

It builds and decides nothing. The one thing that must stay true: engine and trainer share their
parameters, so there is one set of weights to be in step with.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from posttrain.core import seeds
from posttrain.core.task import Json
from posttrain.engine import model as models
from posttrain.engine import threads
from posttrain.engine.model import AnyDecoder
from posttrain.engine.models import complete, resolve
from posttrain.engine.text import token_bytes
from posttrain.loop.handover import TrainedEngine
from posttrain.loop.settings import RunConfig
from posttrain.rollout.render import Renderer
from posttrain.rollout.tokenizer import TransformersTokenizer
from posttrain.schedule.device import EngineFirst
from posttrain.train.algorithms import algorithm
from posttrain.train.trainer import LocalTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model of a run, once: the trainer's module, the engine over its storage, rendering."""

    path: Path
    decoder: AnyDecoder
    engine: TrainedEngine
    renderer: Renderer

    @property
    def sha256(self) -> str:
        """Hash of the starting weights as they are computed with."""
        found = hashlib.sha256(str(self.decoder.dtype).encode())
        for path in sorted(self.path.glob("*.safetensors")):
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        return found.hexdigest()


def load_model(config: RunConfig, directory: Path) -> Model:
    """The configured model; a random one is made in the run's folder. Torch's own chance, which a
    model may draw from, starts from the run's seed.

    Raises:
        PreflightError: it is not there, or cannot be loaded.
    """
    torch.manual_seed(seeds.hashed(config.run.seed, "torch"))
    path = _path(config, directory)
    decoder = models.load(path, dtype=getattr(torch, config.model.dtype))
    tokenizer = models.load_tokenizer(path)
    engine = TrainedEngine(
        models.skeleton_over(decoder),
        settings=config.engine,
        policy=EngineFirst(),
        to_bytes=token_bytes(tokenizer),
    )
    renderer = Renderer(TransformersTokenizer(tokenizer))
    return Model(path=path, decoder=decoder, engine=engine, renderer=renderer)


def _path(config: RunConfig, directory: Path) -> Path:
    if config.model.name != "random":
        return resolve(config.model.name)
    path = directory / "model"
    if not (path / "config.json").is_file():
        for cut in directory.glob(".model-*"):  # what a killed process left half-written
            shutil.rmtree(cut, ignore_errors=True)
        with complete(path, setting="POSTTRAIN_RUNS") as made:
            models.random_model(made, seed=config.run.seed)
    return path


def trainer_of(config: RunConfig, model: Model) -> LocalTrainer:
    """The trainer of the model's weights, with a frozen copy where an algorithm's KL needs one.

    Raises:
        ConfigError: the algorithm is unknown.
    """
    rule = algorithm(config.train.algorithm)
    weight = rule.kl_weight if config.train.kl_weight is None else config.train.kl_weight
    reference = models.load(model.path, dtype=model.decoder.dtype) if weight else None
    return LocalTrainer(
        model.decoder,
        model.engine,
        config.train,
        run=config.run.name,
        temperature=config.rl.temperature,
        reference=reference,
    )


def environment(config: RunConfig, model: Model) -> dict[str, Json]:
    """What the report says about where a run was made."""
    return {
        "model": config.model.name,
        "forward": model.decoder.rewrite,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "cores": os.cpu_count(),
        "threads": threads.wanted() or torch.get_num_threads(),
        "machine": f"{platform.machine()} {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
