from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import IllegalTransitionError
from posttrain.core.events import (
    Drawn,
    Dropped,
    Ended,
    Entered,
    Finished,
    LedgerEvent,
    Rewound,
    Trained,
)
from posttrain.schedule.account import Account, Status


def entered(key: str, *, tries: int = 1) -> Entered:
    return Entered(key=key, draw=int(key[1:]), member=0, tries=tries)


def finished(key: str, *, outcome: str = "scored") -> Finished:
    return Finished(
        key=key, outcome=outcome, reward=1.0, stop="finished", num_tokens=3, oldest_version=0,
        place="1:0:9",
    )  # fmt: skip


def folded(*events: LedgerEvent) -> Account:
    account = Account()
    for event in events:
        account.apply(event)
        account.check()
    return account


def test_the_sums_add_up_by_hand() -> None:
    keys = [f"k{i}" for i in range(6)]
    account = folded(
        Drawn(draw=0, domain="d", level=0, seed=1, size=6, phase="rl"),
        *(entered(key) for key in keys),
        *(finished(key) for key in keys[:5]),
        Trained(step=1, version=1, keys=("k0", "k1")),
        Dropped(keys=("k2",), reason="stale"),
        Dropped(keys=("k3",), reason="domain_error: it raised"),
        Ended(reason="interrupted"),
    )
    stats = account.stats()
    assert (stats.entered, stats.trained, stats.pending, stats.finished) == (6, 2, 2, 1)
    assert stats.dropped == {"stale": 1, "domain_error": 1}
    assert [attempt.key for attempt in account.pending()] == ["k4", "k5"]
    assert account.step == 1


def test_training_twice_is_refused_with_the_story() -> None:
    account = folded(entered("k1"), finished("k1"), Trained(step=4, version=4, keys=("k1",)))
    with pytest.raises(IllegalTransitionError, match=r"k1 \(draw 1, .*was trained at step 4"):
        account.apply(Trained(step=5, version=5, keys=("k1",)))
    account.check()
    assert account.stats().trained == 1


def test_an_event_that_breaks_the_table_changes_nothing() -> None:
    account = folded(entered("k1"), finished("k1"), entered("k2"))
    for event in (
        Trained(step=1, version=1, keys=("k1", "k2")),
        Trained(step=1, version=1, keys=("k1", "k1")),
        Trained(step=0, version=1, keys=("k1",)),
        Dropped(keys=("k1", "k9"), reason="stale"),
        Finished(key="k1", outcome="scored", reward=0.0, stop="finished", num_tokens=1,
                 oldest_version=0, place=""),
        entered("k2"),
    ):  # fmt: skip
        with pytest.raises(IllegalTransitionError):
            account.apply(event)
        account.check()
        assert account.stats().finished == 1
        assert account.stats().pending == 2


def test_dropped_is_final() -> None:
    account = folded(entered("k1"), Dropped(keys=("k1",), reason="cancelled"))
    for event in (entered("k1", tries=2), finished("k1"), Dropped(keys=("k1",), reason="again")):
        with pytest.raises(IllegalTransitionError, match=r"was dropped \(cancelled\)"):
            account.apply(event)


def test_going_back_returns_what_was_trained_after_the_cut() -> None:
    account = folded(
        entered("k1"), entered("k2"), finished("k1"), finished("k2"),
        Trained(step=1, version=1, keys=("k1",)),
        Trained(step=2, version=2, keys=("k2",)),
        Rewound(step=1, version=1),
    )  # fmt: skip
    second = account.attempt("k2")
    assert second is not None
    assert second.status is Status.FINISHED
    assert second.finished is not None
    account.apply(Trained(step=2, version=3, keys=("k2",)))
    account.check()
    assert account.stats().trained == 2


def test_a_rolled_back_attempt_may_be_made_again_under_its_key() -> None:
    account = folded(
        entered("k1"), finished("k1"), Trained(step=1, version=1, keys=("k1",)),
        Rewound(step=0, version=0), entered("k1", tries=2),
    )  # fmt: skip
    attempt = account.attempt("k1")
    assert attempt is not None
    assert (attempt.status, attempt.tries, attempt.finished) == (Status.ENTERED, 2, None)
    assert account.stats().entered == 1


@dataclass
class Brute:
    """The account as plain lists, recounted from the whole history each time."""

    history: list[LedgerEvent] = field(default_factory=list)

    def states(self) -> dict[str, str]:
        states: dict[str, str] = {}
        for index, event in enumerate(self.history):
            match event:
                case Entered():
                    states[event.key] = "entered"
                case Finished():
                    states[event.key] = "finished"
                case Dropped():
                    states.update(dict.fromkeys(event.keys, "dropped"))
                case Trained():
                    if self._survives(index, event.step):
                        states.update(dict.fromkeys(event.keys, "trained"))
        return states

    def _survives(self, index: int, step: int) -> bool:
        later = self.history[index + 1 :]
        return not any(isinstance(e, Rewound) and e.step < step for e in later)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 7)), max_size=60))
def test_random_histories_agree_with_a_brute_force_model(
    moves: list[tuple[int, int, int]],
) -> None:
    account, brute, tries = Account(), Brute(), Counter[str]()
    for kind, first, second in moves:
        a, b = f"k{first}", f"k{second}"
        event: LedgerEvent
        if kind <= 1:
            tries[a] += 1
            event = entered(a, tries=tries[a])
        elif kind == 2:
            event = finished(a)
        elif kind == 3:
            event = Trained(step=account.step + 1, version=1, keys=(a, b))
        elif kind == 4:
            event = Dropped(keys=(a,), reason="x")
        else:
            event = Rewound(step=first % (account.step + 1), version=0)
        states = brute.states()
        legal = {
            Entered: states.get(a) in (None, "entered", "finished"),
            Finished: states.get(a) == "entered",
            Trained: states.get(a) == states.get(b) == "finished" and a != b,
            Dropped: states.get(a) in ("entered", "finished"),
            Rewound: True,
        }[type(event)]
        if legal:
            account.apply(event)
            brute.history.append(event)
        else:
            with pytest.raises(IllegalTransitionError):
                account.apply(event)
        account.check()
        counts = Counter(brute.states().values())
        stats = account.stats()
        assert (
            stats.entered
            == counts.total()
            == stats.trained + stats.pending + sum(stats.dropped.values())
        )
        assert stats.trained == counts["trained"]
        assert stats.finished == counts["finished"]
        assert stats.dropped.get("x", 0) == counts["dropped"]
