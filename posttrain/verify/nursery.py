"""Runs inside a fresh sandbox: the process from which every candidate is forked.

It is forked itself before its parent, the `harness`, reads its order: so candidates start in a
millisecond, and no memory of theirs has ever held an order. It decides nothing and reads nothing of
what candidates say. The one thing that must stay true: when it tells that one ended, every process
that one started is dead.

A candidate that ends or stops the nursery has ended its checker (`NurseryEnded`): its own doing.
"""

from __future__ import annotations

import _ctypes  # without the module ctypes, which costs as much as a candidate
import _json
import _signal  # type: ignore[import-not-found]  # as signal, without enumerations
import _socket
import errno
import gc
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

MAX_OUTPUT_BYTES = 1 << 20
"""Of each file a candidate writes, its output one of them."""
MAX_OPEN_FILES = 1024
"""Of a candidate, as in other sandboxes."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36
_MAX_REQUEST_BYTES = 1 << 20
_END_S = 20.0
"""How long a candidate that was killed may take to be gone."""
_C = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
_PRCTL = _ctypes.dlsym(_C, "prctl")
_IPC_RMID = 0
_CONTROLS = {
    "shm": (_ctypes.dlsym(_C, "shmctl"), _IPC_RMID, 0),
    "msg": (_ctypes.dlsym(_C, "msgctl"), _IPC_RMID, 0),
    "sem": (_ctypes.dlsym(_C, "semctl"), 0, _IPC_RMID, 0),
}
"""Functions of the C library that remove what lies in `/proc/sysvipc`, and arguments of theirs."""


class Suppressed:
    """As `contextlib.suppress`; that module, too, costs more to import than a candidate to run."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> bool:
        return kind is not None and issubclass(kind, self._kinds)


class _Format:
    """What the interpreter's own JSON reader is told; the module `json` costs more to import than a
    candidate to run.
    """

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int = float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}.get


_SCAN: Callable[[str, int], tuple[Any, int]] = _json.make_scanner(_Format)  # type: ignore[arg-type]


def dumps(value: Any) -> str:
    """As `json.dumps`."""
    quoted = _json.encode_basestring_ascii
    encoder: Any = _json.make_encoder(
        None, _refused, quoted, None, ": ", ", ", False, False, True  # type: ignore[arg-type]
    )  # fmt: skip
    return "".join(encoder(value, 0))


def loads(text: str | bytes) -> Any:
    """As `json.loads`, of what `dumps` wrote.

    Raises:
        ValueError: it is no JSON value, or something follows.
    """
    given = text if isinstance(text, str) else text.decode()
    try:
        value, end = _SCAN(given, 0)
    except StopIteration:
        raise ValueError("no JSON value") from None
    if given[end:].strip():
        raise ValueError("something follows the JSON value")
    return value


def _refused(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _prctl(option: int, value: int) -> bool:
    """Whether prctl(2) did it."""
    return bool(_ctypes.call_function(_PRCTL, (option, value, 0, 0, 0)) == 0)


def hide() -> None:
    """Make this process unreadable to others of its user; its children inherit that.

    Raises:
        OSError: it cannot.
    """
    if not _prctl(_SET_DUMPABLE, 0):
        raise OSError("this process cannot be hidden")


def remove_shared() -> None:
    """Remove System V segments, queues and semaphores, which outlive their processes, where the
    kernel has such.
    """
    for kind, (call, *more) in _CONTROLS.items():
        with Suppressed(FileNotFoundError), open(f"/proc/sysvipc/{kind}", "rb") as listed:
            for line in listed.readlines()[1:]:
                _ctypes.call_function(call, (int(line.split()[1]), *more))


class NurseryEnded(BaseException):
    """A candidate ended or stopped the process that starts candidates."""


class Channel:
    """A descriptor to write to, which lies in a socket between its uses: a link that a candidate
    left leads whoever follows it to any descriptor of its own, but to none that is under way.
    """

    def __init__(self, descriptor: int) -> None:
        self._inward, self._outward = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        self._put(descriptor)

    def _put(self, descriptor: int) -> None:
        self._inward.sendmsg([b"."], [_rights(descriptor)])
        os.close(descriptor)

    def write(self, text: str) -> None:
        """Write all of it."""
        _, ((_, _, packed),), _, _ = self._outward.recvmsg(1, _socket.CMSG_SPACE(4))
        descriptor = int.from_bytes(packed[:4], sys.byteorder)
        data = text.encode()
        while data:
            data = data[os.write(descriptor, data) :]
        self._put(descriptor)


def _rights(*descriptors: int) -> tuple[int, int, bytes]:
    """What a message carries to hand them on."""
    packed = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    return _socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed


class Nursery:
    """The asking side of the process that forks candidates, one at a time."""

    def __init__(self, control: _socket.socket, pid: int, *, progress: int, nonce: str) -> None:
        self._control = control
        self.pid = pid
        self._progress = Channel(progress)
        self.told = f"{nonce} "
        self.tell(self.told)

    def tell(self, sign: str) -> None:
        """Say that a candidate has its say (`+`), or that none has (`-`)."""
        self._progress.write(sign)
        self.told = sign

    def start(self, head: Mapping[str, Any], fds: tuple[int, ...]) -> int:
        """The new candidate's process number."""
        try:
            self._control.settimeout(_END_S)
            self._control.sendmsg([dumps(head).encode()], [_rights(*fds)])
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                self.tell("-")
                raise RuntimeError("others have too many descriptors under way") from error
            raise NurseryEnded from None
        return int(self._answer(_END_S))

    def ended(self, pid: int, wall_s: float) -> tuple[int, float, bool]:
        """Exit code and CPU seconds of a candidate, and whether it had to be killed."""
        self._control.settimeout(max(wall_s, 1e-6))
        late = False
        try:
            answer = self._control.recv(256)
        except OSError:
            late = True
            with Suppressed(ProcessLookupError):
                os.kill(pid, _signal.SIGKILL)
            answer = self._answer(_END_S)
        if not answer:
            raise NurseryEnded
        code, cpu_s = loads(answer)
        return code, cpu_s, late and code == -_signal.SIGKILL

    def _answer(self, wall_s: float) -> bytes:
        try:
            self._control.settimeout(wall_s)
            answer = self._control.recv(256)
        except OSError:
            answer = b""
        if not answer:
            raise NurseryEnded
        return answer


# --- the nursery's own side ---------------------------------------------------------------------


def nurse(control: _socket.socket) -> int:
    """Fork candidates as asked, tell how each ended, and leave nothing of it; the exit code."""
    gc.freeze()  # what all share is not copied when one of them collects
    _prctl(_SET_CHILD_SUBREAPER, 1)
    while True:
        space = _socket.CMSG_SPACE(3 * 4)
        text, rights, _, _ = control.recvmsg(_MAX_REQUEST_BYTES, space)
        if not text:
            return 0
        packed = b"".join(data for _, _, data in rights)
        fds = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in (0, 4, 8)]
        head = loads(text)
        pid = os.fork()
        if pid == 0:
            control.close()
            _become(head, fds)
        for number in fds:
            os.close(number)
        control.send(str(pid).encode())
        _, status, usage = os.wait4(pid, 0)
        _end_all(pid)
        cpu_s = usage.ru_utime + usage.ru_stime
        control.send(dumps([os.waitstatus_to_exitcode(status), cpu_s]).encode())


def _become(head: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    """Be the candidate."""
    given, said, program = fds
    os.setsid()
    cpu_s = max(1, -int(-head["cpu_s"] // 1))
    files = min(MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if head["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (head["memory"], head["memory"]))
    os.chdir(head["folder"])
    os.environ["HOME"] = head["folder"]
    os.dup2(given, 0)
    os.dup2(said, 1)
    with open(program, "rb") as file:
        text = file.read()
    os.close(given)
    os.close(said)
    _prctl(_SET_DUMPABLE, 1)
    argv = head["argv"]
    if head["python"]:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        _interpret(text.decode(), argv)
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        os._exit(NOT_FOUND)
    except OSError:
        os._exit(NOT_EXECUTABLE)


def _interpret(source: str, argv: list[str]) -> NoReturn:
    """Run a program as an interpreter of its own would, but for clearing its memory away."""
    import atexit
    import builtins

    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.argv, sys.path[:0] = argv, [os.path.dirname(argv[0])]
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__dict__["__file__"] = argv[0]
    code = 0
    try:
        exec(compile(source, argv[0], "exec"), main.__dict__)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        code = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(code & 0xFF if sys.exc_info()[0] is None else 1)


def _end_all(pid: int) -> None:
    """Kill a candidate's group and everything else it left, orphans included (they became ours),
    until the kernel says that there is none: a candidate may hinder any look at them.
    """
    with Suppressed(ProcessLookupError):
        os.killpg(pid, _signal.SIGKILL)
    with Suppressed(ChildProcessError):
        while True:
            for child in _children():
                with Suppressed(ProcessLookupError):
                    os.kill(child, _signal.SIGKILL)
            os.waitpid(-1, os.WNOHANG)


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with Suppressed(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as status:
                parent = status.read().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(name))
    return found
