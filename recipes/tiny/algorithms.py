"""Six algorithms on the default task, with four updates per rollout batch, over seeds.

    python recipes/tiny/algorithms.py --out runs/algorithms                   # 18 runs of about two CPU-minutes
    python recipes/tiny/algorithms.py trainer.num_threads=1 --out runs/algorithms --only ppo --seeds 0
    python recipes/tiny/algorithms.py --out runs/algorithms --draw docs/images/algorithms.svg    # needs matplotlib

Overrides come first. A run that is in `--out` already is not made again. With one update per batch every ratio is 1 and
the losses do not differ; with four, the clip fraction says how much of each algorithm's own part is at work.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from measure import train
from rich.console import Console
from rich.table import Table

from verl_mt.data.run_files import read_jsonl_tolerant

_ACTOR = "actor_rollout_ref.actor"
COMMON = [f"{_ACTOR}.ppo_mini_batch_size=4", f"{_ACTOR}.optim.lr=2e-4"]
"""16 prompts per batch, 4 per update."""
ALGORITHMS = {
    "ppo": [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=3e-4",
        "critic.optim.betas=[0.9,0.99]",
        "critic.optim.weight_decay=0",
        "critic.ppo_epochs=4",
    ],
    "grpo": ["algorithm.adv_estimator=grpo"],
    "gspo": [
        f"{_ACTOR}.policy_loss.loss_mode=gspo",
        f"{_ACTOR}.clip_ratio_low=0.003",
        f"{_ACTOR}.clip_ratio_high=0.004",
    ],
    "cispo": [f"{_ACTOR}.policy_loss.loss_mode=cispo"],
    "reinforce++": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "rloo": ["algorithm.adv_estimator=rloo"],
}


def results(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Of the runs that ended: algorithm -> one entry per seed, with its curve and means over its steps."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ALGORITHMS:
        for folder in sorted((out / name).glob("seed_*")):
            if not (folder / "result.json").exists():
                continue
            lines = read_jsonl_tolerant(folder / "metrics.jsonl")
            found.setdefault(name, []).append(
                json.loads((folder / "result.json").read_text())
                | {
                    "seed": folder.name.removeprefix("seed_"),
                    "curve": [(line["step"], line["val/accuracy"]) for line in lines if "val/accuracy" in line],
                    "clipfrac": fmean(line["actor/clipfrac"] for line in lines if "actor/clipfrac" in line),
                    "explained_variance": _last_mean(lines, "critic/explained_variance"),
                }
            )
    return found


def _last_mean(lines: list[dict[str, Any]], key: str, window: int = 10) -> float | None:
    values = [line[key] for line in lines if key in line][-window:]
    return fmean(values) if values else None


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One panel per algorithm, one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "verl_mt"
    figure, axes = plt.subplots(2, 3, figsize=(7.6, 4.2), sharex=True, sharey=True)
    for panel, name in zip(axes.flat, ALGORITHMS, strict=True):
        for run in found.get(name, []):
            panel.plot(*zip(*run["curve"], strict=True), "o-", ms=3, lw=1, label=f"seed {run['seed']}")
        panel.axhline(0.8, color="#999999", lw=0.6, ls="--")
        panel.set_title(name, fontsize=9)
        panel.grid(alpha=0.3)
    axes[0, 0].legend(loc="lower right", fontsize=7, frameon=False)
    axes[0, 0].set_ylim(0.4, 1.0)
    figure.supxlabel("training step (16 prompts x 8 samples, 4 updates)", fontsize=9)
    figure.supylabel("held-out accuracy, sampled (T=1)", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--draw", type=Path, help="only draw the curves of the runs that are there")
    args, overrides = parser.parse_known_args()
    common = [
        f"data.val_max_samples={args.problems}",
        "data.val_seed=7",
        "trainer.test_freq=15",
        "trainer.save_freq=-1",
        "trainer.logger=[]",
        "trainer.rollout_rows=False",
        *COMMON,
    ]
    for name in [] if args.draw else args.only:
        for seed in args.seeds:
            folder = args.out / name / f"seed_{seed}"
            if (folder / "result.json").exists():
                continue
            seeds = [f"trainer.seed={seed}", f"data.seed={seed}"]
            result = train(folder, [*common, *ALGORITHMS[name], *seeds, *overrides])
            (folder / "result.json").write_text(json.dumps(result, indent=1))
            print(name, seed, {k: round(v, 3) for k, v in result.items()}, flush=True)
    found = results(args.out)
    if args.draw:
        draw(found, args.draw)
    _show(found)


def _show(found: dict[str, list[dict[str, Any]]]) -> None:
    columns = ["start", "end", "start_greedy", "end_greedy", "clipfrac", "explained_variance", "cpu_s"]
    table = Table("algorithm", "seed", *columns)
    for name, runs in found.items():
        for run in runs:
            cells = ("" if run[c] is None else f"{run[c]:.0f}" if c == "cpu_s" else f"{run[c]:.4f}" for c in columns)
            table.add_row(name, run["seed"], *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
