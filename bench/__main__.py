"""`python -m bench NAME [--quick]`: measure, print a table, print one JSON object as last line.

`--write` also rewrites the bench's table in docs/BENCHMARKS.md; `--all` does that for every bench,
each in a process of its own. A bench is a module of this folder with `main(quick: bool) -> dict`.
The one thing that must stay true: what stands in the tables came from a run whose machine, date and
command stand beside it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.core.errors import nearest

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "BENCHMARKS.md"
BEGIN, END = "<!-- bench:{name} -->", "<!-- /bench:{name} -->"


def names() -> list[str]:
    """Names of all benches."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure posttrain.")
    parser.add_argument("name", nargs="?", help=f"one of: {', '.join(names())}")
    parser.add_argument("--all", action="store_true", help="run all and rewrite the tables")
    parser.add_argument("--quick", action="store_true", help="smaller work, under a minute")
    parser.add_argument("--write", action="store_true", help="rewrite the table of this bench")
    asked = parser.parse_args(arguments)
    if asked.all and asked.name is None:
        return run_all(quick=asked.quick)
    if asked.name is None or asked.all:
        parser.error("give one NAME, or --all")
    if asked.name not in names():
        hint = nearest(asked.name, names())
        known = ", ".join(names())
        print(f"error: there is no bench '{asked.name}'{hint} (known: {known})", file=sys.stderr)
        return 2
    return run_one(asked.name, quick=asked.quick, write=asked.write)


def run_one(name: str, *, quick: bool, write: bool) -> int:
    """Measure, print the table, and the JSON object as the very last line."""
    found: Mapping[str, Any] = importlib.import_module(f"bench.{name}").main(quick)
    told = rows(found)
    width = max((len(key) for key, _ in told), default=0)
    print(f"\n{name}" + (" (quick)" if quick else ""))
    for key, value in told:
        print(f"  {key:{width}}  {value}")
    if write:
        command = f"python -m bench {name}" + (" --quick" if quick else "")
        rewrite(PAGE, name, section(name, found, command=command))
    print(json.dumps({"bench": name, "quick": quick, **found}), flush=True)
    return 0


def run_all(*, quick: bool) -> int:
    """Every bench in its own process; a bench that fails leaves its table as it was."""
    failed = []
    for name in names():
        options = ["--write", *(["--quick"] if quick else [])]
        ended = subprocess.run([sys.executable, "-m", "bench", name, *options], cwd=FOLDER.parent)
        if ended.returncode != 0:
            failed.append(name)
    if failed:
        print(f"error: these failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def section(name: str, found: Mapping[str, Any], *, command: str) -> str:
    """The Markdown of one bench: where, when and how, then its table.

    A key `peers` (name to version) is told in the head instead of the table.
    """
    peers = found.get("peers") or {}
    versions = ", ".join(f"{peer} {version}" for peer, version in peers.items())
    head = f"`{command}` · {time.strftime('%Y-%m-%d')} · {machine()}"
    table = [f"| `{key}` | {value} |" for key, value in rows(found)]
    lines = [f"### {name}", "", head + (f" · peers: {versions}" if versions else ""), ""]
    return "\n".join([*lines, "| | |", "| --- | --- |", *table])


def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines of a table: what consists of records has a line for each of them."""
    told: list[tuple[str, str]] = []
    for key, value in found.items():
        if isinstance(value, dict) and any(isinstance(part, dict) for part in value.values()):
            told += [(f"{key} {name}", cell(part)) for name, part in value.items()]
        elif key != "peers":
            told.append((key, cell(value)))
    return told


def cell(value: Any) -> str:
    """A value for people; None is a measurement that was not made."""
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " · ".join(f"{key} {cell(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(cell, value)) or "none"
    return str(value)


def machine() -> str:
    """Processor, cores and memory in one phrase."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        told = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = told[0].partition(":")[2].strip() if told else model
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = os.cpu_count()
    return f"{model}, {cores} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"


def rewrite(page: Path, name: str, text: str) -> None:
    """Replace the bench's part of the page, or add it at the end."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    old = page.read_text(encoding="utf-8") if page.exists() else "# Benchmarks\n"
    block = f"{begin}\n{text}\n{end}"
    if begin in old and end in old:
        before, _, rest = old.partition(begin)
        new = before + block + rest.partition(end)[2]
    else:
        new = f"{old.rstrip()}\n\n{block}\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
