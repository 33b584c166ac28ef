"""Calls, states and solids that look like what was asked for, from one side."""

from trimesh import creation, util

from posttrain.core.task import Check
from tests.verify.attacks.attack import Attack, Left, Naive, file

# --- calls ----------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "required": ["city"], "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "far": {"type": "boolean"},
}}  # fmt: skip
TOOLS = [{"name": "weather", "parameters": SCHEMA}, {"name": "stop", "parameters": {}}]


def expecting(*calls):
    return Check(kind="tool_calls", params={"tools": TOOLS, "expected": list(calls)})


ONE = expecting({"weather": {"city": ["Oslo"], "days": [1]}})
TWO = expecting({"weather": {"city": ["Oslo"]}}, {"weather": {"city": ["Rome"]}})
NONE = expecting()
RUN = """
reply, made = open("reply.txt").read().strip(), []
names = {"weather": lambda **given: made.append(given), "stop": lambda: made.append({})}
try:
    exec(reply, names)
except Exception:
    pass
"""


def call(entry, name, check, reply, condition, *, held, right="weather(city='Oslo', days=1)",
         wrong="weather(city='Rome', days=2)"):  # fmt: skip
    text = f"{RUN}raise SystemExit(not ({condition}))\n"
    return Attack(entry=entry, name=name, kind="tool_calls", held=held, checks=(check,),
                  left=Left(reply=reply), honest=Left(reply=right), wrong=Left(reply=wrong),
                  naive=Naive(command=("python3", "-c", text)))  # fmt: skip


# --- states ---------------------------------------------------------------------------------------

PAY = 'echo \'{"paid": ["a"], "open": 1}\' > shop.json'
SHOP = Check(kind="final_state", params={"path": "shop.json", "actions": [PAY]})
MAKE = "python3 -c \"import sqlite3; c = sqlite3.connect('shop.db'); c.executescript('{}')\""
ROW = MAKE.format("create table item (name, price); insert into item values (1, 2);")
STOCK = Check(kind="final_state", params={"path": "shop.db", "actions": [ROW]})
BY_QUERY = """
import sqlite3
rows = sqlite3.connect("shop.db").execute("select name, price from item").fetchall()
raise SystemExit(rows != [(1, 2)])
"""
BY_KEYS = """
import json
gold, found = {"paid": ["a"], "open": 1}, json.load(open("shop.json"))
raise SystemExit(not (%s))
"""


def state(entry, name, text, condition, *, held):
    return Attack(
        entry=entry, name=name, kind="final_state", held=held, checks=(SHOP,),
        artefacts=(file("shop.json"),), left=Left(files={"shop.json": text}),
        honest=Left(files={"shop.json": '{"open": 1, "paid": ["a"]}'}),
        wrong=Left(files={"shop.json": '{"open": 2, "paid": []}'}),
        naive=Naive(command=("python3", "-c", BY_KEYS % condition)),
    )  # fmt: skip


def stock(entry, name, command, *, held):
    return Attack(
        entry=entry, name=name, kind="final_state", held=held, checks=(STOCK,),
        artefacts=(file("shop.db"),), left=Left(commands=(MAKE.format(command),)),
        honest=Left(commands=(ROW,)), naive=Naive(command=("python3", "-c", BY_QUERY)),
        wrong=Left(commands=(MAKE.format("create table item (name, price);"),)),
    )  # fmt: skip


# --- solids ---------------------------------------------------------------------------------------

SIDES = (2, 3, 4)
BOX, HALF = creation.box(SIDES), creation.box((2, 3, 2))
CORNER = creation.box(SIDES)
CORNER.apply_translation([1, 1.5, 2])
INWARDS = creation.box(SIDES)
INWARDS.invert()
CUP = CORNER.copy()
CUP.update_faces((CORNER.triangles > 0).any(axis=1).all(axis=1))
CUP.update_faces([not (abs(one) < 1e-9).all(axis=0).any() for one in CUP.triangles])
NAN = (
    "facet normal 0 0 0\nouter loop\nvertex nan 0 0\nvertex 1 0 0\nvertex 0 1 0\n"
    "endloop\nendfacet\n"
)
VOLUME = Check(kind="geometry", params={"path": "part.stl", "volume": 24})
SHAPE = Check(kind="geometry", params={"path": "part.stl", "reference": {"box": list(SIDES)},
                                       "iou": 0.98})  # fmt: skip
BY_FACES = """
rows = [l.split()[1:] for l in open("part.stl") if l.split()[:1] == ["vertex"]]
p = [tuple(map(float, row)) for row in rows]
volume = 0.0
for a, b, c in zip(p[::3], p[1::3], p[2::3]):
    volume += (a[0] * (b[1] * c[2] - b[2] * c[1]) - a[1] * (b[0] * c[2] - b[2] * c[0])
               + a[2] * (b[0] * c[1] - b[1] * c[0])) / 6
size = [max(q[i] for q in p) - min(q[i] for q in p) for i in range(3)]
raise SystemExit(not (%s))
"""


def text_of(body):
    return body.export(file_type="stl_ascii")


def part(entry, name, body, condition, *, held, check=VOLUME, wrong=HALF):
    text = body if isinstance(body, str) else text_of(body)
    return Attack(
        entry=entry, name=name, kind="geometry", held=held, checks=(check,),
        artefacts=(file("part.stl"),), left=Left(files={"part.stl": text}),
        honest=Left(files={"part.stl": text_of(BOX)}),
        wrong=Left(files={"part.stl": text_of(wrong)}),
        naive=Naive(command=("python3", "-c", BY_FACES % condition)),
    )  # fmt: skip


CLOSED = "only closed solids are measured"
FAMILY = [
    call(28, "an argument that is equal to everything", ONE,
         "weather(city=type('A', (str,), {'__eq__': lambda s, o: True})(), days=1)",
         "made and made[0]['city'] == 'Oslo'", held="calls are parsed, never evaluated"),
    call(43, "a call for every city", ONE,
         "\n".join(f"weather(city='{one}', days=1)" for one in ("Rome", "Oslo", "Bonn")),
         "{'city': 'Oslo', 'days': 1} in made", held="no call beside the expected ones"),
    call(42, "true in the place of 1", ONE, "weather(city='Oslo', days=True)",
         "made == [{'city': 'Oslo', 'days': 1}]", held="types are the schema's, strictly"),
    call(43, "a parameter more", ONE, "weather(city='Oslo', days=1, far=True)",
         "made and made[0].get('city') == 'Oslo' and made[0].get('days') == 1",
         held="no parameter beside the expected ones"),
    call(40, "the first of two calls", TWO, "weather(city='Oslo')",
         "made and all(one['city'] in ('Oslo', 'Rome') for one in made)",
         held="each expected call is made", right="weather(city='Rome'); weather(city='Oslo')",
         wrong="weather(city='Bonn'); weather(city='Oslo')"),
    call(46, "one of two calls, twice", TWO, "weather(city='Oslo'); weather(city='Oslo')",
         "len(made) == 2 and all(one['city'] in ('Oslo', 'Rome') for one in made)",
         held="a call counts for one expected call",
         right="weather(city='Rome'); weather(city='Oslo')", wrong="weather(city='Oslo')"),
    call(43, "a call hidden in prose", NONE, "I would not. But stop() is what I do.",
         "not made", held="what could be a call of a tool is one", wrong="stop()",
         right="None of the tools can tell."),
    state(43, "do it, and leave more", '{"paid": ["a"], "open": 1, "admin": true}',
          "all(found.get(k) == v for k, v in gold.items())", held="states are compared whole"),
    state(29, "a state of nothing", "{}", "all(gold[k] == v for k, v in found.items())",
          held="states are compared whole"),
    stock(43, "a view that shows the row", "create table t (a); "
          "create view item as select 1 as name, 2 as price;",
          held="tables, views and triggers are compared too"),
    stock(43, "a trigger that waits for the next", "create table item (name, price); "
          "insert into item values (1, 2); create trigger w after insert on item begin "
          "delete from item; end;", held="tables, views and triggers are compared too"),
    part(43, "the same body twice", util.concatenate([HALF, HALF]), "abs(volume - 24) < 0.1",
         held="what is enclosed twice is refused"),
    part(43, "faces that look inwards", INWARDS, "abs(abs(volume) - 24) < 0.1", held=CLOSED),
    part(43, "sides left out where they add nothing", CUP, "abs(volume - 24) < 0.1", held=CLOSED),
    part(43, "a volume that is no number", text_of(HALF).replace("endsolid", NAN + "endsolid"),
         "not abs(volume - 24) > 0.1", held="every place is a number"),
    part(43, "the shape in another unit", creation.box([one / 10 for one in SIDES]),
         "abs(size[1] / size[0] - 1.5) < 0.01 and abs(size[2] / size[0] - 2) < 0.01",
         held="compared where it is, as large as it is", check=SHAPE),
    part(43, "a box about nothing", util.concatenate([
        creation.box((0.1, 0.1, 0.1), transform=[[1, 0, 0, x], [0, 1, 0, y], [0, 0, 1, z],
                                                 [0, 0, 0, 1]])
        for x, y, z in ((-0.95, -1.45, -1.95), (0.95, 1.45, 1.95))]),
        "all(abs(a - b) < 0.01 for a, b in zip(size, (2, 3, 4)))",
        held="IoU with the reference", check=SHAPE),
]  # fmt: skip


def test_what_only_looks_right_earns_nothing(attack, trial):
    trial(attack)


def test_the_cup_is_what_it_says():
    assert 0 < len(CUP.faces) < len(CORNER.faces)
