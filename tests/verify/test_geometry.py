import asyncio
import base64

import numpy as np
import pytest
import trimesh
from hypothesis import given, settings
from hypothesis import strategies as st
from trimesh import creation

from posttrain.core.errors import UsageError, WorkerError
from posttrain.core.task import Check
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify import geometry as kind
from posttrain.verify import mesh
from posttrain.verify.fingerprint import sources
from posttrain.verify.geometry import geometry

BOX = creation.box([2, 3, 4])
ORDER = {"planes": [], "reference": None, "seed": 3}


def moved(body, *by):
    copy = body.copy()
    copy.apply_translation(by)
    return copy


def inverted(body):
    copy = body.copy()
    copy.invert()
    return copy


def together(*bodies):
    return trimesh.util.concatenate(bodies)


def written(body, how="stl"):
    data = body.export(file_type=how)
    return data.encode() if isinstance(data, str) else data


def measured(body, **order):
    data = body if isinstance(body, bytes) else written(body)
    return mesh.measured(base64.b64encode(data).decode(), "stl", ORDER | order)


@pytest.fixture
def value(find, workspace):
    def run(body, path="part.stl", **params):
        data = body if isinstance(body, bytes) else written(body)
        (workspace / path).write_bytes(data)
        return find(geometry, Check(kind="geometry", params={"path": path} | params)).value

    return run


@pytest.mark.parametrize("how", ["stl", "stl_ascii", "obj", "ply", "off"])
def test_a_box_is_measured_in_every_format(how, value):
    path = f"part.{how.partition('_')[0]}"
    data = written(BOX, how)
    assert value(data, path, volume=24, area=52, extents=[2, 3, 4], low=[-1, -1.5, -2],
                 high=[1, 1.5, 2], bodies=1, genus=0, relative=1e-5) == 1.0  # fmt: skip
    for wrong in ({"volume": 24.5}, {"area": 51}, {"extents": [2, 4, 3]}, {"low": [0, 0, 0]},
                  {"volume": 24, "bodies": 2}, {"volume": 24, "genus": 1}):  # fmt: skip
        assert value(data, path, **wrong) == 0.0, wrong


def test_tolerances_are_relative_or_absolute(value):
    assert value(BOX, volume=24.2) == 1.0
    assert value(BOX, volume=24.3) == 0.0
    assert value(BOX, volume=24.3, absolute=0.31) == 1.0
    assert value(BOX, volume=24.001, relative=0) == 0.0


def test_holes_cavities_and_bodies_are_counted():
    assert measured(creation.torus(3, 1, 32, 16))["genus"] == 1
    assert measured(creation.annulus(1, 2, 1, sections=32))["genus"] == 1
    hollow = measured(together(BOX, inverted(creation.box([1, 1, 1]))))
    assert (hollow["volume"], hollow["bodies"]) == (23.0, 1)
    assert measured(together(BOX, moved(BOX, 5, 0, 0)))["bodies"] == 2


def test_symmetry_is_the_iou_with_the_mirror_image(value):
    wedge = together(BOX, moved(creation.box([1, 1, 1]), 4, 0, 0))
    across, along = [[0, 0, 0], [1, 0, 0]], [[0, 0, 0], [0, 2, 0]]
    assert value(wedge, volume=25, planes=[along]) == 1.0
    assert value(wedge, volume=25, planes=[along, across]) == 0.0
    assert value(moved(BOX, 9, 0, 0), volume=24, planes=[[[9, 0, 0], [1, 0, 0]]]) == 1.0


def test_a_reference_is_told_or_is_a_mesh(value):
    drilled = {"difference": [{"box": [2, 3, 4]}, {"cylinder": 0.5, "height": 9}]}
    part = trimesh.boolean.difference(
        [BOX, creation.cylinder(0.5, 9, sections=128)], engine="manifold"
    )
    assert value(part, reference=drilled, iou=0.99, genus=1) == 1.0
    assert value(BOX, reference=drilled, iou=0.99) == 0.0
    assert value(moved(part, 0.5, 0, 0), reference=drilled, iou=0.9) == 0.0
    off = {"mesh": written(BOX, "off").decode()}
    assert value(BOX, reference=off, iou=0.999, chamfer=0.1) == 1.0
    assert value(moved(BOX, 1, 0, 0), reference=off, chamfer=0.1) == 0.0
    assert value(moved(BOX, 1, 0, 0), reference=off | {"at": [1, 0, 0]}, chamfer=0.1) == 1.0


def test_what_is_drawn_comes_from_the_seed():
    told = {"box": [2, 3, 4]}
    first, again = (measured(BOX, reference=told, seed=7)["chamfer"] for _ in range(2))
    assert first == again != measured(BOX, reference=told, seed=8)["chamfer"]


def coil(turns=2.0, count=160, ring=8):
    """A closed tube that goes round more than once through the same places: one body."""
    angles = np.linspace(0, 2 * np.pi * turns * 0.999, count)
    places, faces = [], []
    for angle in angles:
        out = np.array([np.cos(angle), np.sin(angle), 0])
        around = 2 * np.pi * np.arange(ring) / ring
        places += [
            3 * out + np.cos(one) * out + np.sin(one) * np.array([0, 0, 1]) for one in around
        ]
    for n in range(count - 1):
        for k in range(ring):
            a, b = n * ring + k, n * ring + (k + 1) % ring
            faces += [[a, d := a + ring, b], [b, d, b + ring]]
    first, last = len(places), len(places) + 1
    places += [3 * np.array([np.cos(one), np.sin(one), 0]) for one in (angles[0], angles[-1])]
    for k in range(ring):
        a, b, end = k, (k + 1) % ring, (count - 1) * ring
        faces += [[first, a, b], [last, end + b, end + a]]
    return trimesh.Trimesh(places, faces, process=False)


LONE = (
    b"facet normal 0 0 0\nouter loop\nvertex %s 0 0\nvertex 1 0 0\nvertex 0 1 0\n"
    b"endloop\nendfacet\n"
)
ASCII = written(BOX, "stl_ascii")
FLAWED = {
    "inverted": inverted(BOX),
    "the same body twice": together(BOX, BOX),
    "bodies that overlap": together(BOX, moved(BOX, 1, 0, 0)),
    "a body within another": together(BOX, creation.box([1, 1, 1])),
    "a tube through itself": coil(),
    "open": trimesh.Trimesh(BOX.vertices, BOX.faces[1:], process=False),
    "a face that turns the other way": trimesh.Trimesh(
        BOX.vertices, [BOX.faces[0][::-1], *BOX.faces[1:]], process=False
    ),
    "a stray face": ASCII.replace(b"endsolid", LONE % b"5" + b"endsolid"),
    "a place that is none": ASCII.replace(b"endsolid", LONE % b"nan" + b"endsolid"),
    "an infinite place": ASCII.replace(b"endsolid", LONE % b"1e300" + b"endsolid"),
    "a header that promises billions": b"\0" * 80 + (2**32 - 1).to_bytes(4, "little") + b"\0" * 500,
    "flat": trimesh.Trimesh(BOX.vertices * [1, 1, 0], BOX.faces, process=False),
    "nothing": b"",
    "text": b"solid but not really\n",
}


def test_the_tube_that_is_refused_is_a_fine_mesh_to_a_library():
    assert coil().is_watertight
    assert coil().volume > 0
    assert "refused" not in measured(coil(turns=0.9))


@pytest.mark.parametrize("name", FLAWED)
def test_what_is_no_closed_solid_pays_nothing(name, value):
    assert value(FLAWED[name], volume=24, relative=1e6) == 0.0


@pytest.mark.parametrize(
    ("how", "data"),
    [
        ("ply", b"ply\nformat binary_little_endian 1.0\nelement vertex 4000000000\nproperty float "
                b"x\nproperty float y\nproperty float z\nelement face 9\nproperty list uchar int "
                b"vertex_indices\nend_header\n" + b"\0" * 99),
        ("off", b"OFF\n999999999 9999999 0\n0 0 0\n"),
        ("obj", b"mtllib /etc/passwd\nv 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 2 9\nf 1 -7 3\n"),
    ],
)  # fmt: skip
def test_files_that_lie_about_themselves_pay_nothing(how, data, value):
    assert value(data, f"part.{how}", volume=1, relative=1e6) == 0.0


def test_a_missing_or_large_file_pays_nothing(find, value, monkeypatch):
    check = Check(kind="geometry", params={"path": "none.stl", "volume": 1})
    assert find(geometry, check).value == 0.0
    monkeypatch.setattr(kind, "MAX_FILE_BYTES", 10)
    assert value(BOX, volume=24) == 0.0


@pytest.mark.parametrize(
    "params",
    [
        {}, {"bodies": 1}, {"volume": "24"}, {"volume": True}, {"extents": [1, 2]},
        {"volume": 24, "genus": 0.5}, {"volume": 24, "relative": -1}, {"iou": 0.9},
        {"volume": 24, "reference": {"box": [1, 1, 1]}},
        {"reference": {"tube": 3}, "iou": 0.9}, {"reference": {"box": [0, 0, 0]}, "iou": 0.9},
        {"reference": {"mesh": "OFF"}, "iou": 0.9}, {"reference": {}, "iou": 0.5},
        {"volume": 24, "planes": [[0, 0, 1]]},
        {"volume": 24, "planes": [[[0, 0, 0], [0, 0, 0]]]}, {"volume": 24, "format": "step"},
        {"volume": float("nan")}, {"volumes": 24},
        {"reference": {"box": [1, 1, 1]}, "iou": 0}, {"reference": {"box": [1, 1, 1]}, "iou": 98},
        {"volume": 24, "planes": [[[0, 0, 0], [0, 0, 1]]], "mirrored": 2},
    ],
)  # fmt: skip
def test_what_the_task_declares_wrongly_is_an_error(params, value):
    with pytest.raises(UsageError):
        value(BOX, **params)


def test_a_lost_worker_is_an_error_and_a_reader_that_dies_is_not(find, tools, value, monkeypatch):
    async def call(self, function, *arguments, timeout_s):
        if arguments[0] != kind.SOUND or self.lost:
            raise WorkerError("it died.")
        return {"volume": 1.0}

    monkeypatch.setattr(type(tools.workers), "call", call)
    monkeypatch.setattr(type(tools.workers), "lost", False, raising=False)
    assert value(BOX, volume=24) == 0.0
    monkeypatch.setattr(type(tools.workers), "lost", True)
    with pytest.raises(WorkerError):
        value(BOX, volume=24)


def test_a_process_of_its_own_with_a_memory_limit_measures():
    async def body():
        async with ProcessWorkers(memory_bytes=2 << 30) as workers:
            data = base64.b64encode(written(BOX)).decode()
            return await workers.call(kind.MEASURER, data, "stl", ORDER, timeout_s=10.0)

    assert asyncio.run(body())["volume"] == 24.0


SIZES = st.tuples(*[st.floats(0.5, 20)] * 3)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.floats(0, 6), st.integers(0, 99))
def test_a_turned_box_keeps_its_volume_and_is_one_sheet(sizes, angle, seed):
    body = creation.box(sizes)
    body.apply_transform(trimesh.transformations.rotation_matrix(angle, [1, 2, 3], [4, 5, 6]))
    told = measured(body, seed=seed)
    assert told["volume"] == pytest.approx(np.prod(sizes), rel=1e-4)
    assert told["bodies"] == 1


def test_the_code_that_measures_is_part_of_the_verifiers_version():
    assert mesh.__name__ in sources(kind.__name__)
