"""Where code of others runs: the protocols of sandboxes and killable workers, and what they tell.

Values and protocols only. The one thing that must stay true: what a command did is a value; only a
sandbox that was lost is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from posttrain.core.errors import IsolationError
from posttrain.core.task import Entry, Environment, Isolation, Json, Network


class Bound(StrEnum):
    """What the limits of memory and processes hold."""

    TREE = "tree"
    """A sandbox as a whole."""
    PROCESS = "process"
    """Memory: each process alone."""
    NOTHING = "nothing"
    """There are no processes, in tests."""


class Reach(StrEnum):
    """How much of the outside may be reached."""

    NOTHING = "nothing"
    LISTED = "listed"
    PUBLIC = "public"

    @staticmethod
    def of(network: Network) -> Reach:
        """What a task's network allows."""
        if network.open:
            return Reach.PUBLIC
        return Reach.LISTED if network.allow else Reach.NOTHING


class Snapshots(StrEnum):
    """What a snapshot and a sandbox over it cost."""

    LAYERS = "layers"
    """Nothing: all share what was sealed."""
    COPIES = "copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the sandboxes of a source are and can do on this machine."""

    isolation: Isolation
    limits: Bound
    snapshots: Snapshots
    reach: frozenset[Reach]
    """What of the outside it can let commands reach."""
    cores: bool
    """Whether the processor time of a sandbox as a whole is limited; elsewhere it is not."""
    freezes: bool
    """Whether processes can be stopped where they are."""

    def ensure(self, environment: Environment, *, driver: str) -> None:
        """Refuse what cannot be honoured.

        Raises:
            IsolationError: a higher level, or more of the network, than this has.
        """
        if environment.isolation.rank > self.isolation.rank:
            raise IsolationError(
                f"the task requires isolation '{environment.isolation}', {driver} gives "
                f"'{self.isolation}'.",
                "run 'posttrain doctor' to see which drivers work here; sandbox.driver chooses.",
            )
        reach = Reach.of(environment.network)
        if reach not in self.reach:
            raise IsolationError(
                f"the task may reach '{reach}' of the network, {driver} can "
                f"give '{', '.join(sorted(self.reach))}'.",
                'set sandbox.driver = "bubblewrap", or take the network from the task.',
            )


class Cause(StrEnum):
    """What ended a command. All but a lost sandbox, which is an error, are its own doing."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    """The kernel killed some process of the sandbox meanwhile for what the whole of it used."""
    KILLED = "killed"
    """From outside: the caller went away or closed the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a sandbox uses now; None where this machine cannot tell."""

    memory_bytes: int | None
    processes: int | None
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command in a sandbox did."""

    exit_code: int | None
    """None: it was killed from outside, at its time limit for one. As in a shell, 128 + n: signal n
    ended it; 127: it was not found; 126: it could not be started.
    """
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    """Output passed the cap; head and tail were kept."""
    out_of_memory: bool = False
    disk_full: bool = False
    """No block or no file was left on the sandbox's disk at the end."""
    memory_lost: bool = False
    """Processes of earlier commands, and what they held in memory, were gone when it began: a time
    limit, `kill` or a snapshot ended them.
    """
    duration_s: float = 0.0
    """Active seconds: frozen ones are not counted."""

    @property
    def cause(self) -> Cause:
        """What ended it."""
        if self.timed_out:
            return Cause.TIMED_OUT
        if self.exit_code is None:
            return Cause.KILLED
        if self.out_of_memory:
            return Cause.OUT_OF_MEMORY
        return Cause.SIGNALLED if self.exit_code > SIGNALLED_FROM else Cause.EXITED


SIGNALLED_FROM = 128
"""Exit codes above are this and the number of the signal, as shells have it."""


class Sealed(Protocol):
    """The file system an attempt left: processes ended, read-only, outliving the sandbox."""

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """Bytes of a regular file of the workspace, at most `max_bytes`; None where there is no
        such regular file. Links are never followed, in any component of the path.
        """
        ...

    async def entries(self, *, max_entries: int) -> tuple[Entry, ...]:
        """Everything in the workspace but its root, in no order, at most `max_entries`. Links are
        listed and never followed.
        """
        ...

    async def close(self) -> None:
        """Let the layer go; idempotent."""
        ...


class Sandbox(Protocol):
    """A leased sandbox. Its workspace is the working directory of every command."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        listen: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """Run a command to its end or its time limit. Processes that it leaves behind run on until
        the sandbox ends; one that meets its time limit takes all of the sandbox's processes along,
        `setsid` children included, and files alone remain. `listen` is told `stdout` or `stderr`
        and what came, while it comes, up to the cap of the output.

        Raises:
            SandboxError: the sandbox itself was lost (never for what the command did).
            UsageError: there is no command or no time.
        """
        ...

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """As `Sealed.read`."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the workspace, making its folders.

        Raises:
            OSError: the disk is full or something is in the way (the policy's doing).
            UsageError: the path leaves the workspace.
        """
        ...

    async def seal(self) -> Sealed:
        """End every process and make the workspace read-only; the sandbox is closed thereby."""
        ...

    async def snapshot(self) -> Sealed:
        """End every process and seal what there is; the sandbox goes on over it. Others can begin
        there too: `Sandboxes.lease` with `over`. Files come along; processes, and what they held
        in memory, do not, which the next command's result says.
        """
        ...

    async def freeze(self) -> None:
        """Stop every process where it is; time limits stand still. Commands wait for `thaw`.

        Raises:
            UsageError: this source cannot (`Capabilities.freezes`).
        """
        ...

    async def thaw(self) -> None:
        """Let them go on."""
        ...

    async def usage(self) -> Usage:
        """What it uses now."""
        ...

    async def kill(self) -> None:
        """End every process, as a time limit does; files remain and commands can follow."""
        ...

    async def close(self) -> None:
        """Kill everything and let it go; idempotent, shielded from cancellation."""
        ...


class Sandboxes(Protocol):
    """A source of sandboxes."""

    async def capabilities(self) -> Capabilities:
        """What every sandbox of this source has.

        Raises:
            IsolationError: this machine cannot contain anything.
        """
        ...

    def lease(
        self,
        environment: Environment,
        *,
        beside: Sealed | None = None,
        over: Sealed | None = None,
        ahead: Sequence[str] = (),
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox with the environment's files laid and its set-up run, or one that goes on
        from the sealed files of another (`over`), which has both behind it; with `beside`, a sealed
        workspace mounted read-only at `/artefacts` (never as its root).

        `ahead` is the command that will be the first `exec`: a source may start it beforehand, and
        it waits for its input then, which comes, as its time begins, with that call. Nobody may
        tell the difference but by the clock.

        Raises:
            IsolationError: `Capabilities.ensure`. SandboxError: it could not be made.
        """
        ...


class Workers(Protocol):
    """Killable processes that run *our* code on untrusted or unreliable input (generators,
    scorers, mathematics). `function` is `module:name`; arguments and result are JSON values.
    """

    async def call(self, function: str, *arguments: Json, timeout_s: float) -> Json:
        """The function's result.

        Raises:
            WorkerError: it raised, died, ran out of time or answered with no JSON value.
        """
        ...
