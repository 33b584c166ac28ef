"""Attempts that would rather have no verdict, or the verdict of a machine that failed."""

from posttrain.core.task import Check
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
