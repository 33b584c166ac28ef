"""The kind `geometry`: is the mesh that an attempt left the solid that was asked for?

Meshes are read and cut in a worker: of `verify/mesh.py` nothing runs here but its import, by which
it is part of this kind's fingerprint. The one thing that must stay true: a mesh
that is no closed solid of one sheet pays 0, whatever its numbers, and so does one that its reader
does not survive; a worker that fails at a sound mesh as well is an error.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence

from posttrain.core.errors import UsageError, VerifierError, nearest
from posttrain.core.task import Check, Json
from posttrain.verify import mesh
from posttrain.verify.decided import decided
from posttrain.verify.kinds import Subject, Tools, allowed, seconds_of, text_of
from posttrain.verify.layers import Finding

MEASURER = f"{mesh.__name__}:{mesh.measured.__name__}"
MAX_FILE_BYTES = 8 << 20
FORMATS = ("stl", "obj", "ply", "off")
COUNTS = ("bodies", "genus")
LENGTHS = ("volume", "area", "extents", "low", "high")
RELATIVE = 0.01
MIRRORED = 0.99
SOUND = base64.b64encode(
    b"OFF\n4 4 0\n0 0 0\n1 0 0\n0 1 0\n0 0 1\n3 0 2 1\n3 0 1 3\n3 0 3 2\n3 1 2 3\n"
).decode()


async def geometry(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Whether a mesh file is a closed solid, and its measures are as asserted.

    Params: `path` (a declared file), `format` (`stl`, `obj`, `ply`, `off`; the path's ending tells
    it), any of `volume`, `area` (numbers), `extents`, `low`, `high` (of the bounding box; three
    numbers), within `relative` (0.01; of extents, for places) or `absolute`; `bodies`, `genus` (the
    number of through-holes of all bodies together), exactly; `planes` of symmetry (each a point and
    a normal; the IoU with the mirror image is at least `mirrored`, 0.99); `reference` (a solid),
    with `iou` (at least) and `chamfer` (at most, in the file's unit); `timeout_s`.
    """
    allowed(check, "path", "format", *LENGTHS, *COUNTS, "relative", "absolute", "planes",
            "mirrored", "reference", "iou", "chamfer", "timeout_s")  # fmt: skip
    path, how = text_of(check, "path"), _format(check)
    order = _order(check, tools.seeds(subject.trajectory))
    if subject.sealed is None:
        raise VerifierError("the attempt left no sealed file system to look at.")
    data = await subject.sealed.read(path, max_bytes=MAX_FILE_BYTES + 1)
    if data is None or len(data) > MAX_FILE_BYTES:
        why = f"no regular file of at most {MAX_FILE_BYTES} bytes"
        return Finding(value=0.0, evidence={"refused": why})
    given = base64.b64encode(data).decode()
    found = await decided(
        tools, MEASURER, (given, how, order), (SOUND, "off", order), timeout_s=seconds_of(check)
    )
    told: Mapping[str, Json] = {"refused": found.refused} if found.refused else found.answer
    if "fault" in told:
        raise UsageError(f"check 'geometry' has a reference that is none: {told['fault']}")
    if "refused" in told:
        return Finding(value=0.0, evidence={"refused": told["refused"], "seed": order["seed"]})
    wrong = _wrong(check, told)
    evidence = {**told, "seed": order["seed"]} | ({"wrong": wrong} if wrong else {})
    return Finding(value=float(not wrong), evidence=evidence)


def _wrong(check: Check, told: Mapping[str, Json]) -> list[str]:
    """The assertions that do not hold."""
    params = check.params
    relative, absolute = _bound(check, "relative", RELATIVE), _bound(check, "absolute", 0.0)
    found = [name for name in COUNTS if name in params and told[name] != params[name]]
    size = max(told["extents"])
    for name in (name for name in LENGTHS if name in params):
        wanted, got = _numbers(params[name]), _numbers(told[name])
        for one, other in zip(wanted, got, strict=True):
            scale = size if name in ("low", "high") else abs(one)
            if abs(one - other) > max(absolute, relative * scale):
                found.append(name)
                break
    if any(share < _bound(check, "mirrored", MIRRORED) for share in told["symmetry"]):
        found.append("planes")
    if "iou" in params and told["iou"] < params["iou"]:
        found.append("iou")
    if "chamfer" in params and told["chamfer"] > params["chamfer"]:
        found.append("chamfer")
    return found


def _order(check: Check, seed: int) -> dict[str, Json]:
    """What the worker is told.

    Raises:
        UsageError: a parameter of the wrong sort, or nothing that is asserted.
    """
    params = check.params
    for name in LENGTHS:
        if name in params and not _is_place(params[name], 1 if name in ("volume", "area") else 3):
            raise UsageError(f"check 'geometry' wants {_sort(name)} as {name!r}, got "
                             f"{params[name]!r:.80}.")  # fmt: skip
    for name in COUNTS:
        count = params.get(name, 0)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UsageError(f"check 'geometry' wants a count as {name!r}, got {count!r:.80}.")
    for name, default in (("relative", 0), ("absolute", 0), ("mirrored", 0), ("chamfer", 0),
                          ("iou", 0)):  # fmt: skip
        _bound(check, name, default)
    for name in (name for name in ("iou", "mirrored") if name in params):
        if not 0 < params[name] <= 1:
            raise UsageError(f"check 'geometry' wants a share above 0, up to 1, as {name!r}, got "
                             f"{params[name]!r:.80}.")  # fmt: skip
    near = [name for name in ("iou", "chamfer") if name in params]
    if bool(near) != ("reference" in params):
        raise UsageError("check 'geometry' wants 'iou' or 'chamfer' where it has a 'reference', "
                         "and a 'reference' where it has one of them.")  # fmt: skip
    planes, reference = params.get("planes", ()), params.get("reference")
    if not isinstance(planes, (list, tuple)) or not all(map(_is_plane, planes)):
        raise UsageError(f"check 'geometry' wants planes as a point and a normal, got "
                         f"{planes!r:.80}.")  # fmt: skip
    if reference is not None and not isinstance(reference, Mapping):
        raise UsageError(f"check 'geometry' wants a solid as 'reference', got {reference!r:.80}.")
    if not any(name in params for name in (*LENGTHS, *near)):
        raise UsageError(
            "check 'geometry' asserts no size: any solid would do.",
            f"give one of {', '.join(LENGTHS)}, or a reference.",
        )
    return {"planes": planes, "reference": reference, "seed": seed}


def _format(check: Check) -> str:
    how = check.params.get("format", text_of(check, "path").rpartition(".")[2].lower())
    if how not in FORMATS:
        hint = nearest(str(how), FORMATS)
        raise UsageError(f"no mesh format {how!r:.40}{hint}.", f"name one of {', '.join(FORMATS)}")
    return str(how)


def _bound(check: Check, name: str, default: float) -> float:
    value = check.params.get(name, default)
    if not _is_place(value, 1) or not value >= 0:
        raise UsageError(f"check 'geometry' wants 0 or more as {name!r}, got {value!r:.80}.")
    return float(value)


def _is_place(value: Json, count: int) -> bool:
    """Whether a value is a finite number, or a list of so many."""
    if count > 1:
        several = isinstance(value, (list, tuple)) and len(value) == count
        return several and all(_is_place(one, 1) for one in value)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and math.isfinite(value)


def _is_plane(value: Json) -> bool:
    two = isinstance(value, (list, tuple)) and len(value) == 2
    return two and all(_is_place(one, 3) for one in value) and any(value[1])


def _sort(name: str) -> str:
    return "a number" if name in ("volume", "area") else "three numbers"


def _numbers(value: Json) -> Sequence[float]:
    return value if isinstance(value, (list, tuple)) else (value,)
