"""Rollouts as files: to be looked at with `torch.load` alone, and to be trained on again without an engine.

A file holds `rollout_id`, `samples` (one per record; attributes and items, readable where verl_mt is not installed) and
`trajectories` (rows of `verl_mt.data.run_files`, everything that training needs). Rewards and loss masks of `samples`
may be edited between dump and replay; they win. What was sampled may not.

A run directory can be replayed as well: its rollout rows hold the same trajectories, in whatever format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from verl_mt.data.digests import save_tensors
from verl_mt.data.media import has_media
from verl_mt.data.row_files import read_rows, rows_of_step
from verl_mt.data.run_files import atomic_file, row_to_trajectory, trajectory_to_row, writing
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.errors import DataError
from verl_mt.extensions.compat.slime_sample import Dumped, Sample, samples_of
from verl_mt.trainer.ppo_trainer import PPOTrainer
from verl_mt.trainer.rollout_source import RolloutSource, SourceParts
from verl_mt.trainer.step_hook import HookParts, StepHook

PLACEHOLDER = "{rollout_id}"


class DebugData:
    """The files of one run.

    Args:
        path: with `{rollout_id}` in it, or a run directory to be replayed; None = nothing is written.
        replays: the files are read, not written.
        decode: ids -> text, for trajectories that no generate function made a Sample of.
    """

    def __init__(self, path: str | None, decode: Callable[[Sequence[int]], str], *, replays: bool = False):
        self.replays = replays
        """Rollouts come from files."""
        self.path, self._decode = path, decode

    def save(self, rollout_id: int | str, groups: Sequence[TrajectoryGroup]) -> Path | None:
        """Write one rollout; None where nothing is to be written.

        Raises:
            CheckpointError: the disk refused.
        """
        if self.path is None or self.replays:
            return None
        path = self._file(rollout_id)
        trajectories = [t for group in groups for t in group.trajectories]
        content = {
            "rollout_id": rollout_id,
            "samples": list(self._samples(trajectories, rollout_id)),
            "trajectories": [
                trajectory_to_row(t, step=rollout_id if isinstance(rollout_id, int) else 0) for t in trajectories
            ],
        }
        with writing(path), atomic_file(path) as file:
            save_tensors(content, file)
        return path

    def load(self, rollout_id: int) -> list[TrajectoryGroup]:
        """The groups of a saved rollout, with the rewards and masks that its samples have now.

        Raises:
            DataError: no such file, it is not one of ours, or something that was sampled was edited.
        """
        if PLACEHOLDER not in str(self.path):
            return self._load_rows(rollout_id)
        path = self._file(rollout_id)
        if not path.is_file():
            raise DataError(
                f"trainer.debug_rollout_data: no file {path} for rollout {rollout_id}. A run of fewer steps was "
                "saved there, or trainer.total_training_steps is too large"
            )
        content = torch.load(path, weights_only=True)
        if not isinstance(content, dict) or "trajectories" not in content:
            raise DataError(
                f"trainer.debug_rollout_data: {path} has no trajectories. It was not written by trainer.debug_mode=save"
            )
        trajectories = _trajectories(content["trajectories"], path)
        samples = [Sample.from_dict(dict(sample)) for sample in content["samples"]]
        _take_edits(trajectories, samples, path)
        return _groups(trajectories)

    def _load_rows(self, rollout_id: int) -> list[TrajectoryGroup]:
        run, step = Path(str(self.path)).expanduser(), rollout_id + 1
        file = rows_of_step(run, step)
        if file is None:
            raise DataError(
                f"trainer.debug_rollout_data: {run} has no rollout rows of step {step}. It is a run of fewer steps, or "
                "trainer.total_training_steps is too large"
            )
        return _groups(_trajectories(read_rows(file.path), file.path))

    def _file(self, rollout_id: int | str) -> Path:
        assert self.path is not None
        return Path(self.path.replace(PLACEHOLDER, str(rollout_id))).expanduser()

    def _samples(self, trajectories: Sequence[Trajectory], rollout_id: int | str) -> Iterator[Dumped]:
        for trajectory in trajectories:
            for sample in samples_of(trajectory, self._decode):
                sample.rollout_id = rollout_id if isinstance(rollout_id, int) else None
                yield Dumped(sample.to_dict())


def _trajectories(rows: Iterable[dict[str, Any]], path: Path) -> list[Trajectory]:
    trajectories = [row_to_trajectory(row) for row in rows]
    shown = next((t.trajectory_id for t in trajectories if has_media(t.messages)), None)
    if shown is not None:
        raise DataError(
            f"trainer.debug_rollout_data: {path}, trajectory {shown}: it holds images, whose tensors are not "
            "saved. trainer.debug_mode=train_only is for text"
        )
    return trajectories


def _take_edits(trajectories: Sequence[Trajectory], samples: Sequence[Sample], path: Path) -> None:
    by_id: dict[str | None, list[Sample]] = {}
    for sample in samples:
        by_id.setdefault(sample.session_id, []).append(sample)
    for trajectory in trajectories:
        for record, sample in zip(trajectory.records, by_id.get(trajectory.trajectory_id, [])):
            where = f"{path}, sample {trajectory.trajectory_id}"
            start = record.num_prompt_tokens
            if not trajectory.trainable and trajectory.reward is None:
                continue
            if sample.tokens != record.token_ids:
                raise DataError(
                    f"{where}: tokens differ from what was sampled. Only reward and loss_mask may be edited"
                )
            if sample.loss_mask is not None and sample.loss_mask != record.loss_mask[start:]:
                mask = [0] * start + list(sample.loss_mask)
                if len(mask) != len(record.token_ids) or any(m and not s for m, s in zip(mask, record.sampled)):
                    raise DataError(f"{where}: loss_mask may only clear tokens that were sampled, one entry per token")
                record.clear_mask([p for p, wanted in enumerate(mask) if not wanted])
                record.set_mask([p for p, wanted in enumerate(mask) if wanted])
            reward = sample.reward.get("score") if isinstance(sample.reward, dict) else sample.reward
            if reward != trajectory.reward:
                trajectory.reward = None if reward is None else float(reward)


def _groups(trajectories: Sequence[Trajectory]) -> list[TrajectoryGroup]:
    """The trajectories of a prompt together, in the order of the prompts."""
    groups: dict[str, TrajectoryGroup] = {}
    for t in trajectories:
        group = groups.setdefault(
            t.prompt_id, TrajectoryGroup(t.prompt_id, t.prompt_id, [], t.data_source, t.row_index, t.source)
        )
        group.trajectories.append(t)
    return list(groups.values())


@dataclass
class ReplaySource(RolloutSource):
    """Steps are trained on saved rollouts: nothing is drawn or sampled."""

    files: DebugData | None = None

    @classmethod
    def of(cls, parts: SourceParts) -> ReplaySource:
        files = DebugData(parts.config.trainer.debug_rollout_data, parts.decode, replays=True)
        return cls(parts.plan, parts.draws, parts.stream, parts.log, files=files)

    def begin(self, step: int) -> None:
        """Nothing to start: the files are there."""

    def collect(self, step: int) -> list[TrajectoryGroup]:
        assert self.files is not None
        return self.files.load(step)

    def mark_trained(self, trajectories: Sequence[Trajectory], batch: TensorDict, version: int) -> None:
        """Not noted: the tokens have another run's versions."""

    def notes(self) -> list[str]:
        path = "" if self.files is None else f" ({self.files.path})"
        return [f"[yellow]training on saved rollouts{path}: nothing is sampled or validated[/]"]


class DumpHook(StepHook):
    """Saves the rollouts of steps and validations (`trainer.debug_rollout_data`)."""

    def __init__(self, files: DebugData):
        self._files = files

    @classmethod
    def of(cls, parts: HookParts) -> DumpHook | None:
        path = parts.config.trainer.debug_rollout_data
        if path is None or parts.config.trainer.debug_mode == "train_only":
            return None
        return cls(DebugData(path, parts.decode))

    def after_rollout(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        self._files.save(step, groups)

    def after_validation(self, step: int, passes: Mapping[str, Sequence[TrajectoryGroup]]) -> None:
        for name, groups in passes.items():
            self._files.save(f"{name.replace('val', 'eval', 1)}_{step}", groups)


class RolloutOnlyTrainer(PPOTrainer):
    """Its steps sample and score; nothing is trained (`trainer.debug_mode=rollout_only`)."""

    def step(self) -> dict[str, float]:
        """One step: rollout, and its rows."""
        groups = self.rollout()
        self.end_rollout(groups, None, {g.prompt_id: "trainer.debug_mode=rollout_only" for g in groups})
        return self.measure(self.step_number, groups)

    def notes(self) -> list[str]:
        text = "[yellow]trainer.debug_mode=rollout_only: every step samples and scores, nothing is trained[/]"
        return [*super().notes(), text]
