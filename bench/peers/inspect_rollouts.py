"""Rollouts of Inspect, in its own environment, on the tasks of `bench.orchestration`.

`python inspect_rollouts.py WORK.json` prints one JSON object: the version, and rollouts a second of
each kind for each concurrency and setting. Its best form, which does less than ours: its built-in
mock model with the replies ready, an instant tool in this process, no tokens rendered, as many
samples and connections at once as asked, nothing shown, no control or real-time channel. The
settings are its log of every sample, and none (then it keeps no record of a rollout).
"""

import json
import logging
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

SETTINGS = {"logged": True, "unlogged": False}
USAGE = ModelUsage(input_tokens=20, output_tokens=4, total_tokens=24)


@tool
def shell():
    async def execute(command: str) -> str:
        """Run a bash command.

        Args:
            command: The command.
        """
        return "ok\n"

    return execute


@scorer(metrics=[mean()])
def satisfied():
    async def score(state, target) -> Score:
        assert state.output.completion in (" 42", "Done.")
        return Score(value=1.0)

    return score


def ready(input, tools, tool_choice, config) -> ModelOutput:
    """The replies in their order: " 42", or two commands and a closing text."""
    turn = sum(message.role == "assistant" for message in input)
    if tools and turn < 2:
        output = ModelOutput.for_tool_call(
            model="told", tool_name="shell", tool_arguments={"command": f"look {turn}"}
        )
    else:
        output = ModelOutput.from_content(model="told", content="Done." if tools else " 42")
    output.usage = USAGE  # else the mock model counts tokens, with a file from the network
    return output


def rate(work: dict, kind: str, concurrent: int, logged: bool) -> float:
    """Rollouts a second, after a warm-up."""
    seconds = {}
    for count in (32, max(work["count"], concurrent)):
        objective = work["objectives"][kind]
        solver = [use_tools(shell()), generate()] if kind == "tools" else [generate()]
        task = Task(
            dataset=MemoryDataset([Sample(input=objective, target="") for _ in range(count)]),
            solver=solver,
            scorer=satisfied(),
        )
        with tempfile.TemporaryDirectory() as folder:
            started_s = time.perf_counter()
            (log,) = eval(
                task,
                model=get_model("mockllm/model", custom_outputs=ready, memoize=False),
                log_dir=folder,
                log_samples=logged,
                log_realtime=False,
                ctl_server=False,
                display="none",
                max_samples=concurrent,
                max_connections=concurrent,
            )
            seconds[count] = time.perf_counter() - started_s
        assert log.status == "success", log.error
        assert log.results.completed_samples == count, log.results
        assert log.results.scores[0].metrics["mean"].value == 1.0, log.results
    return count / seconds[count]


def main() -> None:
    logging.disable(logging.CRITICAL)
    work = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    cells = [
        {
            "kind": kind, "concurrent": concurrent, "setting": setting,
            "rollouts_per_s": rate(work, kind, concurrent, logged),
        }
        for kind in work["objectives"]
        for concurrent in work["concurrency"]
        for setting, logged in SETTINGS.items()
    ]  # fmt: skip
    print(json.dumps({"version": version("inspect-ai"), "cells": cells}))


main()
