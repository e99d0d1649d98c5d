"""What training changes, as named tensors: `module.<parameter>` and `optimizer.<parameter>.<moment or master>`.
With low-rank adapters these are the adapters, and nothing of the frozen base.

The same names in every placement, so that a checkpoint written by any number of ranks loads on any other. Where a
policy is sharded the tensors are shards (DTensor); torch.distributed.checkpoint writes and reads them in parallel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from verl_mt.errors import CheckpointError
from verl_mt.modeling.lora import lora_of
from verl_mt.workers.optimizer import MASTER, names_of_state, state_of
from verl_mt.workers.sharding import model_of

WEIGHTS = "module."
"""What the names of weights begin with."""


def is_weight(name: str) -> bool:
    return name.startswith(WEIGHTS)


def master_of(name: str) -> str:
    """The name of the exact weights, of a weight's name."""
    return f"optimizer.{name.removeprefix(WEIGHTS)}.{MASTER}"


def is_master(name: str) -> bool:
    return not is_weight(name) and name.endswith(f".{MASTER}")


def live_tensors(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """The tensors themselves, not copies: writing into them changes policy and optimizer.

    Args:
        module: the policy, sharded or not.
        optimizer: its AdamW, whose state is made (all zero) where a parameter has none yet; None = weights only.
    """
    parameters = dict(model_of(module).named_parameters())
    kept = all_weights(module)
    if lora_of(model_of(module)) is not None:
        kept = {name: value for name, value in kept.items() if name in parameters and parameters[name].requires_grad}
    live = {f"{WEIGHTS}{name}": value for name, value in kept.items()}
    if optimizer is not None:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                kept = state_of(optimizer, parameter)
                live |= {f"optimizer.{name}.{part}": kept[part] for part in names_of_state(parameter)}
    return live


def all_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, frozen or not, each once: the live tensors by the names of the model."""
    model = model_of(module)
    parameters = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    buffers = {name: value for name, value in model.state_dict().items() if name not in parameters.keys() | tied}
    return {name: value.detach() for name, value in {**parameters, **buffers}.items()}


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Numbers in all parameters, and in those that are trained; over ranks those of the whole policy."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def copy_into(live: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Write whole tensors into `live` ones; every rank keeps its shard.

    Raises:
        CheckpointError: other names or shapes: a checkpoint of another model.
    """
    differing = sorted(live.keys() ^ given.keys()) or [n for n in live if live[n].shape != given[n].shape]
    if differing:
        raise CheckpointError(
            f"the checkpoint is of another model: {len(differing)} tensors differ, among them {differing[0]}. "
            "Resume with the actor_rollout_ref.model.path that the run was started with"
        )
    with torch.no_grad():
        for name, target in live.items():
            target.copy_(_like(given[name], target))


def _like(source: Tensor, target: Tensor) -> Tensor:
    source = source.to(target.device, target.dtype)
    if not hasattr(target, "device_mesh"):
        return source
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole tensor: nothing needs to be sent.
    return distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)  # type: ignore[attr-defined]
