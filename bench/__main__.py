"""`python -m bench NAME [--quick]`: measure, print a table, print one JSON object as last line.

`--all` runs every bench in a process of its own and rewrites the tables of docs/BENCHMARKS.md. A
bench is a module of this folder with `main(quick: bool) -> dict`. The one thing that must stay
true: what stands in the tables came from a run whose machine, date and command stand beside it.
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
    return run_one(asked.name, quick=asked.quick)


def run_one(name: str, *, quick: bool) -> int:
    """Measure, print the table, and the JSON object as the very last line."""
    found: Mapping[str, Any] = importlib.import_module(f"bench.{name}").main(quick)
    width = max((len(key) for key in found), default=0)
    print(f"\n{name}" + (" (quick)" if quick else ""))
    for key, value in found.items():
        print(f"  {key:{width}}  {cell(value)}")
    print(json.dumps({"bench": name, "quick": quick, **found}), flush=True)
    return 0


def run_all(*, quick: bool) -> int:
    """Every bench in its own process; a bench that fails leaves its table as it was."""
    failed = []
    for name in names():
        command = [sys.executable, "-m", "bench", name, *(["--quick"] if quick else [])]
        ended = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True)
        print(ended.stdout, end="", flush=True)
        if ended.returncode != 0:
            failed.append(name)
            continue
        found = json.loads(ended.stdout.strip().splitlines()[-1])
        rewrite(PAGE, name, section(name, found, command=f"python -m {' '.join(command[2:])}"))
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
    rows = [
        f"| `{key}` | {cell(value)} |"
        for key, value in found.items()
        if key not in ("bench", "quick", "peers")
    ]
    lines = [f"### {name}", "", head + (f" · peers: {versions}" if versions else ""), ""]
    return "\n".join([*lines, "| | |", "| --- | --- |", *rows])


def cell(value: Any) -> str:
    """A value for people; None is a measurement that was not made."""
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, dict)):
        return json.dumps(value)
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
