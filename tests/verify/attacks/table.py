"""The attacks as a table of `docs/VERIFICATION.md`; run as a module, it writes that.

Read from the families, so what the page says of an attack is what the suite has of it.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.verify.attacks.attack import Attack

PAGE = Path(__file__).parents[3] / "docs" / "VERIFICATION.md"
BEGIN, END = "<!-- attacks: begin -->", "<!-- attacks: end -->"
FAMILIES = ("suites", "programs", "workspaces", "answers", "texts", "actions", "failures")

ELSEWHERE = {
    11: "history of a repository: no kind of ours reads one",
    12: "fetching the solution: `tests/sandbox/attacks/test_network.py`; nothing is reachable",
    13: "tools of a hosted model: a policy of ours has none",
    30: "pages of a web environment: none",
    31: "answers that are public: tasks are generated, held-out ones are split by hash",
    38: "lazy results on accelerators: none are judged",
    39: "caches between warm-up and timing: speed is not paid",
    41: "copied weights: none are judged",
    44: "formal proofs: no kind",
    45: "a reset from inside: `tests/sandbox/attacks`; there is no such service inside",
    49: "a user simulator that is talked into it: none",
    50: "hidden reasoning: no monitor is part of a reward",
}
"""Entries of the catalogue without an attack here, and why."""


def families() -> dict[str, list[Attack]]:
    """The attacks by family."""
    return {
        name: importlib.import_module(f"tests.verify.attacks.test_{name}").FAMILY
        for name in FAMILIES
    }


def table() -> str:
    """A table a family, one row an attack, and what is elsewhere."""
    lines = []
    for name, attacks in families().items():
        lines += [f"### {name}: {len(attacks)}", "", f"`tests/verify/attacks/test_{name}.py`", ""]
        lines += ["| entry | attack | kind | held by |", "| --- | --- | --- | --- |"]
        lines += [f"| {one.entry} | {one.name} | `{one.kind}` | {one.held} |" for one in attacks]
        lines.append("")
    lines += ["### not here", "", "| entry | why |", "| --- | --- |"]
    lines += [f"| {entry} | {why} |" for entry, why in ELSEWHERE.items()]
    return "\n".join(lines)


def page() -> str:
    """The page with the table as it should be."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
