from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from posttrain.engine.settings import EngineSettings


def test_a_step_must_hold_a_token_of_every_running_request():
    with pytest.raises(ValidationError, match=r"max_step_tokens \(4\) is smaller"):
        EngineSettings(max_batch=8, max_step_tokens=4)


def test_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="max_bach"):
        EngineSettings(max_bach=8)  # type: ignore[call-arg]


def test_reading_settings_imports_no_torch():
    program = "import posttrain.engine.settings, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
