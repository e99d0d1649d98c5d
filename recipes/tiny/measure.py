"""What the default run reaches, over seeds, and what it reaches when it must not learn.

    python recipes/tiny/measure.py --seeds 0 1 2 --problems 1000 --val-seed 4242 --out runs/measure
    python recipes/tiny/measure.py --controls --out runs/measure     # needs nothing of the first

Controls: learning rate 0; rewards shuffled within their groups; and the trained model with a calculator that always
fails. Prints one table of all results in `results.json`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results import Result, Results, evaluate, fit

from verl_mt.config.compose import compose
from verl_mt.data.batch import trajectory_rewards
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.registry import load_tools
from verl_mt.tools.toolset import ToolSet
from verl_mt.trainer.build import build_trainer

CALCULATOR = "tools_configs/calculator.yaml"


class FailingCalculator(BaseTool):
    """Has the calculator's schema and never works."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise RuntimeError("the calculator is out of order")


def train(folder: Path, overrides: list[str], *, shuffle_rewards: bool = False) -> Result:
    """One default run with overrides. See `results.fit`."""
    trainer = build_trainer(compose([*overrides, f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]))
    if shuffle_rewards:
        step, generator = trainer.estimate_advantages, torch.Generator().manual_seed(0)
        compare = step.per_trajectory
        assert compare is not None

        def shuffled(batch: Any, rewards_N: torch.Tensor) -> torch.Tensor:
            group_index_N, rewards_N = trajectory_rewards(batch)[1], rewards_N.clone()
            for group in group_index_N.unique():
                rows = (group_index_N == group).nonzero().flatten()
                rewards_N[rows] = rewards_N[rows[torch.randperm(len(rows), generator=generator)]]
            return compare(batch, rewards_N)

        trainer.estimate_advantages = replace(step, per_trajectory=shuffled)
    return fit(trainer)


def with_failing_calculator(model: Path, overrides: list[str]) -> Result:
    """The trained model, sampled and greedy, with a calculator that raises at every call."""
    config = compose([*overrides, f"actor_rollout_ref.model.path={model}"])
    (entry,) = load_tools(CALCULATOR)
    broken = ToolSet([FailingCalculator({}, entry.tool_schema)])
    return evaluate(config, tools=broken)


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
    results = Results(args.out)
    for seed in args.seeds:
        results.keep(
            f"seed {seed}", train(args.out / f"seed_{seed}", [*common, f"trainer.seed={seed}", f"data.seed={seed}"])
        )
    if args.controls:
        folder = args.out / "control"
        results.keep("learning rate 0", train(folder / "lr0", [*common, "actor_rollout_ref.actor.optim.lr=0"]))
        results.keep("shuffled rewards", train(folder / "shuffled", common, shuffle_rewards=True))
        trained = next(iter(sorted(args.out.glob("seed_*/hf"))), None)
        if trained is None:
            train(folder / "trained", common)
            trained = folder / "trained" / "hf"
        results.keep("failing calculator", with_failing_calculator(trained, common))
    results.show()


if __name__ == "__main__":
    main()
