"""Which turn earned what, and greedy answers that are compared with but not trained."""

from __future__ import annotations

import math

from verl_mt.data.trajectory import TimeSpan, Trajectory, TrajectoryGroup
from verl_mt.rollout.credit import set_aside, turn_rewards


def made(name: str = "t", group: str = "g", **kwargs) -> Trajectory:
    return Trajectory(name, "p", group, name, **kwargs)


def test_a_tools_step_rewards_belong_to_the_turns_that_called_and_its_last_reward_to_none():
    one = made(
        tool_rewards={"a": [1.0, 2.0, 3.0, 100.0], "b": [5.0, 0.0]}, tool_reward_turns={"a": [1, 1, 3], "b": [2]}
    )
    assert turn_rewards(one, tool_weight=0.5, score_weight=1.0) == {1: 1.5, 2: 2.5, 3: 1.5}


def test_an_interactions_scores_belong_to_the_turns_that_it_judged():
    spans = [TimeSpan(phase, 0.0, 1.0, turn) for phase, turn in [("interaction", 2), ("decode", 1), ("interaction", 4)]]
    one = made(turn_scores=[0.25, 1.0], time_spans=spans, tool_rewards={"a": [1.0, 0.0]}, tool_reward_turns={"a": [2]})
    assert turn_rewards(one, tool_weight=1.0, score_weight=2.0) == {2: 1.5, 4: 2.0}
    assert turn_rewards(one, tool_weight=0.0, score_weight=0.0) == {}


def test_scores_that_no_interaction_gave_belong_to_the_whole():
    assert turn_rewards(made(turn_scores=[1.0, 2.0]), tool_weight=1.0, score_weight=1.0) == {}


def test_a_greedy_answer_is_compared_with_and_not_trained():
    samples, greedy = [made(f"s{i}", reward=0.0) for i in range(2)], made("greedy", reward=0.75)
    group = TrajectoryGroup("g", "p", [*samples, greedy])
    set_aside(group, [greedy])
    assert group.trajectories == samples and [t.greedy_reward for t in samples] == [0.75, 0.75]


def test_several_agents_are_compared_each_with_its_own_and_a_failed_one_with_nothing():
    kinds = ("solver", "critic")
    samples = [made(f"{kind}{i}", kind, reward=0.0) for kind in kinds for i in range(2)]
    greedy = [made("gs", "solver", reward=1.0), made("gs2", "solver", reward=0.0), made("gc", "critic")]
    group = TrajectoryGroup("g", "p", [*samples, *greedy])
    set_aside(group, greedy)
    assert [t.greedy_reward for t in samples[:2]] == [0.5, 0.5]
    assert all(t.greedy_reward is not None and math.isnan(t.greedy_reward) for t in samples[2:])
