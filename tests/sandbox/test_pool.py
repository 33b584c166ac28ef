from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from posttrain.core.errors import IllegalTransitionError, UsageError
from posttrain.sandbox.moves import (
    PAUSE_S,
    Ask,
    Close,
    Dead,
    End,
    Event,
    Forget,
    Gone,
    Hand,
    Left,
    Ready,
    Refuse,
    Start,
    Tick,
)
from posttrain.sandbox.pool import Pool, PoolSettings

KEYS = ("a", "b", "c")


@dataclass
class World:
    """What a driver would see: it obeys every instruction and complains of a wrong one."""

    pool: Pool
    now_s: float = 0.0
    warming: dict[int, str] = field(default_factory=dict)
    idle: dict[int, str] = field(default_factory=dict)
    draining: set[int] = field(default_factory=set)
    wanted: dict[int, str] = field(default_factory=dict)
    """Key of every requester so far."""
    waiting: dict[int, str] = field(default_factory=dict)
    holding: dict[int, int] = field(default_factory=dict)
    handed: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    """Requesters as they were served."""
    refused: dict[int, int | None] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    num_asked: int = 0

    def tell(self, event: Event) -> None:
        for instruction in self.pool.handle(event, now_s=self.now_s):
            self._obey(instruction)
        self.pool.check()

    def _obey(self, instruction) -> None:
        match instruction:
            case Start(sandbox=number, key=key):
                assert key in self.known, "started for an environment that was forgotten"
                self.warming[number] = key
            case Hand(sandbox=number, requester=requester):
                assert number not in self.handed, "handed out twice"
                key = self.waiting.pop(requester)
                assert self.idle.pop(number) == key, "of another environment"
                older = [one for one, wanted in self.waiting.items() if wanted == key]
                assert all(requester < one for one in older), "an older one was passed over"
                self.holding[requester] = number
                self.handed.append(number)
                self.order.append(requester)
            case End(sandbox=number):
                was_there = self.warming.pop(number, None) or self.idle.pop(number, None)
                if not was_there:
                    held = [one for one, sandbox in self.holding.items() if sandbox == number]
                    assert held, f"{number} is told to end and is not there"
                    del self.holding[held[0]]
                self.draining.add(number)
            case Refuse(requester=requester, sandbox=number):
                self.waiting.pop(requester, None)
                self.refused[requester] = number
            case Forget(key=key):
                self.known.remove(key)

    @property
    def alive(self) -> int:
        return len(self.warming) + len(self.idle) + len(self.draining) + len(self.holding)

    def ask(self, key: str, *, alone: bool = False) -> int:
        self.num_asked += 1
        key = f"{key} {self.num_asked}" if alone else key
        self.wanted[self.num_asked] = self.waiting[self.num_asked] = key
        self.known.add(key)
        self.tell(Ask(requester=self.num_asked, key=key, alone=alone))
        return self.num_asked

    def ready(self, number: int) -> None:
        self.idle[number] = self.warming.pop(number)
        self.tell(Ready(sandbox=number))

    def ready_all(self) -> None:
        while self.warming:
            self.ready(min(self.warming))

    def gone(self, number: int) -> None:
        self.draining.discard(number)
        self.warming.pop(number, None)
        self.idle.pop(number, None)
        self.holding = {one: held for one, held in self.holding.items() if held != number}
        self.tell(Gone(sandbox=number))

    def gone_all(self) -> None:
        while self.draining:
            self.gone(min(self.draining))

    def dead(self, requester: int) -> None:
        number = self.holding[requester]
        self.waiting[requester] = self.wanted[requester]
        self.waiting = dict(sorted(self.waiting.items()))
        self.tell(Dead(requester=requester))
        assert number in self.draining

    def leave(self, requester: int) -> None:
        self.waiting.pop(requester, None)
        self.tell(Left(requester=requester))
        assert requester not in self.holding

    def pass_time(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.tell(Tick())


def world(**bounds) -> World:
    return World(Pool(PoolSettings(**bounds)))


# --- being served -----------------------------------------------------------------------------


def test_a_first_requester_waits_for_one_to_be_warmed():
    made = world()
    one = made.ask("a")
    assert made.warming == {1: "a"}
    assert not made.holding
    made.ready(1)
    assert made.holding == {one: 1}
    made.leave(one)
    assert made.draining == {1}
    made.gone(1)
    stats = made.pool.stats()
    assert (stats.alive, stats.started, stats.asked, stats.found_warm) == (0, 1, 1, 0)


def test_a_returning_group_finds_as_many_warm_as_came_the_last_time():
    made = world()
    group = [made.ask("a") for _ in range(4)]
    made.ready_all()
    for one in group:
        made.leave(one)
    made.gone_all()
    assert made.alive == 0  # once is no forecast
    made.pass_time(10)
    first = made.ask("a")
    assert len(made.warming) == 1
    made.pass_time(PAUSE_S)
    made.ready_all()
    assert len(made.idle) == 4
    group = [made.ask("a") for _ in range(4)]
    assert made.order[-5:] == [first, *group]
    assert made.pool.stats().found_warm == 4
    assert not made.warming  # nothing slows them down just now
    assert made.pool.due_s == pytest.approx(made.now_s + PAUSE_S)
    made.pass_time(PAUSE_S)
    made.ready_all()
    assert len(made.idle) == 4


def test_environments_do_not_share():
    made = world()
    one, other = made.ask("a"), made.ask("b")
    made.ready(2)
    assert made.holding == {other: 2}
    made.ready(1)
    assert made.holding == {other: 2, one: 1}


def test_who_finds_no_room_waits_and_is_served_in_the_order_of_coming():
    made = world(max_alive=1)
    asked = [made.ask(key) for key in "abacb"]
    for _ in asked:
        made.ready_all()
        (holder,) = made.holding
        assert made.alive == 1
        made.leave(holder)
        made.gone_all()
    assert made.order == asked
    assert not made.refused


def test_room_is_taken_from_the_one_that_is_idle_longest():
    made = world(max_alive=3)
    early, late, own = made.ask("a"), made.ask("b"), made.ask("c")
    made.leave(early)
    made.leave(late)
    made.ready(2)
    made.ready(1)
    made.ready(3)
    assert made.idle == {1: "a", 2: "b"}
    two = made.ask("c")
    assert made.draining == {2}
    made.gone(2)
    made.ready_all()
    assert {own, two} == set(made.holding)
    assert made.idle == {1: "a"}


def test_as_much_room_is_made_as_who_waits_lacks():
    made = world(max_alive=3)
    for one in [made.ask(key) for key in "aab"]:
        made.leave(one)
    made.ready_all()
    first = made.ask("c")
    assert made.draining == {1}
    made.pass_time(1)
    assert made.draining == {1}
    second = made.ask("c")
    assert (made.draining, made.idle) == ({1, 2}, {3: "b"})
    made.gone_all()
    made.ready_all()
    assert made.order == [first, second]


def test_one_that_came_later_does_not_keep_what_an_earlier_one_needs_the_room_of():
    made = world(max_alive=1)
    gave_up = made.ask("b")
    made.leave(gave_up)
    first = made.ask("a")  # no room: what is being warmed for b has to end first
    later = made.ask("b")  # counts on it
    made.ready(1)
    assert made.draining == {1}
    made.gone(1)
    made.ready_all()
    assert made.order == [first]
    made.leave(first)
    made.gone_all()
    made.ready_all()
    assert made.order == [first, later]


def test_what_is_asked_for_alone_is_kept_for_nobody():
    made = world()
    for _ in range(2):
        one = made.ask("a", alone=True)
        made.ready_all()
        assert one in made.holding
        made.leave(one)
        made.gone_all()
        made.pass_time(1)
    gave_up = made.ask("a", alone=True)
    made.leave(gave_up)
    assert len(made.draining) == 1
    made.gone_all()
    assert (made.alive, made.known) == (0, set())


# --- trouble ----------------------------------------------------------------------------------


def test_one_found_dead_sends_its_requester_back_to_its_place_and_ends_all_idle_ones():
    made = world(max_alive=3)
    gave_up, other = made.ask("a"), made.ask("b")
    made.leave(gave_up)
    made.leave(other)
    made.ready_all()
    first = made.ask("a")
    behind = made.ask("a")
    made.dead(first)
    assert (made.draining, made.warming, made.idle) == ({1, 2}, {3: "a"}, {})
    made.ready(3)
    assert made.holding == {first: 3}
    made.gone_all()
    made.ready_all()
    assert made.order == [first, first, behind]
    assert made.pool.stats().dead == 1


def test_a_failure_is_told_to_the_oldest_who_waits_for_it_and_to_nobody_else():
    made = world(max_alive=2)
    first, second, other = made.ask("a"), made.ask("a"), made.ask("b")
    made.gone(1)
    assert made.refused == {first: 1}
    assert sorted(made.waiting) == [second, other]
    made.ready_all()
    assert sorted(made.holding) == [second, other]
    assert made.pool.stats().failed == 1


def test_a_failure_is_told_to_nobody_while_another_one_is_coming():
    made = world()
    gave_up, one = made.ask("a"), made.ask("a")
    made.leave(gave_up)
    made.gone(1)
    assert (made.refused, list(made.waiting)) == ({}, [one])
    made.gone(2)
    assert made.refused == {one: 2}


def test_a_failure_of_one_started_ahead_is_told_to_nobody_and_ends_the_forecast():
    made = world()
    made.leave(made.ask("a"))
    made.ready_all()
    made.pass_time(1)
    one = made.ask("a")
    assert one in made.holding
    made.pass_time(PAUSE_S)
    (ahead,) = made.warming
    made.gone(ahead)
    assert (made.refused, made.warming) == ({}, {})
    made.pass_time(1)
    assert not made.warming


def test_a_requester_that_gives_up_leaves_its_sandbox_to_the_next():
    made = world()
    gave_up = made.ask("a")
    made.leave(gave_up)
    made.ready(1)
    assert made.idle == {1: "a"}
    next_one = made.ask("a")
    assert made.holding == {next_one: 1}


def test_what_is_lost_at_once_is_made_anew_for_whoever_waits_and_is_left_quietly():
    made = world(max_alive=3)
    holder, gave_up = made.ask("a"), made.ask("b")
    made.ready(1)
    made.leave(gave_up)
    made.ready(2)
    waiting, blocked = made.ask("a"), made.ask("c")
    assert (made.holding, made.warming, made.draining) == ({holder: 1}, {3: "a"}, {2})
    for number in (1, 2, 3):
        made.gone(number)
    assert made.refused == {waiting: 3}
    assert made.warming == {4: "c"}
    made.leave(holder)
    made.ready(4)
    assert made.holding == {blocked: 4}
    assert made.pool.stats().failed == 2


def test_an_event_of_a_sandbox_that_is_not_there_is_refused():
    made = world()
    with pytest.raises(IllegalTransitionError, match="sandbox 7 is cold"):
        made.tell(Ready(sandbox=7))
    made.ask("a")
    made.ready(1)
    with pytest.raises(IllegalTransitionError, match="sandbox 1 is leased"):
        made.tell(Ready(sandbox=1))


def test_bounds_without_room_are_refused():
    with pytest.raises(UsageError, match="max_alive"):
        PoolSettings(max_alive=0)


# --- time -------------------------------------------------------------------------------------


def test_starts_beyond_the_rate_wait_for_their_time():
    made = world(starts_per_s=2.0)
    for _ in range(4):
        made.ask("a")
    assert len(made.warming) == 2
    assert made.pool.due_s == pytest.approx(0.5)
    made.pass_time(0.5)
    assert len(made.warming) == 3
    made.pass_time(0.5)
    assert (len(made.warming), made.pool.due_s) == (4, None)


def test_what_nobody_asks_for_is_ended_and_its_environment_forgotten():
    made = world(keep_s=60.0)
    made.leave(made.ask("a"))
    made.ready_all()
    made.pass_time(30)
    made.leave(made.ask("a"))
    made.gone_all()
    made.pass_time(1)
    made.ready_all()
    assert len(made.idle) == 1
    assert made.pool.due_s == 90.0
    made.pass_time(59)
    assert made.pool.due_s == 91.0  # nothing is expected, and it is not that old
    assert len(made.idle) == 1
    made.pass_time(1)
    assert not made.idle
    made.gone_all()
    assert (made.pool.due_s, made.known) == (None, set())
    assert made.pool.stats().unused == 1


def test_what_is_more_than_the_forecast_wants_is_ended_when_it_is_old():
    made = world(keep_s=60.0)
    for one in [made.ask("a") for _ in range(3)]:
        made.leave(one)
    made.ready_all()
    made.pass_time(50)
    made.leave(made.ask("a"))
    made.gone_all()
    made.pass_time(PAUSE_S)
    made.ready_all()
    assert sorted(made.idle) == [2, 3, 4]  # three came at once before
    made.pass_time(50)
    assert (sorted(made.idle), made.draining) == ([3, 4], {2})


def test_closing_ends_everything_and_refuses_who_waits_and_who_asks():
    made = world(max_alive=3)
    holder = made.ask("a")
    made.ready_all()
    gave_up = made.ask("b")
    made.leave(gave_up)
    made.ready_all()
    warming, blocked = made.ask("c"), made.ask("c")
    made.tell(Close())
    assert made.refused == {warming: None, blocked: None}
    assert made.draining == {1, 2, 3}
    late = made.ask("c")
    assert made.refused[late] is None
    made.tell(Left(requester=holder))
    made.tell(Ready(sandbox=3))
    made.tell(Dead(requester=holder))
    assert made.refused[holder] is None
    made.gone_all()
    made.tell(Close())
    assert (made.pool.stats().alive, made.known, made.pool.due_s) == (0, set(), None)


# --- any order of events ----------------------------------------------------------------------

CAP = 5


class PoolInAnyOrder(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = world(max_alive=CAP, max_idle=3, keep_s=50.0, starts_per_s=4.0)

    @rule(key=st.sampled_from(KEYS), alone=st.booleans(), count=st.integers(1, 4))
    def ask(self, key, alone, count):
        for _ in range(count):
            self.world.ask(key, alone=alone)

    @precondition(lambda self: self.world.warming)
    @rule(data=st.data(), fails=st.sampled_from((False, False, True)))
    def warmed(self, data, fails):
        number = data.draw(st.sampled_from(sorted(self.world.warming)))
        (self.world.gone if fails else self.world.ready)(number)

    @precondition(lambda self: self.world.draining)
    @rule(data=st.data())
    def ended(self, data):
        self.world.gone(data.draw(st.sampled_from(sorted(self.world.draining))))

    @precondition(lambda self: self.world.holding)
    @rule(data=st.data())
    def found_dead(self, data):
        self.world.dead(data.draw(st.sampled_from(sorted(self.world.holding))))

    @precondition(lambda self: self.world.holding or self.world.waiting)
    @rule(data=st.data())
    def leave(self, data):
        either = sorted({*self.world.holding, *self.world.waiting})
        self.world.leave(data.draw(st.sampled_from(either)))

    @rule(duration_s=st.sampled_from((0.001, 0.2, 1.0, 30.0)))
    def time_passes(self, duration_s):
        self.world.pass_time(duration_s)

    @precondition(lambda self: self.world.alive)
    @rule()
    def everything_is_found_dead(self):
        for requester in list(self.world.holding):
            self.world.dead(requester)

    @precondition(lambda self: self.world.idle or self.world.holding)
    @rule(data=st.data())
    def one_crashes(self, data):
        there = sorted({*self.world.idle, *self.world.holding.values()})
        self.world.gone(data.draw(st.sampled_from(there)))

    @precondition(lambda self: self.world.alive)
    @rule()
    def everything_is_lost(self):
        made = self.world
        there = {*made.warming, *made.idle, *made.holding.values(), *made.draining}
        for number in sorted(there):
            made.gone(number)

    @invariant()
    def the_pool_knows_what_is_there(self):
        made, stats = self.world, self.world.pool.stats()
        assert made.alive <= CAP
        assert (stats.warming, stats.idle) == (len(made.warming), len(made.idle))
        assert (stats.leased, stats.draining) == (len(made.holding), len(made.draining))
        assert (stats.waiting, stats.keys) == (len(made.waiting), len(made.known))

    @invariant()
    def nobody_waits_while_there_is_room(self):
        """Without the pool's own account: who waits counts on one that is being warmed, on room
        that is being made, or waits for the rate or for those that others hold.
        """
        made = self.world
        coming = list(made.warming.values())
        lacking = [key for key in made.waiting.values() if not _take(coming, key)]
        if lacking and made.alive < CAP:
            assert made.pool.due_s is not None, "nothing will ever start it"
            assert made.pool.due_s <= made.now_s + 0.25 + 1e-6
        if len(lacking) > len(made.draining) and made.alive == CAP:
            assert not made.idle, "room could be made"

    def teardown(self):
        """If from now on all goes well, everybody is served, in the order of coming to each
        environment; what is not asked for is let go; and closing leaves nothing.
        """
        made = self.world
        served, waited = len(made.order), dict(made.waiting)
        for _ in range(10 * (len(waited) + CAP)):
            made.pass_time(0.25)
            made.ready_all()
            for requester in list(made.holding):
                made.leave(requester)
            made.gone_all()
        assert not made.waiting
        assert sorted(made.order[served:]) == sorted(waited)
        while (due_s := made.pool.due_s) is not None:
            assert due_s > made.now_s, "a tick that changes nothing"
            made.pass_time(due_s - made.now_s)
            made.ready_all()
            made.gone_all()
        assert (made.alive, made.known) == (0, set())
        holder, _ = made.ask("a"), made.ask("b")
        made.ready(min(made.warming))
        assert holder in made.holding
        made.tell(Close())
        made.gone_all()
        assert (made.alive, made.known, made.waiting) == (0, set(), {})


class PoolClosedInAnyState(PoolInAnyOrder):
    def teardown(self):
        """Closing ends whatever there is, in any state, and nobody is left without an answer."""
        made = self.world
        waiting, there = set(made.waiting), made.alive
        made.tell(Close())
        assert waiting <= made.refused.keys()
        assert (made.waiting, made.holding, len(made.draining)) == ({}, {}, there)
        assert made.refused[made.ask("a")] is None
        made.gone_all()
        assert (made.alive, made.known, made.pool.due_s) == (0, set(), None)


def _take(found: list[str], wanted: str) -> bool:
    if wanted in found:
        found.remove(wanted)
        return True
    return False


PoolInAnyOrder.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolInAnyOrder = PoolInAnyOrder.TestCase
PoolClosedInAnyState.TestCase.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None
)
TestPoolClosedInAnyState = PoolClosedInAnyState.TestCase
