"""Attention over the slot cache, plugged into transformers' attention interface.

All tokens of one engine step travel through the model as ONE packed sequence `[1, N]`: no padding in any linear
layer. Only here are they taken apart again: tokens whose row needs just one token (decoding) read the cache's rows in
place; longer pieces (prompts, tool answers) are padded within groups of similar length.

Grouped-query attention folds the query heads that share a key-value head into the query length: keys and values
are never repeated, which is most of the time that decoding a small model would otherwise take.

Shapes: `N` tokens of the step, `H` query heads, `K` key-value heads, `G = H / K`, `D` head dimension, `L` cache
positions that are looked at, `Q` longest piece of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from verl_mt.engines.local.kv_cache import KVCache
from verl_mt.errors import EngineError

NAME = "verl_mt_slots"
_LEN_MULTIPLE = 16
_BLOCK_ROWS = 32
_SPLIT_BELOW = 0.8
"""Decoding rows are split into blocks when that leaves less than this share of the positions to look at."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass
class _DecodeGroup:
    """Tokens `begin:end` of the step, one per row, in rows `first:last` of the cache, perhaps with holes."""

    begin: int
    end: int
    first: int
    last: int
    length: int
    inside: torch.Tensor | None
    """Index of each token's row in `first:last`; None = no holes."""
    mask: torch.Tensor
    """[last - first, 1, 1, L], 0 or -inf."""


@dataclass
class _PieceGroup:
    """Pieces of several tokens, padded to the longest of them."""

    tokens: torch.Tensor
    """[P, Q] index into the step's tokens; filler repeats token 0 of the piece."""
    flat: torch.Tensor
    """Index into the padded [P * Q] of every real token, in the order of `targets`."""
    targets: torch.Tensor
    rows: torch.Tensor
    length: int
    mask: torch.Tensor
    """[P, 1, Q, L], True = visible."""


class StepAttention:
    """The layout of one engine step; handed to every attention layer of the model."""

    def __init__(self, cache: KVCache, rows: np.ndarray, positions: np.ndarray, num_decode: int, device: torch.device):
        """
        Args:
            cache: where keys and values live; must have room for every (row, position).
            rows, positions: [N] where each token goes. The first `num_decode` are single tokens in ascending rows;
                then come pieces: consecutive tokens of one row at consecutive positions.
            num_decode: how many single tokens there are.
            device: of the model.
        """
        self.cache = cache
        self.device = device
        self.rows = torch.from_numpy(rows).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self.layers_seen = 0
        self._decode = self._plan_decode(rows[:num_decode], positions[:num_decode]) if num_decode else []
        self._pieces = self._plan_pieces(rows, positions, num_decode)

    def attend(
        self, layer: int, query: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float | None
    ) -> torch.Tensor:
        """Store the new keys and values `[1, K, N, D]`, then attend with `query` [1, H, N, D] -> [1, N, H, D]."""
        self.layers_seen += 1
        key, value = (x[0].transpose(0, 1) for x in kv)
        self.cache.write(layer, self.rows, self.positions, (key, value))
        num_kv_heads = key.shape[1]
        q = query[0].transpose(0, 1)
        q = q.reshape(q.shape[0], num_kv_heads, -1, q.shape[-1])
        if len(self._decode) == 1 and not self._pieces:
            out = self._attend_decode(self._decode[0], layer, q, scale)
        else:
            out = value.new_empty(*q.shape[:-1], value.shape[-1])
            for single in self._decode:
                out[single.begin : single.end] = self._attend_decode(single, layer, q[single.begin : single.end], scale)
            for group in self._pieces:
                out[group.targets] = self._attend_pieces(group, layer, q, scale)
        return out.reshape(1, out.shape[0], -1, out.shape[-1])

    def _plan_decode(self, rows: np.ndarray, positions: np.ndarray) -> list[_DecodeGroup]:
        """One group, or blocks of rows where their lengths differ so much that padding would cost more."""
        edges = np.arange(rows[0], rows[-1] + 1 + _BLOCK_ROWS, _BLOCK_ROWS)
        cuts = np.unique(np.searchsorted(rows, edges))
        spans = list(pairwise(cuts.tolist()))
        cost = sum((rows[b - 1] + 1 - rows[a]) * self._length(positions[a:b]) for a, b in spans)
        if cost > _SPLIT_BELOW * (rows[-1] + 1 - rows[0]) * self._length(positions):
            spans = [(0, len(rows))]
        return [self._decode_group(rows[a:b], positions[a:b], a) for a, b in spans]

    def _decode_group(self, rows: np.ndarray, positions: np.ndarray, begin: int) -> _DecodeGroup:
        first, last = int(rows[0]), int(rows[-1]) + 1
        length = self._length(positions)
        visible = np.zeros(last - first, dtype=np.int64)
        visible[rows - first] = positions
        mask = torch.zeros(last - first, length)
        mask.masked_fill_(torch.arange(length) > torch.from_numpy(visible)[:, None], float("-inf"))
        holes = last - first != len(rows)
        return _DecodeGroup(
            begin=begin,
            end=begin + len(rows),
            first=first,
            last=last,
            length=length,
            inside=torch.from_numpy(rows - first).to(self.device) if holes else None,
            mask=mask.to(self.device)[:, None, None],
        )

    def _plan_pieces(self, rows: np.ndarray, positions: np.ndarray, start: int) -> list[_PieceGroup]:
        if start == len(rows):
            return []
        # Pieces begin where the row changes; groups hold lengths within a factor of two of each other.
        begins = np.flatnonzero(np.diff(rows[start:], prepend=-1)) + start
        sizes = np.diff(begins, append=len(rows))
        buckets = np.ceil(np.log2(sizes)).astype(np.int64)
        return [
            self._piece_group(rows, positions, begins[buckets == bucket], sizes[buckets == bucket])
            for bucket in np.unique(buckets)
        ]

    def _piece_group(
        self, rows: np.ndarray, positions: np.ndarray, begins: np.ndarray, sizes: np.ndarray
    ) -> _PieceGroup:
        offsets = np.arange(sizes.max())
        real = offsets < sizes[:, None]
        tokens = begins[:, None] + np.where(real, offsets, 0)
        length = self._length(positions[tokens])
        visible = np.arange(length) <= positions[tokens][..., None]
        as_tensor = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731
        return _PieceGroup(
            tokens=as_tensor(tokens),
            flat=as_tensor(np.flatnonzero(real)),
            targets=as_tensor(tokens[real]),
            rows=as_tensor(rows[begins]),
            length=length,
            mask=as_tensor(visible)[:, None],
        )

    def _length(self, positions: np.ndarray) -> int:
        longest = int(positions.max()) + 1
        return min(-(-longest // _LEN_MULTIPLE) * _LEN_MULTIPLE, self.cache.length)

    def _attend_decode(self, group: _DecodeGroup, layer: int, q: torch.Tensor, scale: float | None) -> torch.Tensor:
        """q [n, K, G, D] -> [n, K, G, D]; each token is its row's only query, so G takes the place of the length."""
        key, value = self.cache.view(layer, group.first, group.last, group.length)
        if group.inside is not None:
            spread = q.new_zeros(group.last - group.first, *q.shape[1:])
            spread[group.inside] = q
            q = spread
        mask = group.mask.to(q.dtype).expand(-1, 1, q.shape[2], -1)
        out = scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
        return out if group.inside is None else out[group.inside]

    def _attend_pieces(self, group: _PieceGroup, layer: int, q: torch.Tensor, scale: float | None) -> torch.Tensor:
        """q [N, K, G, D] -> [number of the group's tokens, K, G, D]."""
        key, value = self.cache.gather(layer, group.rows, group.length)
        pieces, longest = group.tokens.shape
        _, kv_heads, share, dim = q.shape
        padded = q[group.tokens].permute(0, 2, 3, 1, 4).reshape(pieces, kv_heads, share * longest, dim)
        mask = group.mask[:, :, None].expand(-1, -1, share, -1, -1).reshape(pieces, 1, share * longest, -1)
        out = scaled_dot_product_attention(padded, key, value, attn_mask=mask, scale=scale)
        out = out.view(pieces, kv_heads, share, longest, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(pieces * longest, kv_heads, share, -1)[group.flat]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' decoder layers call while the local engine runs a step.

    Another thread that runs the same module meanwhile has no step of its own and gets plain SDPA attention.

    Raises:
        EngineError: the model's attention needs something that this engine does not compute.
    """
    step: StepAttention | None = kwargs.pop("slot_step", None)
    if step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise EngineError(
                f"{type(module).__name__} uses {name!r} in its attention; the local engine has no such term"
            )
    return step.attend(module.layer_idx, query, (key, value), kwargs.get("scaling")), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, slot_attention)
ALL_MASK_ATTENTION_FUNCTIONS[NAME] = sdpa_mask
