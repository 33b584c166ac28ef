"""One GRPO step of TRL, timed; runs in bench/peers/envs/trl and imports nothing of ours.

    python trl_step.py WORK.json trl_settings.toml [--only NAME]

WORK.json is written by `bench.rl_step`: model directory, prompts (one list a step, already rendered
as text), group size, longest completion, which groups are flat. The last line is a JSON object:
`version` and, for each setting, the seconds of every step after the first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("settings", type=Path)
    parser.add_argument("--only")
    asked = parser.parse_args()
    work = json.loads(asked.work.read_text("utf-8"))
    found = {}
    for setting in tomllib.loads(asked.settings.read_text("utf-8"))["setting"]:
        if asked.only in (None, setting["name"]):
            found[setting["name"]] = timed(work, setting)
    print(json.dumps({"version": version("trl"), "settings": found}))


def timed(work: dict, setting: dict) -> list[float]:
    """Seconds of each step after the first."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Stopwatch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.perf_counter())

    prompts = [prompt for step in work["steps"] for prompt in step]
    flat = [is_flat for _ in work["steps"] for is_flat in work["flat"]]
    rows = {"prompt": prompts, "flat": flat, "number": list(range(len(prompts)))}

    def reward(prompts, completions, flat, number, **kwargs):
        """The same on both sides: every second member of a group that is not flat."""
        seen: Counter[int] = Counter()
        rewards = []
        for is_flat, of in zip(flat, number, strict=True):
            rewards.append(0.0 if is_flat else float(seen[of] % 2))
            seen[of] += 1
        return rewards

    size = len(work["flat"]) * work["group"]
    micro = min(setting["micro_batch"], size)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=setting["autocast"],
            model_init_kwargs={"dtype": setting["weights"]},
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=size // micro,
            num_generations=work["group"],
            max_completion_length=work["max_tokens"],
            temperature=1.0,
            max_steps=len(work["steps"]),
            learning_rate=1.2e-5,
            adam_beta2=0.99,
            max_grad_norm=10.0,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="none",
            shuffle_dataset=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
        )
        trainer = GRPOTrainer(
            model=work["model"],
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict(rows),
            processing_class=AutoTokenizer.from_pretrained(work["model"], padding_side="left"),
            callbacks=[Stopwatch()],
        )
        trainer.train()
    return [after - before for before, after in itertools.pairwise(ends)]


if __name__ == "__main__":
    main()
