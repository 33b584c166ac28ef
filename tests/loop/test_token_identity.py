"""One sequence of ids from the chat template to the gradient, over the real parts."""

from __future__ import annotations

import asyncio

import pytest
import torch

from posttrain.core.clock import ManualClock
from posttrain.core.ports import Example
from posttrain.core.task import Description, Oracle, OracleTurn, Task
from posttrain.core.trajectory import Row, Sampled
from posttrain.engine import model as models
from posttrain.rollout.answer import AnswerExecutor
from posttrain.rollout.oracle import OracleExecutor
from posttrain.train.pack import from_examples, pack
from posttrain.train.settings import TrainSettings
from posttrain.train.trainer import LocalTrainer
from tests.engine.asking import ask, sample_all
from tests.rollout.doubles import (
    BOS,
    TEMPLATES,
    Sayings,
    answer_task,
    renderer,
    request,
    tokenizer,
)
from tests.train.builders import InlineDevice, group, member, row


def sampled_and_oracle_rows(name: str, task: Task) -> tuple[Row, Row, tuple[int, ...]]:
    """The row of an attempt, that of its oracle, and the ids the engine was asked to continue."""
    by, clock, policy = renderer(name), ManualClock(), Sayings(" 42", by=renderer(name))

    async def solve(_: Task) -> Oracle:
        return Oracle(turns=(OracleTurn(text="42"),))

    oracle = OracleExecutor(solve, lambda p: {"answer": AnswerExecutor(p, by, clock)}, by)

    async def body() -> tuple[Row, Row]:
        made = await AnswerExecutor(policy, by, clock).run(request(task))
        played = await oracle.run(request(task))
        return made.trajectory.rows[0], played.trajectory.rows[0]

    sampled, imitated = asyncio.run(body())
    return sampled, imitated, policy.requests[0].ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_way_in_gives_the_same_prompt_with_one_bos(name: str) -> None:
    """BR-16: engine, an already rendered text, SFT data and the trainer's re-scoring. The raw
    prompt `abc` is in `tests/rollout/test_render.py`; the endpoints come with the gateway.
    """
    has_bos = tokenizer(name).leading_id is not None
    for objective in ("What is 40 + 2?", f"What does {BOS} mean?"):
        task = answer_task(description=Description(objective=objective))
        sampled, imitated, asked = sampled_and_oracle_rows(name, task)
        prompts = [asked, *(r.ids_T[: r.prompt_length] for r in (sampled, imitated))]
        for each in (sampled, imitated):
            (micro,) = pack(from_examples([Example(row=each)]), budget=1000)
            assert tuple(micro.ids_T) == each.ids_T[:-1]  # the last token predicts nothing
            assert micro.positions_T == list(range(len(micro.ids_T)))
        assert prompts == [renderer(name).prompt(task)] * 3
        assert asked.count(tokenizer(name).added[BOS]) == has_bos
        assert (asked[0] == tokenizer(name).added[BOS]) == has_bos
        if BOS not in objective:
            assert renderer(name).raw(tokenizer(name).decode(asked)) == asked


def test_turns_of_a_rewritten_history_are_re_scored_in_the_context_they_were_sampled_in(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """BR-18: a prompt of 10, 6 sampled of which 4 were thoughts, a prompt without those, 5 sampled:
    two rows, eleven trained tokens, each with the log-probability it was sampled with.
    """
    path = models.random_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32, seed=3)
    decoder = models.load(path, dtype=torch.float32)

    def say(prompt: tuple[int, ...], count: int) -> tuple[Row, Sampled]:
        (sampled,) = sample_all(decoder, [ask(prompt, max_tokens=count, seed=7)])
        return Row().given(prompt).sampled(sampled), sampled

    prompt = tuple(range(40, 50))
    first, sampled = say(prompt, 6)
    second, _ = say((*prompt, *sampled.ids[4:], 60, 61, 62), 5)
    assert [r.num_trained for r in (first, second)] == [6, 5]
    other = row(prompt, [1], logprobs=[sampled.logprobs[0]])
    trainer = LocalTrainer(
        decoder, InlineDevice(), TrainSettings(), run="test", clock=ManualClock()
    )
    # The same attempt twice, once rewarded: nothing but it is in the batch.
    members = [member([first, second], float(i), number=i) for i in range(2)]
    report = asyncio.run(trainer.rl_step([group(members)], version=0))
    assert report.num_tokens == 2 * 11
    assert report.metrics["logprob_gap_max"] < 1e-4
    # With a token that was not sampled so, the same measure shows it.
    strange = [member([other], float(i), number=i) for i in range(2)]
    report = asyncio.run(trainer.rl_step([group(strange)], version=0))
    assert report.metrics["logprob_gap_max"] > 1e-3
