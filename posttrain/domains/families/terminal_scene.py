"""One scene of the terminal family: files, an objective, commands that solve it, hidden assertions.

Not a runner: it builds values. Assertions speak the parameters of the check kind `state`. The one
thing that must stay true: what an untouched workspace already satisfies is a gate, never a share
of the reward, so that doing nothing earns 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.core.task import Artefact, ArtefactKind, Check, Json

Draw = random.Random
WHOLE = "."
"""The workspace itself, as a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a kind of terminal task makes from chance and a level."""

    objective: str
    files: Mapping[str, str]
    """Path → text, laid before the attempt."""
    commands: tuple[str, ...]
    """Bash commands that, run in order, solve it."""
    goals: tuple[Check, ...]
    """Assertions that an untouched workspace fails; they share the reward equally."""
    gates: tuple[Check, ...] = ()
    """Assertions that nothing else was harmed."""
    setup: tuple[str, ...] = ()
    """Bash commands run after the files are laid."""
    constraints: tuple[str, ...] = ("Change nothing else.",)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Gates and goals."""
        return (*self.gates, *self.goals)

    @property
    def artefacts(self) -> tuple[Artefact, ...]:
        """Each file an assertion reads, and the tree where one looks at more than contents."""
        paths = dict.fromkeys(str(check.params["path"]) for check in self.checks)
        kinds = {WHOLE: ArtefactKind.TREE}
        return tuple(
            Artefact(name=path, kind=kinds.get(path, ArtefactKind.FILE), path=path)
            for path in (WHOLE, *(path for path in paths if path != WHOLE))
        )


Make = Callable[[Draw, int], Scene]
"""A kind of terminal task: a scene from a stream of chance and a level."""


# --- assertions -------------------------------------------------------------------------------


def _state(name: str, path: str, *, gate: bool = False, **more: Json) -> Check:
    return Check(kind="state", params={"assert": name, "path": path, **more}, gate=gate)


def holds(path: str, text: str, *, normalise: str = "lines") -> Check:
    """A goal: the file holds this text."""
    return _state("file_equals", path, expected=text, normalise=normalise)


def gone(path: str, *, gate: bool = False) -> Check:
    """Nothing is at the path."""
    return _state("file_absent", path, gate=gate)


def has_mode(path: str, mode: str, *, gate: bool = False) -> Check:
    """The file has these permission bits, octal text such as `640`."""
    return _state("file_mode", path, expected=mode, gate=gate)


def is_json(path: str, value: Json) -> Check:
    """A goal: the file holds this JSON value, however written."""
    return _state("document_equals", path, expected=value)


def selects(path: str, query: str, rows: Sequence[Sequence[Json]], *, gate: bool = False) -> Check:
    """The query over the SQLite file yields these rows, in this order."""
    listed = [list(row) for row in rows]
    return _state("sqlite_rows", path, query=query, expected=listed, gate=gate)


def unharmed(files: Mapping[str, str], *touched: str) -> Check:
    """A gate: every laid file but the touched ones is as it was, and no other file was added."""
    kept = {path: text for path, text in files.items() if path not in touched}
    return _state("tree_unchanged", WHOLE, expected=kept, gate=True, **{"except": list(touched)})


# --- words ------------------------------------------------------------------------------------

NOUNS = (
    "apple", "river", "stone", "cloud", "maple", "tiger", "lemon", "piano", "ocean", "amber",
    "eagle", "flame", "grape", "honey", "ivory", "jelly", "knife", "lilac", "mango", "north",
    "olive", "pearl", "quilt", "robin", "sugar", "torch", "urban", "velvet", "wheat", "zebra",
)  # fmt: skip
FOLDERS = ("docs", "src", "data", "notes", "work", "files", "site", "team", "lab", "box")


def names(draw: Draw, count: int) -> list[str]:
    """Distinct names such as `maple42`."""
    return [f"{noun}{draw.randint(10, 99)}" for noun in draw.sample(NOUNS, count)]


def prose(draw: Draw, lines: int = 3) -> str:
    """Lines of words; different for every stream."""
    return "".join(" ".join(draw.choices(NOUNS, k=4)) + "\n" for _ in range(lines))
