import pytest

from posttrain.core.trajectory import Sampling
from posttrain.core.verdict import Outcome
from posttrain.evals.metrics import Constant, Evaluation, Result

GREEDY = Sampling(temperature=0.0)


def evaluation(by_domain, *, suite="s", weights="w", constants=None, sampling=GREEDY):
    """An evaluation from `domain -> rewards`; None is a lost attempt."""
    results = tuple(
        Result(
            task=f"{domain}/0/{index}",
            domain=domain,
            outcome=Outcome.VERIFIER_FAILED if reward is None else Outcome.SCORED,
            reward=None if reward is None else float(reward),
        )
        for domain, rewards in by_domain.items()
        for index, reward in enumerate(rewards)
    )
    best = {name: Constant(text="1", rate=rate) for name, rate in (constants or {}).items()}
    return Evaluation(
        suite=suite, weights=weights, sampling=sampling, results=results, constants=best
    )


@pytest.fixture(scope="session")
def evaluated():
    return evaluation
