"""Sessions: what stays, what cannot mix two calls up, and that a lost memory is said (BR-40)."""

import asyncio

import pytest

from posttrain.core.containment import Bound, Cause
from posttrain.core.task import Environment
from posttrain.sandbox import resident, session
from tests.sandbox.conftest import processes_named

SMALL = Environment(memory_bytes=128 << 20, max_output_bytes=2_000)


def shell(sandbox, line, *, name="shell", **given):
    return sandbox.exec(session.shell(line, name=name), **given)


def python(sandbox, code, **given):
    return sandbox.exec(session.python(), stdin=code.encode(), **given)


# --- shell ------------------------------------------------------------------------------------


def test_directory_and_exported_variables_stay_and_nothing_else(inside):
    async def body(sandbox):
        made = await shell(sandbox, "mkdir -p a/b && cd a/b; export X='1 2'; Y=3; f() { :; }")
        assert made.exit_code == 0
        result = await shell(sandbox, 'echo "$PWD [$X] [$Y]"; type f')
        assert result.stdout == "/workspace/a/b [1 2] []\n"
        assert (await shell(sandbox, "pwd", name="other")).stdout == "/workspace\n"

    inside(body)


@pytest.mark.parametrize(
    ("line", "exit_code", "told"),
    [
        ("cat > f <<'EOF'\none\ntwo\nthree\nEOF", 0, ""),
        ("cat > g <<EOF\none\n  EOF", 2, "here-document"),
        ("echo 'open", 2, "unexpected EOF"),
        ("exit 3", 3, ""),
        ("echo end-of-command; echo __END__; printf '\\0'", 0, ""),
        ("if true", 2, "syntax error"),
        ("exec false", 1, ""),
        ("exec <&- >&- 2>&-", 0, ""),
    ],
)
def test_no_line_spoils_the_next(inside, line, exit_code, told):
    async def body(sandbox):
        await shell(sandbox, "mkdir d; cd d; export KEPT=yes")
        result = await shell(sandbox, line)
        assert result.exit_code == exit_code, result
        assert told in result.stderr
        after = await shell(sandbox, "echo ok $KEPT; pwd", timeout_s=1.0)
        assert after.stdout == "ok yes\n/workspace/d\n"
        if line.startswith("cat > f"):
            assert await sandbox.read("d/f", max_bytes=99) == b"one\ntwo\nthree\n"

    inside(body)


def test_a_line_that_meets_its_limit_leaves_the_session_as_it_was(inside):
    async def body(sandbox):
        await shell(sandbox, "export A=1")
        line = "export A=2; cd /tmp; read forever < /dev/zero"
        assert (await shell(sandbox, line, timeout_s=0.3)).timed_out
        assert (await shell(sandbox, "echo $A; pwd")).stdout == "1\n/workspace\n"

    inside(body)


def test_a_deleted_directory_and_a_spoilt_state_are_survived(inside):
    async def body(sandbox):
        await shell(sandbox, "mkdir gone; cd gone")
        await shell(sandbox, "cd ..; rmdir gone; mkdir gone; cd gone; rmdir ../gone")
        assert (await shell(sandbox, "echo ok")).stdout == "ok\n"
        await shell(sandbox, "head -c 1000 /dev/urandom > /tmp/.sessions/shell; kill -9 $$")
        assert (await shell(sandbox, "echo ok")).stdout.endswith("ok\n")

    inside(body)


def test_a_session_that_a_full_disk_does_not_let_be_kept_says_so(inside):
    async def body(sandbox):
        await shell(sandbox, "mkdir d; cd d")
        fill = "cat /dev/zero > z1; cat /dev/zero > z2; cd ..; true"
        result = await shell(sandbox, fill)
        assert result.disk_full
        assert "could not be kept" in result.stderr
        after = await shell(sandbox, "rm z1 z2; pwd")
        assert (after.stdout, after.stderr) == ("/workspace/d\n", "")

    inside(body, Environment(disk_bytes=1 << 20))


# --- Python -----------------------------------------------------------------------------------


def test_variables_stay_values_are_shown_and_exceptions_are_text(inside):
    async def body(sandbox):
        first = await python(sandbox, "import math\nx = 6")
        assert (first.stdout, first.stderr) == ("", f"{resident.NEW}\n")
        second = await python(sandbox, "print('hi')\nx * 7")
        assert (second.stdout, second.stderr, second.exit_code) == ("hi\n42\n", "", 0)
        wrong = await python(sandbox, "y = 1\nmath.sqrt(-y)")
        assert wrong.exit_code == 1
        assert wrong.stderr.startswith("Traceback (most recent call last):\n")
        assert '"<call 3>", line 2' in wrong.stderr
        assert "math.sqrt(-y)" in wrong.stderr
        assert wrong.stderr.endswith("ValueError: math domain error\n")
        assert "<string>" not in wrong.stderr
        cut = await python(sandbox, "x = (")
        assert "SyntaxError" in cut.stderr
        assert (await python(sandbox, "class A: pass\nimport pickle\npickle.loads(pickle.dumps(A))"
                             )).stdout == "<class '__main__.A'>\n"  # fmt: skip
        assert (await python(sandbox, "None")).stdout == ""
        left = await python(sandbox, "import sys; sys.exit(3)")
        assert (left.exit_code, left.stderr) == (3, "")
        assert (await python(sandbox, "y, x")).stdout == "(1, 6)\n"

    inside(body)


def test_modules_of_the_workspace_are_found_and_take_nobody_elses_place(inside):
    async def body(sandbox):
        await sandbox.write("mine.py", b"value = 5")
        await sandbox.write("socket.py", b"raise SystemExit('in the way')")
        await sandbox.write("ast.py", b"raise SystemExit('in the way')")
        assert (await python(sandbox, "import mine\nmine.value")).stdout == "5\n"

    inside(body)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.closerange(3, 1024)",
        "import ctypes; ctypes.string_at(0)",
        "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\nwhile 1: pass",
        "import os\nif os.fork() == 0:\n    import time; time.sleep(60)\nos._exit(0)",
    ],
)
def test_an_interpreter_that_dies_is_told_and_the_next_call_says_what_is_lost(inside, code):
    async def body(sandbox):
        await python(sandbox, "x = 1")
        result = await python(sandbox, code, timeout_s=5.0)
        assert not result.timed_out
        assert result.exit_code in (1, 137), result
        assert resident.DIED in result.stderr or result.exit_code == 137
        after = await python(sandbox, "'x' in globals()")
        assert (after.stdout, after.stderr) == ("False\n", f"{resident.NEW}\n")

    inside(body)


@pytest.mark.parametrize("code", ["while True: pass", "import os; os.kill(os.getpid(), 19)"])
def test_an_interpreter_that_spins_or_stands_still_ends_at_the_time_limit(inside, code, marker):
    async def body(sandbox):
        beside = f"import subprocess; p = subprocess.Popen(['sh', '-c', 'sleep 60 # {marker}'])"
        await python(sandbox, beside)
        assert processes_named(marker)
        result = await python(sandbox, f"print('begun')\n{code}", timeout_s=0.4)
        assert (result.cause, result.stdout) == (Cause.TIMED_OUT, "begun\n")
        assert processes_named(marker) == []
        after = await python(sandbox, "1")
        assert after.memory_lost
        assert (after.stdout, after.stderr) == ("1\n", f"{resident.NEW}\n")
        assert not (await python(sandbox, "2")).memory_lost

    inside(body)


def test_an_interpreter_that_the_memory_limit_kills_is_told_so(inside, machine):
    if machine.capabilities.limits is not Bound.TREE:
        pytest.skip("no control groups can be made here")
    beside = (
        "import os, signal\nfor _ in range(2):\n"
        "    if os.fork() == 0:\n        y = b'x' * (30 << 20); signal.pause()"
    )

    async def body(sandbox):
        await python(sandbox, beside)
        result = await python(sandbox, "x = b'x' * (80 << 20)")
        assert result.cause is Cause.OUT_OF_MEMORY, result
        assert resident.DIED in result.stderr
        assert resident.NEW in (await python(sandbox, "1")).stderr

    inside(body, SMALL)


def test_an_allocation_that_is_refused_is_an_exception_and_nothing_is_lost(inside):
    async def body(sandbox):
        await python(sandbox, "x = 1")
        result = await python(sandbox, "y = bytearray(900 << 20)")
        assert result.stderr.endswith("MemoryError\n")
        assert (await python(sandbox, "x")).stdout == "1\n"

    inside(body, SMALL)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.close(0); os.close(1); os.close(2)",
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import sys; sys.stdin = sys.stdout = sys.stderr = None",
        "import os; [os.open('/', 0) for _ in range(40)]; os.closerange(0, 3)",
        "import builtins; builtins.print = None",
        "import os\nif os.fork(): os.wait()",
        "import os; os.kill(-1, 9)",
    ],
)
def test_nothing_a_call_does_to_its_ends_reaches_the_next(inside, code):
    async def body(sandbox):
        await python(sandbox, "x = 1")
        await python(sandbox, code)
        after = await python(sandbox, "import sys; sys.stdout.write('out\\n'); x")
        assert (after.stdout, after.stderr, after.exit_code) == ("out\n1\n", "", 0)

    inside(body)


def test_a_flood_is_cut_and_the_next_call_begins_clean(inside):
    async def body(sandbox):
        flood = "import os\nfor _ in range(300): os.write(1, b'x' * 100_000)\nx = 1"
        result = await python(sandbox, flood)
        assert result.truncated
        assert "of 30000000 bytes left out" in result.stdout
        clean = await python(sandbox, "x")
        assert (clean.stdout, clean.truncated) == ("1\n", False)

    inside(body, SMALL)


LATE = """
import threading
n = 0
def late():
    global n
    while True:
        print("late")
        n += 1
threading.Thread(target=late, daemon=True).start()
"""


def test_a_thread_that_prints_for_ever_takes_nothing_but_output_from_later_calls(inside):
    """What a later call shows stands amid the flood, and may be cut from it."""

    async def body(sandbox):
        await python(sandbox, LATE)
        after = await python(sandbox, "end = n + 2000\nwhile n < end: pass\nraise SystemExit(7)")
        assert (after.exit_code, after.truncated) == (7, True)
        assert "late\n" in after.stdout

    inside(body, SMALL)


FORGED = """
import os
for number in range(3, 20):
    try: os.write(number, b"\\x07" * 5_000_000)
    except OSError: pass
x = 1
"""


def test_an_answer_that_is_forged_ends_its_own_call_alone(inside):
    async def body(sandbox):
        await python(sandbox, "x = 0")
        forged = await python(sandbox, FORGED, timeout_s=5.0)
        assert forged.exit_code == 7
        after = await python(sandbox, "x")
        assert (after.stdout, after.exit_code) == ("1\n", 0), after

    inside(body)


IN_ITS_PLACE = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1].replace("@", chr(0), 1))
listener.listen()
if os.fork(): os._exit(0)
while True:
    line, _ = listener.accept()
    _, files, _, _ = socket.recv_fds(line, 1, 3)
    {answer}
    for number in files: os.close(number)
    line.close()
"""


@pytest.mark.parametrize(
    ("answer", "exit_code", "told"),
    [
        ("line.send(bytes(3))", 0, ""),
        ("line.send(b'{}' * 10_000_000)", 123, ""),
        ("socket.send_fds(line, [b'x'], files * 30)", 120, ""),
        ("os.write(files[2], b'forged')", 1, f"forged{resident.DIED}\n"),
        ("os.write(files[1], b'x' * 30_000_000); line.send(b'1')", 49, ""),
        ("while True: os.write(files[1], b'x' * 100_000)", None, ""),
        ("while True: line.recv(1)", None, ""),
    ],
)
def test_whoever_takes_the_interpreters_place_can_only_answer(inside, answer, exit_code, told):
    """What it says is what a command of the sandbox said, within that command's limits."""

    async def body(sandbox):
        source, name = IN_ITS_PLACE.replace("{answer}", answer), resident.NAME.replace("\0", "@")
        taken = await sandbox.exec(("python3", "-c", source, name))
        assert taken.exit_code == 0, taken
        result = await python(sandbox, "1", timeout_s=0.5 if exit_code is None else 20.0)
        assert (result.exit_code, result.stderr) == (exit_code, told)
        assert result.timed_out == (exit_code is None)
        assert len(result.stdout) < 3_000
        await sandbox.exec(("sh", "-c", "kill -9 -1"))
        after = await python(sandbox, "1")
        assert (after.stdout, after.stderr) == ("1\n", f"{resident.NEW}\n")

    inside(body, SMALL)


def test_a_sandbox_full_of_processes_says_why_there_is_no_interpreter(inside):
    full = "for i in 1 2 3 4 5 6; do sleep 60 & done"

    async def body(sandbox):
        await sandbox.exec(("sh", "-c", full))
        result = await python(sandbox, "1")
        assert result.exit_code == 1
        assert "no interpreter could be started" in result.stderr
        await sandbox.exec(("sh", "-c", "kill -9 -1"))
        assert (await python(sandbox, "1")).stdout == "1\n"

    inside(body, Environment(max_processes=7))


# --- snapshots and forks ----------------------------------------------------------------------


def test_directory_and_variables_go_on_from_a_snapshot_and_what_does_not_is_said(sandboxes):
    async def body():
        async with sandboxes.lease(Environment()) as sandbox:
            before = await shell(sandbox, "mkdir here; cd here; export N=5; sleep 100 &")
            await python(sandbox, "x = 1")
            snapshot = await sandbox.snapshot()
            async with sandboxes.lease(Environment(), over=snapshot) as fork:
                forked = await shell(fork, "echo $N; pwd; ls /proc | grep -c ^[0-9]")
                remembered = await python(fork, "'x' in globals()")
            after = await shell(sandbox, "export N=6; pwd")
            again = await shell(sandbox, "echo $N")
            await snapshot.close()
        assert not before.memory_lost
        assert (forked.stdout, forked.memory_lost) == ("5\n/workspace/here\n4\n", True)
        assert (remembered.stdout, remembered.stderr) == ("False\n", f"{resident.NEW}\n")
        assert (after.stdout, after.memory_lost) == ("/workspace/here\n", True)
        assert (again.stdout, again.memory_lost) == ("6\n", False)

    asyncio.run(body())


def test_memory_is_lost_only_where_a_command_could_have_left_something(sandboxes):
    async def body():
        async with sandboxes.lease(Environment(setup=("sleep 100 &",))) as sandbox:
            assert not (await sandbox.exec(("true",))).memory_lost
            await sandbox.kill()
            assert (await sandbox.exec(("true",))).memory_lost
            assert (await sandbox.exec(("sleep", "9"), timeout_s=0.2)).timed_out
            assert (await sandbox.exec(("true",))).memory_lost

    asyncio.run(body())
