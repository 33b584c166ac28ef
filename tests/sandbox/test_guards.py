"""What a task lets commands change and see."""

import asyncio

import pytest

from posttrain.core.errors import SandboxError, UsageError
from posttrain.core.task import Environment

FILES = {"kept/a": "1", "kept/deep/b": "2", "secret/key": "k", "note": "n", "free": "f"}
GUARDED = Environment(files=FILES, read_only=("kept", "note"), hidden=("secret", "/usr/bin/find"))


async def shell(sandbox, line):
    return await sandbox.exec(("sh", "-c", line))


async def is_guarded(sandbox):
    assert (await shell(sandbox, "cat kept/a kept/deep/b note free")).stdout == "12nf"
    for line in (
        "echo x > kept/a", "echo x > kept/new", "rm kept/deep/b", "rm note", "rm -r kept",
        "mv note n", "chmod 777 note", "echo x >> note", "ln kept/a here",
    ):  # fmt: skip
        assert (await shell(sandbox, line)).exit_code != 0, line
    assert (await shell(sandbox, "ls -A secret; cat secret/key")).stdout == ""
    assert (await sandbox.exec(("/usr/bin/find", "."))).exit_code == 126
    with pytest.raises(OSError, match="Read-only"):
        await sandbox.write("kept/a", b"changed")
    assert (await shell(sandbox, "echo x > free; mkdir new; echo y > new/z")).exit_code == 0


def test_paths_are_read_only_and_hidden_for_commands_and_not_for_checkers(sandboxes):
    async def body():
        async with sandboxes.lease(GUARDED) as sandbox:
            await is_guarded(sandbox)
            await sandbox.kill()
            assert (await shell(sandbox, "rm note")).exit_code != 0
            sealed = await sandbox.seal()
        assert await sealed.read("kept/a", max_bytes=9) == b"1"
        async with sandboxes.lease(Environment(), beside=sealed) as checker:
            assert (await shell(checker, "cat /artefacts/note")).stdout == "n"
        await sealed.close()

    asyncio.run(body())


def test_set_up_comes_before_the_guards(inside):
    async def body(sandbox):
        assert (await shell(sandbox, "cat kept")).stdout == "made\n"
        assert (await shell(sandbox, "echo x > kept")).exit_code != 0

    inside(body, Environment(setup=("echo made > kept",), read_only=("kept",)))


def test_guards_are_up_after_a_snapshot_and_in_what_goes_on_from_it(sandboxes):
    async def body():
        async with sandboxes.lease(GUARDED) as sandbox:
            snapshot = await sandbox.snapshot()
            await is_guarded(sandbox)
            async with sandboxes.lease(GUARDED, over=snapshot) as other:
                await is_guarded(other)
            await snapshot.close()

    asyncio.run(body())


def test_what_is_guarded_stays_at_its_place(sandboxes):
    """Whoever renamed a folder on the way could read what is hidden in it after a snapshot, and put
    something else where the read-only file was.
    """
    files = {"d/e/kept": "1", "d/key": "k", "d/free": "f"}
    environment = Environment(files=files, read_only=("d/e/kept",), hidden=("d/key",))

    async def body():
        async with sandboxes.lease(environment) as sandbox:
            for _ in range(2):
                for line in ("mv d moved", "mv d/e moved", "rm -rf d", "rmdir d"):
                    assert (await shell(sandbox, line)).exit_code != 0, line
                assert (await shell(sandbox, "cat d/e/kept d/key; ls d")).stdout == "1e\nkey\n"
                assert (await shell(sandbox, "echo n > d/e/new; mv d/e/new d/e/n")).exit_code == 0
                snapshot = await sandbox.snapshot()
                await snapshot.close()

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
def test_a_guard_that_cannot_be_is_refused(sandboxes, change, error):
    async def body():
        async with sandboxes.lease(Environment(**change)):
            raise AssertionError("never reached")

    before = sandboxes.stats().open
    with pytest.raises(error):
        asyncio.run(body())
    assert sandboxes.stats().open == before
