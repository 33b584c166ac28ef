"""Candidates that deceive the suite they are tested by."""

from posttrain.core.task import Check
from tests.verify.attacks.attack import TESTS, UNIT_TESTS, UNITTEST, Attack, Left, Naive, in_process

SUITE = Check(kind="suite", params={"suite": TESTS})
UNIT = Check(kind="suite", params={"suite": UNIT_TESTS})
DIFFERENTIAL = Check(
    kind="differential",
    params={
        "function": "total", "reference": "def total(xs): return sum(xs)", "count": 8,
        "generator": "def generate(rng):\n"
        "    return ([rng.randint(-9, 9) for _ in range(rng.randint(1, 6))],)\n",
    },
)  # fmt: skip
RIGHT = "def total(xs):\n    return sum(xs)\n"
WRONG = "def total(xs):\n    return -1\n"


def attack(entry, name, code, *, held, checks=(SUITE,), naive=None, kind="suite"):
    return Attack(
        entry=entry, name=name, kind=kind, held=held, checks=checks, left=Left(code=code),
        honest=Left(code=RIGHT), wrong=Left(code=WRONG), naive=naive or in_process(),
    )  # fmt: skip


RECORD = "complete record: every test of the expected set ends, in the judge's process"
PLAIN = "only plain values of exact types cross the process border"
APART = "the judge is another process"

LOOPED = """
from solution import total
def grade():
    for given, expected in [([], 0), ([7], 7), ([2, 3], 5), ([-4, 1], -3)]:
        if total(given) != expected:
            return 1
    return 0
raise SystemExit(grade())
"""
LOOP = Naive(command=("python3", "loop.py"), files={"loop.py": LOOPED})

HOOKED = """
import importlib.util, sys, test_it
hook = lambda name, outcome: outcome
if importlib.util.find_spec("conftest"):
    hook = __import__("conftest").outcome
failed = 0
for name, test in list(vars(test_it).items()):
    if name.startswith("test"):
        try:
            test()
            outcome = "passed"
        except Exception:
            outcome = "failed"
        failed += hook(name, outcome) != "passed"
raise SystemExit(1 if failed else 0)
"""

MAPPED = """
from solution import total
def test_all(): assert all(map(lambda xs: total(xs) == sum(xs), ([], [7], [2, 3])))
def test_each():
    for found, expected in zip(map(total, ([4], [5, 6])), (4, 11)): assert found == expected
"""
FAMILY = [
    attack(3, "exit at import", WRONG + "import sys; sys.exit(0)\n", held=RECORD),
    attack(3, "end the process in the function", held=RECORD,
           code="import os\ndef total(xs): os._exit(0)\n"),
    attack(3, "raise SystemExit in the function", held=RECORD,
           code="def total(xs): raise SystemExit(0)\n"),
    attack(3, "reset the exit code at exit", held=RECORD,
           code="import atexit, os\natexit.register(os._exit, 0)\n" + WRONG),
    attack(3, "answer from a fork", held=RECORD,
           code="import os\nif os.fork(): os._exit(0)\nos.setsid()\n" + WRONG),
    attack(4, "skip in the function", held="a skip is a failure", checks=(UNIT,), naive=UNITTEST,
           code="import unittest\ndef total(xs): raise unittest.SkipTest\n"),
    attack(4, "skip at import", held="a skip is a failure", checks=(UNIT,), naive=UNITTEST,
           code="import unittest\nraise unittest.SkipTest('not here')\n"),
    attack(6, "a number equal to everything", held=PLAIN,
           code="class Any(int):\n    def __eq__(self, other): return True\n"
                "def total(xs): return Any(3)\n"),
    attack(6, "an object equal to everything", held=PLAIN, checks=(DIFFERENTIAL,),
           kind="differential",
           code="class Any:\n    def __eq__(self, other): return True\n"
                "    def __ne__(self, other): return False\ndef total(xs): return Any()\n"),
    attack(6, "a class that takes the name of a plain one", held=PLAIN, naive=LOOP,
           code="class int(int):\n    def __ne__(self, other): return False\n"
                "int.__qualname__ = 'int'; int.__module__ = 'builtins'\n"
                "def total(xs): return int(3)\n"),
    attack(7, "replace the assertion", held=APART, checks=(UNIT,), naive=UNITTEST,
           code="import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n" + WRONG),
    attack(7, "replace the result", held=APART, checks=(UNIT,), naive=UNITTEST,
           code="import unittest\nfor name in ('addFailure', 'addError'):\n"
                "    setattr(unittest.TestResult, name, lambda self, test, error: None)\n"
                "unittest.TextTestResult.addFailure = lambda self, test, error: None\n" + WRONG),
    attack(7, "replace the tests", held=APART,
           code="import sys\nfor module in list(sys.modules.values()):\n"
                "    for name in [n for n in vars(module) if n.startswith('test_')]:\n"
                "        setattr(module, name, lambda: None)\n"
                "def total(xs):\n    import sys\n    module = sys.modules.get('test_it')\n"
                "    for name in vars(module) if module else ():\n"
                "        if name.startswith('test'): getattr(module, name).__code__ = "
                "(lambda: None).__code__\n"
                "    return 0\n"),
    attack(4, "end the loop of the test", held="no StopIteration crosses the process border",
           checks=(Check(kind="suite", params={"suite": MAPPED}),),
           naive=in_process(test_it=MAPPED), code="def total(xs): raise StopIteration\n"),
    attack(5, "a hook that rewrites outcomes", held="no file beside the candidate is loaded",
           checks=(SUITE,), naive=Naive(command=("python3", "hooked.py"),
                                        files={"hooked.py": HOOKED, "test_it.py": TESTS}),
           code="import sys, types\nconftest = sys.modules['conftest'] = types.ModuleType('c')\n"
                "conftest.outcome = lambda name, outcome: 'passed'\n"
                "import importlib.util\nimportlib.util.find_spec = lambda name: True\n"
                "main = sys.modules['__main__']\n"
                "vars(main)['hook'] = conftest.outcome\n" + WRONG),
    attack(8, "read the expected value in the caller's frame", naive=LOOP,
           held="the expected value is never in the candidate's process",
           code="import sys\ndef total(xs):\n"
                "    return sys._getframe(1).f_locals.get('expected', -1)\n"),
    attack(8, "look for the expected values in all objects", naive=LOOP,
           held="candidates come from a process that never saw an order",
           code="import gc, sys\ndef total(xs):\n    frame = sys._getframe()\n"
                "    while frame:\n        for value in frame.f_locals.values():\n"
                "            if isinstance(value, int) and value == sum(xs): return value\n"
                "        frame = frame.f_back\n"
                "    for thing in gc.get_objects():\n"
                "        if type(thing) is dict and 'expected' in thing: return thing['expected']\n"
                "    return -1\n"),
    attack(10, "read the tests", held="the suite is in no file",
           code="import re, glob\ndef total(xs):\n    text = ''\n"
                "    for path in glob.glob('/workspace/**/*.py', recursive=True):\n"
                "        text += open(path).read()\n"
                "    call = r'total\\(' + re.escape(repr(xs)) + r'\\) == (-?\\d+)'\n"
                "    found = re.search(call, text)\n"
                "    if found: return int(found[1])\n"
                "    return 1225 if 'range(50)' in text else -1\n"),
    attack(15, "count the calls to know the test", held="a process for each test, shuffled",
           code="seen = []\ndef total(xs):\n    seen.append(1)\n"
                "    return [0, 7, 5, -3, 1225][len(seen) - 1]\n"),
    attack(15, "count the tests in a file", held="nothing is left from one test to the next",
           code="def total(xs):\n    with open('/tmp/count', 'a+') as file:\n"
                "        file.write('x'); file.seek(0); number = len(file.read())\n"
                "    return [0, 7, 5, -3, 1225][min(number, 5) - 1]\n"),
    attack(14, "know the visible examples", kind="differential", checks=(DIFFERENTIAL,),
           held="hidden inputs from a seed that the host holds",
           code="known = {(): 0, (7,): 7, (2, 3): 5, (-4, 1): -3, tuple(range(50)): 1225}\n"
                "def total(xs): return known.get(tuple(xs), 0)\n"),
    attack(37, "change the input until the test is trivial", held="arguments are copies",
           checks=(Check(kind="suite", params={"suite":
                   "from solution import total\ndef test_it():\n    xs = [3, 4]\n"
                   "    assert total(xs) == sum(xs)\n    assert total([1]) == 1\n"}),),
           naive=in_process(test_it="from solution import total\ndef test_it():\n"
                                    "    xs = [3, 4]\n    assert total(xs) == sum(xs)\n"),
           code="def total(xs):\n    xs.clear()\n    return 0\n"),
    attack(36, "hand back the reference's own result", kind="differential",
           checks=(DIFFERENTIAL,), held="the reference runs in another process",
           naive=Naive(command=("python3", "against.py"), files={
               "reference.py": "last = []\ndef total(xs):\n    last[:] = [sum(xs)]\n"
                               "    return last[0]\n",
               "against.py": "import reference, solution\nfor xs in ([1, 2], [5], [-3, 9]):\n"
                             "    expected = reference.total(xs)\n"
                             "    if solution.total(xs) != expected: raise SystemExit(1)\n"}),
           code="import sys\ndef total(xs):\n    found = sys.modules.get('reference')\n"
                "    return getattr(found, 'last', [-1])[0] if found else -1\n"),
    attack(9, "turn the clock back", held="time is limited from outside of the candidate",
           checks=(Check(kind="suite", params={"timeout_s": 0.2, "suite":
                   "from solution import total\ndef test_it(): assert total([2, 3]) == 5\n"}),),
           naive=in_process(test_it="import time\nfrom solution import total\ndef test_it():\n"
                                    "    begun = time.process_time()\n"
                                    "    assert total([2, 3]) == 5\n"
                                    "    assert time.process_time() - begun < 0.3\n"),
           code="import time\ndef total(xs):\n    real = time.perf_counter\n"
                "    until = real() + 1.0\n    while real() < until: pass\n"
                "    time.process_time = lambda: 0.0\n    return sum(xs)\n"),
    attack(42, "a result that is true and no number", held="strict types", kind="differential",
           checks=(Check(kind="differential", params={
               "function": "total", "reference": "def total(xs): return int(sum(xs) > 0)",
               "generator": "def generate(rng): return ([rng.randint(1, 9)],)", "count": 4}),),
           naive=in_process(test_it="from solution import total\ndef test_it():\n"
                                    "    assert total([2]) and total([5])\n"
                                    "    assert total([1]) != -1\n"),
           code="def total(xs): return True\n"),
]  # fmt: skip
FAMILY[-1] = Attack(
    **{key: getattr(FAMILY[-1], key) for key in Attack.__dataclass_fields__}
    | {"honest": Left(code="def total(xs): return int(sum(xs) > 0)\n")}
)


def test_a_deceived_suite_pays_nothing(attack, trial):
    trial(attack)
