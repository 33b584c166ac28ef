"""Policy losses against numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.train.algorithms import ALGORITHMS, Level, Surrogate, algorithm
from posttrain.train.losses import Tokens, k3, levelled, policy_loss, reference_loss
from posttrain.train.optimizer import MasterAdamW
from posttrain.train.settings import OptimizerSettings
from posttrain.train.tally import Tally

F64 = torch.float64


def tokens(behaviour, advantage, *, weight=None, row=None, fresh=None):
    behaviour = torch.tensor(behaviour, dtype=F64)
    row = torch.zeros(len(behaviour), dtype=torch.long) if row is None else torch.tensor(row)
    weight = [1.0] * len(behaviour) if weight is None else weight
    return Tokens(
        behaviour_N=behaviour,
        advantage_N=torch.tensor(advantage, dtype=F64),
        weight_N=torch.tensor(weight, dtype=F64),
        fresh_N=torch.tensor([True] * len(behaviour) if fresh is None else fresh),
        row_N=row,
        num_rows=int(row.max()) + 1,
    )


def run(name, differences, advantage, *, cap=None, weight=None, row=None, fresh=None, **changes):
    """Loss, gradient on the log-probabilities and metrics, for given log-ratios."""
    behaviour = [-1.0] * len(differences)
    now = torch.tensor([b + d for b, d in zip(behaviour, differences, strict=True)], dtype=F64)
    now.requires_grad_(True)
    tally = Tally()
    loss = policy_loss(
        now,
        tokens(behaviour, advantage, weight=weight, row=row, fresh=fresh),
        replace(ALGORITHMS[name], **changes),
        tally,
        importance_cap=cap,
    )
    loss.backward()
    return loss.item(), now.grad.tolist(), tally.metrics()


def test_on_policy_the_gradient_is_minus_the_advantage_in_every_preset():
    for name in ALGORITHMS:
        _, grad, metrics = run(name, [0.0, 0.0], [0.5, -2.0], row=[0, 1])
        assert grad == pytest.approx([-0.5, 2.0]), name
        assert metrics["clip_fraction"] == 0.0


def test_grpo_clips_the_token_ratio_where_that_is_worse():
    up, down = math.log(1.5), math.log(0.5)
    loss, grad, metrics = run("grpo", [up, down, up, down], [1.0, 1.0, -1.0, -1.0])
    # min(1.5, 1.2), min(0.5, 0.8), min(-1.5, -1.2), min(-0.5, -0.8)
    assert loss == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8))
    assert grad == pytest.approx([0.0, -0.5, 1.5, 0.0])
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(2))


def test_only_tokens_of_these_very_weights_measure_the_engine():
    differences = [0.1, -0.2, 0.5]
    _, _, metrics = run("grpo", differences, [1.0] * 3, fresh=[True, True, False])
    assert metrics["logprob_gap_mean"] == pytest.approx(0.15)
    assert metrics["logprob_gap_max"] == pytest.approx(0.2)
    assert metrics["policy_drift_mean"] == pytest.approx(0.5)
    _, _, metrics = run("grpo", differences, [1.0] * 3, fresh=[False] * 3)
    assert "logprob_gap_mean" not in metrics


def test_dapo_clips_higher_above():
    loss, grad, _ = run("dapo", [math.log(1.25), math.log(1.5)], [1.0, 1.0])
    assert loss == pytest.approx(-(1.25 + 1.28))
    assert grad == pytest.approx([-1.25, 0.0])


def test_rloo_weighs_a_whole_reply_by_its_product_ratio():
    loss, grad, _ = run("rloo", [0.1, -0.2, 0.05], [2.0] * 3, weight=[1 / 3] * 3)
    ratio = math.exp(-0.05)
    assert loss == pytest.approx(-2 * ratio)
    assert grad == pytest.approx([-2 * ratio] * 3)


def test_gspo_uses_the_geometric_mean_and_clips_the_whole_reply():
    loss, grad, _ = run("gspo", [0.1, -0.2, 0.05], [-1.0] * 3, weight=[1 / 3] * 3)
    assert loss == pytest.approx(1 - 3e-4)  # 0.983471 is below 1 - 3e-4: clipped, no gradient
    assert grad == [0.0] * 3
    loss, grad, _ = run("gspo", [0.1, -0.2, 0.05], [1.0] * 3, weight=[1 / 3] * 3)
    assert loss == pytest.approx(-0.983471, abs=1e-6)
    assert grad == pytest.approx([-0.983471 / 3] * 3, abs=1e-6)


def test_cispo_keeps_a_gradient_at_every_token_with_a_capped_weight():
    loss, grad, metrics = run("cispo", [math.log(8.0), math.log(0.5)], [1.0, -1.0])
    now = [-1 + math.log(8.0), -1 + math.log(0.5)]
    assert loss == pytest.approx(-(5.0 * now[0] - 0.5 * now[1]))
    assert grad == pytest.approx([-5.0, 0.5])
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_max"] == pytest.approx(8.0)


def test_a_truncated_importance_weight_scales_and_is_not_differentiated():
    loss, grad, metrics = run("dr_grpo", [math.log(4.0), math.log(0.5)], [1.0, 1.0], cap=2.0)
    assert loss == pytest.approx(-(2.0 + 0.5))
    assert grad == pytest.approx([-2.0, -0.5])
    assert metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("differences", "level", "right"),
    [
        ([0.1, -0.2, 0.05], Level.SEQUENCE, 0.951229),
        ([0.1, -0.2, 0.05], Level.GEOMETRIC, 0.983471),
        ([0.004] * 2000, Level.SEQUENCE, 2980.96),
        ([0.004] * 2000, Level.GEOMETRIC, 1.004008),
    ],
)
def test_sequence_ratios_BR_10(differences, level, right):
    # The masked token of 7.0 is not among the trained tokens at all; another row's must not leak.
    table = tokens([0.0] * (len(differences) + 1), [1.0] * (len(differences) + 1),
                   row=[0] * len(differences) + [1])  # fmt: skip
    ratio = levelled(torch.tensor([*differences, 7.0], dtype=F64), table, level).exp()
    assert ratio[:-1].tolist() == pytest.approx([right] * len(differences), rel=1e-6)
    assert ratio[-1].item() == pytest.approx(math.exp(7.0))


def test_the_ratio_is_reported_before_it_is_cut_BR_10():
    loss, grad, metrics = run("rloo", [100.0], [1.0])
    assert metrics["ratio_max"] == pytest.approx(math.exp(100.0))
    assert math.isfinite(loss)
    assert math.isfinite(grad[0])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_k3_is_finite_and_never_negative_BR_08(kind):
    given = [0.0, 0.5, -0.5, 2.0, 120.0, -120.0, 1e-4, -1e-4, 3e-8, 9.99, 10.01]
    d = torch.tensor(given, dtype=kind, requires_grad=True)
    value = k3(d)
    value.sum().backward()
    right = [0.0, 0.14872, 0.10653, 4.38906]
    assert value[:4].tolist() == pytest.approx(right, abs=1e-5)
    assert value[4].item() > k3(torch.tensor(10.0)).item()
    assert value[5].item() == pytest.approx(119.0)
    assert bool((value >= 0).all())
    assert bool(value.isfinite().all())
    assert bool(d.grad.isfinite().all())
    assert d.grad[1].item() == pytest.approx(math.expm1(0.5), rel=0.01)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_one_step_on_a_token_120_away_keeps_everything_finite_BR_08(kind):
    now = torch.nn.Parameter(torch.tensor([-121.0, -1.0, -1.0], dtype=kind))
    reference = torch.tensor([-1.0, -1.5, -121.0], dtype=kind)  # d = 120, -0.5, -120
    optimizer = MasterAdamW([("now", now)])
    table = tokens([-1.0] * 3, [0.0] * 3, weight=[1 / 3] * 3)
    tally = Tally()
    reference_loss(now, reference, table, tally).backward()
    norm = optimizer.update(OptimizerSettings(learning_rate=1.0, warmup_steps=0), step=1)
    assert math.isfinite(norm)
    assert bool(now.isfinite().all())
    assert now[0].item() > -121.0  # towards the reference
    assert math.isfinite(tally.metrics()["kl"])


def test_the_kl_gradient_pulls_towards_the_reference():
    now = torch.tensor([-1.0, -1.0], dtype=F64, requires_grad=True)
    reference = torch.tensor([-0.5, -1.5], dtype=F64)
    tally = Tally()
    table = tokens([-1.0, -1.0], [0.0, 0.0], weight=[0.5, 0.5])
    loss = reference_loss(now, reference, table, tally)
    loss.backward()
    assert loss.item() == pytest.approx((0.14872 + 0.10653) / 2, abs=1e-5)
    assert now.grad.tolist() == pytest.approx([-0.5 * math.expm1(0.5), -0.5 * math.expm1(-0.5)])
    assert tally.metrics()["kl"] == pytest.approx((0.14872 + 0.10653) / 2, abs=1e-5)


def test_a_mean_over_workers_counts_tokens_BR_04():
    tally = Tally()
    tally.mean("kl", torch.empty(0))
    assert tally.metrics() == {}
    tally.mean("kl", torch.ones(10))
    tally.mean("kl", torch.tensor([12.0]))
    assert tally.metrics() == {"kl": 2.0}


def test_every_preset_names_its_source_and_an_unknown_one_its_neighbour():
    assert set(ALGORITHMS) == {"grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"}
    assert all("arXiv" in preset.source for preset in ALGORITHMS.values())
    assert ALGORITHMS["cispo"].surrogate is Surrogate.WEIGHT
    with pytest.raises(ConfigError, match="did you mean 'dr_grpo'"):
        algorithm("dr_grppo")
