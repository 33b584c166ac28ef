import asyncio
import json
from dataclasses import replace

import pytest

from posttrain.cli.examination import Admissions
from posttrain.core import codec, seeds
from posttrain.core.clock import ManualClock
from posttrain.core.errors import DomainError, UsageError
from posttrain.core.task import Check, Description, Environment, Oracle, OracleTurn, Task, ToolCall
from posttrain.core.verdict import Component, Outcome, Place, Verdict
from posttrain.domains.mixture import Key, is_heldout, shared_content
from posttrain.evals import admission
from posttrain.evals.admission import Admission, Examiner
from posttrain.evals.attackers import IDLE, REPLIES, Fixture, fixtures, said
from posttrain.evals.suite import spoken
from posttrain.verify.kinds import REPLY_KINDS, Tools
from posttrain.verify.layers import Finding
from posttrain.verify.stack import Stack


async def paying_all(check, subject, tools):
    return Finding(value=1.0)


async def paying_substrings(check, subject, tools):
    return Finding(value=float(check.params["answer"] in subject.reply))


async def paying_a_little(check, subject, tools):
    return Finding(value=0.01)


async def raising(check, subject, tools):
    raise RuntimeError("no scorer")


KINDS = {**REPLY_KINDS, "all": paying_all, "substring": paying_substrings,
         "little": paying_a_little, "raising": raising}  # fmt: skip


class Source:
    """Tasks that ask to repeat a number, judged by `kind`."""

    def __init__(self, kind="exact", *, executor="answer", wobble=False, gold=None, fails=False,
                 broken=()):  # fmt: skip
        self.kind, self.executor, self.wobble = kind, executor, wobble
        self.gold, self.fails, self.broken, self.made = gold, fails, broken, 0

    async def drawn(self, key, *, root_seed, numbers):
        if self.fails:
            raise DomainError("domain 'x.repeat': task() raised ValueError: boom")
        return [self.task(key, seeds.hashed(root_seed, key.level, number)) for number in numbers]

    async def pool(self, key, *, root_seed, count, split):
        found = {}
        for number in range(4 * count):
            task = self.task(key, seeds.hashed(root_seed, split, number))
            found[shared_content(task)] = task
        held = [task for task in found.values() if is_heldout(task) == (split == "heldout")]
        return held[:count]

    async def oracles(self, key, tasks):
        return [self.oracle(task) for task in tasks]

    async def seeded(self, key, seed):
        return self.task(key, seed)

    async def peak_bytes(self, key):
        return 7 << 20

    async def problems(self, key, numbers):
        return self.broken

    def task(self, key, seed):
        self.made += 1
        gold = self.gold or str(seed % 1000 + 7)
        note = f" ({self.made})" if self.wobble else ""
        return Task(
            domain=key.domain, level=key.level, seed=seed, executor=self.executor,
            description=Description(objective=f"Repeat the one number {gold} to me{note}"),
            checks=(Check(kind=self.kind, params={"answer": gold}),), private={"gold": gold},
            environment=Environment() if self.executor == "tools" else None,
        )  # fmt: skip

    def oracle(self, task):
        call = ToolCall(id="1", name="shell", arguments={"command": "true"})
        calls = (OracleTurn(tool_calls=(call,)),) if task.executor == "tools" else ()
        return Oracle(turns=(*calls, OracleTurn(text=task.private["gold"])))


async def nowhere(task, lines):
    return ()


def examine(
    source, *, other=None, play=None, levels=(0, 1), search=nowhere, fixtures=(), clock=None
):
    clock = clock or ManualClock()
    stack = Stack(Tools(clock=clock), kinds=KINDS)
    other = other or Source(source.kind, executor=source.executor, gold=source.gold)
    examiner = Examiner(source, other, stack, clock, play=play, search=search)
    keys = [Key(domain="x.repeat", level=level, reference="x.repeat") for level in levels]
    return asyncio.run(examiner.examine(keys, per_level=3, fixtures=fixtures))


def test_an_honest_domain_is_admitted():
    report = examine(Source())
    assert report.admitted, report.reasons
    assert (report.tasks, report.distinct) == (6, 6)
    assert {probe.name for probe in report.probes} == {"oracle", "echo", "hedge", *REPLIES}
    assert report.peak_bytes == 7 << 20
    assert codec.from_json(Admission, codec.to_json(report)) == report


def test_the_kill_rate_is_told_for_each_verifier_and_refuses_nothing():
    report = examine(Source())
    assert (report.kills.judged, report.kills.killed, report.kills.alive) == (12, 12, ())
    (kill,) = report.kills.by_verifier
    assert kill.verifier.startswith("exact@1+")
    assert (kill.judged, kill.rate) == (12, 1.0)
    blind = examine(Source("all"), levels=(0,))
    assert (blind.kills.rate, blind.kills.judged, len(blind.kills.alive)) == (0.0, 6, 5)
    assert "number: " in " ".join(blind.kills.alive)
    assert not any("number: " in reason for reason in blind.reasons)
    assert examine(Source("raising")).kills.unjudged == 12


@pytest.mark.parametrize("kind", ["all", "little"])
def test_a_verifier_that_pays_for_nothing_is_not_admitted(kind):
    report = examine(Source(kind))
    assert not report.admitted
    assert {probe.name for probe in report.probes if not probe.passed} >= {"empty", "junk", "echo"}


def test_a_scorer_that_pays_for_the_echoed_prompt_is_not_admitted():
    report = examine(Source("substring"))
    assert [probe.name for probe in report.probes if not probe.passed] == ["echo", "hedge"]
    assert "echo, hedge: x.repeat/0/" in report.reasons[0]


def test_an_oracle_that_is_not_paid_in_full_is_not_admitted():
    class Wrong(Source):
        def oracle(self, task):
            return Oracle(turns=(OracleTurn(text="nothing"),))

    report = examine(Wrong(), other=Wrong())
    assert [probe.name for probe in report.probes if not probe.passed] == ["oracle"]
    assert "earned 0, deserves 1" in report.reasons[0]


def test_a_verifier_that_raises_is_told_apart_from_a_wrong_one():
    report = examine(Source("raising"))
    oracle = report.probes[0]
    assert oracle.wrong == ()
    assert oracle.errors == ("raising: RuntimeError: no scorer",)
    (reason,) = report.reasons  # it was told once for each probe
    assert reason.startswith("oracle, echo, empty, blank, junk, ")
    assert reason.endswith(": raising: RuntimeError: no scorer")


def test_junk_that_happens_to_be_right_is_not_held_against_a_domain():
    report = examine(Source("numeric", gold="0.0"))
    assert report.admitted, report.reasons
    assert "zero" not in {probe.name for probe in report.probes}


def test_tasks_that_differ_between_two_processes_are_not_admitted():
    report = examine(Source(), other=Source(wobble=True))
    assert len(report.problems) == 5
    assert "differs between two processes" in report.reasons[0]


def test_a_broken_contract_is_not_admitted():
    assert examine(Source(broken=("the objective is empty",))).reasons == (
        "the objective is empty",
    )


def test_a_domain_that_raises_gets_a_report_too():
    report = examine(Source(fails=True))
    assert report.reasons == ("domain 'x.repeat': task() raised ValueError: boom",)


def test_the_most_frequent_gold_answer_is_reported():
    constant = examine(Source(gold="12")).constant
    assert constant is not None
    assert (constant.text, constant.rate) == ("12", 1.0)


@pytest.mark.parametrize(("idle_pays", "admitted"), [(0.0, True), (0.5, False)])
def test_a_tool_domain_is_played_and_must_not_pay_for_doing_nothing(idle_pays, admitted):
    played = []

    async def play(task, oracle):
        played.append(oracle)
        worked = any(turn.tool_calls for turn in oracle.turns)
        part = Component(name="s", place=Place.DETERMINISTIC, value=1.0 if worked else idle_pays)
        return spoken(task, "").judged(Verdict(components=(part,)), Outcome.SCORED)

    report = examine(Source("state", executor="tools"), play=play, levels=(0,))
    assert report.admitted is admitted
    assert {probe.name for probe in report.probes} == {"oracle", "echo", *IDLE}
    # twice the oracle, an echo, two mutants; the task has no shell for other attacks
    assert len(played) == 3 * (2 + 1 + len(IDLE) + 2)
    assert report.constant is None


def test_a_sandbox_that_is_lost_is_an_error_of_the_examination():
    async def play(task, oracle):
        return replace(spoken(task, ""), outcome=Outcome.INFRA_FAILED, error="no sandbox")

    report = examine(Source("state", executor="tools"), play=play)
    assert report.probes[0].errors == ("infra_failed: no sandbox",)
    assert not report.admitted


KEY = Key(domain="x.repeat", level=0, reference="x.repeat")


class Small(Source):
    """Seven questions; hashed, so that their split is what it is in a run."""

    def task(self, key, seed):
        return super().task(key, seed % 7)


def test_a_small_question_space_is_counted_and_told_though_the_domain_is_sound():
    """It was "ok", and its training ended in "None of 0 trained domains improved"."""
    held = sum(is_heldout(Source().task(KEY, seed)) for seed in range(7))
    report = examine(Small(), other=Small())
    assert report.admitted, report.reasons
    assert report.remarks == (
        f"{held} distinct held-out and {7 - held} training tasks; an evaluation takes 128 held-out "
        "ones unless told otherwise, and few show only large gains",
    )


def test_a_large_question_space_is_not_counted():
    class Large(Source):
        def task(self, key, seed):
            return super().task(replace(key, domain="x.repeat"), seed)

        async def drawn(self, key, *, root_seed, numbers):
            return [self.task(key, 100 * key.level + number) for number in numbers]

    report = examine(Large(), other=Large())
    assert (report.admitted, report.remarks) == (True, ())


def test_an_oracle_whose_reward_wavers_is_not_admitted():
    earned = iter([1.0, 0.5] * 1000)

    async def wavering(check, subject, tools):
        right = subject.reply == check.params["answer"]
        return Finding(value=next(earned) if right else 0.0)

    KINDS["wavering"] = wavering
    report = examine(Source("wavering"), levels=(0,))
    assert report.flaky == 3
    assert "3 oracles earned another reward when played again" in report.reasons


@pytest.mark.parametrize("where", ["objective", "workspace"])
def test_a_solution_in_reach_is_a_leak(where):
    source = "def check(order): return order.reply == 'secret'"

    class Leaking(Source):
        def task(self, key, seed):
            task = super().task(key, seed)
            check = replace(task.checks[0], params={**task.checks[0].params, "source": source})
            objective = task.description.objective + (source if where == "objective" else "")
            environment = Environment() if where == "workspace" else None
            return replace(task, checks=(check,), environment=environment,
                           description=Description(objective=objective))  # fmt: skip

    async def everything(task, lines):
        return lines

    async def paying_exact(check, subject, tools):
        return Finding(value=float(subject.reply == check.params["answer"]))

    KINDS["sourced"] = paying_exact
    report = examine(Leaking("sourced"), other=Leaking("sourced"), search=everything)
    assert not report.admitted
    assert 'shows the policy what it must not see: "def check(order)' in report.reasons[0]


def test_what_somebody_caught_must_earn_nothing():
    honest = Source()
    task = honest.task(Key(domain="x.repeat", level=1, reference="x"), 3)
    gold = task.private["gold"]
    caught = Fixture(domain="x.repeat", level=1, seed=3, reason="", turns=said(f"{gold}, surely"))
    assert examine(Source(), fixtures=[caught]).admitted
    report = examine(Source("substring"), fixtures=[caught])
    assert "caught" in {probe.name for probe in report.probes if not probe.passed}
    elsewhere = replace(caught, domain="y")
    names = {probe.name for probe in examine(Source(), fixtures=[elsewhere]).probes}
    assert "caught" not in names


def test_fixtures_are_read_and_a_broken_one_is_named(tmp_path):
    turns = [{"text": "", "tool_calls": [{"name": "shell", "arguments": {"command": "true"}}]},
             {"text": "Done."}]  # fmt: skip
    told = {"domain": "d", "level": 1, "seed": 5, "reason": "why", "turns": turns}
    (tmp_path / "a.json").write_text(json.dumps(told))
    (found,) = fixtures(tmp_path)
    assert (found.domain, found.level, found.seed, found.reason) == ("d", 1, 5, "why")
    assert found.turns.turns[0].tool_calls[0].arguments == {"command": "true"}
    assert found.turns.turns[1].text == "Done."
    (tmp_path / "b.json").write_text('{"domain": 1}')
    with pytest.raises(UsageError, match=r"b.json is no attacker fixture: KeyError 'turns'"):
        fixtures(tmp_path)


def test_reports_are_kept_by_what_was_examined(tmp_path):
    kept, report = Admissions(tmp_path / "admissions"), examine(Source())
    kept.put("abc", report)
    assert kept.get("abc") == report
    assert kept.get("abd") is None
    (tmp_path / "admissions/abc.json").write_text("{")
    assert kept.get("abc") is None


def test_the_fingerprint_follows_the_tasks_and_the_code_that_judges(monkeypatch):
    def fingerprint(source):
        clock = ManualClock()
        stack = Stack(Tools(clock=clock), kinds=KINDS)
        examiner = Examiner(source, source, stack, clock, play=None, search=nowhere)
        keys = [Key(domain="x.repeat", level=0, reference="x.repeat")]
        return asyncio.run(examiner.fingerprint(keys))

    first = fingerprint(Source())
    assert fingerprint(Source()) == first
    assert fingerprint(Source("numeric")) != first
    monkeypatch.setattr(admission, "_judging_code", lambda: "changed")
    assert fingerprint(Source()) != first


def test_tasks_that_are_slow_to_make_are_not_counted():
    clock = ManualClock()

    class Slow(Small):
        async def drawn(self, key, *, root_seed, numbers):
            clock.advance(0.5 * len(numbers))
            return await super().drawn(key, root_seed=root_seed, numbers=numbers)

        async def pool(self, *_, **__):
            pytest.fail("nothing is counted")

    report = examine(Slow(), other=Small(), clock=clock)
    assert report.admitted, report.reasons
    assert report.remarks == ("a task takes 0.5 s to make; how many there are was not counted",)
