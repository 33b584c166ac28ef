"""The lasting half of a container sandbox: a capped volume, and the vault that keeps its files.

The volume is a tmpfs of the container program; it lives as long as a container uses it, which the
vault does. Commands are shown folders of it, never its root. The one thing that must stay true:
what was sealed never changes again, and a volume goes with its last user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping

from posttrain.core.containment import Sealed
from posttrain.core.errors import SandboxError, UsageError
from posttrain.sandbox import command_line, spec, vault
from posttrain.sandbox.cell import Client
from posttrain.sandbox.channel import Channel
from posttrain.sandbox.command_line import CallError, CommandLine, Container, Mount
from posttrain.sandbox.leases import Leases, LeaseState, SealedWorkspace

_PREFIX = "posttrain"
_OWN_BYTES = 128 << 20
_OWN_INODES = 5
"""The root of the volume, and what covers hidden paths."""
_SETUP_S = 120.0
"""A copy of a large disk is among it."""
_ORPHANED_S = 60.0
"""A volume that nobody uses is left alone so long: its vault may be on its way."""
_BUILD = "import sys; sys.path.append(sys.argv.pop()); from posttrain.sandbox import vault; "
_CAPABILITIES = ("SETUID", "SETGID", "DAC_OVERRIDE")
"""The first two are given up at once."""


class Store:
    """One disk. Make it with `make`, and let every `use` be followed by a `leave`."""

    def __init__(self, line: CommandLine, name: str, point: str, client: Client) -> None:
        self.name = name
        self.point = point
        """Where the program keeps it on the host, which we cannot look into."""
        self.line = line
        self._client = client
        self._users = 1

    @staticmethod
    async def make(line: CommandLine, disk: spec.Disk, *, over: Store | None = None) -> Store:
        """A new disk; `over` is copied into it.

        Raises:
            SandboxError: it could not be made, or is too small for the copy.
        """
        name = f"{_PREFIX}-{int(time.time())}-{os.urandom(6).hex()}"
        blocks = disk.size_bytes // os.sysconf("SC_PAGE_SIZE")
        inodes = disk.inodes + _OWN_INODES
        options = f"nr_blocks={blocks},nr_inodes={inodes},mode=777,nosuid,nodev"
        try:
            await line.call(
                "volume", "create", "--opt=type=tmpfs", "--opt=device=tmpfs", f"--opt=o={options}",
                name,
            )  # fmt: skip
            point = await line.call("volume", "inspect", "--format={{.Mountpoint}}", name)
        except CallError as error:
            raise SandboxError(f"a volume could not be made: {error}") from error
        client = Client(line.plain, _vault(line.plain, name, disk, over))
        store = Store(line, name, point, client)
        try:
            async with asyncio.timeout(_SETUP_S):
                greeting = await asyncio.wrap_future(client.channel.greeting)
            if "error" in greeting.head:
                raise SandboxError(f"a disk could not be laid out: {greeting.head['error']}")
        except (SandboxError, TimeoutError) as error:
            what = str(error) or f"a vault did not begin within {_SETUP_S:.0f} s"
            complaint = client.complaint
            await store.leave()
            raise SandboxError(f"{what} ({complaint})", "run 'posttrain doctor'.") from error
        except asyncio.CancelledError:
            await store.leave()
            raise
        return store

    @property
    def channel(self) -> Channel:
        """The line to the vault."""
        return self._client.channel

    def use(self) -> Store:
        """Another user."""
        self._users += 1
        return self

    async def leave(self) -> None:
        """One user less; with the last one it goes, even where whoever waits for that is cancelled.

        Raises:
            SandboxError: the vault would not end.
        """
        self._users -= 1
        if self._users == 0:
            self.channel.close()
            await asyncio.shield(self._go())

    async def _go(self) -> None:
        await self._client.end()
        self._client.close()
        with contextlib.suppress(CallError):  # `sweep` takes what is left
            await self.line.call("volume", "rm", self.name)

    # --- what commands see ------------------------------------------------------------------------

    def mounts(
        self, guards: spec.Guards, kinds: Mapping[tuple[str, ...], str]
    ) -> tuple[Mount, ...]:
        """The folders that commands write to, and what guards them. `kinds` tells what is at each
        path of the guards now, while nothing moves; what is not there needs none. The folders on
        the way are mounted on themselves, which keeps them at their place.
        """
        work, places = f"{self.point}/{spec.WRITABLE[0]}", (spec.WORKSPACE, "/tmp", "/dev/shm")
        found = [
            Mount(source=f"{self.point}/{part}", target=place, read_only=False)
            for part, place in zip(spec.WRITABLE, places, strict=True)
        ]
        shown = {path: f"{work}/{'/'.join(path)}" for path in guards.read_only if kinds[path]}
        shown |= {path: self._cover(kinds[path]) for path in guards.hidden if kinds[path]}
        ways = {path[:depth] for path in shown for depth in range(1, len(path))} - shown.keys()
        for path in sorted({*shown, *ways}):
            place = "/".join(path)
            source = shown.get(path, f"{work}/{place}")
            target = f"{spec.WORKSPACE}/{place}"
            found.append(Mount(source=source, target=target, read_only=path in shown))
        for hidden in guards.system:
            if os.path.exists(hidden):
                kind = "folder" if os.path.isdir(hidden) else "file"
                found.append(Mount(source=self._cover(kind), target=hidden))
        return tuple(found)

    def _cover(self, kind: str) -> str:
        return f"{self.point}/{vault.NOTHING}/{kind}"

    @property
    def artefacts(self) -> Mount:
        """The workspace as it is shown beside another one."""
        return Mount(source=f"{self.point}/{spec.WRITABLE[0]}", target=spec.ARTEFACTS)


def ensure_mountable(guards: spec.Guards) -> None:
    """Refuse what the command line has no way to write.

    Raises:
        UsageError: a guarded path has a comma, a quote or a line's end in it.
    """
    paths = ["/".join(path) for path in (*guards.read_only, *guards.hidden)]
    for path in (*paths, *guards.system):
        if set(path) & set(',"\n\r'):
            raise UsageError(
                f"wanted a guarded path that a container can be told of, got {path!r}.",
                "rename it, without a comma, a quote or a line's end.",
            )


def _vault(line: CommandLine, name: str, disk: spec.Disk, over: Store | None) -> Container:
    python, shown = command_line.interpreter()
    mounts = [Mount(source=name, target=vault.DISK, read_only=False), *shown]
    if over is not None:
        mounts.append(Mount(source=over.point, target=vault.OVER))
    code = command_line.CODE.rpartition("/")[0]
    return Container(
        name=f"{name}-vault", user=0, mounts=tuple(mounts), processes=1, cores=1.0,
        memory_bytes=disk.size_bytes + _OWN_BYTES, capabilities=_CAPABILITIES,
        argv=(python, "-I", "-S", "-B", "-c", f"{_BUILD}vault.main()", str(line.uid), code),
    )  # fmt: skip


class SealedStore(SealedWorkspace):
    """What an attempt left (`containment.Sealed`), kept by its vault."""

    def __init__(self, name: str, store: Store, leases: Leases) -> None:
        super().__init__(name, store.channel, leases)
        self.store = store

    async def seal(self) -> None:
        """Make it so. Nothing may run over its disk."""
        await self._ask("seal")
        self._leases.move(self.name, LeaseState.SEALED)

    async def close(self) -> None:
        """As the port says."""
        if self._leases.state(self.name) is not LeaseState.CLOSED:
            self._leases.move(self.name, LeaseState.CLOSED)
            await self.store.leave()


def store_of(sealed: Sealed | None, line: CommandLine) -> Store | None:
    """The disk of a workspace that this source sealed.

    Raises:
        UsageError: it is of another source.
    """
    if sealed is None:
        return None
    if not isinstance(sealed, SealedStore) or sealed.store.line is not line:
        raise UsageError(f"wanted a workspace sealed by this source, got {sealed!r}.")
    return sealed.store


async def sweep(line: CommandLine) -> None:
    """Remove volumes that callers left which were killed."""
    with contextlib.suppress(CallError):
        found = await line.call("volume", "ls", "--quiet", "--filter=dangling=true")
        for name in found.split():
            prefix, _, rest = name.partition("-")
            made = rest.partition("-")[0]
            if prefix == _PREFIX and made.isdigit() and time.time() - int(made) > _ORPHANED_S:
                with contextlib.suppress(CallError):
                    await line.call("volume", "rm", name)
