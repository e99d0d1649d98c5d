"""Gradient checkpointing that recomputes what is cheap: all but matrix products and attention.

Whole layers cost a second forward pass, about a third more time. Norms, rotary embeddings and activations are most of
what a layer keeps and little of its arithmetic (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_PRODUCTS = {"aten::mm", "aten::addmm"}


def recompute_elementwise(model: Any) -> None:
    """Switch gradient checkpointing of a Hugging Face model on, or to this, for its passes in training mode."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})


def _policy(context: Any, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition(".")[0]
    keeps = name in _PRODUCTS or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
