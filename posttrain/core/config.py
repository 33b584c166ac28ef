"""Strict configuration: frozen models, sources with origins, errors that name the nearest key.

A part's configuration class derives from `Settings` and stands beside the part. It does no I/O and
imports no engine. The one thing that must stay true: an unknown, misplaced, duplicated or
ill-typed key stops the program (exit 2) before any work.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of every configuration class: frozen, unknown keys refused, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
