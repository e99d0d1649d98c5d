"""What the ranks of a `RankPool` run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from actor_toys import lora_policy, tiny_policy, worker
from tensordict import TensorDict

from verl_mt.config.actor import RefConfig
from verl_mt.config.options import read_rollout_correction
from verl_mt.data import batch as col
from verl_mt.engines.base import Receiver
from verl_mt.extensions.cluster.workers.rank_worker import RankWorker
from verl_mt.modeling.lora import is_adapter
from verl_mt.modeling.passes import Passes, use_passes
from verl_mt.workers import sharding
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.critic import CriticWorker
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.rollout_correction import RolloutCorrection
from verl_mt.workers.setup import WorkerSetup, load_workers
from verl_mt.workers.sharded_checkpoint import save_shards
from verl_mt.workers.sharding import Ranks, ShardedCritic, ShardedPolicy, model_of, whole
from verl_mt.workers.state import live_tensors
from verl_mt.workers.worker_group import Publication

PACKED, SHARED = Passes(packed=True, share_prefixes=False), Passes(packed=True, share_prefixes=True)


def sharded_worker(
    ranks: Ranks,
    *,
    checkpointing: bool = False,
    dtype: torch.dtype = torch.float32,
    lora_rank: int = 0,
    passes: Passes = SHARED,
    policy: Callable[[], Any] = tiny_policy,
    **kwargs: Any,
) -> ActorWorker:
    """The same worker as `actor_toys.worker`, over the ranks; `sequence` of them share each row, `shard` the policy."""
    sequence, shard = kwargs.pop("sequence", 1), kwargs.pop("shard", None)
    module = lora_policy(lora_rank, dtype) if lora_rank else copy.deepcopy(policy()).to(dtype)
    if checkpointing:
        module.gradient_checkpointing_enable()
    if ranks.size == 1:
        return worker(module, **kwargs)
    if ranks.rank:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.zero_()  # only what rank 0 has counts
    use_passes(module, passes)
    ranks = replace(ranks, sequence=sequence)
    return worker(ShardedPolicy(module, ranks, device_type="cpu", shard=shard), **kwargs)


def gradients(actor: ActorWorker) -> dict[str, torch.Tensor]:
    """Whole gradients by parameter name; collective."""
    return {n: whole(p.grad).clone() for n, p in model_of(actor.module).named_parameters() if p.grad is not None}


def one_update(
    ranks: Ranks,
    batch: TensorDict,
    *,
    correction: dict[str, Any] | None = None,
    keep_weights: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Gradients just before the optimizer's step, metrics, old log-probs and, with `keep_weights`, the new weights."""
    actor = sharded_worker(ranks, **kwargs)
    if correction:
        actor.loss.correction = RolloutCorrection(read_rollout_correction(correction))
    seen: list[dict[str, torch.Tensor]] = []
    actor.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(actor)))
    metrics = actor.update(batch)
    named = model_of(actor.module).named_parameters() if keep_weights else ()
    weights = {n: whole(p.detach()).clone() for n, p in named}
    own_bytes = sum(
        (p.to_local() if hasattr(p, "to_local") else p).numel() * p.element_size() for p in actor.module.parameters()
    )
    state_bytes = sum(
        (t.to_local() if hasattr(t, "to_local") else t).numel() * t.element_size()
        for state in actor.optimizer.state.values()
        for t in state.values()
    )
    return {
        "gradients": seen,
        "metrics": metrics,
        "old": batch[col.OLD_LOG_PROBS],
        "weights": weights,
        "bytes": (own_bytes, state_bytes),
    }


def train_and_save(ranks: Ranks, batches: list[TensorDict], folder: Path, **kwargs: Any) -> dict[str, Any]:
    """A few updates, then a sharded checkpoint. Returns the small part of the state and all tensors, whole."""
    actor = sharded_worker(ranks, **kwargs)
    for batch in batches:
        actor.update(batch)
    save_shards(actor.tensors(), folder)
    return {**actor.progress(), "tensors": {name: whole(t).clone() for name, t in actor.tensors().items()}}


def digests_of_save(ranks: Ranks, folder: Path) -> dict[str, str]:
    """What this rank says of the files that it wrote."""
    return save_shards(sharded_worker(ranks).tensors(), folder)


def load_and_train(
    ranks: Ranks, state: dict[str, Any], folder: Path | None, batches: list[TensorDict], **kwargs: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All tensors behind the load, and behind further updates."""
    actor = sharded_worker(ranks, **kwargs)
    actor.load_checkpoint(state, folder, "actor")
    loaded = {name: whole(t).clone() for name, t in actor.tensors().items()}
    for batch in batches:
        actor.update(batch)
    return loaded, {name: whole(t).clone() for name, t in actor.tensors().items()}


def log_probs(ranks: Ranks, batch: TensorDict) -> torch.Tensor:
    return sharded_worker(ranks).compute_log_probs(batch)


def lora_reference(ranks: Ranks, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor, set[bool]]:
    """Reference log-probs before and behind an update, and whether adapters still want gradients."""
    actor = sharded_worker(ranks, lora_rank=4, use_kl_loss=True)
    ref = RefWorker(actor.module, RefConfig(), actor=actor.config, temperature=1.0)
    before = ref.compute_log_probs(batch)
    actor.update(batch)
    named = model_of(actor.module).named_parameters()
    return before, ref.compute_log_probs(batch), {p.requires_grad for name, p in named if is_adapter(name)}


def merged_weights(ranks: Ranks) -> dict[str, torch.Tensor] | None:
    """All that leaves for an engine, through the calls that a driver makes."""
    rank = RankWorker.__new__(RankWorker)
    rank.actor, rank._ranks = sharded_worker(ranks, lora_rank=4), ranks
    count = len(rank._buckets())
    packed = [rank.bucket(number, True) for number in range(count)]
    if ranks.rank:
        return None
    return {name: p.tensor() for bucket in packed if bucket is not None for name, p in bucket.items()}


def published_adapters(ranks: Ranks) -> dict[str, torch.Tensor]:
    """What rank 0 publishes to an engine that has the base weights; the others take part in gathering it."""
    rank, got = RankWorker.__new__(RankWorker), {}
    rank.actor, rank.critic, rank._ranks = sharded_worker(ranks, lora_rank=4), None, ranks

    class Keeps:
        def publish(self, tensors: Any, *_: Any) -> list[None]:
            got.update((name, tensor.clone()) for name, tensor in tensors)
            return [None]

    rank._publisher = lambda update: Keeps()  # type: ignore[method-assign, assignment, return-value]
    rank.publish(Publication(1, "", (), 8, adapters=True), {0: [Receiver(print)]})
    return got


def patience_of_groups(ranks: Ranks, **kwargs: Any) -> tuple[timedelta, list[timedelta]]:
    """How long the group of all ranks waits, and each that a policy's meshes have made, by what torch keeps of it."""
    import torch.distributed as dist

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1234), dist.group.WORLD)
    sharding._mesh.cache_clear()
    sharding._sequence_group.cache_clear()
    known = set(dist.distributed_c10d._world.pg_map)
    actor = sharded_worker(ranks, **kwargs)
    groups = [dist.group.WORLD, *(g for g in dist.distributed_c10d._world.pg_map if g not in known)]
    limits = [g._get_backend(torch.device("cpu")).options._timeout for g in groups]
    del actor
    return limits[0], limits[1:]


def reduced_types(ranks: Ranks, batch: TensorDict, **kwargs: Any) -> set[torch.dtype]:
    """In what precision the ranks add up gradients, by what torch.distributed is given."""
    import torch.distributed as dist

    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    seen, original = set(), getattr(dist, name)

    def noted(*args: Any, **options: Any) -> Any:
        seen.update(x.dtype for x in (*args, *options.values()) if isinstance(x, torch.Tensor))
        return original(*args, **options)

    setattr(dist, name, noted)
    try:
        sharded_worker(ranks, **kwargs).update(batch)
    finally:
        setattr(dist, name, original)
    return seen


def reference(ranks: Ranks, batch: TensorDict, **kwargs: Any) -> torch.Tensor:
    """A reference policy's log-probs [B, T]."""
    actor = sharded_worker(ranks, **kwargs)
    return RefWorker(actor.module, RefConfig(), actor=actor.config, temperature=1.0).compute_log_probs(batch)


def critic_gradients(
    ranks: Ranks, batch: TensorDict, **kwargs: Any
) -> tuple[torch.Tensor, dict[str, float], dict[str, torch.Tensor]]:
    """Values, metrics of an update, and whole gradients before its step, which are not clipped."""
    worker = sharded_critic(ranks, grad_clip=0.0, **kwargs)
    values, seen = worker.compute_values(batch), []
    named = [*worker.module.named_parameters()]
    worker.optimizer.register_step_pre_hook(
        lambda *_: seen.append({name: whole(p.grad).clone() for name, p in named if p.grad is not None})
    )
    metrics = worker.update(batch)
    return values, metrics, {name.removeprefix("model."): grad for name, grad in seen[0].items()}


def sharded_critic(
    ranks: Ranks,
    *,
    shared: bool = False,
    sequence: int = 1,
    passes: Passes | None = None,
    policy: Callable[[], Any] = tiny_policy,
    **kwargs: Any,
) -> CriticWorker:
    """The same critic as `critic_toys.critic`, over the ranks."""
    from critic_toys import critic, value_head, value_model

    ranks = replace(ranks, sequence=sequence)
    if shared:
        trunk = copy.deepcopy(policy())
        if passes is not None:
            use_passes(trunk, passes)
        return critic(
            value_head(width=trunk.config.hidden_size),
            policy=trunk if ranks.size == 1 else ShardedPolicy(trunk, ranks, device_type="cpu"),
            **kwargs,
        )
    model = value_model(policy())
    if passes is not None:
        use_passes(model, passes)
    if ranks.rank:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.zero_()  # only what rank 0 has counts
    return critic(model if ranks.size == 1 else ShardedCritic(model, ranks, device_type="cpu"), **kwargs)


def train_critic(
    ranks: Ranks, batches: list[TensorDict], folder: Path | None = None, **kwargs: Any
) -> tuple[torch.Tensor, list[dict[str, float]], dict[str, Any]]:
    """Values before, metrics of each update, and the state behind them: whole tensors; saved as shards, if asked to."""
    worker = sharded_critic(ranks, **kwargs)
    values = worker.compute_values(batches[0])
    metrics = [worker.update(batch) for batch in batches]
    if folder is not None:
        save_shards(worker.tensors(), folder, "critic")
    return values, metrics, {**worker.progress(), "tensors": {n: whole(t).clone() for n, t in worker.tensors().items()}}


def resume_critic(ranks: Ranks, state: dict[str, Any], folder: Path | None, **kwargs: Any) -> dict[str, torch.Tensor]:
    """All tensors behind the load of a checkpoint, of shards or whole."""
    worker = sharded_critic(ranks, **kwargs)
    worker.load_checkpoint(state, folder, "critic")
    return {n: whole(t).clone() for n, t in worker.tensors().items()}


def two_updates(ranks: Ranks, batches: list[TensorDict], **kwargs: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Weights behind an update of each batch, as the trainer does it: log-probs, the update, a rollout, a checkpoint's
    tensors. And the bytes of this rank's weights while it waits, after each."""
    actor = sharded_worker(ranks, **kwargs)
    waiting = []
    for batch in batches:
        actor.offload()
        local = (p.to_local() if hasattr(p, "to_local") else p for p in actor.module.parameters())
        waiting.append(sum(tensor.untyped_storage().nbytes() for tensor in local))
        actor.onload()
        actor.compute_log_probs(batch)
        actor.update(batch)
    return {n: whole(p.detach()).clone() for n, p in model_of(actor.module).named_parameters()}, waiting


def update_of_a_share(
    ranks: Ranks, shares: list[RankBatch], *, correction: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """`one_update` on what a driver sent to this rank alone."""
    actor = sharded_worker(ranks, **kwargs)
    if correction:
        actor.loss.correction = RolloutCorrection(read_rollout_correction(correction))
    seen: list[dict[str, torch.Tensor]] = []
    actor.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(actor)))
    metrics, filled = actor.train(replace(shares[actor.ranks.part], ranks=actor.ranks))
    return {
        "gradients": seen[0],
        "metrics": metrics,
        "filled": filled,
        "correction": actor.loss.correction,
        "weights": {n: whole(p.detach()).clone() for n, p in model_of(actor.module).named_parameters()},
    }


def first_masters(ranks: Ranks, setup: WorkerSetup) -> dict[str, dict[str, torch.Tensor]]:
    """Actor's and critic's tensors as they are when the optimizer is about to step for the first time, whole."""
    actor, _, critic = load_workers(setup, ranks)
    live = {who.__class__.__name__: live_tensors(who.module, who.optimizer) for who in (actor, critic) if who}
    return {who: {name: whole(t).clone() for name, t in tensors.items()} for who, tensors in live.items()}
