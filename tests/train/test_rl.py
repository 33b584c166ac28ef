"""From groups to the loss of a step: what is compared with what, and what never counts."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.core.ports import Example
from posttrain.train import logprobs
from posttrain.train.algorithms import ALGORITHMS, Normaliser
from posttrain.train.batch import Batch
from posttrain.train.logprobs import selected_logprobs
from posttrain.train.losses import policy_loss, reference_loss, supervised_loss
from posttrain.train.pack import from_examples, normalised, pack
from posttrain.train.rl import PolicyObjective
from posttrain.train.settings import TrainSettings
from posttrain.train.tally import Tally
from tests.train.builders import group, member, row

F64 = torch.float64


def plan(*rewards, algorithm):
    """The plan of a step on groups with these rewards, each reply its own token."""
    objective = PolicyObjective(
        TrainSettings(algorithm=algorithm, kl_weight=0.0), reference=None, temperature=1.0
    )
    groups = [
        group(
            [member([row([draw], [9, i])], reward, number=i) for i, reward in enumerate(of)],
            draw=draw,
        )
        for draw, of in enumerate(rewards)
    ]
    return objective.plan(groups)


def test_a_group_is_never_normalised_with_another_BR_01():
    made = plan([1.0] * 4, [0.0, 0.0, 0.0, 1.0], algorithm="grpo")
    first, second = made.trainables[:4], made.trainables[4:]
    assert [t.advantage for t in first] == [0.0] * 4  # over the whole batch it were + 0.7246
    assert all(t.silent for t in first)
    assert [t.advantage for t in second] == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=5e-6)
    assert made.metrics == {"flat_groups": 0.5}


def test_a_group_of_one_trains_nothing_BR_01():
    assert plan([0.3], algorithm="grpo").skipped == "no group has two different rewards"


def test_a_crashed_grader_leaves_the_baseline_and_the_batch_BR_25():
    made = plan([1.0, 0.0, None, 1.0], algorithm="dr_grpo")
    assert [t.advantage for t in made.trainables] == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert (made.num_sequences, made.num_tokens) == (3, 6)


def ratio_loss(name, differences, masked):
    """Loss and metrics of a reply whose log-ratios are these, behind it tokens with mask 0."""
    trained = len(differences)
    mask = [True] * trained + [False] * masked
    reply = row([5, 6], [1] * len(mask), mask=mask)
    table = normalised(from_examples([Example(row=reply)]), Normaliser.SEQUENCE_MEAN)
    (micro,) = pack(table, budget=4000)
    tokens = Batch.of(micro, dtype=F64).tokens
    assert len(tokens.behaviour_N) == trained
    tally = Tally()
    now = tokens.behaviour_N + torch.tensor(differences, dtype=F64)
    return policy_loss(now, tokens, ALGORITHMS[name], tally).item(), tally.metrics()["ratio_max"]


def test_a_masked_token_has_no_part_in_a_sequences_ratio_BR_10():
    """`rloo` names the product, `gspo` the geometric mean; neither is 2.9752 (a sum of
    exponentials), 1043 (the masked 7.0 included) or 0.987578 (divided by 4).
    """
    differences = [0.1, -0.2, 0.05]
    assert ratio_loss("rloo", differences, 1)[0] == pytest.approx(-0.951229, abs=1e-6)
    assert ratio_loss("gspo", differences, 1)[0] == pytest.approx(-0.983471, abs=1e-6)


def test_a_long_reply_has_the_ratio_its_algorithm_names_BR_10():
    differences = [0.004] * 2000
    loss, told = ratio_loss("rloo", differences, 0)
    assert (-loss, told) == pytest.approx((2980.957987, 2980.957987), rel=1e-6)
    loss, told = ratio_loss("gspo", differences, 0)
    assert told == pytest.approx(1.004008, abs=1e-6)  # as it was before it was clipped
    assert -loss == pytest.approx(1 + 4e-4)


MASK = [True] * 3 + [False] * 4 + [True] * 2
REPLIES = [[1, 2, 3, 40, 41, 42, 43, 7, 8], [1, 2, 4, 50, 51, 52, 53, 9, 8]]
SILENT = {3, 4, 40, 41, 42, 50, 51, 52}
"""Inputs whose next token is a tool's."""


@pytest.mark.parametrize("normaliser", list(Normaliser))
@pytest.mark.parametrize("kind", ["supervised", "kl"])
def test_imitation_and_kl_leave_tool_tokens_alone_in_every_path_BR_14(
    exact_model, monkeypatch, kind, normaliser
):
    """As `test_packed_pass` has it for the policy losses. A KL has no part in a masked token
    either, whatever it is there: the reference is far away.
    """
    examples = [Example(row=row([5, 6], reply, mask=MASK)) for reply in REPLIES]
    table = normalised(from_examples(examples), normaliser, constant_length=9)
    slopes = []
    for budget, chunk in ((1, 64), (1000, 64), (1000, 1)):
        monkeypatch.setattr(logprobs, "CHUNK_ROWS", chunk)
        exact_model.zero_grad()
        for micro in pack(table, budget=budget):
            batch = Batch.of(micro, dtype=F64)
            hidden = exact_model.hidden(batch.ids_T, batch.positions_T, batch.attend)
            everywhere = exact_model.logits(hidden)
            everywhere.retain_grad()
            scored = selected_logprobs(everywhere[batch.places_U], batch.rows_N, batch.targets_N)
            far = scored.logprobs_N.detach() + 120.0
            loss = (
                supervised_loss(scored.logprobs_N, batch.tokens)
                if kind == "supervised"
                else reference_loss(scored.logprobs_N, far, batch.tokens, Tally())
            )
            loss.backward()
            for token, slope in zip(micro.ids_T, everywhere.grad, strict=True):
                assert bool(slope.any()) == (token not in SILENT | {5})  # 5 predicts the prompt
        slopes.append(torch.cat([p.grad.flatten() for p in exact_model.parameters()]))
    scale = slopes[0].abs().max().item()
    assert math.isfinite(scale)
    assert all((slope - slopes[0]).abs().max() <= 1e-5 * scale for slope in slopes)
