"""How engines get new weights, whatever they are doing: through memory, over the network, or from files."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from verl_mt.engines.base import Disk, FromRanks, Publishers, Receiver, TensorBuckets, WeightPublisher, WeightUpdate
from verl_mt.errors import ConfigError, EngineError, VerlMTError, error_text
from verl_mt.extensions.cluster.replicas.clients import Client
from verl_mt.extensions.cluster.replicas.model_shape import ModelShape
from verl_mt.extensions.cluster.replicas.options import ReplicaOptions

Member = tuple["WeightSender", Client]
Choice = tuple[type[WeightPublisher], tuple[Any, ...]]
"""A publisher, and its arguments behind the model's weights, dtype and the deadline."""
_LEAVE_S = 10.0


class WeightSender:
    """Sends updates to one engine after the other of the same replica.

    Args:
        options: dtype, deadline, transport.
        is_paused: whether somebody wants the engine to stay paused.
        publishing: what publishes weights in this process, for all replicas.
        choose: the publisher for an engine (see `publisher_for`).
    """

    def __init__(
        self,
        options: ReplicaOptions,
        is_paused: Callable[[], bool],
        publishing: PublishesHere,
        choose: Callable[[Client, Receiver, bool], Choice],
    ):
        self.current: WeightUpdate | None = None
        """What a new life gets; None = the model's files."""
        self.shape: ModelShape | None = None
        """What an update is compared with; known when the engine starts."""
        self._options = options
        self._is_paused = is_paused
        self._publishing = publishing
        self._choose = choose

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
                    f"{self._options.model_path} ({error}). Restart it"
                ) from error
        return update

    async def send(self, client: Client, update: WeightUpdate) -> None:
        """Turns that are being sampled are set back to where they have no cache, and go on with the new weights.

        Raises:
            EngineError: the update does not fit the model, or the engine refused it. If a part of it has arrived by
                then, the engine is given up, so that it is started anew with weights that are known.
            EngineGoneError: the engine went away.
        """
        (problem,) = await send_to_all([(self, client)], update)
        if problem is not None:
            raise problem

    async def begin(self, client: Client) -> Receiver | VerlMTError:
        """Halt the engine for an update. Returns what takes it there, or why it cannot."""
        try:
            await self._call(client, "pause_generation", {"mode": "retract"})
            if self._options.adapters is None:  # these come in one call
                await self._call(client, "begin_weight_update", {})
            return client.receiver()
        except EngineError as error:
            return error

    async def end(self, client: Client, problem: VerlMTError | None) -> VerlMTError | None:
        """End the update. The engine serves with the new weights, or is stopped if there is a problem."""
        if problem is None:
            try:
                if self._options.adapters is None:
                    await self._call(client, "end_weight_update", {})
                await self._go_on(client)
            except EngineError as error:
                problem = error
        if problem is not None:
            client.give_up(f"a weight update broke off: {problem}")
        return problem

    async def read(self, client: Client, update: Disk) -> VerlMTError | None:
        """From files. Returns what went wrong."""
        body = {"model_path": update.path, "weight_version": str(update.version)}
        try:
            await self._call(client, "pause_generation", {"mode": "retract"})
            await self._call(client, "update_weights_from_disk", body)
            await self._go_on(client)
        except EngineError as error:
            client.give_up(f"a weight update broke off: {error}")
            return error
        return None

    def publisher_for(
        self, client: Client, receiver: Receiver, *, here: bool
    ) -> tuple[type[WeightPublisher], tuple[Any, ...]]:
        """(the publisher for this engine and all like it, its arguments).

        Args:
            client: the engine.
            receiver: of it.
            here: the weights are in this process; otherwise in ranks elsewhere.
        """
        assert self.shape is not None
        publisher, more = self._choose(client, receiver, here)
        return publisher, (self.shape.weights, self._options.dtype, self._options.timeout_s, *more)

    async def publish(
        self,
        publisher: type[WeightPublisher],
        arguments: tuple[Any, ...],
        update: TensorBuckets | FromRanks,
        receivers: Mapping[Client, Receiver],
    ) -> list[VerlMTError | None]:
        """To these engines, of this and of other replicas. Returns what went wrong with each, or None."""
        some = [*receivers.values()]
        if isinstance(update, FromRanks):
            return await update.publish(some, f"{publisher.__module__}.{publisher.__qualname__}", arguments)
        far = [client.url for client in receivers if client.url and not client.local]
        return await self._publishing.publish(publisher, arguments, update, some, far[0] if far else "")

    async def _go_on(self, client: Client) -> None:
        if not self._is_paused():
            await self._call(client, "continue_generation", {})

    async def _call(self, client: Client, name: str, body: dict[str, Any]) -> None:
        await client.call(name, body, self._options.timeout_s)


async def send_to_all(members: Sequence[Member], update: WeightUpdate) -> list[VerlMTError | None]:
    """One pass over the weights for all engines that take them in the same way. Returns each engine's problem, or None.
    An engine with a problem is stopped if a part of the update may have arrived."""
    if isinstance(update, Disk):
        return await asyncio.gather(*(sender.read(client, update) for sender, client in members))
    if not isinstance(update, TensorBuckets | FromRanks):
        refusal = f"an engine takes FromRanks, TensorBuckets and Disk, got {type(update).__name__}"
        return [EngineError(refusal)] * len(members)
    try:
        return await _give_to_all(members, update)
    except BaseException as error:
        for _, client in members:
            client.give_up(f"a weight update broke off: {error!r}")
        raise


async def _give_to_all(members: Sequence[Member], update: TensorBuckets | FromRanks) -> list[VerlMTError | None]:
    began = await asyncio.gather(*(sender.begin(client) for sender, client in members))
    problems: dict[Client, VerlMTError | None] = {}
    alike: dict[type[WeightPublisher], tuple[WeightSender, tuple[Any, ...], dict[Client, Receiver]]] = {}
    for (sender, client), found in zip(members, began):
        if isinstance(found, Receiver):
            publisher, arguments = sender.publisher_for(client, found, here=isinstance(update, TensorBuckets))
            alike.setdefault(publisher, (sender, arguments, {}))[2][client] = found
        else:
            problems[client] = found
    for publisher, (sender, arguments, receivers) in alike.items():
        told = await sender.publish(publisher, arguments, update, receivers)
        problems |= zip(receivers, told, strict=True)
    return await asyncio.gather(*(sender.end(client, problems[client]) for sender, client in members))


class PublishesHere:
    """The publishers of this process, kept for later updates. One update runs at a time, in a thread, because the
    engines answer on the event loop meanwhile."""

    def __init__(self) -> None:
        self._publishers = Publishers()
        self._lock = threading.Lock()
        """An engine that comes back gets the weights while others are being sent theirs."""

    async def publish(
        self,
        publisher: type[WeightPublisher],
        arguments: tuple[Any, ...],
        update: TensorBuckets,
        receivers: Sequence[Receiver],
        url: str,
    ) -> list[VerlMTError | None]:
        """See `FromRanks`. Runs on the rollout's loop. Waits for a thread that publishes, one update at a time.

        Args:
            publisher: the class.
            arguments: of it.
            update: the weights.
            receivers: the engines.
            url: of one on another machine, to find out under which address it sees this one; empty = there is none.
        """

        def here() -> list[VerlMTError | None]:
            """Runs in a thread. Waits for another update, then for the engines."""
            with self._lock:
                try:
                    made = self._publishers.get(publisher, arguments, _own_address(url))
                    return made.publish(update.tensors, update.version, update.bucket_bytes, receivers)
                except Exception as error:
                    problem = error if isinstance(error, VerlMTError) else EngineError(error_text(error, named=True))
                    return [problem] * len(receivers)
                finally:
                    torch.cuda.empty_cache()  # the engine takes its cache back next

        return await asyncio.to_thread(here)

    async def close(self) -> None:
        """Leave the process groups; one whose update hangs ends with this process. Runs on the rollout's loop. Waits
        for a thread, at most `_LEAVE_S` for an update in progress."""
        await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        """Runs in a thread. Waits for an update in progress, at most `_LEAVE_S`."""
        if self._lock.acquire(timeout=_LEAVE_S):
            try:
                self._publishers.close()
            finally:
                self._lock.release()


def _own_address(url: str) -> str:
    """The address that this machine has on the way to a server; nothing is sent."""
    if not url:
        return "127.0.0.1"
    parts = urlsplit(url)
    family = socket.getaddrinfo(parts.hostname, parts.port or 80)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])
