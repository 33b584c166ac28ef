from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.verdict import Outcome
from posttrain.loop.health import MIN_FAILURES, WINDOW, Health

GOOD, BAD = Outcome.SCORED, Outcome.VERIFIER_FAILED


def test_a_domain_that_only_fails_is_due_with_its_evidence() -> None:
    health = Health()
    due = [health.record([Outcome.INFRA_FAILED], errors=["no disk"]) for _ in range(12)]
    assert due.index(True) == MIN_FAILURES - 1
    assert "no disk" in health.evidence


def test_wrong_answers_and_cancelled_attempts_are_healthy() -> None:
    health = Health()
    assert not health.record([Outcome.POLICY_FAILED, Outcome.CANCELLED, GOOD] * 20)
    assert health.stats().failures == 0


@given(st.lists(st.booleans(), max_size=60))
def test_quarantine_needs_half_of_the_window(failed: list[bool]) -> None:
    health = Health()
    quarantined = False
    for index in range(len(failed)):
        quarantined |= health.record([BAD if failed[index] else GOOD])
        health.check()
        window = failed[max(0, index + 1 - WINDOW) : index + 1]
        if sum(window) >= MIN_FAILURES:
            assert quarantined
    if not any(sum(failed[i : i + WINDOW]) >= MIN_FAILURES for i in range(len(failed))):
        assert not quarantined
