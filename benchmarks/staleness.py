"""What `trainer.max_staleness` costs in accuracy, and what it saves where tools are waited for.

    python benchmarks/staleness.py curve [--bounds 0 1 2 4 8] [--seeds 0 1 2] [--out runs/staleness.jsonl] [--draw FILE]
    python benchmarks/staleness.py waiting [--bounds 2] [--over 2:1.5] [--seeds 0 1 2] [--out runs/waiting.jsonl]
    python benchmarks/staleness.py tune [--scales 0.02] [--seeds 0] [--steps 20] [--out runs/tune.jsonl]

Words `key=value` behind the first one go to every run.

`curve` trains the default task by each bound, without a correction, with weights per token of the trainer's policy over
the sampler's (decoupled PPO, truncated importance sampling), and with ratios to the sampler.

`waiting` trains it with a calculator whose calls take Pareto-distributed times: with `--scales`, so long that a
synchronous step waits a third and two thirds of its time. Per seed all variants run one after the other: steps ahead
(`--bounds`), and `data.over_sample` with partial rollouts instead (`--over`, each a bound and a factor). Waiting is
what a synchronous step takes longer than one whose tool answers at once; what a bound removes of it is a share.

`tune` looks for a synchronous step that would be faster than the one of `waiting`, with other threads, numbers of
conversations at once, and tokens in a pass.

Every run is a process of its own and one line of `--out`, with its commit and machine; what stands there is not run
again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from provenance import provenance

from verl_mt.extensions.inspection.doctor.ahead import measured_steps, seconds_ahead

HERE = Path(__file__).resolve().parent
CORRECTIONS = {
    "none": ["algorithm.rollout_correction={rollout_is: null}"],
    "weights per token": ["algorithm.rollout_correction={rollout_is: token}"],
    "ratios to the sampler": ["actor_rollout_ref.actor.use_sampler_log_probs=always"],
}
_FIRST_STEPS = 5
"""Left out of times: caches fill, and nothing is ahead yet."""
TUNED: dict[str, tuple[int, list[str]]] = {
    "as shipped": (1, []),
    "two threads": (2, []),
    "half of the conversations at once": (1, ["actor_rollout_ref.rollout.max_concurrent=64"]),
    "a quarter": (1, ["actor_rollout_ref.rollout.max_concurrent=32"]),
    "passes of half as many tokens": (1, ["actor_rollout_ref.actor.ppo_max_token_len=8192"]),
    "of twice as many": (1, ["actor_rollout_ref.actor.ppo_max_token_len=32768"]),
}
"""What `tune` tries with synchronous steps: threads, words."""


def train(words: list[str], ahead: list[int], threads: int = 1) -> dict[str, Any]:
    """A run of the default task in a process of its own; what its steps took and what it has learned; and what the
    doctor says of it that these bounds would save (`--ahead`)."""
    folder = Path(tempfile.mkdtemp(prefix="staleness_"))
    command = [sys.executable, "-m", "verl_mt.trainer", *words, f"trainer.default_local_dir={folder / 'run'}"]
    command += ["trainer.logger=[]", "trainer.save_freq=-1", "trainer.export_at_end=False"]
    command += [f"trainer.num_threads={threads}"]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        measured = measured_steps(folder / "run")[_FIRST_STEPS - 1 :] if ahead else []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    steps = [line for line in lines if "time/step_s" in line]
    timed = steps[_FIRST_STEPS:] or steps
    last = next(line for line in reversed(lines) if "val/accuracy" in line)
    return {
        "accuracy": last["val/accuracy"],
        "greedy": last["val/accuracy_greedy"],
        "step_s": fmean(line["time/step_s"] for line in timed),
        "age": fmean(line.get("staleness/mean", 0.0) for line in steps),
        "doctor": {
            str(bound): [seconds_ahead(measured, bound, one_device=one) for one in (False, True)] for bound in ahead
        },
    }


def done(
    out: Path, key: dict[str, Any], words: list[str], ahead: list[int] | None = None, threads: int = 1
) -> dict[str, Any]:
    """The run's line in `out`; trained now, if there is none."""
    for line in out.read_text().splitlines() if out.exists() else ():
        if (known := json.loads(line)) and all(known.get(name) == value for name, value in key.items()):
            return known
    found = key | train(words, ahead or [], threads)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(found | provenance()) + "\n")
    print(
        "  " + ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()), flush=True
    )
    return found


def mean_and_error(values: list[float]) -> str:
    """With the standard error of the mean, where there are several."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values) / sqrt(len(values)):.3f}" if len(values) > 1 else "")


def curve(args: argparse.Namespace) -> None:
    """Accuracy by bound and correction."""
    rows: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for seed in args.seeds:
        for bound in args.bounds:
            for name in CORRECTIONS if bound else ("none",):
                key = {"steps": args.steps, "seed": seed, "bound": bound, "correction": name}
                words = [f"trainer.seed={seed}", f"trainer.max_staleness={bound}", *CORRECTIONS[name]]
                words += [f"trainer.total_training_steps={args.steps}", f"trainer.test_freq={args.steps}"]
                words += ["trainer.val_before_train=False", *args.overrides]
                rows[bound, name].append(done(args.out, key | args.key, words))
    print("| max_staleness | correction | mean age | accuracy, sampled | greedy |\n|---|---|---|---|---|")
    for (bound, name), found in rows.items():
        age = fmean(run["age"] for run in found)
        sampled, greedy = (mean_and_error([run[kind] for run in found]) for kind in ("accuracy", "greedy"))
        print(f"| {bound} | {name if bound else ''} | {age:.2f} | {sampled} | {greedy} |")
    if args.draw is not None:
        draw({key: [run["accuracy"] for run in found] for key, found in rows.items()}, args.draw)
    means = [
        f"{bound}: {fmean(run['accuracy'] for run in found):.3f}"
        for (bound, name), found in rows.items()
        if not bound or name == "weights per token"
    ]
    print(f"accuracy by max_staleness, with weights per token: {', '.join(means)}")


def draw(accuracy: dict[tuple[int, str], list[float]], path: Path) -> None:
    """A line per correction; every run is a point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "verl_mt"
    bounds = sorted({bound for bound, _ in accuracy})
    figure, axes = plt.subplots(figsize=(7.2, 3.2))
    for number, (name, colour) in enumerate(zip(CORRECTIONS, ("#c0392b", "#2471a3", "#7d8a2e"))):
        # A synchronous run is where every line begins.
        found = [accuracy[bound, name if bound else "none"] for bound in bounds]
        places = [place + 0.06 * (number - 1) for place in range(len(bounds))]
        axes.plot(places, [fmean(runs) for runs in found], color=colour, label=name)
        for place, runs in zip(places, found):
            axes.plot([place] * len(runs), runs, ".", color=colour, alpha=0.5)
    axes.set_xticks(range(len(bounds)), bounds)
    axes.set(xlabel="trainer.max_staleness", ylabel="accuracy, held-out problems", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(title="correction", loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def slow_tool(folder: Path, scale_s: float) -> str:
    """The key that names the slow calculator's YAML."""
    declared = yaml.safe_load((HERE.parent / "tools_configs" / "calculator.yaml").read_text())
    (tool,) = declared["tools"]
    tool["class_name"] = f"{HERE / 'slow_calculator.py'}:SlowCalculator"
    tool["config"] = {"scale_s": scale_s, "shape": 1.2, "longest_s": 60 * scale_s}
    path = folder / f"slow_{scale_s}.yaml"
    path.write_text(yaml.safe_dump(declared))
    return f"actor_rollout_ref.rollout.tool_kwargs.tools_config_file={path}"


def waiting(args: argparse.Namespace) -> None:
    """Seconds of a step, synchronous and not, with slow tools and without."""
    rows: dict[tuple[float, int, float], list[dict[str, Any]]] = defaultdict(list)
    common = [f"trainer.total_training_steps={args.steps}", f"trainer.test_freq={args.steps}"]
    common += ["trainer.val_before_train=False"]
    with tempfile.TemporaryDirectory(prefix="slow_tools_") as folder:
        asked = [(0, 1.0), *((bound, 1.0) for bound in args.bounds)]
        asked += [(int(bound), float(factor)) for bound, _, factor in (text.partition(":") for text in args.over)]
        variants = [(0.0, 0, 1.0), *((scale, *each) for scale in args.scales for each in asked)]
        for seed in args.seeds:
            for scale, bound, factor in variants:
                key = {"steps": args.steps, "seed": seed, "bound": bound, "over": factor, "scale_s": scale}
                words = [
                    *common,
                    f"trainer.seed={seed}",
                    f"trainer.max_staleness={bound}",
                    f"data.over_sample={factor}",
                ]
                words += [*([slow_tool(Path(folder), scale)] if scale else []), *args.overrides]
                ahead = args.bounds if scale and not bound else None
                rows[scale, bound, factor].append(done(args.out, key | args.key, words, ahead))
    seconds = {key: [run["step_s"] for run in found] for key, found in rows.items()}
    print("| tools wait | max_staleness | over_sample | mean age | s a step | / synchronous | waiting removed ", end="")
    print("| accuracy, sampled | greedy |\n|---|---|---|---|---|---|---|---|---|")
    for (scale, bound, factor), found in rows.items():
        at_once, synchronous = fmean(seconds[0.0, 0, 1.0]), fmean(seconds[scale, 0, 1.0])
        share = f"{1 - at_once / synchronous:.0%} of a synchronous step" if scale else "not"
        own, age = fmean(seconds[scale, bound, factor]), fmean(run["age"] for run in found)
        ratio = own / synchronous
        removed = f"{(1 - ratio) / (1 - at_once / synchronous):.0%}" if scale and ratio != 1 else ""
        sampled, greedy = (mean_and_error([run[kind] for run in found]) for kind in ("accuracy", "greedy"))
        print(f"| {share} | {bound} | {factor:g} | {age:.2f} | {own:.2f} | {ratio:.2f} | {removed} ", end="")
        print(f"| {sampled} | {greedy} |")
    print("| tools wait | max_staleness | the doctor's forecast, s a step: engine apart, on one device | measured |")
    print("|---|---|---|---|")
    for scale in args.scales:
        for bound in args.bounds:
            said = [fmean(run["doctor"][str(bound)][one] for run in rows[scale, 0, 1.0]) for one in (0, 1)]
            print(f"| {scale:g} | {bound} | {said[0]:.2f}, {said[1]:.2f} | {fmean(seconds[scale, bound, 1.0]):.2f} |")
    last = {key: fmean(of) / fmean(seconds[key[0], 0, 1.0]) for key, of in seconds.items() if key[0] == args.scales[-1]}
    said = ", ".join(f"max_staleness {k} over_sample {f:g}: {ratio:.2f}" for (_, k, f), ratio in last.items())
    print(f"step / synchronous, calls of {args.scales[-1]:g} s: {said}")


def tune(args: argparse.Namespace) -> None:
    """Seconds of a synchronous step, by what could make it faster."""
    print("| tools wait, scale in s | synchronous steps | s a step | / as shipped |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="slow_tools_") as folder:
        for scale in args.scales:
            usual, ratios = None, {}
            for name, (threads, words) in TUNED.items():
                key = {"steps": args.steps, "tuned": name, "scale_s": scale}
                more = [f"trainer.total_training_steps={args.steps}", f"trainer.test_freq={args.steps}"]
                more += ["trainer.val_before_train=False", *([slow_tool(Path(folder), scale)] if scale else [])]
                more += args.overrides
                found = [
                    done(
                        args.out,
                        {**key, **args.key, "seed": seed},
                        [*more, f"trainer.seed={seed}", *words],
                        threads=threads,
                    )
                    for seed in args.seeds
                ]
                seconds = fmean(run["step_s"] for run in found)
                usual = seconds if usual is None else usual
                ratios[name] = seconds / usual
                print(f"| {scale:g} | {name} | {seconds:.2f} | {ratios[name]:.2f} |", flush=True)
            best = min(ratios, key=lambda name: ratios[name])
            print(f"scale {scale:g} s: fastest {best}, step / as shipped {ratios[best]:.2f}", flush=True)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curve", "waiting", "tune"))
    parser.add_argument("overrides", nargs="*", help="key=value of every run")
    parser.add_argument("--bounds", type=int, nargs="+", help="of max_staleness")
    parser.add_argument("--over", nargs="*", default=["2:1.5"], help="max_staleness:over_sample, of waiting")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--scales", type=float, nargs="+", default=[0.02, 0.07], help="seconds, of waiting and tune")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, metavar="FILE.svg", help="the curve as a picture (needs matplotlib)")
    args = parser.parse_args()
    is_curve = args.what == "curve"
    if args.draw is not None and not is_curve:
        parser.error("--draw is of curve")
    args.bounds = args.bounds or ([0, 1, 2, 4, 8] if is_curve else [2])
    args.key = {"overrides": args.overrides} if args.overrides else {}
    args.out = args.out or Path("runs") / ("staleness.jsonl" if is_curve else f"{args.what}.jsonl")
    {"curve": curve, "waiting": waiting, "tune": tune}[args.what](args)


if __name__ == "__main__":
    main()
