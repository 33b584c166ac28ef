"""Programs of peers, each in an environment of its own (`bench/peers/setup.sh NAME`).

Their threads are as they set them by default: a peer is measured as people run it, but with freed
memory kept as we keep it, without which page faults take most of the time. The one thing that must
stay true: a peer that is not here is None and is said, never guessed.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "peers"


def ask(name: str, program: str, *arguments: str) -> Mapping[str, Any] | None:
    """The JSON object that a peer's own program prints as its last line."""
    python = FOLDER / "envs" / name / "bin" / "python"
    if not python.exists():
        return missing(name, f"next: bench/peers/setup.sh {name}")
    command = [str(python), str(FOLDER / program), *arguments]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    kept |= {f"MALLOC_{name}_THRESHOLD_": str(2**31 - 1) for name in ("MMAP", "TRIM")}
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            command, stdout=subprocess.PIPE, check=True, text=True, env=kept, cwd=folder
        )
    found: Mapping[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def set_to(
    name: str, program: str, work: Mapping[str, Any], *options: str
) -> Mapping[str, Any] | None:
    """The same, of a program that reads its work from a JSON file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "work.json")
        file.write_text(json.dumps(work), "utf-8")
        return ask(name, program, str(file), *options)


def missing(name: str, reason: str) -> None:
    """Say why something is not measured."""
    print(f"{name} is not measured: {reason}")
