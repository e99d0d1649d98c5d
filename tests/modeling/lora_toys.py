"""A small random model with adapters that change what it says."""

from __future__ import annotations

from typing import Any

import torch

from verl_mt.config.actor import ModelConfig
from verl_mt.modeling.lora import add_adapters


def small_model(architecture: str = "Qwen3", seed: int = 0, **changes: Any) -> Any:
    """A random decoder of that family, not flat."""
    import transformers

    sizes = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{architecture}ForCausalLM")(config).eval()


def adapted(model: Any, *, rank: int = 4, alpha: int = 16, targets: tuple[str, ...] = ("all-linear",)) -> Any:
    """The model with adapters, B no longer 0."""
    config = ModelConfig(lora_rank=rank, lora_alpha=alpha, lora_target_modules=list(targets))
    model = add_adapters(model, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model
