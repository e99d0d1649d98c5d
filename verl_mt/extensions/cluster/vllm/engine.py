"""`VLLMEngine`: real vLLM behind the contract of `engines/base.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig, TrainerConfig
from verl_mt.engines.base import Branch, EngineSetup, InferenceEngine
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.config import keys_of
from verl_mt.extensions.cluster.replicas.broadcaster import NCCL_ALIKE
from verl_mt.extensions.cluster.replicas.clients import Client, HostedClient
from verl_mt.extensions.cluster.replicas.engine import ReplicatedEngine
from verl_mt.extensions.cluster.replicas.weight_sender import Choice
from verl_mt.extensions.cluster.vllm.client import VLLMClient, VLLMTurn
from verl_mt.extensions.cluster.vllm.options import (
    VLLMOptions,
    check_memory,
    check_placement,
    check_rollout,
    python_of,
)
from verl_mt.extensions.cluster.vllm.publisher import Broadcaster, FilePublisher
from verl_mt.extensions.cluster.vllm.server import VLLMServer

_CLIENT = "verl_mt.extensions.cluster.vllm.client.VLLMClient"


class VLLMEngine(ReplicatedEngine):
    """Replicas of vLLM: beside the ranks of a worker group, on separate devices, or beside this process, with the
    interpreter of `rollout.python`. Or the user's servers.

    Args:
        options: see `VLLMOptions`.
    """

    kind = "vLLM"
    turn = VLLMTurn
    broadcaster = Broadcaster
    lives_beside_ranks = True
    _options: VLLMOptions

    @classmethod
    def check_config(cls, config: ActorRolloutRefConfig, trainer: TrainerConfig) -> None:
        if trainer.deterministic:
            raise ConfigError(
                "trainer.deterministic needs rollout.name=local or scripted. vllm gives other bits in other batches"
            )
        keys = keys_of(config.rollout)
        on_gpu = trainer.device == "cuda" or (trainer.device == "auto" and torch.cuda.is_available())
        check_placement(keys, trainer, on_gpu=on_gpu)
        python = None if keys.servers else python_of(keys)
        check_rollout(config, python)

    @classmethod
    def rank_environment(cls, rollout: RolloutConfig) -> Mapping[str, str]:
        keys = keys_of(rollout)
        return NCCL_ALIKE if keys.placed != "colocated" and keys.weight_transport != "disk" else {}

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> InferenceEngine:
        options = VLLMOptions.from_config(
            setup.config,
            end_token_ids=setup.end_token_ids,
            max_model_len=setup.max_model_len,
            seed=setup.seed,
            hosts=setup.hosts,
        )
        # Asked again: the ranks may have GPUs that the trainer's machine has not.
        check_memory(keys_of(setup.config.rollout), on_gpu=options.on_gpu)
        return cls(options)

    def __init__(self, options: VLLMOptions):
        super().__init__(options)

    def branch(self) -> Branch | None:
        """An engine beside this process, at the other end of its socket, is asked through it."""
        if not (self._options.hosts or self._options.servers):
            return None
        names = tuple(replica.name for replica in self._replicas)
        path = "verl_mt.extensions.cluster.vllm.branch:VLLMBranch"
        # Servers may have said that they decode more or fewer at once than the configuration does.
        seats = min(replica.seats.decodes for replica in self._replicas)
        return Branch(path, (replace(self._options, hosts=(), max_num_seqs=seats), names))

    def _makers(self) -> Iterable[Callable[[], Client]]:
        options = self._options
        if options.servers:
            return [partial(VLLMServer, url, options) for url in options.servers]
        if options.hosts:
            return [
                partial(HostedClient, host, _CLIENT, options.arguments(number), self.kind, [])
                for number, host in enumerate(options.hosts)
            ]
        return [
            partial(VLLMClient, options.arguments(number), options.environment(number))
            for number in range(options.num_launched or 1)
        ]

    def _memory_publisher(self) -> Choice:
        return FilePublisher, ()
