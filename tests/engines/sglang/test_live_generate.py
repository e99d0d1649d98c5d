"""Generate functions on a real SGLang: the tool loop's records; what the engine was asked is what a Sample holds."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from live import Lab

from verl_mt.data.trajectory import Status
from verl_mt.extensions.compat.generate.args import GenerateArgs, Runtime
from verl_mt.extensions.compat.rollout.custom_generate import CustomGenerateDriver
from verl_mt.rollout.runner import RolloutPlan, RolloutRunner

pytestmark = pytest.mark.sglang
REPO = Path(__file__).resolve().parents[3]


class Listening:
    """The engine, and the input ids of every request by its session."""

    def __init__(self, engine):
        self.engine, self.asked = engine, defaultdict(list)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def generate(self, request):
        self.asked[request.session_id].append(list(request.input_ids))
        return await self.engine.generate(request)


def driven_by(lab: Lab, engine, function: str, **data) -> RolloutRunner:
    config = copy.deepcopy(lab.config)
    config.actor_rollout_ref.rollout.custom_generate_function_path = str(REPO / function)
    for name, value in data.items():
        setattr(config.data, name, value)
    assert lab.local.tools is not None
    args = GenerateArgs(config, Runtime(lab.chat, lab.local.reward, None, lab.local.tools.tools.schemas()))
    context = replace(lab.local.context, engine=engine)
    return replace(lab.local, context=context, driver=CustomGenerateDriver(config, args), interactions={})


async def groups_of(runner, prompts, sampling, name):
    return {g.prompt_id: g async for g in runner.run(RolloutPlan(prompts, 1, name, sampling))}


@pytest.mark.cap("C42", "C43", "C59", "C61")
def test_a_generate_function_leaves_the_records_of_the_tool_loop(colocated, lab: Lab, run):
    """Greedy, 40 conversations at once; a tie between two tokens may go either way in single ones."""
    prompts, sampling = lab.prompts[:40], replace(lab.local.context.sampling, temperature=0.0)
    engine = Listening(colocated)
    function = driven_by(lab, engine, "tests/trainer/generate_agents.py:calculator_agent")
    loop = replace(lab.local, interactions={}, context=replace(lab.local.context, engine=colocated))
    expected = run(groups_of(loop, prompts, sampling, "greedy"))
    found = run(groups_of(function, prompts, sampling, "greedy"))
    same = turns = 0
    for name, group in expected.items():
        (looped,), (driven,) = group.trajectories, found[name].trajectories
        assert driven.error is None, driven.error
        sample, [record] = driven.sample, driven.records
        last = engine.asked[driven.trajectory_id][-1]
        sampled = len(sample.tokens) - len(last)
        assert sample.tokens[: len(last)] == last and sum(record.sampled[-sampled:]) == sampled
        columns = ("token_ids", "sampled", "loss_mask", "policy_versions")
        same += all(getattr(record, c) == getattr(looped.records[0], c) for c in columns)
        turns += driven.num_turns
    assert same >= len(prompts) - 2 and turns >= 60


@pytest.mark.cap("C72", "C73", "C74")
def test_several_agents_ask_a_real_engine_side_by_side(colocated, lab: Lab, run):
    engine = Listening(colocated)
    runner = driven_by(lab, engine, "examples/05_multi_agent.py:generate", apply_chat_template=False)
    runner.context = replace(runner.context, limits=replace(runner.context.limits, max_model_len=1024))
    groups = run(groups_of(runner, lab.prompts[:8], lab.local.context.sampling, "team"))
    trajectories = [t for g in groups.values() for t in g.trajectories]
    assert {t.status for t in trajectories} <= {Status.COMPLETED, Status.TRUNCATED}
    assert len(trajectories) >= 8 * 2 and {t.group_id.split("/")[1] for t in trajectories} >= {"solver", "rewriter"}
    for t in trajectories:
        asked = engine.asked[t.trajectory_id]
        assert t.records[0].token_ids[: len(asked[-1])] == asked[-1] and len(asked) == t.num_turns
