"""Vectorised sampling whose result for one row does not depend on the other rows.

Every request has its own counter-based stream of uniform numbers (Philox, Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"): number k of the stream picks token k of the turn by inverting the cumulative
distribution. Shapes: `n` rows, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

BLOCK = 64
"""Uniform numbers are drawn this many at a time; a multiple of the 4 that one Philox counter yields."""
_CHUNK_ELEMENTS = (1 << 24, 1 << 21)
"""Logits that are computed with at once: bounds the temporaries; on a CPU (second), keeps them in its caches."""
_BLOCK_TOKENS = 256


def uniforms(key: int, block: int) -> np.ndarray:
    """[BLOCK] float64 in [0, 1): numbers `block * BLOCK` onwards of the stream `key`."""
    generator = np.random.Philox(key=key % 2**128, counter=block * (BLOCK // 4))
    return np.random.Generator(generator).random(BLOCK)


def stream_key(*parts: int) -> int:
    """A 128-bit key mixed from an engine's own seed and the numbers that tell one request from another."""
    high, low = np.random.SeedSequence([part % 2**63 for part in parts]).generate_state(2, np.uint64)
    return int(high) << 64 | int(low)


@dataclass
class SamplingRows:
    """Sampling parameters of `n` rows, as arrays [n]; see `SamplingParams`."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray

    def part(self, rows: slice) -> SamplingRows:
        """Of some of the rows."""
        return SamplingRows(*(getattr(self, field.name)[rows] for field in fields(self)))


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
    """Pick one token per row.

    Args:
        logits: [n, V], of any floating dtype; computed with in float32.
        rows: parameters and one uniform number per row.

    Returns:
        ids [n] int64, and log_softmax(logits / T) over the full vocabulary at those ids, [n] float32
        (T = 0 counts as 1). A row with non-finite logits has a NaN log-prob.
    """
    size = max(1, _CHUNK_ELEMENTS[logits.device.type == "cpu"] // logits.shape[1])
    parts = [
        _sample(logits[start : start + size], rows.part(slice(start, start + size)))
        for start in range(0, len(logits), size)
    ]
    ids, log_probs = zip(*parts)
    return torch.cat(ids).cpu().numpy(), torch.cat(log_probs).cpu().numpy()


def _sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` of rows whose float32 copies are small."""
    greedy = rows.temperature == 0
    scale = np.where(greedy, 1.0, rows.temperature)
    logits, vocabulary = logits.float(), logits.shape[1]
    if (scale != 1.0).any():
        logits = logits / torch.from_numpy(scale.astype(np.float32)).to(logits.device)[:, None]
    best = logits.amax(dim=1, keepdim=True)
    # Probabilities times one number per row, in blocks; the last one is filled up with zeros.
    weights = logits.new_empty(len(logits), -(-vocabulary // _BLOCK_TOKENS) * _BLOCK_TOKENS)
    weights[:, vocabulary:] = 0
    torch.sub(logits, best, out=weights[:, :vocabulary]).exp_()
    blocks = weights.unflatten(1, (-1, _BLOCK_TOKENS))
    sums = blocks.sum(2)
    if greedy.all():
        ids = logits.max(dim=1).indices  # of equal ones the first
    elif not greedy.any():
        ids = _draw(blocks, sums, rows)
    else:
        mask = torch.from_numpy(greedy).to(logits.device)
        ids = torch.where(mask, logits.max(dim=1).indices, _draw(blocks, sums, rows))
    ids = ids.clamp(max=vocabulary - 1)
    log_probs = (logits.gather(1, ids[:, None]) - best)[:, 0] - sums.double().sum(1).log().float()
    return ids, log_probs


def _draw(blocks: torch.Tensor, sums: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """One id per row, from weights [n, V / 256, 256] and the sum of each block -> [n]"""
    filtered = np.flatnonzero((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    if len(filtered):
        blocks = blocks.double()
        index = torch.from_numpy(filtered).to(blocks.device)
        kept = keep_support(blocks[index].flatten(1), rows.top_k[filtered], rows.top_p[filtered], rows.min_p[filtered])
        blocks[index] = kept.unflatten(1, (-1, _BLOCK_TOKENS))
        sums = blocks.sum(2)
    # First which block of the vocabulary, then which token of it: running sums in float64, which float32 is too coarse
    # for, over all of a large vocabulary would take longer than everything else of sampling. The sum of one block in
    # float32 is as exact as the weights in it.
    total = sums.double().cumsum(1)
    target = torch.from_numpy(rows.uniform).to(blocks.device)[:, None] * total[:, -1:]
    block, before = _find(total, target)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block[:, 0]].double().cumsum(1)
    token, _ = _find(inside, target - before)
    return (block * _BLOCK_TOKENS + token)[:, 0]


def _find(total: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where running sums [n, m] first exceed a target [n, 1], and the sum before that place; both [n, 1].

    What is found adds something to the sum: the target is kept below the last one, and of equal sums the right end
    counts.
    """
    last = total[:, -1:]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    place = torch.searchsorted(total, target, right=True).clamp_(max=total.shape[1] - 1)
    return place, torch.where(place > 0, total.gather(1, (place - 1).clamp(min=0)), 0.0)


def keep_support(probs: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> torch.Tensor:
    """Zero what the filters remove, in the order top-k, top-p (of what top-k left, renormalised), min-p.

    Equal probabilities rank by id, so exactly `top_k` tokens stay. At least the most probable one always stays.

    Args:
        probs: [n, V] float64, up to a factor of each row.
        top_k: [n], -1 = off.
        top_p, min_p: [n].

    Returns:
        [n, V], not renormalised.
    """
    to = lambda array: torch.from_numpy(np.asarray(array)).to(probs.device)[:, None]  # noqa: E731
    ranked, order = probs.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    keep = (rank < to(top_k)) | (to(top_k) < 0)
    ranked = ranked * keep
    before = (ranked.cumsum(dim=1) - ranked) / ranked.sum(dim=1, keepdim=True)
    keep &= (before < to(top_p)) | (rank == 0) | (to(top_p) >= 1)
    keep &= (ranked >= to(min_p) * ranked[:, :1]) | (rank == 0)
    return torch.zeros_like(probs).scatter_(1, order, ranked * keep)
