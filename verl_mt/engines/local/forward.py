"""One forward pass of the shared module over the tokens of an engine step."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from verl_mt.engines.local import attention
from verl_mt.errors import ConfigError, EngineError


class PackedForward:
    """Runs the actor's own module; leaves no trace in it.

    Args:
        module: a Hugging Face causal language model (or a wrapper that passes keyword arguments through).
        max_model_len: the longest sequence it will see, in tokens.

    Raises:
        ConfigError: an architecture that the slot cache cannot hold (sliding windows, encoder-decoder, ...).
    """

    def __init__(self, module: torch.nn.Module, max_model_len: int):
        self.module = module
        self.config = module.config
        check_architecture(module, max_model_len)
        self.num_layers: int = self.config.num_hidden_layers  # type: ignore[union-attr, assignment]
        self.vocab_size: int = self.config.vocab_size  # type: ignore[union-attr, assignment]
        self._trained: list[torch.nn.Module] = []
        # An explicit 4D mask stops transformers from building one: `slot_attention` ignores it.
        self._no_mask = torch.zeros(1, 1, 1, 1)

    @property
    def device(self) -> torch.device:
        """Where the module is now."""
        return next(self.module.parameters()).device

    def enter_eval(self) -> None:
        """Put every submodule in eval mode, and remember which ones were not. Does nothing when already in it."""
        if not self._trained and self.module.training:
            self._trained = [m for m in self.module.modules() if m.training]
            for submodule in self._trained:
                submodule.training = False

    def leave_eval(self) -> None:
        """Give every submodule the mode it had before `enter_eval`."""
        for submodule in self._trained:
            submodule.training = True
        self._trained = []

    def __call__(self, tokens: np.ndarray, step: attention.StepAttention, wanted: np.ndarray) -> torch.Tensor:
        """
        Args:
            tokens: [N] ids, in the layout that `step` describes.
            step: where each token goes.
            wanted: [W] indices of the tokens whose next-token logits are wanted.

        Returns:
            [W, V] logits in float32.

        Raises:
            EngineError: the model did not call the attention function once per layer.
        """
        config: Any = self.config
        before = config._attn_implementation
        config._attn_implementation = attention.NAME
        try:
            output = self.module(
                input_ids=torch.from_numpy(tokens).to(self.device)[None],
                position_ids=step.positions[None],
                attention_mask=self._no_mask.to(self.device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(wanted).to(self.device),
                slot_step=step,
            )
        finally:
            config._attn_implementation = before
        if step.layers_seen != self.num_layers:
            raise EngineError(
                f"{type(self.module).__name__} called transformers' attention interface {step.layers_seen} times in a "
                f"forward pass, expected {self.num_layers} (its number of layers): the local engine cannot cache it"
            )
        return output.logits[0].float()


def check_architecture(module: torch.nn.Module, max_model_len: int) -> None:
    """
    Raises:
        ConfigError: says what about the model cannot be served, and what to do.
    """
    config: Any = getattr(module, "config", None)
    name = type(module).__name__
    remedy = "; use another engine (actor_rollout_ref.rollout.name) for this model"
    if config is None or not hasattr(config, "num_hidden_layers"):
        raise ConfigError(f"the local engine needs a Hugging Face causal language model, got {name}")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "vision_config", None) is not None:
        raise ConfigError(f"{name}: the local engine serves decoder-only text models{remedy}")
    if not getattr(_unwrapped(module), "_supports_attention_backend", False):
        raise ConfigError(
            f"{name} does not use transformers' attention interface, which the local engine needs{remedy}"
        )
    if "logits_to_keep" not in inspect.signature(_unwrapped(module).forward).parameters:
        raise ConfigError(f"{name}.forward has no `logits_to_keep`, which the local engine needs{remedy}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds == {"full_attention"} and getattr(config, "layer_types", None):
        window = None
    other = kinds - {"full_attention", "sliding_attention"}
    if other or (window is not None and window < max_model_len):
        what = f"layers of type {', '.join(sorted(other))}" if other else f"a sliding window of {window} tokens"
        raise ConfigError(
            f"{name} has {what}; the local engine has full attention only, for max_model_len={max_model_len}{remedy}"
        )


def _unwrapped(module: torch.nn.Module) -> Any:
    """The Hugging Face model inside a wrapper such as a PEFT model."""
    inner: Any = module
    while not hasattr(type(inner), "_supports_attention_backend"):
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif hasattr(inner, "module"):
            inner = inner.module
        else:
            break
    return inner
