"""The processes that train one policy together, and how they share a batch.

Every rank holds the whole batch: ids and masks are small beside weights and activations. So shuffles, denominators,
which rows are skipped and who takes which row are pure functions of the batch that every rank works out for itself;
what is exchanged is gradients, a few numbers, and the log-probs that each rank computed for its rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """One rank's view of its group, the default process group of torch.distributed; one rank needs none."""

    rank: int = 0
    size: int = 1

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total

    def merge(self, values: Tensor) -> Tensor:
        """What any rank computed; NaN = not computed here. Where several did, their mean."""
        if self.size == 1:
            return values
        known = ~torch.isnan(values)
        count = self.sum(known.to(values.dtype))
        total = self.sum(torch.where(known, values, torch.zeros_like(values)))
        return torch.where(count > 0, total / count.clamp(min=1), torch.full_like(values, torch.nan))

    def gather(self, value: Any) -> list[Any]:
        """A small picklable object of every rank, in their order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def shares(self, costs: Sequence[int]) -> list[list[int]]:
        """Who takes what: the items of each rank, in ascending order. Fewer items than ranks leave some with none.

        The most expensive item left goes to the rank with the least so far (Graham 1969: the largest share is at most
        4/3 - 1/(3 size) of the best possible one; with many items of like cost it is much closer).

        Args:
            costs: of each item; tokens, as a rule.
        """
        load = [(0, rank) for rank in range(self.size)]
        taken: list[list[int]] = [[] for _ in range(self.size)]
        for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            cost, rank = heapq.heappop(load)
            taken[rank].append(item)
            heapq.heappush(load, (cost + costs[item], rank))
        return [sorted(items) for items in taken]


ALONE = Ranks()
"""A policy in one process."""
