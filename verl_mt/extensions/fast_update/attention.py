"""Attention of packed rows in one call per layer, with torch's own kernel for rows of many lengths.

The call has the segments that `packing.py` has for the package flash-attn: queries are a segment's own tokens, keys
those on the path from the root, and the causal mask is aligned at the end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from verl_mt.errors import ConfigError
from verl_mt.modeling.packing import PackedRows, checked
from verl_mt.modeling.passes import decoder_of

NAME = "verl_mt_packed_varlen"
"""Of the attention function; without packed rows it is SDPA."""
_KEY = "actor_rollout_ref.actor.varlen_attention"


def attend_in_one_call(model: Any, device: torch.device) -> None:
    """Let a Hugging Face model, whose passes are packed, attend so.

    Raises:
        ConfigError: not on CUDA; the kernel is there for no other device.
    """
    if device.type != "cuda":
        raise ConfigError(f"{_KEY}=True needs trainer.device=cuda. Found {device.type}. Remove {_KEY}")
    decoder_of(model).config._attn_implementation = NAME


def varlen_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
) -> Tensor:
    """torch's kernel with the arguments of flash-attn's `flash_attn_varlen_func`.

    Args:
        q: [tokens, heads, head dimension].
        k, v: the same, with perhaps fewer heads, which divide those of `q`.
        cu_seqlens_q, cu_seqlens_k: int32 [segments + 1], where each segment's queries and keys begin.
        max_seqlen_q, max_seqlen_k: tokens of the longest.
        dropout_p: must be 0.
        softmax_scale: of the scores; None = 1 / sqrt(head dimension).
        causal: the last query of a segment sees all of its keys.
    """
    assert dropout_p == 0.0, "the policy is trained without dropout"
    window = (-1, 0) if causal else (-1, -1)
    found: Any = varlen_attn(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=softmax_scale, window_size=window,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return found


def packed_varlen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that a model's layers call.

    Raises:
        ValueError: the model's attention has a term that packed rows do not compute.
    """
    rows: PackedRows | None = kwargs.pop("packed_rows", None)
    if rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    attend = partial(rows.attend_flash, kernel=varlen_kernel)
    return rows.exchanged(attend, query, key, value, *checked(module, kwargs)), None


AttentionInterface.register(NAME, packed_varlen_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
