"""Attempts in real sandboxes: sessions, what the policy reads of an end, whose doing an end was.

What an attempt does to its sandbox is an observation, and the attempt is judged by what it left;
only what the machine did makes it `infra_failed`, which is tried again and never paid.
"""

import asyncio
import json
import os
import select
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.containment import Bound
from posttrain.core.task import Environment, Limits, Network, Tool
from posttrain.core.verdict import Outcome, StopReason
from posttrain.rollout.group import Groups, Retries
from posttrain.rollout.toolloop import ToolExecutor
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.drivers import probe
from tests.rollout.doubles import Sayings, renderer, request, tool_task, verdict

SMALL = Environment(
    memory_bytes=96 << 20, disk_bytes=8 << 20, max_processes=24, exec_timeout_s=1.5
)  # fmt: skip


@pytest.fixture(scope="module")
def machine():
    found = asyncio.run(probe("bubblewrap"))
    if found.abilities is None:
        pytest.skip(f"no sandbox works here: {found.problem}")
    return found.abilities


@pytest.fixture(scope="module")
def sandboxes(machine):
    source = BubblewrapSandboxes()
    yield source
    asyncio.run(source.close())


def tool(kind, argument):
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
    return Tool(name=kind, description="", parameters=parameters, kind=kind)


SESSIONS = (tool("shell_session", "command"), tool("python_session", "code"))


def call(name, **arguments):
    return f"call: {json.dumps({'name': name, 'arguments': arguments})}"


def shell(command):
    return f"```sh\n{command}\n```"


class Left:
    """Pays for a file `answer` that holds 42."""

    async def verify(self, trajectory, sealed):
        return verdict(float(await sealed.read("answer", max_bytes=9) == b"42\n"))


def attempt(sandboxes, *sayings, environment=SMALL, retries=3, before=lambda: None, **changes):
    """The trajectory of an attempt that says these, and how often it was tried again."""
    clock = RealClock()
    policy = Sayings(*sayings, by=renderer(), before=before)
    executors = {"tools": ToolExecutor(policy, renderer(), clock, sandboxes)}
    groups = Groups(executors, Left(), clock, retries=Retries(attempts=retries, pause_s=0.0))
    task = tool_task(
        environment=environment, limits=Limits(max_turns=12, max_tokens=6000, max_turn_tokens=900,
                                               max_context_tokens=16_000),
        **changes,
    )  # fmt: skip
    trajectory = asyncio.run(groups.attempt(request(task)))
    groups.check()
    return trajectory, groups.stats().retries


# --- sessions ---------------------------------------------------------------------------------


def test_an_attempt_keeps_its_directory_variables_and_interpreter_from_turn_to_turn(sandboxes):
    trajectory, _ = attempt(
        sandboxes,
        call("shell_session", command="mkdir w && cd w && export N=6"),
        call("python_session", code="def times(n):\n    return 7 * n\nx = times(6)"),
        call("shell_session", command="pwd; echo $N > six") + "\n"
        + call("python_session", code="print(open('w/six').read().strip())\nx"),
        call("python_session", code="1 / 0"),
        call("shell_session", command="echo 'open"),
        call("python_session", code="while True: pass"),
        call("shell_session", command="pwd"),
        call("python_session", code="x"),
        call("shell_session", command="echo $((N * 7)) > ../answer"),
        "Done.",
        tools=SESSIONS,
    )  # fmt: skip
    assert (trajectory.stop, trajectory.outcome) == (StopReason.FINISHED, Outcome.SCORED)
    assert trajectory.reward == 1.0
    seen = [turn.observations for turn in trajectory.turns]
    assert seen[0] == ("[no output]",)
    assert seen[1] == ("[new interpreter: it holds nothing of earlier calls]",)
    assert seen[2] == ("/workspace/w", "6\n42")
    assert seen[3][0].endswith("ZeroDivisionError: division by zero\n[exit 1]")
    assert "unexpected EOF" in seen[4][0]
    assert seen[5] == ("[timed out]",)
    assert seen[6] == ("[processes of earlier calls have ended; files are kept]\n/workspace/w",)
    assert seen[7][0].startswith("[new interpreter: it holds nothing of earlier calls]\nTraceback")
    assert seen[7][0].endswith("NameError: name 'x' is not defined\n[exit 1]")


# --- whose doing ------------------------------------------------------------------------------

HUNGRY = "python3 -c 'x = b\"x\" * (60 << 20); import time; time.sleep(30)'"
DEEP = (
    "python3 -c \"import os\nfor i in range(1500): os.mkdir('d' * 200); os.chdir('d' * 200)\"; "
    'find . -delete; cd /workspace; python3 -c "import os\n'
    "for i in range(1500): os.mkdir('d' * 200); os.chdir('d' * 200)\""
)
MARKED = (
    "python3 -c \"import os; os.mkdir('m'); os.setxattr('m', 'user.overlay.opaque', b'y'); "
    "os.setxattr('.', 'user.overlay.redirect', b'/')\"; mkfifo pipe; chmod 000 . m"
)
OWN_DOING = {
    "time": ("sleep 60", "[timed out]"),
    "standing still": ("kill -STOP $$", "[timed out]"),
    "disk": ("cat /dev/zero > a; cat /dev/zero > b; echo $?", "disk full]"),
    "files": ("i=0; while : > n$i; do i=$((i+1)); done 2> /dev/null", "disk full]"),
    "processes": ("for i in $(seq 40); do sleep 60 & done; wait", "fork"),
    "itself": ("kill -9 $$", "[exit 137]"),
    "its first process": ("kill -9 1; kill -TERM 1; echo $?", ""),
    "its parent": ("kill -9 $PPID; kill -9 0", "[exit 137]"),
    "everything": ("kill -9 -1; kill -9 $$", "[exit 137]"),
    "the words of a failed machine": (
        "echo 'bwrap: Creating new namespace failed' >&2; kill -9 -1; kill -9 $$", "[exit 137]",
    ),
    "an exit code of the machine": ("exit 126", "[exit 126]"),
    "no ends": ("exec <&- >&- 2>&-; exit 125", "[exit 125]"),
    "no workspace": ("chmod 000 . /tmp /dev/shm; rm -rf /workspace /tmp /dev/shm", "[exit 1]"),
    "depth": (DEEP, ""),
    "marks of layers": (MARKED, ""),
    "output": ("head -c 20000000 /dev/zero; head -c 20000000 /dev/zero >&2", "left out"),
}  # fmt: skip


@pytest.mark.parametrize(("line", "told"), OWN_DOING.values(), ids=OWN_DOING)
def test_what_an_attempt_does_to_its_sandbox_is_told_judged_and_never_tried_again(
    sandboxes, line, told
):
    trajectory, retries = attempt(sandboxes, shell(line), shell("true"), "Done.")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 0.0), trajectory.error
    assert (trajectory.tries, retries) == (1, 0)
    assert told in trajectory.turns[0].observations[0], trajectory.turns[0].observations
    assert len(trajectory.turns) == 3


def test_an_attempt_that_shuts_the_workspace_where_a_proxy_is_served_fakes_no_failed_machine(
    sandboxes,
):
    """The proxy's door was opened in new namespaces before the workspace was."""
    environment = replace(SMALL, network=Network(allow=("a.example.org:443",)))
    shut = shell("chmod 000 . /tmp /dev/shm; sleep 60")
    trajectory, retries = attempt(
        sandboxes, shut, shell("echo 42 > answer"), "Done.", environment=environment
    )
    assert trajectory.turns[0].observations == ("[timed out]",)
    assert (trajectory.outcome, trajectory.reward, retries) == (Outcome.SCORED, 1.0, 0)


def test_memory_that_an_attempt_uses_up_is_told_and_the_attempt_goes_on(sandboxes, machine):
    if machine.capabilities.limits is not Bound.TREE:
        pytest.skip("no control groups can be made here")
    trajectory, retries = attempt(
        sandboxes, shell(f"{HUNGRY} & {HUNGRY} & wait -n; exit 9"), shell("kill -9 -1"),
        shell("echo 42 > answer"), "Done.",
        environment=Environment(memory_bytes=96 << 20),
    )  # fmt: skip
    assert trajectory.turns[0].observations[0].endswith("[exit 9, out of memory]")
    assert trajectory.turns[1].observations == ("[no output]",)
    assert (trajectory.outcome, trajectory.reward, retries) == (Outcome.SCORED, 1.0, 0)


def test_a_disk_larger_than_the_memory_does_not_let_an_attempt_shut_itself_out(sandboxes):
    """Its files are its memory: full of them, every later command dies as it starts."""
    fill = "for i in 1 2 3 4 5 6; do head -c 8000000 /dev/zero > f$i; done"
    trajectory, retries = attempt(
        sandboxes, shell("echo 42 > answer"), shell(fill), shell("true"), "Done.",
        environment=Environment(memory_bytes=24 << 20, disk_bytes=64 << 20),
    )  # fmt: skip
    assert (trajectory.outcome, trajectory.reward, retries) == (Outcome.SCORED, 1.0, 0)


def kill_holder():
    """End the holder of this process's sandboxes, as a machine that is short of memory would."""
    own = Path("/proc/self/task")
    keepers = [int(pid) for t in own.iterdir() for pid in (t / "children").read_text().split()]
    for keeper in keepers:
        if b"posttrain.sandbox.keeper" in Path(f"/proc/{keeper}/cmdline").read_bytes():
            (porter,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
            (holder,) = Path(f"/proc/{porter}/task/{porter}/children").read_text().split()
            end = os.pidfd_open(int(holder))
            os.kill(int(porter), signal.SIGKILL)
            assert select.select([end], [], [], 20)[0], "the holder lives on"
            os.close(end)


def lose_at(turn):
    """A hook that loses the machine before a turn."""
    turns = iter(range(turn + 1))
    return lambda: kill_holder() if next(turns, None) == turn else None


def test_a_lost_machine_is_nobodys_failure_and_the_attempt_is_made_again(machine):
    async def close(source):
        await source.close()

    lost = BubblewrapSandboxes()
    once, retries = attempt(
        lost, shell("echo 42 > answer"), shell("true"), "Done.", retries=1, before=lose_at(1)
    )
    assert (once.outcome, once.reward, retries) == (Outcome.INFRA_FAILED, None, 0)
    assert once.stop is StopReason.ABORTED
    assert "is gone" in str(once.error)
    again, retries = attempt(
        lost, shell("true"), shell("true"), shell("echo 42 > answer"), "Done.", before=lose_at(1)
    )
    assert (again.outcome, again.reward, again.tries, retries) == (Outcome.SCORED, 1.0, 2, 1)
    asyncio.run(close(lost))
