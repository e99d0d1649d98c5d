"""Draw the curves of `measure.py`'s runs (needs matplotlib).

python recipes/tiny/plot.py --runs runs/measure/seed_* --out docs/images/tiny_curve.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from verl_mt.data.run_files import read_jsonl_tolerant


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lowest", type=float, default=0.4, help="where the accuracy axis begins")
    args = parser.parse_args()
    runs = [read_jsonl_tolerant(run / "metrics.jsonl") for run in args.runs]

    plt.rcParams["svg.hashsalt"] = "verl_mt"
    figure, axes = plt.subplots(figsize=(7.2, 2.9))
    for key, label, colour in (
        ("val/accuracy_greedy", "held-out, greedy", "#1b7837"),
        ("val/accuracy", "held-out, sampled (T=1)", "#2166ac"),
    ):
        for number, lines in enumerate(runs):
            points = [(line["step"], line[key]) for line in lines if key in line]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, ms=3, lw=1, label=None if number else label)
    for number, lines in enumerate(runs):
        rewards = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
        smooth = [(s, fmean(r for _, r in rewards[max(0, k - 4) : k + 1])) for k, (s, _) in enumerate(rewards)]
        label = None if number else "training reward (mean of 5 steps)"
        axes.plot(*zip(*smooth, strict=True), "-", color="#999999", lw=0.8, label=label)
    axes.set(xlabel="training step (16 prompts x 8 samples)", ylabel="accuracy", ylim=(args.lowest, 1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    figure.tight_layout()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, metadata={"Date": None})
    print(f"{len(runs)} runs -> {args.out}")


if __name__ == "__main__":
    main()
