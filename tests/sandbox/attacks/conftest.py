import asyncio
import contextlib
import os
import pwd
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.containment import Bound
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from tests.sandbox.attacks.attack import Attack, Held
from tests.sandbox.attacks.places import Inside, Outside
from tests.sandbox.attacks.probe import LIBC
from tests.sandbox.conftest import (
    children,
    groups_of,
    host_mounts,
    processes_named,
    tree_below,
)

ROOT = Path(__file__).parents[3]
OF_EVERY_SANDBOX = {"/", "/proc", "/dev", "/dev/pts", "/dev/shm", "/usr", "/etc", "/tmp"}
LIMIT_S = 60.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every attack of a module's families is one test."""
    if "attack" in metafunc.fixturenames:
        metafunc.parametrize("attack", metafunc.module.FAMILY.attacks, ids=str)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What programs look for, all of it made for them, with the means to see that they found it."""
    word = f"host-{uuid.uuid4().hex}"
    folder = tmp_path_factory.mktemp("host")
    with contextlib.ExitStack() as stack:
        for path in (folder / "file", Path("/dev/shm", word)):
            path.write_text(word)
            stack.callback(path.unlink)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        resolver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        resolver.bind(("127.0.0.1", 0))
        resolver.setblocking(False)
        for address in ("\0" + word, str(folder / "s")):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("SANDBOX_TEST_SECRET", word + "-e")
        bystander = stack.enter_context(
            subprocess.Popen(["sh", "-c", f"read x # {word}"], stdin=subprocess.PIPE)
        )
        stack.callback(bystander.kill)
        segment = LIBC.shmget(0, 4096, 0o600 | 0o1000)
        LIBC.shmat(segment, None, 0)
        LIBC.shmctl(segment, 0, None)  # It goes with this process, however that ends.
        descriptor = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
        yield {
            "resolver": resolver, "descriptor": descriptor,
            "facts": {
                "word": word, "secret": word + "-e", "pid": bystander.pid, "segment": segment,
                "project": str(ROOT), "python": os.path.realpath(sys.executable),
                "home": pwd.getpwuid(os.getuid()).pw_dir, "file": str(folder / "file"),
                "shared": f"/dev/shm/{word}", "port": tcp.getsockname()[1], "abstract": word,
                "resolver": resolver.getsockname()[1], "socket": str(folder / "s"),
                "name": socket.gethostname(), "mounts": sorted(mounts - OF_EVERY_SANDBOX),
            },
        }  # fmt: skip


@pytest.fixture
def trial(sandboxes, machine, host, tmp_path):
    """Held inside, open outside, or the attack proves nothing."""

    async def met(attempt: Any, place: Any, *opening: Any) -> str:
        """What held an attack; empty where nothing did."""
        async with asyncio.timeout(LIMIT_S):
            try:
                await attempt(await place.open(*opening))
            except Held as held:
                return str(held) or "held"
            finally:
                await place.close()
        return ""

    def run(attack: Attack) -> None:
        if attack.tree and machine.capabilities.limits is not Bound.TREE:
            pytest.skip("no control groups here: limits hold a process each")
        facts = host["facts"], host["resolver"]
        place = Inside(*facts, source=sandboxes, environment=attack.environment)
        assert asyncio.run(met(attack.inside, place)), f"{attack.name} got through"
        if attack.root and os.getuid() != 0:
            pytest.skip("the control needs root")
        bare = Outside(*facts, folder=tmp_path / "bare", descriptor=host["descriptor"])
        held = asyncio.run(met(attack.outside, bare, attack.environment))
        if held and attack.optional:
            pytest.skip(f"no control here ({attack.optional}): {held}")
        assert not held, f"the control of {attack.name} does not get through: {held}"

    return run


# --- the host is unchanged --------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def unchanged(sandboxes, machine, host):
    """Files, settings, processes, mounts and groups of the host are the same after all attacks of a
    module, and the holder has no descriptor and little memory more.
    """
    asyncio.run(first_command(sandboxes))
    before, sizes = host_state(sandboxes, machine.uid), held_bytes()
    yield
    after = host_state(sandboxes, machine.uid)
    for what, seen in before.items():
        assert after[what] == seen, f"{what} of the host changed"
    until = time.monotonic() + 20
    while (grown := grown_since(sizes)) and time.monotonic() < until:
        pass  # The kernel frees disks and buffers in the background.
    assert not grown, "memory is held"


async def first_command(source: BubblewrapSandboxes) -> None:
    """Whatever comes with the first command is there before anything is compared."""
    async with source.lease(Environment()) as sandbox:
        await sandbox.exec(("true",))


SETTINGS = (
    "kernel/core_pattern", "kernel/hostname", "kernel/domainname", "kernel/modprobe",
    "kernel/panic", "kernel/pid_max", "kernel/sysrq", "kernel/threads-max", "vm/overcommit_memory",
    "net/ipv4/ip_forward", "user/max_user_namespaces", "user/max_inotify_instances",
)  # fmt: skip
FOLDERS = ("/", "/boot", "/dev", "/etc", "/usr", "/usr/bin", "/usr/lib", "/usr/local/bin")
MOST_GROWN_BYTES = 32 << 20
"""Of what may come with the caches of a module."""
OF_A_SET_UP = 3
"""Descriptors that a set-up takes that is kept; in control groups it has one of its own."""


def host_state(source: BubblewrapSandboxes, uid: int) -> dict[str, object]:
    """What attacks would change first."""
    state: dict[str, object] = {
        "mounts": host_mounts(),
        "processes": {pid for child in children() for pid in (child, *tree_below(child))},
        "groups": {group: groups_below(group) - source.prepared for group in groups_of(children())},
        "descriptors": {
            holder: len(os.listdir(f"/proc/{holder}/fd")) - OF_A_SET_UP * source.prepared
            for holder in holders()
        },
        "temporary files": temporary_files(uid),
        "segments": [
            line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
            if int(line.split()[7]) == uid
        ],
        "name": socket.gethostname(),
    }  # fmt: skip
    for name in SETTINGS:
        with contextlib.suppress(OSError):
            state[name] = Path("/proc/sys", name).read_text()
    for folder in FOLDERS:
        with contextlib.suppress(OSError):
            state[folder] = sorted(described(entry) for entry in os.scandir(folder))
    return state


def described(entry: "os.DirEntry[str]") -> tuple[object, ...]:
    """A file as it is; a folder without its times, which others may change as well."""
    status = entry.stat(follow_symlinks=False)
    whose = (entry.name, status.st_mode, status.st_uid, status.st_gid)
    if not entry.is_file(follow_symlinks=False):
        return whose
    return (*whose, status.st_size, status.st_mtime_ns)


def temporary_files(uid: int) -> list[str]:
    """Files of the user of the sandboxes, where nobody else is that user."""
    found = []
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        for entry in os.scandir(folder) if uid != os.getuid() else ():
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_uid == uid:
                    found.append(entry.path)
    return sorted(found)


def holders() -> list[int]:
    """Holders of sandboxes that this process has."""
    found = []
    for keeper in set(children()) & set(processes_named("posttrain.sandbox.keeper")):
        found += tree_below(keeper)[1:2]
    return found


def groups_below(group: str) -> int:
    return sum(entry.is_dir() for entry in os.scandir(group))


def grown_since(sizes: dict[str, int]) -> dict[str, int]:
    """Bytes that were not held before, where they are many."""
    grown = {what: size - sizes.get(what, 0) for what, size in held_bytes().items()}
    return {what: size for what, size in grown.items() if size > MOST_GROWN_BYTES}


def held_bytes() -> dict[str, int]:
    """Memory of holders and of their groups, sandboxes included; the kernel's copies of files on
    the machine's own disks are left out: who reads one first has it counted, and may leave it.
    """
    found = {}
    for holder in holders():
        for line in Path(f"/proc/{holder}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                found[f"holder {holder}"] = int(line.split()[1]) << 10
    for group in groups_of(children()):
        for name, cache, shared in (
            ("memory.usage_in_bytes", "total_cache", "total_shmem"),
            ("memory.current", "file", "shmem"),
        ):
            with contextlib.suppress(OSError):
                used, text = (
                    int(Path(group, name).read_text()),
                    Path(group, "memory.stat").read_text(),
                )
                stat = {key: int(value) for key, value in map(str.split, text.splitlines())}
                found[f"group {group}"] = used - stat[cache] + stat[shared]
    return found
