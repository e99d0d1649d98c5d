"""What docs/rewards.md says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from verl_mt.config.compose import compose
from verl_mt.rewards import RewardInput, load_reward

pytestmark = pytest.mark.slow  # many configurations
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()


def test_the_pages_reward_compares_the_answers_of_a_group(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    reward = load_reward(str(tmp_path / "mine.py"))
    items = [RewardInput("x", text, "42") for text in ("long way to 42", "so 42", "41")]
    assert [r["score"] for r in asyncio.run(reward.score(items))] == [1.0, 1.5, 0.0]


def test_the_pages_commands_compose_and_what_they_name_is_made(monkeypatch, tmp_path):
    commands = re.findall(r"verl_mt.trainer (reward.*?)```", PAGE, re.DOTALL)
    several, judged = ([w.strip("'") for w in re.findall(r"'[^']+'|\S+", c.replace("\\\n", " "))] for c in commands)
    config = compose(several).reward
    made = load_reward(config.path, kwargs=config.kwargs)
    text = "<think>a</think><answer>7</answer>"
    told = RewardInput("x", text, "7", completion=text)
    (scored,) = asyncio.run(made.score([told]))
    assert scored["format_reward"] == 1 and scored["score"] == pytest.approx(scored["accuracy"] + 0.1)
    monkeypatch.setenv("JUDGE_KEY", "k")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubric.md").write_text("right and short")
    config = compose(judged).reward
    judge = load_reward(config.path, kwargs=config.kwargs, timeout_s=config.timeout_s)
    assert judge.timeout_s == 120 and "right and short" in judge.prompt_of(RewardInput("x", "a", "b"))


def test_the_page_names_the_keys_that_there_are():
    for key in re.findall(r"`reward\.(\w+)`", PAGE):
        assert hasattr(compose([]).reward, key), key
