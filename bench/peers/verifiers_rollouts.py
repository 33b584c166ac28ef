"""Rollouts of `verifiers`, in its own environment, on the tasks of `bench.orchestration`.

`python verifiers_rollouts.py WORK.json` prints one JSON object: the version, and rollouts a second
of each kind for each concurrency and setting. Its best form, which does less than ours: a harness
in this process (its own start a Python process a rollout) that speaks to the interception server,
a client that has its replies ready instead of one that asks a server, no tokens rendered, its own
runner's concurrency limit and its own record of each episode; not shown and not sent anywhere. The
settings are its two shapes of interception: one server for all, and its default, one for 32.
"""

import asyncio
import json
import logging
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.interception import (
    ElasticInterceptionPoolConfig,
    InterceptionServerConfig,
    server,
)
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
from verifiers.v1.types import AssistantMessage, Response, ToolCall
from verifiers.v1.utils.loaders import load_environment
from verifiers.v1.utils.trace_store import append_episode

__all__ = ["ReadyTaskset", "TalkingHarness"]

SHAPES = {"server": InterceptionServerConfig(), "elastic": ElasticInterceptionPoolConfig()}
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a bash command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


class AnyReply(vf.Task):
    @vf.reward
    async def satisfied(self, trace: vf.Trace) -> float:
        return 1.0


class ReadyConfig(vf.TasksetConfig):
    objective: str = ""
    count: int = 1


class ReadyTaskset(vf.Taskset[AnyReply, ReadyConfig]):
    def load(self):
        for _ in range(self.config.count):
            yield AnyReply(vf.TaskData(prompt=self.config.objective), self.config.task)


class TalkingConfig(vf.HarnessConfig):
    tools: bool = False


class TalkingHarness(vf.Harness[TalkingConfig]):
    """Asks, answers tool calls at once, asks again, until a reply calls none."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    http: aiohttp.ClientSession

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        messages = [{"role": "user", "content": data.prompt}]
        body = {"model": ctx.model, "messages": messages}
        if self.config.tools:
            body["tools"] = [SHELL]
        head = {"Authorization": f"Bearer {secret}"}
        while True:
            url = f"{endpoint}/chat/completions"
            async with self.http.post(url, json=body, headers=head) as answer:
                answer.raise_for_status()
                message = (await answer.json())["choices"][0]["message"]
            messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls:
                return ProgramResult(exit_code=0, stdout="", stderr="")
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok\n"})


class ReadyClient(vf.Client):
    """The replies in their order: " 42", or two commands and a closing text."""

    async def get_response(self, dialect, body, sampling, **_) -> Response:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if "tools" not in body:
            return _response(" 42")
        return _response("Done.") if turn == 2 else _response("", command=f"look {turn}")


def _response(text: str, command: str = "") -> Response:
    message: dict = {"role": "assistant", "content": text}
    calls = None
    if command:
        arguments = json.dumps({"command": command})
        calls = [ToolCall(id=command, name="shell", arguments=arguments)]
        function = {"name": "shell", "arguments": arguments}
        message["tool_calls"] = [{"id": command, "type": "function", "function": function}]
    ended = "tool_calls" if command else "stop"
    return Response(
        id="told",
        created=0,
        model="told",
        message=AssistantMessage(content=text, tool_calls=calls),
        finish_reason=ended,
        raw={
            "id": "told",
            "object": "chat.completion",
            "created": 0,
            "model": "told",
            "choices": [{"index": 0, "message": message, "finish_reason": ended}],
        },
    )


async def rate(work: dict, kind: str, concurrent: int, shape: str) -> float:
    """Rollouts a second, after a warm-up in the same environment."""
    count = max(work["count"], concurrent)
    env = load_environment(
        vf.SingleAgentEnvConfig(
            taskset=ReadyConfig(
                id=Path(__file__).stem, objective=work["objectives"][kind], count=count
            ),
            agent=vf.AgentConfig(
                harness=TalkingConfig(id=Path(__file__).stem, tools=kind == "tools"),
                runtime=SubprocessConfig(),
            ),
            interception=SHAPES[shape],
        )
    )
    (harness,) = env._harnesses.values()
    context = vf.ModelContext(model="told", client=vf.EvalClientConfig(base_url="http://none"))
    tasks = list(env.taskset)
    with tempfile.TemporaryDirectory() as folder:
        lock = asyncio.Lock()

        async def keep(episode: vf.Episode) -> None:
            await append_episode(Path(folder), episode, lock)

        async def make(some: list) -> list:
            gate = asyncio.Semaphore(concurrent)
            slots = [slot for task in some for slot in env.slots(task)]
            return await asyncio.gather(*(env.run_slot(s, context, gate, keep) for s in slots))

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            type(harness).http = http
            async with env.serving():
                await make(tasks[: min(count, 32)])
                started_s = time.perf_counter()
                episodes = await make(tasks)
                spent_s = time.perf_counter() - started_s
    calls = 3 if kind == "tools" else 1
    for episode in episodes:
        (trace,) = episode.traces
        seen = (episode.ok, trace.reward, trace.num_turns)
        assert seen == (True, 1.0, calls), (seen, trace.errors)
    return count / spent_s


def main() -> None:
    logging.disable(logging.CRITICAL)
    server.resolve_client = lambda config: ReadyClient()
    work = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    cells = [
        {
            "kind": kind, "concurrent": concurrent, "setting": shape,
            "rollouts_per_s": asyncio.run(rate(work, kind, concurrent, shape)),
        }
        for kind in work["objectives"]
        for concurrent in work["concurrency"]
        for shape in SHAPES
    ]  # fmt: skip
    print(json.dumps({"version": version("verifiers"), "cells": cells}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
