from posttrain.sandbox.moves import Demand


def asked(*times_s: float, warmed_s: float | None = None) -> Demand:
    demand = Demand(keep_s=60.0)
    if warmed_s is not None:
        demand.warmed(warmed_s)
    for now_s in times_s:
        demand.ask(now_s)
    return demand


def test_the_most_that_came_at_once_is_expected_until_it_has_decayed():
    demand = asked(0, 0, 0, 0, 10, 20)
    assert demand.expected(20) == 4  # 4 · 0.5^(10/60) = 3.56
    assert demand.expected(79) == 2  # 4 · 0.5^(69/60) = 1.80
    assert demand.expected(80) == 0  # nobody asked for 60 s


def test_a_higher_count_takes_the_place_of_a_lower_one_at_once():
    assert asked(0, 10, 10, 10, 20).expected(20) == 3


def test_who_asks_while_one_is_made_counts_as_asking_at_once():
    assert asked(0, 3, 20).expected(20) == 1
    assert asked(0, 3, 20, warmed_s=10.0).expected(20) == 2


def test_what_cannot_be_made_is_not_expected():
    demand = asked(0, 0, 10)
    demand.forget()
    assert demand.expected(10) == 0
    demand.ask(20)
    assert demand.expected(20) == 0
