import asyncio
import hashlib
import re

import pytest

from posttrain.core.clock import ManualClock
from posttrain.core.containment import ExecResult
from posttrain.core.errors import DomainError, EngineError, IsolationError, SandboxError
from posttrain.core.ports import Executor, Policy
from posttrain.core.task import (
    Artefact,
    ArtefactKind,
    Environment,
    Lane,
    Limits,
    Oracle,
    OracleTurn,
    Tool,
    ToolCall,
)
from posttrain.core.trajectory import FinishReason, Sampling
from posttrain.core.verdict import Outcome, StopReason
from posttrain.rollout.answer import AnswerExecutor
from posttrain.rollout.oracle import OracleExecutor
from posttrain.rollout.toolloop import ToolExecutor
from tests.rollout.doubles import (
    FILES,
    MemorySandboxes,
    Sayings,
    answer_task,
    renderer,
    reply,
    request,
    tokenizer,
    tool_task,
)


def answer(*sayings, task=None, **changes):
    policy = Sayings(*sayings)
    executor = AnswerExecutor(policy, renderer(), ManualClock())
    made = asyncio.run(executor.run(request(task or answer_task(), **changes)))
    return made, policy


def use_tools(*sayings, task=None, sandboxes=None, clock=None):
    policy = Sayings(*sayings)
    sandboxes = sandboxes or MemorySandboxes()
    executor = ToolExecutor(policy, renderer(), clock or ManualClock(), sandboxes)
    made = asyncio.run(executor.run(request(task or tool_task())))
    return made, sandboxes


def shell(command):
    return f"```sh\n{command}\n```"


# --- answer -----------------------------------------------------------------------------------


def test_answer_executor_samples_once_with_the_turns_own_stops_and_seed():
    made, policy = answer(" 42", lane=Lane.EVAL, slot="eval", sampling=Sampling(stop_ids=(9,)))
    assert made.trajectory.final_text == " 42"
    assert made.trajectory.outcome is None
    assert made.sealed is None
    (asked,) = policy.requests
    assert asked.ids == renderer().prompt(answer_task())
    assert asked.sampling.stop_ids == (*renderer().stop_ids, 9)
    assert (asked.lane, asked.slot, asked.key) == ("eval", "eval", made.trajectory.key.hex)


def test_members_of_a_group_draw_from_different_random_streams():
    seeds = {answer(" 4", member=member)[1].requests[0].sampling.seed for member in range(4)}
    assert len(seeds) == 4
    assert answer(" 4")[1].requests[0].sampling.seed in seeds


@pytest.mark.parametrize(
    ("error", "story"),
    [(EngineError("engine gone"), "engine gone"), (OSError("no route"), "OSError: no route")],
)
def test_engine_that_fails_is_no_wrong_answer(error, story):
    made, _ = answer(error)
    assert made.trajectory.outcome is Outcome.INFRA_FAILED
    assert made.trajectory.error == story
    assert made.trajectory.reward is None


class Wrong:
    def __init__(self, sampled):
        self.sampled = sampled

    async def sample(self, request):
        return self.sampled


@pytest.mark.parametrize(
    ("sampled", "story"),
    [
        (reply((1, 2), logprobs=(0.0,)), r"columns of unequal length: \[2, 1, 2, 2\]"),
        (reply((1,) * 300), "sampled 300 tokens; at most 256"),
    ],
)
def test_reply_that_breaks_the_ports_contract_is_an_infrastructure_failure(sampled, story):
    executor = AnswerExecutor(Wrong(sampled), renderer(), ManualClock())
    made = asyncio.run(executor.run(request(answer_task())))
    assert made.trajectory.outcome is Outcome.INFRA_FAILED
    assert re.search(story, str(made.trajectory.error))


def test_answer_executor_refuses_a_task_with_tools():
    made, policy = answer(" 42", task=tool_task(executor="answer"))
    assert made.trajectory.outcome is Outcome.INFRA_FAILED
    assert "lists shell" in str(made.trajectory.error)
    assert policy.requests == []


# --- tools ------------------------------------------------------------------------------------


def test_tool_loop_executes_observes_seals_and_returns_the_lease():
    made, sandboxes = use_tools(shell("echo hello"), shell("touch done"), "Done.")
    trajectory = made.trajectory
    assert trajectory.stop is StopReason.FINISHED
    assert trajectory.turns[0].observations == ("hello",)
    assert sandboxes.executed == [("bash", "-c", "echo hello"), ("bash", "-c", "touch done")]
    assert made.sealed is sandboxes.sealed[0]
    assert "done" in made.sealed.files
    assert (sandboxes.leased, sandboxes.returned) == (1, 1)
    assert sandboxes.sealed_when_returned == [1]


def test_commands_get_the_shorter_of_their_own_and_the_attempts_time():
    task = tool_task(
        limits=Limits(max_turns=2, time_s=3.0), environment=Environment(exec_timeout_s=10.0)
    )
    _, sandboxes = use_tools(shell("ls"), "Done.", task=task)
    assert sandboxes.timeouts_s == [3.0]
    _, sandboxes = use_tools(shell("ls"), "Done.")
    assert sandboxes.timeouts_s == [10.0]


def test_running_out_of_time_with_the_file_written_is_sealed_for_verification():
    """BR-25, third case: graded on the state it left."""
    clock = ManualClock()

    def run(files, argv, stdin, timeout_s):
        if "sleep" in argv[-1]:
            clock.advance(timeout_s)
            return ExecResult(exit_code=None, stdout="", stderr="", timed_out=True)
        files["answer.txt"] = b"42\n"
        return ExecResult(exit_code=0, stdout="", stderr="")

    task = tool_task(
        limits=Limits(max_turns=8, time_s=5.0),
        artefacts=(Artefact(name="answer", kind=ArtefactKind.FILE, path="answer.txt"),),
    )
    made, _ = use_tools(
        shell("echo 42 > answer.txt"), shell("sleep 60"), "Done.",
        task=task, sandboxes=MemorySandboxes(run), clock=clock,
    )  # fmt: skip
    assert made.trajectory.stop is StopReason.TIME_LIMIT
    assert made.trajectory.outcome is None
    assert made.trajectory.turns[1].observations == ("[timed out]",)
    assert made.sealed is not None
    assert made.trajectory.artefacts["answer"]["size_bytes"] == 3


def test_command_killed_at_its_own_limit_is_an_observation_and_the_attempt_goes_on():
    """BR-25, second case: labelled as a time-out."""

    def run(files, argv, stdin, timeout_s):
        return ExecResult(exit_code=None, stdout="log", stderr="", timed_out=True)

    made, _ = use_tools(shell("agent | tee log"), "Done.", sandboxes=MemorySandboxes(run))
    assert made.trajectory.turns[0].observations == ("log\n[timed out]",)
    assert made.trajectory.stop is StopReason.FINISHED


def test_calls_after_the_time_is_spent_are_not_run():
    clock = ManualClock()

    def run(files, argv, stdin, timeout_s):
        clock.advance(6.0)
        return ExecResult(exit_code=0, stdout="ok", stderr="")

    sandboxes = MemorySandboxes(run)
    task = tool_task(limits=Limits(max_turns=8, time_s=5.0))
    made, _ = use_tools(f"{shell('a')}\n{shell('b')}", task=task, sandboxes=sandboxes, clock=clock)
    assert len(sandboxes.executed) == 1
    assert made.trajectory.stop is StopReason.TIME_LIMIT
    assert made.trajectory.turns[0].observations[0] == "ok"


def test_probes_run_before_sealing_and_files_are_read_from_the_seal():
    task = tool_task(
        artefacts=(
            Artefact(name="who", kind=ArtefactKind.PROBE, command="echo me"),
            Artefact(name="kept", kind=ArtefactKind.FILE, path="kept"),
            Artefact(name="gone", kind=ArtefactKind.FILE, path="gone"),
        ),
        environment=Environment(files={"kept": "text"}),
    )
    made, sandboxes = use_tools("Done.", task=task)
    assert sandboxes.executed == [("bash", "-c", "echo me")]
    assert made.trajectory.artefacts == {
        "who": {"exit_code": 0, "timed_out": False, "stdout": "me\n", "stderr": ""},
        "kept": {"size_bytes": 4, "sha256": hashlib.sha256(b"text").hexdigest()},
        "gone": {"missing": True},
    }


def test_tool_that_the_task_does_not_list_does_not_exist():
    made, sandboxes = use_tools(
        'call: {"name": "python", "arguments": {"code": "1"}}',
        "Done.",
        task=tool_task(tools=FILES[:2]),
    )
    assert sandboxes.executed == []
    assert made.trajectory.turns[0].observations[0].startswith("no tool 'python'")
    assert made.trajectory.counters["unknown_tools"] == 1


@pytest.mark.parametrize(
    "error", [SandboxError("no memory"), IsolationError("no namespaces"), OSError("disk full")]
)
def test_sandbox_that_cannot_be_had_is_an_infrastructure_failure(error):
    made, _ = use_tools("Done.", sandboxes=MemorySandboxes(fail=error))
    assert made.trajectory.outcome is Outcome.INFRA_FAILED
    assert str(error) in str(made.trajectory.error)
    assert made.sealed is None


def test_sandbox_lost_in_the_middle_is_an_infrastructure_failure_that_keeps_what_was_said():
    def run(files, argv, stdin, timeout_s):
        raise SandboxError("sandbox died")

    made, sandboxes = use_tools(shell("ls"), sandboxes=MemorySandboxes(run))
    assert made.trajectory.outcome is Outcome.INFRA_FAILED
    assert made.trajectory.error == "sandbox died"
    assert len(made.trajectory.turns) == 1
    assert (made.sealed, sandboxes.returned, sandboxes.sealed) == (None, 1, [])


def test_seal_that_cannot_be_read_is_closed_and_the_attempt_has_no_signal():
    sandboxes = MemorySandboxes(lose_seals=True)
    task = tool_task(artefacts=(Artefact(name="f", kind=ArtefactKind.FILE, path="f"),))
    made, _ = use_tools("Done.", task=task, sandboxes=sandboxes)
    assert made.trajectory.outcome is Outcome.INFRA_FAILED
    assert made.trajectory.stop is StopReason.FINISHED
    assert made.sealed is None
    assert sandboxes.sealed[0].closed == 1


def test_tool_of_a_kind_nothing_carries_out_is_told_before_a_lease_is_taken():
    odd = Tool(name="fax", description="", parameters={}, kind="fax")
    made, sandboxes = use_tools("Done.", task=tool_task(tools=(odd,)))
    assert "kind 'fax'; kinds: shell, read_file, write_file, python" in str(made.trajectory.error)
    assert sandboxes.leased == 0


def test_cancelled_tool_loop_returns_its_lease():
    sandboxes = MemorySandboxes()

    class Never:
        async def sample(self, request):
            await asyncio.Event().wait()

    async def body():
        executor = ToolExecutor(Never(), renderer(), ManualClock(), sandboxes)
        running = asyncio.create_task(executor.run(request(tool_task())))
        while not sandboxes.leased:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()

    asyncio.run(body())
    assert (sandboxes.returned, sandboxes.sealed) == (1, [])


# --- oracles ----------------------------------------------------------------------------------


def play(task, oracle, *, template="chatml", sandboxes=None):
    sandboxes = sandboxes or MemorySandboxes()

    def executors(policy: Policy) -> dict[str, Executor]:
        by, clock = renderer(template), ManualClock()
        return {
            "answer": AnswerExecutor(policy, by, clock),
            "tools": ToolExecutor(policy, by, clock, sandboxes),
        }

    async def solve(task):
        if isinstance(oracle, Exception):
            raise oracle
        return oracle

    executor = OracleExecutor(solve, executors, renderer(template))
    return asyncio.run(executor.run(request(task)))


def trained_text(row, template="chatml"):
    ids = [index for index, mask in zip(row.ids_T, row.mask_T, strict=True) if mask]
    return tokenizer(template).decode(ids)


def test_oracle_of_an_answer_task_is_what_the_policy_would_have_to_emit():
    made = play(answer_task(), Oracle(turns=(OracleTurn(text="42"),)))
    (row,) = made.trajectory.rows
    assert row.ids_T == renderer().prompt(answer_task()) + renderer().reply_ids(" 42")
    assert trained_text(row) == " 42<|im_end|>"
    assert made.trajectory.versions() == (-1,)
    assert set(row.logprobs_T) == {0.0}


def test_oracle_of_a_tool_task_really_executes_and_trains_on_calls_and_closing_text():
    call = ToolCall(id="", name="shell", arguments={"command": "echo hi"})
    touch = ToolCall(id="", name="shell", arguments={"command": "touch done"})
    turns = (
        OracleTurn(text="I look.", tool_calls=(call,)),
        OracleTurn(tool_calls=(touch,)),
        OracleTurn(text="Done."),
    )
    made = play(tool_task(), Oracle(turns=turns))
    assert made.sealed is not None
    assert "done" in made.sealed.files
    (row,) = made.trajectory.rows
    assert trained_text(row) == (
        "I look.\n```sh\necho hi\n```<|im_end|>```sh\ntouch done\n```<|im_end|>Done.<|im_end|>"
    )
    assert made.trajectory.turns[0].observations == ("hi",)
    assert made.trajectory.stop is StopReason.FINISHED


def test_oracle_writes_calls_in_the_models_own_format():
    call = ToolCall(id="", name="shell", arguments={"command": "touch done"})
    made = play(tool_task(), Oracle(turns=(OracleTurn(tool_calls=(call,)),)), template="hermes")
    (row,) = made.trajectory.rows
    assert trained_text(row, "hermes") == (
        '<tool_call>\n{"name": "shell", "arguments": {"command": "touch done"}}\n</tool_call>'
        "<|im_end|><|im_end|>"
    )


def test_oracle_that_breaks_the_tasks_limits_is_cut_like_a_policy():
    task = answer_task(limits=Limits(max_turn_tokens=2))
    made = play(task, Oracle(turns=(OracleTurn(text="a very long story"),)))
    assert made.trajectory.stop is StopReason.TOKEN_LIMIT
    assert made.trajectory.turns[0].finish is FinishReason.LENGTH


def test_oracle_whose_prompt_alone_is_too_long_gives_nothing_to_imitate():
    """BR-04: such a row was masked whole, and its mean was 0 / 0."""
    task = answer_task(limits=Limits(max_context_tokens=5))
    made = play(task, Oracle(turns=(OracleTurn(text="42"),)))
    assert made.trajectory.rows == ()
    assert made.trajectory.outcome is Outcome.INFRA_FAILED


def test_oracle_that_cannot_be_had_is_an_infrastructure_failure():
    made = play(answer_task(), DomainError("no gold answer"))
    assert made.trajectory.outcome is Outcome.INFRA_FAILED
    assert made.trajectory.error == "oracle of sum: no gold answer"
