"""Tests of `my_project`: python -m pytest"""

import asyncio
from types import SimpleNamespace

import openai
from agent import calculate, solve
from reward import compute_score
from rows import rows

import verl_mt


def test_the_tool_computes_and_says_what_it_wants():
    assert calculate('{"expression": "12 + 5"}') == "17"
    assert "such as 3+4" in calculate('{"expression": "twelve"}') == calculate("not JSON") == calculate("[]")


class Policy:
    """Stands for the `openai` client: it answers with these messages, one after the other."""

    def __init__(self, *answers):
        self.answers = [openai.types.chat.ChatCompletionMessage(role="assistant", **answer) for answer in answers]
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **request):
        return SimpleNamespace(choices=[SimpleNamespace(message=self.answers.pop(0))])


def test_the_agent_runs_the_calls_of_the_model():
    function = {"name": "calculator", "arguments": '{"expression": "12+5"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [{"role": "user", "content": "12 + 5?"}]
    assert asyncio.run(solve(Policy({"tool_calls": [call]}, {"content": "#### 17"}), messages)) == "#### 17"
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["17"]


def test_the_reward_reads_the_answer_of_the_agent():
    infos = {"rollout_infos": {"agent": {"answer": "#### 17"}}}
    assert compute_score("my_project", "", 17, infos) == 1.0
    assert compute_score("my_project", "", 1, infos) == compute_score("my_project", "", 17, {"rollout_infos": {}}) == 0


def test_no_question_of_the_validation_is_trained():
    train, val = rows(-1, 0, "train"), rows(-1, 0, "val")
    assert len(train) > len(val) > 64
    assert not {row["prompt"][1]["content"] for row in train} & {row["prompt"][1]["content"] for row in val}


def test_the_doctor_finds_nothing():
    found = verl_mt.examine(config_name="config.yaml")
    assert found.ok and not found.warnings, found
