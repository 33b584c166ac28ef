import io
import runpy
import sys
from pathlib import Path


def names() -> list[str]:
    """The names of the probes, without running any."""
    before, sys.stdin = sys.stdin, io.StringIO("{}")
    try:
        path = Path(__file__).with_name("probes.py")
        return list(runpy.run_path(str(path), run_name="listing")["PROBES"])
    finally:
        sys.stdin = before
