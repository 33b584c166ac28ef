"""Configuration of the embedded engine. Imports no torch, so that reading a configuration is cheap.

What is not here: the type of the numbers. Keys and values have the model's own.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from posttrain.core.config import Settings


class EngineSettings(Settings):
    """How much the engine does at once."""

    max_batch: int = Field(default=64, ge=1)
    """Requests of one weight slot that run side by side."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Tokens that one step computes, decoded and prefilled together."""
    cache_tokens: int = Field(default=16_384, ge=16)
    """Tokens whose keys and values fit in memory at once."""

    @model_validator(mode="after")
    def _room_for_a_batch(self) -> Self:
        if self.max_step_tokens < self.max_batch:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) is smaller than max_batch "
                f"({self.max_batch}); every running request needs a token of each step"
            )
        return self
