"""Sessions: state that stays from command to command, as commands of any sandbox.

A *shell* session is a directory and exported variables. No shell waits for input between lines:
each line is a shell of its own that begins with what the one before left, written beside the
workspace in the sandbox itself. So nothing a line does (an open quote, a printed end marker,
`exit`) can mix it up with the next, and a snapshot brings the session along. Functions, options and
unexported variables do not stay. A *Python* session is an interpreter that lives on in the sandbox
(`resident`) until it or the sandbox's processes end; what it held is then lost, and the next call
says so. The one thing that must stay true: a line that fails or meets its limit leaves the shell
session as it was or as it ended, never in between.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = "/tmp/.sessions"
_SCRIPT = r"""
state=$1 line=$2
save() {
  { { declare -px; printf 'cd -- %q\n' "$PWD"; } > "$state.new" && mv -f "$state.new" "$state"
  } 2>/dev/null || echo "[directory and variables of this line could not be kept]" >&2
}
problem=$(bash -n -c "$line" 2>&1)
if [ -n "$problem" ]; then printf '%s\n' "$problem" >&2; exit 2; fi
[ -d "${state%/*}" ] || mkdir -p "${state%/*}" 2>/dev/null
if [ -r "$state" ]; then . "$state" 2>/dev/null; fi
trap save EXIT
set -- && eval "$line"
"""
"""The check before tells an unfinished here-document, which `eval` would end by itself."""
_RESIDENT = Path(__file__).with_name("resident.py").read_text(encoding="utf-8")


def shell(line: str, *, name: str = "shell") -> tuple[str, ...]:
    """The command that runs a line (it may hold several, here-documents too) in the session of a
    name; it gives 2 and a message where the line is not whole.
    """
    return ("bash", "-c", _SCRIPT, "bash", f"{_FOLDER}/{name}", line)


def python() -> tuple[str, ...]:
    """The command that runs the code on its standard input in the Python session: 0, 1 after an
    exception, or what the code exits with. The value of a last expression is shown.
    """
    return ("python3", "-I", "-S", "-c", "import sys; exec(sys.argv[1])", _RESIDENT)
