"""Judges and reward models: marks, canaries, agreement with programs, and the endpoint they use."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from posttrain.core.clock import ManualClock
from posttrain.core.errors import InfraError, PreflightError
from posttrain.core.task import Check, Message, Place, Role
from posttrain.verify import layers
from posttrain.verify.endpoint import EndpointChat
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack
from posttrain.verify.trust import BATCH, CANARIES, FEWEST, Trust

RIGHT = Check(kind="exact", params={"answer": "two"})
RUBRIC = Check(
    kind="judge", place=Place.JUDGE, params={"rubric": ["is brief", "is kind", "rhymes"]}
)
MODEL = Check(kind="reward_model", place=Place.JUDGE, weight=0.25)
FULL, NONE = '{"1": 2, "2": 2, "3": 2}', '{"1": 0, "2": 0, "3": 0}'


def candidate(messages) -> str:
    """What stands between the fences."""
    lines = messages[1].text.rsplit("Candidate:\n", 1)[1].split("\n")
    return "\n".join(lines[1:-1])


class Judge:
    """Answers for what it is shown; canaries get nothing unless `fooled_by` says otherwise."""

    def __init__(self, answer, *, fooled_by=()):
        self.answer, self.fooled_by, self.seen, self.canaries = answer, fooled_by, [], 0

    async def reply(self, messages, *, max_tokens):
        shown = candidate(messages)
        if shown in CANARIES:
            self.canaries += 1
            return Message.of(Role.ASSISTANT, FULL if shown in self.fooled_by else NONE)
        self.seen.append(messages)
        answer = self.answer(shown) if callable(self.answer) else self.answer
        return Message.of(Role.ASSISTANT, answer)


class Scores:
    """A reward model by a rule."""

    name = "rule@1"

    def __init__(self, rule):
        self.rule = rule

    async def score(self, task, reply):
        return 0.0 if reply in CANARIES else self.rule(reply)


class Bench:
    """One stack, asked again and again."""

    def __init__(self, make_attempt, clock, **tools):
        self.make_attempt = make_attempt
        self.stack = Stack(Tools(clock=clock, **tools))

    def verify(self, answer, *checks):
        return asyncio.run(self.stack.verify(self.make_attempt(answer, checks=checks), None))


@pytest.fixture
def bench(make_attempt, clock):
    return lambda **tools: Bench(make_attempt, clock, **tools)


def test_marks_become_a_share(bench):
    chat = Judge('{"1": 2, "2": 1, "3": 0}')
    verdict = bench(chat=chat).verify("two", RIGHT, RUBRIC)
    assert verdict.components[1].value == 0.5
    assert sorted(verdict.components[1].evidence["marks"]) == ["is brief", "is kind", "rhymes"]
    text = chat.seen[0][1].text
    fence = text.rsplit("\n", 1)[1]
    assert text.endswith(f"Candidate:\n{fence}\ntwo\n{fence}")


def test_a_closed_gate_saves_the_judge(bench):
    chat = Judge(FULL)
    gate = Check(kind="exact", params={"answer": "three"}, gate=True)
    assert bench(chat=chat).verify("two", gate, RUBRIC).reward == 0.0
    assert chat.seen == []


MALFORMED = (
    *("", "2", "Great!", "[2, 2, 2]", '{"1": 2}', '{"1": 3, "2": 1, "3": 1}'),
    *('{"1": 0, "2": 2, "3": 2, "1": 2}', "[" * 5000, f"Marks: {FULL}"),
    *(f"```\n{FULL}\n```\n```\n{FULL}\n```", f"{FULL} {FULL}"),
    *('{"1": true, "2": 1, "3": 1}', '{"1": 1.5, "2": 1, "3": 1}'),
)


@pytest.mark.parametrize("reply", MALFORMED)
def test_a_judge_that_does_not_answer_with_marks_gives_none(reply, bench):
    """Neither paid nor failed: its own failure may not become a reward, 0 included."""
    assert bench(chat=Judge(reply)).verify("two", RIGHT, RUBRIC).reward is None


@pytest.mark.parametrize(
    "params", [{"rubric": [1]}, {"rubric": [" "]}, {"rubric": []}, {"agreement": "most"},
               {"agreement": 75}, {"agreement": True}],
)  # fmt: skip
def test_what_a_task_declares_wrongly_is_told_by_name(params, bench):
    check = Check(kind="judge", place=Place.JUDGE, params={**RUBRIC.params, **params})
    verdict = bench(chat=Judge(FULL)).verify("two", RIGHT, check)
    assert verdict.reward is None
    assert "check 'judge' wants" in verdict.errors[0]
    assert next(iter(params)) in verdict.errors[0]


def test_a_judge_may_put_a_fence_around_its_marks(bench):
    verdict = bench(chat=Judge(f"```json\n{FULL}\n```")).verify("two", RIGHT, RUBRIC)
    assert verdict.components[1].value == 1.0


def test_an_empty_reply_is_not_shown_to_the_judge(bench):
    chat = Judge(FULL)
    assert bench(chat=chat).verify(" ", RIGHT, RUBRIC).components[1].value == 0.0
    assert chat.seen == []


# --- canaries -----------------------------------------------------------------------------------


def test_tasks_with_rubrics_and_references_of_their_own_share_their_domains_canaries(bench):
    chat = Judge(FULL)
    asked = bench(chat=chat)
    for number in range(5):
        params = {**RUBRIC.params, "reference": f"as in {number}"}
        asked.verify("two", RIGHT, Check(kind="judge", place=Place.JUDGE, params=params))
    assert chat.canaries == len(CANARIES)


def test_canaries_come_first_and_then_once_a_batch(bench):
    chat = Judge(FULL)
    asked = bench(chat=chat)
    asked.verify("two", RIGHT, RUBRIC)
    assert chat.canaries == len(CANARIES)
    for _ in range(2 * BATCH):
        asked.verify("two", RIGHT, RUBRIC)
    assert chat.canaries == len(CANARIES) + 2


@pytest.mark.parametrize("canary", CANARIES)
def test_a_judge_that_pays_a_canary_is_not_believed_until_it_refuses_it(canary, bench):
    chat = Judge(FULL, fooled_by=(canary,))
    asked = bench(chat=chat)
    for _ in range(3):
        verdict = asked.verify("two", RIGHT, RUBRIC)
        assert verdict.reward is None
        assert "gave 1 to a reply that deserves 0" in verdict.errors[0]
    assert chat.seen == []
    chat.fooled_by = ()
    assert asked.verify("two", RIGHT, RUBRIC).reward == 1.0


def test_a_judge_that_turns_is_found_out_within_a_round_of_canaries():
    trust, verdicts = Trust(), 0
    for canary in trust.canaries_due("j"):
        assert trust.tried("j", canary, 0.0)
    trust.passed("j")
    while True:
        trust.judged("j")
        verdicts += 1
        if not all(trust.tried("j", c, float(c == "Solution")) for c in trust.canaries_due("j")):
            break
        trust.passed("j")
    assert verdicts <= BATCH * len(CANARIES)
    assert trust.canaries_due("j") == ("Solution",)


class Slow(Judge):
    """Lets others run whenever it is asked, and knows how many ask at once."""

    asking = most = marked_while_tried = 0

    async def reply(self, messages, *, max_tokens):
        tries = candidate(messages) in CANARIES
        self.marked_while_tried += self.canaries < len(CANARIES) and not tries
        self.asking += tries
        self.most = max(self.most, self.asking)
        for _ in range(5):
            await asyncio.sleep(0)
        self.asking -= tries
        if isinstance(self.answer, Exception) and tries:
            self.canaries += 1
            raise self.answer
        return await super().reply(messages, max_tokens=max_tokens)


def at_once(make_attempt, chat, count):
    asked = Bench(make_attempt, ManualClock(), chat=chat)

    async def body():
        attempt = asked.make_attempt("two", checks=(RIGHT, RUBRIC))
        return await asyncio.gather(*(asked.stack.verify(attempt, None) for _ in range(count)))

    return asyncio.run(body())


def test_the_first_of_many_tries_the_canaries_while_the_others_wait(make_attempt):
    """Each of sixteen verdicts at once asked for all seven."""
    chat = Slow(FULL)
    verdicts = at_once(make_attempt, chat, BATCH)
    assert [verdict.reward for verdict in verdicts] == [1.0] * BATCH
    assert (chat.canaries, chat.most, chat.marked_while_tried) == (len(CANARIES), 1, 0)
    assert len(chat.seen) == BATCH


@pytest.mark.parametrize("paid", [True, False], ids=("fooled", "out of reach"))
def test_who_waited_for_canaries_shares_what_came_of_them(paid, make_attempt):
    down = InfraError("the judge is out of reach")
    chat = Slow(FULL, fooled_by=CANARIES[:1]) if paid else Slow(down)
    verdicts = at_once(make_attempt, chat, 8)
    assert [verdict.reward for verdict in verdicts] == [None] * 8
    assert len({verdict.errors for verdict in verdicts}) == 1 + (not paid)
    assert chat.canaries == 1


def test_one_that_is_cancelled_while_it_tries_leaves_it_to_the_next(make_attempt):
    chat = Slow(FULL)
    asked = Bench(make_attempt, ManualClock(), chat=chat)

    async def body():
        attempt = asked.make_attempt("two", checks=(RIGHT, RUBRIC))
        first, second = (asyncio.create_task(asked.stack.verify(attempt, None)) for _ in range(2))
        while not chat.asking:
            await asyncio.sleep(0)
        first.cancel()
        assert (await second).reward == 1.0

    asyncio.run(body())


# --- agreement with programs --------------------------------------------------------------------


def test_a_judge_that_is_seldom_of_one_mind_with_programs_abstains(bench):
    asked = bench(chat=Judge(FULL))
    verdicts = [asked.verify("three", RIGHT, RUBRIC) for _ in range(FEWEST + 1)]
    assert verdicts[0].reward == 0.5
    last = verdicts[-1].components[1]
    assert last.value is None
    assert last.evidence["abstains"] == "it agreed with programs 0 times of 16, wanted 0.75"
    assert verdicts[-1].reward == 0.0, "the program decides alone"


def test_a_judge_gets_its_say_back(bench):
    chat = Judge(FULL)
    asked = bench(chat=chat)
    for _ in range(FEWEST):
        asked.verify("three", RIGHT, RUBRIC)
    chat.answer = NONE
    for _ in range(4 * FEWEST):
        verdict = asked.verify("three", RIGHT, RUBRIC)
    assert verdict.components[1].value == 0.0


def test_gates_alone_are_no_program_to_agree_with(bench):
    gate = Check(kind="exact", params={"answer": "two"}, gate=True)
    asked = bench(chat=Judge(NONE))
    values = [asked.verify("two", gate, RUBRIC).components[1].value for _ in range(2 * FEWEST)]
    assert values == [0.0] * 2 * FEWEST


# --- reward models ------------------------------------------------------------------------------


def test_a_reward_model_weighs_in(bench):
    verdict = bench(scores=Scores(lambda reply: 0.5)).verify("two", RIGHT, MODEL)
    assert verdict.reward == pytest.approx((1.0 + 0.25 * 0.5) / 1.25)
    assert verdict.components[1].evidence["judge"] == "reward model rule@1"


@pytest.mark.parametrize("score", [float("nan"), -0.1, 1.5, True, "1", None])
def test_a_score_that_is_none_is_the_models_failure(score, bench):
    class Odd(Scores):
        async def score(self, task, reply):
            return score

    assert bench(scores=Odd(None)).verify("two", RIGHT, MODEL).reward is None


def test_a_reward_model_may_neither_decide_nor_outweigh():
    heavy = Check(kind="reward_model", place=Place.JUDGE)
    assert "more than 30% of the weight" in layers.faults([RIGHT, heavy])[0]
    gate = Check(kind="reward_model", place=Place.JUDGE, gate=True)
    assert "a reward model is a gate" in layers.faults([RIGHT, gate])[0]
    assert layers.faults([RIGHT, MODEL]) == ()


def test_without_a_model_or_a_judge_there_is_no_reward(bench):
    assert "was built without" in bench().verify("two", RIGHT, MODEL).errors[0]
    assert "was built without" in bench().verify("two", RIGHT, RUBRIC).errors[0]


# --- the endpoint -------------------------------------------------------------------------------


def endpoint(*answers, **more):
    """A server that gives these answers in turn, and what it was asked."""
    asked, left = [], list(answers)

    def handle(request):
        asked.append(request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    transport = httpx2.MockTransport(handle)
    chat = EndpointChat("http://judge/v1/", "big", ManualClock(), transport=transport, **more)
    return chat, asked


def said(text):
    return httpx2.Response(200, json={"choices": [{"message": {"content": text}}]})


def reply(chat):
    async def body():
        try:
            asking = asyncio.ensure_future(
                chat.reply([Message.of(Role.USER, "Marks?")], max_tokens=9)
            )
            while not asking.done():
                await asyncio.sleep(0)
                chat._clock.advance(10.0)
            return asking.result().text
        finally:
            await chat.close()

    return asyncio.run(body())


def test_an_endpoint_is_asked_as_its_protocol_has_it(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    chat, asked = endpoint(said("fine"), key_variable="JUDGE_KEY")
    assert reply(chat) == "fine"
    assert str(asked[0].url) == "http://judge/v1/chat/completions"
    assert asked[0].headers["authorization"] == "Bearer secret"
    assert json.loads(asked[0].content) == {
        "model": "big", "messages": [{"role": "user", "content": "Marks?"}], "max_tokens": 9,
        "temperature": 0,
    }  # fmt: skip


def test_what_may_pass_is_tried_again_and_the_rest_is_not():
    busy, down = httpx2.Response(503, text="busy"), httpx2.ConnectError("refused")
    chat, asked = endpoint(busy, down, said("now"))
    assert reply(chat) == "now"
    assert len(asked) == 3
    for answers, why in (
        ([httpx2.Response(404, text="no such model")], "status 404: no such model"),
        ([busy] * 3, "status 503: busy"),
        ([down] * 3, "ConnectError refused"),
        ([httpx2.Response(200, text="<html>")], "no chat completion but '<html>'"),
        ([said(None)], "wanted text"),
    ):
        chat, _ = endpoint(*answers)
        with pytest.raises(InfraError, match=why):
            reply(chat)


def test_a_missing_key_is_told_before_anything_is_asked(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(PreflightError, match="JUDGE_KEY is empty"):
        endpoint(key_variable="JUDGE_KEY")
