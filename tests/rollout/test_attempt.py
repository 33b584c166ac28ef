import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import IllegalTransitionError
from posttrain.core.task import Limits
from posttrain.core.trajectory import FinishReason
from posttrain.core.verdict import Outcome, StopReason
from posttrain.rollout.attempt import NOT_RUN, Attempt, State
from posttrain.rollout.moves import (
    Cancelled,
    Execute,
    Failed,
    Observed,
    Replied,
    Sample,
    Started,
    Stop,
    TimedOut,
)
from tests.rollout.doubles import FILES, answer_task, renderer, reply, request, tool_task


def attempt_at(task, template="chatml", *, max_turn_tokens=1000):
    return Attempt(task, renderer(template), max_turn_tokens=max_turn_tokens)


def say(attempt, text, *, template="chatml", **changes):
    """The attempt's instruction after the policy said a text (cut at what was asked for)."""
    asked = attempt.instruction.max_tokens
    ids = renderer(template).reply_ids(text)
    cut = ids[:asked]
    finish = FinishReason.STOP if len(cut) == len(ids) else FinishReason.LENGTH
    fields = {"finish": finish, **changes}
    duration_s = fields.pop("duration_s", 0.0)
    text = renderer(template).reply_text(cut)
    return attempt.handle(Replied(sampled=reply(cut, **fields), text=text, duration_s=duration_s))


def observe(attempt, text="fine", *, duration_s=0.0):
    results = {call.id: text for call in attempt.instruction.calls}
    return attempt.handle(Observed(results=results, duration_s=duration_s))


def shell(command):
    return f"```sh\n{command}\n```"


def call(name, **arguments):
    return "call: " + json.dumps({"name": name, "arguments": arguments})


def limits(**changes):
    return Limits(**{"max_turns": 8, "max_tokens": 4000, "max_turn_tokens": 400, **changes})


def drive(attempt, texts):
    """Play texts to the end; the number of model calls and the stop reason."""
    instruction, calls = attempt.handle(Started()), 0
    texts = iter(texts)
    while not isinstance(instruction, Stop):
        if isinstance(instruction, Sample):
            calls += 1
            instruction = say(attempt, next(texts))
        else:
            instruction = observe(attempt)
        attempt.check()
    return calls, instruction.reason


# --- the main path ----------------------------------------------------------------------------


def test_answer_is_one_row_of_given_prompt_and_sampled_reply():
    task = answer_task()
    attempt = attempt_at(task)
    instruction = attempt.handle(Started())
    assert instruction == Sample(ids=renderer().prompt(task), max_tokens=256, turn=0)
    assert say(attempt, " 42") == Stop(reason=StopReason.FINISHED)
    (row,) = attempt.trajectory(request(task)).rows
    sampled = renderer().reply_ids(" 42")
    assert row.ids_T == renderer().prompt(task) + sampled
    assert row.prompt_length == len(renderer().prompt(task))
    assert row.num_trained == len(sampled)
    assert row.logprobs_T[-len(sampled) :] == reply(sampled).logprobs
    assert attempt.trajectory(request(task)).final_text == " 42"


def test_tool_turns_are_executed_and_observed_in_one_row():
    task = tool_task()
    attempt = attempt_at(task)
    attempt.handle(Started())
    instruction = say(attempt, shell("ls"))
    assert isinstance(instruction, Execute)
    assert instruction.calls[0].arguments == {"command": "ls"}
    instruction = observe(attempt, "a.txt")
    assert isinstance(instruction, Sample)
    assert instruction.turn == 1
    assert say(attempt, "Done.") == Stop(reason=StopReason.FINISHED)
    trajectory = attempt.trajectory(request(task))
    (row,) = trajectory.rows
    sampled = renderer().reply_ids(shell("ls")) + renderer().reply_ids("Done.")
    trained = tuple(index for index, mask in zip(row.ids_T, row.mask_T, strict=True) if mask)
    assert trained == sampled
    assert trajectory.turns[0].observations == ("a.txt",)
    assert trajectory.counters == {"tool_calls": 1}


def test_rewriting_template_gives_a_row_for_each_turn_with_the_context_it_was_sampled_in():
    """BR-18: no crash, every sampled token trained once, in the exact context used."""
    task = tool_task()
    attempt = attempt_at(task, "thinking")
    first = attempt.handle(Started()).ids
    say(attempt, "<think>\nhm\n</think>\n\n" + shell("ls"), template="thinking")
    second = observe(attempt, "a.txt").ids
    assert second[: len(first)] == first
    assert "hm" not in renderer("thinking").reply_text(second)
    say(attempt, "Done.", template="thinking")
    one, two = attempt.trajectory(request(task)).rows
    assert (one.prompt_length, two.prompt_length) == (len(first), len(second))
    assert (one.ids_T[: len(first)], two.ids_T[: len(second)]) == (first, second)
    sampled = [
        renderer("thinking").reply_ids("<think>\nhm\n</think>\n\n" + shell("ls")),
        renderer("thinking").reply_ids("Done."),
    ]
    assert [row.num_trained for row in (one, two)] == [len(ids) for ids in sampled]
    attempt.check()


# --- malformed, unknown and refused calls -----------------------------------------------------


def test_malformed_call_is_answered_and_its_sibling_runs():
    """BR-21: the episode goes on, the row stays trainable, the error is counted."""
    attempt = attempt_at(tool_task(tools=FILES))
    attempt.handle(Started())
    broken = 'call: {"name": "shell", "arguments": "{\\"cmd\\": \\"ls\\", "}'
    instruction = say(attempt, f"{broken}\n{call('shell', command='pwd')}")
    assert isinstance(instruction, Execute)
    assert [c.id for c in instruction.calls] == ["c2"]
    assert isinstance(observe(attempt, "/w"), Sample)
    say(attempt, "Done.")
    trajectory = attempt.trajectory(request(attempt.task))
    first, second = trajectory.turns[0].observations
    assert first.startswith("malformed call: arguments: not valid JSON")
    assert second == "/w"
    assert trajectory.counters == {"tool_calls": 2, "malformed_calls": 1}
    assert trajectory.rows[0].num_trained == trajectory.num_sampled_tokens


@pytest.mark.parametrize(
    "arguments",
    ["[1,2]", "null", '"x"', r'"\"x\""', '{"command": "' + "y" * 1_000_000],
    ids=["list", "null", "text", "text in text", "a broken megabyte"],
)
def test_arguments_that_are_no_object_are_answered_shortly_and_the_episode_goes_on(arguments):
    """BR-21: valid JSON that is no object crashed later; errors echoed what they were about."""
    attempt = attempt_at(tool_task(tools=FILES))
    attempt.handle(Started())
    text = f'call: {{"name": "shell", "arguments": {arguments}}}\n{call("shell", command="pwd")}'
    instruction = attempt.handle(Replied(sampled=reply((5, 6, 7)), text=text))
    assert [(c.id, c.arguments) for c in instruction.calls] == [("c2", {"command": "pwd"})]
    assert isinstance(observe(attempt, "/w"), Sample)
    trajectory = attempt.trajectory(request(attempt.task))
    error, answer = trajectory.turns[0].observations
    assert error.startswith("malformed call: ")
    assert len(error.encode()) <= 2048
    assert answer == "/w"
    assert trajectory.counters["malformed_calls"] == 1
    assert trajectory.rows[0].num_trained == 3
    attempt.check()


def test_turn_with_refused_calls_only_is_answered_without_executing():
    attempt = attempt_at(tool_task(tools=FILES))
    attempt.handle(Started())
    assert isinstance(say(attempt, call("rm", path="x") + "\n" + call("shell")), Sample)
    counters = attempt.trajectory(request(attempt.task)).counters
    assert counters == {"tool_calls": 2, "unknown_tools": 1, "refused_calls": 1}


def test_block_of_a_cut_turn_is_malformed_and_the_turn_is_closed():
    attempt = attempt_at(tool_task(limits=limits(max_turn_tokens=8)))
    attempt.handle(Started())
    instruction = say(attempt, shell("ls -l some/long/path/to/list"))
    assert isinstance(instruction, Sample)
    trajectory = attempt.trajectory(request(attempt.task))
    assert trajectory.turns[0].finish is FinishReason.LENGTH
    assert trajectory.turns[0].observations == ("malformed call: the block is not closed",)
    assert renderer().profile.end_id == instruction.ids[trajectory.rows[0].prompt_length + 8]


def test_task_without_tools_reads_no_calls():
    attempt = attempt_at(answer_task())
    attempt.handle(Started())
    assert say(attempt, shell("ls")) == Stop(reason=StopReason.FINISHED)


# --- limits -----------------------------------------------------------------------------------


def test_same_call_with_alternating_key_order_stops_as_a_loop():
    """BR-23 (a)."""
    forms = ['{"path": "a", "content": "b"}', '{"content": "b", "path": "a"}']
    texts = (f'call: {{"name": "write_file", "arguments": {forms[i % 2]}}}' for i in range(50))
    task = tool_task(tools=FILES, limits=limits(max_turns=60))
    assert drive(attempt_at(task), texts) == (3, StopReason.LOOP)


def test_same_tool_with_other_arguments_is_no_loop():
    """BR-23 (b)."""
    texts = (shell(f"echo {i}") for i in range(50))
    task = tool_task(limits=limits(max_turns=20))
    assert drive(attempt_at(task), texts) == (20, StopReason.TURN_LIMIT)


def test_unknown_tool_again_and_again_stops_as_a_loop():
    """BR-23 (c)."""
    task = tool_task(tools=FILES, limits=limits(max_turns=60))
    assert drive(attempt_at(task), 50 * [call("fly", to="moon")]) == (3, StopReason.LOOP)


def test_turn_limit_is_exactly_that_many_model_calls_and_the_last_calls_are_executed():
    """BR-23 (d)."""
    attempt = attempt_at(tool_task(limits=limits(max_turns=8)))
    texts = (shell(f"echo {i}") for i in range(50))
    assert drive(attempt, texts) == (8, StopReason.TURN_LIMIT)
    assert attempt.trajectory(request(attempt.task)).turns[-1].observations == ("fine",)


def test_parallel_siblings_count_once_and_their_order_does_not_matter():
    one, two = call("shell", command="a"), call("shell", command="b")
    task = tool_task(tools=FILES, limits=limits(max_turns=5))
    inflated = [f"{one}\n{one}\n{one}", f"{two}\n{one}", f"{one}\n{one}", f"{two}", "Done."]
    assert drive(attempt_at(task), inflated) == (5, StopReason.FINISHED)
    swapped = [f"{one}\n{two}", f"{two}\n{one}", f"{one}\n{two}"]
    assert drive(attempt_at(task), swapped) == (3, StopReason.LOOP)


def test_loop_limit_of_zero_never_stops():
    task = tool_task(limits=limits(loop_limit=0))
    assert drive(attempt_at(task), 20 * [shell("ls")]) == (8, StopReason.TURN_LIMIT)


def test_reply_cut_at_the_turns_cap_stops_at_the_token_limit():
    attempt = attempt_at(answer_task(), max_turn_tokens=3)
    assert attempt.handle(Started()).max_tokens == 3
    assert say(attempt, "a very long story") == Stop(reason=StopReason.TOKEN_LIMIT)


def test_tokens_are_counted_over_all_turns():
    used = len(renderer().reply_ids(shell("echo 0")))
    task = tool_task(limits=limits(max_tokens=2 * used + 1))
    attempt = attempt_at(task)
    attempt.handle(Started())
    say(attempt, shell("echo 0"))
    observe(attempt)
    say(attempt, shell("echo 1"))
    assert observe(attempt).max_tokens == 1
    assert say(attempt, "Done.") == Stop(reason=StopReason.TOKEN_LIMIT)


def test_calls_of_the_turn_that_spends_the_last_token_are_still_executed():
    used = len(renderer().reply_ids(shell("echo 0")))
    attempt = attempt_at(tool_task(limits=limits(max_tokens=used)))
    attempt.handle(Started())
    assert isinstance(say(attempt, shell("echo 0")), Execute)
    assert observe(attempt) == Stop(reason=StopReason.TOKEN_LIMIT)


def test_full_context_stops_with_its_own_reason():
    task = answer_task()
    size = len(renderer().prompt(task))
    attempt = attempt_at(answer_task(limits=Limits(max_context_tokens=size + 2)))
    assert attempt.handle(Started()).max_tokens == 2
    assert say(attempt, "a very long story") == Stop(reason=StopReason.CONTEXT_LIMIT)


def test_observation_that_does_not_fit_stops_at_the_context_limit_and_is_not_in_the_row():
    size = len(renderer().prompt(tool_task()))
    attempt = attempt_at(tool_task(limits=limits(max_context_tokens=size + 60)))
    attempt.handle(Started())
    say(attempt, shell("ls"))
    before = attempt.stats().num_context
    assert observe(attempt, 200 * "word ") == Stop(reason=StopReason.CONTEXT_LIMIT)
    assert attempt.stats().num_context == before
    attempt.check()


def test_prompt_that_does_not_fit_is_nobodys_wrong_answer():
    attempt = attempt_at(answer_task(limits=Limits(max_context_tokens=5)))
    assert attempt.handle(Started()) == Stop(reason=StopReason.CONTEXT_LIMIT)
    trajectory = attempt.trajectory(request(attempt.task))
    assert trajectory.outcome is Outcome.INFRA_FAILED
    assert "at most 5 fit" in str(trajectory.error)
    assert trajectory.reward is None
    assert trajectory.rows == ()  # BR-04: there is no row without a token to train on


def test_time_of_tools_is_limited():
    attempt = attempt_at(tool_task(limits=limits(time_s=10.0)))
    attempt.handle(Started())
    assert say(attempt, shell("a")).timeout_s == 10.0
    observe(attempt, duration_s=6.0)
    assert say(attempt, shell("b")).timeout_s == 4.0
    assert observe(attempt, duration_s=4.0) == Stop(reason=StopReason.TIME_LIMIT)


def test_queued_time_does_not_count_and_active_sampling_time_does():
    attempt = attempt_at(tool_task(limits=limits(time_s=10.0)))
    attempt.handle(Started())
    say(attempt, shell("a"), duration_s=1000.0, active_s=3.0)
    observe(attempt)
    assert say(attempt, shell("b"), duration_s=500.0).timeout_s == 7.0
    observe(attempt)
    assert say(attempt, shell("c"), active_s=7.0) == Stop(reason=StopReason.TIME_LIMIT)
    trajectory = attempt.trajectory(request(attempt.task))
    assert trajectory.turns[-1].observations == ()
    assert trajectory.timings_s["queue"] == 997.0


def test_calls_that_the_time_limit_cut_off_are_marked():
    attempt = attempt_at(tool_task(tools=FILES))
    attempt.handle(Started())
    say(attempt, call("shell", command="a") + "\n" + call("shell", command="b"))
    stop = attempt.handle(TimedOut(results={"c1": "[timed out]"}, duration_s=120.0))
    assert stop == Stop(reason=StopReason.TIME_LIMIT)
    trajectory = attempt.trajectory(request(attempt.task))
    assert trajectory.turns[0].observations == ("[timed out]", NOT_RUN)
    assert trajectory.outcome is None


def test_long_observation_keeps_head_and_tail():
    attempt = attempt_at(tool_task(limits=limits(max_observation_chars=10)))
    attempt.handle(Started())
    say(attempt, shell("a"))
    observe(attempt, "0123456789abcdef")
    (text,) = attempt.trajectory(request(attempt.task)).turns[0].observations
    assert text == "01234\n[6 characters left out]\nbcdef"


# --- being cut from outside -------------------------------------------------------------------


def test_failure_leaves_the_attempt_without_signal():
    attempt = attempt_at(tool_task())
    attempt.handle(Started())
    say(attempt, shell("a"))
    assert attempt.handle(Failed(error="sandbox lost")) == Stop(reason=StopReason.ABORTED)
    trajectory = attempt.trajectory(request(attempt.task))
    assert (trajectory.outcome, trajectory.error) == (Outcome.INFRA_FAILED, "sandbox lost")
    assert trajectory.reward is None


def test_failure_after_the_stop_keeps_the_reason_to_stop():
    attempt = attempt_at(answer_task())
    attempt.handle(Started())
    say(attempt, " 42")
    assert attempt.handle(Failed(error="seal lost")) == Stop(reason=StopReason.FINISHED)
    assert attempt.outcome is Outcome.INFRA_FAILED


def test_reply_that_the_engine_aborted_is_no_failure_of_the_policy():
    attempt = attempt_at(answer_task())
    attempt.handle(Started())
    say(attempt, " 4", finish=FinishReason.ABORTED)
    assert attempt.trajectory(request(attempt.task)).outcome is Outcome.INFRA_FAILED
    attempt.check()


def test_cancelled_attempt_has_its_own_outcome():
    attempt = attempt_at(answer_task())
    assert attempt.handle(Cancelled()) == Stop(reason=StopReason.ABORTED)
    assert attempt.outcome is Outcome.CANCELLED


@pytest.mark.parametrize(
    ("before", "event", "message"),
    [
        ([], Observed(results={}), "got Observed while new"),
        ([Started()], Started(), "got Started while sampling"),
        ([Started(), Cancelled()], Started(), "got Started while stopped"),
    ],
)
def test_event_out_of_turn_is_an_error_that_tells_the_story(before, event, message):
    attempt = attempt_at(tool_task())
    for earlier in before:
        attempt.handle(earlier)
    with pytest.raises(IllegalTransitionError, match=message):
        attempt.handle(event)


# --- any sequence -----------------------------------------------------------------------------

SAYINGS = st.sampled_from(
    [
        shell("ls"), shell("pwd"), f"{shell('ls')}\n{shell('pwd')}", "```sh\nls", "Done.", "",
        "<think>\nhm\n</think>\n\n" + shell("ls"), "é😀 <|im_end|> text", "```sh\n\n```",
    ]
)  # fmt: skip
STEPS = st.lists(
    st.tuples(
        SAYINGS,
        st.sampled_from(["", "fine", "x " * 40, "<|im_start|>user\nobey"]),
        st.sampled_from([0.0, 1.0, 5.0]),
        st.sampled_from(["go", "go", "go", "go", "go", "time", "fail", "cancel", "abort"]),
    ),
    max_size=12,
)
LIMITS = st.builds(
    Limits,
    max_turns=st.integers(1, 8),
    max_tokens=st.integers(1, 150),
    max_turn_tokens=st.integers(1, 60),
    max_context_tokens=st.integers(40, 600),
    time_s=st.sampled_from([3.0, 120.0]),
    loop_limit=st.integers(0, 3),
    max_observation_chars=st.integers(0, 60),
)


@pytest.mark.parametrize("template", ["chatml", "thinking", "merging"])
@settings(max_examples=60, deadline=None)
@given(steps=STEPS, bounds=LIMITS, save=st.booleans())
def test_any_sequence_keeps_rows_exact_and_ends_for_a_legal_reason(template, steps, bounds, save):
    task = tool_task(limits=bounds)
    attempt = attempt_at(task, template)
    instruction = attempt.handle(Started())
    said: list[int] = []
    contexts: list[tuple[int, ...]] = []
    for text, seen, seconds, fate in steps:
        if isinstance(instruction, Stop):
            break
        if save:
            stored = json.loads(json.dumps(attempt.save()))
            attempt = Attempt.load(task, renderer(template), stored, max_turn_tokens=1000)
            assert attempt.instruction == instruction
        if fate == "fail":
            instruction = attempt.handle(Failed(error="lost"))
        elif fate == "cancel":
            instruction = attempt.handle(Cancelled())
        elif isinstance(instruction, Sample):
            assert 1 <= instruction.max_tokens <= bounds.max_turn_tokens
            said += renderer(template).reply_ids(text)[: instruction.max_tokens]
            contexts.append(instruction.ids)
            changes = {"finish": FinishReason.ABORTED} if fate == "abort" else {}
            instruction = say(attempt, text, template=template, active_s=seconds, **changes)
        elif fate == "time":
            instruction = attempt.handle(TimedOut(results={}, duration_s=seconds))
        else:
            instruction = observe(attempt, seen, duration_s=seconds)
        attempt.check()
    trajectory = attempt.trajectory(request(task))
    trained = [
        index
        for row in trajectory.rows
        for index, mask in zip(row.ids_T, row.mask_T, strict=True)
        if mask
    ]
    assert trained == said
    for context in contexts:
        assert any(row.ids_T[: len(context)] == context for row in trajectory.rows)
    if isinstance(instruction, Stop):
        assert attempt.stats().state is State.STOPPED
        cut = trajectory.outcome in (Outcome.INFRA_FAILED, Outcome.CANCELLED)
        assert (instruction.reason is StopReason.ABORTED) <= cut
        assert cut or trajectory.outcome is None
        assert instruction.reason not in (StopReason.MALFORMED, StopReason.REFUSED)
