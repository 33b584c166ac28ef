"""What every attacking program begins with; its text is sent along with the attack's own.

Runs under any Python 3.9+ with the standard library. A program ends by printing one line of JSON:
that it got through, with what it found, or what held it. An exception that is neither `Held` nor an
`OSError` prints nothing: the attack is broken, which is not the same as being held.
"""

# ruff: noqa: F401 (the attacks' own texts need them)
import array
import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import mmap
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import sys
import tarfile
import threading
import time

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
OPEN, HELD = "open", "held"
UNPROTECTED = len(sys.argv) > 1 and '"unprotected": true' in sys.argv[1]
MISSING = (
    errno.ENOENT, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ENODEV,
    errno.ENXIO, errno.ENOMEDIUM,
)  # fmt: skip
"""What a machine answers that does not have something."""


class Held(Exception):
    """Something is in the way."""


def checked(result):
    """The result of a function of the C library, or its error."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def call(x86, arm, *arguments):
    """A system call with useless arguments: refused where the kernel does not look at them."""
    ctypes.set_errno(0)
    result = LIBC.syscall(x86 if X86 else arm, *(ctypes.c_long(a) for a in arguments))
    number = ctypes.get_errno()
    if result == -1 and number in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        raise OSError(number, os.strerror(number))


def variants(*attempts):
    """Ways to do one thing. Protected, it is done if any of them succeeds; unprotected, all must
    that exist on this machine, or those that do not would prove nothing.
    """
    failed, succeeded = [], 0
    for attempt in attempts:
        try:
            attempt()
            succeeded += 1
        except (OSError, Held) as error:
            if not (UNPROTECTED and getattr(error, "errno", None) in MISSING):
                failed.append(str(error))
    if failed and (UNPROTECTED or not succeeded):
        raise Held("; ".join(failed))
    if not succeeded:
        raise Held("none of it is there")


def first(given):
    """The number of the first process; unprotected, of the one who started this one, since a host's
    first process may be out of its root's reach.
    """
    return os.getppid() if given["unprotected"] else 1


def opened(path, flags):
    """Open and close, which changes nothing."""
    os.close(os.open(path, flags))


def forked(action):
    """Do something that would change this process in a child that ends at once."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except (OSError, Held):
            pass
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        raise Held("refused" if code == 1 else f"ended by signal {-code}")


def only_inside():
    """Before what would harm a host: where the first process can be looked into, this is one."""
    assert not os.listdir("/proc/1"), "this must never run unprotected"


def crowd(count):
    """So many children that do nothing, or as many as there can be."""
    made = []
    try:
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                signal.pause()
                os._exit(0)
            made.append(pid)
    except OSError:
        pass
    return made


def disperse(made):
    """End them."""
    for pid in made:
        os.kill(pid, signal.SIGKILL)
    for pid in made:
        os.waitpid(pid, 0)


def outrun(number):
    """Send a signal to each process that is seen, one of which forks in between: its child goes on
    where nothing looks again.
    """
    go, begin = os.pipe()
    moved, told = os.pipe()
    first = os.fork()
    if first == 0:
        os.setsid()
        os.write(told, b"u")
        signal.alarm(20)
        os.read(go, 1)
        if os.fork() == 0:
            signal.alarm(20)
            os.write(told, b"f")
            os.read(go, 1)
            os.write(told, b"x")
        else:
            signal.pause()
        os._exit(0)
    os.read(moved, 1)
    seen = [int(n) for n in os.listdir("/proc") if n.isdigit() and in_group(int(n), first)]
    os.write(begin, b"x")
    os.read(moved, 1)
    for pid in seen:
        os.kill(pid, number)
    os.write(begin, b"x")
    goes_on = bool(select.select([moved], [], [], 5)[0])
    disperse([first])
    if seen != [first] or not goes_on:
        raise Held("none goes on")


def in_group(pid, group):
    """Whether a process is of a group."""
    try:
        return os.getpgid(pid) == group
    except OSError:
        return False


def state_of(pid):
    """The state of a process, which is that of its first thread (proc(5))."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_for(path, seconds):
    """Until a file exists."""
    until = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > until:
            raise AssertionError(f"{path} never came")
        time.sleep(0.002)


def detach(action, up, silent=True):
    """Do something in a process of its own session, whose parents are gone; return once it made the
    file `up`. With `silent` it has no output.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            if silent:
                nowhere = os.open(os.devnull, os.O_RDWR)
                for number in range(3):
                    os.dup2(nowhere, number)
            signal.alarm(20)
            action()
        os._exit(0)
    os.waitpid(pid, 0)
    wait_for(up, 10)


def main(attack):
    """Run an attack and tell how it went."""
    try:
        told = {"met": OPEN, "found": attack(json.loads(sys.argv[1]))}
    except (OSError, Held) as error:
        told = {"met": HELD, "reason": str(error) or type(error).__name__}
    print(json.dumps(told), flush=True)
