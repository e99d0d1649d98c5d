"""The processes (ranks) that train one policy together: how they share a batch, and how the policy is spread over them.

Every rank has its own rows of a batch, and a few numbers of all rows (rank_batch.py). Ranks exchange gradients, a few
numbers, and the tensors from which a loss decides over a mini-batch.

Parameters, gradients and optimizer state are spread with FSDP2 (`fully_shard`).
Each decoder layer is gathered just before it runs and freed behind it; embeddings, last norm and head are
gathered for the whole pass. With `shard` they are spread over fewer ranks, and every such group has the whole policy
(HSDP): layers are gathered within a group, and gradients are added up over the groups once per update. With
`Ranks.sequence` that many ranks share each row (modeling/sequence_parallel.py).

Forward and backward passes are collective: all ranks must run the same number of them, through the same layers in the
same order. Hence two rules: a rank that has no rows left runs dummies (`dummy_pass`), and prefixes are shared between
rows only where these are packed, which is one pass; the other way of sharing runs the layers as often as a rank's own
rows want it. How rows pass is set before a policy is sharded (`use_passes`).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_mt.errors import ConfigError
from verl_mt.modeling.exact import remember_exact, take_exact
from verl_mt.modeling.log_probs import LogProbs, forward_log_probs
from verl_mt.modeling.passes import forbid_packing, forbid_whole_rows, passes_of, use_passes
from verl_mt.modeling.sequence_parallel import SequenceGroup
from verl_mt.modeling.shared_prefix import forbid_sharing
from verl_mt.modeling.values import hidden_before


@dataclass(frozen=True)
class Ranks:
    """One rank's view of its group, the default process group of torch.distributed; one rank needs none."""

    rank: int = 0
    size: int = 1
    sequence: int = 1
    """Neighbouring ranks that share each sequence; they take the same rows."""

    @property
    def num_parts(self) -> int:
        """In how many parts rows are dealt out."""
        return self.size // self.sequence

    @property
    def part(self) -> int:
        """This rank's."""
        return self.rank // self.sequence

    @property
    def counts(self) -> bool:
        """Of the ranks that work on the same rows one alone says what came out, where it is summed."""
        return self.rank % self.sequence == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each. Runs in every rank. Waits for all ranks."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        """A small picklable object of every rank, in their order. Runs in every rank. Waits for all ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def shares(self, costs: Sequence[int]) -> list[list[int]]:
        """Who takes what: the items of each part, in ascending order. Fewer items than parts leave some with none.

        The most expensive item left goes to the rank with the least so far (Graham 1969: the largest share is at most
        4/3 - 1/(3 num_parts) of the best possible one; with many items of like cost it is much closer).

        Args:
            costs: of each item; tokens, as a rule.
        """
        load = [(0, part) for part in range(self.num_parts)]
        taken: list[list[int]] = [[] for _ in range(self.num_parts)]
        for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            cost, part = heapq.heappop(load)
            taken[part].append(item)
            heapq.heappush(load, (cost + costs[item], part))
        return [sorted(items) for items in taken]


ALONE = Ranks()
"""A policy in one process."""


class ShardedPolicy(nn.Module):
    """A causal language model over several ranks. `forward` is `forward_log_probs` of this rank's rows.

    Args:
        model: a Hugging Face causal language model on the CPU; its parameters become shards. The weights are rank 0's;
            on other ranks they may be empty memory.
        ranks: the group, with torch.distributed initialised.
        device_type: where shards and passes live, `cpu` or `cuda` (this process's current device).
        offload: keep the shards in CPU memory and copy them to the device layer by layer (cuda only).
        shard: ranks that parameters are spread over, a divisor of the group's size, or at least as many; None = all.

    Raises:
        ConfigError: rows that cannot be packed, where ranks are to share them; or more such ranks than heads.
    """

    def __init__(self, model: Any, ranks: Ranks, *, device_type: str, offload: bool = False, shard: int | None = None):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        super().__init__()
        self.model = model
        self.ranks = ranks
        forbid_sharing(model)
        forbid_packing(model)
        if ranks.sequence > 1:
            _share_sequences(model, ranks, device_type)
        mesh = _mesh(device_type, ranks.size, shard)
        self._replicated = mesh.ndim > 1
        # `fully_shard` replaces the parameters by shards that each rank cuts out of its own memory, which is empty on
        # all but rank 0. So the whole weights are kept aside and dealt out behind it.
        weights = [parameter.detach() for parameter in model.parameters()]
        exact = [take_exact(parameter) for parameter in model.parameters()]
        policy = CPUOffloadPolicy() if offload and device_type == "cuda" else OffloadPolicy()
        layer_names = set(getattr(model, "_no_split_modules", None) or ())
        parts = [m for m in model.modules() if type(m).__name__ in layer_names]
        wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        precision = MixedPrecisionPolicy(reduce_dtype=wide)
        for part in [*parts, self]:
            sharded = fully_shard(part, mesh=mesh, offload_policy=policy, mp_policy=precision)
            # Denominators of the loss are global already: gradients are added up, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        _deal_out(model, weights, exact, ranks)

    def forward(self, *args: Any, hidden: bool = False, **kwargs: Any) -> Any:
        """Log-probs and entropies; or with `hidden` the result of `hidden_before`."""
        if hidden:
            return hidden_before(self.model, *args, **kwargs)
        output = forward_log_probs(self.model, *args, **kwargs)
        return output.log_probs_BT, output.entropy_BT  # FSDP finds tensors in tuples, not in a dataclass

    def expect_backward(self, *, last: bool) -> None:
        """To be called before a backward pass. Behind the `last` of an update gradients are added up over the groups
        that each have the whole policy; until then each keeps its own. Runs in every rank and waits for nothing."""
        if self._replicated:
            cast(Any, self).set_requires_all_reduce(last)  # fully_shard added the method


class ShardedCritic(ShardedPolicy):
    """A `ValueModel` over several ranks. `forward` is its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(*args, **kwargs)


@functools.cache
def _mesh(device_type: str, size: int, shard: int | None) -> Any:
    """Of all ranks; with `shard` of (groups that each have the whole policy, ranks of a group)."""
    from torch.distributed.device_mesh import init_device_mesh

    if shard is None or shard >= size:
        return init_device_mesh(device_type, (size,))
    return _patient(init_device_mesh(device_type, (size // shard, shard), mesh_dim_names=("replicate", "shard")))


@functools.cache
def _sequence_group(device_type: str, size: int, sequence: int) -> Any:
    """The process group of the ranks that share sequences with this one."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, (size // sequence, sequence), mesh_dim_names=("rows", "sequence"))
    return _patient(mesh).get_group("sequence")


def _patient(mesh: Any) -> Any:
    """The mesh, whose groups wait for a rank as long as the group of all ranks does (`trainer.worker_timeout_s`): torch
    gives groups that a mesh makes its own default."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    device = torch.device(mesh.device_type)
    limit = cast(Any, dist.group.WORLD)._get_backend(device).options._timeout
    for group in mesh.get_all_groups():
        _set_pg_timeout(limit, group)
    return mesh


def _share_sequences(model: Any, ranks: Ranks, device_type: str) -> None:
    group = _sequence_group(device_type, ranks.size, ranks.sequence)
    sequence = SequenceGroup(group, ranks.rank % ranks.sequence, ranks.sequence)
    sequence.heads(model.config.get_text_config().num_attention_heads)
    use_passes(model, replace(passes_of(model), sequence=sequence))
    if not passes_of(model).packed:
        forbid_whole_rows(model)


@torch.no_grad()
def _deal_out(model: Any, weights: list[Tensor], exact: list[Tensor | None], ranks: Ranks) -> None:
    """Give every rank its shards of rank 0's weights, and of their exact values where it knows them, one parameter at a
    time; and rank 0's buffers. Runs in every rank. Waits for all ranks."""
    known = ranks.gather([values is not None for values in exact])[0]
    for number, parameter in enumerate(model.parameters()):
        # One at a time, and let go at once: rank 0 holds the whole model only on the CPU, and no device ever does.
        parameter.to_local().copy_(_dealt(weights[number], parameter).to_local())
        if known[number]:
            values = exact[number]
            values = torch.empty_like(weights[number], dtype=torch.float32) if values is None else values
            remember_exact(parameter, _dealt(values, parameter))
        weights[number], exact[number] = torch.empty(0), None
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def _dealt(value: Tensor, parameter: Any) -> Any:
    """Rank 0's tensor, spread as the parameter is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def ranks_of(module: nn.Module) -> Ranks:
    """The ranks that a policy is spread over."""
    return module.ranks if isinstance(module, ShardedPolicy) else ALONE


def model_of(module: nn.Module) -> Any:
    """The Hugging Face model, whose parameters may be shards."""
    return module.model if isinstance(module, ShardedPolicy) else module


def packs(module: nn.Module) -> bool:
    """Whether rows of text go through the policy without padding."""
    return passes_of(model_of(module)).packed


def score(module: nn.Module, *args: Any, **kwargs: Any) -> LogProbs:
    """`forward_log_probs` of a policy in one process or of a sharded one; collective for the latter."""
    if not isinstance(module, ShardedPolicy):
        return forward_log_probs(module, *args, **kwargs)
    if any(row.inputs for row in kwargs.pop("media", None) or ()):
        raise ConfigError(
            "images and videos are trained on one rank: every rank would have to run the vision layers equally often. "
            "Set trainer.placement=inline, or one worker"
        )
    output = LogProbs(*module(*args, **kwargs))
    if not torch.is_grad_enabled():
        cast(Any, module).reshard()  # fully_shard added the method; no backward pass is going to do it
    return output


def hidden_states(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """`hidden_before` of a policy in one process or of a sharded one, without gradient; collective for the latter."""
    if not isinstance(module, ShardedPolicy):
        return hidden_before(module, *args, **kwargs)[0]
    states, own = module(*args, hidden=True, **kwargs)
    cast(Any, module).reshard()
    if own is None:
        forbid_whole_rows(module.model)
    return states if own is None else own.everyone(states)


def expect_backward(module: nn.Module, *, last: bool) -> None:
    """See `ShardedPolicy.expect_backward`; nothing for a policy in one process."""
    if isinstance(module, ShardedPolicy):
        module.expect_backward(last=last)


def dummy_pass(module: nn.Module, device: torch.device) -> None:
    """Take part in one pass of the others without a row; adds 0 to every gradient."""
    ids = torch.ones(1, 2, dtype=torch.int64, device=device)
    wanted = torch.tensor([[False, True]], device=device)
    output = score(module, ids, torch.ones_like(ids), wanted_BT=wanted, temperature=1.0)
    if torch.is_grad_enabled():
        (output.log_probs_BT.sum() * 0.0).backward()


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards gathered; collective if it is sharded, else the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
