"""What a sandbox of the soak goes through: one function a kind, most of them hostile.

Each leases through a scene, does its worst and leaves. The one thing that must stay true: whatever
a visit does, it ends; what it finds wrong is an AssertionError, and nothing else of it is an error
unless the machine's part of the sandboxes was killed meanwhile.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from posttrain.core.containment import ExecResult, Sandbox, Sealed
from posttrain.core.task import Environment, Network
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.pooled import PooledSandboxes

SMALL = Environment(memory_bytes=64 << 20, disk_bytes=2 << 20, max_processes=12)
SETUPS = tuple(Environment(setup=(f"echo {number} > made",)) for number in range(4))
REACHING = Environment(network=Network(allow=("a.example.org:443",)))
SEND_TO_ITSELF = """
import array, os, socket
one, other = socket.socketpair()
sent = array.array("i", [one.fileno(), other.fileno(), os.open("held", os.O_CREAT)])
for _ in range(20): one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
"""


@dataclass(slots=True, kw_only=True)
class Scene:
    """Where visits lease from."""

    source: BubblewrapSandboxes
    pool: PooledSandboxes
    marker: str
    leases: int = 0

    def lease(
        self, chance: random.Random, environment: Environment | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """From the pool mostly, else from its source."""
        self.leases += 1
        place = self.pool if chance.random() < 0.7 else self.source
        return place.lease(environment or Environment())

    def over(self, sealed: Sealed) -> AbstractAsyncContextManager[Sandbox]:
        self.leases += 1
        return self.source.lease(Environment(), over=sealed)

    def beside(self, sealed: Sealed) -> AbstractAsyncContextManager[Sandbox]:
        self.leases += 1
        return self.pool.lease(Environment(), beside=sealed)

    async def shell(self, sandbox: Sandbox, script: str, **given) -> ExecResult:
        """A script, whose processes can be told from others'."""
        return await sandbox.exec(("sh", "-c", f"{script}\n# {self.marker}"), **given)

    async def is_usable(self, sandbox: Sandbox) -> None:
        assert (await self.shell(sandbox, "echo fine")).stdout == "fine\n"


Visit = Callable[[Scene, random.Random], Awaitable[None]]


async def plain(scene: Scene, chance: random.Random) -> None:
    environment = Environment(files={"a/b.txt": "laid\n"})
    async with scene.lease(chance, environment) as sandbox:
        await sandbox.write("c.txt", b"written\n")
        result = await scene.shell(sandbox, "cat a/b.txt c.txt | tee d.txt")
        assert result.stdout == "laid\nwritten\n", result
        assert await sandbox.read("d.txt", max_bytes=100) == b"laid\nwritten\n"


async def fork_bomb(scene: Scene, chance: random.Random) -> None:
    async with scene.lease(chance, SMALL) as sandbox:
        script = "bomb() { bomb | bomb & }; bomb; sleep 1000"
        result = await scene.shell(sandbox, script, timeout_s=0.2)
        # Where it finds no room to sleep, it ends before its time and its bomb takes all the room.
        if chance.random() < 0.5 and result.timed_out:
            await scene.is_usable(sandbox)


async def disk_bomb(scene: Scene, chance: random.Random) -> None:
    async with scene.lease(chance, SMALL) as sandbox:
        script = chance.choice((
            "head -c 4000000 /dev/zero > /tmp/a; head -c 4000000 /dev/zero > b",
            "i=0; while : > n$i; do i=$((i+1)); done; exit 0",
        ))  # fmt: skip
        result = await scene.shell(sandbox, script)
        assert result.disk_full, result
        await scene.is_usable(sandbox)


async def memory_bomb(scene: Scene, chance: random.Random) -> None:
    async with scene.lease(chance, SMALL) as sandbox:
        script = chance.choice(("tail /dev/zero", "for i in 1 2 3; do tail /dev/zero & done; wait"))
        await scene.shell(sandbox, script, timeout_s=5)
        await scene.is_usable(sandbox)


async def survivors(scene: Scene, chance: random.Random) -> None:
    async with scene.lease(chance) as sandbox:
        script = (
            f"echo x > held; setsid sleep 1000 < held & cd /tmp; setsid sh -c \"trap '' TERM HUP; "
            f'while :; do sleep 1000; done # {scene.marker}" & echo up'
        )
        assert (await scene.shell(sandbox, script)).stdout == "up\n"


async def kills_everything(scene: Scene, chance: random.Random) -> None:
    async with scene.lease(chance) as sandbox:
        await scene.shell(sandbox, "kill -9 1; kill -9 -1; sleep 1000", timeout_s=0.1)
        await scene.is_usable(sandbox)


async def ends_late(scene: Scene, chance: random.Random) -> None:
    async with scene.lease(chance) as sandbox:
        for _ in range(chance.randint(1, 2)):
            assert (await scene.shell(sandbox, "sleep 1000 & sleep 1000", timeout_s=0.02)).timed_out


async def cancelled(scene: Scene, chance: random.Random) -> None:
    """At any moment of a lease's life, its making and its end included."""
    visit = chance.choice((plain, survivors, snapshots, sealed, prepared, reaching))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(chance.random() * 0.06):
            await visit(scene, chance)


async def cancelled_command(scene: Scene, chance: random.Random) -> None:
    async with scene.lease(chance) as sandbox:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.random() * 0.02):
                await scene.shell(sandbox, "setsid sleep 1000 & sleep 1000")
        await scene.is_usable(sandbox)


async def snapshots(scene: Scene, chance: random.Random) -> None:
    """Forks and the sandbox itself go on, for as long as they want."""

    async def go_on(sandbox: Sandbox) -> None:
        assert (await scene.shell(sandbox, "cat kept; echo more >> kept")).stdout == "first\n"

    async with scene.lease(chance) as sandbox:
        await scene.shell(sandbox, "sleep 1000 & echo first > kept")
        async with _closing(await sandbox.snapshot()) as snapshot, contextlib.AsyncExitStack() as s:
            forks = [
                await s.enter_async_context(scene.over(snapshot))
                for _ in range(chance.randint(1, 3))
            ]
            if chance.random() < 0.5:
                await snapshot.close()
            await asyncio.gather(*map(go_on, (sandbox, *forks)))


async def sealed(scene: Scene, chance: random.Random) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with scene.lease(chance) as sandbox:  # it may be cancelled while it ends, too
            await scene.shell(sandbox, "sleep 1000 & mkfifo pipe; echo left > file")
            left = await stack.enter_async_context(_closing(await sandbox.seal()))
        checker = await stack.enter_async_context(scene.beside(left))
        if chance.random() < 0.5:
            await left.close()
        assert (await scene.shell(checker, "cat /artefacts/file")).stdout == "left\n"


async def frozen(scene: Scene, chance: random.Random) -> None:
    async with scene.lease(chance, SMALL) as sandbox:
        running = asyncio.ensure_future(scene.shell(sandbox, "while :; do :; done", timeout_s=0.1))
        try:
            await sandbox.freeze()
            if chance.random() < 0.5:
                await sandbox.thaw()
                assert (await running).timed_out
        finally:
            running.cancel()
            await asyncio.wait((running,))


async def floods(scene: Scene, chance: random.Random) -> None:
    heard = []
    async with scene.lease(chance) as sandbox:
        result = await scene.shell(
            sandbox, "yes | head -c 1000000", listen=lambda name, data: heard.append(data)
        )
        assert result.truncated


async def prepared(scene: Scene, chance: random.Random) -> None:
    number = chance.randrange(len(SETUPS))
    async with scene.lease(chance, SETUPS[number]) as sandbox:
        assert (await scene.shell(sandbox, "cat made")).stdout == f"{number}\n"


async def reaching(scene: Scene, chance: random.Random) -> None:
    """A proxy in its namespaces, and another one in the next."""
    async with scene.lease(chance, REACHING) as sandbox:
        await scene.is_usable(sandbox)
        if chance.random() < 0.5:
            await scene.shell(sandbox, "sleep 1000", timeout_s=0.02)
            await scene.is_usable(sandbox)


async def sends_descriptors(scene: Scene, chance: random.Random) -> None:
    """Sockets on their way to themselves keep files open until the kernel looks for such."""
    async with scene.lease(chance) as sandbox:
        await sandbox.exec(("python3", "-c", SEND_TO_ITSELF))
        if chance.random() < 0.5:
            await (await sandbox.seal()).close()


async def raises(scene: Scene, chance: random.Random) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with scene.lease(chance):
            raise ZeroDivisionError


KINDS: dict[Visit, int] = {
    plain: 30, survivors: 8, kills_everything: 6, ends_late: 8, cancelled: 16, snapshots: 6,
    cancelled_command: 8, sealed: 6, frozen: 4, floods: 3, prepared: 6, reaching: 4,
    sends_descriptors: 2, raises: 4, fork_bomb: 2, disk_bomb: 5, memory_bomb: 3,
}  # fmt: skip
"""How often each is made, of all of their sum."""


@contextlib.asynccontextmanager
async def _closing(workspace: Sealed) -> AsyncIterator[Sealed]:
    try:
        yield workspace
    finally:
        await workspace.close()
