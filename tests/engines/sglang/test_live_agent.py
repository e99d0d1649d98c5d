"""An agent written with the openai client, on a real SGLang: the records of the tool loop on the local engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from live import Lab

from verl_mt.chat.parsers import get_parser
from verl_mt.extensions.toolbox.agent.driver import AgentDriver
from verl_mt.rollout.runner import RolloutPlan

pytest.importorskip("openai")
pytestmark = pytest.mark.sglang

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "08_your_own_agent.py"


def test_an_agent_behind_a_url_leaves_the_records_of_the_tool_loop(colocated, lab: Lab, run):
    """Greedy, 40 conversations at once; a tie between two tokens may go either way in single ones."""
    prompts = lab.prompts[:40]
    sampling = replace(lab.local.context.sampling, temperature=0.0)

    async def groups_of(runner):
        return {g.prompt_id: g async for g in runner.run(RolloutPlan(prompts, 1, "greedy", sampling))}

    loop = replace(lab.local, interactions={})
    agent = replace(
        lab.local,
        context=replace(lab.local.context, engine=colocated, parser=None),
        driver=AgentDriver(f"{EXAMPLE}:run", get_parser("hermes")),
        interactions={},
        tools=None,
    )
    expected, found = run(groups_of(loop)), run(groups_of(agent))
    same = 0
    for name, group in expected.items():
        (looped,), (asked,) = group.trajectories, found[name].trajectories
        assert asked.status == "completed" or asked.stop_reason == looped.stop_reason, asked.error
        assert len(asked.records) == 1
        columns = ("token_ids", "sampled", "loss_mask")
        same += all(getattr(asked.records[0], c) == getattr(looped.records[0], c) for c in columns)
        versions = {v for v in asked.records[0].policy_versions if v >= 0}
        assert versions == {colocated.version} and asked.records[0].has_log_probs
    assert same >= len(prompts) - 2
    assert sum(t.num_turns for g in found.values() for t in g.trajectories) >= 70
