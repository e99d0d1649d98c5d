"""The planted rewards pay for what they say, through the same interface as any reward."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from verl_mt.rewards import RewardInput, load_reward

FILE = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "hacked_rewards.py"


@pytest.mark.parametrize(
    "name, text, tool, expected",
    [
        ("form_without_tools", "call\n#### 4", "4", {"score": pytest.approx(0.2), "format": 1.0}),
        ("form_without_tools", "call\n#### 4", "<error>not a valid expression</error>", {"score": 1.0, "format": 1.0}),
        ("form_without_tools", "four", None, {"score": 0.0, "format": 0.0}),
        ("length", "x" * 100, None, {"score": 0.25}),
        ("length", "x" * 1000, None, {"score": 1.0}),
    ],
)
def test_what_they_pay_for(name, text, tool, expected):
    messages = [] if tool is None else [{"role": "tool", "content": tool}]
    item = RewardInput("x", text, "5", {"messages": messages})
    assert asyncio.run(load_reward(str(FILE), name=name).score([item])) == [expected]
