"""The rollout rows of a run, and the text of every token id in them, so that a reader needs no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tensordict import TensorDict

from verl_mt.data.batch import ADVANTAGES, CLIPPED, OLD_LOG_PROBS, per_record
from verl_mt.data.run_files import append_token_texts, read_token_texts, trajectory_to_row, write_rows
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup


class RolloutFiles:
    """`rollouts/*.jsonl` and `token_texts.jsonl` of a run directory.

    Args:
        folder: the run directory.
        text_of: token id -> its own text.
    """

    def __init__(self, folder: Path, text_of: Callable[[int], str]):
        self._folder, self._text_of = folder, text_of
        self._known = set(read_token_texts(folder))

    def training(self, step: int, groups: Sequence[TrajectoryGroup], batch: TensorDict | None) -> None:
        """Write `step_<number>.jsonl`, with what the update computed for each token."""
        rows = []
        columns = per_record(batch) if batch is not None else {}
        trajectories = [t for g in groups for t in g.trajectories]
        for trajectory in trajectories:
            extras = [columns.get((trajectory.trajectory_id, k), {}) for k in range(len(trajectory.records))]
            rows.append(
                trajectory_to_row(
                    trajectory,
                    step=step,
                    advantages=[e.get(ADVANTAGES) for e in extras],
                    old_log_probs=[e.get(OLD_LOG_PROBS) for e in extras],
                    clipped=[e.get(CLIPPED) for e in extras],
                )
            )
        self._write_texts(trajectories)
        write_rows(self._folder / "rollouts" / f"step_{step:06d}.jsonl", rows)

    def validation(self, name: str, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Write `<name>_<number>.jsonl`: the rollouts of one pass of a validation."""
        trajectories = [t for g in groups for t in g.trajectories]
        self._write_texts(trajectories)
        rows = (trajectory_to_row(t, step=step) for t in trajectories)
        write_rows(self._folder / "rollouts" / f"{name}_{step:06d}.jsonl", rows)

    def _write_texts(self, trajectories: Iterable[Trajectory]) -> None:
        new = {i for t in trajectories for r in t.records for i in r.token_ids} - self._known
        if new:
            append_token_texts(self._folder, {i: self._text_of(i) for i in sorted(new)})
            self._known |= new
