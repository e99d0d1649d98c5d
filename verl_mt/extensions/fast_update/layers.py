"""Decoder layers compiled with torch.compile, for packed rows.

Only attention stays outside of the compiled code: which tokens see each other is different in every pass. So a layer
becomes two graphs, one before attention and one behind it. The number of tokens is dynamic, and all layers of a model
have the same graphs. Passes without packed rows, such as those of the local engine, run as before.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from verl_mt.errors import ConfigError, error_text
from verl_mt.modeling.passes import decoder_of

_OUTSIDE = "_verl_mt_outside"


def compile_layers(model: Any, *, backend: str = "inductor") -> None:
    """Replace `forward` of the model's decoder layers. The first passes compile: one without and one with gradients.

    Args:
        model: a Hugging Face causal language model whose passes are packed.
        backend: of torch.compile.

    Raises:
        ConfigError: its decoder has no list of layers of one class.
    """
    decoder = decoder_of(model)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len({type(layer) for layer in layers}) != 1:
        raise ConfigError(
            f"actor_rollout_ref.actor.compile_layers=True: {type(decoder).__name__} has no list of layers of one "
            "class. Remove actor_rollout_ref.actor.compile_layers"
        )
    _attend_outside(decoder.config._attn_implementation)
    plain = type(layers[0]).forward
    compiled = torch.compile(plain, dynamic=True, backend=backend)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (plain if kwargs.get("packed_rows") is None else compiled)(self, *args, **kwargs)

    for layer in layers:
        # A bound method: a copy of the model gets it bound to the copy's layer.
        layer.forward = types.MethodType(forward, layer)


def _attend_outside(name: str) -> None:
    """Keep an attention function that is registered with transformers out of compiled code."""
    attend: Callable[..., tuple[Tensor, None]] = AttentionInterface()[name]
    if hasattr(attend, _OUTSIDE):
        return

    def outside(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        packed = kwargs.get("packed_rows") is not None
        result, weights = attend(*args, **kwargs)
        # Of packed rows always a view of [T, H, D]: a view of something else would compile the rest of the layer again.
        if packed and (result._base is None or result._base.shape != result.shape[1:]):
            result = result[0].clone()[None]
        return result, weights

    disabled: Any = torch.compiler.disable(outside)
    setattr(disabled, _OUTSIDE, True)
    AttentionInterface.register(name, disabled)


def require_compiler(device: torch.device, key: str) -> None:
    """Compile something small.

    Raises:
        ConfigError: torch.compile does not work on this machine.
    """
    try:
        torch.compile(_tiny, dynamic=True)(torch.ones(4, device=device))
    except Exception as error:
        first = error_text(error, named=True).splitlines()[0]
        raise ConfigError(
            f"{key}=True: torch.compile does not work on {device.type} here: {first}. On a CPU it needs a C++ "
            f"compiler, on a GPU the package triton. Install it, or remove {key}"
        ) from error


def _tiny(x: Tensor) -> Tensor:
    return x.exp() + 1
