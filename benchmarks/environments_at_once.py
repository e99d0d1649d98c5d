"""Many environments at once: memory, lag of the rollout's loop, and what SIGTERM leaves open.

    python benchmarks/environments_at_once.py [--count 2000] [--tool-s 2] [--turns 3] [--kill-after S]

The real runner, session, parser and tool executor play `--count` conversations of `--turns` turns at the same time. The
engine is scripted: each turn calls a tool of the environment that takes `--tool-s` seconds in a plain method, so each
environment has a thread. A task that sleeps 10 ms measures how late the loop wakes it: the lag. `--kill-after` sends
SIGTERM to the process after S seconds. Each object must be closed exactly once then, too.

The last line: `2000 environments: N s, F finished, lag P ms at most and Q ms at the 99th percentile, M MiB, all closed
once`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

from provenance import add_out, write_rows

from verl_mt import Environment
from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.config.compose import compose
from verl_mt.config.rollout import EnvironmentConfig
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import SamplingParams
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.environments.kinds import build_environments
from verl_mt.plugins import objects_given
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.environment_driver import EnvironmentDriver
from verl_mt.rollout.prompts import PromptBuilder
from verl_mt.rollout.runner import RolloutPlan, RolloutRunner
from verl_mt.rollout.session import SessionContext
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.trainer.build_rollout import build_chat

MADE: Counter[int] = Counter()
CLOSED: Counter[int] = Counter()
"""By number of the object."""
_LOCK = threading.Lock()


class Slow(Environment):
    """A tool that takes its time."""

    def __init__(self, tool_s: float = 2.0):
        self.tool_s = tool_s
        with _LOCK:
            self.number = len(MADE)
            MADE[self.number] += 1

    def reset(self, seed: int, **row: Any) -> str:
        self.steps, self.kept = 0, bytes(1000)
        return f"Number {seed}: wait three times, and then say how often you have waited."

    def wait(self, times: int) -> str:
        """Wait.

        Args:
            times: how often
        """
        time.sleep(self.tool_s)
        self.steps += times
        return f"waited {self.steps}"

    def score(self) -> float:
        return float(self.steps)

    def close(self) -> None:
        with _LOCK:
            CLOSED[self.number] += 1


async def measure(lags: list[tuple[float, float]]) -> None:
    """Note how late the loop wakes a task that sleeps 10 ms: (when, seconds)."""
    while True:
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        lags.append((time.monotonic(), time.monotonic() - due))


def build(tool_s: float, turns: int) -> tuple[RolloutRunner, PromptBuilder]:
    """The parts of a rollout with this environment, and a model that calls its tool in each turn but the last."""
    chat = build_chat(compose([]))
    call = '<tool_call>\n{"name": "wait", "arguments": {"times": 1}}\n</tool_call>'
    said = {number: chat.encode_text(call if number < turns else "three", neutral=False) for number in range(turns + 1)}
    end = min(chat.stop_token_ids)

    def turn(request: Any) -> Any:
        ids = [*said[int(request.request_id.rpartition("/")[2])], end]
        return ids, None, "stop", [-0.5] * len(ids)

    with objects_given({"object:it": Slow}):
        tools = build_environments(EnvironmentConfig(path="object:it", config={"tool_s": tool_s}), None, 60.0)
    assert tools is not None
    context = SessionContext(
        chat=chat, engine=ScriptedEngine(turn), limits=Limits(response_length=4000, max_model_len=8000),
        parser=get_parser("hermes"), sampling=SamplingParams(max_new_tokens=1), sanity=SanityMonitor(SanityMode.STRICT),
    )  # fmt: skip
    runner = RolloutRunner(context=context, reward=load_reward("environment"), driver=EnvironmentDriver(tools, 3000))
    runner.tools = ToolExecutor(tools, ToolLimits(concurrency=10**6), chat.tokenizer.encode)
    return runner, PromptBuilder(chat, tools, 3000, True, "error")


async def play(count: int, tool_s: float, turns: int, kill_after: float | None) -> dict[str, Any]:
    """One rollout of `count` conversations."""
    runner, builder = build(tool_s, turns)
    prompts = [builder.build(DataRow([], "seeds", index=k, file="rows", raw={"seed": k})) for k in range(count)]
    lags: list[tuple[float, float]] = []
    rewards: list[float | None] = []

    async def run() -> None:
        async for group in runner.run(RolloutPlan([p for p in prompts if p], 1, "s")):
            rewards.extend(t.reward for t in group.trajectories)

    watching = asyncio.create_task(measure(lags))
    await asyncio.sleep(0.2)
    begun = time.monotonic()
    task = asyncio.create_task(run())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)  # as the trainer does
    if kill_after is not None:
        loop.call_later(kill_after, os.kill, os.getpid(), signal.SIGTERM)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    seconds = time.monotonic() - begun
    watching.cancel()
    return {
        "environments": count, "seconds": round(seconds, 2), "made": len(MADE), "finished": len(rewards),
        "right": sum(reward == turns - 1 for reward in rewards),
        "lag_ms": round(1000 * max(late for _, late in lags)),
        "lag_p99_ms": round(1000 * sorted(late for _, late in lags)[int(0.99 * len(lags))]),
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "closed_once": MADE == CLOSED,
    }  # fmt: skip


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--tool-s", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kill-after", type=float, metavar="S")
    add_out(parser)
    args = parser.parse_args()
    found = asyncio.run(play(args.count, args.tool_s, args.turns, args.kill_after))
    write_rows(args.out, [found])
    closed = "all closed once" if found["closed_once"] else f"{len(MADE) - len(CLOSED)} not closed"
    print(
        f"{args.count} environments: {found['seconds']:.1f} s, {found['finished']} finished, lag {found['lag_ms']} ms "
        f"at most and {found['lag_p99_ms']} ms at the 99th percentile, {found['MiB']} MiB, {closed}"
    )
    return int(not found["closed_once"])


if __name__ == "__main__":
    sys.exit(main())
