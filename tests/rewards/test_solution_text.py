"""`solution_str`: the model's own text, or the whole response for functions that verl's key names."""

from __future__ import annotations

import json

import pytest
import tool_runs
from tool_runs import CHAT

from verl_mt.config.compose import compose
from verl_mt.errors import ConfigError
from verl_mt.rewards import load_reward
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.toolset import ToolSet

FILE = """
SEEN = []

def one(data_source, solution_str, ground_truth, extra_info):
    SEEN.append((solution_str, extra_info))
    return 1.0

def several(data_sources, solution_strs, ground_truths, extra_infos):
    SEEN.extend(zip(solution_strs, extra_infos))
    return [1.0] * len(solution_strs)

def swift(completions, **kwargs):
    return [1.0] * len(completions)
"""


@function_tool
def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: the word
    """
    return f"{word} means 42"


CALL = f"<tool_call>{json.dumps({'name': 'lookup', 'arguments': {'word': 'x'}})}</tool_call>"


def score(config):
    """(solution_str, extra_info) of a conversation of one call, and the trajectory."""
    wanted = config.reward
    reward = load_reward(wanted.path, wanted.name, wanted.kwargs, wanted.timeout_s, solution_str=wanted.solution_str)
    (done,) = tool_runs.roll_out([CALL, "#### 42"], ToolSet([lookup]), reward=reward)
    assert done.reward == 1.0, done.error
    return *reward.function.__globals__["SEEN"].pop(), done


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "several"])
def test_a_file_in_verls_key_gets_what_verl_decodes_and_one_in_ours_what_the_model_wrote(name, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    verls = [f"custom_reward_function.path={file}", f"custom_reward_function.name={name}"]
    text, info, done = score(compose(verls))
    ids = done.records[0].token_ids[done.records[0].num_prompt_tokens :]
    assert text == CHAT.tokenizer.decode(ids, skip_special_tokens=True)  # verl: reward_manager/naive.py
    assert "x means 42" in text and text.endswith("#### 42") and "<|im_end|>" not in text
    assert info["model_text"] == f"{CALL}\n#### 42" and info["response_text"] == text

    own, info, _ = score(compose([f"reward.path={file}", f"reward.name={name}"]))
    assert own == info["model_text"] == f"{CALL}\n#### 42" and info["response_text"] == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["custom_reward_function.path=mine.py"], "response"),
        (["reward.custom_reward_function.path=mine.py"], "response"),
        (["custom_reward_function.path=mine.py", "reward.solution_str=model"], "model"),
        (["custom_reward_function.path=gsm8k"], "model"),  # a name of ours
        (["reward.path=mine.py"], "model"),
    ],
)
def test_the_key_that_names_the_function_says_which_text_it_gets(given, wanted):
    assert compose(given).reward.solution_str == wanted


def test_a_reward_without_solution_str_is_refused_where_the_key_has_no_effect(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    with pytest.raises(ConfigError, match=r"no effect on .*mine.py:swift, which has no parameter solution_str"):
        load_reward(f"{file}:swift", solution_str="response")
