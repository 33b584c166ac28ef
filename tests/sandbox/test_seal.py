"""What an attempt left: read without links, mounted beside, never as a root."""

import asyncio

import pytest

from posttrain.core.errors import SandboxError, UsageError
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.scripted import ScriptedSandboxes
from tests.sandbox.conftest import processes_named

LEFT = """
mkdir -p out deep && echo answer > out/file.txt && ln -s /etc/passwd passwd
ln -s out/file.txt alias && ln -s out folder && ln -s /workspace/expected.txt result.txt
mkfifo pipe out/pipe && chmod 000 deep
"""


def test_sealed_files_are_read_without_following_links(sandboxes):
    async def body():
        async with sandboxes.lease(Environment()) as sandbox:
            assert (await sandbox.exec(("sh", "-c", LEFT))).exit_code == 0
            sealed = await sandbox.seal()
        assert await sealed.read("out/file.txt", max_bytes=100) == b"answer\n"
        assert await sealed.read("out/file.txt", max_bytes=3) == b"ans"
        for path in ("passwd", "alias", "folder/file.txt", "result.txt", "pipe", "out", "..", "x"):
            assert await sealed.read(path, max_bytes=100) is None
        await sealed.close()
        await sealed.close()
        with pytest.raises(SandboxError, match="closed"):
            await sealed.read("out/file.txt", max_bytes=1)

    asyncio.run(body())


def test_sealed_trees_are_mounted_beside_a_fresh_sandbox(sandboxes):
    async def body():
        async with sandboxes.lease(Environment()) as sandbox:
            await sandbox.exec(("sh", "-c", LEFT))
            sealed = await sandbox.seal()
        checks = Environment(files={"expected.txt": "the answer"})
        async with sandboxes.lease(checks, beside=sealed) as checker:
            await sealed.close()

            async def sh(line):
                return await checker.exec(("sh", "-c", line))

            assert (await sh("cat /artefacts/out/file.txt")).stdout == "answer\n"
            assert (await sh("pwd; ls")).stdout == "/workspace\nexpected.txt\n"
            for line in (": > /artefacts/new", "rm /artefacts/alias", "chmod 777 /artefacts/out"):
                result = await sh(line)
                assert "Read-only" in result.stderr, result
            # A planted link to the checker's own expected answer leads nowhere.
            assert (await sh("readlink /artefacts/result.txt")).stdout.endswith("expected.txt\n")
            assert (await sh("cat /artefacts/result.txt")).exit_code == 1
            assert (await sh("cat /artefacts/folder/file.txt")).exit_code == 1
            assert (await sh("find /artefacts -type p")).stdout == ""

    asyncio.run(body())


def test_sealing_ends_every_process_and_closes_the_sandbox(sandboxes, marker):
    async def body():
        async with sandboxes.lease(Environment()) as sandbox:
            script = f"echo up > up; while :; do echo x >> log; done # {marker}"
            running = asyncio.ensure_future(sandbox.exec(("sh", "-c", script)))
            while await sandbox.read("up", max_bytes=9) != b"up\n":
                await asyncio.sleep(0)
            sealed = await sandbox.seal()
            assert processes_named(marker) == []
            assert (await running).exit_code is None
            before = await sealed.read("log", max_bytes=1 << 26)
            assert before == await sealed.read("log", max_bytes=1 << 26)
            with pytest.raises(SandboxError, match="not open"):
                await sandbox.seal()
            with pytest.raises(SandboxError, match="sealed"):
                await sandbox.write("new", b"")
            with pytest.raises(SandboxError, match="sealed"):
                await sandbox.exec(("true",))
        await sealed.close()

    asyncio.run(body())


def test_a_full_disk_and_unreadable_folders_can_be_sealed(sandboxes):
    async def body():
        async with sandboxes.lease(Environment(disk_bytes=1 << 20)) as sandbox:
            script = "echo kept > kept; mkdir no && mkfifo no/p && chmod 000 no; cat /dev/zero > z"
            await sandbox.exec(("sh", "-c", script))
            sealed = await sandbox.seal()
        assert await sealed.read("kept", max_bytes=9) == b"kept\n"
        await sealed.close()

    asyncio.run(body())


def test_only_a_workspace_of_the_same_source_can_be_mounted(sandboxes):
    async def body():
        async with ScriptedSandboxes().lease(Environment()) as scripted:
            foreign = await scripted.seal()
        with pytest.raises(UsageError, match="this source"):
            async with sandboxes.lease(Environment(), beside=foreign):
                pass
        async with BubblewrapSandboxes() as other, other.lease(Environment()) as sandbox:
            sealed = await sandbox.seal()
            with pytest.raises(UsageError, match="this source"):
                async with sandboxes.lease(Environment(), beside=sealed):
                    pass

    asyncio.run(body())
