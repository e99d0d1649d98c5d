"""What the recipes' `measure.py` have in common: a run and what it reached, a model on a file, a table of all."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verl_mt.config.schema import Config
from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.diagnostics.step_metrics import tool_metrics, validation_metrics
from verl_mt.tools.toolset import ToolSet
from verl_mt.trainer.build import validation_sampling
from verl_mt.trainer.inference import Inference
from verl_mt.trainer.ppo_trainer import PPOTrainer

Result = dict[str, float]


def fit(trainer: PPOTrainer) -> Result:
    """Train. Returns accuracies at every validation, sampled and greedy, and what it cost in seconds."""
    begun, cpu = time.monotonic(), os.times()
    trainer.fit()
    ended = os.times()
    lines = [line for line in read_jsonl_tolerant(trainer.log.run.path / "metrics.jsonl") if "val/accuracy" in line]
    first, *between, last = lines
    return {
        "start": first["val/accuracy"],
        **{f"step {line['step']}": line["val/accuracy"] for line in between},
        "end": last["val/accuracy"],
        "start_greedy": first["val/accuracy_greedy"],
        **{f"step {line['step']} greedy": line["val/accuracy_greedy"] for line in between},
        "end_greedy": last["val/accuracy_greedy"],
        "calls": last["val/tool_calls_mean"],
        "truncated": last["val/truncated"],
        "wall_s": time.monotonic() - begun,
        "cpu_s": ended.user + ended.system - cpu.user - cpu.system,
    }


def evaluate(config: Config, tools: ToolSet | None = None) -> Result:
    """The config's model on its validation rows, sampled as in a validation.

    Args:
        tools: instead of those that the config names.
    """
    with Inference(config, tools=tools) as policy:
        groups = policy.roll_out(policy.prompts(), sampling=validation_sampling(config))
        names = policy.tools.names if policy.tools is not None else []
    metrics = validation_metrics(groups, "") | tool_metrics([t for g in groups for t in g.trajectories], names)
    errors = sum(metrics.get(f"tools/{name}/errors", 0.0) for name in names)
    return {
        "end": metrics["val/accuracy"],
        "calls": metrics["val/tool_calls_mean"],
        "truncated": metrics["val/truncated"],
        "errors": errors,
    }


class Results:
    """Results by name, in `results.json`; a run that was interrupted finds those it had.

    Args:
        folder: of the file, made if it is missing.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.json"
        self.by_name: dict[str, Result] = json.loads(self._file.read_text()) if self._file.is_file() else {}

    def keep(self, name: str, result: Result) -> None:
        """Print it, and write all."""
        self.by_name[name] = result
        self._file.write_text(json.dumps(self.by_name, indent=1))
        print(name, {k: round(v, 3) for k, v in result.items()}, flush=True)

    def show(self) -> None:
        """One table of all."""
        columns = list(dict.fromkeys(key for result in self.by_name.values() for key in result))
        table = Table("run", *columns)
        for name, result in self.by_name.items():
            table.add_row(name, *(f"{result[c]:.3f}" if c in result else "" for c in columns))
        Console(width=160).print(table)
