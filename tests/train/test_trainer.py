from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import pytest
import torch

from posttrain.core.clock import ManualClock
from posttrain.core.errors import CheckpointError, ConfigError, NonFiniteError
from posttrain.core.ports import Example, Work
from posttrain.core.verdict import StopReason
from posttrain.engine.model import load, random_model
from posttrain.train import checkpoint
from posttrain.train.anchor import anchor_row
from posttrain.train.losses import k3
from posttrain.train.settings import OptimizerSettings, SupervisedSettings, TrainSettings
from posttrain.train.trainer import LocalTrainer
from tests.train.builders import (
    InlineDevice,
    group,
    member,
    plain_logprobs,
    random_groups,
    row,
    snapshot,
    unchanged,
)

QUICK = OptimizerSettings(learning_rate=1e-2, warmup_steps=0)
QUICK_SFT = SupervisedSettings(learning_rate=1e-2, warmup_steps=0, clip_norm=10.0)
EXAMPLES = [Example(row=row([5, 6, 7], [8, 9, 2])), Example(row=row([4, 3], [2]))]
ANCHORS = [anchor_row([50 + i, 60, 70, 80], [False, False, True, True]) for i in range(6)]


def trainer_of(model, device=None, *, reference=None, temperature=1.0, **settings):
    return LocalTrainer(
        model,
        device or InlineDevice(),
        TrainSettings(**{"rl": QUICK, "sft": QUICK_SFT, **settings}),
        run="test",
        temperature=temperature,
        reference=reference,
        clock=ManualClock(),
    )


def flat_group(prompt=(5, 6)):
    return group([member([row(prompt, [i, 2])], 1.0, number=i) for i in range(3)])


def test_a_step_raises_what_was_rewarded(model):
    rows = [row([5, 6, 7], [token, 2]) for token in (11, 12, 13)]
    with torch.no_grad():
        rows = [
            replace(r, logprobs_T=(0.0, 0.0, 0.0, *plain_logprobs(model, r)[-2:].tolist()))
            for r in rows
        ]
        before = [plain_logprobs(model, r)[2].item() for r in rows]
    rewards = [1.0, 0.0, 0.0]
    groups = [
        group(
            [member([r], x, number=i) for i, (r, x) in enumerate(zip(rows, rewards, strict=True))]
        )
    ]

    report = asyncio.run(trainer_of(model).rl_step(groups, version=0))

    with torch.no_grad():
        after = [plain_logprobs(model, r)[2].item() for r in rows]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert report.step == 1
    assert report.num_tokens == 6
    assert report.num_sequences == 3
    assert report.grad_norm > 0
    assert report.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert report.metrics["logprob_gap_max"] < 5e-5
    assert 0 < report.metrics["entropy"] <= torch.tensor(320.0).log().item()
    assert "kl" not in report.metrics


def test_every_micro_batch_is_a_work_item_and_the_update_another(model):
    device = InlineDevice()
    asyncio.run(
        trainer_of(model, device, micro_batch_tokens=20).rl_step(random_groups(4), version=0)
    )
    assert device.kinds == [Work.TRAIN, Work.UPDATE]
    assert device.items[0] > 1
    assert device.items[1] == 1


@pytest.mark.parametrize("settings", [{}, {"anchor_weight": 1.0}])
def test_flat_groups_leave_every_bit_and_say_why_BR_04(model, settings):
    trainer = trainer_of(model, **settings)
    if settings:
        asyncio.run(trainer.set_anchor(ANCHORS))
    before = snapshot(model)
    report = asyncio.run(trainer.rl_step([flat_group()], version=0))
    assert report.loss is None
    assert report.skipped == "no group has two different rewards"
    assert report.num_tokens == 6
    assert report.metrics == {"flat_groups": 1.0}
    assert unchanged(model, before)


def test_a_batch_of_truncated_attempts_is_skipped_BR_04(model):
    cut = StopReason.TOKEN_LIMIT
    members = [member([row([5, 6], [i, i])], float(i), number=i, stop=cut) for i in range(2)]
    before = snapshot(model)
    report = asyncio.run(
        trainer_of(model, mask_truncated=True).rl_step([group(members)], version=0)
    )
    assert report.loss is None
    assert "no attempt" in report.skipped
    assert unchanged(model, before)
    unmasked = trainer_of(model.copy())
    assert asyncio.run(unmasked.rl_step([group(members)], version=0)).loss is not None


def test_examples_without_a_trained_token_are_skipped_BR_04(model):
    before = snapshot(model)
    empty = Example(row=row([5, 6], [7], mask=[False]))
    trainer = trainer_of(model)
    report = asyncio.run(trainer.sft_step([empty]))
    assert report.loss is None
    assert report.skipped
    assert report.metrics == {}
    assert unchanged(model, before)
    assert asyncio.run(trainer.sft_step([])).step == 2


def test_attempts_without_a_reward_train_nothing(model):
    broken = member([row([5, 6], [9, 9])], None, number=2)
    good = [member([row([5, 6], [i, 2])], float(i), number=i) for i in range(2)]
    report = asyncio.run(trainer_of(model).rl_step([group([*good, broken])], version=0))
    assert report.num_sequences == 2
    assert report.num_tokens == 4


def test_supervised_steps_learn_the_end_token_BR_13(model):
    trainer = trainer_of(model)
    losses = [asyncio.run(trainer.sft_step(EXAMPLES)).loss for _ in range(20)]
    assert losses[-1] < losses[0] / 4
    with torch.no_grad():
        assert plain_logprobs(model, EXAMPLES[0].row)[-1].item() > -1.0


def test_the_supervised_loss_is_the_mean_over_all_tokens(exact_model):
    with torch.no_grad():
        first = plain_logprobs(exact_model, EXAMPLES[0].row)[-3:]
        second = plain_logprobs(exact_model, EXAMPLES[1].row)[-1:]
    right = -(first.sum() + second.sum()).item() / 4
    report = asyncio.run(trainer_of(exact_model, micro_batch_tokens=1).sft_step(EXAMPLES))
    assert report.loss == pytest.approx(right, abs=1e-10)


def test_a_loss_that_is_not_finite_changes_nothing(model):
    trainer = trainer_of(model, micro_batch_tokens=1)
    before = snapshot(model)
    bad = member([row([8, 9], [1, 2], logprobs=[float("nan"), -1.0])], 1.0)
    other = member([row([8, 9], [3, 2])], 0.0, number=1)
    with pytest.raises(NonFiniteError, match="step 1"):
        asyncio.run(trainer.rl_step([*random_groups(2), group([bad, other])], version=0))
    assert unchanged(model, before)
    assert asyncio.run(trainer.rl_step(random_groups(2), version=0)).step == 1


def test_a_gradient_that_is_not_finite_changes_nothing(model):
    trainer = trainer_of(model)
    before = snapshot(model)
    handle = model.norm.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(NonFiniteError, match="no weight was changed"):
        asyncio.run(trainer.rl_step(random_groups(2), version=0))
    assert unchanged(model, before)
    handle.remove()
    assert asyncio.run(trainer.rl_step(random_groups(2), version=0)).loss is not None


def test_weights_that_are_not_finite_are_never_saved(model, tmp_path):
    """A resume went on from them and failed at once."""
    trainer = trainer_of(model)
    with torch.no_grad():
        model.norm[0] = float("inf")
    with pytest.raises(NonFiniteError, match="not finite after step 0"):
        asyncio.run(trainer.save(tmp_path / "step-000001", extra={}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("drifted", "least"), [("reference", 119.0), ("policy", k3(torch.tensor(120.0)).item())]
)
def test_a_drifted_token_leaves_the_parameters_finite_BR_08(model, tiny_directory, drifted, least):
    """One step on tokens that are 120 nats apart, either way round: their mean k3 is above that of
    a difference of -120 or of 120, so at least one of them is further apart.
    """
    reference = load(tiny_directory, dtype=torch.float32, verify=False)
    with torch.no_grad():
        (reference if drifted == "reference" else model).embed.mul_(1000.0)
    before = snapshot(model)
    trainer = trainer_of(model, reference=reference, kl_weight=1.0)
    report = asyncio.run(trainer.rl_step(random_groups(2), version=0))
    assert least < report.metrics["kl"] < float("inf")
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not unchanged(model, before)


def test_the_kl_to_the_reference_holds_the_policy_even_in_flat_groups(model, tiny_directory):
    reference = load(tiny_directory, dtype=torch.float32, verify=False)
    trainer = trainer_of(model, reference=reference, algorithm="grpo")
    first = asyncio.run(trainer.rl_step([flat_group(), *random_groups(1)], version=0))
    assert first.metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    second = asyncio.run(trainer.rl_step([flat_group()], version=0))
    assert second.loss > 0
    assert second.metrics["kl"] > 0


def test_a_kl_without_a_reference_is_refused_when_the_trainer_is_made(model):
    with pytest.raises(ConfigError, match="kl_weight = 0"):
        trainer_of(model, algorithm="grpo")
    trainer_of(model, algorithm="grpo", kl_weight=0.0)


def test_an_anchor_weight_without_rows_is_refused(model):
    with pytest.raises(ConfigError, match="set_anchor"):
        asyncio.run(trainer_of(model, anchor_weight=0.5).sft_step(EXAMPLES))


def test_the_anchor_holds_other_rows_back(tiny_directory):
    drifts = []
    for weight in (0.0, 5.0):
        model = load(tiny_directory, dtype=torch.float32, verify=False)
        with torch.no_grad():
            before = torch.cat([plain_logprobs(model, r)[-2:] for r in ANCHORS])
        trainer = trainer_of(model, anchor_weight=weight, anchor_rows=6)
        if weight:
            asyncio.run(trainer.set_anchor(ANCHORS))
        for _ in range(15):
            report = asyncio.run(trainer.sft_step(EXAMPLES))
        with torch.no_grad():
            after = torch.cat([plain_logprobs(model, r)[-2:] for r in ANCHORS])
        drifts.append((after - before).abs().mean().item())
        assert ("anchor_kl" in report.metrics) == bool(weight)
    assert drifts[1] < drifts[0] / 2


def test_the_temperature_of_sampling_is_that_of_training(model):
    rows = [row([5, 6, 7], [token, 2]) for token in (11, 12)]
    with torch.no_grad():
        sampled = [plain_logprobs(model, r, temperature=0.5)[-2:].tolist() for r in rows]
        rows = [
            replace(r, logprobs_T=(0.0, 0.0, 0.0, *logprobs))
            for r, logprobs in zip(rows, sampled, strict=True)
        ]
    groups = [group([member([r], float(i), number=i) for i, r in enumerate(rows)])]
    report = asyncio.run(trainer_of(model, temperature=0.5).rl_step(groups, version=0))
    assert report.metrics["logprob_gap_max"] < 5e-5


# --- checkpoints ------------------------------------------------------------------------------


async def train(trainer, first, last):
    for step in range(first, last + 1):
        await trainer.rl_step(random_groups(2, seed=step), version=0)


def resumable(directory, **settings):
    model = load(directory, dtype=torch.bfloat16, verify=False)
    return model, trainer_of(model, anchor_weight=0.5, anchor_rows=2, **settings)


def test_a_resume_is_bit_equal_to_the_uninterrupted_run(tiny_directory, tmp_path):
    async def body():
        whole, trainer = resumable(tiny_directory)
        await trainer.set_anchor(ANCHORS)
        await train(trainer, 1, 3)
        await trainer.save(tmp_path / "step-000003", extra={"next_draw": 17, "epoch": [1, 2]})
        noise = torch.rand(3)
        await train(trainer, 4, 5)

        model, resumed = resumable(tiny_directory)
        extra = await resumed.load(tmp_path / "step-000003")
        assert extra == {"next_draw": 17, "epoch": [1, 2]}
        assert torch.equal(torch.rand(3), noise)
        await train(resumed, 4, 5)
        assert unchanged(model, list(whole.parameters()))
        report = await resumed.rl_step(random_groups(2, seed=6), version=0)
        assert report.step == 6

    asyncio.run(body())


def test_the_weights_of_a_checkpoint_load_as_a_model(tiny_directory, tmp_path):
    model, trainer = resumable(tiny_directory, rl=QUICK)

    async def body():
        await trainer.set_anchor(ANCHORS)
        await train(trainer, 1, 1)
        await trainer.save(tmp_path / "step-000001", extra={})

    asyncio.run(body())
    again = load(tmp_path / "step-000001" / "model", dtype=torch.bfloat16, verify=False)
    assert unchanged(again, list(model.parameters()))


def test_a_new_phase_begins_with_fresh_moments_and_a_learning_rate_of_its_own(tiny_directory):
    slow = OptimizerSettings(learning_rate=1e-2, warmup_steps=10)
    model = load(tiny_directory, dtype=torch.float32, verify=False)
    trainer = trainer_of(model, rl=slow)
    for _ in range(3):
        asyncio.run(trainer.sft_step(EXAMPLES))
    twin = load(tiny_directory, dtype=torch.float32, verify=False)
    with torch.no_grad():
        for parameter, other in zip(twin.parameters(), model.parameters(), strict=True):
            parameter.copy_(other)
    alone = trainer_of(twin, rl=slow)
    for each in (trainer, alone):
        asyncio.run(each.rl_step(random_groups(2), version=0))
    assert unchanged(twin, list(model.parameters()))


async def saved(directory, place):
    model, trainer = resumable(directory)
    await trainer.set_anchor(ANCHORS)
    await train(trainer, 1, 1)
    await trainer.save(place, extra={})
    return model, trainer


@pytest.mark.parametrize(
    "file", ["optimizer.safetensors", "model/model.safetensors", "manifest.json", "state.json"]
)
@pytest.mark.parametrize("harm", ["truncated", "flipped", "missing"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tiny_directory, tmp_path, file, harm):
    async def body():
        place = tmp_path / "step-000001"
        model, trainer = await saved(tiny_directory, place)
        path = place / file
        data = path.read_bytes()
        if harm == "truncated":
            path.write_bytes(data[: len(data) // 2])
        elif harm == "flipped":
            middle = len(data) // 2
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 0x81]) + data[middle + 1 :])
        else:
            path.unlink()
        before = snapshot(model)
        with pytest.raises(CheckpointError, match="Next: resume from an earlier checkpoint"):
            await trainer.load(place)
        assert unchanged(model, before)

    asyncio.run(body())


def test_a_checkpoint_of_another_model_is_refused(tiny_directory, tmp_path):
    async def body():
        place = tmp_path / "step-000001"
        await saved(tiny_directory, place)
        other = load(
            random_model(tmp_path / "other", hidden=48, heads=6), dtype=torch.bfloat16, verify=False
        )
        before = snapshot(other)
        with pytest.raises(CheckpointError, match="another model: embed is"):
            await trainer_of(other).load(place)
        assert unchanged(other, before)

    asyncio.run(body())


def test_a_full_disk_leaves_earlier_checkpoints_alone(tiny_directory, tmp_path, monkeypatch):
    async def body():
        model, trainer = await saved(tiny_directory, tmp_path / "step-000001")
        content = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        weights = snapshot(model)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(checkpoint, "save_file", full)
        for name in ("step-000002", "step-000001"):
            with pytest.raises(CheckpointError, match=r"No space left.*Next: free space"):
                await trainer.save(tmp_path / name, extra={})
        monkeypatch.undo()
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == content
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001"]
        assert unchanged(model, weights)
        await trainer.load(tmp_path / "step-000001")

    asyncio.run(body())


def test_saving_a_step_again_replaces_it_whole(tiny_directory, tmp_path):
    async def body():
        _, trainer = await saved(tiny_directory, tmp_path / "step-000001")
        await trainer.save(tmp_path / "step-000001", extra={"again": True})
        assert await trainer.load(tmp_path / "step-000001") == {"again": True}
        assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]

    asyncio.run(body())
