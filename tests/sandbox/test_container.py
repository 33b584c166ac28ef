"""How containers are asked for, what a choice falls on, and what is left when a caller dies."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.core.errors import IsolationError, UsageError
from posttrain.core.task import Environment, Isolation
from posttrain.sandbox import command_line, drivers, seccomp, spec, store, vault
from posttrain.sandbox.command_line import CommandLine, Container, Mount
from posttrain.sandbox.spec import process_limits
from tests.sandbox.conftest import all_end, processes_named, tree_below
from tests.sandbox.drivers import REAL
from tests.sandbox.test_lifecycle import ROOT

PODMAN = CommandLine(program="/bin/podman", podman=True, version="5", root="/r", maps=True)
DOCKER = CommandLine(program="/bin/docker", podman=False, version="28", root="i", private=False)
GVISOR = CommandLine(program="/bin/podman", podman=True, version="5", runtime="runsc", maps=True)
LINES = {"podman": PODMAN, "docker": DOCKER, "gvisor": GVISOR}
HARDENED = {
    "--rm", "--network=none", "--read-only", "--pull=never", "--cap-drop=ALL", "--interactive",
    "--security-opt=no-new-privileges", "--log-driver=none", "--memory=100663296",
    "--memory-swap=100663296", "--cpus=0.5", "--ulimit=nofile=1024:1024", "--ulimit=core=0:0",
}  # fmt: skip


def asked(line, **fields):
    mounts = (Mount(source="/m/work", target="/workspace", read_only=False),)
    given = {"name": "c", "user": 65534, "mounts": mounts, "argv": ("cat",), **fields}
    return line.run(Container(memory_bytes=96 << 20, processes=12, cores=0.5, **given))


@pytest.mark.parametrize("name", LINES)
def test_every_container_is_hardened(name):
    line = LINES[name]
    words = asked(line)
    assert set(words) >= HARDENED
    assert words[-1] == "cat"
    text = " ".join(words)
    for never in ("privileged=", "--privileged", "--cap-add", "docker.sock", "--pid=", "=host"):
        assert never not in text.replace("no-new-privileges", "")
    assert "--user=65534:65534" in words
    mounts = [word for word in words if word.startswith("--mount=")]
    assert [mount for mount in mounts if not mount.endswith(",ro")] == [
        "--mount=type=bind,src=/m/work,dst=/workspace"
    ]
    assert ("--pids-limit=28" in words) == (name != "gvisor")
    mapped = "--uidmap=1000:61000:1" in words
    assert mapped == (name == "podman")
    assert line.uid == (1000 if name == "podman" else 61000)


def test_a_profile_and_capabilities_are_given_where_they_are_asked_for():
    line = CommandLine(program="/d", podman=False, version="1", profile="/p.json", runtime="runc")
    words = asked(line, capabilities=("DAC_OVERRIDE",))
    assert {"--security-opt=seccomp=/p.json", "--runtime=runc", "--cap-add=DAC_OVERRIDE"} <= set(
        words
    )


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("podman", set()), ("docker", {"nproc"}), ("gvisor", {"msgqueue", "sigpending"})],
)
def test_a_command_has_its_limits_and_a_clean_environment_and_is_never_root(name, left_out):
    limits = process_limits(Environment())
    line = LINES[name]
    words = line.exec("c", ("--x", "y"), opening="word", limits=limits, variables={})
    at = words.index("/usr/bin/prlimit")
    *bounds, separator, first, second = words[at + 1 :]
    assert (separator, first, second) == ("--", "--x", "y")
    names = {key.removeprefix("RLIMIT_").lower() for key in limits}
    assert {bound[2:].partition("=")[0] for bound in bounds} == names - left_out
    shown = words[words.index("-i") + 1 : at]
    assert shown == [f"{key}={value}" for key, value in spec.VARIABLES.items()]
    assert f"--user={line.uid}:{line.uid}" in words
    assert line.uid != 0


# --- choosing ---------------------------------------------------------------------------------


def program(folder, name, body):
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$0 $@" >> {folder}/called\n{body}\n')
    path.chmod(0o755)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Programs of this test's own are all there are, and keep a record of their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(
        command_line.shutil, "which", lambda name: str(p) if (p := folder / name).exists() else None
    )
    tmp_path.chmod(0o755)
    return folder


def find(folder):
    return asyncio.run(command_line.find(str(folder)))


def test_why_each_program_does_not_work_is_said_with_the_next_step(installed, tmp_path):
    program(installed, "podman", "[ $1 = --version ] && echo podman version 4.3 || "
            "{ echo Error: no cgroups >&2; exit 125; }")  # fmt: skip
    with pytest.raises(IsolationError) as raised:
        find(tmp_path)
    for words in ("docker: is not installed", "podman with its own runtime: Error: no cgroups"):
        assert words in raised.value.message
    assert "posttrain doctor" in raised.value.next_step


def test_gvisor_is_chosen_where_it_works_and_the_next_runtime_where_it_does_not(
    installed, tmp_path
):
    works = '[ $1 = --version ] && echo podman version 5.0; case "$*" in *{}*) exit 125;; esac'
    program(installed, "runsc", "")
    program(installed, "runc", "")
    for broken, runtime, uid in (("nothing", "runsc", 61000), ("runsc", "", 1000)):
        program(installed, "podman", works.format(broken))
        (tmp_path / f"for-{uid}").mkdir()
        line = find(tmp_path / f"for-{uid}")
        assert (line.runtime, line.is_gvisor, line.uid) == (runtime, runtime == "runsc", uid)
    called = (installed / "called").read_text()
    assert "pull=never" in called
    assert " pull " not in called, "an image was fetched"


def test_dockers_root_is_made_here_once_and_a_rootless_one_counts_processes_apart(
    installed, tmp_path
):
    program(installed, "docker", """case "$1" in
        --version) echo Docker version 28;;
        info) echo '["name=seccomp","name=rootless"]';;
        version) echo 28.0;;
        image) exit 1;;
        esac""")  # fmt: skip
    line = find(tmp_path)
    assert (line.podman, line.private, line.version) == (False, True, "28.0")
    assert line.root.startswith("posttrain-sandbox:")
    assert f"import {tmp_path}" in (installed / "called").read_text()


def test_auto_takes_what_works_and_a_named_driver_is_never_replaced(monkeypatch):
    closed = []

    class Fake:
        def __init__(self, name, *, works):
            self.name, self.works = name, works

        async def abilities(self):
            if not self.works:
                raise IsolationError(f"{self.name} cannot work here.")

        async def close(self):
            closed.append(self.name)

    def choose(asked, **works):
        made = {n: lambda tell, n=n, w=w: Fake(n, works=w) for n, w in works.items()}
        monkeypatch.setattr(drivers, "DRIVERS", made)
        return asyncio.run(drivers.choose(asked)).name

    assert choose("auto", bubblewrap=True, container=True) == "bubblewrap"
    assert closed == []
    assert choose("auto", bubblewrap=False, container=True) == "container"
    assert choose("container", bubblewrap=True, container=False) == "container"
    assert choose("auto", bubblewrap=False, container=False) == "bubblewrap"
    assert closed == ["bubblewrap", "bubblewrap", "container"]


# --- disks ------------------------------------------------------------------------------------


def test_links_of_a_sealed_disk_lead_nowhere_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(vault, "DISK", str(tmp_path))
    for part in spec.WRITABLE:
        (tmp_path / part / "deep").mkdir(parents=True)
    targets = {"work/deep/a": "/etc/passwd", "work/b": "deep/c", "tmp/c": "../x", "work/d": "n" * 9}
    for place, target in targets.items():
        (tmp_path / place).symlink_to(target)
    (tmp_path / "work/long").symlink_to("x" * 4090)
    vault._turn_links(away=True)
    for place, target in targets.items():
        assert os.readlink(tmp_path / place) == f"/not-followed/{target}"
    assert not os.path.lexists(tmp_path / "work/long")
    vault._turn_links(away=False)
    assert {place: os.readlink(tmp_path / place) for place in targets} == targets


def test_guards_are_mounted_with_the_folders_on_the_way_and_only_where_something_is():
    disk = store.Store(PODMAN, "v", "/m", None)
    guards = spec.Guards(
        read_only=[("d", "e", "kept"), ("gone",)], hidden=[("d", "key"), ("s",)],
        system=["/usr/bin/env", "/usr/no-such-thing"],
    )  # fmt: skip
    kinds = {("d", "e", "kept"): "file", ("gone",): "", ("d", "key"): "file", ("s",): "folder"}
    found = {m.target: (m.source, m.read_only) for m in disk.mounts(guards, kinds)}
    assert found == {
        "/workspace": ("/m/work", False), "/tmp": ("/m/tmp", False),
        "/dev/shm": ("/m/shm", False), "/workspace/d": ("/m/work/d", False),
        "/workspace/d/e": ("/m/work/d/e", False),
        "/workspace/d/e/kept": ("/m/work/d/e/kept", True),
        "/workspace/d/key": ("/m/empty/file", True), "/workspace/s": ("/m/empty/folder", True),
        "/usr/bin/env": ("/m/empty/file", True),
    }  # fmt: skip


@pytest.mark.parametrize("path", ["a,ro", 'a"b', "a\nb"])
def test_a_guard_that_a_command_line_would_misread_is_refused(path):
    with pytest.raises(UsageError, match="comma"):
        store.ensure_mountable(spec.Guards.of(Environment(read_only=(path,))))


def test_volumes_of_dead_callers_are_removed_and_no_others(installed, monkeypatch):
    monkeypatch.setattr(store.time, "time", lambda: 1000.0)
    names = "posttrain-900-aa posttrain-990-bb other posttrain-x posttrain"
    program(installed, "podman", f'[ "$3 $4" = "volume ls" ] && printf "%s\\n" {names}; true')
    line = CommandLine(program=str(installed / "podman"), podman=True, version="5")
    asyncio.run(store.sweep(line))
    called = (installed / "called").read_text()
    assert [text.split()[-1] for text in called.splitlines() if " rm " in text] == [
        "posttrain-900-aa"
    ]


# --- the profile ------------------------------------------------------------------------------


def verdict(profile, name, *arguments):
    """What libseccomp does: the first rule all of whose comparisons hold; 64-bit values."""
    tests = {
        "SCMP_CMP_EQ": lambda value, rule: value == rule["value"],
        "SCMP_CMP_GT": lambda value, rule: value > rule["value"],
        "SCMP_CMP_MASKED_EQ": lambda value, rule: value & rule["value"] == rule["valueTwo"],
    }
    for rule in profile["syscalls"]:
        if name in rule["names"] and all(
            tests[one["op"]](arguments[one["index"]], one) for one in rule["args"]
        ):
            return rule["errnoRet"]
    return 0


@pytest.mark.parametrize("machine", list(seccomp.MACHINES))
def test_the_profile_denies_what_the_filter_denies(machine):
    profile = seccomp.profile(machine)
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    assert profile["architectures"] == [f"SCMP_ARCH_{machine.upper()}"]
    for name in seccomp.MACHINES[machine].denied:
        assert verdict(profile, name) == errno.EPERM
    assert verdict(profile, "clone3") == errno.ENOSYS
    assert verdict(profile, "read") == 0
    assert verdict(profile, "clone", 0x01200011) == 0
    for bit in range(32):
        wanted = errno.EPERM if seccomp.NEW_NAMESPACES >> bit & 1 else 0
        assert verdict(profile, "clone", 1 << bit | 17) == (wanted if bit not in (0, 4) else 0)
    for family in (*range(46), 1 << 32 | 40):
        wanted = 0 if family in seccomp.SOCKET_FAMILIES else errno.EAFNOSUPPORT
        assert verdict(profile, "socket", family) == wanted
        assert verdict(profile, "socketpair", family) == wanted
    for high in (0, 1 << 32):
        assert verdict(profile, "ioctl", 0, high | 0x5412) == errno.EPERM
        assert verdict(profile, "ioctl", 0, high | 0x5401) == 0


def test_no_profile_is_made_for_an_unknown_architecture():
    assert seccomp.profile("vax") is None


# --- a caller that dies -----------------------------------------------------------------------

LEASE_AND_WAIT = """
import asyncio, sys
from posttrain.core.task import Environment
from tests.sandbox.drivers import REAL
async def main():
    async with REAL[sys.argv[2]]() as source, source.lease(Environment()) as sandbox:
        await sandbox.exec(("sh", "-c", "setsid sleep 100 & : > up; sleep 100; : " + sys.argv[1]),
                           timeout_s=90)
asyncio.run(main())
"""


@pytest.fixture(params=["podman", "docker"])
def working(request):
    async def tried():
        async with REAL[request.param]() as source:
            return (await source.abilities()).capabilities

    try:
        assert asyncio.run(tried()).isolation is Isolation.CONTAINER
    except IsolationError as error:
        pytest.skip(str(error))
    return request.param


def test_a_killed_caller_leaves_no_process_and_its_volume_is_swept(working, marker, monkeypatch):
    parent = subprocess.Popen(
        [sys.executable, "-c", LEASE_AND_WAIT, marker, working],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": ROOT},
    )  # fmt: skip
    try:
        while not (inside := [p for p in processes_named(marker) if is_inside(p)]):
            assert parent.poll() is None
        clients = tree_below(parent.pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert all_end([*inside, *clients], within_s=20)
    assert processes_named(marker) == []

    async def swept():
        async with REAL[working]() as source:
            await source.abilities()
            line = source._found[0]
            while "posttrain-" in await line.call("volume", "ls", "--quiet"):
                await store.sweep(line)  # The end of a container may be on its way.

    monkeypatch.setattr(store, "_ORPHANED_S", 0.0)
    asyncio.run(swept())


def is_inside(pid: int) -> bool:
    """Whether a process is in another process namespace than this one."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def test_a_closed_source_leaves_no_folder_and_no_descriptor(working):
    async def body():
        source = REAL[working]()
        async with source.lease(Environment()) as sandbox:
            assert await sandbox.read("x", max_bytes=1) is None
        folder = Path(source._folder.name)
        assert folder.exists()
        for _ in range(2):
            await source.close()
            assert not folder.exists()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(body())
    assert len(os.listdir("/proc/self/fd")) == before


def test_input_that_a_command_leaves_unread_loses_none_of_its_output(working):
    """Three of a hundred such commands lost theirs, the opening included: podman's client ends at
    the first piece of input that it cannot hand on.
    """

    async def body():
        async with REAL[working]() as source, source.lease(Environment()) as sandbox:
            for _ in range(12):
                result = await sandbox.exec(
                    ("sh", "-c", "echo said; echo also >&2; kill -SEGV $$"), stdin=b"x" * 3_000_000
                )
                told = result.exit_code, result.stdout, result.stderr
                assert told == (128 + signal.SIGSEGV, "said\n", "also\n")
            result = await sandbox.exec(("sh", "-c", "head -c 5; exit 3"), stdin=b"y" * 3_000_000)
            assert (result.exit_code, result.stdout) == (3, "yyyyy")

    asyncio.run(body())
