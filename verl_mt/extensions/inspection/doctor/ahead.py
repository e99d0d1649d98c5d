"""What `trainer.max_staleness` would save, from the steps of a finished synchronous run.

A step's conversations are admitted k updates before its own. Per step p of a synchronous run it is known how long its
rollout took (R), how long in it the engine had something to compute (E), and how long the rest of the step took (U).
With k steps ahead

    admitted_p = trained_(p-k-1)
    sampled_p  = max(admitted_p + R_p, sampled_(p-1) + E_p)
    trained_p  = max(sampled_p, trained_(p-1)) + U_p

where an engine computes for one step after the other, and conversations of several steps wait for their tools side by
side. Where engine and trainer have one device, what both compute adds up: a step takes at least E + U. So this is what
waiting costs, at best: an engine that gets larger batches is faster than said, one that is delayed by a trainer on the
same cores slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_mt.data.row_files import read_rows, row_files
from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.errors import DataError
from verl_mt.reading import read_yaml

_COMPUTED = ("prefill", "decode")
_BOUNDS = (1, 2, 4)
_FIRST_STEPS = 1
"""Left out: everything is made and loaded in them."""


@dataclass(frozen=True)
class MeasuredStep:
    """One synchronous step, in seconds."""

    rollout_s: float
    """From the first conversation's begin to the last one's end."""
    sampling_s: float
    """Of it, while the engine had a turn to sample; in the rest all waited for tools, users or rewards."""
    training_s: float
    """The rest of the step."""


def measured_steps(run: str | Path) -> list[MeasuredStep]:
    """The steps of a run directory, in order.

    Raises:
        DataError: no such run, one without rollout rows, or one that was not synchronous; names the file.
    """
    run = Path(run)
    try:
        config = read_yaml(run / "config.yaml")
    except DataError as error:
        raise DataError(f"{run} is no directory of a run: {error}") from error
    files = [run / name for name in ("metrics.jsonl", "timings.jsonl") if (run / name).exists()]
    lines: dict[int, dict[str, Any]] = {}
    for line in (line for file in files for line in read_jsonl_tolerant(file)):
        lines[line["step"]] = lines.get(line["step"], {}) | line
    if config.get("trainer", {}).get("max_staleness"):
        raise DataError(f"{run / 'config.yaml'}: this run was asynchronous. Name one with trainer.max_staleness=0")
    found = []
    for file in row_files(run):
        seconds = lines.get(file.step, {}).get("time/step_s")
        if file.split != "train" or seconds is None:
            continue
        sampling = sum(end - start for start, end in _merged(_turns(read_rows(file.path))))
        rollout = lines[file.step]["time/rollout_s"]
        found.append(MeasuredStep(rollout, min(sampling, rollout), seconds - rollout))
    if len(found) <= _FIRST_STEPS:
        raise DataError(f"{run}: {len(found)} steps with rollout rows and times. It takes {_FIRST_STEPS + 1} or more")
    return found[_FIRST_STEPS:]


def seconds_ahead(steps: Sequence[MeasuredStep], max_staleness: int, *, one_device: bool) -> float:
    """Seconds of a step, on average, in asynchronous training.

    Args:
        steps: of a synchronous run.
        max_staleness: k; 0 gives the mean of the steps as they were.
        one_device: engine and trainer compute on the same one.
    """
    trained: list[float] = []
    sampled = computed = 0.0
    for number, step in enumerate(steps):
        admitted = trained[number - max_staleness - 1] if number > max_staleness else 0.0
        sampled = max(admitted + step.rollout_s, sampled + step.sampling_s)
        before = trained[-1] if trained else 0.0
        computed += step.sampling_s + step.training_s
        end = max(sampled, before) + step.training_s
        trained.append(max(end, computed) if one_device else end)
    return trained[-1] / len(steps)


def table(run: str | Path, bounds: Iterable[int] = _BOUNDS) -> str:
    """What the command prints.

    Raises:
        DataError: as `measured_steps`.
    """
    steps = measured_steps(run)
    rollout, sampling = (fmean(getattr(step, name) for step in steps) for name in ("rollout_s", "sampling_s"))
    training = fmean(step.training_s for step in steps)
    now = rollout + training
    lines = [
        f"{run}: {len(steps)} synchronous steps of {now:.2f} s: {sampling:.2f} s the engine samples, "
        f"{rollout - sampling:.2f} s all wait for what is outside of it, {training:.2f} s of training and the rest",
        "trainer.max_staleness   engine on separate devices     engine and trainer on one device",
    ]
    for bound in (0, *bounds):
        apart, shared = (seconds_ahead(steps, bound, one_device=one) for one in (False, True))
        lines.append(f"{bound:<24}{_saved(apart, now):<31}{_saved(shared, now)}")
    return "\n".join([*lines, "at best, by waiting alone: docs/asynchronous.md"])


def _saved(seconds: float, now: float) -> str:
    less = 1 - seconds / now
    return f"{seconds:.2f} s a step" + (f", {less:.0%} less" if less >= 0.005 else "")


def _turns(rows: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    return sorted(
        (span["start_s"], span["end_s"])
        for row in rows
        for span in row.get("time_spans") or []
        if span["phase"] in _COMPUTED
    )


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Their union; they come in order of their begin."""
    found: list[tuple[float, float]] = []
    for start, end in intervals:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
