"""The reward-model layer's seam: a learned score beside programs, never in place of them.

Not a model: one is handed in through a port (its training comes with data to train it on). Its
weight is capped (`layers.faults`), canaries are scored in every batch, and in a domain where it is
seldom of one mind with the programs it abstains. The one thing that must stay true: a score that is
no number in [0, 1] is the model's failure, never a reward.
"""

from __future__ import annotations

from posttrain.core.errors import VerifierError
from posttrain.core.task import Check, Json
from posttrain.verify import guards
from posttrain.verify.judge import agreement_of, believed
from posttrain.verify.kinds import Subject, Tools, allowed
from posttrain.verify.layers import Finding


async def reward_model(check: Check, subject: Subject, tools: Tools) -> Finding:
    """The model's score of the last reply. Params: `agreement`, as a judge has it.

    Raises:
        VerifierError: there is no model, its score is none, or it paid a canary.
    """
    allowed(check, "agreement")
    agreement_of(check)
    if guards.not_empty(subject.reply).reason:
        return Finding(value=0.0, evidence={"refused": "empty"})
    if tools.scores is None:
        raise VerifierError("a reward model is wanted, but this stack was built without.")
    scores = tools.scores

    async def scored(reply: str) -> tuple[float, dict[str, Json]]:
        value = await scores.score(subject.task, reply)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise VerifierError(f"wanted a score in [0, 1] of {scores.name}, got {value!r:.80}.")
        return float(value), {}

    return await believed(f"reward model {scores.name}", scored, check, subject, tools)
