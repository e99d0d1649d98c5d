"""`VLLMEngine`: real vLLM behind the contract of `engines/base.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from verl_mt.config.schema import ActorRolloutRefConfig, TrainerConfig
from verl_mt.engines.base import EngineSetup, InferenceEngine, Receiver
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.config import keys_of
from verl_mt.extensions.cluster.replicas.clients import Client, HostedClient
from verl_mt.extensions.cluster.replicas.engine import ReplicatedEngine
from verl_mt.extensions.cluster.replicas.weight_sender import Choice
from verl_mt.extensions.cluster.vllm.client import VLLMClient, VLLMTurn
from verl_mt.extensions.cluster.vllm.options import VLLMOptions, check_placement, check_rollout, python_of
from verl_mt.extensions.cluster.vllm.publisher import FilePublisher

_CLIENT = "verl_mt.extensions.cluster.vllm.client.VLLMClient"


class VLLMEngine(ReplicatedEngine):
    """Replicas of vLLM: beside the ranks of a worker group, or one beside this process. Each has an interpreter of its
    own (`rollout.python`).

    Args:
        options: see `VLLMOptions`.
    """

    kind = "vLLM"
    turn = VLLMTurn
    lives_beside_ranks = True
    _options: VLLMOptions

    @classmethod
    def check_config(cls, config: ActorRolloutRefConfig, trainer: TrainerConfig) -> None:
        if trainer.deterministic:
            raise ConfigError(
                "trainer.deterministic needs rollout.name=local or scripted; vllm gives other bits in other batches"
            )
        keys = keys_of(config.rollout)
        on_gpu = trainer.device == "cuda" or (trainer.device == "auto" and torch.cuda.is_available())
        check_rollout(config)
        check_placement(keys, on_gpu=on_gpu)
        python_of(keys)

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
        check_placement(keys_of(setup.config.rollout), on_gpu=options.on_gpu)
        return cls(options)

    def __init__(self, options: VLLMOptions):
        super().__init__(options)

    def _makers(self) -> Iterable[Callable[[], Client]]:
        options = self._options
        if options.hosts:
            return [
                partial(HostedClient, host, _CLIENT, options.arguments(number), self.kind, [])
                for number, host in enumerate(options.hosts)
            ]
        return [partial(VLLMClient, options.arguments())]

    def _publisher_for(self, client: Client, receiver: Receiver, here: bool) -> Choice:
        return FilePublisher, ()
