"""Workers that run the function right here, with everything passing through JSON."""

from __future__ import annotations

import importlib
import json

from posttrain.core.errors import WorkerError
from posttrain.core.task import Json


class InProcess:
    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    async def call(self, function: str, *arguments: Json, timeout_s: float) -> Json:
        self.calls.append((function, timeout_s))
        module, _, name = function.partition(":")
        given = json.loads(json.dumps(arguments, allow_nan=False))
        try:
            result = getattr(importlib.import_module(module), name)(*given)
        except Exception as error:
            raise WorkerError(f"{function} raised {type(error).__name__}: {error}") from error
        return json.loads(json.dumps(result, allow_nan=False))
