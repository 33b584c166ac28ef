"""What an attempt leaves: links, names, marks and depths made for whoever reads it."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import stat
import tarfile
import threading

import pytest

from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment
from posttrain.sandbox import workspace
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from tests.sandbox.attacks.attack import Family, Held
from tests.sandbox.attacks.places import Inside
from tests.sandbox.attacks.probe import detach, opened, variants

FAMILY = Family("archives")
NO_LINK = "every component is opened from the one before it, and no link is followed"


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


# --- links --------------------------------------------------------------------------------------


def make_links(given):
    os.symlink(given["file"], "leaf")
    os.symlink(os.path.dirname(given["file"]), "folder")
    os.symlink("/etc", "etc")


@FAMILY.attack("leave a link in place of a file or folder that is read", held_by=NO_LINK)
async def leave_links(place):
    await place.run(make_links)
    left = await place.seal()
    for path in ("leaf", "folder/file", "etc/passwd"):
        with contextlib.suppress(FileNotFoundError):
            if await left.read(path):
                return
    raise Held("no file")


def swapped(root, then):
    """While what is called `swapped` is opened, it is replaced by a link to where the secret is."""
    real = os.open

    def opening(path, *more, **how):
        if str(path).endswith("swapped"):
            os.open = real
            os.rename(root / "swapped", root / "before")
            os.symlink(root.parent / "secret", root / "swapped")
        return real(path, *more, **how)

    os.open = opening
    try:
        return then()
    finally:
        os.open = real


def prepared(place, folder):
    (folder / "secret").mkdir()
    (folder / "secret" / "file").write_text("secret")
    (folder / "root" / "swapped").mkdir(parents=True)
    (folder / "root" / "swapped" / "file").write_text("mine")
    return folder / "root"


async def open_by_path(place):
    """A reader that looks for links before it opens the path."""
    root = prepared(place, place.folder)

    def read():
        assert not (root / "swapped").is_symlink()
        os.close(os.open(root / "swapped", os.O_RDONLY))
        return (root / "swapped" / "file").read_text()

    assert swapped(root, read) == "secret"


@FAMILY.attack(
    "put a link in place of a folder while it is being opened",
    held_by=NO_LINK,
    control="a reader that looks for links first, and then opens the path",
    outside=open_by_path,
)
async def swap_while_opened(place):
    root = prepared(place, place.scratch())
    folder = os.open(root, os.O_RDONLY)
    try:
        parts = ("swapped", "file")
        found = swapped(root, lambda: workspace.read(folder, parts, max_bytes=99))
    finally:
        os.close(folder)
    if found != b"secret":
        raise Held("not what the link names")


@FAMILY.attack(
    "link a file of the host, or of the system, into the workspace",
    held_by="the workspace is a file system of its own",
    root=True,
    optional="temporary folders on one file system",
)
def link_system_file(given):
    targets = [given["file"]] if given["unprotected"] else ["/etc/hosts", "/usr/bin/env"]
    variants(*(lambda target=target: os.link(target, "hard") for target in targets))
    os.unlink("hard")


def link_expected(given):
    os.symlink(given["expected"], "result")


def read_result(given):
    with open(f"{given['beside']}/result") as file:
        if file.read() == "expected":
            return
    raise Held("something else")


@FAMILY.attack(
    "leave a link to the checker's own file in place of a result",
    held_by="what was left is mounted so that no link in it is followed",
)
async def link_to_checker(place):
    inside = place.beside.startswith("/")
    expected = "/workspace/expected" if inside else "expected"
    await place.run(link_expected, expected=expected)
    checker = await place.checker(Environment(files={"expected": "expected"}))
    await checker.run(read_result, beside=place.beside)


def write_beside(given):
    with open(f"{given['beside']}/result", "w") as file:
        file.write("better")


@FAMILY.attack(
    "change what was left, from the checker's own sandbox",
    held_by="it is mounted read-only",
)
async def change_left(place):
    checker = await place.checker()
    await checker.run(write_beside, beside=place.beside)


def leave_program(given):
    with open("program", "w") as file:
        os.fchmod(file.fileno(), 0o4755)


def is_owners(given):
    if not os.stat(f"{given['beside']}/program").st_mode & stat.S_ISUID:
        raise Held("not marked")
    if os.statvfs(given["beside"]).f_flag & os.ST_NOSUID:
        raise Held("mounted without set-user-id")


@FAMILY.attack(
    "leave a program that runs as its owner in the checker's sandbox",
    held_by="what was left is mounted without set-user-id",
    optional="temporary folders with set-user-id",
)
async def leave_owners_program(place):
    await place.run(leave_program)
    checker = await place.checker()
    await checker.run(is_owners, beside=place.beside)


# --- pipes, devices, leases -----------------------------------------------------------------------


def make_pipe(given):
    os.mkfifo("pipe")
    os.mkdir("inner")
    os.mkfifo("inner/pipe")


def open_pipes(given):
    class Waits(Exception):
        pass

    def wait(*_):
        raise Waits

    signal.signal(signal.SIGALRM, wait)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    for name in ("pipe", "inner/pipe"):
        try:
            opened(f"{given['beside']}/{name}", os.O_RDONLY)
        except Waits:
            return
        except OSError as error:
            reason = str(error)
    raise Held(reason)


@FAMILY.attack(
    "leave a pipe in place of a file, so that its reader waits for ever",
    held_by="sealing removes all but files, folders and links; no reading of ours can block",
)
async def leave_pipe(place):
    await place.run(make_pipe)
    checker = await place.checker()
    await checker.run(open_pipes, beside=place.beside)


def take_lease(given):
    with open("leased", "w") as file:
        file.write("x")

    def hold():
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        file = os.open("leased", os.O_RDWR)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with open("up", "w"):
            pass
        signal.pause()

    detach(hold, "up")


async def read_leased(place):
    """A reader that just opens; it is let go by the end of the one who holds the lease."""
    await place.run(take_lease)
    thread = threading.Thread(target=(place.folder / "leased").read_text, daemon=True)
    thread.start()
    thread.join(0.5)
    waits = thread.is_alive()
    place.kill_left()
    thread.join(20)
    if not waits:
        raise Held("it was read at once")


@FAMILY.attack(
    "lease a file from the kernel, so that its reader waits (fcntl)",
    held_by="no reading of ours can block",
    outside=read_leased,
    optional="a file system with leases",
)
async def lease_file(place):
    await place.run(take_lease)
    async with asyncio.timeout(5):
        await place.read("leased")
    raise Held("answered at once")


def make_whiteout(given):
    os.mknod("gone", 0o20600, 0)


@FAMILY.attack(
    "make the device by which overlays mark deleted files",
    held_by="sealing removes all but files, folders and links",
)
async def leave_whiteout(place):
    await place.run(make_whiteout)
    left = await place.seal()
    if "gone" not in await left.names():
        raise Held("it is gone")


def mark(given):
    for name in ("a", "b", "c"):
        with open(name, "w") as file:
            file.write(name)
        os.setxattr(name, "user.overlay.metacopy", b"")
        os.setxattr(name, "user.overlay.redirect", b"/work/c")


def carries_mark(given):
    with open("marked", "w"):
        pass
    os.setxattr("marked", "user.overlay.metacopy", b"")


@FAMILY.attack(
    "mark files as an overlay does, so that they, and pipes beside them, are lost to whoever looks",
    held_by="sealing removes such marks; whoever looks goes on past what cannot be looked at",
    control="primitive: a file can be marked so",
    outside=carries_mark,
    optional="a file system with attributes",
)
async def mark_files(place):
    await place.run(mark)
    await place.snapshot()
    await place.run(make_pipe)
    left = await place.seal()
    names, texts = set(await left.names()), [await left.read(name) for name in ("a", "b", "c")]
    if names == {"a", "b", "c", "inner"} and texts == [b"a", b"b", b"c"]:
        raise Held("all are there, and no pipe")


# --- names and depths -----------------------------------------------------------------------------

NAMES = ["a\nb", "-rf", " ", "*", "\u202e\u2028", "e\u0301", "x" * 255]


def make_names(given):
    for name in given["names"]:
        with open(name, "w"):
            pass
    with open(b"\xff\xfe\n", "w"):
        pass


@FAMILY.attack(
    "give files names with line ends and bytes that are no text, so that one reads as two",
    held_by="names come one by one, each escaped where it is no text",
    control="the lines of `ls`",
)
async def confuse_names(place):
    await place.run(make_names, names=NAMES)
    left = await place.seal()
    if sorted(await left.names()) == sorted([*NAMES, "\\xff\\xfe\n"]):
        raise Held("each as it is")


def dig(given):
    for _ in range(given["depth"]):
        os.mkdir("d")
        os.chdir("d")
    os.mkfifo("pipe")


async def walk_by_path(place):
    """A walk by paths does not reach the bottom."""
    await place.run(dig, depth=2500)
    try:
        reached = any("pipe" in names for _, _, names in os.walk(place.folder))
    except RecursionError:
        return
    if reached:
        raise Held("reached")


@FAMILY.attack(
    "nest folders so deep that whoever walks them fails, or holds up everybody else",
    held_by="each folder is opened once, from its neighbour; lists end at a depth and say so",
    control="a walk by paths, which does not reach the bottom",
    outside=walk_by_path,
)
async def nest_deep(place):
    await place.run(dig, depth=4000)
    async with asyncio.timeout(20):
        left = await place.seal()
        if len(await left.names()) == 65:
            raise Held("sealed at once, and listed to a depth")


@FAMILY.attack(
    "unpack an archive whose members lie outside of the workspace",
    held_by="all but the sandbox's disk is mounted read-only",
)
def unpack_archive(given):
    with tarfile.open("archive.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo(f"../{given['marker']}"))
    with tarfile.open("archive.tar") as archive:
        archive.extractall()
    os.unlink(f"../{given['marker']}")


# --- where the kernel cannot share layers ---------------------------------------------------------


def make_mess(given):
    os.mkfifo("/tmp/pipe")
    for name in ("one", "two"):
        with open(name, "wb") as file:
            os.ftruncate(file.fileno(), 3 << 20)
    with open("linked", "wb") as file:
        file.write(bytes(1 << 20))
    for number in range(20):
        os.link("linked", f"link{number}")
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")


async def copy_simply(place):
    """A copy by the standard library fails at a pipe."""
    os.mkfifo(place.folder / "pipe")
    copy = place.folder.with_name("copy")
    with pytest.raises(shutil.Error):
        shutil.copytree(place.folder, copy)
    shutil.rmtree(copy)


@FAMILY.attack(
    "leave what cannot be copied, where snapshots are copies: pipes, holes, links, depth",
    held_by="holes and links are copied as such, pipes and what lies too deep are left out",
    control="a copy by the standard library",
    outside=copy_simply,
    environment=Environment(disk_bytes=4 << 20),
)
async def leave_uncopyable(place):
    async with BubblewrapSandboxes(share=False) as source:
        other = Inside(place.facts, place.resolver, source=source, environment=place.environment)
        await other.open()
        try:
            await other.run(make_mess)
            await other.snapshot()
            sizes = (await other.shell("cat one two link7 | wc -c")).stdout
        except SandboxError:
            return
        finally:
            await other.close()
    if sizes == f"{7 << 20}\n":
        raise Held("copied")
