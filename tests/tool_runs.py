"""A runner whose model says fixed turns, with real tools: for tests of what tools do to a batch."""

from __future__ import annotations

import asyncio

from toys import toy_tokenizer

from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import Trajectory
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.rewards.base import Reward, load_reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.prompts import PromptBuilder
from verl_mt.rollout.runner import RolloutPlan, RolloutRunner
from verl_mt.rollout.session import SessionContext
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.toolset import ToolSet

CHAT = ChatTemplate(toy_tokenizer())


def one(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def make_runner(turns: list[str], tools: ToolSet, **limits) -> RolloutRunner:
    """Every conversation's model says `turns`."""

    def turn(request):
        said = turns[int(request.request_id.split("/")[-1]) - 1]
        ids = [*CHAT.encode_text(said, neutral=False), CHAT.tokenizer.eos_token_id]
        return ids, None, "stop", [-0.5] * len(ids)

    return RolloutRunner(
        context=SessionContext(
            chat=CHAT,
            engine=ScriptedEngine(turn),
            limits=Limits(response_length=4000, max_model_len=8000),
            parser=get_parser("hermes"),
            sampling=SamplingParams(max_new_tokens=1),
            sanity=SanityMonitor(SanityMode.STRICT),
        ),
        reward=load_reward(f"{__name__}.one", name=None, kwargs={}, timeout_s=5.0),
        tools=ToolExecutor(tools, ToolLimits(**limits), CHAT.tokenizer.encode),
    )


def roll_out(
    turns: list[str], tools: ToolSet, *, n: int = 1, extra_info=None, reward: Reward | None = None, raw=None, **limits
) -> list[Trajectory]:
    """`n` trajectories of one row with this `extra_info`."""
    runner = make_runner(turns, tools, **limits)
    runner.reward = reward or runner.reward
    row = DataRow([{"role": "user", "content": "q"}], "toy", extra_info=extra_info or {}, index=3, file="toy.jsonl")
    row.raw = raw or {}
    prompt = PromptBuilder(CHAT, tools, 6000, True, "error").build(row)
    assert prompt is not None

    async def run() -> list[Trajectory]:
        groups = [group async for group in runner.run(RolloutPlan([prompt], n, "s"))]
        return groups[0].trajectories

    return asyncio.run(run())
