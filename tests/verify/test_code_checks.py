"""The kinds that execute what was written. Candidates here are harmless, so plain processes do;
what hostile ones try is in `attacks`, in sandboxes.
"""

import ast
import contextlib
import subprocess
import sys
import threading

import pytest

from posttrain.core.errors import UsageError, VerifierError
from posttrain.core.task import Artefact, ArtefactKind, Check
from posttrain.sandbox.source import key_of
from posttrain.verify import code, execution
from posttrain.verify.calls import Unplain, decode, encode, same
from posttrain.verify.code import code_of, differential, named_tests, stdio, suite
from posttrain.verify.comparison import alike
from posttrain.verify.execution import JUDGING


def block(code):
    return f"Here it is.\n```python\n{code}\n```\n"


def check(kind, **params):
    return Check(kind=kind, params=params)


# --- stdio --------------------------------------------------------------------------------------

DOUBLE = [["2", "4"], ["5", "10"], ["-1", "-2"], ["0", "0"]]


def test_a_program_is_paid_when_every_case_is_right(find):
    right, once = block("print(2 * int(input()))"), block("print(4)")
    assert find(stdio, check("stdio", cases=DOUBLE), right).value == 1.0
    assert find(stdio, check("stdio", cases=DOUBLE), once).value == 0.0
    found = find(stdio, check("stdio", cases=DOUBLE, pays="share"), once)
    assert (found.value, found.evidence["passed"], found.evidence["expected"]) == (0.25, 1, 4)
    assert found.evidence["evidence"]["failed"].keys() == {"1", "2", "3"}


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.stdout.write(str(2 * int(sys.stdin.read())))",
        "print(2 * int(open(0).read()))\nexit()",
        "import threading\nthreading.Thread(target=lambda: print(2 * int(input()))).start()",
        "import atexit\natexit.register(lambda: print(2 * int(input())))",
        "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()",
        "import os\nos.write(1, b'%d' % (2 * int(os.read(0, 9))))",
        "import sys\nsys.setrecursionlimit(9000)\nprint(2 * int(next(sys.stdin)))\nsys.exit(None)",
    ],
)
def test_programs_end_and_read_as_they_would_alone(code, find):
    assert find(stdio, check("stdio", cases=DOUBLE), block(code)).value == 1.0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print(4)\nraise SystemExit(3)", "ended with 3"),
        ("print(4)\nraise ValueError", "ended with 1"),
        ("print(4", "ended with 1"),
        ("import sys\nsys.exit('4')", "ended with 1"),
        ("import os\nos.write(1, b'\\xff')", "printed no text"),
        ("print('4' * 70_000)", "printed more than 65536 bytes"),
        ("print(5)", "wrong output"),
        ("x = bytearray(500 << 20)\nprint(4)", "ended with 1"),
    ],
)
def test_a_case_that_fails_says_why(code, why, find):
    found = find(stdio, check("stdio", cases=[["2", "4"]]), block(code))
    assert found.value == 0.0
    assert found.evidence["evidence"]["failed"] == {"0": why}


def test_an_endless_program_is_timed_out_in_every_context_BR_26(find):
    """Limits below a second became none, and alarms worked in the main thread alone."""
    one = check("stdio", cases=[["2", "4"]], timeout_s=0.2)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(find(stdio, one, block("while True: pass")))
    )
    thread.start()
    thread.join()
    found.append(find(stdio, one, block("while True: pass")))
    for each in found:
        assert each.value == 0.0
        assert each.evidence["evidence"]["failed"] == {"0": "timed out"}
        assert each.evidence["evidence"]["timed_out"] == 1


def test_the_verdict_does_not_depend_on_load_BR_35(find):
    """0.3 s of processor time under a limit of 1 s, beside four busy processes a core."""
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(4)"
    busy = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.callback(stack.enter_context(subprocess.Popen(busy)).kill)
        found = find(stdio, check("stdio", cases=[["2", "4"]], timeout_s=1.0), block(code))
    assert found.value == 1.0
    assert found.evidence["evidence"]["timed_out"] == 0


def test_a_program_in_another_language_is_a_declared_file(find, workspace):
    (workspace / "double.sh").write_text('read n; echo $((2 * n)) "$FOO"')
    one = check("stdio", cases=DOUBLE, path="double.sh", argv=["bash", "{program}"])
    only = (Artefact(name="s", kind=ArtefactKind.FILE, path="double.sh"),)
    assert find(stdio, one, artefacts=only).value == 1.0
    (workspace / "double.sh").unlink()
    assert find(stdio, one, artefacts=only).evidence["found"] == "no candidate"
    with pytest.raises(UsageError, match="argv"):
        find(stdio, check("stdio", cases=DOUBLE, argv=["bash", "{program}"]))


def test_a_checker_accepts_one_of_many_right_outputs(find):
    checker = "def accepts(given, found, expected):\n    return int(found) in (2, 3, 5, 7)"
    one = check("stdio", cases=[["", None]], checker=checker)
    assert find(stdio, one, block("print(7)")).value == 1.0
    assert find(stdio, one, block("print(9)")).value == 0.0
    assert find(stdio, one, block("print('x')")).value == 0.0


def test_a_checker_that_hangs_at_an_output_refuses_it(find, monkeypatch):
    monkeypatch.setattr(code, "MAX_WALL_S", 0.4)
    monkeypatch.setattr(execution, "_ALLOWANCE_S", 0.1)
    checker = (
        "def accepts(given, found, expected):\n    return sum(1 for _ in range(int(found))) == 8"
    )
    one = check("stdio", cases=[["", "8"]], checker=checker)
    assert find(stdio, one, block("print(8)")).value == 1.0
    assert find(stdio, one, block("print(10**12)")).value == 0.0


@pytest.mark.parametrize(
    ("checker", "expected", "why"),
    [
        ("return int(expected, 7) == int(found)", "8", "ValueError"),
        ("return integer(found) == 8", None, "NameError"),
        ("while True: pass", "8", "time limit twice"),
    ],
)
def test_a_checker_that_fails_at_what_is_right_as_well_is_at_fault(
    find, monkeypatch, checker, expected, why
):
    monkeypatch.setattr(code, "MAX_WALL_S", 0.3)
    monkeypatch.setattr(execution, "_ALLOWANCE_S", 0.1)
    checker = f"def accepts(given, found, expected):\n    {checker}"
    with pytest.raises(VerifierError, match=why):
        find(stdio, check("stdio", cases=[["", expected]], checker=checker), block("print(8)"))


@pytest.mark.parametrize(
    ("expected", "found", "ways"),
    [
        ("1 2\n", "1 2\n", {"exact", "lines", "tokens", "numbers"}),
        ("1 2\n", "1 2", {"lines", "tokens", "numbers"}),
        ("1 2", "1 2  \n\n", {"lines", "tokens", "numbers"}),
        ("1 2", "1\n2", {"tokens", "numbers"}),
        ("1 2", "1.0 2", {"numbers"}),
        ("1 2", "1 2 3", set()),
        ("1 2", "1", set()),
        ("1", "nan", set()),
        ("a 1", "b 1", set()),
        ("", "\n", {"lines", "tokens", "numbers"}),
    ],
)
def test_outputs_are_compared_in_four_ways(expected, found, ways):
    for way in ("exact", "lines", "tokens", "numbers"):
        assert alike(expected, found, way) is (way in ways), way


# --- the candidate ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("a\n```py\nx = 1\n```\nb\n```text\nx\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nagain:\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nor:\n```python\nx = 2\n```", None),
        ("```python\nx = 1\n", None),
        ("```\nx = 1\n```", None),
        ("x = 1", None),
        ("", None),
    ],
)
def test_the_candidate_of_a_reply_is_its_one_python_block(reply, code):
    assert code_of(reply) == code


def test_many_openings_take_no_longer_than_other_text():
    """Each was looked at to the end of the reply: 16 s of the event loop for 160 kB."""
    assert code_of("```python\n" * 200_000) is None


def test_a_reply_without_code_is_paid_nothing_and_says_so(find):
    found = find(stdio, check("stdio", cases=DOUBLE), "I cannot.")
    assert (found.value, found.evidence["found"]) == (0.0, "no candidate")


# --- suites -------------------------------------------------------------------------------------

SUITE = """
import pytest
from solution import add
import solution
@pytest.mark.parametrize("a, b", [(1, 2), ("x", "y")])
def test_sum(a, b): assert add(a, b) == a + b
def test_close(): assert add(0.1, 0.2) == pytest.approx(0.3)
def test_error():
    with pytest.raises(TypeError, match="unsupported"):
        add(1, None)
class TestMore:
    def setup_method(self): self.ten = 10
    def test_types(self, tmp_path):
        assert solution.add((1,), (2,)) == (1, 2)
        assert solution.add([{1}], [b"x", float("inf")]) == [{1}, b"x", float("inf")]
        assert add(self.ten, b=1 << 80) == 10 + (1 << 80)
"""
UNIT = """
import unittest
from solution import add
class AddTest(unittest.TestCase):
    def setUp(self): self.one = 1
    def test_sum(self): self.assertEqual(add(self.one, 2), 3)
    def test_error(self):
        with self.assertRaises(TypeError): add(1, None)
"""
ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize("text", [SUITE, UNIT], ids=["pytest", "unittest"])
def test_a_suite_is_paid_when_every_test_passes(text, find):
    assert find(suite, check("suite", suite=text), block(ADD)).value == 1.0
    found = find(suite, check("suite", suite=text, pays="share"), block("def add(a, b): return 3"))
    assert 0.0 <= found.value <= 0.5
    assert found.evidence["ran"] == found.evidence["expected"] == len(named_tests(text))
    assert find(suite, check("suite", suite=text), block("")).value == 0.0


FIVE = "from solution import add\n" + "\n".join(
    f"def test_{n}(): assert add({n}, 1) == {n + 1}" for n in range(5)
)
EARLY = {
    "exits at import": ("import sys; sys.exit(0)", 5),
    "ends the process at import": ("import os; os._exit(0)", 0),
    "ends the process inside": ("import os\ndef add(a, b): os._exit(0)", 0),
    "raises SystemExit": ("def add(a, b): raise SystemExit(0)", 5),
    "replaces the assertion": (
        "import builtins\nbuiltins.AssertionError = ValueError\ndef add(a, b): return -1", 5),
    "resets the exit code at exit": (
        "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return -1", 5),
    "fails in two of five": ("def add(a, b): return a + b if a < 3 else 0", 5),
    "ends in the last of five": (
        "import os\ndef add(a, b): return a + b if a < 4 else os._exit(0)", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", EARLY)
def test_only_five_of_five_reported_by_the_judge_pass_BR_33(name, find):
    """An early exit with status 0 counted as success."""
    code, ran = EARLY[name]
    found = find(suite, check("suite", suite=FIVE), block(code))
    assert found.value == 0.0
    assert (found.evidence["ran"], found.evidence["expected"]) == (ran, 5)
    assert find(suite, check("suite", suite=FIVE), block(ADD)).value == 1.0


SKIPPED = """
import unittest
class OneTest(unittest.TestCase):
    @unittest.skip("later")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    def test_right(self): pass
"""


def test_skips_and_expected_failures_are_failures(find):
    found = find(suite, check("suite", suite=SKIPPED, pays="share"), block(""))
    assert found.value == pytest.approx(1 / 3)
    assert set(found.evidence["evidence"]["failed"]) == {
        "OneTest.test_skipped", "OneTest.test_expected"}  # fmt: skip


CLASSES = """
from solution import Stack
def test_push():
    stack = Stack()
    stack.push(1)
    assert stack.items == [1]
"""
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items += [x]
"""
GATE = Check(
    kind="differential", gate=True,
    params={"generator": "def generate(rng): return (rng.randint(0, 9),)", "reference": STACK,
            "adapter": "def call(module, x):\n    s = module.Stack()\n    s.push(x)\n"
                       "    return s.items"},
)  # fmt: skip


def test_a_suite_of_classes_is_direct_weak_and_paid_in_full_only_beside_a_gate(find):
    assert find(suite, check("suite", suite=CLASSES), block(STACK)).value == 0.0
    weak = check("suite", suite=CLASSES, direct=True)
    alone = find(suite, weak, block(STACK))
    assert (alone.value, alone.evidence["weak"]) == (0.5, True)
    assert find(suite, weak, block(STACK), checks=(weak, GATE)).value == 1.0
    assert find(suite, weak, block("class Stack: pass"), checks=(weak, GATE)).value == 0.0
    assert find(differential, GATE, block(STACK)).value == 1.0
    assert find(differential, GATE, block("class Stack: push = print")).value == 0.0
    with pytest.raises(UsageError, match="weak_cap"):
        find(suite, check("suite", suite=CLASSES, direct=True, weak_cap=1.0))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import pytest\n@pytest.fixture\ndef it(): pass\ndef test_a(it): pass", "pytest.fixture"),
        ("def test_a(capsys): pass", "the fixture capsys"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", "pytest.mark.skip"),
        ("from pytest import skip\ndef test_a(): pass", "pytest.skip"),
        ("async def test_a(): pass", "the asynchronous test_a"),
        ("def setup_module(): pass\ndef test_a(): pass", "setup_module"),
        ("x = 1", "wants tests"),
        ("def test_a(): pass\ndef test_a(): pass", "names of their own"),
        ("def test_a(:", "wants Python"),
    ],
)
def test_a_suite_that_cannot_be_honoured_is_refused(text, what):
    with pytest.raises(UsageError, match=what):
        named_tests(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("from solution import add\ndef test_a(): add(lambda: 1, 2)", "cannot be sent"),
        ("def test_a(): yield", "gives something back"),
        ("class TestA:\n    def test_a(self): pass\ndef f():\n    def test_b(): pass\n"
         "test_b = f", "differ in the tests"),
    ],
)  # fmt: skip
def test_a_fault_of_the_suite_is_no_reward(text, why, find):
    with pytest.raises(VerifierError, match=why):
        find(suite, check("suite", suite=text), block(ADD))


# --- differential -------------------------------------------------------------------------------

SORT = {
    "function": "order", "reference": "def order(xs): return sorted(xs)",
    "generator": "def generate(rng):\n"
    "    return ([rng.randint(0, 9) for _ in range(rng.randint(4, 9))],)",
}  # fmt: skip


def test_a_difference_is_shrunk_and_its_seed_is_kept(find, tools):
    one = check("differential", **SORT)
    assert find(differential, one, block("def order(xs): xs.sort(); return xs")).value == 1.0
    found = find(differential, one, block("def order(xs): return sorted(set(xs))"))
    assert found.value == 0.0
    ((one_number, same_number),) = ast.literal_eval(found.evidence["evidence"]["input"])
    assert one_number == same_number
    assert found.evidence["evidence"]["why"].startswith(f"wanted [{one_number}, {one_number}], got")
    again = find(differential, one, block("def order(xs): return sorted(set(xs))"))
    assert again.evidence == found.evidence


def test_no_tolerance_makes_another_number_of_infinity(find):
    """A tolerance that is a share of infinity took in every number."""
    inf = float("inf")
    assert same(inf, inf, 1e-6)
    assert not any(same(inf, other, 1e-6) for other in (1.0, -inf, float("nan")))
    assert not any(same(other, inf, 1e-6) for other in (1.0, -inf, float("nan")))
    text = "import pytest\nfrom solution import f\n" \
           "def test_f(): assert f() == pytest.approx(float('inf'))"  # fmt: skip
    for body, value in (("float('inf')", 1.0), ("7.0", 0.0), ("-float('inf')", 0.0)):
        found = find(suite, check("suite", suite=text), block(f"def f(): return {body}"))
        assert found.value == value


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("def order(xs): return tuple(sorted(xs))", 0.0),
        ("def order(xs): return [float(x) for x in sorted(xs)]", 0.0),
        ("def order(xs): return iter(sorted(xs))", 0.0),
        ("def order(xs):\n    ys = xs[:]\n    xs.clear()\n    return sorted(ys)", 1.0),
        ("order = 3", 0.0),
    ],
)
def test_values_are_compared_strict_about_types(code, value, find):
    assert find(differential, check("differential", **SORT), block(code)).value == value


def test_an_exception_is_compared_by_its_type(find):
    params = {
        "function": "take", "reference": "def take(xs, n): return xs[n]",
        "generator": "def generate(rng): return ([1, 2, 3], rng.randint(-5, 5))", "count": 12,
    }  # fmt: skip
    right = "def take(xs, n):\n    if -4 < n < 3: return xs[n]\n    raise {}('none')"
    for name, value in (("IndexError", 1.0), ("KeyError", 0.0), ("Exception", 0.0)):
        found = find(differential, check("differential", **params), block(right.format(name)))
        assert found.value == value, name


def test_programs_differ_by_what_they_print(find):
    params = {
        "generator": "def generate(rng): return str(rng.randint(2, 9))", "count": 6,
        "reference": "print(int(input()) ** 2)",
    }  # fmt: skip
    one = check("differential", **params)
    assert find(differential, one, block("n = int(input()); print(n * n)")).value == 1.0
    found = find(differential, one, block("print(2 * int(input()))"))
    assert found.value == 0.0


def test_a_reference_that_fails_is_no_reward(find):
    params = SORT | {"reference": "class Odd(Exception): pass\ndef order(xs): raise Odd"}
    with pytest.raises(VerifierError, match="Odd"):
        find(differential, check("differential", **params), block("order = sorted"))


def test_inputs_come_from_a_secret_and_are_the_same_for_a_group(clock, make_attempt):
    from dataclasses import replace

    from posttrain.verify.kinds import Tools

    one, other = Tools(clock=clock), Tools(clock=clock)
    first = make_attempt("x")
    member = replace(first, key=replace(first.key, member=3))
    later = replace(first, key=replace(first.key, draw=9))
    assert one.seeds(first) == one.seeds(member)
    assert len({one.seeds(first), one.seeds(later), other.seeds(first)}) == 3


# --- plain values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -5, 1 << 90, 1.5, float("inf"), "é\ud800", b"\0\xff", [], (), {}, set(),
     frozenset({1}), (1, [2, {3: (4,)}]), {(1, 2): {"a": {b"x"}}}, 1 + 2j, {1: 1, True + 1: 2}],
    ids=repr,
)  # fmt: skip
def test_plain_values_cross_and_keep_their_types(value):
    assert same(value, decode(encode(value)))
    assert type(decode(encode(value))) is type(value)


def test_what_is_no_plain_value_does_not_cross():
    class Number(int):
        pass

    for value in (Number(1), object(), [lambda: 1], {1: iter([])}, range(3)):
        with pytest.raises(Unplain):
            encode(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), ([1], (1,)), ({1}, {True}), ({1: 2}, {1.0: 2}), ({1: 2}, {1: 2.0}),
     ("1", 1), (b"1", "1"), ({1}, frozenset({1})), ([1], [1, 1]), (1.0, float("nan"))],
    ids=repr,
)  # fmt: skip
def test_values_of_other_types_differ(one, other):
    assert not same(one, other)
    assert not same(other, one)
    assert same(one, one)
    assert same(float("nan"), float("nan"))


def test_a_reply_of_the_candidate_is_read_as_data_only():
    from posttrain.verify.calls import CandidateError, _read

    for line in (b"1", b"{}", b'{"v": {"x": 1}}', b'{"v": {"s": [[1]]}}', b'{"v": {"i": "zz"}}',
                 b'{"e": 1}', b"[" * 100_000, b"\xff", b'{"v": {"t": 3}}'):  # fmt: skip
        with pytest.raises(CandidateError):
            _read(line)
    with pytest.raises(KeyError, match="gone"):
        _read(b'{"e": ["KeyError", "gone"]}')
    with pytest.raises(CandidateError, match="skip"):
        _read(b'{"e": ["Skipped", "skip"]}')


# --- where they run -----------------------------------------------------------------------------


def test_one_stock_of_sandboxes_with_a_harness_ahead_serves_every_kind(find, tools):
    """Each check's time limit made an environment of its own, with nothing warm for the next."""
    generator = "def generate(rng): return (1,)\n"
    code = "def one(n):\n    return n\n"
    tests = "from solution import one\ndef test_one(): assert one(1) == 1\n"
    more = {"generator": generator, "reference": code, "function": "one", "count": 1}
    for timeout_s in (1, 3):
        find(stdio, check("stdio", cases=DOUBLE[:1], timeout_s=timeout_s), block("print(4)"))
        find(suite, check("suite", suite=tests, timeout_s=timeout_s), block(code))
        find(differential, check("differential", **more, timeout_s=timeout_s), block(code))
    leased = tools.sandboxes.leased
    assert len(leased) == 6
    assert len({key_of(environment) for environment in leased}) == 1
    assert set(tools.sandboxes.ahead) == {JUDGING}
