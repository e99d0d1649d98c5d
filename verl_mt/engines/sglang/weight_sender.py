"""How one engine gets new weights, whatever it is doing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from verl_mt.engines.base import Disk, TensorBuckets, WeightUpdate
from verl_mt.engines.sglang.buckets import Buckets, payload
from verl_mt.engines.sglang.client import Client
from verl_mt.engines.sglang.options import SGLangOptions
from verl_mt.errors import ConfigError, EngineError


class WeightSender:
    """Sends updates to one engine after the other of the same replica.

    Args:
        options: dtype, deadline, ranks.
        is_paused: whether somebody wants the engine to stay paused.
    """

    def __init__(self, options: SGLangOptions, is_paused: Callable[[], bool]):
        self.current: WeightUpdate | None = None
        """What a new life gets; None = the model's files."""
        self.num_weights = 0
        """How many tensors an update has."""
        self._options = options
        self._is_paused = is_paused
        self._buckets = Buckets(getattr(torch, options.dtype))

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

    async def send(self, client: Client, update: WeightUpdate) -> None:
        """Turns that are being sampled are set back to where they have no cache, and go on with the new weights.

        Raises:
            EngineError: SGLang refused; what weights it has now is not known.
            EngineGoneError: it went away.
        """
        call = partial(client.call, timeout_s=self._options.timeout_s)
        await call("pause_generation", {"mode": "retract"})
        if isinstance(update, Disk):
            body = {"model_path": update.path, "weight_version": str(update.version)}
            await call("update_weights_from_disk", body)
        elif isinstance(update, TensorBuckets):
            await self._send_tensors(client, update)
        else:
            raise EngineError(f"an SGLang engine takes TensorBuckets and Disk updates, got {type(update).__name__}")
        if not self._is_paused():
            await call("continue_generation", {})

    async def _send_tensors(self, client: Client, update: TensorBuckets) -> None:
        call = partial(client.call, timeout_s=self._options.timeout_s)
        num_left = self.num_weights
        await call("begin_weight_update", {})
        for buffer, entries in self._buckets.pack(update.tensors, update.bucket_bytes):
            num_left -= len(entries)
            body = {
                "serialized_named_tensors": [payload(buffer, entries)] * self._options.tensor_parallel_size,
                "load_format": "flattened_bucket",
                "flush_cache": num_left == 0,
            }
            if num_left == 0:
                body["weight_version"] = str(update.version)
            await call("update_weights_from_tensor", body)
        await call("end_weight_update", {})
