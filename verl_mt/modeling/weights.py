"""A model's tensors under the names that they have in its checkpoint: what an inference engine loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl_mt.config_paths import resolve_model_path
from verl_mt.errors import ConfigError


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight, each tensor once: of tied ones (input and output embeddings) the first name.

    transformers keeps some architectures in other shapes than their checkpoints have (the experts of a mixture in one
    tensor, for example); what comes out here has the checkpoint's shapes.

    Args:
        module: a Hugging Face model. Its tensors are not copied where nothing has to be converted.
    """
    yield from _as_in_checkpoint(module, _state(module)).items()


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model without loading any weight."""

    vocab_size: int
    weights: dict[str, tuple[int, ...]]
    """Name -> shape of all that `named_weights` yields."""


def model_shape(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelShape:
    """Of a model folder or hub name.

    Raises:
        ConfigError: no such model, or one that transformers does not know.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source = resolve_model_path(path)
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"actor_rollout_ref.model.path {path!r}: its config cannot be read: {error}") from error
    model.tie_weights()
    weights = {name: tuple(tensor.shape) for name, tensor in named_weights(model)}
    return ModelShape(config.get_text_config().vocab_size, weights)


def _state(module: nn.Module) -> dict[str, Tensor]:
    first_names = {name for name, _ in module.named_parameters(remove_duplicate=True)}
    aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)} - first_names
    return {name: tensor for name, tensor in module.state_dict().items() if name not in aliases}


def _as_in_checkpoint(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        return revert_weight_conversion(module, state)  # type: ignore[arg-type]
