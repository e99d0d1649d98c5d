"""Several runs side by side: their training rewards as curves, how far sampler and trainer were apart over each whole
run, and what a step took.

    python recipes/gsm8k/smollm2/curves.py seed_1=runs/seed_1 seed_2=runs/seed_2 shuffled=runs/shuffled \\
        --keep recipes/gsm8k/smollm2/measured --draw docs/images/smollm2.svg

`--keep FOLDER` writes what is shown here of a run to `FOLDER/run_NAME.json`; such a file stands in place of the run's
folder later. `--draw` needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.errors import DataError, VerlMTError

Run = dict[str, list[float]]
"""Metric -> its value in each step."""

KEPT = (
    "step",
    "rollout/trajectories",
    "reward/mean",
    "group/zero_variance",
    "response/tokens_mean",
    "response/clip_ratio",
    "turns/mean",
    "rollout/entropy",
    "rollout/logprob_diff_mean",
    "rollout/logprob_diff_max",
    "actor/grad_norm",
    "rollout/tokens_per_s",
    "time/rollout_s",
    "time/update_s",
    "time/step_s",
)
ENDS = 10
"""Steps of a run's beginning and end that are compared."""
SMOOTH = 5
"""Steps that a point of a curve is the mean of."""


def read(place: str) -> Run:
    """A run's folder, or a file that `--keep` wrote.

    Raises:
        DataError: there is no such run, it has no step, or a step lacks one of the metrics; the file is none of ours.
    """
    path = Path(place) if place.endswith(".json") else Path(place) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{path} is not there: give the folder of a run, or a file that `curves.py --keep` wrote")
    if place.endswith(".json"):
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return {name: [float(value) for value in kept[name]] for name in KEPT}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: {error!r}; give a file that `curves.py --keep` wrote") from error
    steps = [line for line in read_jsonl_tolerant(path) if "reward/mean" in line]
    if not steps:
        raise DataError(f"{path}: no step of training is in it")
    for line in steps:
        if missing := [name for name in KEPT if line.get(name) is None]:
            raise DataError(f"{path}: step {line.get('step')} has no {', '.join(missing)}")
    return {name: [round(float(line[name]), 6) for line in steps] for name in KEPT}


def ends(values: list[float]) -> tuple[str, str]:
    """Means of the first and the last steps, each ± 1.96 standard errors over these steps."""

    def shown(part: list[float]) -> str:
        half = 1.96 * stdev(part) / sqrt(len(part)) if len(part) > 1 else float("nan")
        return f"{fmean(part):.3f} ± {half:.3f}"

    count = min(ENDS, max(1, len(values) // 2))
    return shown(values[:count]), shown(values[-count:])


def table(runs: dict[str, Run]) -> str:
    """Markdown: a row per run. The mean difference of log-probs is that of the steps' means."""
    head = ["run", "steps", f"reward, first {ENDS} (at most half)", "last", "log-prob difference, mean", "largest"]
    head += ["tokens/s", "rollouts, s", "update, s", "step, s", "hours"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, run in runs.items():
        first, last = ends(run["reward/mean"])
        cells = [name, str(len(run["step"])), first, last]
        cells += [f"{fmean(run['rollout/logprob_diff_mean']):.1e}", f"{max(run['rollout/logprob_diff_max']):.1e}"]
        cells += [f"{fmean(run['rollout/tokens_per_s']):.0f}"]
        cells += [f"{fmean(run[f'time/{phase}_s']):.1f}" for phase in ("rollout", "update", "step")]
        cells += [f"{sum(run['time/step_s']) / 3600:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: dict[str, Run], out: Path) -> None:
    """The runs' training rewards, each point the mean of the steps before it.

    Raises:
        DataError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise DataError(f"--draw {out}: {error}; pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "verl_mt"
    figure, axes = plt.subplots(figsize=(7.2, 2.9))
    for name, run in runs.items():
        rewards = run["reward/mean"]
        smooth = [fmean(rewards[max(0, k - SMOOTH + 1) : k + 1]) for k in range(len(rewards))]
        (line,) = axes.plot(run["step"], smooth, "-", lw=1.4, label=name)
        axes.plot(run["step"], rewards, ".", ms=3, alpha=0.35, color=line.get_color())
    axes.set(xlabel="training step", ylabel=f"reward (mean of {SMOOTH} steps)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER or NAME=FILE.json")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write each run's steps to FOLDER/run_NAME.json")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="an SVG or PNG file with the rewards")
    args = parser.parse_args(argv)
    try:
        if unnamed := [word for word in args.runs if "=" not in word]:
            raise DataError(f"{unnamed[0]}: give NAME=FOLDER")
        runs = {name: read(place) for name, place in (word.split("=", 1) for word in args.runs)}
        print(table(runs))
        for name, run in runs.items() if args.keep else ():
            args.keep.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(f"{json.dumps(metric)}: {json.dumps(values)}" for metric, values in run.items())
            (args.keep / f"run_{name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        if args.draw:
            draw(runs, args.draw)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
