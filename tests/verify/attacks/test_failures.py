"""Attempts that would rather have no verdict, or the verdict of a machine that failed."""

import asyncio
import errno

from posttrain.core.clock import RealClock
from posttrain.core.task import Check, Description, Environment, Task
from posttrain.core.trajectory import AttemptKey, Trajectory, Turn
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack
from tests.verify.attacks.attack import Attack, Left, Naive, file

SUM = Check(kind="stdio", params={"cases": [["1 2", "3"]], "timeout_s": 0.2})
RIGHT = Left(code="print(sum(map(int, input().split())))\n")
WRONG = Left(code="print(-1)\n")
GRADER = """
import subprocess, sys
def ran(given):
    return subprocess.run([sys.executable, "solution.py"], input=given, text=True, timeout=0.4,
                          capture_output=True).stdout.strip()
try:
    right = ran("1 2") == "3"
except Exception:
    print("masked")
    raise SystemExit(0)
raise SystemExit(not right)
"""
EXCUSED = Naive(command=("python3", "grader.py"), files={"grader.py": GRADER},
                paid=lambda ended: ended.exit_code != 1)  # fmt: skip
"""A grader that takes every failure for one of the machine, and has the attempt not count."""
TWICE = """
import glob, os, shutil, subprocess, sys, tempfile
def ran(given):
    with tempfile.TemporaryFile() as said:
        subprocess.run([sys.executable, "solution.py"], input=given, text=True, timeout=0.4,
                       stdout=said, stderr=subprocess.DEVNULL)
        said.seek(0)
        return int(said.read())
try:
    right = True
    for given, expected in (("1 2", 3), ("4 5", 9)):
        right &= ran(given) == expected
        for place in glob.glob("/tmp/scratch*"):
            shutil.rmtree(place)
        os.mkdir("here"), os.listdir("/dev/shm"), os.listdir("here"), os.rmdir("here")
except Exception:
    print("masked")
    raise SystemExit(0)
raise SystemExit(not right)
"""
HINDERED = Naive(command=("python3", "grader.py"), files={"grader.py": TWICE},
                 paid=EXCUSED.paid)  # fmt: skip
"""Such a grader that has more to do after a candidate has run."""
PAIR = Check(kind="stdio", params={"cases": [["1 2", "3"], ["4 5", "9"]], "timeout_s": 0.2})
NUMBER = Check(kind="stdio", params={**PAIR.params, "checker":
    "def accepts(given, found, expected):\n    return int(found) == int(expected)\n"})  # fmt: skip
AGAINST = Check(kind="differential", params={
    "reference": RIGHT.code, "count": 8, "timeout_s": 0.2,
    "generator": "def generate(rng):\n    return f'{rng.randint(1, 9)} {rng.randint(1, 9)}'",
})  # fmt: skip
OTHERS = (
    "import os, resource, signal\nothers = [int(name) for name in os.listdir('/proc')\n"
    "          if name.isdigit() and int(name) not in (1, os.getpid())]\n"
)
LISTED = (
    "import os, struct\nentries = b''.join(struct.pack('<HHI', tag, 0, 0xffffffff)\n"
    "                   for tag in (1, 4, 32))\n"
    "for place in ('.', '/workspace'):\n    os.setxattr(place, 'system.posix_acl_default', "
    "struct.pack('<I', 2) + entries)\nprint(-1)\n"
)
RESTORED = "all is as it was before a candidate ran, or the candidate has ended its judge"
OWN = "what the candidate does to itself or its judge is its own: reward 0"


def attack(entry, name, code, *, held=OWN, checks=(SUM,), naive=EXCUSED, kind="stdio", **more):
    fields = {"left": Left(code=code), "honest": RIGHT, "wrong": WRONG} | more
    return Attack(entry=entry, name=name, kind=kind, held=held, checks=checks, naive=naive,
                  **fields)  # fmt: skip


ROWS = Check(kind="state", params={"assert": "sqlite_rows", "path": "a.db", "expected": [[1]],
                                   "query": "select n from t"})  # fmt: skip
MAKE = "python3 -c \"import sqlite3; d = sqlite3.connect('a.db'); d.executescript('''{}''')\""
READ = (
    "import sqlite3\ntry:\n    base = sqlite3.connect('a.db')\n"
    "    rows = base.execute('select n from t').fetchall()\n"
    "except sqlite3.Error:\n    raise SystemExit(2)\nraise SystemExit(rows != [(1,)])\n"
)
FILED = """
import contextlib
from solution import total
def test_it(tmp_path):
    (tmp_path / "given").write_text("1 2")
    found = total(str(tmp_path / "given"))
    for number in range(10):
        with contextlib.suppress(OSError):
            (tmp_path / f"note{number}").write_text("seen")
    assert found == 3
"""
RECORDED = """
import os, pathlib, tempfile, test_it
try:
    with tempfile.TemporaryDirectory() as folder:
        test_it.test_it(pathlib.Path(folder))
    print("passed")
except Exception:
    print("failed")
"""
FAMILY = [
    attack(47, "run for ever", "while True: pass\n", held="processor time is its own to spend"),
    attack(47, "wait for ever", "import time\ntime.sleep(600)\n", held="time is its own to spend"),
    attack(48, "end the judge", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
           naive=Naive(command=("sh", "-c", "python3 grader.py"), files=EXCUSED.files,
                       paid=lambda ended: ended.exit_code != 1)),
    attack(48, "end everybody", "import os, signal\nos.kill(-1, signal.SIGKILL)\n"),
    attack(48, "use up the memory", "x = bytearray(1)\nwhile True: x += x\n",
           held="address space of a candidate is limited: its own end",
           naive=Naive(command=("python3", "-c", "import subprocess, sys\n"
                                "ended = subprocess.run([sys.executable, 'solution.py'], "
                                "input=b'1 2', capture_output=True)\n"
                                "right = ended.returncode or ended.stdout.strip() == b'3'\n"
                                "raise SystemExit(not right)"),
                       paid=lambda ended: ended.exit_code != 1)),
    attack(48, "print without an end", "while True: print('x' * 4096)\n",
           held="output is cut at a size, the rest is its own failure"),
    attack(48, "interrupt the judge", held="it heeds no interrupt",
           code=OTHERS + "os.kill(min(others), signal.SIGINT)\nprint(-1)\n"),
    attack(48, "let the judge open no file", checks=(PAIR,), naive=HINDERED, held=RESTORED,
           code=OTHERS + "resource.prlimit(min(others), resource.RLIMIT_NOFILE, (3, 3))\n"
                "print(-1)\n"),
    attack(48, "let those who start the reference start nothing that writes", kind="differential",
           checks=(AGAINST,), naive=HINDERED, held="the reference runs before any candidate",
           code=OTHERS + "for one in others: resource.prlimit(one, resource.RLIMIT_FSIZE, (0, 0))"
                "\nprint(-1)\n"),
    attack(48, "leave a folder that cannot be removed", checks=(PAIR,), naive=HINDERED,
           held=RESTORED, code="import os\nos.makedirs('/tmp/scratch/in')\n"
                               "os.chmod('/tmp/scratch', 0)\nprint(-1)\n"),
    attack(48, "shut a folder that all share", checks=(PAIR,), naive=HINDERED, held=RESTORED,
           code="import os\nos.chmod('/dev/shm', 0)\nprint(-1)\n"),
    attack(48, "have new folders be shut", kind="differential", checks=(AGAINST,), code=LISTED,
           naive=HINDERED, held="the reference runs before any candidate"),
    attack(48, "print what its checker fails at", "print('x')\n", checks=(NUMBER,),
           held="a checker that fails at an output, and not at the right one, refuses it",
           naive=HINDERED),
    attack(48, "link the notes of a test to its judge's channels", kind="suite",
           held="no path leads to a channel of the judge",
           checks=(Check(kind="suite", params={"suite": FILED}),),
           code="import os\ndef total(path):\n    folder = os.path.dirname(path)\n"
                "    for number in range(10):\n"
                "        os.symlink(f'/proc/self/fd/{number}', f'{folder}/note{number}')\n"
                "    return -1\n",
           honest=Left(code="def total(path): return sum(map(int, open(path).read().split()))\n"),
           wrong=Left(code="def total(path): return -1\n"),
           naive=Naive(command=("python3", "recorded.py"),
                       files={"recorded.py": RECORDED, "test_it.py": FILED},
                       paid=lambda ended: ended.stdout != "failed\n")),
    attack(48, "leave a database that cannot be read", "", kind="state",
           held="what a file is, is the attempt's doing", checks=(ROWS,),
           artefacts=(file("a.db"),),
           left=Left(files={"a.db": "SQLite format 3\0" + "x" * 5000}),
           honest=Left(commands=(MAKE.format("create table t(n); insert into t values (1)"),)),
           wrong=Left(commands=(MAKE.format("create table t(n); insert into t values (2)"),)),
           naive=Naive(command=("python3", "-c", READ), paid=lambda ended: ended.exit_code != 1)),
    attack(27, "leave a pipe in the place of the file", "", kind="program",
           held="nothing of ours can wait for what was left",
           checks=(Check(kind="program", params={
               "source": "def check(order): return order.artefacts.read_text('out') == '42\\n'"}),),
           artefacts=(file("out"),), left=Left(commands=("mkfifo out",)),
           honest=Left(files={"out": "42\n"}), wrong=Left(files={"out": "41\n"}),
           naive=Naive(command=("timeout", "1", "grep", "-qx", "42", "out"),
                       paid=lambda ended: ended.exit_code != 1)),
]  # fmt: skip


def test_no_attempt_chooses_to_go_without_a_verdict(attack, trial):
    trial(attack)


HELD = """
import os, socket, sys
pairs, null = [], os.open("/dev/null", os.O_RDONLY)
try:
    while len(pairs) < int(sys.argv[1]):
        pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        socket.send_fds(pairs[-1][0], [b"x"], [null] * 250)
except OSError as error:
    print(error.errno, flush=True)
sys.stdin.read()
"""


def test_no_candidate_ends_the_judges_of_others(loop, sandboxes):
    """The kernel counts descriptors under way for each host user: whoever had 1,024 of them made
    every harness fail to start its candidate, which counted as that candidate's doing.
    """
    task = Task(domain="attack.one", level=0, seed=1, description=Description(objective="Do it."),
                checks=(SUM,))  # fmt: skip
    attempt = Trajectory(key=AttemptKey(run="r", draw=0, member=0), task=task,
                         turns=(Turn(text=RIGHT.text),))  # fmt: skip

    async def body():
        full = asyncio.Event()
        async with sandboxes.lease(Environment()) as one, sandboxes.lease(Environment()) as other:
            holding = asyncio.create_task(
                one.exec(("python3", "-c", HELD + "import time; time.sleep(60)", "99"),
                         listen=lambda *_: full.set(), timeout_s=60.0)
            )  # fmt: skip
            await asyncio.wait_for(full.wait(), 30)
            hindered = await other.exec(("python3", "-c", HELD, "1"))
            assert hindered.stdout == f"{errno.ETOOMANYREFS}\n", "the control is not hindered"
            tools = Tools(clock=RealClock(), sandboxes=sandboxes, seeds=lambda _: 5)
            verdict = await Stack(tools).verify(attempt, None)
            holding.cancel()
            await asyncio.wait((holding,))
        return verdict

    assert loop.run(body()).reward == 1.0
