"""Splitting a batch for the forward pass. No result depends on the split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl_mt.data import batch as columns
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.sharding import dummy_pass, packs, score


def split_rows(
    num_tokens_B: Tensor, prompt_B: Tensor, rows: Tensor, *, max_tokens: int, max_rows: int | None, packed: bool = False
) -> list[Tensor]:
    """Micro-batches of rows that are much alike: little padding, and the rows of a prompt together (they share it).

    Args:
        num_tokens_B, prompt_B: tokens and prompt of each row of the batch.
        rows: int64, the rows to split.
        max_tokens: rows times the longest row, per micro-batch; a longer row is alone in its micro-batch.
        max_rows: rows per micro-batch; None = as many as fit.
        packed: rows will not be padded: `max_tokens` are those of the rows, what they share counted in each.

    Returns:
        Row indices; each of `rows` exactly once.
    """
    lengths, prompts = num_tokens_B.tolist(), prompt_B.tolist()
    longest: dict[int, int] = {}
    chosen = rows.tolist()
    for row in chosen:
        longest[prompts[row]] = max(longest.get(prompts[row], 0), lengths[row])
    chosen.sort(key=lambda row: (longest[prompts[row]], prompts[row], lengths[row], row))
    parts: list[list[int]] = []
    width = total = 0
    for row in chosen:
        width, total = max(width, lengths[row]), total + lengths[row]
        if not parts or len(parts[-1]) == max_rows or (total if packed else (len(parts[-1]) + 1) * width) > max_tokens:
            parts.append([])
            width = total = lengths[row]
        parts[-1].append(row)
    return [torch.tensor(part, device=rows.device) for part in parts]


def micro_batches(
    rank_batch: RankBatch, rows: Tensor, *, max_tokens: int, max_rows: int | None, packed: bool = False
) -> list[Tensor | None]:
    """Micro-batches of those of the batch's `rows` that this rank has, by their places in its rows. Every rank gets as
    many, because a pass is collective: None = a dummy.

    `max_tokens` are those of one rank: ranks that share sequences take as many times more.
    """
    stats, ranks = rank_batch.stats, rank_batch.ranks
    limits: dict[str, Any] = {"max_tokens": max_tokens * ranks.sequence, "max_rows": max_rows, "packed": packed}
    sizes = (stats.num_tokens_B, stats.prompt_B)
    parts = [split_rows(*sizes, rows[stats.part_B[rows] == part], **limits) for part in range(ranks.num_parts)]
    own = [rank_batch.own(part) for part in parts[ranks.part]]
    return [*own, *[None] * (max(map(len, parts)) - len(own))]


@torch.no_grad()
def compute_log_probs(
    module: nn.Module,
    rank_batch: RankBatch,
    rows: Tensor,
    *,
    temperature: float,
    max_tokens: int,
    max_rows: int | None = None,
    entropy: bool = False,
) -> Tensor:
    """Log-probs of the tokens in the loss mask, or the entropies of what they were drawn from: float32 [b, T], 0 at
    other positions, NaN in rows of the rank batch that are not in `rows`.

    Collective where the module is sharded: every rank gives the same rows of the batch and gets the result for its own.
    """
    batch = rank_batch.rows
    mask = batch[columns.LOSS_MASK]
    result = torch.full(mask.shape, float("nan"), device=mask.device)
    in_loss = rank_batch.stats.num_in_loss_B[rows] > 0
    result[rank_batch.own(rows[~in_loss])] = 0.0
    limits: dict[str, Any] = {"max_tokens": max_tokens, "max_rows": max_rows, "packed": packs(module)}
    for part in micro_batches(rank_batch, rows[in_loss], **limits):
        if part is None:
            dummy_pass(module, mask.device)
            continue
        output = score(
            module,
            batch[columns.INPUT_IDS][part],
            batch[columns.ATTENTION_MASK][part],
            wanted_BT=mask[part],
            temperature=temperature,
            with_entropy=entropy,
            media=columns.media_of(batch[part]),
        )
        found = output.entropy_BT if entropy else output.log_probs_BT
        assert found is not None
        result[part] = found.float()
    return result
