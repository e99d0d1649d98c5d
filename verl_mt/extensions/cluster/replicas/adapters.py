"""Low-rank adapters (LoRA) on their way to engines that have the base weights: a few megabytes in place of the model.

The engine reads the base weights from the model's files when it starts, which is also when it restarts. Each update is
the adapter, and takes the last one's place: turns that are being sampled go on with it, as they do with merged weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from verl_mt.config.actor import ModelConfig
from verl_mt.engines.base import Receiver, WeightPublisher
from verl_mt.errors import VerlMTError
from verl_mt.extensions.cluster.replicas.buckets import WeightCheck
from verl_mt.extensions.cluster.replicas.publisher import failures
from verl_mt.modeling.lora import adapted_layers

LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Layers whose adapters SGLang and vLLM take alike, by their last names. Other names are another architecture."""
ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Models that both engines have with adapters. Of others an engine may not start, or ignore an adapter."""


@dataclass(frozen=True)
class AdapterShape:
    """What the adapters of a run are, without their numbers."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    """Last names of the layers."""
    weights: dict[str, tuple[int, ...]]
    """Name in peft's files -> shape: A [rank, in], B [out, rank]."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of an update to engines of this dtype."""
        return sum(map(math.prod, self.weights.values())) * dtype.itemsize

    @property
    def config(self) -> dict[str, Any]:
        """What peft's `adapter_config.json` says that an engine reads."""
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "bias": "none",
        }


def adapter_shape(model: ModelConfig, module: Any) -> AdapterShape | str:
    """Of the adapters that the keys ask for. No weight is read.

    Args:
        model: the keys.
        module: what their path names, on any device.

    Returns:
        Or why engines cannot take them.

    Raises:
        ConfigError: a name that stands for no linear layer.
    """
    if getattr(module.config, "vision_config", None) is not None:
        return "the model has a vision tower, whose layers have other names in engines"
    chosen, targets = adapted_layers(module, model.lora_target_modules, text_only=model.freeze_vision)
    if others := sorted(set(targets) - LAYERS):
        return f"engines take adapters of whole {', '.join(sorted(LAYERS))}, and these are of {', '.join(others[:3])}"
    weights: dict[str, tuple[int, ...]] = {}
    for name in chosen:
        linear = module.get_submodule(name)
        weights[f"base_model.model.{name}.lora_A.weight"] = (model.lora_rank, linear.in_features)
        weights[f"base_model.model.{name}.lora_B.weight"] = (linear.out_features, model.lora_rank)
    if any(".experts." in name for name, _ in module.named_parameters()):
        return "the model is a mixture of experts"
    return AdapterShape(model.lora_rank, model.lora_alpha, targets, weights)


class AdapterPublisher(WeightPublisher):
    """Each engine gets the bytes of the adapter with the call itself, wherever it is.

    Args:
        expected: name -> shape of all tensors.
        dtype: torch's name of the engines'.
        timeout_s: deadline of each call of an engine.
        config: see `AdapterShape.config`.
        address: of this machine.
    """

    def __init__(
        self,
        expected: Mapping[str, tuple[int, ...]],
        dtype: str,
        timeout_s: float,
        config: dict[str, Any],
        *,
        address: str,
    ):
        self._expected, self._dtype = expected, getattr(torch, dtype)
        self._timeout_s, self._config = timeout_s, config

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int, receivers: Sequence[Receiver]
    ) -> list[VerlMTError | None]:
        """Send all of them to all engines, whose sampling is halted. One that goes away, or refuses, is left out.

        Runs in a thread of the trainer or in the main thread of a rank. Waits for the engines, each in a thread.

        Raises:
            EngineError: a tensor that does not fit the model.
        """
        check, held = WeightCheck(self._expected), {}
        for name, tensor in tensors:
            check.take(name, tensor)
            held[name] = tensor.detach().to("cpu", self._dtype).contiguous()
        check.finish()
        body = {"adapter": save(held), "config": self._config, "weight_version": str(version)}
        with ThreadPoolExecutor(len(receivers)) as threads:
            asked = {
                receiver: threads.submit(receiver.call, "load_adapter", body, self._timeout_s) for receiver in receivers
            }
            problems = failures(asked)
        return [problems.get(receiver) for receiver in receivers]
