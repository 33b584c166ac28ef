"""What the sandbox bench measures beside our sandboxes, in the same run.

Bare bubblewrap is the same binary with the same flags, as the same user, once a command. Container
runtimes show /usr of this machine over an empty root. The one thing that must stay true: what is
not here is None and is said, never guessed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench._peers import missing
from posttrain.sandbox import spec
from posttrain.sandbox.bubblewrap import candidates
from posttrain.sandbox.rootfs import system_folders

TRUE = "/bin/true"


def timed(rounds: int, call: Callable[[], object]) -> list[float]:
    """Seconds of each call, after one that is not counted."""
    call()
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return taken


def process() -> None:
    """A bare process."""
    subprocess.run([TRUE], check=True)


# --- bubblewrap -------------------------------------------------------------------------------


def bubblewrap(source: str, *, rounds: int) -> list[float]:
    """Seconds of a bare bubblewrap each, of the candidate that the sandboxes use."""
    (found,) = [one for one in candidates() if one["source"] == source]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for path, file in found["files"].items():
            copy = Path(folder, "program", path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
            copy.chmod(0o755)
        for part in (*(f"disk/{name}" for name in spec.WRITABLE), "etc", "empty"):
            Path(folder, part).mkdir(parents=True)
        given = spec.bubblewrap_arguments(
            disk=f"{folder}/disk", etc=f"{folder}/etc", empty=f"{folder}/empty",
            system=system_folders(),
        )  # fmt: skip
        options = [option for option in given if option != "--as-pid-1"]
        command = [f"{folder}/program/{found['start']}", *options, "--", TRUE]
        return _as_nobody(lambda: timed(rounds, lambda: _quietly(command)))


def _as_nobody(measure: Callable[[], list[float]]) -> list[float]:
    """Measure in a child that leaves root, as the holder does; a process that changes its user for
    each command would pay for that as well.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setresgid(*[spec.UNPRIVILEGED_ID] * 3)
                os.setresuid(*[spec.UNPRIVILEGED_ID] * 3)
            os.write(write_end, json.dumps(measure()).encode())
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as told:
        text = told.read()
    os.waitpid(pid, 0)
    found: list[float] = json.loads(text)
    return found


def _quietly(command: Sequence[str]) -> None:
    ran = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True)
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr.decode("utf-8", "replace")[-500:])


# --- container runtimes -----------------------------------------------------------------------


def container(program: str, *, rounds: int) -> list[float] | None:
    """Seconds of a whole container each: made, `true`, removed. None where it does not work."""
    if (path := shutil.which(program)) is None:
        return missing(program, "it is not installed")
    if os.getuid() != 0:
        return missing(program, "it is measured as root only")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "rootfs")
        for name in ("usr", "proc", "dev", "sys", "etc", "run", "tmp"):
            (root / name).mkdir(parents=True)
        for place, target in system_folders().items():
            if target:
                (root / place[1:]).symlink_to(target)
        if program == "podman":
            options = ["--network=none", "--read-only", "--volume=/usr:/usr:ro"]
            options += ["--ulimit=nofile=512:512", "--ulimit=nproc=512:512", "--rootfs", str(root)]
            runtime = ["--runtime=runc"] if shutil.which("runc") else []
            command = [path, *runtime, "run", "--rm", *options, TRUE]
        else:
            _bundle(path, folder)
            command = [path, "run", "--bundle", folder, f"posttrain-bench-{os.getpid()}"]
        try:
            return timed(rounds, lambda: _quietly(command))
        except RuntimeError as error:
            return missing(program, str(error).strip())


def _bundle(path: str, folder: str) -> None:
    """What a runtime is told of a container: its own defaults, `true`, and this machine's /usr."""
    subprocess.run([path, "spec"], cwd=folder, check=True)
    file = Path(folder, "config.json")
    config = json.loads(file.read_text())
    config["process"] |= {"terminal": False, "args": [TRUE]}
    config["mounts"].append(
        {"destination": "/usr", "source": "/usr", "type": "bind", "options": ["rbind", "ro"]}
    )
    file.write_text(json.dumps(config))
