"""A tool, an interaction and their YAML in verl's shape run after `verl.` -> `verl_mt.`, nothing else changed."""

from __future__ import annotations

import asyncio

import pytest

from verl_mt.data.conversation import ToolCall
from verl_mt.interactions.session import InteractionSession, load_interactions, pick_interaction
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.registry import load_tools

TOOL = """
import logging
import os
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__name__)


class GuessTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._games = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(
        self, instance_id: Optional[str] = None, secret: Optional[int] = None, **kwargs
    ) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        if secret is None:
            secret = kwargs.get("create_kwargs", {}).get("secret", None)
        self._games[instance_id] = {"secret": secret, "tries": 0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        game = self._games[instance_id]
        game["tries"] += 1
        hit = parameters["number"] == game["secret"]
        return ToolResponse(text="hit" if hit else "miss"), 0.0 if hit else -self.config["penalty"], {"hit": hit}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 1.0 / self._games[instance_id]["tries"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._games[instance_id]
"""

TOOLS_YAML = """
tools:
  - class_name: "verl_user_tools.GuessTool"
    config:
      type: native
      penalty: 0.5
    tool_schema:
      type: "function"
      function:
        name: "guess"
        description: "Guess the number."
        parameters:
          type: "object"
          properties:
            number:
              type: "integer"
              description: "The guess"
          required: ["number"]
"""

INTERACTION = """
from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction


class PoliteInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._talks = {}

    async def start_interaction(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs
    ) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        self._talks[instance_id] = ground_truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        polite = self._talks[instance_id] in messages[-1]["content"]
        return polite, "Thank you." if polite else "Say please.", float(polite), {}

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._talks[instance_id]
"""

INTERACTION_YAML = """
interaction:
  - name: "polite"
    class_name: "verl_user_interactions.PoliteInteraction"
    config: {}
"""


@pytest.fixture
def ported(tmp_path, monkeypatch):
    """The four files, with the one replacement, importable."""
    files = {
        "verl_user_tools.py": TOOL,
        "tools.yaml": TOOLS_YAML,
        "verl_user_interactions.py": INTERACTION,
        "interaction.yaml": INTERACTION_YAML,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("verl.", "verl_mt."))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.cap("V2")
def test_a_verl_tool_and_its_yaml_run(ported):
    tools = load_tools(ported / "tools.yaml")

    async def main():
        session = ToolExecutor(tools, ToolLimits(), list).open("t", {"guess": {"create_kwargs": {"secret": 7}}})
        await session.start()
        results = [r for n in (3, 7) for r in await session.run([ToolCall("guess", {"number": n})], turn=n)]
        return results, await session.close()

    results, rewards = asyncio.run(main())
    assert [(r.text, r.metrics) for r in results] == [("miss", {"hit": False}), ("hit", {"hit": True})]
    assert rewards == {"guess": [-0.5, 0.0, 0.5]}
    assert tools["guess"]._games == {}  # type: ignore[attr-defined]


@pytest.mark.cap("V3")
def test_a_verl_interaction_and_its_yaml_run(ported):
    interactions = load_interactions(ported / "interaction.yaml")
    row = {"name": "polite", "query": "q", "ground_truth": "please"}
    interaction = pick_interaction(interactions, row)
    assert interaction is not None

    async def main():
        session = InteractionSession(interaction, "t", row)
        turns = []
        for text in ("give", "please give"):
            turns.append(await session.respond([{"role": "assistant", "content": text}]))
        return turns, await session.finish()

    turns, _ = asyncio.run(main())
    assert [(t.done, t.text, t.score) for t in turns] == [(False, "Say please.", 0.0), (True, "Thank you.", 1.0)]
    assert interaction._talks == {}  # type: ignore[attr-defined]
