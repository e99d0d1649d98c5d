"""How wrong the formula of `step_time.py` is: fits it to some runs and predicts others, on this machine.

    python recipes/scaling/check.py [--rounds 4] [--engine local|sglang] [--padded] [--out FOLDER]
        [--again]

The runs take turns, a step each; the first round warms up. Steps of the local engine are timed by a clock that counts
this process's own time only (`lab.OwnClock`; `--clock wall` for an ordinary one), SGLang's by an ordinary one: there,
use a machine that does nothing else. Rates are fitted to the runs named `fit`; the others differ from those in what the
last column of the table says, and their measured times are used for nothing but the comparison. What a run did (numbers
of tokens, turns and calls) is taken from its rollout rows, medians of times are compared. Updates are packed passes;
with `--padded` they are padded ones. Writes `machine.json`,
`errors.json`, `steps.json`; the last line is `worst error of a held-out run: P %`, and the exit code is 1 where it is
above 25 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import yaml

LIMIT = 0.25
ROLLOUT = "actor_rollout_ref.rollout."


@dataclass(frozen=True)
class Run:
    """One configuration."""

    name: str
    prompts: int
    n: int
    model: str = "tiny"
    """tiny, or `wide HIDDENxLAYERS` (the same tokens), or `random HIDDENxLAYERS` (one turn, as long as it may be)."""
    latency_s: float = 0.0
    concurrency: int | None = None
    response_length: int = 128
    new: str = ""
    """What was not seen in the fit; empty = it is part of the fit."""


LOCAL = (
    Run("small batch", 8, 4),
    Run("default", 16, 8),
    Run("in turns", 8, 8, concurrency=16),
    Run("wide", 8, 8, "wide 256x4"),
    Run("deep", 8, 4, "wide 128x8"),
    Run("wide and deep", 4, 4, "wide 384x6"),
    Run("one turn", 8, 4, "random 256x6", response_length=48),
    Run("longer turn", 4, 4, "random 128x4", response_length=96),
    Run("more samples", 4, 24, new="n, batch"),
    Run("larger batch", 24, 8, new="n, batch"),
    Run("slow tool", 8, 8, latency_s=0.5, new="tool latency"),
    Run("slow tool in turns", 12, 8, latency_s=0.3, concurrency=24, new="tool latency, batch, concurrency"),
    Run("larger model", 8, 4, "wide 512x5", new="model size"),
    Run("long responses", 6, 4, "random 192x8", response_length=160, new="model size, response length"),
    Run("very slow tool in turns", 10, 6, "wide 256x6", 0.8, 20, new="tool latency, batch, concurrency, model size"),
    Run("middling responses", 8, 4, "random 320x5", response_length=128, new="model size, response length"),
)
SGLANG = (
    Run("small batch", 8, 4),
    Run("default", 16, 8),
    Run("wide and deep", 8, 4, "wide 384x6"),
    Run("one turn", 8, 4, "random 256x6", response_length=48),
    Run("larger batch", 12, 12, new="n, batch"),
    Run("slow tool", 8, 8, latency_s=0.5, new="tool latency"),
    Run("larger model", 8, 4, "wide 512x5", new="model size"),
    Run("long responses", 6, 4, "random 192x8", response_length=160, new="model size, response length"),
)


def build(run: Run, folder: Path, engine: str, padded: bool) -> Any:
    """A trainer for it."""
    import lab

    from verl_mt.config.compose import compose
    from verl_mt.trainer.build import build_trainer

    kind, _, size = run.model.partition(" ")
    path = "verl_mt://tiny"
    if size:
        hidden, layers = map(int, size.split("x"))
        make: Callable[..., str] = lab.widened if kind == "wide" else lab.random_model
        path = make(folder / "models" / run.name, hidden=hidden, layers=layers)
    tools = folder / f"{run.name}.yaml"
    shipped = Path(__file__).resolve().parents[2] / "tools_configs" / "calculator.yaml"
    declaration = yaml.safe_load(shipped.read_text())
    if run.latency_s:
        declaration["tools"][0] |= {"class_name": "lab.SlowCalculator", "config": {"latency_s": run.latency_s}}
    tools.write_text(yaml.safe_dump(declaration))
    overrides = [
        f"data.train_batch_size={run.prompts}", "data.val_files=null", "data.train_max_samples=1024",
        f"actor_rollout_ref.model.path={path}", f"actor_rollout_ref.model.use_remove_padding={not padded}",
        "actor_rollout_ref.actor.optim.lr=0",
        f"{ROLLOUT}name={engine}", f"{ROLLOUT}n={run.n}", f"{ROLLOUT}response_length={run.response_length}",
        f"{ROLLOUT}max_concurrent={run.concurrency or 'null'}", f"{ROLLOUT}tool_kwargs.tools_config_file={tools}",
        f"{ROLLOUT}multi_turn.tokenization_sanity_check_mode=off",
        *([f"{ROLLOUT}engine_timeout_s=240"] if engine == "sglang" else []),
        f"reward.path={Path(__file__).parent / 'lab.py'}", "reward.name=any_reward",
        "trainer.logger=[]", "trainer.num_threads=1", "trainer.resume_mode=disable", "trainer.export_at_end=False",
        f"trainer.default_local_dir={folder / 'runs' / run.name}",
    ]  # fmt: skip
    return build_trainer(compose(overrides))


def step(trainer: Any) -> Any:
    """One training step, and what it was."""
    from observe import observe_step

    from verl_mt.data.row_files import read_rows, rows_of_step

    metrics = trainer.step()
    trainer.step_number += 1
    trainer.log.flush()
    file = rows_of_step(trainer.log.run.path, trainer.step_number)
    return observe_step(_config_of(trainer), metrics, list(read_rows(file.path)))


def _config_of(trainer: Any) -> Any:
    from verl_mt.config.compose import to_config

    return to_config(yaml.safe_load((trainer.log.run.path / "config.yaml").read_text()))


def measure(
    runs: tuple[Run, ...], args: argparse.Namespace, clock: Any, keep: Callable[[dict[str, list[Any]]], None]
) -> dict[str, list[Any]]:
    """`args.rounds` steps of each run, taking turns, the warm-up not counted; `keep` is given what there is after each
    round. SGLang runs go one after the other: each has an engine of its own, which takes memory."""
    with tempfile.TemporaryDirectory(prefix="step_time_") as folder:
        return _measure(runs, Path(folder), args, clock, keep)


def _measure(
    runs: tuple[Run, ...], folder: Path, args: argparse.Namespace, clock: Any, keep: Callable[[Any], None]
) -> dict[str, list[Any]]:
    observed: dict[str, list[Any]] = {run.name: [] for run in runs}
    latency = {run.name: run.latency_s for run in runs}
    groups = [runs] if args.engine == "local" else [(run,) for run in runs]
    for group in groups:
        trainers = {run.name: build(run, folder, args.engine, args.padded) for run in group}
        if clock is not None:
            for trainer in trainers.values():
                clock.watch(trainer.engine)
        try:
            for number in range(args.rounds + 1):
                for name, trainer in trainers.items():
                    seen = step(trainer)
                    if clock is not None and seen.work.calls:  # spans are in ordinary seconds
                        seen = replace(seen, work=replace(seen.work, tool_latency_s=latency[name]))
                    if number:
                        observed[name].append(seen)
                        print(f"  {name}: step {number} took {seen.times.step_s:.2f} s", flush=True)
                keep(observed)
        finally:
            for trainer in trainers.values():
                trainer.close()
    return observed


def evaluate(runs: tuple[Run, ...], observed: dict[str, list[Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Fit to the one kind of runs, predict all.

    Returns:
        The machine; for each run medians of measured and predicted seconds, and the relative error of the step.
    """
    from fit import fit

    from verl_mt.doctor.step_time import predict

    machine = fit([seen for run in runs if not run.new for seen in observed[run.name]])
    rows = []
    for run in runs:
        steps = [(seen, predict(seen.model, seen.work, machine)) for seen in observed[run.name]]
        row: dict[str, Any] = {"name": run.name, "new": run.new, "prompts": run.prompts, "n": run.n}
        row["parameters"] = steps[0][0].model.parameters
        row["tokens"] = median(seen.work.sampled_tokens for seen, _ in steps)
        for part in ("step", "rollout", "update", "weights"):
            row[part] = median(getattr(seen.times, f"{part}_s") for seen, _ in steps)
            row[f"{part}, predicted"] = median(getattr(found, f"{part}_s") for _, found in steps)
        row["error"] = row["step, predicted"] / row["step"] - 1
        rows.append(row)
    return machine, rows


def write_steps(observed: dict[str, list[Any]], file: Path) -> None:
    """What was measured, for `--again`."""
    file.write_text(json.dumps({name: [asdict(seen) for seen in found] for name, found in observed.items()}) + "\n")


def read_steps(file: Path) -> dict[str, list[Any]]:
    """What `write_steps` wrote."""
    from verl_mt.doctor.step_time import Model, Observed, StepTime, Work

    def step_of(given: dict[str, Any]) -> Observed:
        work = given["work"] | {"last": tuple(tuple(path) for path in given["work"]["last"])}
        work["tree"] = work["tree"] and tuple(work["tree"])
        return Observed(Model(**given["model"]), Work(**work), StepTime(**given["times"]))

    return {name: [step_of(given) for given in found] for name, found in json.loads(file.read_text()).items()}


def show(rows: list[dict[str, Any]]) -> None:
    """A table; numbers in brackets are predictions."""
    print("\n| run | prompts x n | model | tokens | step, s | rollout, s | update, s | error | new |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = [f"{row[part]:.2f} ({row[f'{part}, predicted']:.2f})" for part in ("step", "rollout", "update")]
        what = [
            row["name"],
            f"{row['prompts']} x {row['n']}",
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['tokens']:.0f}",
        ]
        print(f"| {' | '.join(what + times)} | {100 * row['error']:+.0f} % | {row['new'] or 'fit'} |")


def main(argv: list[str] | None = None) -> int:
    """Measure, fit, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--engine", choices=["local", "sglang"], default="local")
    parser.add_argument("--clock", choices=["own", "wall"], default="own", help="of the local engine's runs")
    parser.add_argument("--padded", action="store_true", help="train with use_remove_padding=False")
    parser.add_argument("--only", nargs="+", help="names of runs; others are left out")
    parser.add_argument("--out", type=Path, default=Path("runs/step_time"), help="folder of the results")
    parser.add_argument("--again", action="store_true", help="measure nothing; take the steps that --out holds")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    import lab

    from verl_mt.doctor.step_time import save_machine
    from verl_mt.trainer import ppo_trainer

    runs = tuple(r for r in (LOCAL if args.engine == "local" else SGLANG) if args.only is None or r.name in args.only)
    clock = lab.OwnClock() if args.clock == "own" and args.engine == "local" else None
    if clock is not None:
        lab.CLOCK = clock
        ppo_trainer.time = SimpleNamespace(monotonic=clock)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "steps.json"
    if args.again:
        observed = read_steps(file)
        runs = tuple(run for run in runs if observed.get(run.name))
    else:
        observed = measure(runs, args, clock, lambda found: write_steps(found, file))
    machine, rows = evaluate(runs, observed)
    save_machine(machine, args.out / "machine.json")
    (args.out / "errors.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\n{machine}\nload {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    show(rows)
    worst = max((abs(row["error"]) for row in rows if row["new"]), default=0.0)
    print(f"worst error of a held-out run: {100 * worst:.0f} %")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
