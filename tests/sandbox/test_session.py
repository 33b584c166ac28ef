"""Shell sessions: what stays, and what cannot mix two lines up (BR-40)."""

import pytest

from posttrain.core.task import Environment
from posttrain.sandbox.session import Shell


def test_directory_and_exported_variables_stay_and_nothing_else(inside):
    async def body(sandbox):
        shell = Shell(sandbox)
        assert (
            await shell.run("mkdir -p a/b && cd a/b; export X='1 2'; Y=3; f() { :; }")
        ).exit_code == 0
        result = await shell.run('echo "$PWD [$X] [$Y]"; type f')
        assert result.stdout == "/workspace/a/b [1 2] []\n"
        assert (await Shell(sandbox, name="other").run("pwd")).stdout == "/workspace\n"

    inside(body)


@pytest.mark.parametrize(
    ("line", "exit_code", "told"),
    [
        ("cat > f <<'EOF'\none\ntwo\nthree\nEOF", 0, ""),
        ("cat > g <<EOF\none\n  EOF", 2, "here-document"),
        ("echo 'open", 2, "unexpected EOF"),
        ("exit 3", 3, ""),
        ("echo end-of-command; echo __END__; printf '\\0'", 0, ""),
        ("if true", 2, "syntax error"),
        ("exec false", 1, ""),
    ],
)
def test_no_line_spoils_the_next(inside, line, exit_code, told):
    async def body(sandbox):
        shell = Shell(sandbox)
        await shell.run("mkdir d; cd d; export KEPT=yes")
        result = await shell.run(line)
        assert result.exit_code == exit_code, result
        assert told in result.stderr
        after = await shell.run("echo ok $KEPT; pwd", timeout_s=1.0)
        assert after.stdout == "ok yes\n/workspace/d\n"
        if line.startswith("cat > f"):
            assert await sandbox.read("d/f", max_bytes=99) == b"one\ntwo\nthree\n"

    inside(body)


def test_a_line_that_meets_its_limit_leaves_the_session_as_it_was(inside):
    async def body(sandbox):
        shell = Shell(sandbox)
        await shell.run("export A=1")
        result = await shell.run("export A=2; cd /tmp; read forever < /dev/zero", timeout_s=0.3)
        assert result.timed_out
        assert (await shell.run("echo $A; pwd")).stdout == "1\n/workspace\n"

    inside(body)


def test_a_session_goes_on_from_a_snapshot(sandboxes):
    import asyncio

    async def body():
        async with sandboxes.lease(Environment()) as sandbox:
            await Shell(sandbox).run("mkdir here; cd here; export N=5")
            snapshot = await sandbox.snapshot()
            await Shell(sandbox).run("export N=6")
            async with sandboxes.lease(Environment(), over=snapshot) as other:
                assert (await Shell(other).run("echo $N; pwd")).stdout == "5\n/workspace/here\n"
            assert (await Shell(sandbox).run("echo $N")).stdout == "6\n"
            await snapshot.close()

    asyncio.run(body())


def test_a_deleted_directory_and_a_spoilt_state_are_survived(inside):
    async def body(sandbox):
        shell = Shell(sandbox)
        await shell.run("mkdir gone; cd gone")
        await shell.run("cd ..; rmdir gone; mkdir gone; cd gone; rmdir ../gone")
        assert (await shell.run("echo ok")).stdout == "ok\n"
        await shell.run("head -c 1000 /dev/urandom > /tmp/.sessions/shell; kill -9 $$")
        assert (await shell.run("echo ok")).stdout.endswith("ok\n")

    inside(body)
