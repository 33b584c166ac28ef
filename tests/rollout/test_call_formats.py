import json
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.containment import ExecResult
from posttrain.core.task import Tool, ToolCall
from posttrain.domains.domain import TOOLS
from posttrain.rollout import tools
from posttrain.rollout.text import clean, clean_value, head_and_tail
from posttrain.rollout.tools import CallFormat, Refusal
from tests.rollout.doubles import FILES, SHELL

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=10)
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
PIECES = st.lists(
    st.sampled_from(
        ["ls", " ", "\n", "```", "````", "```sh\n", "\t```", "call: {", "'", "é", "</tool_call>"]
    ),
    min_size=1,
    max_size=8,
).map("".join)
NAMED = st.tuples(
    st.text(min_size=1, max_size=6), ARGUMENTS | PIECES.map(lambda text: {"text": text})
)
BROKEN = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "call: ", '{"name":', '"x"', "}", "[", "\n", "```sh\n"]
    ),
    max_size=12,
).map("".join)


def without_raw(calls):
    return [(call.id, call.name, call.arguments, call.error) for call in calls]


@pytest.mark.parametrize("form", [CallFormat.HERMES, CallFormat.LINE])
@given(
    drawn=st.lists(
        st.tuples(st.text(min_size=1, max_size=6), ARGUMENTS | PIECES.map(lambda p: {"c": p})),
        min_size=1,
        max_size=3,
    )
)
def test_json_calls_are_read_back_as_they_were_written(form, drawn):
    calls = [
        ToolCall(id=f"c{i + 1}", name=clean(name), arguments=clean_value(arguments))
        for i, (name, arguments) in enumerate(drawn)
    ]
    text = "First I look.\n" + tools.write(calls, form, tools=FILES)
    assert without_raw(tools.read(text, form, tools=FILES)) == without_raw(calls)


@given(commands=st.lists(PIECES.filter(str.strip), min_size=1, max_size=3))
def test_shell_blocks_are_read_back_as_they_were_written(commands):
    calls = [
        ToolCall(id=f"c{i + 1}", name="shell", arguments={"command": command})
        for i, command in enumerate(commands)
    ]
    text = "First I look.\n" + tools.write(calls, CallFormat.SHELL, tools=(SHELL,))
    assert without_raw(tools.read(text, CallFormat.SHELL, tools=(SHELL,))) == without_raw(calls)


@pytest.mark.parametrize("form", list(CallFormat))
@given(text=st.text(max_size=60) | PIECES | BROKEN)
def test_reading_never_raises_and_every_unreadable_call_says_why(form, text):
    for call in tools.read(text, form, tools=(SHELL,)):
        assert (call.arguments is None) == (call.error is not None)
        json.dumps(call.arguments)


def hermes(*bodies: str):
    text = "".join(f"<tool_call>{body}</tool_call>" for body in bodies)
    return tools.read(text, CallFormat.HERMES, tools=(SHELL,))


def test_broken_arguments_leave_the_sibling_call_intact():
    """BR-21: c1 is answered with a short error, c2 is a call."""
    broken = json.dumps({"name": "shell", "arguments": '{"cmd": "ls", '})
    good = json.dumps({"name": "shell", "arguments": '{"cmd":"pwd"}'})
    first, second = hermes(broken, good)
    assert (first.id, first.arguments) == ("c1", None)
    assert first.error is not None
    assert first.error.startswith("arguments: not valid JSON")
    assert (second.id, second.arguments, second.error) == ("c2", {"cmd": "pwd"}, None)


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ("[1,2]", "a list"),
        ("null", "null"),
        ("7", "a number"),
        ('"[1,2]"', "a list"),
        ('"null"', "null"),
        (r'"\"x\""', "a string"),
    ],
)
def test_arguments_that_are_no_object_are_malformed(arguments, got):
    (call,) = hermes(f'{{"name": "shell", "arguments": {arguments}}}')
    assert call.arguments is None
    assert call.error == f"arguments: wanted a JSON object, got {got}"


@pytest.mark.parametrize(
    "body",
    [
        '{"x": "' + "y" * 1_000_000,
        "[" * 100_000,
        '{"name": "shell", "arguments": {"n": NaN}}',
        "",
        '{"arguments": {}}',
        '{"name": 3}',
        "1" * 10_000,
    ],
    ids=["a megabyte", "deep", "NaN", "empty", "no name", "name of wrong type", "huge number"],
)
def test_message_about_unreadable_json_is_short(body):
    (call,) = hermes(body)
    refused = tools.refuse(call, (SHELL,))
    assert call.arguments is None
    assert refused is not None
    assert refused.kind is Refusal.MALFORMED
    assert len(refused.message.encode()) <= 2048


@pytest.mark.parametrize("depth", [40, 480, 600, 900, 100_000])
@pytest.mark.parametrize("form", [CallFormat.HERMES, CallFormat.LINE])
def test_arguments_nested_too_deep_are_malformed(form, depth):
    """Nested 500 deep, they raised in `read`, and the attempt became `infra_failed`."""
    body = '{"name": "shell", "arguments": {"command": %s}}' % ("[" * depth + "]" * depth)
    text = f"<tool_call>{body}</tool_call>" if form is CallFormat.HERMES else f"call: {body}"
    (call,) = tools.read(text, form, tools=(SHELL,))
    assert call.arguments is None
    assert call.error


def test_a_number_too_large_for_json_is_malformed():
    (call,) = tools.read(
        'call: {"name": "shell", "arguments": {"command": 1e999}}', CallFormat.LINE, tools=(SHELL,)
    )
    assert call.arguments is None
    assert "1e999 is no JSON number" in str(call.error)


def test_a_long_run_of_blanks_is_read_in_linear_time():
    """100,000 blanks in a call took 28 s of the loop's thread."""
    started_s = time.process_time()
    tools.read("call: x" + " " * 100_000 + "x", CallFormat.LINE, tools=(SHELL,))
    assert time.process_time() - started_s < 2.0


def test_calls_that_are_not_closed_are_malformed():
    (call,) = tools.read("```sh\nrm -r x", CallFormat.SHELL, tools=(SHELL,))
    assert (call.arguments, call.error) == (None, "the block is not closed")
    (call,) = tools.read('<tool_call>{"name": "shell"', CallFormat.HERMES, tools=(SHELL,))
    assert (call.arguments, call.error) == (None, "<tool_call> is not closed")
    (call,) = tools.read("```sh\n\n```", CallFormat.SHELL, tools=(SHELL,))
    assert (call.arguments, call.error) == (None, "the block is empty")


def test_prose_and_blocks_of_other_languages_are_no_calls():
    text = "I would run `ls`.\n```python\nprint()\n```\nDone."
    assert tools.read(text, CallFormat.SHELL, tools=(SHELL,)) == ()
    assert tools.read(text, CallFormat.LINE, tools=FILES) == ()


def test_a_lone_surrogate_in_arguments_becomes_a_replacement_character():
    (call,) = hermes('{"name": "shell", "arguments": {"command": "echo \\ud800"}}')
    assert call.arguments == {"command": "echo �"}
    assert tools.command(call, SHELL).argv == ("bash", "-c", "echo �")


# --- refusing and carrying out ----------------------------------------------------------------


def ended(exit_code, **how):
    return ExecResult(exit_code=exit_code, stdout="", stderr="", **how)


def call_of(name, **arguments):
    return ToolCall(id="c1", name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (call_of("shel", command="ls"), Refusal.UNKNOWN_TOOL, "did you mean 'shell'?"),
        (call_of("python3", code="1"), Refusal.UNKNOWN_TOOL, "Tools: shell, write_file, read_file"),
        (call_of("shell"), Refusal.BAD_ARGUMENTS, "argument 'command' is missing"),
        (call_of("shell", command=3), Refusal.BAD_ARGUMENTS, "must be of type string"),
        (call_of("shell", command="a\0b"), Refusal.BAD_ARGUMENTS, "null character"),
        (call_of("shell", comand="a", command="b"), Refusal.BAD_ARGUMENTS, "no argument 'comand'"),
        (call_of("write_file", path="a"), Refusal.BAD_ARGUMENTS, "argument 'content' is missing"),
    ],
)
def test_calls_that_do_not_fit_are_refused_with_the_reason(call, kind, message):
    refused = tools.refuse(call, FILES[:3])
    assert refused is not None
    assert refused.kind is kind
    assert message in refused.message


def test_boolean_is_no_integer_and_a_list_of_types_is_left_alone():
    several = {"type": ["string", "null"]}
    properties = {"n": {"type": "integer"}, "o": several, "command": {}}
    counted = Tool(name="head", description="", kind="shell", parameters={"properties": properties})
    assert tools.refuse(call_of("head", command="x", n=1, o=None), (counted,)) is None
    assert tools.refuse(call_of("head", command="x", n=True), (counted,)) is not None


def test_each_kind_becomes_a_process_in_the_sandbox():
    shell, write, read, python = FILES
    assert tools.command(call_of("shell", command="ls | wc"), shell).argv == (
        "bash",
        "-c",
        "ls | wc",
    )
    assert tools.command(call_of("python", code="1"), python).argv == ("python3", "-c", "1")
    assert tools.command(call_of("read_file", path="-a"), read).argv[-2:] == ("--", "-a")
    written = tools.command(call_of("write_file", path="a b/c", content="é\n"), write)
    assert written.argv[-1] == "a b/c"
    assert written.stdin == "é\n".encode()


def test_files_are_written_and_read_by_processes_that_start_where_the_attempt_works(tmp_path):
    _, write, read, python = FILES

    def run(call, tool):
        command = tools.command(call, tool)
        return subprocess.run(command.argv, input=command.stdin, cwd=tmp_path, capture_output=True)

    text = "é $HOME `x`\n"
    for path in ("-new/a b/c.txt", "plain"):
        assert run(call_of("write_file", path=path, content=text), write).returncode == 0
        assert (tmp_path / path).read_text() == text
        assert run(call_of("read_file", path=path), read).stdout.decode() == text
    assert run(call_of("read_file", path="gone"), read).returncode != 0
    code = "print(open('plain').read(), end='')"
    assert run(call_of("python", code=code), python).stdout.decode() == text


def test_sessions_are_processes_too_and_a_shell_alone_is_written_as_a_block():
    shell, python = (
        Tool(name=kind, description="", parameters={}, kind=kind)
        for kind in ("shell_session", "python_session")
    )
    assert tools.format_for((shell,), hermes=False) is CallFormat.SHELL
    assert tools.format_for((shell, python), hermes=False) is CallFormat.LINE
    assert tools.unknown_kinds(tuple(TOOLS.values())) == ()
    assert {"shell_session", "python_session"} <= TOOLS.keys()
    line = tools.command(call_of("shell_session", command="cd é"), shell)
    assert (line.argv[0], line.argv[-1], line.stdin) == ("bash", "cd é", b"")
    code = tools.command(call_of("python_session", code="é"), python)
    assert (code.argv[0], code.stdin) == ("python3", "é".encode())
    missing = tools.refuse(call_of("python_session"), (python,))
    assert missing is not None
    assert missing.message.endswith("argument 'code' is missing")


def test_the_only_argument_of_a_shell_may_have_any_name():
    tool = Tool(name="run", description="", kind="shell",
                parameters={"properties": {"cmd": {"type": "string"}}})  # fmt: skip
    (call,) = tools.read("```bash\npwd\n```", CallFormat.SHELL, tools=(tool,))
    assert call.arguments == {"cmd": "pwd"}
    assert tools.refuse(call, (tool,)) is None
    assert tools.command(call, tool).argv == ("bash", "-c", "pwd")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ExecResult(exit_code=0, stdout="a\nb\n", stderr=""), "a\nb"),
        (ExecResult(exit_code=2, stdout="", stderr="no such file\n"), "no such file\n[exit 2]"),
        (ExecResult(exit_code=None, stdout="a", stderr="", timed_out=True), "a\n[timed out]"),
        (ExecResult(exit_code=None, stdout="", stderr=""), "[killed]"),
        (ExecResult(exit_code=0, stdout="", stderr=""), "[no output]"),
        (ended(137, out_of_memory=True), "[exit 137, out of memory]"),
        (ended(None, timed_out=True, out_of_memory=True), "[timed out, out of memory]"),
        (ended(1, disk_full=True), "[exit 1, disk full]"),
        (ended(0, disk_full=True), "[disk full]"),
        (ended(0, memory_lost=True), "[processes of earlier calls have ended; files are kept]"),
    ],
)
def test_observation_tells_output_and_how_it_ended(result, text):
    assert tools.observe(result) == text


@given(text=st.text(max_size=50), limit=st.integers(0, 60))
def test_long_text_keeps_exactly_head_and_tail(text, limit):
    kept = head_and_tail(text, limit)
    if len(text) <= limit:
        assert kept == text
    else:
        head, _, tail = kept.partition(f"\n[{len(text) - limit} characters left out]\n")
        assert len(head + tail) == limit
        assert text.startswith(head)
        assert text.endswith(tail)


@given(text=st.text(st.characters(categories=["L", "Cs"]) | st.sampled_from("\U000f5eaf😀")))
def test_clean_text_is_utf8_without_reserved_marks(text):
    cleaned = clean(text)
    cleaned.encode()
    assert "\U000f5eaf" not in cleaned
    assert clean(cleaned) == cleaned
