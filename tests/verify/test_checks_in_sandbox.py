"""Programs and state checks over the real sandbox driver; skipped where it cannot contain."""

import asyncio
import time
from dataclasses import replace

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.errors import IsolationError
from posttrain.core.task import Artefact, ArtefactKind, Check, Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack
from tests.verify.conftest import InlineWorkers

ENVIRONMENT = Environment(files={"a.txt": "one\n", "d/b.txt": "two\n"})


def judge(make_attempt, *checks, commands=(), reply="done", environment=ENVIRONMENT, **more):
    """The verdict over what the commands left in a real sandbox."""

    async def body():
        async with BubblewrapSandboxes() as sandboxes:
            try:
                await sandboxes.abilities()
            except IsolationError as error:
                pytest.skip(str(error))
            stack = Stack(Tools(clock=RealClock(), workers=InlineWorkers(), sandboxes=sandboxes))
            async with sandboxes.lease(environment) as sandbox:
                for command in commands:
                    result = await sandbox.exec(["sh", "-c", command])
                    assert result.exit_code == 0, result
                sealed = await sandbox.seal()
            try:
                attempt = make_attempt(reply, checks=checks, environment=environment, **more)
                return await stack.verify(attempt, sealed)
            finally:
                await sealed.close()

    return asyncio.run(body())


def state(name, path, **more):
    return Check(kind="state", params={"assert": name, "path": path} | more)


def test_every_assertion_holds_over_a_workspace_left_as_it_should_be(make_attempt):
    files = {"a.txt": "one\n", "d/b.txt": "two\n"}
    verdict = judge(
        make_attempt,
        state("file_equals", "new.txt", expected="x\n"),
        state("document_equals", "j.json", expected=[1]),
        state("file_absent", "gone.txt"),
        state("file_mode", "new.txt", expected="640"),
        state("tree_unchanged", ".", expected=files, **{"except": ["new.txt", "j.json"]}),
        commands=["echo x > new.txt; chmod 640 new.txt; echo '[1]' > j.json"],
    )
    assert verdict.errors == ()
    assert [part.value for part in verdict.components] == [1.0] * 5


def test_every_assertion_fails_over_an_untouched_or_harmed_one(make_attempt):
    verdict = judge(
        make_attempt,
        state("file_equals", "new.txt", expected="x\n"),
        state("file_equals", "a.txt", expected="one\n"),
        state("file_absent", "d"),
        state("file_mode", "d/b.txt", expected="640"),
        state("tree_unchanged", ".", expected={"d/b.txt": "two\n"}),
        commands=["rm a.txt; ln -s /etc/passwd a.txt"],
    )
    assert verdict.errors == ()
    assert [part.value for part in verdict.components] == [0.0] * 5


def test_deep_folders_and_odd_names_are_seen(make_attempt):
    deep = "/".join(["d"] * 80)
    verdict = judge(
        make_attempt,
        state("tree_unchanged", ".", expected={"a.txt": "one\n", "d/b.txt": "two\n"}),
        state("file_absent", "\\xff"),
        commands=[f"mkdir -p {deep} && echo x > {deep}/hidden; touch $(printf '\\377')"],
    )
    assert verdict.errors == ()
    assert [part.value for part in verdict.components] == [0.0, 0.0]


LONG_NAMES = """
import os
for _ in range(64):
    os.mkdir(b"\\xff" * 255)
    os.chdir(b"\\xff" * 255)
for number in range(1000):
    os.close(os.open(b"%05d" % number + b"\\xff" * 250, os.O_CREAT))
"""


def test_names_too_long_to_be_told_are_not_waited_for(make_attempt):
    """The list of them was too large for a frame: it was never answered, and the check hung."""
    verdict = judge(
        make_attempt,
        state("tree_unchanged", ".", expected={"a.txt": "one\n", "d/b.txt": "two\n"}),
        state("file_absent", "gone.txt"),
        commands=[f"python3 -c '{LONG_NAMES}'"],
    )
    assert verdict.errors == ()
    assert [part.value for part in verdict.components] == [0.0, 1.0]


def test_an_unreadable_file_is_the_attempts_doing_not_an_error(make_attempt):
    verdict = judge(
        make_attempt,
        state("file_equals", "a.txt", expected="one\n"),
        state("tree_unchanged", ".", expected={"a.txt": "one\n", "d/b.txt": "two\n"}),
        commands=["chmod 000 a.txt d"],
    )
    assert verdict.reward is not None, verdict.errors


ODD = {
    "nothing": "rm out.txt",
    "a folder": "rm out.txt; mkdir out.txt",
    "a pipe": "rm out.txt; mkfifo out.txt",
    "a socket": "rm out.txt; python3 -c 'from socket import *; socket(1).bind(\"out.txt\")'",
    "a link to the right content": "echo wanted > other; ln -sf other out.txt",
    "a link to the check's own file": "ln -sf /workspace/wanted.txt out.txt",
    "a link into the program's folder": "ln -sf /proc/self/cwd/wanted.txt out.txt",
    "bytes that are no text": "printf 'wanted\\377' > out.txt",
    "a file larger than any that is read": "head -c 9000000 /dev/zero > out.txt",
}
BY_READING = """
def check(order):
    text = order.artefacts.read_text("out.txt")
    return float(text is not None and text == order.files["wanted.txt"])
"""
BY_RUNNING = """
def check(order):
    return float(order.run(["cmp", order.artefacts + "/out.txt", "wanted.txt"]).exit_code == 0)
"""


def over_one_file(**params):
    files = {"wanted.txt": "wanted\n"}
    return Check(kind="program", params={"files": files, **params})


KINDS = {
    "file_equals": state("file_equals", "out.txt", expected="wanted\n"),
    "document_equals": state("document_equals", "out.txt", format="json", expected="wanted"),
    "file_mode": state("file_mode", "out.txt", expected="701"),
    "file_absent": state("file_absent", "a.txt"),
    "tree_unchanged": state("tree_unchanged", ".", expected={"out.txt": "wanted\n"}),
    "command": over_one_file(command=["cmp", "/artefacts/out.txt", "wanted.txt"]),
    "source that reads": over_one_file(source=BY_READING),
    "source that runs": over_one_file(source=BY_RUNNING),
}


@pytest.mark.parametrize("name", ODD)
def test_whatever_is_left_is_judged_by_every_kind(name, make_attempt):
    """What odd content caused was `verifier_failed`: a policy could choose it over reward 0."""
    verdict = judge(make_attempt, *KINDS.values(), commands=["echo x > out.txt; " + ODD[name]])
    assert verdict.errors == ()
    values = dict(zip(KINDS, (part.value for part in verdict.components), strict=True))
    assert values == dict.fromkeys(KINDS, 0.0)


def test_what_is_left_as_it_should_be_is_paid_by_every_kind_of_program(make_attempt):
    programs = [check for check in KINDS.values() if check.kind == "program"]
    verdict = judge(make_attempt, *programs, commands=["echo wanted > out.txt"])
    assert [part.value for part in verdict.components] == [1.0] * 3, verdict.errors


def test_a_checker_sees_the_artefacts_read_only_and_hides_its_order(make_attempt):
    spy = (
        "import os\n"
        "parent = os.getppid()\n"
        "for place in ('environ', 'mem', 'fd/0', 'maps'):\n"
        "    try:\n"
        "        with open(f'/proc/{parent}/{place}', 'rb') as file: file.read(1)\n"
        "        print('read', place)\n"
        "    except OSError: pass\n"
        "try:\n"
        "    open('/artefacts/a.txt', 'w')\n"
        "    print('wrote')\n"
        "except OSError: pass\n"
        "for number in range(3, 200):\n"
        "    try: os.write(number, b'{}')\n"
        "    except OSError: pass\n"
    )
    source = (
        "import sys\n"
        "def check(order):\n"
        "    ended = order.run([sys.executable, '-c', order.params['spy']], timeout_s=10)\n"
        "    left = order.artefacts.read_text('a.txt')\n"
        "    value = ended.stdout == b'' and ended.exit_code == 0 and left == 'one\\n'\n"
        "    return {'value': float(value), 'evidence': {'said': repr(ended)}}\n"
    )
    check = Check(kind="program", params={"source": source, "params": {"spy": spy}})
    verdict = judge(make_attempt, check)
    assert verdict.reward == 1.0, (verdict.errors, verdict.components)


BY_CANDIDATE = """
def check(order):
    first = order.run(["bash", "-c", order.params["candidate"]], timeout_s=1)
    return float(order.run(["bash", "-c", "cat > /tmp/x; echo ok"]).stdout == b"ok\\n")
"""


@pytest.mark.parametrize("candidate", ["kill -9 $PPID", "kill -9 -1"])
def test_a_candidate_that_kills_its_checker_is_paid_nothing(candidate, make_attempt):
    """It chose `verifier_failed` over reward 0: what the policy does itself is its own failure."""
    params = {"source": BY_CANDIDATE, "params": {"candidate": candidate}}
    verdict = judge(make_attempt, Check(kind="program", params=params))
    assert verdict.errors == ()
    assert verdict.reward == 0.0
    assert "ends its checker" in str(verdict.components[0].evidence)


def test_a_candidate_that_stops_its_checker_is_paid_nothing(make_attempt, monkeypatch):
    monkeypatch.setattr("posttrain.verify.execution._ALLOWANCE_S", 0.3)
    params = {"source": BY_CANDIDATE, "params": {"candidate": "kill -STOP $PPID; sleep 60"}}
    check = Check(kind="program", params=params | {"timeout_s": 0.2})
    verdict = judge(make_attempt, check)
    assert verdict.reward == 0.0, verdict.errors


def test_a_checker_that_is_killed_while_no_candidate_runs_is_no_reward(make_attempt):
    source = "import os\ndef check(order):\n    order.run(['true'])\n    os.kill(os.getpid(), 9)\n"
    verdict = judge(make_attempt, Check(kind="program", params={"source": source}))
    assert verdict.reward is None
    assert "no complete record" in verdict.errors[0]


@pytest.mark.parametrize(
    "candidate",
    [
        "rm -rf /workspace/*; chmod 000 /workspace /tmp",
        "head -c 99000000 /dev/zero | split -b 500000 - /tmp/full",
    ],
)
def test_a_candidate_that_ruins_the_writable_folders_changes_no_later_run(candidate, make_attempt):
    params = {"source": BY_CANDIDATE, "params": {"candidate": candidate}}
    verdict = judge(make_attempt, Check(kind="program", params=params))
    assert verdict.reward == 1.0, verdict.errors


CMP_AFTER_CANDIDATE = """
def check(order):
    order.run(["bash", "-c", order.params["candidate"]], timeout_s=1)
    return float(order.run(["grep", "-qx", "right", "expected.txt"]).exit_code == 0)
"""


@pytest.mark.parametrize(
    ("candidate", "reward"),
    [
        ("echo bad > expected.txt; chmod 444 expected.txt; chmod 555 .", 1.0),
        (
            "echo bad | tee /workspace/*/expected.txt; rm -rf /workspace/*; chmod 000 /workspace",
            1.0,
        ),
        ("head -c 99000000 /dev/zero | split -b 500000 - /tmp/full", 1.0),
        ("rm *; head -c 99000000 /dev/zero | split -b 500000 - /tmp/full", 0.0),
    ],
)
def test_a_later_run_finds_the_checks_files_or_is_not_begun(candidate, reward, make_attempt):
    """An earlier run could change what a later one is judged by. One that leaves no room for it
    has itself to blame.
    """
    files = {"expected.txt": "right\n", "large": "x" * 2_000_000}
    params = {"source": CMP_AFTER_CANDIDATE, "files": files, "params": {"candidate": candidate}}
    verdict = judge(make_attempt, Check(kind="program", params=params))
    assert verdict.errors == ()
    assert verdict.reward == reward


def test_a_workspace_shut_by_the_policy_is_judged_as_it_is(make_attempt):
    """`chmod 000 .` made the attempt `infra_failed`: no later command, and no seal."""
    source = "def check(order): return order.artefacts.read_text('a.txt') == 'one\\n'"
    verdict = judge(
        make_attempt,
        state("file_equals", "a.txt", expected="one\n"),
        Check(kind="program", params={"source": source}),
        commands=["chmod 000 /workspace", "chmod 000 /workspace /tmp"],
    )
    assert verdict.reward == 1.0, verdict.errors


def test_a_hanging_checker_costs_its_time_limit_and_nothing_else(make_attempt, monkeypatch):
    monkeypatch.setattr("posttrain.verify.execution._ALLOWANCE_S", 0.2)
    source = "def check(order):\n    while True: pass\n"
    check = Check(kind="program", params={"source": source, "timeout_s": 0.3})
    started_s = time.monotonic()
    verdict = judge(make_attempt, check)
    assert verdict.reward is None
    assert "time limit twice" in verdict.errors[0]
    assert time.monotonic() - started_s < 8.0


SEGMENT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
there = libc.shmget(77, 4096, 0) != -1 or libc.msgget(77, 0) != -1 or libc.semget(77, 1, 0) != -1
made = [libc.shmget(77, 4096, 0o1600), libc.msgget(77, 0o1600), libc.semget(77, 1, 0o1600)]
print("again" if there else "first" if -1 not in made else "refused")
"""


def test_no_candidate_finds_a_segment_that_another_left(make_attempt):
    check = Check(kind="stdio", params={"cases": [["", "first"]] * 3})
    verdict = judge(make_attempt, check, reply=f"```python{SEGMENT}```")
    assert verdict.reward == 1.0, verdict.components


def test_a_thousand_inputs_are_told_whole(make_attempt):
    """What is said of each run was longer than what a harness may say."""
    params = {"function": "f", "count": 1000, "generator": "def generate(rng): return (1,)",
              "reference": "def f(x): return x"}  # fmt: skip
    check = Check(kind="differential", params=params)
    verdict = judge(make_attempt, check, reply="```python\ndef f(x): return x\n```")
    assert verdict.reward == 1.0, verdict.components


def test_no_candidate_sees_what_the_task_hides(make_attempt):
    """It lay in the tree, which a candidate finds at /artefacts."""
    code = "print(open('/artefacts/d/b.txt').read())"
    hiding = replace(ENVIRONMENT, hidden=("d",))
    check = Check(kind="stdio", params={"cases": [["", "two"]], "path": "s.py"})
    told = {"commands": [f'echo "{code}" > s.py'],
            "artefacts": (Artefact(name="all", kind=ArtefactKind.TREE, path="."),)}  # fmt: skip
    assert judge(make_attempt, check, **told).reward == 1.0
    verdict = judge(make_attempt, check, environment=hiding, **told)
    assert verdict.reward is None
    assert "what the task hides" in verdict.errors[0]
