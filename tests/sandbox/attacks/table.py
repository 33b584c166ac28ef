"""The attacks as a table of `docs/SANDBOX.md`; `python -m tests.sandbox.attacks.table` writes it.

Read from the families, so what the page says of an attack is what the suite has of it.
"""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

from tests.sandbox.attacks.attack import Attack

PAGE = Path(__file__).parents[3] / "docs" / "SANDBOX.md"
BEGIN, END = "<!-- attacks: begin -->", "<!-- attacks: end -->"
FAMILIES = (
    "escape", "reading", "writing", "privileges", "network", "resources", "persistence",
    "neighbours", "protocol", "archives", "output",
)  # fmt: skip


def attacks() -> list[Attack]:
    """All of them, family by family."""
    modules = [importlib.import_module(f"tests.sandbox.attacks.test_{name}") for name in FAMILIES]
    return [attack for module in modules for attack in module.FAMILY.attacks]


def table() -> str:
    """A table a family, one row an attack."""
    lines = []
    for family, found in itertools.groupby(attacks(), lambda attack: attack.family):
        rows = [_row(attack) for attack in found]
        lines += [
            f"### {family}: {len(rows)}",
            "",
            "| mechanism | primitive | boundary | control |",
        ]
        lines += ["| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def _row(attack: Attack) -> str:
    marks = [name for name in ("root", "tree") if getattr(attack, name)]
    control = attack.control + (f" ({', '.join(marks)})" if marks else "")
    name = attack.name.replace("_", " ")
    return f"| {name} | {attack.primitive} | {attack.boundary} | {control} |"


def page() -> str:
    """The page with the table as it must be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
