"""Thousands of leases with attacks and crashes leave nothing behind and nothing growing.

In a first part the processes that make sandboxes are killed now and then; in the second they live
on, and what they and this process hold is followed. Between rounds of visits nobody has a sandbox,
and everything that can be counted is counted. POSTTRAIN_SOAK_LEASES says how many leases (20,000
by default), POSTTRAIN_SOAK_SEED makes the same visits again.
"""

import asyncio
import ctypes
import gc
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.cgroups import cgroup_places
from posttrain.sandbox.pooled import PooledSandboxes
from tests.sandbox.conftest import children, groups_of, host_mounts, processes_named, tree_below
from tests.sandbox.visits import KINDS, REACHING, SETUPS, Scene

WORKERS = 6
ROUND = 250
"""Visits between two counts."""
KILLED_SHARE = 0.3
"""Of the leases, those of the part in which what makes sandboxes is killed."""
KILLS = 1 / 120
"""Kills a visit."""
LATE_S = 5.0
"""So long after a kill its loss may be met."""
GROWTH_BYTES_EACH, GROWTH_BYTES = 200, 2 << 20
"""What memory may grow by, for each lease and in all, before it is called a leak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What there is while nobody has a sandbox."""

    descriptors: int
    threads: int
    tasks: int
    processes: int
    """Below this one; the sandboxes' processes are among them."""
    holder_descriptors: int
    holder_mounts: int
    holder_leases: int
    groups: int
    """Control groups of leases."""
    prepared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The processes that make sandboxes (`keeper`)."""

    keeper: int
    porter: int
    holder: int

    @staticmethod
    def now() -> "Family | None":
        """None while there is none, or not all of it yet."""
        for keeper in children():
            below = tree_below(keeper)
            if len(below) >= 2:
                return Family(keeper=keeper, porter=below[0], holder=below[1])
        return None


class Soak:
    """The soak's state: sources of sandboxes, and what was seen so far."""

    def __init__(self, *, seed: int, marker: str, say) -> None:
        self.seed = seed
        self.say = say
        self.marker = marker
        self.visits = self.kills = self.leases = 0
        self.killed_s = float("-inf")
        self.faults: list[str] = []
        self.makers: set[int] = set()
        """Numbers of all keepers."""
        self.seen: set[tuple[int, int]] = set()
        """Processes below this one, ever: number and time of start."""
        self.memory: list[tuple[int, float, float]] = []
        """Leases, and bytes of this process and of the holder."""

    async def run(self, leases: int) -> None:
        async with BubblewrapSandboxes() as source:
            while self.leases < leases * KILLED_SHARE:
                await self.round(source, kills=KILLS)
                await self.count(source)
            warm = None
            while self.leases < leases or len(self.memory) < 8:
                await self.round(source)
                found = await self.count(source)
                warm = warm or found
                if found != warm:
                    self.faults.append(f"after {self.leases} leases {found}, warm {warm}")
                await self.weigh()
            source.check()

    async def round(self, source: BubblewrapSandboxes, *, kills: float = 0.0) -> None:
        """Visits from several tasks at once; afterwards nobody has a sandbox."""
        async with PooledSandboxes(source, RealClock()) as pool:
            scene = Scene(source=source, pool=pool, marker=self.marker)
            left = iter(range(ROUND))
            await asyncio.gather(*(self._work(scene, left, kills) for _ in range(WORKERS)))
            pool.check()
        assert pool.stats().alive == 0, pool.stats()
        self.leases += scene.leases

    async def _work(self, scene: Scene, left, kills: float) -> None:
        for _ in left:
            self.visits += 1
            number = self.visits
            chance = random.Random(f"{self.seed} {number}")
            visit = chance.choices(list(KINDS), list(KINDS.values()))[0]
            before, began_s = self.kills, time.monotonic()
            if chance.random() < kills:
                self._kill(chance)
            try:
                async with asyncio.timeout(120):
                    await visit(scene, chance)
            except (SandboxError, AssertionError, OSError, TimeoutError) as error:
                killed = self.kills > before or began_s < self.killed_s + LATE_S
                excused = isinstance(error, SandboxError) and killed
                if not excused:
                    self.faults.append(f"visit {number}, {visit.__name__}: {error!r}")
            except Exception as error:
                self.faults.append(f"visit {number}, {visit.__name__}: {error!r}")

    def _kill(self, chance: random.Random) -> None:
        family = Family.now()
        if family is not None:
            self._look(family)
            self.kills, self.killed_s = self.kills + 1, time.monotonic()
            makers = [pid for pid in tree_below(family.holder) if _name(pid).startswith("python")]
            victims = (family.keeper, family.porter, family.holder, *makers[:1])
            os.kill(chance.choice(victims), signal.SIGKILL)

    # --- counting ---------------------------------------------------------------------------------

    def _look(self, family: Family) -> None:
        """Remember the processes there are, to ask for them in the end."""
        self.makers.add(family.keeper)
        found = {(pid, _started(pid)) for pid in (family.keeper, *tree_below(family.keeper))}
        self.seen |= {(pid, started) for pid, started in found if started}  # else it ended just now

    async def count(self, source: BubblewrapSandboxes) -> Count:
        """Everything that can be counted, once each kept set-up was asked for."""
        for environment in (*SETUPS, REACHING):
            async with source.lease(environment) as sandbox:
                await sandbox.exec(("true",))
        async with source.lease(Environment()) as sandbox:
            frame = await sandbox.channel.request({"op": "stats"})
        gc.collect()
        family = Family.now()
        assert family is not None, "there was a sandbox"
        self._look(family)
        stats = source.stats()
        if (stats.open, stats.lost, stats.sealed) != (0, 0, source.prepared):
            self.faults.append(f"{source.prepared} are kept and {stats}")
        found = Count(
            descriptors=_descriptors(os.getpid()),
            threads=len(os.listdir("/proc/self/task")),
            tasks=len(asyncio.all_tasks()),
            processes=len(tree_below(os.getpid())),
            holder_descriptors=_descriptors(family.holder),
            holder_mounts=len(Path(f"/proc/{family.holder}/mountinfo").read_text().splitlines()),
            holder_leases=frame.head["leases"] - 1,
            groups=_groups(family.keeper),
            prepared=source.prepared,
        )
        assert processes_named(self.marker) == [], "a command outlived its sandbox"
        return found

    async def weigh(self) -> None:
        family = Family.now()
        assert family is not None, "there is a holder"
        ctypes.CDLL(None).malloc_trim(0)
        mine, holder = _memory_bytes(os.getpid()), _memory_bytes(family.holder)
        self.memory.append((self.leases, mine, holder))
        self.say(
            f"{self.leases} leases, {self.kills} kills: {mine / 2**20:.1f} and "
            f"{holder / 2**20:.1f} MiB, {_machine()}"
        )

    def left(self) -> list[str]:
        """Processes and groups of ours that are there after the end."""
        groups = groups_of(self.makers)
        alive = [f"{pid} {_name(pid)}" for pid, started in self.seen if _started(pid) == started]
        return [*sorted(groups), *alive, *(str(pid) for pid in children())]


def growth_bytes(memory: list[tuple[int, float]]) -> tuple[float, float]:
    """What a straight line through (leases, bytes) grows by over its range, the first quarter not
    counted, and what it may grow by.
    """
    rest = memory[len(memory) // 4 :]
    leases, sizes = [lease for lease, _ in rest], [size for _, size in rest]
    span = leases[-1] - leases[0]
    slope = statistics.linear_regression(leases, sizes).slope
    return slope * span, GROWTH_BYTES + GROWTH_BYTES_EACH * span


@pytest.mark.soak
def test_thousands_of_hostile_leases_leave_nothing(machine, marker, tmp_path, monkeypatch, capsys):
    leases = int(os.environ.get("POSTTRAIN_SOAK_LEASES", "20000"))
    seed = int(os.environ.get("POSTTRAIN_SOAK_SEED", time.time_ns() % 10**9))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    say(f"\nsoak of {leases} leases, POSTTRAIN_SOAK_SEED={seed}")
    soak = Soak(seed=seed, marker=marker, say=say)
    mounts, descriptors = host_mounts(), _descriptors(os.getpid())
    asyncio.run(soak.run(leases))
    asyncio.run(_start_and_end())  # removes the groups of makers that were killed
    gc.collect()
    assert not soak.faults, "\n".join(soak.faults)
    assert soak.left() == []
    assert processes_named(marker) == []
    assert host_mounts() == mounts
    assert os.listdir(tmp_path) == []
    assert _descriptors(os.getpid()) <= descriptors
    for who, column in (("this process", 1), ("the holder", 2)):
        grown, allowed = growth_bytes([(row[0], row[column]) for row in soak.memory])
        say(f"{who} grew by {grown / 2**20:.2f} MiB, allowed are {allowed / 2**20:.2f}")
        assert grown < allowed, soak.memory


def test_a_leak_is_told_from_noise():
    steps = [(1000 * n, 5e7 + (n % 3) * 2e5) for n in range(16)]
    grown, allowed = growth_bytes(steps)
    assert grown < allowed
    grown, allowed = growth_bytes([(leases, size + 500 * leases) for leases, size in steps])
    assert grown > allowed


async def _start_and_end() -> None:
    async with BubblewrapSandboxes() as source:
        await source.abilities()


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _memory_bytes(pid: int) -> int:
    """Memory of one process that is in no file (proc(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def _started(pid: int) -> int:
    """When a process began (proc(5)); 0 where there is none or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _groups(keeper: int) -> int:
    """Groups below a keeper's, of all controllers together."""
    own, mounts = (Path(f"/proc/self/{file}").read_text() for file in ("cgroup", "mountinfo"))
    found = 0
    for place in cgroup_places(own, mounts):
        for folder in place.below(f"posttrain-{keeper}").folders:
            if os.path.isdir(folder):
                found += sum(entry.is_dir() for entry in os.scandir(folder))
    return found


def _machine() -> str:
    """Of the whole machine, others on it included: what the kernel keeps."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    shown = {name: int(lines[name].split()[0]) // 1024 for name in ("Shmem", "SUnreclaim")}
    return ", ".join(f"{name} {size} MiB" for name, size in shown.items())
