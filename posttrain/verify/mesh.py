"""Measures of a mesh file that an attempt left, and how near it is to a reference solid.

For workers only: reading and cutting hostile meshes takes any time and memory. Lengths have the
unit of the file. The one thing that must stay true: what is measured is a closed solid of one
sheet, whose every part counts once, whatever the file claims.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import manifold3d
import numpy as np
import trimesh
from manifold3d import Manifold

from posttrain.core.task import Json

MAX_FACES = 200_000
SLICES = 16
"""Planes across each axis at which the mesh is compared with what it encloses."""
SAMPLES = 3_000
"""Points of each surface for the Chamfer distance."""
SEGMENTS = 128
"""Of circles, in reference solids."""
EXACT = 1e-5
"""Relative difference of volumes and areas that rounding may make (STL has single precision)."""


class Flawed(Exception):
    """The file is no closed solid, and why."""


def measured(data: str, how: str, order: Mapping[str, Json]) -> dict[str, Json]:
    """What there is to say of the mesh in base64 `data`: `refused`, why it is no solid, or numbers
    by measure, symmetries as the IoU with the mirror image. `fault`: the reference is none.
    """
    reference = None
    if order["reference"] is not None:
        try:
            reference = _reference(order["reference"])
        except (Flawed, ValueError, TypeError, KeyError) as error:
            return {"fault": f"{type(error).__name__}: {error}"}
    rng = np.random.default_rng(order["seed"])
    try:
        body = solid(base64.b64decode(data), how, rng)
    except Flawed as error:
        return {"refused": str(error)}
    low, high = np.array(body.bounding_box()).reshape(2, 3)
    bodies = [one for one in body.decompose() if one.volume() > 0]
    found: dict[str, Json] = {
        "volume": body.volume(),
        "area": body.surface_area(),
        "extents": (high - low).tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "bodies": len(bodies),
        "genus": sum(one.genus() for one in body.decompose()),
    }
    found["symmetry"] = [_iou(body, _mirrored(body, plane)) for plane in order["planes"]]
    if reference is not None:
        found["iou"] = _iou(body, reference)
        found["chamfer"] = _chamfer(body, reference, rng)
    return found


# --- reading ----------------------------------------------------------------------------------


def solid(data: bytes, how: str, rng: np.random.Generator) -> Manifold:
    """The closed solid of a file.

    Raises:
        Flawed: it is none.
    """
    try:
        loaded: Any = trimesh.load_mesh(io.BytesIO(data), file_type=how, process=False)
        points = np.asarray(loaded.vertices, dtype=np.float64)
        faces = np.asarray(loaded.faces, dtype=np.int64)
    except Exception as error:  # whatever the reader makes of a hostile file
        raise Flawed(f"no {how} mesh: {type(error).__name__}: {error}"[:300]) from None
    if not 4 <= len(faces) <= MAX_FACES:
        raise Flawed(f"wanted 4 to {MAX_FACES} faces, got {len(faces)}")
    if faces.min() < 0 or faces.max() >= len(points):
        raise Flawed("a face has a vertex that is not there")
    used = points[faces]
    if not np.isfinite(used).all() or np.abs(used).max() > 1e9:
        raise Flawed("a vertex that is no place")
    points, faces = _merged(used)
    first, second, third = (points[faces[:, corner]] for corner in range(3))
    volume = float((first * np.cross(second, third)).sum() / 6)
    built = Manifold(manifold3d.Mesh64(points, faces.astype(np.uint64)))
    if built.status() != manifold3d.Error.NoError or built.is_empty():
        raise Flawed(f"not watertight: {built.status().name}")
    if volume <= 0:
        raise Flawed("its faces look inwards")
    _ensure_single(built, volume, points[faces], rng)
    return built


def _merged(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vertices without doubles, and the faces that have three different ones."""
    points, index = np.unique(corners.reshape(-1, 3), axis=0, return_inverse=True)
    faces = index.reshape(-1, 3)
    apart = (faces != np.roll(faces, 1, axis=1)).all(axis=1)
    return points, faces[apart]


def _ensure_single(
    built: Manifold, volume: float, corners: np.ndarray, rng: np.random.Generator
) -> None:
    """Refuse a mesh that encloses some place twice, or inside out.

    Its parts, joined, have the volume that its faces claim; and on planes across each axis, at
    heights that a hidden seed draws, the outline has the area that it encloses.

    Raises:
        Flawed: it does.
    """
    parts = built.decompose()
    outer = [one for one in parts if one.volume() > 0]
    hollow = [one for one in parts if one.volume() <= 0]
    joined = Manifold.batch_boolean(outer, manifold3d.OpType.Add).volume()
    inner = sum(-one.volume() for one in hollow)
    if abs(joined - inner - volume) > EXACT * volume:
        raise Flawed("bodies that overlap")
    for axis in range(3):
        turned = np.roll(corners, -axis - 1, axis=2)
        matrix = np.zeros((3, 4))
        matrix[range(3), [(axis + 1) % 3, (axis + 2) % 3, axis]] = 1
        upright = built.transform(matrix)
        low, high = turned[:, :, 2].min(), turned[:, :, 2].max()
        size = float(np.ptp(turned[:, :, 0]) * np.ptp(turned[:, :, 1]))
        heights = low + (high - low) * (np.arange(SLICES) + rng.random(SLICES)) / SLICES
        for height in heights:
            claimed = _outline(turned, height)
            if abs(upright.slice(float(height)).area() - claimed) > EXACT * 10 * size:
                raise Flawed("it passes through itself")


def _outline(corners: np.ndarray, height: float) -> float:
    """Signed area within the outline of faces (N, 3, 3) at a height along their last axis."""
    above = corners[:, :, 2] > height
    cut = corners[above.any(axis=1) & ~above.all(axis=1)]
    above = cut[:, :, 2] > height
    area = 0.0
    ends = np.zeros((2, len(cut), 2))
    for first in range(3):
        second = (first + 1) % 3
        start, stop = cut[:, first], cut[:, second]
        crosses = above[:, first] != above[:, second]
        rise = np.where(crosses, stop[:, 2] - start[:, 2], 1.0)
        share = ((height - start[:, 2]) / rise)[:, None]
        place = start[:, :2] + share * (stop[:, :2] - start[:, :2])
        for side, here in enumerate((crosses & above[:, first], crosses & ~above[:, first])):
            ends[side][here] = place[here]
    (x, y), (u, v) = ends[0].T, ends[1].T
    area = float((x * v - u * y).sum() / 2)
    return area


# --- comparing --------------------------------------------------------------------------------


def _iou(one: Manifold, other: Manifold) -> float:
    common = (one ^ other).volume()
    return float(common / (one.volume() + other.volume() - common))


def _mirrored(body: Manifold, plane: Sequence[Sequence[float]]) -> Manifold:
    """The mirror image at a plane: a point of it, and its normal."""
    point, normal = np.array(plane, dtype=float)
    moved = body.translate((-point).tolist()).mirror(normal.tolist())
    return moved.translate(point.tolist())


def _chamfer(one: Manifold, other: Manifold, rng: np.random.Generator) -> float:
    """Mean distance from points of one surface to the nearest of the other, of both directions."""
    left, right = _sampled(one, rng), _sampled(other, rng)
    nearest = [np.sqrt(_nearest(*pair)).mean() for pair in ((left, right), (right, left))]
    return float(sum(nearest) / 2)


def _nearest(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Squared distances from each point to the nearest of others, a few hundred at a time."""
    found = [
        ((part[:, None] - others[None]) ** 2).sum(axis=2).min(axis=1)
        for part in np.array_split(points, max(1, len(points) // 250))
    ]
    return np.concatenate(found)


def _sampled(body: Manifold, rng: np.random.Generator) -> np.ndarray:
    """Points of the surface, drawn by area."""
    mesh = body.to_mesh64()
    corners = np.asarray(mesh.vert_properties)[:, :3][np.asarray(mesh.tri_verts).astype(np.int64)]
    edges = corners[:, 1:] - corners[:, :1]
    areas = np.linalg.norm(np.cross(edges[:, 0], edges[:, 1]), axis=1)
    chosen = rng.choice(len(areas), SAMPLES, p=areas / areas.sum())
    shares = rng.random((SAMPLES, 2))
    shares = np.where(shares.sum(axis=1, keepdims=True) > 1, 1 - shares, shares)
    return np.asarray(corners[chosen, 0] + (shares[:, :, None] * edges[chosen]).sum(axis=1))


# --- references -------------------------------------------------------------------------------


def _reference(told: Mapping[str, Json]) -> Manifold:
    """The solid that a description says.

    Raises:
        Flawed, ValueError, TypeError, KeyError: it says none.
    """
    body = _described(told)
    if body.status() != manifold3d.Error.NoError or body.volume() <= 0:
        raise Flawed("the reference is no solid with a volume")
    return body


def _described(told: Mapping[str, Json]) -> Manifold:
    fields = dict(told)
    place, turn = fields.pop("at", (0, 0, 0)), fields.pop("turn", (0, 0, 0))
    height = fields.pop("height", None)
    how = fields.pop("format", "off")
    if len(fields) != 1:
        raise ValueError(f"wanted one of box, cylinder, sphere, union, … in {dict(told)!r:.120}")
    ((kind, value),) = fields.items()
    if kind == "box":
        body = Manifold.cube(value, True)
    elif kind == "sphere":
        body = Manifold.sphere(value, SEGMENTS)
    elif kind == "cylinder":
        body = Manifold.cylinder(height, value, value, SEGMENTS, True)
    elif kind == "mesh":
        text = str(value).encode() if how in ("off", "obj") else base64.b64decode(value)
        body = solid(text, how, np.random.default_rng(0))
    elif kind in ("union", "difference", "intersection"):
        operation = {"union": "Add", "difference": "Subtract", "intersection": "Intersect"}[kind]
        parts = [_described(one) for one in value]
        body = Manifold.batch_boolean(parts, getattr(manifold3d.OpType, operation))
    else:
        raise ValueError(f"no solid {kind!r}")
    return body.rotate(tuple(turn)).translate(tuple(place))
