"""Process groups of a sender of weights (rank 0) and engines, beside those that either side has already."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def open_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Where the members meet; the port is taken here, and the others are told which one it is.

    Args:
        address: of this machine, as the others reach it.
        timeout_s: of waiting for them.
    """
    return dist.TCPStore(address, 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join_as_first(store: dist.Store, name: Any, world_size: int, backend: str, timeout_s: float) -> Any:
    """The group, once all others have joined it; this process is its rank 0.

    Args:
        backend: `gloo`, or `nccl` where both sides have GPUs.
        timeout_s: of joining, and of each collective.
    """
    # torch makes groups only within a default group, which engines have no part in; what it has for this is private.
    # SGLang does the same on its side, with the same names in the store.
    group, _ = dist.distributed_c10d._new_process_group_helper(
        world_size,
        0,
        [],
        dist.distributed_c10d.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=timeout_s),
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
