"""The preset `smoke` over the real parts, cut down by overrides."""

from __future__ import annotations

import asyncio
from pathlib import Path

from posttrain.core import config
from posttrain.core.ports import Recorder
from posttrain.loop import wiring
from posttrain.loop.driver import Ending
from posttrain.loop.settings import RunConfig

PRESETS = Path(wiring.__file__).parent / "presets"


def settings(*overrides: str, preset: str = "smoke") -> RunConfig:
    path = PRESETS / f"{preset}.toml"
    return config.load(RunConfig, preset=path, overrides=overrides).value


def trained(
    directory: Path, chosen: RunConfig, recorder: Recorder, *, resume: bool = False
) -> Ending:
    async def body() -> Ending:
        async with wiring.open_run(chosen, directory, resume=resume, recorder=recorder) as run:
            return await run.train()

    return asyncio.run(body())
