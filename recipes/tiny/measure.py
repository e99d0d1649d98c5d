"""What the default run reaches, over seeds, and what it reaches when it must not learn.

    python recipes/tiny/measure.py --seeds 0 1 2 --problems 1000 --val-seed 4242 --out runs/measure
    python recipes/tiny/measure.py --controls --out runs/measure     # needs nothing of the first

Controls: learning rate 0; rewards shuffled within their groups; and the trained model with a calculator that always
fails. Prints one table and writes `results.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from verl_mt.config.compose import compose
from verl_mt.data.batch import GROUP_INDEX, REWARDS
from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.diagnostics.step_metrics import validation_metrics
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.registry import load_tools
from verl_mt.tools.toolset import ToolSet
from verl_mt.trainer.build import build_trainer, validation_sampling
from verl_mt.trainer.inference import Inference

CALCULATOR = "tools_configs/calculator.yaml"


class FailingCalculator(BaseTool):
    """Has the calculator's schema and never works."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise RuntimeError("the calculator is out of order")


def train(folder: Path, overrides: list[str], *, shuffle_rewards: bool = False) -> dict[str, float]:
    """One default run with overrides. Returns accuracies before and after, wall and CPU seconds."""
    begun, cpu = time.monotonic(), os.times()
    trainer = build_trainer(compose([*overrides, f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]))
    if shuffle_rewards:
        estimate, generator = trainer.estimate_advantages, torch.Generator().manual_seed(0)

        def shuffled(batch: Any) -> None:
            for group in batch[GROUP_INDEX].unique():
                rows = (batch[GROUP_INDEX] == group).nonzero().flatten()
                batch[REWARDS][rows] = batch[REWARDS][rows[torch.randperm(len(rows), generator=generator)]]
            estimate(batch)

        trainer.estimate_advantages = shuffled
    trainer.fit()
    lines = read_jsonl_tolerant(trainer.log.run.path / "metrics.jsonl")
    validated = [line for line in lines if "val/accuracy" in line]
    ended = os.times()
    return {
        "start": validated[0]["val/accuracy"],
        "end": validated[-1]["val/accuracy"],
        "start_greedy": validated[0]["val/accuracy_greedy"],
        "end_greedy": validated[-1]["val/accuracy_greedy"],
        "calls": validated[-1]["val/tool_calls_mean"],
        "truncated": validated[-1]["val/truncated"],
        "wall_s": time.monotonic() - begun,
        "cpu_s": ended.user + ended.system - cpu.user - cpu.system,
    }


def with_failing_calculator(model: Path, overrides: list[str]) -> dict[str, float]:
    """The trained model, sampled and greedy, with a calculator that raises at every call."""
    config = compose([*overrides, f"actor_rollout_ref.model.path={model}"])
    (entry,) = load_tools(CALCULATOR)
    broken = ToolSet([FailingCalculator({}, entry.tool_schema)])
    with Inference(config, tools=broken) as policy:
        groups = policy.roll_out(policy.prompts(), sampling=validation_sampling(config))
    metrics = validation_metrics(groups, "")
    return {"end": metrics["val/accuracy"], "calls": metrics["val/tool_calls_mean"]}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--val-seed", type=int, default=4242)
    parser.add_argument("--out", type=Path, default=Path("runs/measure"))
    args, overrides = parser.parse_known_args()
    common = [
        f"data.val_max_samples={args.problems}",
        f"data.val_seed={args.val_seed}",
        "trainer.test_freq=-1",
        "trainer.logger=[]",
        "trainer.rollout_rows=False",
        *overrides,
    ]
    results: dict[str, dict[str, float]] = {}
    args.out.mkdir(parents=True, exist_ok=True)

    def keep(name: str, result: dict[str, float]) -> None:
        results[name] = result
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        print(name, {k: round(v, 3) for k, v in result.items()}, flush=True)

    for seed in args.seeds:
        keep(f"seed {seed}", train(args.out / f"seed_{seed}", [*common, f"trainer.seed={seed}", f"data.seed={seed}"]))
    if args.controls:
        folder = args.out / "control"
        keep("learning rate 0", train(folder / "lr0", [*common, "actor_rollout_ref.actor.optim.lr=0"]))
        keep("shuffled rewards", train(folder / "shuffled", common, shuffle_rewards=True))
        trained = next(iter(sorted(args.out.glob("seed_*/hf"))), None)
        if trained is None:
            train(folder / "trained", common)
            trained = folder / "trained" / "hf"
        keep("failing calculator", with_failing_calculator(trained, common))
    _show(results)


def _show(results: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(key for result in results.values() for key in result))
    table = Table("run", *columns)
    for name, result in results.items():
        table.add_row(name, *(f"{result[c]:.3f}" if c in result else "" for c in columns))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
