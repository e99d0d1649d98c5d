"""Tiny random checkpoints of model families, written by transformers as their makers' tools write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 1024
"""More than the tokenizer of the tiny model has, which engines of these models are given."""
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # as vLLM's attention on a CPU wants it
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
TEXT: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3": {},
    "Qwen3Moe": _EXPERTS,
    "Qwen3Next": {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 32},
    "Gemma2": {},
    "Gemma3Text": {},
    "Phi3": {"pad_token_id": 0},
    "Olmo2": {},
    "Olmo3": {},
    "Glm4": {},
    "Glm4Moe": {**_ROUTED, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        **_ROUTED,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 32,  # all three as vLLM's kernels on a CPU want them
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "noaux_tc",  # as in the makers' files; transformers does not read it
    },
    "Granite": {},
    "SmolLM3": {"pad_token_id": 0},
    "Starcoder2": {},
}
"""Name of the family in transformers -> what its configuration has beside the sizes."""
_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_DEEP_VISION = {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"text_config": {**_SIZES, **_LINEAR}, "vision_config": _DEEP_VISION},
    "Qwen3_5Moe": {
        "text_config": {**_SIZES, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32},
        "vision_config": _DEEP_VISION,
    },
    "Qwen2_5_VL": {
        "text_config": {**_SIZES, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    },
    "Qwen3VL": {"text_config": {**_SIZES, "rope_parameters": _MROPE}, "vision_config": _DEEP_VISION},
    "Qwen3VLMoe": {
        "text_config": {**_SIZES, **_EXPERTS, "rope_parameters": _MROPE},
        "vision_config": _DEEP_VISION,
    },
    "Mistral3": {
        "text_config": {**_SIZES, "model_type": "mistral"},
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 32,
            "patch_size": 4,
        },
    },
    "Glm4v": {
        "text_config": {**_SIZES, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "image_size": 32, "out_hidden_size": 128},
    },
    "Gemma3": {
        "text_config": _SIZES,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
    },
}
"""The same of models with a vision tower."""


def write(family: str, folder: Path) -> Path:
    """A checkpoint of that family, without a tokenizer."""
    torch.manual_seed(0)
    if family in TEXT:
        config = getattr(transformers, f"{family}Config")(**{**_SIZES, **TEXT[family]})
        kind = _CLASSES.get(family, f"{family}ForCausalLM")
    else:
        config = getattr(transformers, f"{family}Config")(**MULTIMODAL[family], tie_word_embeddings=False)
        kind = f"{family}ForConditionalGeneration"
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder
