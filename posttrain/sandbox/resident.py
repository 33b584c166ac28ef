"""A Python interpreter that lives in a sandbox from call to call, and what calls it.

Run as text by the `python3` of a sandbox (3.9 or newer), never imported by this project. Each call
is a command of its own: it begins an interpreter where none answers, hands it its standard input
(the code), output and error, and ends with the exit code it is told. So the limits of time, output
and memory and the causes of death are those of every command, and nothing outside the sandbox ever
reads a word of what the interpreter or another process in its place says. The one thing that must
stay true: a call without an interpreter of earlier calls says so.
"""

import os
import sys

NAME = "\0python-session"
"""Of the socket: it lies in the network namespace, goes with its process, and needs no disk."""
NEW = "[new interpreter: it holds nothing of earlier calls]"
DIED = "[the interpreter died: what it held is lost]"
_STANDARD = (0, 1, 2)
_NEEDED = ("ast", "linecache", "traceback")


def call(source: str) -> int:
    """Have the interpreter run what is on standard input; returns the exit code."""
    import _socket  # `socket` alone takes as long to import as Python to start.

    line = _socket.socket(_socket.AF_UNIX)
    try:
        if line.connect_ex(NAME) != 0:
            listener = _socket.socket(_socket.AF_UNIX)
            listener.bind(NAME)
            listener.listen(64)
            line.connect(NAME)
            _begin(source, listener.fileno())
            listener.close()
            os.write(2, f"{NEW}\n".encode())
    except OSError as error:
        os.write(2, f"[no interpreter could be started: {error.strerror}]\n".encode())
        return 1
    files = b"".join(number.to_bytes(4, sys.byteorder) for number in _STANDARD)
    try:
        line.sendmsg([b"c"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
        told = line.recv(1)
    except OSError:
        told = b""
    if not told:
        os.write(2, f"{DIED}\n".encode())
    return told[0] if told else 1


def _begin(source: str, listener: int) -> None:
    """Start the interpreter over a socket that listens."""
    os.set_inheritable(listener, True)
    start = [sys.executable, "-I", "-c", "import sys; exec(sys.argv[1])", source, str(listener)]
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in _STANDARD]
    os.posix_spawn(sys.executable, start, os.environ, file_actions=nowhere, setsid=True)


def serve(number: int) -> None:
    """Run calls one after the other, for ever."""
    import contextlib
    import socket
    import types

    for name in _NEEDED:  # before the workspace's own modules could be found
        __import__(name)
    listener = socket.socket(fileno=number)
    listener.set_inheritable(False)
    held, own = [listener], os.getpid()

    def leave() -> None:
        """What a fork does not hold ends with the interpreter."""
        for each in held:
            each.close()

    os.register_at_fork(after_in_child=leave)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv[:], sys.path[:0], sys.dont_write_bytecode = [""], [""], True
    count = 0
    while True:
        line, _ = listener.accept()
        held.append(line)
        with line:
            _, files, _, _ = socket.recv_fds(line, 1, len(_STANDARD))
            count += 1
            exit_code = _carry_out(files, main.__dict__, f"<call {count}>")
            if os.getpid() != own:  # A fork that came out of the code.
                os._exit(exit_code)
            with contextlib.suppress(OSError):  # The call may have ended meanwhile.
                line.send(bytes((exit_code,)))
        held.remove(line)


def _carry_out(files: list[int], space: dict[str, object], name: str) -> int:
    """Run one call's code over its descriptors, then let them go; its exit code."""
    import contextlib

    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    text = ("utf-8", "backslashreplace")
    sys.stdin = os.fdopen(0, "r", 1, *text, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1, *text, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, *text, closefd=False)
    streams = (sys.stdout, sys.stderr)
    try:
        return _run(sys.stdin.read(), space, name)
    finally:
        for stream in (*streams, sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for target in _STANDARD:
            os.dup2(nowhere, target)
        if nowhere not in _STANDARD:
            os.close(nowhere)


def _run(code: str, space: dict[str, object], name: str) -> int:
    """Run code, showing the value of a last expression; its exit code. Exceptions are told with the
    lines of the code.
    """
    import ast
    import linecache
    import traceback

    errors = sys.stderr
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            del tree.body[-1]
        exec(compile(tree, name, "exec", dont_inherit=True), space)
        if isinstance(last, ast.Expr):
            value = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
            sys.displayhook(eval(value, space))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        errors.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<call "):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace, file=errors)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        serve(int(sys.argv[2]))
    else:
        sys.exit(call(sys.argv[1]))
