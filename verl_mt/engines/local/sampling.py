"""Vectorised sampling whose result for one row does not depend on the other rows.

Every request has its own counter-based stream of uniform numbers (Philox, Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"): number k of the stream picks token k of the turn by inverting the cumulative
distribution. Shapes: `n` rows, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 64
"""Uniform numbers are drawn this many at a time; a multiple of the 4 that one Philox counter yields."""
_CHUNK_ELEMENTS = 1 << 23
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


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
    """Pick one token per row.

    Args:
        logits: [n, V] float32.
        rows: parameters and one uniform number per row.

    Returns:
        ids [n] int64, and log_softmax(logits / T) over the full vocabulary at those ids, [n] float32
        (T = 0 counts as 1). A row with non-finite logits has a NaN log-prob.
    """
    greedy = rows.temperature == 0
    scale = np.where(greedy, 1.0, rows.temperature)
    if (scale != 1.0).any():
        logits = logits / torch.from_numpy(scale.astype(np.float32)).to(logits.device)[:, None]
    log_probs = torch.log_softmax(logits, dim=-1)
    if greedy.all():
        ids = _argmax(logits)
    elif not greedy.any():
        ids = _draw_chunked(log_probs, rows)
    else:
        mask = torch.from_numpy(greedy).to(logits.device)
        ids = torch.where(mask, _argmax(logits), _draw_chunked(log_probs, rows))
    chosen = log_probs.gather(1, ids[:, None])[:, 0]
    return ids.cpu().numpy(), chosen.cpu().numpy()


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id among the largest logits; torch.argmax does not promise which. [n, V] -> [n]"""
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    best = logits.amax(dim=1, keepdim=True)
    # A row of NaN equals nothing: the last id stands in, and its NaN log-prob tells.
    return torch.where(logits == best, vocabulary, logits.shape[1] - 1).amin(dim=1)


def _draw_chunked(log_probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Bounds the temporaries for large vocabularies."""
    size = max(1, _CHUNK_ELEMENTS // log_probs.shape[1])
    if size >= len(log_probs):
        return _draw(log_probs, rows)
    parts = []
    for start in range(0, len(log_probs), size):
        part = slice(start, start + size)
        piece = SamplingRows(
            rows.temperature[part], rows.top_k[part], rows.top_p[part], rows.min_p[part], rows.uniform[part]
        )
        parts.append(_draw(log_probs[part], piece))
    return torch.cat(parts)


def _draw(log_probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    probs = log_probs.exp()
    filtered = np.flatnonzero((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    if len(filtered):
        probs = probs.double()
        index = torch.from_numpy(filtered).to(probs.device)
        probs[index] = keep_support(probs[index], rows.top_k[filtered], rows.top_p[filtered], rows.min_p[filtered])
    # First which block of the vocabulary, then which token of it: running sums in float64, which float32 is too coarse
    # for, over all of a large vocabulary would take longer than everything else of sampling.
    blocks = torch.nn.functional.pad(probs, (0, -probs.shape[1] % _BLOCK_TOKENS)).unflatten(1, (-1, _BLOCK_TOKENS))
    total = blocks.sum(2, dtype=torch.float64).cumsum(1)
    target = torch.from_numpy(rows.uniform).to(probs.device)[:, None] * total[:, -1:]
    block, before = _find(total, target)
    inside = blocks[torch.arange(len(blocks), device=probs.device), block[:, 0]].double().cumsum(1)
    token, _ = _find(inside, target - before)
    return (block * _BLOCK_TOKENS + token)[:, 0].clamp_(max=probs.shape[1] - 1)


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
        probs: [n, V] float64.
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
