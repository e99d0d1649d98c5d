"""Which turn earned what; and what a prompt's greedy answer earned, to compare its samples with."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean

from verl_mt.data.trajectory import Trajectory, TrajectoryGroup


def turn_rewards(trajectory: Trajectory, *, tool_weight: float, score_weight: float) -> dict[int, float]:
    """Assistant turn -> the weighted rewards that it earned: a tool's step rewards for the turn that made the calls, an
    interaction's score for the turn that it judged.

    What belongs to no turn is not in it: the reward function's score, and a tool's `calc_reward` of the whole.
    """
    earned: dict[int, float] = defaultdict(float)
    for name, turns in trajectory.tool_reward_turns.items():
        for turn, reward in zip(turns, trajectory.tool_rewards.get(name, [])):
            earned[turn] += tool_weight * reward
    judged = [span.turn for span in trajectory.time_spans if span.phase == "interaction"]
    if len(judged) == len(trajectory.turn_scores):
        for turn, score in zip(judged, trajectory.turn_scores):
            earned[turn] += score_weight * score
    return {turn: reward for turn, reward in sorted(earned.items()) if reward}


def set_aside(group: TrajectoryGroup, greedy: list[Trajectory]) -> None:
    """Take the greedy answer (several trajectories, where an episode has several agents) out of a scored group; each
    agent's others get its reward to be compared with, NaN where it was not scored."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in greedy:
        if trajectory.reward is not None:
            rewards[trajectory.group_id].append(trajectory.reward)
    taken = {id(t) for t in greedy}
    group.trajectories = [t for t in group.trajectories if id(t) not in taken]
    for trajectory in group.trajectories:
        found = rewards.get(trajectory.group_id)
        trajectory.greedy_reward = fmean(found) if found else math.nan
