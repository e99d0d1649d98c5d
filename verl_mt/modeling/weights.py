"""A model's tensors under the names that they have in its checkpoint: what an inference engine loads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from verl_mt.modeling.lora import lora_of, merged, plain_name


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight, each tensor once: of tied ones (input and output embeddings) the first name.

    transformers keeps some architectures in other shapes than their checkpoints have (the experts of a mixture in one
    tensor, for example); what comes out here has the checkpoint's shapes. Low-rank adapters are merged into the weights
    that they change, a decoder layer at a time.

    Args:
        module: a Hugging Face model. Its tensors are not copied where nothing has to be merged or converted.
    """
    state = _state(module)
    parts = [state] if lora_of(module) is None else by_layer(state)
    for part in parts:
        yield from as_in_checkpoint(module, part).items()


def by_layer(state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Weights of each decoder layer (`....3.`) together, all others one by one, each with its adapter."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        numbered = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(numbered[1] if numbered else plain_name(name), {})[name] = tensor
    yield from layers.values()


@torch.no_grad()
def as_in_checkpoint(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some weights of a model, whole layers at least, as its checkpoint has them: merged with adapters, converted.

    Args:
        module: the Hugging Face model that they come from; only its configuration is looked at.
        state: whole tensors by the names that they have in it.
    """
    from transformers.core_model_loading import revert_weight_conversion

    lora = lora_of(module)
    return revert_weight_conversion(module, state if lora is None else merged(lora, state))


def _state(module: nn.Module) -> dict[str, Tensor]:
    first_names = {name for name, _ in module.named_parameters(remove_duplicate=True)}
    aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)} - first_names
    return {name: tensor for name, tensor in module.state_dict().items() if name not in aliases}
