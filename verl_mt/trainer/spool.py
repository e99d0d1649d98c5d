"""Groups that are finished and wait for their step, as files: a run that was killed does not sample them again.

Of what is found only that is used whose weights the run still has when it goes on; the rest is sampled again. A
directory goes on under the configuration that it was begun with, so that its rewards are what they would be again.
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_mt.data.plain_objects import pack, unpack
from verl_mt.data.temporary_files import remove, temporary
from verl_mt.data.trajectory import Status, TrajectoryGroup
from verl_mt.errors import LOSSES, CheckpointError, error_text
from verl_mt.reading import read_bytes
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.trainer.checkpoint import version_of
from verl_mt.trainer.interrupts import Interrupted
from verl_mt.trainer.rollout_source import RolloutSource, SourceParts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    group: TrajectoryGroup
    asked: tuple[Any, ...]
    """What it is the answer to."""


class GroupSpool:
    """The folder `spool` of a run directory.

    Args:
        folder: made when the first group is kept.
        version: of the weights that the run goes on with: groups with tokens of later ones are of a life that is over.
            None = nothing that is there is used.
    """

    def __init__(self, folder: Path, version: int | None):
        self._folder = folder
        self._ready: dict[str, _Kept] = {}
        self._cannot = False
        earlier = [*folder.glob("*.pickle"), *folder.glob("*.pt")]
        for path in earlier:
            remove(path)
        if earlier:
            log.warning("%s: %d group(s) are files of an earlier version. They are sampled again", folder, len(earlier))
        for path in sorted(folder.glob("*.group")):
            kept = self._read(path)
            if kept is not None and version is not None and max(_versions(kept.group), default=0) <= version:
                self._ready[kept.group.prompt_id] = kept
            else:
                remove(path)

    def keep(self, plan: RolloutPlan, group: TrajectoryGroup) -> None:
        """Write one of a plan, unless something in it has failed: whoever goes on has repaired that, and samples it
        again. What cannot be written ends no run: it is sampled again after a kill."""
        if any(t.status not in (Status.COMPLETED, Status.TRUNCATED) for t in group.trajectories):
            return
        path = self._path(group.prompt_id)
        unfinished = temporary(path)
        try:
            asked = _asked(plan, plan.prompt_of[group.prompt_id])
            members = [copy.copy(trajectory) for trajectory in group.trajectories]
            for trajectory in members:  # its times are of this process's clock
                trajectory.time_spans = []
            content = pack({"group": replace(group, trajectories=members, sealed=None), "asked": asked})
            self._folder.mkdir(exist_ok=True)
            # Whole or not at all for a process that is killed. That it outlives the machine's power is not worth a
            # wait for the disk: what cannot be read is sampled again.
            unfinished.write_bytes(content)
            unfinished.replace(path)
        except Exception as error:  # the disk's, or of whatever code of the user's has put into a trajectory
            unfinished.unlink(missing_ok=True)
            if not self._cannot:
                log.warning("finished groups are not kept for a run that is killed: %s", error_text(error, named=True))
            self._cannot = True

    def take(self, plan: RolloutPlan) -> list[TrajectoryGroup]:
        """The groups of a plan that were finished before the run was killed, without their times."""
        found = []
        for place, prompt in plan.placed:
            kept = self._ready.pop(plan.prompt_id(place), None)
            if kept is not None and kept.asked == _asked(plan, prompt):
                found.append(kept.group)
        return found

    def drop(self, prompt_ids: Iterable[str]) -> None:
        """Groups that are trained or left out, or whose weights were abandoned."""
        for prompt_id in prompt_ids:
            self._ready.pop(prompt_id, None)
            self._path(prompt_id).unlink(missing_ok=True)

    def clear(self) -> None:
        """Nothing of it is wanted any more."""
        self._ready.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, prompt_id: str) -> Path:
        return self._folder / f"{prompt_id}.group"

    def _read(self, path: Path) -> _Kept | None:
        try:
            kept = _Kept(**unpack(read_bytes(path)))
            if not isinstance(kept.group, TrajectoryGroup):
                raise TypeError(f"it holds a {type(kept.group).__name__}")
            return kept
        except Exception as error:  # damaged, or of another version
            log.warning("%s is sampled again: %s", path, error_text(error, named=True))
            return None


@dataclass
class SpooledSource(RolloutSource):
    """Finished groups outlive a kill: the run that goes on trains them as they were sampled."""

    spool: GroupSpool | None = None
    """None = they are sampled again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stream.keep = None if self.spool is None else self._keep

    @classmethod
    def of(cls, parts: SourceParts) -> SpooledSource:
        version = 0 if parts.state is None else version_of(parts.state)
        other_data = parts.config.trainer.resume_mode == "other_data"
        spool = GroupSpool(parts.folder / "spool", None if other_data else version)
        return cls(parts.plan, parts.draws, parts.stream, parts.log, spool=spool)

    def give_up(self, but: Set[str] = frozenset()) -> None:
        """What is kept of it is forgotten, too."""
        super().give_up(but)
        if self.spool is not None:
            self.spool.drop(known.prompt_id for known in self.log.open if known.prompt_id not in but)

    def ended(self, step: int, left_out: Mapping[str, str | None]) -> None:
        super().ended(step, left_out)
        if self.spool is not None:
            self.spool.drop(left_out)

    def end(self, error: Exception | None = None) -> None:
        """What has finished is not used again: all is trained, or something has failed that will be repaired. After a
        loss, a full disk or an interrupt it is."""
        if self.spool is not None and not isinstance(error, (*LOSSES, CheckpointError, OSError, Interrupted)):
            self.spool.clear()

    def _keep(self, plan: RolloutPlan, group: TrajectoryGroup) -> None:
        """Those of a validation are none of a step's. Runs in a thread of the rollout's loop."""
        if self.spool is not None and not plan.evaluation:
            self.spool.keep(plan, group)

    def _start(self, plan: RolloutPlan) -> None:
        finished = [] if self.spool is None else self.spool.take(plan)
        self.stream.start(plan, finished)
        self.log.started(plan.name, but={group.prompt_id for group in finished})
        for group in finished:
            self.log.finished(group)
            for trajectory in group.trajectories:
                if trajectory.sanity is None:  # the share of mismatches is one of the whole step
                    self.stream.runner.context.sanity.observe(None, plan.name)


def _versions(group: TrajectoryGroup) -> Iterable[int]:
    return (int(max(r.policy_versions, default=0)) for t in group.trajectories for r in t.records)


def _asked(plan: RolloutPlan, prompt: Prompt) -> tuple[Any, ...]:
    """Row, tokens, number of samples: a sampler may have made another row by the time that a run goes on."""
    return prompt.row.source, prompt.row.index, tuple(prompt.ids), plan.n, plan.greedy_too
