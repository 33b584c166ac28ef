"""Which attempts are to be reviewed: the base sample's probabilities, and each other source."""

from __future__ import annotations

from collections import Counter

import pytest

from posttrain.core import seeds
from posttrain.core.errors import UsageError
from posttrain.evals.selection import (
    WINDOW,
    Alarm,
    Facts,
    ReviewPlan,
    Selected,
    Source,
    Voices,
    base_sample,
    select,
)

NO_BASE = ReviewPlan(share=0.0, least=0)


def fact(number: int, *, root: int = 0, **more: object) -> Facts:
    key = seeds.hex_key("test", root, number)
    told = {
        "domain": "a", "level": 0, "seed": number, "ended": number, "reward": 1.0,
        "chance": seeds.unit("review", key), "chars": 100,
    }  # fmt: skip
    return Facts(key=key, **{**told, **more})  # type: ignore[arg-type]


def sources(chosen: dict[str, Selected]) -> dict[str, set[Source]]:
    return {key: set(one.sources) for key, one in chosen.items()}


def test_every_attempt_is_in_the_base_sample_as_often_as_it_is_said_to_be() -> None:
    """500 runs whose keys differ: what was said (here: the number) plays no part."""
    plan, runs = ReviewPlan(share=0.1, least=2), 500
    seen: Counter[int] = Counter()
    for root in range(runs):
        made = [
            fact(n, root=root, domain="a" if n < 50 else "b", reward=1.0 if n % 5 else 0.0)
            for n in range(60)
        ]
        found = base_sample(made, plan)
        strata = Counter((made[n].domain, made[n].accepted) for n in range(60))
        for number, one in enumerate(made):
            size = strata[one.domain, one.accepted]
            if one.key in found:
                seen[number] += 1
                assert found[one.key] == max(-(-size // 10), min(2, size)) / size
    # a accepted: 40 → 4; a rejected: 10 → 2 of 10; b accepted: 8 → 2; b rejected: 2 → 2
    for number in range(60):
        wanted = (0.1 if number % 5 else 0.2) if number < 50 else (0.25 if number % 5 else 1.0)
        spread = 4.5 * (wanted * (1 - wanted) / runs) ** 0.5
        assert abs(seen[number] / runs - wanted) <= spread, number


def test_a_growing_run_keeps_most_of_its_sample() -> None:
    made = [fact(n) for n in range(2000)]
    before = base_sample(made[:1000], ReviewPlan())
    after = base_sample(made, ReviewPlan())
    assert (len(before), len(after)) == (10, 20)
    assert len(set(before) & set(after)) >= 8


def test_an_alarm_brings_accepts_and_rejects_around_it() -> None:
    made = [fact(n, reward=float(n % 2)) for n in range(1000)] + [
        fact(2000 + n, domain="b") for n in range(10)
    ]
    plan = ReviewPlan(share=0.0, least=0, around=20)
    chosen = select(made, alarms=[Alarm("a", 500, "hold"), Alarm("gone", 1, "hold")], plan=plan)
    assert Counter(one.facts.accepted for one in chosen.values()) == {True: 20, False: 20}
    assert all(abs(one.facts.ended - 500) <= WINDOW for one in chosen.values())
    whys = {one.sources[Source.ALARM] for one in chosen.values()}
    assert whys == {"accepted around a hold", "rejected around a hold"}
    later = [*made, *(fact(5000 + n, reward=float(n % 2)) for n in range(500))]
    again = select(later, alarms=[Alarm("a", 500, "hold")], plan=plan)
    assert set(again) == set(chosen)


@pytest.mark.parametrize(
    ("least", "most", "judge", "program", "why"),
    [
        (0.0, 1.0, None, 0.5, "one component pays in full, another nothing"),
        (0.0, 1.0, 1.0, 0.0, "judge 1 against program 0"),
        (0.5, 1.0, 0.5, 1.0, "judge 0.5 against program 1"),
        (0.5, 1.0, None, 0.75, ""),
        (0.0, 0.9, None, 0.4, ""),
        (0.6, 1.0, 0.6, 1.0, ""),
    ],
)
def test_components_that_contradict_one_another_are_looked_at(
    least: float, most: float, judge: float | None, program: float | None, why: str
) -> None:
    one = fact(0)
    heard = [Voices(one.key, least, most, judge, program), Voices("unknown", 0.0, 1.0)]
    chosen = select([one], voices=heard, plan=NO_BASE)
    assert [item.sources for item in chosen.values()] == ([{Source.DISAGREEMENT: why}] * bool(why))


def test_a_verdict_that_was_turned_round_later_is_looked_at() -> None:
    up = fact(0, reward=1.0, first_reward=0.0, judged=2)
    down = fact(1, reward=0.0, first_reward=1.0, judged=2)
    mended = fact(2, reward=1.0, first_reward=None, judged=2)
    still = fact(3, reward=1.0, first_reward=1.0, judged=2)
    moved = fact(4, reward=0.5, first_reward=0.2, judged=2)
    once = fact(5, reward=1.0, first_reward=None)
    chosen = select([up, down, mended, still, moved, once], plan=NO_BASE)
    assert sources(chosen) == {one.key: {Source.FLIP} for one in (up, down, mended)}


def test_short_and_long_winners_are_outliers_of_their_domain() -> None:
    usual = [fact(n) for n in range(30)]
    short, long = fact(30, chars=24), fact(31, chars=401)
    inside, lost = fact(32, chars=400), fact(33, chars=None)
    rejected, elsewhere = fact(34, chars=1, reward=0.0), fact(35, chars=1, domain="b")
    chosen = select([*usual, short, long, inside, lost, rejected, elsewhere], plan=NO_BASE)
    assert sources(chosen) == {one.key: {Source.OUTLIER} for one in (short, long)}
    assert chosen[short.key].sources[Source.OUTLIER] == "24 characters, usual are 100"
    assert select([*usual[:15], short], plan=NO_BASE) == {}


def test_almost_the_same_text_that_wins_different_tasks_is_an_outlier() -> None:
    same = [fact(n, sketch="s") for n in range(3)]
    one_task = [fact(10 + n, sketch="t", seed=1) for n in range(5)]
    losers = [fact(20 + n, sketch="u", reward=0.0) for n in range(5)]
    chosen = select([*same, *one_task, *losers, fact(30), fact(31), fact(32)], plan=NO_BASE)
    assert sources(chosen) == {one.key: {Source.OUTLIER} for one in same}


def test_one_source_does_not_flood_the_queue() -> None:
    made = [fact(n, domain="ab"[n % 2], first_reward=0.0, judged=2) for n in range(100)]
    chosen = select(made, plan=ReviewPlan(share=0.0, least=0, most=7))
    assert Counter(one.facts.domain for one in chosen.values()) == {"a": 7, "b": 7}


def test_an_attempt_is_there_once_with_all_it_came_from_and_alarms_come_first() -> None:
    made = [fact(n) for n in range(6)]
    made[3] = made[3]._replace(first_reward=0.0, judged=2)
    heard = [Voices(made[3].key, 0.0, 1.0), Voices(made[4].key, 0.0, 1.0)]
    plan = ReviewPlan(share=1.0, around=1)
    chosen = select(made, voices=heard, alarms=[Alarm("a", 3, "hold")], plan=plan)
    assert len(chosen) == 6
    assert {Source.DISAGREEMENT, Source.FLIP, Source.BASE} <= set(chosen[made[3].key].sources)
    assert all(one.inclusion == 1.0 for one in chosen.values())
    ranks = [min(list(Source).index(s) for s in one.sources) for one in chosen.values()]
    assert ranks == sorted(ranks)
    assert ranks[0] == 0
    assert list(select(made[::-1], voices=heard, alarms=[Alarm("a", 3, "hold")], plan=plan)) == [
        *chosen
    ]


@pytest.mark.parametrize(
    "wrong", [{"share": 1.5}, {"second": -0.1}, {"least": -1}, {"lease_s": 0.0}, {"most": -1}]
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="wanted"):
        ReviewPlan(**wrong)  # type: ignore[arg-type]
