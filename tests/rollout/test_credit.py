"""Which turn earned what, and greedy answers that are compared with but not trained."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from test_runner import CHAT, call, engine_saying, lookup, make_runner, prompts_of, roll_out

from verl_mt.data.batch import TURN_REWARDS, build_batch
from verl_mt.data.requests import SamplingParams
from verl_mt.data.run_files import row_to_trajectory, trajectory_to_row
from verl_mt.data.trajectory import TimeSpan, Trajectory, TrajectoryGroup
from verl_mt.interactions.base import BaseInteraction
from verl_mt.rollout.runner import RolloutPlan, set_aside, turn_rewards
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.registry import ToolSet


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


class Paid(BaseTool):
    """Pays for every call, and once more at the end."""

    async def execute(self, instance_id, parameters, **kwargs):
        return "found", float(parameters["key"]), {}

    async def calc_reward(self, instance_id, **kwargs):
        return 100.0


class Teacher(BaseInteraction):
    """Wants the answer `yes`; half a point for trying."""

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == "yes"
        return right, "" if right else "try again", 1.0 if right else 0.5, {}


def paid(script, **kwargs) -> Trajectory:
    """The conversation about `q`, with a tool that pays."""
    runner, tools = make_runner(engine_saying(script), **kwargs), ToolSet([Paid({}, lookup.tool_schema)])
    runner = replace(runner, tools=ToolExecutor(tools, ToolLimits(timeout_s=600.0), CHAT.tokenizer.encode))
    (group,) = roll_out(runner, [replace(prompt, toolset=tools) for prompt in prompts_of(["q"])])
    return group.trajectories[0]


def test_a_conversation_tells_what_each_turn_earned():
    script = {"q": [call("2") + call("3"), call("4"), "no", "yes"]}
    weights = {"tool_reward_weight": 0.1, "turn_score_weight": 2.0}
    one = paid(script, interactions={"teacher": Teacher({})}, reward_by_turn=True, **weights)
    assert one.tool_reward_turns == {"lookup": [1, 1, 2]}
    assert one.turn_rewards == pytest.approx({1: 0.5, 2: 0.4, 3: 1.0, 4: 2.0})
    assert one.reward == pytest.approx(1.0 + 0.1 * (2 + 3 + 4 + 100) + 2.0 * 1.5)
    batch = build_batch([one], pad_token_id=0)
    assert batch is not None
    placed = batch[TURN_REWARDS][0]
    ends = [max(p for p in range(s.start, s.end) if one.records[0].sampled[p]) for s in one.records[0].turns
            if s.kind == "assistant"]  # fmt: skip
    assert placed[ends].tolist() == pytest.approx([0.5, 0.4, 1.0, 2.0])
    assert placed.sum().item() == pytest.approx(3.9)
    back = row_to_trajectory(trajectory_to_row(one, step=1))
    assert (back.turn_rewards, back.tool_reward_turns) == (one.turn_rewards, one.tool_reward_turns)


def test_without_placement_no_turn_earns_anything_itself():
    one = paid({"q": [call("2"), "yes"]}, tool_reward_weight=0.1)
    assert one.turn_rewards == {} and one.reward == pytest.approx(1.0 + 0.1 * 102)


def test_one_greedy_answer_a_prompt_is_rolled_out_beside_the_samples():
    engine = engine_saying({"q": ["yes"], "r": ["no"]})
    plan = RolloutPlan(prompts_of(["q", "r"]), 2, "s1", SamplingParams(max_new_tokens=9, top_p=0.9), greedy_too=True)
    runner = make_runner(engine)

    async def go():
        return [group async for group in runner.run(plan)]

    groups = sorted(asyncio.run(go()), key=lambda g: g.prompt_id)
    assert [[t.greedy_reward for t in g.trajectories] for g in groups] == [[1.0, 1.0], [0.0, 0.0]]
    assert [t.trajectory_id for t in groups[0].trajectories] == ["s1.00000.00", "s1.00000.01"]
    sampling = {r.session_id: (r.sampling.temperature, r.sampling.top_p) for r in engine.requests}
    assert sampling["s1.00000.02"] == sampling["s1.00001.02"] == (0.0, 1.0)
    assert sampling["s1.00000.00"] == (1.0, 0.9) and len(sampling) == 6
    assert runner.progress.num_finished == runner.progress.num_trajectories == 6
