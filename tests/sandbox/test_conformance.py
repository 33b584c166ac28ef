"""What every driver keeps of `core.containment`, over all drivers that work on this machine."""

import asyncio
import itertools
import os
import time
from contextlib import AsyncExitStack

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.containment import Bound, Cause, Reach, Sealed, Snapshots
from posttrain.core.errors import IsolationError, SandboxError, UsageError
from posttrain.core.task import EntryKind, Environment, Isolation, Network
from posttrain.sandbox.pooled import PooledSandboxes
from posttrain.sandbox.scripted import ScriptedSandboxes
from tests.sandbox.conftest import processes_named
from tests.sandbox.drivers import ALL, REAL


class Driver:
    """A source, what it can do, and bodies run with sandboxes of it."""

    def __init__(self, source):
        self.source = source
        self.can = asyncio.run(source.capabilities())
        self.spare = 0
        """What a container without a user namespace allows in processes beyond what was asked."""

    def run(self, body, environment=None):
        async def main():
            async with self.source.lease(environment or Environment()) as sandbox:
                return await body(sandbox)

        return asyncio.run(main())

    def lease(self, **fields):
        given = {name: fields.pop(name) for name in ("beside", "over") if name in fields}
        return self.source.lease(Environment(**fields), **given)


def opened(make):
    source = make()
    try:
        driver = Driver(source)
        driver.spare = 16 if make is REAL["docker"] else 0
    except IsolationError as error:
        asyncio.run(source.close())
        pytest.skip(str(error))
    yield driver
    source.check()
    stats, prepared = source.stats(), getattr(source, "prepared", 0)
    asyncio.run(source.close())
    assert (stats.open, stats.sealed) == (0, prepared), stats


@pytest.fixture(scope="module", params=REAL)
def driver(request):
    """Those that run commands."""
    yield from opened(REAL[request.param])


@pytest.fixture(scope="module", params=ALL)
def source(request):
    """All of them, the scripted one too."""
    yield from opened(ALL[request.param])


async def shell(sandbox, line, *, code=0, **options):
    result = await sandbox.exec(("sh", "-c", line), **options)
    assert result.exit_code == code, result
    return result.stdout


# --- leases -----------------------------------------------------------------------------------


def test_files_outlive_sandboxes_where_they_were_sealed_and_only_there(source):
    async def body():
        async with source.lease(files={"a/b.txt": "given"}) as sandbox:
            await sandbox.write("/workspace/c", b"\x00\xff")
            assert await sandbox.read("a/b.txt", max_bytes=3) == b"giv"
            assert await sandbox.read("../c", max_bytes=9) is None
            assert (await sandbox.usage()).disk_bytes > 0
            snapshot: Sealed = await sandbox.snapshot()
            await sandbox.write("a/b.txt", b"changed")
            sealed = await sandbox.seal()
            for call in (sandbox.seal, sandbox.snapshot, sandbox.usage, sandbox.kill):
                with pytest.raises(SandboxError, match="not open"):
                    await call()
            await sandbox.close()
        assert await snapshot.read("a/b.txt", max_bytes=99) == b"given"
        assert await sealed.read("a/b.txt", max_bytes=99) == b"changed"
        assert await sealed.read("none", max_bytes=9) is None
        found = {entry.path: entry for entry in await sealed.entries(max_entries=99)}
        assert found.keys() == {"a", "a/b.txt", "c"}
        assert (found["a"].kind, found["c"].kind) == (EntryKind.FOLDER, EntryKind.FILE)
        assert (found["c"].size, found["c"].mode) == (2, 0o644)
        assert len(await sealed.entries(max_entries=1)) == 1
        async with source.lease(over=snapshot, beside=sealed) as sandbox:
            assert await sandbox.read("a/b.txt", max_bytes=99) == b"given"
        for each in (snapshot, sealed, sealed):
            await each.close()
        with pytest.raises(SandboxError):
            await sealed.read("c", max_bytes=1)

    asyncio.run(body())


def test_what_cannot_be_honoured_is_refused_by_name(source):
    async def lease(**fields):
        async with source.lease(**fields):
            raise AssertionError("never reached")

    higher = [level for level in Isolation if level.rank > source.can.isolation.rank]
    before = source.source.stats()
    for level in higher:
        with pytest.raises(IsolationError, match=f"requires isolation '{level}'.*Next:"):
            asyncio.run(lease(isolation=level))
    for network in (Network(allow=("a.example.org:443",)), Network(open=True)):
        if (reach := Reach.of(network)) not in source.can.reach:
            with pytest.raises(IsolationError, match=f"reach '{reach}'.*Next:"):
                asyncio.run(lease(network=network))
    assert source.source.stats() == before
    assert Reach.NOTHING in source.can.reach


def test_mistakes_of_the_caller_are_said_and_leave_no_lease(source):
    async def foreign():
        async with ScriptedSandboxes().lease(Environment()) as scripted:
            return await scripted.seal()

    async def lease(**fields):
        async with source.lease(**fields):
            raise AssertionError("never reached")

    async def body(sandbox):
        for argv, timeout_s in (((), 1.0), (("true",), 0.0)):
            with pytest.raises(UsageError, match="wanted a command and a time"):
                await sandbox.exec(argv, timeout_s=timeout_s)
        with pytest.raises(UsageError, match="workspace"):
            await sandbox.write("../x", b"")

    source.run(body)
    before = source.source.stats().open
    with pytest.raises(UsageError, match=r"\.\./x"):
        asyncio.run(lease(files={"../x": ""}))
    for way in ("beside", "over"):
        with pytest.raises(UsageError, match="this source"):
            asyncio.run(lease(**{way: asyncio.run(foreign())}))
    assert source.source.stats().open == before


def test_a_set_up_that_fails_is_not_the_policys_doing(source):
    async def lease():
        async with source.lease(setup=("true", "false")):
            raise AssertionError("never reached")

    before = source.source.stats().open
    with pytest.raises(SandboxError, match="set-up 'false'"):
        asyncio.run(lease())
    assert source.source.stats().open == before


def test_the_pool_hands_out_sandboxes_of_any_driver(source):
    async def body():
        async with PooledSandboxes(source.source, RealClock()) as pool:
            assert await pool.capabilities() == source.can
            for text in ("one", "two"):
                async with pool.lease(Environment(files={"a": text})) as sandbox:
                    assert await sandbox.read("a", max_bytes=9) == text.encode()
            with pytest.raises(IsolationError):
                async with pool.lease(Environment(isolation=Isolation.VIRTUAL_MACHINE)):
                    pass
            pool.check()

    asyncio.run(body())


# --- commands ---------------------------------------------------------------------------------


def test_files_and_daemons_stay_from_command_to_command_and_variables_do_not(driver):
    async def body(sandbox):
        assert await shell(sandbox, "cat a/b.txt") == "given"
        await shell(sandbox, "mkdir d && echo made > d/x && export X=1; sleep 100 &")
        told = await shell(sandbox, "cat d/x; pwd; echo [$X]; pgrep -c sleep; id -u; env")
        made, folder, variable, sleeping, uid, *shown = told.split()
        assert (made, folder, variable, sleeping) == ("made", "/workspace", "[]", "1")
        assert int(uid) >= 1000
        assert {line.partition("=")[0] for line in shown} == {
            "PATH", "HOME", "USER", "LANG", "TERM", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "PWD",
        }  # fmt: skip
        await sandbox.write("e/f", b"\x00\xff")
        assert await shell(sandbox, "wc -c < e/f; echo in >> e/f") == "2\n"
        assert await sandbox.read("e/f", max_bytes=9) == b"\x00\xffin\n"
        usage = await sandbox.usage()
        if usage.processes is not None:
            assert usage.processes == 1
            assert usage.memory_bytes > 0
        assert len((await shell(sandbox, "echo /proc/[0-9]*")).split()) <= 3

    driver.run(body, Environment(files={"a/b.txt": "given"}))


EXIT_CODES = [
    (("sh", "-c", "exit 3"), 3), (("sh", "-c", "kill -9 $$"), 137),
    (("sh", "-c", "kill -9 -1; exit 7"), 7), (("no-such-program",), 127), (("/usr",), 126),
    (("sh", "-c", "exec >&- 2>&- <&-; exit 4"), 4), (("a\0b",), 126), (("-x",), 127),
    (("true", "x" * 140_000), 126), (("sh", "-c", "exit 125"), 125),
]  # fmt: skip


def test_exit_codes_are_told_as_a_shell_does(driver):
    async def body(sandbox):
        for argv, exit_code in EXIT_CODES:
            result = await sandbox.exec(argv)
            assert (result.exit_code, result.timed_out) == (exit_code, False), (argv[:1], result)
        fake = "echo 'OCI runtime error, bwrap: Creating new namespace failed' >&2; kill -9 1 -1 $$"
        result = await sandbox.exec(("sh", "-c", fake))
        assert (result.exit_code, "OCI" in result.stderr) == (137, True), "the machine did not fail"
        assert (await sandbox.exec(("echo", "next"))).stdout == "next\n"
        for line, cause in (("exit 3", Cause.EXITED), ("kill -SEGV $$", Cause.SIGNALLED)):
            assert (await sandbox.exec(("sh", "-c", line))).cause is cause

    driver.run(body)


def test_standard_input_is_what_was_given_and_nothing_else(driver):
    async def body(sandbox):
        assert await shell(sandbox, "cat") == ""
        assert await shell(sandbox, "cat", stdin=b"explicit") == "explicit"
        assert await shell(sandbox, "wc -c", stdin=bytes(3_000_000)) == "3000000\n"
        assert await shell(sandbox, "true", stdin=bytes(3_000_000)) == ""

    driver.run(body)


def test_output_is_heard_while_it_comes_and_kept_up_to_its_cap(driver):
    async def body(sandbox):
        heard = asyncio.Queue()
        await shell(sandbox, "mkfifo gate")
        script = "echo first; read go < gate; echo second >&2; head -c 500 /dev/zero; echo END"
        running = asyncio.ensure_future(
            sandbox.exec(
                ("sh", "-c", script), listen=lambda name, data: heard.put_nowait((name, data))
            )
        )
        assert await heard.get() == ("stdout", b"first\n")
        assert not running.done()
        await shell(sandbox, "echo > gate")
        result = await running
        rest = [heard.get_nowait() for _ in range(heard.qsize())]
        assert ("stderr", b"second\n") in rest
        told = b"".join(data for name, data in rest if name == "stdout")
        assert told == bytes(100 - len("first\n"))
        assert (result.stderr, result.truncated) == ("second\n", True)
        assert "of 510 bytes left out" in result.stdout
        assert result.stdout.endswith("END\n")
        whole = await sandbox.exec(("sh", "-c", r"printf 'ok\377\344\n'; head -c 95 /dev/zero"))
        assert (whole.stdout, whole.truncated) == ("ok\ufffd\ufffd\n" + "\0" * 95, False)
        over = await sandbox.exec(("sh", "-c", "head -c 30000000 /dev/zero | tr '\\0' x"))
        assert (over.truncated, over.exit_code) == (True, 0)
        assert "of 30000000 bytes left out" in over.stdout

    driver.run(body, Environment(max_output_bytes=100))


def test_a_time_limit_takes_setsid_children_along_and_leaves_files(driver, marker):
    daemon = f"setsid sh -c 'trap : TERM INT HUP; : > up; sleep 99; : {marker}' >&- 2>&- <&- &"

    async def body(sandbox):
        await shell(sandbox, f"{daemon} while [ ! -e up ]; do :; done")
        while len(processes_named(marker)) != 1:  # It forks for its sleep.
            await asyncio.sleep(0)
        script = f"{daemon} (echo begun; sleep 60) | tee log; echo ended"
        started = time.monotonic()
        result = await sandbox.exec(("sh", "-c", script), timeout_s=0.5)
        assert time.monotonic() - started < 10
        assert (result.exit_code, result.cause) == (None, Cause.TIMED_OUT)
        assert not result.memory_lost
        assert result.stdout == "begun\n"
        assert processes_named(marker) == []
        after = [await sandbox.exec(("sh", "-c", "pgrep -c sleep; cat log; ls")) for _ in range(2)]
        assert [result.stdout for result in after] == ["0\nbegun\nlog\nup\n"] * 2
        assert [result.memory_lost for result in after] == [True, False]

    driver.run(body)


def test_a_cancelled_command_is_killed_and_the_sandbox_stays(driver, marker):
    async def body(sandbox):
        script = f"echo up > up; sleep 60 # {marker}"
        task = asyncio.ensure_future(sandbox.exec(("sh", "-c", script), timeout_s=50))
        while await sandbox.read("up", max_bytes=9) != b"up\n":
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while processes_named(marker):
            await asyncio.sleep(0)
        assert await shell(sandbox, "cat up") == "up\n"

    driver.run(body)


def test_commands_of_one_sandbox_may_overlap(driver):
    async def body(sandbox):
        results = await asyncio.gather(*(shell(sandbox, f"echo {i} > f{i}") for i in range(4)))
        assert results == [""] * 4
        assert await shell(sandbox, "cat f*") == "0\n1\n2\n3\n"

    driver.run(body)


# --- stopping ---------------------------------------------------------------------------------


def test_frozen_time_does_not_count_and_nothing_moves(driver, marker):
    if not driver.can.freezes:
        pytest.skip("it cannot freeze")
    count = f"i=0; while :; do i=$((i+1)); echo $i > $0; done # {marker}"

    async def counting(sandbox):
        """A command that counts, and where; on a busy machine its time may end before that."""
        for name in map(str, itertools.count()):
            command = sandbox.exec(("sh", "-c", count, name), timeout_s=0.8)
            running = asyncio.ensure_future(command)
            while not running.done():
                if await sandbox.read(name, max_bytes=9):
                    return running, name
                await asyncio.sleep(0)

    async def body(sandbox):
        running, n = await counting(sandbox)
        await sandbox.freeze()
        before = await sandbox.read(n, max_bytes=20)
        waiting = asyncio.ensure_future(shell(sandbox, "true"))
        _, pending = await asyncio.wait([running, waiting], timeout=1.0)
        assert len(pending) == 2, "the limit ran on, or a command ran in a frozen sandbox"
        assert await sandbox.read(n, max_bytes=20) == before
        await sandbox.thaw()
        await waiting
        result = await running
        assert result.timed_out
        assert 0.7 < result.duration_s < 5
        again = asyncio.ensure_future(sandbox.exec(("sh", "-c", f"sleep 60 # {marker}")))
        while not processes_named(marker):
            await asyncio.sleep(0)
        await sandbox.freeze()
        await sandbox.kill()
        assert (await again).cause is Cause.KILLED
        assert processes_named(marker) == []
        assert await shell(sandbox, f"test -e {n} && echo on") == "on\n"
        await sandbox.freeze()

    driver.run(body)


def test_a_command_that_waits_for_a_thaw_has_all_its_time_and_can_be_killed(driver):
    if not driver.can.freezes:
        pytest.skip("it cannot freeze")

    async def body(sandbox):
        await sandbox.freeze()
        waiting = asyncio.ensure_future(sandbox.exec(("echo", "ran"), timeout_s=1.0))
        _, pending = await asyncio.wait([waiting], timeout=1.1)
        assert pending
        await sandbox.thaw()
        assert (await waiting).stdout == "ran\n"
        await sandbox.freeze()
        waiting = asyncio.ensure_future(sandbox.exec(("sh", "-c", "echo > made")))
        await asyncio.wait([waiting], timeout=0.05)
        await sandbox.kill()
        assert (await waiting).cause is Cause.KILLED
        assert await sandbox.read("made", max_bytes=1) is None

    driver.run(body)


def test_sealing_ends_every_process(driver, marker):
    async def body():
        async with driver.lease() as sandbox:
            script = f"echo up > up; while :; do echo x >> log; done # {marker}"
            running = asyncio.ensure_future(sandbox.exec(("sh", "-c", script)))
            while await sandbox.read("up", max_bytes=9) != b"up\n":
                await asyncio.sleep(0)
            sealed = await sandbox.seal()
            assert processes_named(marker) == []
            assert (await running).exit_code is None
            with pytest.raises(SandboxError, match="sealed"):
                await sandbox.exec(("true",))
            with pytest.raises(SandboxError, match="sealed"):
                await sandbox.write("new", b"")
        assert await sealed.read("log", max_bytes=2) == b"x\n"
        await sealed.close()

    asyncio.run(body())


def test_closing_ends_every_process_and_whoever_waits_is_told(driver, marker):
    async def body(sandbox):
        running = asyncio.ensure_future(sandbox.exec(("sh", "-c", f": > up; sleep 9 # {marker}")))
        while await sandbox.read("up", max_bytes=9) is None:
            await asyncio.sleep(0)
        await sandbox.close()
        await sandbox.close()
        assert processes_named(marker) == []
        assert (await running).cause is Cause.KILLED

    driver.run(body)


# --- limits -----------------------------------------------------------------------------------

SMALL = Environment(memory_bytes=128 << 20, disk_bytes=4 << 20, max_processes=12)
FORKS = """
import os, signal
made = []
try:
    for _ in range(40):
        pid = os.fork()
        if pid == 0: signal.pause()
        made.append(pid)
except OSError as error: print(type(error).__name__, len(made))
"""


def test_memory_and_processes_are_limited_and_the_sandbox_stays_usable(driver):
    hungry = "python3 -c 'x = bytearray(80 << 20); import time; time.sleep(30)'"

    async def body(sandbox):
        result = await sandbox.exec(("python3", "-c", "x = b'x' * (200 << 20)"))
        assert (result.exit_code, "MemoryError" in result.stderr) == (1, True), result
        result = await sandbox.exec(("python3", "-c", FORKS))
        error, made = result.stdout.split()
        assert (error, int(made) - driver.spare <= 11, int(made) >= 11) == (
            "BlockingIOError", True, True
        )  # fmt: skip
        full = await sandbox.exec(("sh", "-c", "true & wait"))
        assert "fork" in full.stderr, full
        await sandbox.kill()
        if driver.can.limits is Bound.TREE:
            line = f"{hungry} & {hungry} & wait -n; exit 9"
            result = await sandbox.exec(("bash", "-c", line))
            assert result.cause is Cause.OUT_OF_MEMORY, result
            assert not os.path.exists("oom"), "a monitor of podman left its note here"
            await sandbox.kill()
            result = await sandbox.exec(("sh", "-c", "kill -9 $$"))
            assert result.cause is Cause.SIGNALLED
        assert await shell(sandbox, "echo fine") == "fine\n"

    driver.run(body, SMALL)


def test_every_writable_place_is_on_one_small_disk(driver):
    fill = "for i in 1 2 3 4 5 6; do head -c 1048576 /dev/zero > part$i || break; done"
    places = "/dev / /etc /usr /run /sys /proc"

    async def body(sandbox):
        for folder in ("/workspace", "/tmp", "/dev/shm"):
            script = f"cd {folder}; {fill}; cat part* | wc -c; rm part*"
            result = await sandbox.exec(("sh", "-c", script))
            assert int(result.stdout) <= 4 << 20
            assert "No space" in result.stderr
        script = f"for d in {places}; do echo x > $d/new; mkdir $d/new; done; exit 5"
        refused = await sandbox.exec(("sh", "-c", script))
        assert refused.exit_code == 5
        assert len(refused.stderr.splitlines()) == 2 * len(places.split()), refused
        result = await sandbox.exec(("sh", "-c", "head -c 3000000 /dev/zero > /tmp/a; exit 0"))
        assert not result.disk_full
        with pytest.raises(OSError, match="space"):
            await sandbox.write("c", bytes(3_000_000))
        assert (await sandbox.exec(("sh", "-c", "cat /dev/zero > b; exit 3"))).disk_full
        assert 3_900_000 <= (await sandbox.usage()).disk_bytes <= 4 << 20
        await shell(sandbox, "rm /tmp/a b c")
        await sandbox.write("c", bytes(3_000_000))

    driver.run(body, SMALL)


# --- what is sealed ---------------------------------------------------------------------------

LEFT = """
mkdir -p out deep && echo answer > out/file.txt && ln -s /etc/passwd passwd
ln -s out/file.txt alias && ln -s out folder && ln -s /workspace/expected.txt result.txt
mkfifo pipe out/pipe && chmod 000 deep && touch "$(printf 'two\\nlines')"
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'
truncate -s 40M sparse && echo end >> sparse && echo one > first && ln first second
i=0; while [ $i -lt 90 ]; do mkdir n && cd n || break; i=$((i+1)); done; echo low > low
"""


def test_sealed_files_are_read_and_shown_without_following_links(driver):
    async def body():
        async with driver.lease() as sandbox:
            await shell(sandbox, LEFT)
            sealed = await sandbox.seal()
        assert await sealed.read("out/file.txt", max_bytes=3) == b"ans"
        assert await sealed.read("two\nlines", max_bytes=3) == b""
        for path in ("passwd", "alias", "folder/file.txt", "result.txt", "pipe", "out", "..", "x"):
            assert await sealed.read(path, max_bytes=100) is None
        found = {entry.path: entry for entry in await sealed.entries(max_entries=999)}
        assert not {"pipe", "out/pipe", "socket"} & found.keys()
        assert (found["alias"].kind, found["deep"].mode) == (EntryKind.LINK, 0)
        assert found["sparse"].size == (40 << 20) + 4
        async with driver.lease(files={"expected.txt": "wanted"}, beside=sealed) as checker:
            await sealed.close()

            async def sh(line):
                return await checker.exec(("sh", "-c", line))

            assert (await sh("cat /artefacts/out/file.txt; ls; cat expected.txt")).stdout == (
                "answer\nexpected.txt\nwanted"
            )
            for line in (": > /artefacts/new", "rm /artefacts/alias", "chmod 777 /artefacts/out"):
                assert "Read-only" in (await sh(line)).stderr
            # A planted link to the checker's own expected answer leads nowhere.
            assert (await sh("readlink /artefacts/result.txt")).stdout.endswith("/expected.txt\n")
            assert (await sh("cat /artefacts/result.txt")).exit_code == 1
            assert (await sh("cat /artefacts/folder/file.txt")).exit_code == 1
            await checker.kill()
            assert (await sh("cat /artefacts/first")).stdout == "one\n"

    asyncio.run(body())


def test_a_sandbox_goes_on_from_its_snapshot_and_others_begin_there(driver, marker):
    async def body():
        async with driver.lease(files={"a": "given"}) as first:
            await shell(first, f"{LEFT}\ncd /workspace; echo t > /tmp/t; sleep 99 & # {marker}")
            snapshot = await first.snapshot()
            assert processes_named(marker) == []
            await shell(first, "echo two > first; rm -r out; echo late > late")
            async with driver.lease(over=snapshot) as second:
                line = "cat a first second out/file.txt alias /tmp/t; readlink result.txt"
                shown = "givenone\none\nanswer\nanswer\nt\n/workspace/expected.txt\n"
                result = await second.exec(("sh", "-c", line))
                assert (result.stdout, result.memory_lost) == (shown, True)
                status = "stat -c %h,%b first sparse; ls -A deep 2>/dev/null | wc -l"
                links, sparse, _ = (await shell(second, status)).split()
                assert links.startswith("2,")
                assert int(sparse.partition(",")[2]) <= 16, "a hole was filled"
                await shell(second, "rm a; mv out e; echo three >> second")
                linked = "" if driver.can.snapshots is Snapshots.LAYERS else "three\n"
                shown = f"one\n{linked}answer\n"  # An overlay copies the one name that changes.
                assert await shell(second, "cat first e/file.txt") == shown
            assert await shell(first, "cat first late; test -e out || echo gone") == (
                "two\nlate\ngone\n"
            )
        assert await snapshot.read("first", max_bytes=9) == b"one\n"
        assert await snapshot.read("late", max_bytes=9) is None
        await snapshot.close()

    asyncio.run(body())


def test_snapshots_stack_and_outlive_the_handles_of_those_below(driver):
    levels = 12 if driver.can.snapshots is Snapshots.LAYERS else 2

    async def body():
        snapshot = None
        for number in range(levels):
            async with driver.lease(**{"over": snapshot} if snapshot else {}) as sandbox:
                await shell(sandbox, f"echo {number} >> log; echo {number} > f{number % 2}")
                if snapshot is not None:
                    await snapshot.close()
                snapshot = await sandbox.snapshot()
        async with AsyncExitStack() as stack:
            forks = [
                await stack.enter_async_context(driver.lease(over=snapshot)) for _ in range(levels)
            ]
            for number, fork in enumerate(forks):
                await shell(fork, f"echo fork {number} >> log")
            texts = [await shell(fork, "cat log; cat f0 f1 | wc -l") for fork in forks]
        counted = "".join(f"{number}\n" for number in range(levels))
        assert texts == [f"{counted}fork {number}\n2\n" for number in range(levels)]
        await snapshot.close()

    asyncio.run(body())


MANY = """
try:
    for number in range(1_000_000): open(f"n{number}", "w").close()
except OSError: print(number)
"""


def test_a_full_disk_of_a_great_many_files_can_be_sealed(driver):
    async def body():
        async with driver.lease(disk_bytes=4 << 20) as sandbox:
            await sandbox.write("kept", b"kept\n")
            result = await sandbox.exec(("python3", "-c", MANY))
            assert result.disk_full
            assert 500 < int(result.stdout) <= 1024
            sealed = await sandbox.seal()
        assert await sealed.read("kept", max_bytes=9) == b"kept\n"
        assert len(await sealed.entries(max_entries=100)) == 100
        await sealed.close()

    asyncio.run(body())


# --- set-up and guards ------------------------------------------------------------------------


def test_a_set_up_runs_once_for_all_leases_of_its_environment(driver):
    environment = Environment(
        setup=("cat /proc/sys/kernel/random/uuid > made; echo 1 >> log", "echo 2 >> log"),
        read_only=("made",),
    )

    async def made(given):
        async with driver.source.lease(given) as sandbox:
            assert await sandbox.read("log", max_bytes=9) == b"1\n2\n"
            return await sandbox.read("made", max_bytes=99)

    async def body():
        before = driver.source.prepared
        first, *others = await asyncio.gather(*(made(environment) for _ in range(3)))
        assert others == [first] * 2
        assert driver.source.prepared == before + 1
        async with driver.source.lease(environment) as sandbox:
            assert (await sandbox.exec(("sh", "-c", "echo x > made"))).exit_code != 0

    asyncio.run(body())


FILES = {
    "kept/a": "1", "kept/deep/b": "2", "secret/key": "k", "note": "n", "free": "f",
    "d/e/kept": "1", "d/key": "k",
}  # fmt: skip
GUARDED = Environment(
    files=FILES,
    read_only=("kept", "note", "d/e/kept"),
    hidden=("secret", "d/key", "/usr/bin/find", "/usr/no-such-thing"),
)
REFUSED = (
    "echo x > kept/a", "echo x > kept/new", "rm kept/deep/b", "rm note", "rm -r kept",
    "mv note n", "chmod 777 note", "echo x >> note", "ln kept/a here",
    "mv d moved", "mv d/e moved", "rm -rf d", "rmdir d", "/usr/bin/find .", "ls secret | grep key",
)  # fmt: skip


async def is_guarded(sandbox):
    script = "".join(f"({line}) >&- 2>&- && echo '{line}'\n" for line in REFUSED)
    assert await shell(sandbox, f"{script} true") == ""
    line = "cat kept/a kept/deep/b note free d/e/kept d/key; ls -A secret"
    assert await shell(sandbox, line) == "12nf1"
    await shell(sandbox, "echo f > free; mkdir -p new; echo n > d/e/new; mv d/e/new d/e/n")
    await shell(sandbox, "printf f > free; rm -r new")
    with pytest.raises(OSError, match="Read-only"):
        await sandbox.write("kept/a", b"changed")
    assert await sandbox.read("secret/key", max_bytes=9) is None


def test_guards_hold_for_commands_also_after_a_snapshot_and_not_for_checkers(driver):
    async def body():
        async with driver.source.lease(GUARDED) as sandbox:
            await is_guarded(sandbox)
            snapshot = await sandbox.snapshot()
            await is_guarded(sandbox)
            sealed = await sandbox.seal()
        async with driver.source.lease(GUARDED, over=snapshot) as other:
            await is_guarded(other)
        assert await sealed.read("secret/key", max_bytes=9) == b"k"
        async with driver.lease(beside=sealed) as checker:
            assert await shell(checker, "cat /artefacts/note /artefacts/d/key") == "nk"
        for each in (sealed, snapshot):
            await each.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"read_only": ("absent",)}, SandboxError),
        ({"read_only": ("../out",)}, UsageError),
        ({"hidden": ("/proc/cpuinfo",)}, UsageError),
        ({"hidden": ("/usr/../etc",)}, UsageError),
    ],
)
def test_a_guard_that_cannot_be_is_refused(driver, change, error):
    async def body():
        async with driver.lease(**change):
            raise AssertionError("never reached")

    before = driver.source.stats().open
    with pytest.raises(error):
        asyncio.run(body())
    assert driver.source.stats().open == before


def test_nothing_of_the_host_is_seen(driver, marker, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", marker)

    async def body(sandbox):
        script = (
            "cat /etc/shadow /proc/1/environ; ls /root /home /var /code/posttrain/sandbox /python; "
            "cat /proc/[0-9]*/environ; id -un; ls / | tr '\\n' ' '; "
            "grep -h CapEff /proc/self/status; ls /sys/class/net 2>/dev/null"
        )
        result = await sandbox.exec(("sh", "-c", script))
        assert marker not in result.stdout + result.stderr
        assert "root:" not in result.stdout
        assert "agent\n" in result.stdout
        assert "container.py" not in result.stdout
        if "CapEff" in result.stdout:
            assert "CapEff:\t0000000000000000" in result.stdout
        assert set(result.stdout.partition("CapEff")[2].split()[2:]) <= {"lo"}
        wide = await sandbox.exec(("unshare", "-r", "true"))
        assert wide.exit_code != 0
        kernel = await sandbox.exec(("python3", "-c", "import socket; socket.socket(40, 1)"))
        assert kernel.exit_code == 1

    assert os.environ["SECRET_OF_THE_PARENT"] == marker
    driver.run(body)
