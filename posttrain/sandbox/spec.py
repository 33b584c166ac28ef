"""What a sandbox is made of, as values: workspace paths, the disk, and bubblewrap's arguments.

Pure: it decides who sees what and mounts nothing. The one thing that must stay true: every place a
command can write lies on the lease's one capped disk; everything else it sees is read-only, and
none of it is the host's home, project, sockets or secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.core.errors import UsageError
from posttrain.core.task import Environment

WORKSPACE = "/workspace"
ARTEFACTS = "/artefacts"
INSIDE_ID = 1000
"""User and group number a command sees itself under."""
UNPRIVILEGED_ID = 61_000
"""Host user and group a root parent drops to; systemd's UIDS-GIDS page lists it as unused."""
OLDEST_BUBBLEWRAP = (0, 11)
PATH = "/usr/local/bin:/usr/bin:/bin"
WRITABLE = ("work", "tmp", "shm")
"""Folders of a lease's disk, seen as /workspace, /tmp and /dev/shm."""

VARIABLES: Mapping[str, str] = {
    "PATH": PATH,
    "HOME": WORKSPACE,
    "PWD": WORKSPACE,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
}

MAX_TERMINALS = 32
COUNTERS: Mapping[str, int] = {
    "max_inotify_instances": 16,
    "max_inotify_watches": 4096,
    "max_fanotify_groups": 8,
    "max_fanotify_marks": 4096,
}
"""What a sandbox may have of what the kernel counts for each host user, who is the same for all
sandboxes: pseudo-terminals, and files of `/proc/sys/user` (namespaces(7)).
"""

MAX_CPU_S = 3_600
"""Of a process. No command's time limit: what a command leaves behind lives on, and threads use
several seconds of processors in one. The time of a whole tree is bounded by its group.
"""
MAX_QUEUED_SIGNALS = 512
"""Of a sandbox; the kernel bounds those of all of a host user's sandboxes together as well."""


def process_limits(environment: Environment) -> dict[str, int]:
    """Limits of every process of a command, by their names in `resource`. `RLIMIT_NPROC` counts
    within the sandbox's own user namespace, where its first process and the command's usher are
    as well.

    >>> process_limits(Environment(max_processes=7))["RLIMIT_NPROC"]
    9
    """
    return {
        "RLIMIT_AS": environment.memory_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": MAX_CPU_S,
        "RLIMIT_FSIZE": environment.disk_bytes,
        "RLIMIT_MEMLOCK": 64 << 10,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NOFILE": environment.max_open_files,
        "RLIMIT_NPROC": environment.max_processes + 2,
        "RLIMIT_SIGPENDING": MAX_QUEUED_SIGNALS,
    }


def etc_files(uid: int) -> Mapping[str, str]:
    """The whole of /etc, but for the loader's cache and the links of /etc/alternatives; commands
    see themselves under `uid`.
    """
    return {
        "passwd": f"agent:x:{uid}:{uid}:agent:{WORKSPACE}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": f"agent:x:{uid}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "hostname": "sandbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "resolv.conf": "",
    }


def workspace_parts(path: str) -> tuple[str, ...]:
    """Components of a path of the workspace, given relative to it or below `/workspace`.

    >>> workspace_parts("a//b/./c.txt"), workspace_parts("/workspace/x")
    (('a', 'b', 'c.txt'), ('x',))

    Raises:
        UsageError: it leaves the workspace, is empty, or cannot be a file name.
    """
    inside = path.removeprefix(WORKSPACE + "/")
    parts = tuple(part for part in inside.split("/") if part not in ("", "."))
    if inside.startswith("/") or ".." in parts or not parts or "\0" in path:
        raise UsageError(
            f"wanted the path of a file in the workspace, got {path!r}.",
            next_step=f"give a path relative to {WORKSPACE}, without '..'.",
        )
    return parts


def system_path(path: str) -> str:
    """An absolute path below a folder that every sandbox shows of the host, as it is written.

    Raises:
        UsageError: it is none.
    """
    parts = path.split("/")
    if len(parts) < 3 or parts[1] not in _SHOWN or not all(parts[1:]) or {".", ".."} & set(parts):
        raise UsageError(
            f"wanted a path below one of /{', /'.join(_SHOWN)}, got {path!r}.",
            next_step="give the absolute path of a program or folder of the system.",
        )
    return path


_SHOWN = ("usr", "bin", "sbin", "lib", "lib32", "lib64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """What commands of a lease must not change, and what they must not see."""

    read_only: Sequence[tuple[str, ...]] = ()
    hidden: Sequence[tuple[str, ...]] = ()
    """Of the workspace, as parts."""
    system: Sequence[str] = ()
    """Hidden absolute paths."""

    @staticmethod
    def of(environment: Environment) -> Guards:
        """Those that the environment wants.

        Raises:
            UsageError: a path is neither of the workspace nor of the system.
        """
        system = [path for path in environment.hidden if _is_system(path)]
        return Guards(
            read_only=[workspace_parts(path) for path in environment.read_only],
            hidden=[workspace_parts(path) for path in environment.hidden if path not in system],
            system=[system_path(path) for path in system],
        )


def _is_system(path: str) -> bool:
    return path.startswith("/") and not path.startswith(WORKSPACE + "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The one writable file system of a lease."""

    size_bytes: int
    inodes: int

    @staticmethod
    def of(environment: Environment) -> Disk:
        """One inode for each page, so that empty files are bounded too."""
        inodes = max(256, environment.disk_bytes // 4096)
        return Disk(size_bytes=environment.disk_bytes, inodes=inodes)

    @property
    def mount_options(self) -> str:
        """Options of the tmpfs."""
        return f"size={self.size_bytes},nr_inodes={self.inodes},mode=755"


_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")


def bubblewrap_arguments(
    *,
    disk: str,
    etc: str,
    empty: str,
    system: Mapping[str, str],
    artefacts: str | None = None,
    hidden: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Bubblewrap's options (bwrap(1)) for a sandbox, without descriptors and its program, from
    paths of the holder: a folder with the entries of `WRITABLE`, the /etc to show, and an empty
    folder to cover what must not be seen. `system` are the host's top-level folders and what they
    are links to ('': a folder), `hidden` absolute paths and what to show instead.

    `/proc/1` is covered: the first process runs as the commands' user, and its descriptors lead to
    the holder. `/` and `/dev` are bubblewrap's own tmpfs without a cap, hence read-only.
    """
    options = [f"--unshare-{name}" for name in _NAMESPACES]
    options += ["--disable-userns", "--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID)]
    options += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--as-pid-1"]
    options += ["--clearenv"]
    for folder, target in system.items():
        options += ["--symlink", target, folder] if target else ["--ro-bind", folder, folder]
    for path, instead in (hidden or {}).items():
        options += ["--ro-bind", instead, path]
    options += ["--ro-bind", etc, "/etc"]
    options += ["--proc", "/proc", "--ro-bind", empty, "/proc/1"]
    options += ["--dev", "/dev", "--bind", f"{disk}/shm", "/dev/shm"]
    options += ["--remount-ro", "/dev", "--bind", f"{disk}/tmp", "/tmp"]
    options += ["--bind", f"{disk}/work", WORKSPACE]
    if artefacts is not None:
        options += ["--ro-bind", artefacts, ARTEFACTS]
    options += ["--remount-ro", "/", "--chdir", WORKSPACE]
    return tuple(options)
