"""A process group of the trainer (rank 0) and one server's ranks, for weights that cross machines."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mt.engines.sglang.client import Client
from verl_mt.errors import EngineError

_LEAVE_S = 10.0


class WeightGroup:
    """Broadcasts to one server; one per life of it.

    Args:
        client: the server.
        url: where it is, to find out under which address it sees this machine.
        backend: `gloo`, or `nccl` where both sides have GPUs.
        timeout_s: deadline of joining, and of each broadcast.
    """

    def __init__(self, client: Client, url: str, *, backend: str, timeout_s: float):
        self._client = client
        self._address = _own_address(url)
        self._num_ranks = client.num_ranks
        self._backend = backend
        self._timeout_s = timeout_s
        self._group: Any = None
        self.name: Any = f"verl_mt-{uuid.uuid4().hex}"

    @property
    def joined(self) -> bool:
        """Both sides are in it."""
        return self._group is not None

    async def leave(self) -> None:
        """The server forgets the group, if it is still there; so does this process."""
        with contextlib.suppress(EngineError):
            await self._client.call("destroy_weights_update_group", {"group_name": self.name}, _LEAVE_S)
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(dist.destroy_process_group, group)

    async def join(self) -> None:
        """Both sides at once: each waits for the other.

        Raises:
            EngineError: the server refused, for example because it cannot reach this machine.
        """
        # The port is taken here, and the others are told which one it is.
        store = dist.TCPStore(
            self._address, 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout_s)
        )
        body = {
            "master_address": self._address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 1 + self._num_ranks,
            "group_name": self.name,
            "backend": self._backend,
        }
        here = asyncio.create_task(asyncio.to_thread(self._join_here, store))
        here.add_done_callback(_forget)
        await self._client.call("init_weights_update_group", body, self._timeout_s)
        self._group = await here

    async def broadcast(self, buffer: Tensor, body: dict[str, Any]) -> None:
        """Send one bucket.

        Args:
            buffer: its bytes, tensor after tensor without gaps.
            body: of `update_weights_from_distributed`: what is in it.

        Raises:
            EngineError, EngineGoneError: as of any call.
        """
        sending = asyncio.create_task(asyncio.to_thread(self._broadcast_here, buffer))
        sending.add_done_callback(_forget)
        body = {**body, "group_name": self.name, "load_format": "flattened_bucket"}
        await self._client.call("update_weights_from_distributed", body, self._timeout_s)
        await sending

    def _join_here(self, store: dist.Store) -> Any:
        # torch makes groups only within a default group, which servers of others have no part in; what it has for this
        # is private. SGLang does the same on its side, with the same names in the store.
        group, _ = dist.distributed_c10d._new_process_group_helper(
            1 + self._num_ranks,
            0,
            [],
            dist.distributed_c10d.Backend(self._backend),
            dist.PrefixStore(self.name, store),
            group_name=self.name,
            timeout=timedelta(seconds=self._timeout_s),
        )
        dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(1 + self._num_ranks)}
        return group

    def _broadcast_here(self, buffer: Tensor) -> None:
        self._group.broadcast(buffer, 0).wait()
        if buffer.device.type == "cuda":
            torch.cuda.synchronize(buffer.device)


def _forget(task: asyncio.Task[Any]) -> None:
    """Where the server is gone, this side fails by itself, at the latest at its deadline; nobody waits for that."""
    if not task.cancelled():
        task.exception()


def _own_address(url: str) -> str:
    """The address that this machine has on the way to a server; nothing is sent."""
    parts = urlsplit(url)
    family = socket.getaddrinfo(parts.hostname, parts.port or 80)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])
