"""`Gsm8kTool`: scores submissions, with a small penalty for one that is no better than the last."""

from __future__ import annotations

import asyncio

import pytest

from verl_mt.config_paths import configs_root
from verl_mt.data.conversation import ToolCall
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.registry import load_tools

ROW = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}


def submit(answers: list[str], row: dict | None = ROW):
    tools = load_tools(configs_root() / "tools_configs" / "gsm8k_tool.yaml")

    async def main():
        session = ToolExecutor(tools, ToolLimits(), list).open("t", row)
        results = []
        try:
            await session.start()
            for turn, answer in enumerate(answers):
                results += await session.run([ToolCall("calc_gsm8k_reward", {"answer": answer})], turn=turn)
        finally:
            rewards = await session.close()
        return results, rewards

    results, rewards = asyncio.run(main())
    assert tools["calc_gsm8k_reward"]._instance_dict == {}  # type: ignore[attr-defined]
    return results, rewards


@pytest.mark.cap("V10")
def test_submissions_are_scored_and_not_improving_costs_a_little():
    results, rewards = submit(["71", "72", "#### 72"])
    assert [r.text for r in results] == [
        "The answer '71' scores 0.0.",
        "The answer '72' scores 1.0.",
        "The answer '#### 72' scores 1.0.",
    ]
    assert rewards == {"calc_gsm8k_reward": [-0.05, 0.0, -0.05, 1.0]}


def test_nothing_submitted_scores_zero():
    assert submit([]) == ([], {"calc_gsm8k_reward": [0.0]})


def test_a_row_without_ground_truth_is_told_what_to_set():
    results, _ = submit(["72"], row=None)
    assert results[0].failure == "tool" and "create_kwargs.ground_truth" in results[0].text
