"""Which rows of a rollout batch a rank has, and what it knows of the others.

A rank has its rows' tokens, and a few numbers of every row (`BatchStats`). Each rank computes shuffles,
denominators, skipped rows and the number of passes from these numbers. What a loss decides from the tokens of other
ranks' rows is gathered in CPU memory on request (`together`).

Shape suffixes here and in the workers: `B` rows of the whole batch, `b` of this rank, `T` tokens of its longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.data import batch as columns
from verl_mt.workers.sharding import ALONE, Ranks


@dataclass(frozen=True)
class BatchStats:
    """A few numbers of every row of a batch, on the CPU."""

    width: int
    """Tokens of the longest row, padding that all rows have included."""
    num_tokens_B: Tensor
    num_in_loss_B: Tensor
    num_sampled_B: Tensor
    """Those in the loss that the engine produced."""
    moves_B: Tensor
    """bool; a token of the loss has an advantage."""
    has_log_probs_B: Tensor
    prompt_B: Tensor
    trajectory_B: Tensor
    weighed_B: Tensor
    """Rows of one number weigh in the loss as one sequence."""
    part_B: Tensor
    """Who has the row: the ranks of this part."""

    @classmethod
    def of(cls, batch: TensorDict) -> BatchStats:
        """Of a batch that one part has whole. A critic's need not say what was sampled: then all of the loss was."""
        in_loss_BT = batch[columns.LOSS_MASK]
        sampled_BT = in_loss_BT & batch.get(columns.SAMPLED, in_loss_BT)
        advantages_BT = batch.get(columns.ADVANTAGES, None)
        moves_BT = torch.zeros_like(in_loss_BT) if advantages_BT is None else in_loss_BT & (advantages_BT != 0)
        found = {
            "num_tokens_B": batch[columns.ATTENTION_MASK].sum(1),
            "num_in_loss_B": in_loss_BT.sum(1),
            "num_sampled_B": sampled_BT.sum(1),
            "moves_B": moves_BT.any(1),
            "has_log_probs_B": batch.get(columns.HAS_LOG_PROBS, sampled_BT.any(1)),
            "prompt_B": batch[columns.PROMPT_INDEX],
            "trajectory_B": batch[columns.TRAJECTORY_INDEX],
            "weighed_B": columns.weighed_together(batch),
            "part_B": torch.zeros(len(batch), dtype=torch.int64),
        }
        return cls(in_loss_BT.shape[1], **{name: values.cpu() for name, values in found.items()})

    def __len__(self) -> int:
        return len(self.part_B)

    def dealt(self, ranks: Ranks, kind_B: Tensor) -> BatchStats:
        """With every row assigned to a part, so that each has about as many tokens of each kind of row.

        Args:
            ranks: the group.
            kind_B: int64; rows that pass at the same time are of one kind.
        """
        part_B = torch.empty_like(self.part_B)
        load = [0] * ranks.num_parts
        for kind in torch.unique(kind_B):
            rows = (kind_B == kind).nonzero().squeeze(1)
            shares = ranks.shares(self.num_tokens_B[rows].tolist())
            # Who got least so far gets the largest rank_batch.
            costs = [int(self.num_tokens_B[rows[share]].sum()) for share in shares]
            largest_first = sorted(range(len(shares)), key=lambda k: (-costs[k], k))
            least_first = sorted(range(len(shares)), key=lambda part: (load[part], part))
            for k, part in zip(largest_first, least_first):
                part_B[rows[shares[k]]] = part
                load[part] += costs[k]
        return replace(self, part_B=part_B)


@dataclass(frozen=True)
class RankBatch:
    """A batch as one rank has it."""

    stats: BatchStats
    rows: TensorDict
    """Its own rows [b], in the batch's order; without the padding that all of them have."""
    number_b: Tensor
    """int64, on the CPU: which rows of the batch they are."""
    ranks: Ranks = ALONE

    @classmethod
    def alone(cls, batch: TensorDict) -> RankBatch:
        """Of a rank that has all rows."""
        return cls(BatchStats.of(batch), batch, torch.arange(len(batch)))

    def to(self, device: torch.device) -> RankBatch:
        """With its rows there."""
        return replace(self, rows=self.rows.to(device))

    def own(self, rows: Tensor) -> Tensor:
        """Where this rank has them: the places in `rows`, on its device, of those of the batch's rows that it has."""
        place_B = torch.full((len(self.stats),), -1)
        place_B[self.number_b] = torch.arange(len(self.number_b))
        places = place_B[rows]
        return places[places >= 0].to(self.rows[columns.LOSS_MASK].device)

    def together(self, values: Tensor, rows: Tensor) -> Tensor:
        """What the ranks have of some rows of the batch: [len(rows), ...]; over several ranks on the CPU, and
        collective. Padding is 0, or NaN in rows that were not computed.

        Args:
            values: [b, ...] of this rank's rows.
            rows: the same on every rank.
        """
        if self.ranks.size == 1:
            return values[rows.to(values.device)]
        kept = torch.uint8 if values.dtype == torch.bool else values.dtype
        everyone = torch.zeros(len(rows), *_widened(values, self.stats.width), dtype=kept)
        if self.ranks.counts:
            here = torch.isin(rows, self.number_b)
            everyone[here] = _fitted(values[self.own(rows)].to("cpu", kept), self.stats.width)
        return self.ranks.sum(everyone).to(values.dtype)

    def back(self, values: Tensor, rows: Tensor) -> Tensor:
        """[b, ...]: what was worked out for some rows of the batch, where this rank has them; 0 in its other rows."""
        like = self.rows[columns.LOSS_MASK]
        width = like.shape[1]
        own = torch.zeros(len(like), *_widened(values, width), dtype=values.dtype, device=like.device)
        here = torch.isin(rows, self.number_b).to(values.device)
        own[self.own(rows)] = _fitted(values[here], width).to(like.device)
        return own


def _widened(values: Tensor, width: int) -> tuple[int, ...]:
    """The shape of a row, where rows are so wide."""
    return (width,) if values.ndim > 1 else ()


def _fitted(values: Tensor, width: int) -> Tensor:
    """Rows cut, or filled up, to this width: with 0, or with NaN where the first token is NaN, as it is in no row that
    was computed."""
    if values.ndim == 1 or width <= values.shape[1]:
        return values if values.ndim == 1 else values[:, :width]
    padding = values.new_zeros(len(values), width - values.shape[1])
    if values.is_floating_point():
        padding[values[:, 0].isnan()] = torch.nan
    return torch.cat([values, padding], 1)


def deal(batch: TensorDict, ranks: Ranks, mini_batches: Sequence[Tensor] = ()) -> list[RankBatch]:
    """Each part's rank batch.

    Args:
        batch: made by `build_batch`; of all columns that workers read.
        ranks: the group, as any of them sees it.
        mini_batches: rows of the mini-batches of the first epoch. In each every part has about as many tokens to pass;
            later epochs, with other mini-batches, are less even. None = there is one.
    """
    stats = BatchStats.of(batch)
    kind_B = torch.zeros(len(batch), dtype=torch.int64)
    for number, rows in enumerate(mini_batches):
        kind_B[rows] = number
    # Rows out of the loss never pass, and those without an advantage may be left out.
    kind_B = 3 * kind_B + (stats.num_in_loss_B > 0).long() + stats.moves_B.long()
    stats = stats.dealt(ranks, kind_B)
    shares = []
    for part in range(ranks.num_parts):
        number_b = (stats.part_B == part).nonzero().squeeze(1)
        width = int(stats.num_tokens_B[number_b].max()) if len(number_b) else 1
        rows = batch[number_b]
        for name, column in [*rows.items()]:
            if isinstance(column, Tensor) and column.ndim > 1:
                rows[name] = column[:, :width].contiguous()
        shares.append(RankBatch(stats, rows, number_b, ranks))
    return shares


def rank_batch_of(
    batch: TensorDict, ranks: Ranks, mini_batches: Callable[[Tensor], Sequence[Tensor]] | None = None
) -> RankBatch:
    """This rank's rows of a batch that every rank has whole.

    Args:
        batch: the same on every rank.
        ranks: the group.
        mini_batches: prompts of all rows [B] -> rows of the mini-batches of the first epoch.
    """
    if ranks.size == 1:
        return RankBatch.alone(batch)
    rows = () if mini_batches is None else mini_batches(batch[columns.PROMPT_INDEX].cpu())
    return replace(deal(batch.to("cpu"), ranks, rows)[ranks.part], ranks=ranks)


def for_whole(batch: TensorDict, ranks: Ranks, compute: Callable[[RankBatch], Tensor]) -> Tensor:
    """A column [B, T] on the batch's device, where every rank has the batch whole and wants all of the result.

    Args:
        batch: the same on every rank.
        ranks: the group.
        compute: what it is for a rank's rows [b, T].
    """
    rank_batch = rank_batch_of(batch, ranks)
    found = compute(rank_batch)
    return rank_batch.together(found, torch.arange(len(batch))).to(batch.device or "cpu")


def assemble(batch: TensorDict, shares: Sequence[RankBatch], found: Sequence[Tensor]) -> Tensor:
    """One column [B, T] of what each part found [b, t] for its rows; padded as in `together`."""
    shape = batch[columns.LOSS_MASK].shape
    column = torch.empty(shape, dtype=found[0].dtype)
    for rank_batch, values in zip(shares, found):
        column[rank_batch.number_b] = _fitted(values.cpu(), shape[1])
    return column
