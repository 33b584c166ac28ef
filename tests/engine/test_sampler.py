from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import EngineError
from posttrain.core.trajectory import Sampling
from posttrain.engine.sampler import Ask, draw, uniforms

VOCAB = 300


def logits(rows: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64) * 3).to(dtype)


def reference(z: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """Token → probability, by the definitions, in Python numbers."""
    scaled = [float(x) / (sampling.temperature or 1.0) for x in z.tolist()]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total = math.fsum(weights.values())
    kept, mass = [], 0.0
    for i in order:
        if kept and mass >= sampling.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    total = math.fsum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 40),
    seed=st.integers(0, 50),
)
def test_truncation_is_exact_against_a_plain_reference(temperature, top_p, top_k, seed):
    z = logits(1, seed=seed, dtype=torch.float64)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    expected = reference(z[0], sampling)
    many = [Ask(sampling, position) for position in range(60)]
    for token, logprob in ((d.token, d.logprob) for d in draw(z.expand(60, -1), many)):
        assert token in expected
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-10)


def test_frequencies_follow_the_distribution():
    """Chi-square over the likeliest tokens and the rest; the seed is fixed."""
    z = logits(1)
    draws = draw(z.expand(20_000, -1), [Ask(Sampling(seed=1), p) for p in range(20_000)])
    counts = np.bincount([d.token for d in draws], minlength=VOCAB)
    p = z[0].double().softmax(-1).numpy()
    common = np.argsort(-p)[:40]
    observed = [*counts[common], 20_000 - counts[common].sum()]
    expected = [*20_000 * p[common], 20_000 * (1 - p[common].sum())]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert statistic < 73.4  # the 99.9 % point of 40 degrees of freedom


def test_the_logprob_is_the_log_softmax_at_the_tokens_temperature():
    z = logits(4)
    asks = [Ask(Sampling(seed=i, temperature=t), 5) for i, t in enumerate((0.5, 1.0, 1.5, 1.0))]
    for row, ask, drawn in zip(z, asks, draw(z, asks), strict=True):
        expected = (row / ask.sampling.temperature).log_softmax(-1)[drawn.token]
        assert drawn.logprob == pytest.approx(float(expected), abs=2e-6)


def test_greedy_takes_the_largest_and_reports_the_logprob_at_temperature_one():
    z = logits(3)
    drawn = draw(z, [Ask(Sampling(temperature=0.0), 1)] * 3)
    assert [d.token for d in drawn] == z.argmax(-1).tolist()
    expected = z.log_softmax(-1).amax(-1).tolist()
    assert [d.logprob for d in drawn] == pytest.approx(expected, abs=2e-6)


def test_a_token_depends_on_its_own_row_seed_and_position_only():
    z = logits(8)
    samplings = [Sampling(seed=i, temperature=1.0 if i % 2 else 0.0, top_p=0.9 if i % 3 else 1.0)
                 for i in range(8)]  # fmt: skip
    together = draw(z, [Ask(s, 7) for s in samplings])
    for index in range(8):
        alone = draw(z[index : index + 1], [Ask(samplings[index], 7)])
        assert alone[0].token == together[index].token
        assert alone[0].logprob == pytest.approx(together[index].logprob, abs=1e-6)


def test_equal_requests_draw_equal_tokens_and_other_seeds_or_positions_others():
    z = logits(1).expand(200, -1)
    first = [d.token for d in draw(z, [Ask(Sampling(seed=1), p) for p in range(200)])]
    again = [d.token for d in draw(z, [Ask(Sampling(seed=1), p) for p in range(200)])]
    other = [d.token for d in draw(z, [Ask(Sampling(seed=2), p) for p in range(200)])]
    assert first == again
    assert first != other
    assert len(set(first)) > 20


def test_impossible_tokens_are_never_drawn():
    z = torch.full((1, VOCAB), -math.inf)
    z[0, [3, 129, 299]] = 0.0
    draws = draw(z.expand(2_000, -1), [Ask(Sampling(seed=9), p) for p in range(2_000)])
    assert {d.token for d in draws} == {3, 129, 299}
    assert {round(d.logprob, 5) for d in draws} == {round(-math.log(3), 5)}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_without_a_distribution_are_an_error(bad):
    z = logits(2)
    z[1, 4] = bad
    with pytest.raises(EngineError, match="not finite"):
        draw(z, [Ask(Sampling(), 0)] * 2)


def test_random_numbers_fill_the_unit_interval_evenly_for_neighbouring_seeds_and_positions():
    grid = [(seed, position) for seed in range(100) for position in range(100)]
    u = uniforms([s for s, _ in grid], [p for _, p in grid])
    assert u.min() >= 0
    assert u.max() < 1
    assert len(set(u.tolist())) > 9_990
    counts, _ = np.histogram(u, bins=20, range=(0, 1))
    assert sum((c - 500) ** 2 / 500 for c in counts) < 43.8  # 99.9 % point of 19 degrees
    table = u.reshape(100, 100)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


def test_seeds_of_any_size_are_accepted():
    assert uniforms([2**63 - 1, 2**64 + 5, -1], [0, 0, 0]).shape == (3,)
