"""Runs -> what the page shows. A `Collector` remembers what it encoded: rollout files do not change once written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from verl_mt.report.encode import EncodedFile, encode_file, spread
from verl_mt.report.page_builder import Contents
from verl_mt.report.run_reader import RolloutFile, Run, open_run, rollout_files


class Collector:
    """Reads the same runs again and again.

    Args:
        paths: run directories.
        max_rollouts: of each run; where there are more, whole files are left out evenly, and the page says so.
    """

    def __init__(self, paths: Sequence[str], max_rollouts: int):
        self._paths, self._max_rollouts = list(paths), max_rollouts
        self._encoded: dict[Path, tuple[tuple[int, int], EncodedFile]] = {}
        self._counts: dict[tuple[Path, tuple[int, int]], int] = {}

    def contents(self) -> Contents:
        """What the page shows now.

        Raises:
            DataError: one of the paths is no run directory.
        """
        runs = [open_run(path) for path in self._paths]
        contents = Contents()
        for run, label in zip(runs, labels(runs)):
            contents.add_run(run, label, *self._files(run))
        return contents

    def _files(self, run: Run) -> tuple[list[EncodedFile], list[str]]:
        files = rollout_files(run.path)
        counts = [self._count(file) for file in files]
        chosen = list(spread(files, counts, self._max_rollouts))
        left_out = len(files) - len(chosen)
        problems = []
        if left_out:
            problems.append(
                f"{left_out} of {len(files)} rollout files are not shown, evenly over the run: there are {sum(counts)} "
                f"rollouts, and --max-rollouts is {self._max_rollouts}."
            )
        return [self._encode(file, run) for file in chosen], problems

    def _count(self, file: RolloutFile) -> int:
        key = file.path, file.stamp
        if key not in self._counts:
            self._counts[key] = _num_lines(file.path)
        return self._counts[key]

    def _encode(self, file: RolloutFile, run: Run) -> EncodedFile:
        known = self._encoded.get(file.path)
        if known is None or known[0] != file.stamp:
            stamp = file.stamp
            known = self._encoded[file.path] = (stamp, encode_file(file, run))
        return known[1]


def collect(paths: Sequence[str], *, max_rollouts: int) -> Contents:
    """What the page shows of these runs, read once."""
    return Collector(paths, max_rollouts).contents()


def labels(runs: Sequence[Run]) -> list[str]:
    """The name of each run's folder, with its parent's where two have the same."""
    names = Counter(run.name for run in runs)
    found = [run.name if names[run.name] == 1 else "/".join(run.path.resolve().parts[-2:]) for run in runs]
    again = Counter(found)
    return [name if again[name] == 1 else f"{name} ({k + 1})" for k, name in enumerate(found)]


def _num_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
