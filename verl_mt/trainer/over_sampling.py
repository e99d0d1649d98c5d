"""More prompts in flight than a step trains (`data.over_sample`): a batch is what has finished first.

Conversations that are not over when a batch is full are left for the next steps. Without a bound the long ones would
be left again and again; here each prompt has a last step (`trainer.max_staleness` updates after it was started, or the
next one where nothing may be stale), which waits for it, and no more prompts are started than can be trained by then.
(APRIL, Zhou et al. 2025, arXiv:2509.18521, and slime's partial rollout have the idea without the bound.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_mt.data.trajectory import TrajectoryGroup


def over_sampling(num_prompts: int, factor: float, max_staleness: int) -> OverSampling | None:
    """What `data.over_sample` asks for; None where a step starts what it trains."""
    return OverSampling(num_prompts, factor, max_staleness) if factor > 1 else None


def drawn_at(name: str) -> int:
    """Finished steps before the plan of this name, or of this prompt id (`s000007...`), was started."""
    return int(name[1:7]) - 1


@dataclass(frozen=True)
class OverSampling:
    """Which prompts may be in flight, and which of those that are finished make a batch."""

    num_prompts: int
    """Of a batch."""
    factor: float
    """How many may be in flight, in batches."""
    max_staleness: int

    @property
    def patience(self) -> int:
        """Steps for which a prompt may be left to others."""
        return max(1, self.max_staleness)

    def room(self, in_flight: int, *, version: int, next_step: int, steps_left: int) -> int:
        """How many prompts to start now.

        Args:
            in_flight: prompts that were started and are in no batch yet.
            version: of the weights that they are begun under.
            next_step: finished steps before the batch that they can be in first.
            steps_left: batches to come, that one included.
        """
        in_time = version + self.patience - next_step + 1
        most = min(math.ceil(self.factor * self.num_prompts), in_time * self.num_prompts, steps_left * self.num_prompts)
        return max(0, most - in_flight)

    def choose(
        self, finished: Sequence[TrajectoryGroup], *, open_at: Mapping[str, int], step: int
    ) -> list[TrajectoryGroup] | None:
        """A batch of what has finished, the earliest first; None as long as there is none.

        A group is passed over if, with it, so many of a later last step would be in the batch that older ones could not
        all be trained in time.

        Args:
            finished: in the order in which they finished.
            open_at: prompt id of everything in flight, finished or not -> finished steps before it was started.
            step: finished steps before this batch.
        """
        size = self.num_prompts
        slack = {name: max(0, begun + self.patience - step) for name, begun in open_at.items()}
        within = [sum(left <= steps for left in slack.values()) for steps in range(self.patience)]
        # Of `within[j]` prompts that end within j further steps, j batches of later ones leave this many to this one.
        room = [size - max(0, count - j * size) for j, count in enumerate(within)]
        chosen: list[TrajectoryGroup] = []
        for group in finished:
            later_than = range(min(slack[group.prompt_id], self.patience))
            if all(room[j] > 0 for j in later_than):
                chosen.append(group)
                for j in later_than:
                    room[j] -= 1
            if len(chosen) == size:
                return chosen
        return None
