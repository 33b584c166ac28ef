"""The harness runs here as a plain process; its containment is the sandbox's business."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from posttrain.core.containment import ExecResult
from posttrain.core.errors import UsageError, VerifierError
from posttrain.core.task import Check, Environment
from posttrain.verify import folders, harness, nursery
from posttrain.verify.execution import bundle, finding, program, read_record
from posttrain.verify.kinds import Subject, Tools


def source(text, **params):
    return Check(kind="program", params={"source": text, "params": params})


def test_a_checker_reads_artefacts_reply_and_parameters(find, workspace):
    (workspace / "out.txt").write_text("7")
    check = source(
        "def check(order):\n"
        "    left = order.artefacts.read_text('out.txt')\n"
        "    return left == order.params['wanted'] and order.reply == 'done'\n",
        wanted="7",
    )
    assert find(program, check, "done").value == 1.0
    assert find(program, check, "no").value == 0.0


def test_a_command_decides_by_exit_code(find):
    def ended(*argv):
        return find(program, Check(kind="program", params={"command": list(argv)}))

    assert ended("true").value == 1.0
    assert ended("false").value == 0.0
    for trouble in ("exit 126", "exit 127", "kill -9 $$"):
        with pytest.raises(VerifierError, match="command ended with"):
            ended("sh", "-c", trouble)


def test_a_checker_that_raises_or_exits_is_its_own_failure(find):
    with pytest.raises(VerifierError, match="ZeroDivisionError in line 1"):
        find(program, source("def check(order): return 1 / 0"))
    with pytest.raises(VerifierError, match=r"the program defines no check\(order\)"):
        find(program, source("def chek(order): return 1"))
    with pytest.raises(VerifierError, match="SystemExit"):
        find(program, source("import sys\ndef check(order): sys.exit(0)"))
    with pytest.raises(VerifierError, match="no complete record"):
        find(program, source("import os\ndef check(order): os._exit(1)"))


SUITE = """
import json, sys
DRIVER = '''
import json, sys
space = {}
exec(compile(open(sys.argv[1]).read(), "candidate", "exec"), space)
print(json.dumps(space["double"](json.loads(sys.stdin.read()))))
'''
def check(order):
    ran = passed = 0
    for case in range(5):
        ended = order.run([sys.executable, "-c", DRIVER, order.artefacts + "/candidate.py"],
                          stdin=json.dumps(case).encode())
        try:
            result = json.loads(ended.stdout)
        except ValueError:
            continue
        ran += 1
        passed += type(result) is int and result == 2 * case
    return {"value": passed / 5, "ran": ran, "passed": passed}
"""

CANDIDATES = {
    "honest": ("def double(x): return 2 * x", 1.0, 5),
    "exits at import": ("import sys; sys.exit(0)", 0.0, 0),
    "ends the process inside": ("import os\ndef double(x): os._exit(0)", 0.0, 0),
    "raises SystemExit": ("def double(x): raise SystemExit(0)", 0.0, 0),
    "equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n"
        "def double(x): return Any(3)", 0.0, 5),
    "resets the exit code at exit": (
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef double(x): return -1",
        0.0, 0),
    "answers from a fork": (
        "import os\ndef double(x):\n    if os.fork(): os._exit(0)\n    os.setsid()\n    return -1",
        0.0, 0),
    "forges a record": (
        "import os\ndef double(x):\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, b'{\"value\": 1.0, \"ran\": 5, \"passed\": 5}')\n"
        "        except OSError: pass\n"
        "    return None", 0.0, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", CANDIDATES)
def test_only_a_suite_that_ran_whole_and_passed_is_paid(name, find, workspace):
    """BR-33: an early exit with status 0 counted as success."""
    candidate, value, ran = CANDIDATES[name]
    (workspace / "candidate.py").write_text(candidate)
    check = Check(kind="program", params={"source": SUITE, "expected": 5})
    found = find(program, check)
    assert found.value == value
    assert found.evidence["expected"] == 5
    if name != "answers from a fork":
        assert found.evidence["ran"] == ran


def test_what_a_candidate_started_is_dead_when_its_run_returns(find, workspace, tmp_path):
    (workspace / "candidate.sh").write_text("(setsid sleep 300 & echo $! > pid) ; echo ok")
    check = source(
        "import os\n"
        "def check(order):\n"
        "    ended = order.run(['sh', order.artefacts + '/candidate.sh'])\n"
        "    pid = int(ended.folder.read_text('pid'))\n"
        "    return ended.stdout == b'ok\\n' and not os.path.exists(f'/proc/{pid}')\n"
    )
    assert find(program, check).value == 1.0


def test_a_candidate_that_is_not_there_or_no_program_ran_and_failed(find, workspace):
    """A missing program raised in the checker: leaving nothing earned no verdict instead of 0."""
    (workspace / "text").write_text("no program")
    check = source(
        "def check(order):\n"
        "    places = [order.artefacts + '/' + name for name in ('none', 'text', 'text/below')]\n"
        "    return [order.run([place]).exit_code for place in places] == [127, 126, 126]\n"
    )
    assert find(program, check).value == 1.0


# --- what is left is odd ------------------------------------------------------------------------


def chain(place):
    """A link through more links than any recursion has room for."""
    for number in range(2_000):
        (place.parent / f"link{number}").symlink_to(f"link{number + 1}")
    (place.parent / "link2000").write_text("wanted")
    place.symlink_to("link0")


def linked_folder(place):
    (place.parent / "real").mkdir()
    (place.parent / "real" / "out.txt").write_text("wanted")
    place.parent.joinpath("d").symlink_to("real")


ODD = {
    "nothing": lambda place: None,
    "a folder": lambda place: place.mkdir(),
    "a pipe": os.mkfifo,
    "a dangling link": lambda place: place.symlink_to("nowhere"),
    "a link to itself": lambda place: place.symlink_to(place.name),
    "a link to the right content": lambda place: place.symlink_to("../wanted.txt"),
    "a chain of links": chain,
    "bytes that are no text": lambda place: place.write_bytes(b"wanted\xff"),
    "a file in the place of its folder": lambda place: place.parent.joinpath("d").write_text(""),
    "a folder that is a link": linked_folder,
}

READERS = """
def check(order):
    here = order.artefacts if order.params["where"] == "artefacts" else order.run(
        ["sh", "-c", 'cp -a "$0/." .', order.artefacts]).folder
    text, inner = here.read_text("out.txt"), here.read_text("d/out.txt")
    return {"value": float("wanted" in (text, inner)), "evidence": {"text": text, "inner": inner}}
"""


@pytest.mark.parametrize("where", ["artefacts", "run"])
@pytest.mark.parametrize("name", ODD)
def test_odd_content_is_read_as_none_and_never_raises(name, where, find, workspace):
    """A checker that opened files raised: a policy chose `verifier_failed` over reward 0."""
    (workspace.parent / "wanted.txt").write_text("wanted")
    ODD[name](workspace / "out.txt")
    found = find(program, source(READERS, where=where))
    assert found.value == 0.0
    assert found.evidence["evidence"] == {"text": None, "inner": None}


@pytest.mark.parametrize("where", ["artefacts", "run"])
def test_a_regular_file_is_read_where_it_lies(where, find, workspace):
    (workspace / "d").mkdir()
    (workspace / "d" / "out.txt").write_text("wanted")
    assert find(program, source(READERS, where=where)).value == 1.0


def test_bytes_are_read_up_to_the_limit_and_by_paths_inside_only(tmp_path):
    folder = folders.Folder(tmp_path / "left")
    (tmp_path / "left").mkdir()
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "left" / "bytes").write_bytes(b"\xff")
    (tmp_path / "left" / "large").write_bytes(bytes(folders.MAX_FILE_BYTES))
    with (tmp_path / "left" / "larger").open("wb") as file:
        file.truncate(1 << 40)
    assert folder.read_bytes("bytes") == b"\xff"
    assert folder.read_bytes("large") == bytes(folders.MAX_FILE_BYTES)
    assert folder.read_bytes("larger") is None
    for path in ("", ".", "../outside", f"{tmp_path}/outside", "a\0b", "\ud800", "x" * 9_999):
        assert folder.read_bytes(path) is None


def test_a_command_compares_with_the_checks_files(find, workspace):
    (workspace / "out.txt").write_text("wanted")
    command = ["cmp", str(workspace / "out.txt"), "d/wanted.txt"]
    check = Check(kind="program", params={"command": command, "files": {"d/wanted.txt": "wanted"}})
    assert find(program, check).value == 1.0
    (workspace / "out.txt").write_text("unwanted")
    assert find(program, check).value == 0.0


def test_evidence_too_long_for_a_record_is_left_out_of_it(find, workspace):
    """A policy that left a long text cut the record short, and chose `verifier_failed`."""
    (workspace / "out.txt").write_text("x" * 100_000)
    check = source(
        "def check(order):\n"
        "    return {'value': 0, 'evidence': {'found': order.artefacts.read_text('out.txt')}}\n"
    )
    found = find(program, check)
    assert found.value == 0.0
    assert list(found.evidence["evidence"]) == ["left out"]


def test_the_readmes_checker_judges_whatever_is_left(find, workspace):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    start = text.index("    import sys\n\n    def check(order):")
    lines = text[start:].splitlines()
    end = next(n for n, line in enumerate(lines) if line and not line.startswith("    "))
    check = source(dedent("\n".join(lines[:end])), cases=[["1 2", "3"], ["4 5", "9"]])
    assert find(program, check).value == 0.0
    (workspace / "total.py").write_text("print(sum(map(int, input().split())), end='')")
    assert find(program, check).value == 0.0
    (workspace / "README").write_text("a sum")
    assert find(program, check).value == 1.0
    (workspace / "total.py").write_text("print(3, end='')")
    assert find(program, check).value == 0.5
    (workspace / "total.py").unlink()
    (workspace / "total.py").mkdir()
    assert find(program, check).value == 0.0


# --- several runs -------------------------------------------------------------------------------

SPOILERS = {
    "changes it": "echo bad > expected.txt",
    "removes it": "rm expected.txt",
    "puts a folder there": "rm expected.txt; mkdir expected.txt",
    "puts a link there": "ln -sf /etc/passwd expected.txt",
    "adds beside it": "echo bad > conftest.py; mkdir -p ~/.config; echo bad > ~/.profile",
    "shuts the folder": "chmod 000 .",
    "removes the folder": 'rm -rf "$PWD"',
    "spoils every folder around": "for f in ../*/; do echo bad > $f/expected.txt; done",
    "goes deep": 'python3 -c \'import os\nfor _ in range(3000): os.mkdir("e"); os.chdir("e")\'',
}

TWICE = """
def check(order):
    order.run(["bash", "-c", order.params["spoiler"]], timeout_s=10)
    look = "cat expected.txt d/more.txt; find . ~ -type f | sort"
    seen = order.run(["bash", "-c", look]).stdout.decode()
    wanted = "right\\nmore\\n" + "./d/more.txt\\n./expected.txt\\n"
    own = order.files["expected.txt"] == "right\\n"
    return {"value": float(own and seen.startswith(wanted) and seen.count("\\n") == 6),
            "evidence": {"seen": seen}}
"""


@pytest.mark.parametrize("name", SPOILERS)
def test_a_run_finds_the_checks_files_as_if_it_were_the_first(name, find, tmp_path):
    """An earlier run of a candidate could change the files that a later one is judged by."""
    files = {"expected.txt": "right\n", "d/more.txt": "more\n"}
    params = {"source": TWICE, "files": files, "params": {"spoiler": SPOILERS[name]}}
    found = find(program, Check(kind="program", params=params))
    subprocess.run(["rm", "-rf", tmp_path / "sandbox-0"], check=True)  # pytest's own cannot go deep
    assert found.value == 1.0, found.evidence


def test_what_a_run_leaves_in_its_folder_is_gone_with_the_next(find, tmp_path):
    check = source(
        "import os\n"
        "def check(order):\n"
        "    first = order.run(['sh', '-c', 'echo 1 > out'])\n"
        "    left = first.folder.read_text('out')\n"
        "    second = order.run(['sh', '-c', 'cat out'])\n"
        "    gone = not os.path.exists(first.folder) and first.folder != second.folder\n"
        "    return left == '1\\n' and second.stdout == b'' and gone\n"
    )
    assert find(program, check).value == 1.0


def test_a_checks_files_stay_in_their_folder(find):
    for path in ("/etc/x", "../x", "a/../../x"):
        params = {"source": "def check(order): return 1", "files": {path: ""}}
        with pytest.raises(UsageError, match="relative paths"):
            find(program, Check(kind="program", params=params))


def test_a_candidate_that_never_ends_is_cut_and_told_apart(find):
    check = source(
        "import sys\n"
        "def check(order):\n"
        "    ended = order.run(['sleep', '60'], timeout_s=0.05)\n"
        "    return ended.timed_out and ended.exit_code == -9\n"
    )
    assert find(program, check).value == 1.0


def test_a_flood_is_cut_without_losing_the_record(find):
    check = source(
        "def check(order):\n"
        "    ended = order.run(['sh', '-c', 'yes'], timeout_s=2)\n"
        "    return len(ended.stdout) == 1 << 20 and ended.exit_code != 0\n"
    )
    assert find(program, check).value == 1.0


def exec_result(**more):
    fields = {"exit_code": 0, "stdout": "", "stderr": ""} | more
    return ExecResult(**fields)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (exec_result(stdout='{"nonce": "x", "value": 1}'), "nonce"),
        (exec_result(stdout='{"value": 1}'), "nonce"),
        (exec_result(stdout="1"), "nonce"),
        (exec_result(stdout="PASSED"), "no record"),
        (exec_result(stdout='{"nonce": "n"}\n{"nonce": "n"}'), "no record"),
        (exec_result(exit_code=1, stdout='{"nonce": "n", "value": 1}'), "exit code 1"),
        (exec_result(exit_code=None), "exit code None"),
        (exec_result(truncated=True), "no complete record"),
        (exec_result(exit_code=None, timed_out=True), "time limit"),
        (exec_result(stdout='{"nonce": "n", "error": "boom"}'), "boom"),
    ],
)
def test_nothing_but_a_complete_record_is_read(result, message):
    with pytest.raises(VerifierError, match=message):
        read_record(result, "n")


@pytest.mark.parametrize(
    ("record", "expected", "value"),
    [
        ({"value": 0.5}, None, 0.5),
        ({"value": 1.0, "ran": 5, "passed": 5}, 5, 1.0),
        ({"value": 1.0, "ran": 4, "passed": 4}, 5, 0.0),
        ({"value": 1.0, "ran": 5, "passed": 4}, 5, 0.8),
        ({"value": 0.0, "ran": 5, "passed": 4}, 5, 0.0),
        ({"value": 1.0}, 5, 0.0),
        ({"value": 1.0, "ran": 0, "passed": 0, "expected": 0}, None, 0.0),
    ],
)
def test_an_incomplete_suite_is_not_paid(record, expected, value):
    assert finding(record, expected).value == value


def test_a_record_with_other_keys_is_refused():
    with pytest.raises(VerifierError, match="'value'"):
        finding({"value": 1.0, "reward": 1.0}, None)


def test_a_time_out_is_tried_once_more_alone_with_twice_the_time(replied, make_attempt, clock):
    """BR-35: a busy machine turned right programs into failures."""

    def answered(order):
        return exec_result(stdout=json.dumps({"nonce": order["nonce"], "value": 1.0}))

    late = exec_result(exit_code=None, timed_out=True)
    check = source("def check(order): return 1.0")
    subject = Subject(trajectory=make_attempt("x"))
    once, twice = replied(late, answered), replied(late, late)
    found = asyncio.run(program(check, subject, Tools(clock=clock, sandboxes=once)))
    assert found.value == 1.0
    assert once.calls[1][1] == 2 * once.calls[0][1]
    with pytest.raises(VerifierError, match="twice"):
        asyncio.run(program(check, subject, Tools(clock=clock, sandboxes=twice)))


def test_the_nonce_and_the_source_travel_by_standard_input_only(replied, make_attempt, clock):
    box = replied(
        lambda order: exec_result(stdout=json.dumps({"nonce": order["nonce"], "value": 0}))
    )
    subject = Subject(trajectory=make_attempt("x"))
    check = source("def check(order): return 'secret'")
    asyncio.run(program(check, subject, Tools(clock=clock, sandboxes=box)))
    argv, _, order = box.calls[0]
    assert order["nonce"] not in " ".join(argv)
    assert "secret" in order["source"]
    assert "secret" not in " ".join(argv)


@pytest.mark.parametrize("magic", [importlib.util.MAGIC_NUMBER, b"another"])
def test_an_interpreter_of_another_version_compiles_the_harness_itself(magic, tmp_path):
    for path, text in bundle(nursery, folders, harness).items():
        (tmp_path / path).write_text(text.replace(repr(importlib.util.MAGIC_NUMBER), repr(magic)))
    assert repr(magic) in (tmp_path / "harness.py").read_text()
    order = {"nonce": "n", "artefacts": "/none", "copies": {}, "reply": "7", "files": {},
             "source": "def check(order): return order.reply == '7'"}  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "harness.py"], cwd=tmp_path, check=True,
        input=json.dumps(order).encode(), capture_output=True,
    )  # fmt: skip
    assert json.loads(ended.stdout) == {"nonce": "n", "value": 1.0}


def test_a_program_needs_exactly_one_of_source_and_command(replied, make_attempt, clock):
    for params in ({}, {"source": "x", "command": ["true"]}):
        check = Check(kind="program", params=params)
        subject = Subject(trajectory=make_attempt("x"))
        with pytest.raises(UsageError, match="either"):
            asyncio.run(program(check, subject, Tools(clock=clock, sandboxes=replied())))


def test_a_tool_task_without_sealed_state_is_no_verdict(replied, make_attempt, clock):
    subject = Subject(trajectory=make_attempt("x", environment=Environment()))
    tools = Tools(clock=clock, sandboxes=replied())
    with pytest.raises(VerifierError, match="no sealed"):
        asyncio.run(program(source("x"), subject, tools))
    with pytest.raises(VerifierError, match="wants sandboxes"):
        asyncio.run(program(source("x"), subject, Tools(clock=clock)))
