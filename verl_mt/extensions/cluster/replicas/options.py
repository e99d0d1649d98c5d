"""What an engine is started with, in words that all engines share."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import urlsplit

import torch

from verl_mt.config.actor import ModelConfig
from verl_mt.config.schema import ActorRolloutRefConfig, TrainerConfig
from verl_mt.config_paths import resolve_model_path
from verl_mt.engines.base import EngineHost
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.config import RolloutKeys, keys_of
from verl_mt.extensions.cluster.replicas.adapters import ARCHITECTURES, AdapterShape, adapter_shape
from verl_mt.extensions.cluster.start_log import start_log
from verl_mt.modeling.load import meta_causal_lm

KEY = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class ReplicaOptions:
    """The config in an engine's terms."""

    model_path: str
    max_model_len: int
    tokenizer_path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "float32"
    end_token_ids: frozenset[int] = frozenset()
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    memory_share: float = 0.5
    free_cache: bool = True
    seed: int = 0
    timeout_s: float = 600.0
    """Deadline of a start, and of any single call that is not `generate`."""
    servers: tuple[str, ...] = ()
    """URLs of running servers."""
    num_launched: int = 0
    """HTTP servers to launch where there are no `hosts`; with none of these, nor `servers`, one engine is colocated."""
    hosts: tuple[EngineHost, ...] = ()
    """Places beside the ranks of a worker group, or on separate devices: an engine in each."""
    transport: str = "auto"
    adapters: AdapterShape | None = None
    """What updates send; None = all weights."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(
        cls,
        config: ActorRolloutRefConfig,
        *,
        end_token_ids: Iterable[int],
        max_model_len: int | None,
        seed: int,
        hosts: tuple[EngineHost, ...] = (),
        **more: Any,
    ) -> Self:
        """Raises:
        ConfigError: no length.
        """
        model, rollout, keys = config.model, config.rollout, keys_of(config.rollout)
        if max_model_len is None:
            raise ConfigError(f"{KEY}.max_model_len: the {rollout.name} engine needs the longest sequence in tokens")
        options = cls(
            model_path=resolve_model_path(model.path),
            tokenizer_path=None if model.tokenizer_path is None else resolve_model_path(model.tokenizer_path),
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=rollout.dtype or model.dtype,
            max_model_len=max_model_len,
            end_token_ids=frozenset(end_token_ids),
            max_num_seqs=rollout.max_num_seqs,
            tensor_parallel_size=keys.tensor_model_parallel_size,
            memory_share=keys.gpu_memory_utilization,
            free_cache=keys.free_cache_engine,
            seed=seed,
            timeout_s=rollout.engine_timeout_s,
            servers=tuple(url.rstrip("/") for url in keys.servers),
            num_launched=keys.launch_servers,
            transport=keys.weight_transport,
            engine_kwargs=dict(rollout.engine_kwargs),
            hosts=hosts,
            **more,
        )
        return replace(options, adapters=options.adapters_of(model, keys.lora_updates))

    def adapters_of(self, model: ModelConfig, wanted: str) -> AdapterShape | None:
        """What updates send of a policy with low-rank adapters; None = all weights, merged.

        Args:
            model: its keys.
            wanted: `lora_updates`.

        Raises:
            ConfigError: adapters are wanted where the engine does not take them.
        """
        if not model.lora_rank or wanted == "merged":
            return None
        found: str | AdapterShape = self.merges_adapters(model.lora_rank)
        if not found:
            module = self._on_meta()
            found, name = adapter_shape(model, module), type(module).__name__
            if isinstance(found, AdapterShape):
                found = self.merges_layers(found.targets) or found
            if wanted == "auto" and name not in ARCHITECTURES:
                found = f"{name} is none of {', '.join(sorted(ARCHITECTURES))}"
        if isinstance(found, AdapterShape):
            size = found.num_bytes(getattr(torch, self.dtype)) / 1e6
            start_log.info("LoRA: engines get the adapters at each update, %.1f MB", size)
            return found
        if wanted == "adapters":
            raise ConfigError(f"{KEY}.lora_updates=adapters: {found}. Set lora_updates=merged")
        start_log.info("LoRA: engines get merged weights at each update: %s", found)
        return None

    def _on_meta(self) -> Any:
        return meta_causal_lm(
            self.model_path,
            revision=self.revision,
            attn_implementation="eager",
            trust_remote_code=self.trust_remote_code,
        )

    def merges_adapters(self, rank: int) -> str:
        """Why an engine like this one does not take adapters of this rank; empty = it does."""
        if self.servers:
            return "you started the servers, and they need not have the base weights"
        if self.transport == "disk":
            return "weight_transport=disk writes whole models"
        if self.on_gpu and self.takes_turns and self.free_cache:
            return "free_cache_engine=True frees the base weights with the cache"
        if self.on_gpu and self.dtype == "float32":
            return "the kernels for adapters on a GPU have no float32"
        return ""

    def merges_layers(self, targets: Collection[str]) -> str:
        """Why an engine like this one does not take adapters of these layers; empty = it does."""
        return ""

    @property
    def on_gpu(self) -> bool:
        """An engine takes the GPU where there is one: at its hosts, whatever this machine has."""
        return any(host.on_gpu for host in self.hosts) if self.hosts else torch.cuda.is_available()

    @property
    def takes_turns(self) -> bool:
        """Whether training has the same devices."""
        apart = any(host.rank is None for host in self.hosts)
        return not (apart or self.servers or self.num_launched)


def check_servers(keys: RolloutKeys, trainer: TrainerConfig) -> None:
    """Raises:
    ConfigError: servers that this machine's memory, or rank 0, does not reach.
    """
    far = [url for url in keys.servers if keys.weight_transport in ("tensors", "copy") and not is_local(url)]
    if far:
        raise ConfigError(
            f"{KEY}.weight_transport={keys.weight_transport}: {', '.join(far)} cannot open this machine's memory. "
            "Use broadcast or disk"
        )
    here = [url for url in keys.servers if is_local(url)]
    if trainer.placement == "ray" and trainer.nnodes > 1 and here:
        raise ConfigError(
            f"{KEY}.servers: {', '.join(here)} is another machine to each of the trainer.nnodes={trainer.nnodes}: give "
            "an address that all of them reach, rank 0 asks the servers"
        )


def is_local(url: str) -> bool:
    """Whether a server's URL says that it is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
