"""A policy whose parameters, gradients and optimizer state are spread over ranks with FSDP2 (`fully_shard`).

Each decoder layer is gathered just before it runs and given back behind it; embeddings, last norm and head are
gathered for the whole pass. Forward and backward passes are collective: all ranks must run the same number of them,
through the same layers in the same order. Hence two rules: a rank that has no rows left runs dummies (`dummy_pass`),
and prefixes are not shared between rows (how often the layers run would depend on a rank's own rows); what that costs
is in docs/scaling.md.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from verl_mt.modeling.log_probs import LogProbs, forward_log_probs
from verl_mt.modeling.shared_prefix import forbid_sharing
from verl_mt.workers.ranks import ALONE, Ranks


class ShardedPolicy(nn.Module):
    """A causal language model over several ranks. `forward` is `forward_log_probs` of this rank's rows.

    Args:
        model: a whole Hugging Face causal language model, the same on every rank; its parameters become shards.
        ranks: the group, with torch.distributed initialised.
        device_type: where shards and passes live, `cpu` or `cuda` (this process's current device).
        offload: keep the shards in CPU memory and copy them to the device layer by layer (cuda only).
    """

    def __init__(self, model: Any, ranks: Ranks, *, device_type: str, offload: bool = False):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        super().__init__()
        self.model = model
        self.ranks = ranks
        forbid_sharing(model)
        mesh = init_device_mesh(device_type, (ranks.size,))
        policy = CPUOffloadPolicy() if offload and device_type == "cuda" else OffloadPolicy()
        layer_names = set(getattr(model, "_no_split_modules", None) or ())
        parts = [m for m in model.modules() if type(m).__name__ in layer_names]
        for part in [*parts, self]:
            sharded = fully_shard(part, mesh=mesh, offload_policy=policy)
            # Denominators of the loss are global already: gradients are added up, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output = forward_log_probs(self.model, *args, **kwargs)
        return output.log_probs_BT, output.entropy_BT  # FSDP finds tensors in tuples, not in a dataclass


def ranks_of(module: nn.Module) -> Ranks:
    """The ranks that a policy is spread over."""
    return module.ranks if isinstance(module, ShardedPolicy) else ALONE


def model_of(module: nn.Module) -> Any:
    """The Hugging Face model, whose parameters may be shards."""
    return module.model if isinstance(module, ShardedPolicy) else module


def score(module: nn.Module, *args: Any, **kwargs: Any) -> LogProbs:
    """`forward_log_probs` of a policy in one process or of a sharded one; collective for the latter."""
    if not isinstance(module, ShardedPolicy):
        return forward_log_probs(module, *args, **kwargs)
    output = LogProbs(*module(*args, **kwargs))
    if not torch.is_grad_enabled():
        cast(Any, module).reshard()  # fully_shard added the method; no backward pass is going to do it
    return output


def dummy_pass(module: nn.Module, device: torch.device) -> None:
    """Take part in one pass of the others without a row of one's own; adds 0 to every gradient."""
    ids = torch.ones(1, 2, dtype=torch.int64, device=device)
    wanted = torch.tensor([[False, True]], device=device)
    output = score(module, ids, torch.ones_like(ids), wanted_BT=wanted, temperature=1.0)
    if torch.is_grad_enabled():
        (output.log_probs_BT.sum() * 0.0).backward()


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards gathered; collective if it is sharded, else the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
