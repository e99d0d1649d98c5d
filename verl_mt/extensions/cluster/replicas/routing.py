"""Which replica serves a conversation, and how the first turns of a group share the prefill of their prompt."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl_mt.extensions.cluster.replicas.clients import Client
from verl_mt.extensions.cluster.replicas.replica import Replica

_TOGETHER = 16
"""Conversations that begin alike stay together as long as no other replica has less to do by as many of them."""
_GATHER_S = 0.005
"""How long the first of a group waits for others with the same prompt."""


@dataclass(eq=False)
class _Prefill:
    """A prompt on its way into one replica's prefix cache."""

    num_waiting: int = 0
    cached: int | None = None
    """Tokens of it that were there before; told to one of those who waited, who thereby counts the prefill."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Router:
    """Sticks each conversation to a replica: at its first request to where its prompt is, else to the replica with the
    least outstanding tokens.

    Args:
        replicas: all of them, in their order.
    """

    def __init__(self, replicas: Sequence[Replica]):
        self._replicas = replicas
        self._sessions: dict[str, Replica | None] = {}
        self._begun: dict[bytes, Replica] = {}
        """Prompt -> where the last conversation with it began."""
        self._prefills: dict[tuple[Client, bytes], _Prefill] = {}
        self._first: dict[Client, _Prefill] = {}
        """What all prompts have in common, a system message and tools, comes with the first of them."""

    def open(self, session_id: str) -> None:
        """A conversation that will come."""
        self._sessions[session_id] = None

    def close(self, session_id: str) -> None:
        """It is over."""
        self._sessions.pop(session_id, None)

    def begins(self, session_id: str) -> bool:
        """Whether it is open and has not been sent anywhere."""
        return self._sessions.get(session_id, self) is None

    def choose(self, session_id: str, input_ids: Sequence[int], num_tokens: int) -> Replica:
        """The conversation's replica, which may be away.

        Args:
            session_id: of an open conversation; another one is not remembered.
            input_ids: of its request.
            num_tokens: that the request may take, in all.
        """
        chosen = self._sessions.get(session_id)
        if chosen is not None:
            return chosen
        least = self.least_busy()
        key = _digest(input_ids)
        near = self._begun.get(key)
        together = near is not None and near.is_ready and near.outstanding <= least.outstanding + _TOGETHER * num_tokens
        chosen = self._begun[key] = near if near is not None and together else least
        self.move(session_id, chosen)
        return chosen

    def least_busy(self) -> Replica:
        """With the fewest outstanding tokens, of those that serve if any does; of equal ones who sampled the least."""
        ready = [replica for replica in self._replicas if replica.is_ready] or self._replicas
        return min(ready, key=lambda replica: (replica.outstanding, replica.num_sampled))

    def move(self, session_id: str, to: Replica) -> None:
        """An open conversation goes on elsewhere."""
        if session_id in self._sessions:
            self._sessions[session_id] = to

    def forget_prompts(self) -> None:
        """The caches are gone, as after new weights."""
        self._begun.clear()
        self._prefills.clear()
        self._first.clear()

    async def prefilled(self, client: Client, input_ids: Sequence[int]) -> int | None:
        """Return when a conversation that begins with this prompt is to start: when the prompt is in the cache, or for
        a prompt that only one has, what it shares with the first one. Requests that come at the same time would each
        compute it.

        Returns:
            For one of those who waited the tokens that were cached before; None for the others.

        """
        key = (client, _digest(input_ids))
        prefill = self._prefills.get(key)
        if prefill is None:
            prefill = self._prefills[key] = _Prefill()
            task = asyncio.ensure_future(self._prefill(client, list(input_ids), prefill))
            task.add_done_callback(partial(self._prefill_over, key, prefill))
        prefill.num_waiting += 1
        await asyncio.shield(prefill.done)
        cached, prefill.cached = prefill.cached, None
        return cached

    async def _prefill(self, client: Client, input_ids: list[int], prefill: _Prefill) -> None:
        first = self._first.setdefault(client, prefill)
        if first is prefill:
            prefill.num_waiting += 1  # it is computed ahead of the others, also for a single conversation
        await asyncio.sleep(_GATHER_S)
        if first is not prefill:
            await asyncio.wait([first.done])
        if prefill.num_waiting > 1:
            sampling: dict[str, Any] = {"max_new_tokens": 0, "temperature": 0.0}
            body = {"rid": uuid.uuid4().hex, "input_ids": input_ids, "sampling_params": sampling}
            answer = await client.generate(body)
            prefill.cached = int(answer["meta_info"].get("cached_tokens") or 0)

    def _prefill_over(self, key: tuple[Client, bytes], prefill: _Prefill, task: asyncio.Task[None]) -> None:
        """It saves work, no more: where it failed, those who waited ask without it, and learn what is wrong there."""
        if task.cancelled() or task.exception() is not None:
            self._prefills.pop(key, None)
            if self._first.get(key[0]) is prefill:
                del self._first[key[0]]
        prefill.done.set_result(None)


def _digest(input_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", input_ids).tobytes(), digest_size=16).digest()
