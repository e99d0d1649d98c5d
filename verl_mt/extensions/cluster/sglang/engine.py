"""`SGLangEngine`: real SGLang behind the contract of `engines/base.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig, TrainerConfig
from verl_mt.engines.base import Branch, EngineSetup, InferenceEngine
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.config import keys_of
from verl_mt.extensions.cluster.replicas.clients import Client, HostedClient
from verl_mt.extensions.cluster.replicas.engine import ReplicatedEngine
from verl_mt.extensions.cluster.replicas.options import KEY, check_servers
from verl_mt.extensions.cluster.replicas.weight_sender import Choice
from verl_mt.extensions.cluster.sglang.clients import ColocatedClient, HttpClient, LaunchedServer
from verl_mt.extensions.cluster.sglang.options import (
    SGLangOptions,
    check_devices,
    check_launched,
    check_rollout,
    installed,
    nccl_environment,
    require_sglang,
)
from verl_mt.extensions.cluster.sglang.publisher import BucketPublisher
from verl_mt.extensions.cluster.versions import SGLANG

_log = logging.getLogger(__name__)
_COLOCATED = "verl_mt.engines.sglang.clients.ColocatedClient"


class SGLangEngine(ReplicatedEngine):
    """Replicas of SGLang: beside the ranks of a worker group, one beside this process, or HTTP servers.

    Args:
        options: see `SGLangOptions`.

    Raises:
        ConfigError: SGLang is not installed where it is needed, or weights cannot get to where it runs.
    """

    kind = "SGLang"
    lives_beside_ranks = True
    packages = ("sglang",)
    _options: SGLangOptions

    @classmethod
    def check_config(cls, config: ActorRolloutRefConfig, trainer: TrainerConfig) -> None:
        if trainer.deterministic:
            raise ConfigError(
                "trainer.deterministic needs rollout.name=local or scripted. sglang gives other bits in other batches"
            )
        rollout = keys_of(config.rollout)
        check_rollout(config.rollout)
        check_servers(rollout, trainer)
        if trainer.placement == "inline":
            check_devices(config.rollout)
        on_gpu = trainer.device == "cuda" or (trainer.device == "auto" and torch.cuda.is_available())
        if trainer.steps_ahead and on_gpu and rollout.placed == "colocated" and rollout.free_cache_engine:
            raise ConfigError(
                f"trainer.max_staleness={trainer.max_staleness}: an engine on the training's GPUs frees its memory "
                "while training runs. Use separate devices (actor_rollout_ref.rollout.nnodes, launch_servers or "
                "servers), or keep the engine's memory (rollout.free_cache_engine=False), or set max_staleness=0"
            )
        if trainer.placement != "ray":
            check_launched(config.rollout, trainer.device)
        if not rollout.servers:
            require_sglang()
            SGLANG.check(installed(), f"{KEY}.name=sglang: this Python has")

    @classmethod
    def rank_environment(cls, rollout: RolloutConfig) -> Mapping[str, str]:
        keys = keys_of(rollout)
        apart = keys.placed != "colocated" and keys.weight_transport != "disk"
        return nccl_environment(rollout.engine_kwargs) if apart else {}

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> InferenceEngine:
        return cls(
            SGLangOptions.from_config(
                setup.config,
                end_token_ids=setup.end_token_ids,
                max_model_len=setup.max_model_len,
                seed=setup.seed,
                hosts=setup.hosts,
            )
        )

    def __init__(self, options: SGLangOptions):
        if not options.servers:
            require_sglang()
        super().__init__(options)

    def branch(self) -> Branch | None:
        """An engine beside this process, at the other end of its socket, is asked through it."""
        options = self._options
        if not (options.hosts or options.servers or options.num_launched):
            return None
        names = tuple(replica.name for replica in self._replicas)
        # Servers may have said that they decode more or fewer at once than the configuration does.
        options = replace(options, hosts=(), max_num_seqs=min(replica.seats.decodes for replica in self._replicas))
        return Branch("verl_mt.engines.sglang.branch:SGLangBranch", (options, names))

    async def _start_replicas(self) -> None:
        options = self._options
        if options.on_gpu and options.takes_turns and options.transport in ("auto", "tensors"):
            _log.warning(
                "weights go to the engine by handles of this GPU's memory (CUDA IPC), which no test of verl_mt has run "
                "yet; actor_rollout_ref.rollout.weight_transport=copy goes through main memory instead"
            )
        await super()._start_replicas()

    def _makers(self) -> Iterable[Callable[[], Client]]:
        options = self._options
        if options.servers:
            return [partial(HttpClient, url, options) for url in options.servers]
        if options.hosts:
            return [
                partial(HostedClient, host, _COLOCATED, self._seeded(number), self.kind, [])
                for number, host in enumerate(options.hosts)
            ]
        if options.num_launched:  # without Ray, which would have placed them
            return [partial(LaunchedServer, options, number) for number in range(options.num_launched)]
        return [partial(ColocatedClient, options.engine_arguments())]

    def _seeded(self, number: int) -> dict[str, Any]:
        """Arguments of a replica: equal ones with equal seeds would sample the same."""
        arguments = self._options.engine_arguments()
        return arguments | {"random_seed": arguments["random_seed"] + number}

    def _memory_publisher(self) -> Choice:
        return BucketPublisher, (self._options.transport == "copy",)
