"""Functions that tests call in workers."""

import os
import signal
import subprocess
import sys
import time


def add(a, b):
    return a + b


def pid():
    return os.getpid()


def hash_of(text):
    return hash(text)


def spin():
    while True:
        pass


def sleep_ignoring_signals(marker):
    for number in range(1, 65):
        if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(number, signal.SIG_IGN)
    subprocess.Popen(["sh", "-c", f"sleep 60 # {marker}"])
    time.sleep(60)


def noisy():
    print("x" * 100_000)
    print("y" * 100_000, file=sys.stderr)
    os.write(1, b"raw")
    os.write(2, b"raw")
    return "quiet"


def fail(message):
    raise ValueError(message)


def fail_hard():
    raise KeyboardInterrupt("out")


def leave():
    os._exit(3)


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def corrupt():
    os.write(3, b"\xff" * 64)
    return 1


def answer(kind):
    return {
        "nan": float("nan"), "inf": [1, float("inf")], "set": {1}, "bytes": b"x",
        "key": {1: 2}, "object": object(), "tuple": (1, "a", None, True, 0.5, {"k": []}),
    }[kind]  # fmt: skip


def hungry():
    return len(b"x" * (1 << 30))


def file_of(module):
    return sys.modules[module].__file__


def variables():
    return dict(os.environ)


NOT_CALLABLE = 3
