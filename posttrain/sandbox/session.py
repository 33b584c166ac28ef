"""A shell session: directory and exported variables stay from line to line.

No shell waits for input between lines: each line is a shell of its own that begins with what the
one before left, written beside the workspace in the sandbox itself. So nothing a line does (an open
quote, a printed end marker, `exit`) can mix it up with the next, and a snapshot brings the session
along. Functions, options and unexported variables do not stay. The one thing that must stay true: a
line that fails or meets its limit leaves the session as it was or as it ended, never in between.
"""

from __future__ import annotations

from posttrain.core.containment import ExecResult, Sandbox

_FOLDER = "/tmp/.sessions"
_SCRIPT = r"""
state=$1 line=$2
save() {
  { declare -px; printf 'cd -- %q\n' "$PWD"; } > "$state.new" && mv -f "$state.new" "$state"
} 2>/dev/null
problem=$(bash -n -c "$line" 2>&1)
if [ -n "$problem" ]; then printf '%s\n' "$problem" >&2; exit 2; fi
mkdir -p "${state%/*}" 2>/dev/null
if [ -r "$state" ]; then . "$state" 2>/dev/null; fi
trap save EXIT
set -- && eval "$line"
"""
"""The check before tells an unfinished here-document, which `eval` would end by itself."""


class Shell:
    """A session over a sandbox, or over one that goes on from a snapshot of it."""

    def __init__(self, sandbox: Sandbox, *, name: str = "shell") -> None:
        self._sandbox = sandbox
        self._state = f"{_FOLDER}/{name}"

    async def run(
        self, line: str, *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        """Run one line (it may hold several, here-documents too); 2 and a message where it is not
        whole.

        Raises:
            SandboxError: the sandbox was lost.
        """
        argv = ("bash", "-c", _SCRIPT, "bash", self._state, line)
        return await self._sandbox.exec(argv, timeout_s=timeout_s, stdin=stdin)
