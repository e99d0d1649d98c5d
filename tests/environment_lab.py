"""Plays environments with a model that says fixed turns, through the real session, parser, executor and runner."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from toys import toy_tokenizer

from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.rollout import EnvironmentConfig
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import Trajectory
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.environments.kinds import EnvironmentTools, build_environments
from verl_mt.plugins import objects_given
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.environment_driver import EnvironmentDriver
from verl_mt.rollout.prompts import PromptBuilder
from verl_mt.rollout.runner import RolloutPlan, RolloutRunner
from verl_mt.rollout.session import SessionContext
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.toolset import ToolSet

CHAT = ChatTemplate(toy_tokenizer())


def call(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def environments_of(
    kind: Any, tools: ToolSet | None = None, config: dict[str, Any] | None = None, deadline_s: float = 60.0
) -> EnvironmentTools:
    """`rollout.environment` with this class, or mapping name -> class."""
    named = kind if isinstance(kind, dict) else {}
    objects = {f"object:{name}": found for name, found in (named or {"it": kind}).items()}
    with objects_given(objects):
        if named:
            keys = EnvironmentConfig(named={name: f"object:{name}" for name in named})
        else:
            keys = EnvironmentConfig(path="object:it", config=config or {})
        found = build_environments(keys, tools, deadline_s)
    assert found is not None
    return found


def make_runner(
    environments: EnvironmentTools,
    turns: list[str] | dict[str, list[str]],
    *,
    reward: str = "environment",
    engine: ScriptedEngine | None = None,
    limits: Limits | None = None,
    **tool_limits: Any,
) -> RolloutRunner:
    """Every conversation's model says `turns`; with a mapping, those of the sample (`00`, `01`, ...)."""

    def turn(request):
        trajectory, _, number = request.request_id.split("/")
        said = turns[trajectory[-2:]] if isinstance(turns, dict) else turns
        ids = [*CHAT.encode_text(said[int(number) - 1], neutral=False), CHAT.tokenizer.eos_token_id]
        return ids, None, "stop", [-0.5] * len(ids)

    runner = RolloutRunner(
        context=SessionContext(
            chat=CHAT,
            engine=engine or ScriptedEngine(turn),
            limits=limits or Limits(response_length=4000, max_model_len=8000),
            parser=get_parser("hermes") if environments.any_tools else None,
            sampling=SamplingParams(max_new_tokens=1),
            sanity=SanityMonitor(SanityMode.STRICT),
        ),
        reward=load_reward(reward),
        driver=EnvironmentDriver(environments, 3000),
        max_concurrent=environments.limit,
    )
    if environments.any_tools:
        runner.tools = ToolExecutor(environments, ToolLimits(**tool_limits), CHAT.tokenizer.encode)
    return runner


def play(
    kind: Any,
    turns: list[str] | dict[str, list[str]],
    row: dict[str, Any] | None = None,
    *,
    prompt: list[dict[str, Any]] | None = None,
    n: int = 1,
    tools: ToolSet | None = None,
    config: dict[str, Any] | None = None,
    deadline_s: float = 60.0,
    **changed: Any,
) -> list[Trajectory]:
    """The `n` trajectories of one row."""
    environments = environments_of(kind, tools, config, deadline_s)
    runner = make_runner(environments, turns, **changed)
    data = DataRow(prompt or [], "toy", extra_info={}, index=3, file="toy.jsonl", raw=row or {})
    built = PromptBuilder(CHAT, environments, 3000, True, "error").build(data)
    assert built is not None

    async def run() -> list[Trajectory]:
        groups = [group async for group in runner.run(RolloutPlan([built], n, "s"))]
        return groups[0].trajectories

    return asyncio.run(run())


def words_of(trajectory: Trajectory) -> list[tuple[str, str]]:
    """(role, content) of the messages."""
    return [(message["role"], message["content"]) for message in trajectory.messages]


def with_sanity_off(runner: RolloutRunner) -> RolloutRunner:
    """The same, without the check: for many conversations."""
    runner.context = replace(runner.context, sanity=SanityMonitor(SanityMode.OFF))
    return runner
