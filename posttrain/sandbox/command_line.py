"""The command line of docker or podman: which one works here, and every flag of a container.

No image is pulled: the root is ours and almost empty (`rootfs`), and the host's /usr is shown in it
read-only. The one thing that must stay true: a container starts without capabilities (a vault has
three), new privileges, network, a writable root, or the user 0 for what a policy runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from posttrain.core.errors import IsolationError
from posttrain.sandbox import rootfs, seccomp, spec, vault


class Choice(NamedTuple):
    """A program, and the runtime that it is to use; empty: its own."""

    program: str
    runtime: str = ""


GVISOR = "runsc"
CHOICES = (
    Choice("podman", GVISOR),
    Choice("docker", GVISOR),
    Choice("podman"),
    Choice("podman", "runc"),
    Choice("docker"),
)
"""What is tried: gVisor first, and podman, which has user namespaces, before docker."""
WAITER_ID = 65_534
"""User of the process that a cell waits with: commands can neither signal nor look into it."""
PYTHON, CODE = "/python", "/code/posttrain"
"""Where a vault sees the interpreter and this package; both read-only."""
_NEEDED = ("/usr/bin/env", "/usr/bin/prlimit", "/usr/bin/cat")
_CALL_S = 60.0
_PAGE_BYTES = 4096
_SPARE_PROCESSES = 16
"""Threads of the runtime on its way into a container, and the waiter."""
_SPARE_THREADS = 1024
"""Of gVisor's kernel, which limits what runs inside itself."""
_FOREIGN_TO_GVISOR = ("RLIMIT_MSGQUEUE", "RLIMIT_SIGPENDING")
_POINTS = ("workspace", "artefacts", vault.DISK[1:], vault.OVER[1:], PYTHON[1:], CODE[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder or file of the host, or (without a slash) a volume."""

    source: str
    target: str
    read_only: bool = True

    @property
    def text(self) -> str:
        """As `--mount` wants it."""
        kind = "bind" if self.source.startswith("/") else "volume"
        return f"type={kind},src={self.source},dst={self.target}" + ",ro" * self.read_only


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What a container is made of."""

    name: str
    user: int
    mounts: tuple[Mount, ...]
    memory_bytes: int
    processes: int
    cores: float
    argv: tuple[str, ...]
    open_files: int = 1024
    capabilities: tuple[str, ...] = ()
    folder: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """One program with one runtime, and the root of its containers."""

    program: str
    podman: bool
    version: str
    runtime: str = ""
    """Empty: the program's default."""
    root: str = ""
    """A folder (podman) or an image (docker)."""
    profile: str = ""
    """File of the seccomp profile; empty: the program's own."""
    maps: bool = False
    """Whether we say how users are mapped: root's podman, which maps none otherwise."""
    private: bool = True
    """Whether a container has a user namespace, so that its processes are counted apart."""
    freezes: bool = False
    folder: str = ""
    """Where the program is started: podman's monitors leave a file there of a container that ran
    out of memory.
    """

    @property
    def is_gvisor(self) -> bool:
        """Whether a kernel in user space answers what runs inside."""
        return self.runtime == GVISOR

    @property
    def plain(self) -> CommandLine:
        """What vaults run under, which is code of ours and needs no other kernel."""
        runtime = "runc" if shutil.which("runc") else ""
        return replace(self, runtime=runtime) if self.is_gvisor else self

    @property
    def uid(self) -> int:
        """Number that commands have inside. Without a user namespace they have it outside too."""
        private = self.podman and not self.is_gvisor
        return spec.INSIDE_ID if private else spec.UNPRIVILEGED_ID

    def words(self, *arguments: str) -> list[str]:
        """A call of the program."""
        options = ["--log-level=error", "--events-backend=none"] if self.podman else []
        if self.podman and self.runtime:
            options.append(f"--runtime={self.runtime}")
        if self.podman and self.is_gvisor:
            options.append("--runtime-flag=network=none")
        there = ["/usr/bin/env", f"--chdir={self.folder}"] if self.folder else []
        return [*there, self.program, *options, *arguments]

    def run(self, container: Container) -> list[str]:
        """Start a container that ends with the caller's end of its standard input."""
        spare = _SPARE_THREADS if self.is_gvisor else _SPARE_PROCESSES
        limit = str(whole_pages(container.memory_bytes))
        words = [
            "run", "--rm", "--interactive", f"--name={container.name}", "--network=none",
            "--hostname=sandbox", "--read-only", "--pull=never", "--cap-drop=ALL",
            *(f"--cap-add={name}" for name in container.capabilities),
            "--security-opt=no-new-privileges", "--log-driver=none", f"--memory={limit}",
            f"--memory-swap={limit}", f"--cpus={possible(container.cores)}",
            f"--pids-limit={container.processes + spare}",
            f"--ulimit=nofile={container.open_files}:{container.open_files}", "--ulimit=core=0:0",
            f"--ulimit=nproc={_MOST_PROCESSES}:{_MOST_PROCESSES}",
            f"--user={container.user}:{container.user}", f"--workdir={container.folder}",
        ]  # fmt: skip
        if self.profile:
            words.append(f"--security-opt=seccomp={self.profile}")
        if self.podman:
            words += ["--read-only-tmpfs=false", "--http-proxy=false", "--no-hosts"]
        elif self.runtime:
            words.append(f"--runtime={self.runtime}")
        if self.maps and not self.is_gvisor:
            for number, inside in enumerate((self.uid, 0, WAITER_ID)):
                mapped = f"{inside}:{spec.UNPRIVILEGED_ID + number}:1"
                words += [f"--uidmap={mapped}", f"--gidmap={mapped}"]
        for mount in (*_system(), *container.mounts):
            words.append(f"--mount={mount.text}")
        words += ["--rootfs", self.root] if self.podman else [self.root]
        return self.words(*words, *container.argv)

    def exec(
        self,
        name: str,
        argv: Sequence[str],
        *,
        opening: str,
        limits: Mapping[str, int],
        variables: Mapping[str, str],
        drains: bool = False,
    ) -> list[str]:
        """Run a command in a container that runs. It says `opening` when it gets there, and has
        these limits and variables and no others. With `drains` a shell beside it reads what the
        command leaves of its input.
        """
        user = f"--user={self.uid}:{self.uid}"
        program = _OPEN_AND_DRAIN if drains else _OPEN
        told = ["/bin/sh", "-c", program, "sh", opening, "/usr/bin/env", "-i"]
        shown = {**spec.VARIABLES, **variables}
        told += [f"{key}={value}" for key, value in shown.items()]
        bounds = [
            f"--{key.removeprefix('RLIMIT_').lower()}={value + (drains and key == _PROCESSES)}"
            for key, value in limits.items()
            if (self.private or key != _PROCESSES)
            and not (self.is_gvisor and key in _FOREIGN_TO_GVISOR)
        ]
        where = f"--workdir={spec.WORKSPACE}"
        return self.words(
            "exec", "--interactive", user, where, name, *told, "/usr/bin/prlimit", *bounds, "--",
            *argv,
        )  # fmt: skip

    async def call(self, *arguments: str) -> str:
        """What the program says.

        Raises:
            CallError: it failed, or did not end in time.
        """
        return await call(self.words(*arguments))


_OPEN = 'printf %s "$1"; shift; exec "$@"'
_OPEN_AND_DRAIN = (
    'printf %s "$1"; shift; exec 3>&2 2> /dev/null; (exec "$@" 2>&3 3>&-); code=$?; '
    "trap 'exit $code' EXIT; cat > /dev/null"
)
"""Where input is left over, podman's client may end without having read the output. (The trap holds
the code also where there is no room to start `cat`.)
"""
_PROCESSES = "RLIMIT_NPROC"
_MOST_PROCESSES = 4096


def whole_pages(size_bytes: int) -> int:
    """What the kernel makes of a limit."""
    return size_bytes // _PAGE_BYTES * _PAGE_BYTES


def possible(cores: float) -> float:
    """As many as there are: docker takes no larger number, and none below a hundredth."""
    return max(0.01, min(cores, float(os.cpu_count() or 1)))


def _system() -> list[Mount]:
    folders = [name for name, target in rootfs.system_folders().items() if not target]
    return [Mount(source=name, target=name) for name in folders]


def interpreter() -> tuple[str, tuple[Mount, ...]]:
    """Our interpreter as a vault finds it, and what must be shown there for it."""
    path, prefix = os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
    code = Mount(source=str(Path(__file__).parents[1]), target=CODE)
    if path.startswith("/usr/"):
        return path, (code,)
    return PYTHON + path.removeprefix(prefix), (code, Mount(source=prefix, target=PYTHON))


class CallError(OSError):
    """A call of the program failed; the text is its own."""


async def call(words: Sequence[str]) -> str:
    """Output of a program.

    Raises:
        CallError: it failed, or did not end in time.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(_CALL_S):
            out, error = await process.communicate()
    except TimeoutError:
        raise CallError(f"{words[0]} did not answer within {_CALL_S:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode != 0:
        text = error.decode("utf-8", "replace").strip().replace("\n", " ")
        raise CallError(text[-400:] or f"{words[0]} gave {process.returncode}")
    return out.decode("utf-8", "replace").strip()


# --- choosing ---------------------------------------------------------------------------------


async def find(folder: str, choices: Sequence[Choice] = CHOICES) -> CommandLine:
    """The first choice that starts a container here. `folder` is ours to write to, and others can
    look into it.

    Raises:
        IsolationError: none does; it says why each does not.
    """
    if missing := [path for path in _NEEDED if not os.access(path, os.X_OK)]:
        raise IsolationError(f"Containers need {', '.join(missing)} of the system.", _ADVICE)
    reasons, bare = dict[str, str](), dict[str, CommandLine]()
    for program in dict.fromkeys(choice.program for choice in choices):
        path = shutil.which(program)
        try:
            if path is None:
                reasons[program] = "is not installed"
            else:
                bare[program] = await _bare(path)
        except OSError as error:
            reasons[program] = str(error)
    for number, (program, runtime) in enumerate(choices):
        if program in bare and not (runtime and shutil.which(runtime) is None):
            line = replace(bare[program], runtime=runtime)
            try:
                line = await _furnished(line, Path(folder, str(number)))
                for each in dict.fromkeys((line, line.plain)):
                    await call(each.run(_trial(each)))
                return line
            except OSError as error:
                reasons[f"{program} with {runtime or 'its own runtime'}"] = str(error)
    told = "; ".join(f"{what}: {reason}" for what, reason in reasons.items())
    raise IsolationError(f"No container can be started: {told}.", _ADVICE)


_ADVICE = (
    "install podman with runc, or docker, as the system's package; any user may use podman who has "
    "lines in /etc/subuid and /etc/subgid. Then: posttrain doctor."
)


def _trial(line: CommandLine) -> Container:
    name = f"posttrain-trial-{os.urandom(8).hex()}"
    look = ("/bin/sh", "-c", "ls -la / /usr/bin/env > /dev/null")  # Old gVisors fail here.
    return Container(
        name=name, user=line.uid, mounts=(), memory_bytes=64 << 20, processes=8, cores=1.0,
        argv=look,
    )  # fmt: skip


async def _bare(program: str) -> CommandLine:
    """What kind of program it is, without a root yet."""
    version = await call([program, "--version"])
    if "podman" in version.lower():
        line = CommandLine(program=program, podman=True, version=version.split()[-1])
        return replace(line, maps=os.getuid() == 0)
    text = await call([program, "info", "--format={{json .SecurityOptions}}"])
    version = await call([program, "version", "--format={{.Server.Version}}"])
    options = json.loads(text or "[]") or []
    private = any("name=userns" in option or "name=rootless" in option for option in options)
    return CommandLine(program=program, podman=False, version=version, private=private)


async def _furnished(line: CommandLine, folder: Path) -> CommandLine:
    """The same with a root and a seccomp profile. An image is known by its content: one of a few
    kilobytes stays in docker's store.
    """
    root, profile, text = folder / "root", "", seccomp.profile(platform.machine())
    line = replace(line, folder=str(folder))
    rootfs.build(str(root), line.uid, points=_POINTS)
    os.chmod(f"{root}{vault.DISK}", 0o777)  # A volume takes this from what it is mounted on.
    if text is not None:
        profile = str(folder / "seccomp.json")
        Path(profile).write_text(json.dumps(text))
    if line.podman:
        return replace(line, root=str(root), profile=profile)
    archive = folder / "root.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(root, arcname=".", filter=_plain)
    image = f"posttrain-sandbox:{hashlib.sha256(archive.read_bytes()).hexdigest()[:16]}"
    try:
        await line.call("image", "inspect", "--format={{.Id}}", image)
    except CallError:
        await line.call("import", str(archive), image)
    return replace(line, root=image, profile=profile)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """An entry that tells of nothing but its content."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry
