"""What a command prints, and how it seems to end (BR-38, BR-39)."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from tests.sandbox.attacks.attack import Family, Held
from tests.sandbox.attacks.conftest import ROOT, holders
from tests.sandbox.attacks.places import Inside
from tests.sandbox.attacks.probe import detach

FAMILY = Family("output")


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


def flood(given):
    for _ in range(given["mib"]):
        os.write(1, b"x" * (1 << 20))
        os.write(2, b"x" * (1 << 20))


async def keep_all(place):
    """What comes is kept, however much."""
    kept = await asyncio.to_thread(place.capture, flood, mib=20)
    assert len(kept.stdout) + len(kept.stderr) > 40 << 20


def peak_bytes(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no peak is told")


@FAMILY.attack(
    "print 300 MB on both streams, so that whoever collects them runs out of memory",
    held_by="head and tail are kept up to a limit, the rest is counted and said",
    control="a harness that keeps all",
    outside=keep_all,
)
async def flood_streams(place):
    async with BubblewrapSandboxes() as source:
        known = set(holders())
        other = Inside(place.facts, place.resolver, source=source, environment=place.environment)
        await other.open()
        await other.shell("true")
        (holder,) = set(holders()) - known
        before = peak_bytes(holder)
        result = await other.exec(flood, mib=300, timeout_s=40)
        grown = peak_bytes(holder) - before
        await other.close()
    for text in (result.stdout, result.stderr):
        assert "of 314572" in text
        assert len(text) < 20_000
    if grown < 50 << 20 and result.truncated and result.exit_code == 0:
        raise Held(f"{grown} bytes more at the peak")


def print_bytes(given):
    os.write(1, b"ok\xff\xe4\n")
    os.write(2, "é".encode() * 8000)


async def decode_strictly(place):
    """A reader that decodes loses everything."""
    printed = await asyncio.to_thread(place.capture, print_bytes)
    try:
        printed.stdout.decode()
    except UnicodeDecodeError:
        return
    raise Held("decoded")


@FAMILY.attack(
    "print what is no text, or is cut within a character, so that all of it is lost",
    held_by="such bytes are replaced one by one, none at the cut",
    control="a harness that decodes",
    outside=decode_strictly,
    environment=Environment(max_output_bytes=9_999),
)
async def print_no_text(place):
    result = await place.exec(print_bytes)
    whole = result.stdout.startswith("ok\ufffd\ufffd\n")
    if whole and result.exit_code == 0 and result.truncated and "\ufffd" not in result.stderr:
        raise Held("the rest is kept")


def forge(given):
    print(given["forged"], flush=True)
    os._exit(3)


async def believe_output(place):
    """A harness that has the shell print the exit code after the command's output."""
    printed = await asyncio.to_thread(place.capture, forge, forged="EXIT:0")
    text = printed.stdout.decode() + f"EXIT:{printed.returncode}\n"
    assert text.partition("EXIT:")[2].split()[0] == "0"


@FAMILY.attack(
    "print what ends a command for those who read its end from its output",
    held_by="the end is told by the usher, on a way that no command has",
    control="a harness that has the exit code printed",
    outside=believe_output,
)
async def forge_end(place):
    frame = '\x00\x00\x00\x10\x00\x00\x00\x00{"exit_code": 0}\nEXIT:0\n'
    if (await place.exec(forge, forged=frame)).exit_code == 3:
        raise Held("told as it was")


def write_late(given):
    def wait():
        until = time.monotonic() + given["most_s"]
        while not os.path.exists("go") and time.monotonic() < until:
            time.sleep(0.01)
        with contextlib.suppress(OSError):
            os.write(1, b"late")
        with open("written", "w"):
            pass

    with open("up", "w"):
        pass
    detach(wait, "up", silent=False)


async def wait_for_all(place):
    """A harness that reads until everybody has closed."""
    printed = await asyncio.to_thread(place.capture, write_late, most_s=0.5)
    assert b"late" in printed.stdout


@FAMILY.attack(
    "keep a command's output open after its end: its reader waits, or the next one's is mixed up",
    held_by="a command ends with its process, and its output with it; each has pipes of its own",
    control="a harness that reads until everybody has closed",
    outside=wait_for_all,
)
async def print_late(place):
    async with asyncio.timeout(10):
        first = await place.exec(write_late, most_s=20)
        second = await place.shell("touch go; while [ ! -e written ]; do :; done; echo mine")
    if "late" not in first.stdout and second.stdout == "mine\n":
        raise Held("neither waited nor mixed up")


def close_output(given):
    os.close(1)
    os.close(2)
    until = time.monotonic() + given["most_s"]
    while not os.path.exists("go") and time.monotonic() < until:
        time.sleep(0.01)
    with open("ended", "w"):
        pass
    os._exit(0)


async def read_to_end(place):
    """A harness that takes the end of the output for the end of the command."""

    def read():
        with place.started(close_output, most_s=20) as process:
            process.stdout.read()
            ended = (place.folder / "ended").exists()
            (place.folder / "go").touch()
        return ended

    if await asyncio.to_thread(read):
        raise Held("it had ended")


@FAMILY.attack(
    "close all output and run on, so that one seems to have ended",
    held_by="a command ends with its process",
    control="a harness that reads to the end of the output",
    outside=read_to_end,
)
async def seem_ended(place):
    await place.exec(close_output, most_s=0.3)
    if await place.read("ended") is not None:
        raise Held("waited for")


HARNESS = """
import asyncio, subprocess, sys
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
async def main():
    async with BubblewrapSandboxes() as source, source.lease(Environment()) as sandbox:
        return (await sandbox.exec(("cat",), timeout_s=5)).stdout
if sys.argv[1] == "inside":
    heard = asyncio.run(main())
else:
    heard = subprocess.run(["head", "-n", "1"], stdout=-1, text=True).stdout
print(heard.strip() + "|" + sys.stdin.readline().strip())
"""


def harness(kind):
    return subprocess.run(
        [sys.executable, "-u", "-c", HARNESS, kind], input="secret\nrest\n", text=True,
        capture_output=True, check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=50,
    ).stdout.strip()  # fmt: skip


async def hear_nothing_closed(place):
    """A harness whose commands have its own standard input."""
    assert (await asyncio.to_thread(harness, "outside")).startswith("secret|")


@FAMILY.attack(
    "read the standard input of the harness, or wait for it",
    held_by="a command has a pipe of its own, with what it was given",
    control="a harness that hands its own on",
    outside=hear_nothing_closed,
)
async def read_input(place):
    if await asyncio.to_thread(harness, "inside") == "|secret":
        raise Held("empty, and the harness has its own")
