from __future__ import annotations

from posttrain.core.clock import ManualClock
from posttrain.core.ports import StepReport
from posttrain.core.task import Description, Task
from posttrain.core.trajectory import AttemptKey, Trajectory
from posttrain.loop.moves import Phase, Train
from posttrain.loop.telemetry import Telemetry


def test_malformed_calls_are_counted_in_the_metrics_of_a_step() -> None:
    """BR-21: an error that ends nothing was counted nowhere; a count that was told once stays."""
    telemetry = Telemetry(ManualClock(), dict)
    task = Task(domain="d", level=0, seed=0, description=Description(objective="x"))
    train = Train(step=1, phase=Phase.RL, version=1, batches=())
    report = StepReport(step=1, loss=0.5, metrics={"kl": 0.25})
    first = telemetry.step(train, [], report)
    assert first["metrics"] == {"kl": 0.25, "loss": 0.5}
    for member, malformed in enumerate((1, 2)):
        counters = {"tool_calls": 3, "malformed_calls": malformed}
        key = AttemptKey(run="r", draw=0, member=member)
        telemetry.attempt(Trajectory(key=key, task=task, counters=counters))
    second = telemetry.step(train, [], report)["metrics"]
    assert (second["tool_calls"], second["malformed_calls"]) == (6, 3)
    third = telemetry.step(train, [], report)["metrics"]
    assert (third["tool_calls"], third["malformed_calls"]) == (0, 0)
