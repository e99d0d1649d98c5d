"""How long, how often and how many at once tools may be called."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from verl_mt.config.rollout import MultiTurnConfig
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.results import Keep

_held: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("verl_mt_held_limits", default=frozenset())


class ConcurrencyLimit:
    """At most `limit` holders at once in one event loop.

    Re-entrant: code that runs inside a slot, tasks that it starts included, may ask for a slot again without waiting,
    so that a tool which calls itself cannot deadlock.

    Args:
        limit: at least 1.
    """

    def __init__(self, limit: int):
        if limit < 1:
            raise ValueError(f"a concurrency limit must be at least 1, got {limit}")
        self.limit = limit
        # A semaphore belongs to the loop where it is first waited on, so each loop gets its own.
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the slots: `async with limit.slot(): ...`."""
        held = _held.get()
        if id(self) in held:
            yield
            return
        async with self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.limit)):
            token = _held.set(held | {id(self)})
            try:
                yield
            finally:
                _held.reset(token)


@dataclass(frozen=True)
class ToolLimits:
    """Limits of tool calls; the same options as `actor_rollout_ref.rollout.multi_turn`."""

    timeout_s: float = 30.0
    """Deadline of one call, retries included, from the moment it holds a slot. Also of `calc_reward` and `release`."""
    retries: int = 0
    """How often a call that raised or timed out is tried again; every attempt gets its share of the deadline."""
    concurrency: int = 256
    """Calls of one tool that run at once in one event loop."""
    max_parallel_calls: int = 8
    """Calls of one assistant turn that are run."""
    max_calls: int | None = None
    """Calls of one trajectory that are run, those that fail included; None = no limit."""
    max_response_tokens: int = 512
    keep: Keep = "both"
    convert_arguments: bool = False
    """Arguments of another simple type than the schema's are converted, not refused."""

    @classmethod
    def from_config(cls, config: MultiTurnConfig) -> ToolLimits:
        """The limits of a run."""
        return cls(
            timeout_s=config.tool_timeout_s,
            retries=config.tool_retries,
            concurrency=config.tool_concurrency,
            max_parallel_calls=config.max_parallel_calls,
            max_calls=config.max_tool_calls,
            max_response_tokens=config.max_tool_response_tokens,
            keep=config.tool_response_keep,  # type: ignore[arg-type]
            convert_arguments=config.tool_argument_types == "convert",
        )

    def concurrency_of(self, tool: BaseTool) -> int:
        """Calls of this tool that run at once: its own limit, where that is lower."""
        return min(self.concurrency, tool.max_concurrency or self.concurrency)

    def timeout_of(self, tool: BaseTool) -> float:
        """Deadline of a call of this tool: its own, where that is shorter."""
        return min(self.timeout_s, tool.call_timeout_s or self.timeout_s)
