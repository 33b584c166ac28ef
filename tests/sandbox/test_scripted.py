import asyncio

import pytest

from posttrain.core.containment import ExecResult
from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment
from posttrain.sandbox.scripted import ScriptedSandboxes, answers


def test_commands_change_files_and_sealed_files_outlive_the_lease():
    def script(command):
        command.files["out.txt"] = command.stdin + b"!"
        return ExecResult(exit_code=0, stdout=command.line, stderr="")

    async def body():
        source = ScriptedSandboxes(script)
        async with source.lease(Environment(files={"a.txt": "hi"})) as sandbox:
            assert await sandbox.read("a.txt", max_bytes=1) == b"h"
            result = await sandbox.exec(("sh", "-c", "work"), stdin=b"in")
            assert result.stdout == "work"
            sealed = await sandbox.seal()
            with pytest.raises(SandboxError, match="not open"):
                await sandbox.exec(("true",))
        assert source.stats().sealed == 1
        async with source.lease(Environment(), beside=sealed) as checker:
            await checker.exec(("look",))
            assert source.executed[-1].artefacts == {"a.txt": b"hi", "out.txt": b"in!"}
        await sealed.close()
        await sealed.close()
        with pytest.raises(SandboxError, match="closed"):
            await sealed.read("out.txt", max_bytes=1)
        source.check()
        assert (source.stats().open, source.stats().sealed, source.stats().closed) == (0, 0, 2)

    asyncio.run(body())


def test_unknown_commands_are_not_found_and_scripted_failures_are_raised():
    async def body():
        lost = SandboxError("lost")
        source = ScriptedSandboxes(answers({"die": lost}), failures=[SandboxError("no room")])
        with pytest.raises(SandboxError, match="no room"):
            async with source.lease(Environment()):
                pass
        async with source.lease(Environment()) as sandbox:
            assert (await sandbox.exec(("nope",))).exit_code == 127
            with pytest.raises(SandboxError, match="lost"):
                await sandbox.exec(("die",))
        assert source.stats().open == 0

    asyncio.run(body())


def test_lost_memory_is_told_as_by_a_real_sandbox():
    late = ExecResult(exit_code=None, stdout="", stderr="", timed_out=True)
    fine = ExecResult(exit_code=0, stdout="", stderr="")

    async def body():
        source = ScriptedSandboxes(answers({"late": late, "fine": fine}))
        async with source.lease(Environment()) as sandbox:
            snapshot = await sandbox.snapshot()
            told = [(await sandbox.exec((word,))).memory_lost for word in ("fine", "late", "fine")]
            assert told == [False, False, True]
            await sandbox.kill()
            assert (await sandbox.exec(("fine",))).memory_lost
            await (await sandbox.snapshot()).close()
            assert (await sandbox.exec(("fine",))).memory_lost
            assert not (await sandbox.exec(("fine",))).memory_lost
        async with source.lease(Environment(), over=snapshot) as fork:
            assert (await fork.exec(("fine",))).memory_lost
        await snapshot.close()

    asyncio.run(body())
