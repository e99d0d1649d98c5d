"""How long a training step takes, from sizes and rates: a formula, not a simulation.

    python recipes/scaling/step_time.py --model PATH --machine machine.json --trajectories 512 --prompt-tokens 600 \
        --turns 3 --sampled-tokens 900 --longest-tokens 2048 --observation-tokens 400 --tool-latency 0.5
    python recipes/scaling/step_time.py --machine machine.json --run runs/NAME              # predicted and measured
    python recipes/scaling/step_time.py --machine machine.json --fit runs/A runs/B runs/C   # writes machine.json

`Model` and `Work` say what is to be done, `Machine` how fast it is done; `predict` divides the one by the other. Every
term is a quantity over a rate, terms add up (nothing overlaps unless a line below says so), and the largest term is the
next bottleneck. A `Machine` is fitted to finished runs (`fit.py`), or written by hand. `check.py` measures how wrong
the formula is on runs that were not used to fit it; benchmarks/RESULTS.md has the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from fit import fit
from observe import model_of, observe_run

from verl_mt.doctor.step_time import StepTime, Work, load_machine, predict, save_machine
from verl_mt.errors import ConfigError


def main(argv: list[str] | None = None) -> None:
    """Predict, or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, required=True, help="JSON of rates; with --fit it is written")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="RUN", help="finished runs to fit the machine to")
    parser.add_argument("--run", type=Path, help="a finished run: its work is predicted and compared")
    parser.add_argument("--model", help="folder or hub name; with --run, the run's own")
    parser.add_argument("--dtype", default="float32", help="of the engine's weights, with --model")
    for field in dataclasses.fields(Work):
        if field.name not in ("ref", "last", "packed", "tree"):
            flag = "--" + field.name.removesuffix("_s").replace("_", "-")
            parser.add_argument(flag, dest=field.name, type=float)
    parser.add_argument("--padded", action="store_true", help="rows of the update (model.use_remove_padding=False)")
    parser.add_argument("--max-staleness", type=int, default=0, help="trainer.max_staleness of the run")
    parser.add_argument("--one-device", action="store_true", help="engine and trainer compute on the same one")
    args = parser.parse_args(argv)
    if (args.fit or args.run) and (args.max_staleness or args.one_device):
        parser.error(
            "--max-staleness and --one-device are of a run that does not exist yet; of one that does: "
            "python -m verl_mt.doctor --ahead RUN"
        )
    if args.fit:
        machine = fit([step for run in args.fit for step in observe_run(run)])
        save_machine(machine, args.machine)
        print(args.machine.read_text(), end="")
        return
    try:
        machine = load_machine(args.machine)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    if args.run:
        for step in observe_run(args.run):
            print(describe(predict(step.model, step.work, machine), step.times))
        return
    given = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(Work)}
    missing = [n for n in ("trajectories", "prompt_tokens", "sampled_tokens", "longest_tokens") if given[n] is None]
    if args.model is None or missing:
        parser.error(f"without --run: --model and --{' --'.join(missing or ['...']).replace('_', '-')} are needed")
    work = Work(**{k: v for k, v in given.items() if v is not None}, packed=not args.padded)
    predicted = predict(model_of(args.model, args.dtype), work, machine)
    print(describe(predicted))
    if args.max_staleness:
        seconds = predicted.ahead_s(args.max_staleness, one_device=args.one_device)
        print(f"with trainer.max_staleness={args.max_staleness}: step {seconds:.2f} s, predicted")


def describe(predicted: StepTime, measured: StepTime | None = None) -> str:
    """One line per prediction."""
    parts = []
    for name in ("step_s", "rollout_s", "ref_s", "update_s", "weights_s", "rest_s"):
        value = getattr(predicted, name)
        beside = "" if measured is None else f" ({getattr(measured, name):.2f})"
        parts.append(f"{name.removesuffix('_s')} {value:.2f}{beside}")
    what = "s, predicted" + (" (measured)" if measured is not None else "")
    return f"{', '.join(parts)} {what}; longest part: {predicted.bottleneck}"


if __name__ == "__main__":
    main(sys.argv[1:])
