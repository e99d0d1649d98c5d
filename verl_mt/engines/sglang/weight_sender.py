"""How one engine gets new weights, whatever it is doing: through shared memory, files, or a process group."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mt.engines.base import Disk, FromRanks, TensorBuckets, WeightUpdate
from verl_mt.engines.sglang.buckets import Bucket, Buckets, describe, payload
from verl_mt.engines.sglang.clients import Client, HostedClient
from verl_mt.engines.sglang.options import SGLangOptions
from verl_mt.engines.sglang.weight_group import join_as_first, open_store
from verl_mt.errors import ConfigError, EngineError, EngineGoneError, VerlMTError
from verl_mt.modeling.weights import ModelShape

_LEAVE_S = 10.0
_GIVER = "verl_mt.engines.sglang.giver.WeightGiver"
_BROADCASTER = "verl_mt.engines.sglang.giver.WeightBroadcaster"


class WeightSender:
    """Sends updates to one engine after the other of the same replica.

    Args:
        options: dtype, deadline, transport.
        is_paused: whether somebody wants the engine to stay paused.
    """

    def __init__(self, options: SGLangOptions, is_paused: Callable[[], bool]):
        self.current: WeightUpdate | None = None
        """What a new life gets; None = the model's files."""
        self.shape: ModelShape | None = None
        """What an update is compared with; known when the engine starts."""
        self._options = options
        self._is_paused = is_paused
        self._client: Client | None = None
        self._buckets: Buckets | None = None
        self._group: WeightGroup | None = None
        self._begun = False

    async def refresh(self, client: Client) -> WeightUpdate | None:
        """The current weights, for an engine that has just been started.

        Raises:
            ConfigError: a server of someone else has other weights and cannot load the model's.
        """
        update = self.current
        if update is not None:
            await self.send(client, update)
        elif not client.pristine:
            try:
                await self.send(client, Disk(0, self._options.model_path))
            except EngineError as error:
                raise ConfigError(
                    f"{client.name} serves weights that were changed since it was started, and cannot load those of "
                    f"{self._options.model_path} ({error}); start it anew"
                ) from error
        return update

    async def send(self, client: Client, update: WeightUpdate, buckets: AsyncIterator[Bucket] | None = None) -> None:
        """Turns that are being sampled are set back to where they have no cache, and go on with the new weights.

        Args:
            client: the engine.
            update: what it gets.
            buckets: the update as `pack` gives it, where other engines get it at the same time.

        Raises:
            EngineError: the update does not fit the model, or SGLang refused it. If a part of it has arrived by then,
                the engine is given up, so that it is started anew with weights that are known.
            EngineGoneError: the engine went away.
        """
        self._begun = False
        try:
            if isinstance(update, Disk):
                body = {"model_path": update.path, "weight_version": str(update.version)}
                await self._pause(client)
                await self._call(client, "update_weights_from_disk", body)
            elif isinstance(update, FromRanks):
                (problem,) = await give_from_ranks([(self, client)], update)
                if problem is not None:
                    raise problem
                return
            elif isinstance(update, TensorBuckets):
                await self._send_tensors(client, update.version, buckets or _alone(self.pack(client, update)))
            else:
                raise EngineError(
                    f"an SGLang engine takes FromRanks, TensorBuckets and Disk, got {type(update).__name__}"
                )
        except BaseException as error:
            if self._begun and not isinstance(error, EngineGoneError):
                client.give_up(f"a weight update broke off: {error!r}")
            raise
        await self._go_on(client)

    async def begin(self, client: Client) -> EngineError | None:
        """Halt the engine for an update whose weights come from elsewhere. Returns why it cannot."""
        try:
            await self._pause(client)
            await self._call(client, "begin_weight_update", {})
        except EngineError as error:
            return error
        return None

    async def end(self, client: Client, problem: VerlMTError | None) -> VerlMTError | None:
        """They have come, or a problem has; the engine serves with them, or is given up."""
        if problem is None:
            try:
                await self._call(client, "end_weight_update", {})
                await self._go_on(client)
            except EngineError as error:
                problem = error
        if problem is not None:
            client.give_up(f"a weight update broke off: {problem}")
        return problem

    def giving(self, client: Client) -> tuple[Any, ...]:
        """Arguments of what gives weights to this engine, and to all like it."""
        assert self.shape is not None
        return self.shape.weights, self._options.dtype, client.num_ranks, self._options.timeout_s

    async def _go_on(self, client: Client) -> None:
        if not self._is_paused():
            await self._call(client, "continue_generation", {})

    def pack(self, client: Client, update: TensorBuckets) -> Iterator[Bucket]:
        """The update as this engine takes it, and every other one of the same `kind`."""
        return self._packer(client).pack(update.tensors, update.bucket_bytes)

    def kind(self, client: Client) -> tuple[bool, bool]:
        """Engines of the same kind take the same buckets."""
        return self.broadcasts_to(client), client.on_gpu

    async def _send_tensors(self, client: Client, version: int, buckets: AsyncIterator[Bucket]) -> None:
        self._packer(client)
        async for bucket in buckets:
            if not self._begun:
                await self._pause(client)
                if self._group is not None and not self._group.joined:
                    await self._group.join()
                await self._call(client, "begin_weight_update", {})
            body: dict[str, Any] = {"flush_cache": bucket.is_last}
            if bucket.is_last:
                body["weight_version"] = str(version)
            if self._group is not None:
                await self._group.broadcast(bucket.buffer, body | describe(bucket.entries))
            else:
                # Each is opened once: a handle that several ranks share would be gone with the first of them.
                payloads = [payload(bucket.buffer, bucket.entries) for _ in range(client.num_ranks)]
                body |= {"serialized_named_tensors": payloads, "load_format": "flattened_bucket"}
                await self._call(client, "update_weights_from_tensor", body)
        await self._call(client, "end_weight_update", {})

    def _packer(self, client: Client) -> Buckets:
        """Made anew for each life of the engine, with a process group where its memory is out of reach."""
        if self._client is client and self._buckets is not None:
            return self._buckets
        assert self.shape is not None
        self._client, self._group = client, None
        dense, device = self.broadcasts_to(client), None
        if dense:
            nccl = client.on_gpu and torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
            self._group = WeightGroup(
                client,
                client.url,
                backend="nccl" if nccl else "gloo",
                timeout_s=self._options.timeout_s,
            )
        dtype = getattr(torch, self._options.dtype)
        self._buckets = Buckets(self.shape.weights, dtype, dense=dense, device=device)
        return self._buckets

    def broadcasts_to(self, client: Client) -> bool:
        """Whether weights go over the network; otherwise through this machine's memory."""
        transport = self._options.transport
        return transport == "broadcast" or (transport == "auto" and not client.local)

    async def close(self) -> None:
        """Leave the server's process group."""
        group, self._group = self._group, None
        if group is not None:
            await group.leave()

    async def _pause(self, client: Client) -> None:
        self._begun = True
        await self._call(client, "pause_generation", {"mode": "retract"})

    async def _call(self, client: Client, name: str, body: dict[str, Any]) -> None:
        await client.call(name, body, self._options.timeout_s)


async def give_from_ranks(
    members: Sequence[tuple[WeightSender, Client]], update: FromRanks
) -> list[VerlMTError | None]:
    """Let the ranks give several engines the weights at once. Returns what went wrong with each, or None; such an
    engine is given up."""
    began = await asyncio.gather(*(sender.begin(client) for sender, client in members))
    halted = [(sender, client) for (sender, client), problem in zip(members, began) if problem is None]
    given: dict[Client, VerlMTError | None] = {}
    if halted:
        hosts = [client.host for _, client in halted if isinstance(client, HostedClient)]
        giver = _BROADCASTER if any(host.rank is None for host in hosts) else _GIVER
        told = await update.hand_over(hosts, giver, halted[0][0].giving(halted[0][1]))
        given = {client: problem for (_, client), problem in zip(halted, told, strict=True)}
    problems = [problem or given[client] for (_, client), problem in zip(members, began)]
    return await asyncio.gather(*(sender.end(client, p) for (sender, client), p in zip(members, problems)))


async def _alone(buckets: Iterator[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket


class WeightGroup:
    """A process group of the trainer (rank 0) and one server's ranks, for weights that cross machines.

    Broadcasts to one server; one per life of it.

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
        store = open_store(self._address, self._timeout_s)
        body = {
            "master_address": self._address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 1 + self._num_ranks,
            "group_name": self.name,
            "backend": self._backend,
        }
        # In a thread and not awaited: the server joins only when it is asked, which is the next call.
        joining = (store, self.name, 1 + self._num_ranks, self._backend, self._timeout_s)
        here = asyncio.create_task(asyncio.to_thread(join_as_first, *joining))
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
