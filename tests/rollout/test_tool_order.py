"""The tool loop answers what the model wrote in the order in which it wrote it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rollout_support import FixedChat, fixed_session

from verl_mt.chat.parsers import get_parser
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.rollout.context import Limits
from verl_mt.rollout.tool_loop import run_tool_loop
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.toolset import ToolSet


@function_tool
def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what to say.
    """
    return text


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def say(text: str) -> str:
    return call(f'{{"name": "echo", "arguments": {{"text": "{text}"}}}}')


class _Written(FixedChat):
    texts: list[str]

    def turn_text(self, ids):
        return self.texts.pop(0)


def answers(written: str, **limits) -> list[dict]:
    """The tool messages that answer one assistant turn."""
    engine = ScriptedEngine([([10], "a", "stop", [-0.1]), ([11], "b", "stop", [-0.1])])
    session = fixed_session(engine, limits=Limits(response_length=100, max_model_len=200))
    chat = _Written([[50]])
    chat.texts = [written, "done"]
    session.context = replace(session.context, chat=chat, parser=get_parser("hermes"))  # type: ignore[arg-type]
    tools = ToolExecutor(ToolSet([echo]), ToolLimits(**limits), list).open("t")
    asyncio.run(run_tool_loop(session, tools, None))
    return [m for m in session.messages if m["role"] == "tool"]


@pytest.mark.cap("C53")
def test_the_answer_to_a_broken_call_stands_where_the_call_stood():
    first, second, third = answers("\n".join([call("{bad}"), say("one"), say("two")]))
    assert first["content"].startswith("<error>The tool call was not run") and first["tool_call_id"] == ""
    assert (second["content"], second["tool_call_id"]) == ("one", "call_1_1")
    assert (third["content"], third["tool_call_id"]) == ("two", "call_1_2")


def test_the_limit_of_calls_per_turn_counts_in_the_order_written():
    first, second, third = answers("\n".join([call("{bad}"), say("one"), say("two")]), max_parallel_calls=2)
    assert "was not run" in first["content"]
    assert second["content"] == "one"
    assert "too many calls" in third["content"]
