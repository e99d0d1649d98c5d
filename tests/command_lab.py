"""What the tests of whole runs share: small runs of the real loop, in this process or as the real command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import warm_start
import yaml

from verl_mt.config.compose import compose
from verl_mt.data.row_files import read_rows, rows_of_step
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.ppo_trainer import PPOTrainer

SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=64",
    "data.val_max_samples=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.response_length=64",
    "trainer.total_training_steps=3",
    "trainer.test_freq=2",
    "trainer.num_threads=1",
)
"""The default task, a second per step."""
FEW = (
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.response_length=16",
    "actor_rollout_ref.rollout.temperature=3",
)
"""Four short answers a step, for runs where it does not matter what is sampled. They differ: the model that ships
begins nearly every answer with the same 16 tokens at a temperature of 1."""
NO_VALIDATION = ("data.val_files=null", "trainer.export_at_end=False", "trainer.logger=[]")


def varied(data_source, solution_str, ground_truth, extra_info) -> float:
    """Another reward for each text, so that every step changes the weights."""
    return sum(map(ord, solution_str)) % 97 / 97


VARIED = f"reward.path={__name__}:varied"
"""For runs in this process."""


def command(*overrides: str) -> list[str]:
    """Words of the real command."""
    return [sys.executable, "-m", "verl_mt.trainer", *SMALL, *overrides]


def run_command(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run it in `folder` to its end."""
    return warm_start.run(command(*overrides), cwd=folder, capture_output=True, text=True, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def small_trainer(run: Path, *overrides: str) -> PPOTrainer:
    """A trainer of the same config in this process, without trackers."""
    return build_trainer(compose([*SMALL, "trainer.logger=[]", f"trainer.default_local_dir={run}", *overrides]))


def fit(run: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train in this process; the lines of `metrics.jsonl`."""
    small_trainer(run, *overrides).fit()
    return metrics_of(run)


def interrupt_after(trainer: PPOTrainer, step: int) -> None:
    """As if Ctrl-C was pressed while that step's line was printed."""
    original = trainer.log.step

    def log_step(number: int, *line: Any) -> None:
        original(number, *line)
        if number == step:
            trainer.interrupts.requested.set()

    trainer.log.step = log_step  # type: ignore[method-assign]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    """The training rollouts of a step."""
    file = rows_of_step(run, step)
    assert file is not None, f"{run} has no rows of step {step}"
    return list(read_rows(file.path))


def calculator_yaml(folder: Path, class_name: str) -> Path:
    """The calculator's schema over another class."""
    schema = {
        "name": "calculator",
        "description": "Evaluate arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "What to compute"}},
            "required": ["expression"],
        },
    }
    entry = {"class_name": class_name, "config": {}, "tool_schema": {"type": "function", "function": schema}}
    file = folder / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [entry]}))
    return file
