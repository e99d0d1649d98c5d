"""Random models for benchmarks, on disk with the shipped tokenizer, so that every engine loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "micro": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1, "head_dim": 32},
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64},
    "medium": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64},
    "large": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "head_dim": 64},
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": 64,
        "num_key_value_heads": 3, "vocab_size": 49152,
    },
}  # fmt: skip
"""`tiny` is the shipped model's (0.9 M parameters), `small` has 5 M, `medium` 26 M, `large` 152 M; `micro` is
one layer of `tiny`; `smollm2` is SmolLM2-135M's shape."""
VOCAB = 768


def make_model(size: str = "tiny", max_positions: int = 1024) -> Any:
    """A random Qwen3 in float32, which never ends a turn by itself."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = SIZES[size]["hidden_size"] // SIZES[size]["head_dim"]
    shape: dict[str, Any] = {"vocab_size": VOCAB, "num_key_value_heads": heads // 2, **SIZES[size]}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = Qwen3Config(
        max_position_embeddings=max_positions,
        num_attention_heads=heads,
        tie_word_embeddings=True,
        # Distributions far from flat at either size: a mistake would show.
        initializer_range=0.2 * (128 / shape["hidden_size"]) ** 0.5,
        **shape,
        **ends,
    )
    return Qwen3ForCausalLM(config).eval()


def save(model: Any, folder: Path) -> str:
    """A model folder that SGLang loads; returns its path. The tokenizer is the shipped one, which has such ids."""
    from transformers import AutoTokenizer

    from verl_mt.config_paths import resolve_model_path

    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model_path("verl_mt://tiny")).save_pretrained(folder)
    return str(folder)
