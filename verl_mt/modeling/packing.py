"""Rows of different lengths as one row without padding, in which what rows share stands once.

The rows of a micro-batch become a tree of segments, each a run of consecutive tokens of one or several rows::

    system message ─┬─ question 1 ─┬─ answer 1
                    │              ├─ answer 2
                    │              └─ turn 1 ─┬─ answer 3
                    │                         └─ answer 3 told otherwise
                    └─ question 2 ─── answer 4

and all segments, one behind the other, one sequence `[1, T]`. Everything in a decoder works on tokens one by one,
except attention: there (`packed_attention`, registered with transformers) each segment sees the segments on the way to
the root, and itself causally. Positions are those in the rows. Without sharing every row is one segment, and this is
the block-diagonal attention of packed batches (Krell et al. 2021, arXiv:2107.02027); there is no mask over the whole
sequence in either case, so time and memory stay those of the rows.

Shape suffixes: `B` rows, `T` tokens of the packed sequence, `N` wanted hidden states, `H` heads, `D` head dimension,
`b` segments of a group, `S` their longest, `K` the longest way from the root to their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from verl_mt.modeling.sequence_parallel import Own, SequenceGroup

NAME, FLASH_NAME = "verl_mt_packed", "verl_mt_packed_flash"
"""Of the attention functions; where a model is not handed packed rows they compute what `TWINS` says."""
TWINS = {"sdpa": NAME, "flash_attention_2": FLASH_NAME}
"""transformers' name of an attention -> that of its twin for packed rows."""
MIN_SHARED = 16
"""A separate segment must save that many tokens: attention over two segments costs more than over one."""
_MAX_MASK = 2**24
"""Elements of a group's mask."""
_ALONE = 512
"""Segments as long as that are not padded to others' lengths for attention."""
GQA_BY_FLASH_ALONE = {"cuda"}
"""Devices where of torch's kernels only flash attention, which takes neither a mask nor float32, takes fewer key heads
than query heads: else torch would hold all scores."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


class Segment(NamedTuple):
    """Tokens [start, end) of a row; all `rows` have them and what is before them in common."""

    rows: tuple[int, ...]
    start: int
    end: int


def find_segments(ids_BT: np.ndarray, length_B: np.ndarray, *, share: bool) -> list[Segment]:
    """The rows as a tree, parents before children: every (row, position) is in exactly one segment.

    Args:
        ids_BT: token ids.
        length_B: how many of each row count, at least 1.
        share: False gives one segment per row.
    """
    if not share or len(length_B) < 2:
        return [Segment((row,), 0, int(length)) for row, length in enumerate(length_B)]
    # Big-endian bytes of ids sort as the ids do. Sorted, rows with the longest common beginnings are neighbours, and
    # what any two rows share is the smallest `common` between them: a tree needs no more than those numbers.
    big_endian = ids_BT.astype(">i8")
    keys = [big_endian[row, :length].tobytes() for row, length in enumerate(length_B)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = []
    for a, b in pairwise(order):
        both = min(length_B[a], length_B[b])
        differs = ids_BT[a, :both] != ids_BT[b, :both]
        common.append(int(differs.argmax()) if differs.any() else int(both))
    return _branch(order, common, length_B, 0)


def _branch(order: list[int], common: list[int], length_B: np.ndarray, depth: int) -> list[Segment]:
    """Segments from `depth` on of rows in lexicographic order, whose neighbours have `common` tokens in common."""
    if not common:
        end = int(length_B[order[0]])
        return [Segment((order[0],), depth, end)] if end > depth else []
    shared = min(common)
    cuts = [0, *[i + 1 for i, tokens in enumerate(common) if tokens == shared], len(order)]
    worth = (shared - depth) * (len(order) - 1) >= MIN_SHARED
    segments = [Segment(tuple(order), depth, shared)] if worth else []
    for a, b in pairwise(cuts):
        segments += _branch(order[a:b], common[a : b - 1], length_B, shared if worth else depth)
    return segments


@dataclass
class _Group:
    """Segments that attend in one call."""

    query: slice | Tensor
    """Indices of their tokens in the packed sequence: [b, S], filled up with any, or a plain run of one segment."""
    key: slice | Tensor
    """[b, K], from the root to the segment's end."""
    mask: Tensor | None
    """bool [b, 1, S, K], True = visible; None = causal."""


class PackedRows:
    """What one forward pass needs to know of its rows.

    Args:
        ids_BT: int64; right-padded.
        row_N, position_N: where hidden states are wanted; every row at least once.
        share: prefixes that rows have in common stand in the sequence once.
        sequence: the ranks that have a part of the sequence each; None = it is here, whole.
    """

    def __init__(
        self,
        ids_BT: Tensor,
        row_N: Tensor,
        position_N: Tensor,
        *,
        share: bool,
        sequence: SequenceGroup | None = None,
    ):
        device = ids_BT.device
        self.sequence = sequence
        ids, rows, positions = (x.cpu().numpy() for x in (ids_BT, row_N, position_N))
        length_B = np.zeros(len(ids), dtype=np.int64)
        np.maximum.at(length_B, rows, positions + 1)
        self.segments = find_segments(ids, length_B, share=share)
        place_BT = np.zeros(ids.shape, dtype=np.int64)
        """Where each token of each row is in the packed sequence."""
        starts = np.cumsum([0, *[s.end - s.start for s in self.segments]])
        for segment, begin in zip(self.segments, starts):
            place_BT[list(segment.rows), segment.start : segment.end] = np.arange(segment.end - segment.start) + begin
        packed = np.concatenate([ids[s.rows[0], s.start : s.end] for s in self.segments])
        where = np.concatenate([np.arange(s.start, s.end) for s in self.segments])
        self.input_ids_1T = torch.from_numpy(packed).to(device)[None]
        self.position_ids_1T = torch.from_numpy(where).to(device)[None]
        self.wanted_N = torch.from_numpy(place_BT[rows, positions]).to(device)
        self._place_BT, self._starts = place_BT, starts
        self._varlen: tuple[Tensor | None, Tensor, Tensor, int, int] | None = None

    @cached_property
    def _groups(self) -> tuple[list[_Group], Tensor | None]:
        """Those of `attend`, and where each token is in what they give; None = in order."""
        device = self.input_ids_1T.device
        groups, order, filled = list[_Group](), np.zeros(self.input_ids_1T.shape[1], dtype=np.int64), 0
        for members in _alike(self.segments):
            group, own = _group([self.segments[i] for i in members], self._starts[members], self._place_BT, device)
            groups.append(group)
            for number, i in enumerate(members):
                size = self.segments[i].end - self.segments[i].start
                first = filled + number * own[1] + own[0][number]
                order[self._starts[i] : self._starts[i] + size] = first + np.arange(size)
            filled += len(members) * own[1]
        # Groups attend in an order of their own; one gather puts their outputs back, and most often none is needed.
        in_order = filled == len(order) and bool((order == np.arange(filled)).all())
        return groups, None if in_order else torch.from_numpy(order).to(device)

    def arguments(self) -> dict[str, Any]:
        """Of the model's forward pass."""
        # An explicit 4D mask stops transformers from building one; `packed_attention` ignores it.
        no_mask = torch.zeros(1, 1, 1, 1, device=self.input_ids_1T.device)
        ids = {"input_ids": self.input_ids_1T, "position_ids": self.position_ids_1T}
        if self.sequence is not None:
            ids = {name: self.sequence.chunk(x_1T[0])[None] for name, x_1T in ids.items()}
        return {**ids, "attention_mask": no_mask, "use_cache": False, "packed_rows": self}

    def wanted(self) -> tuple[Tensor, Own | None]:
        """Where wanted hidden states are in what comes out, and which of them these are (None = all)."""
        if self.sequence is None:
            return self.wanted_N, None
        own = self.sequence.own(self.wanted_N, self.input_ids_1T.shape[1])
        return own.places, own

    def exchanged(
        self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *options: float | None
    ) -> Tensor:
        """`attend` (or `attend_flash`) of this object; over ranks, each for its heads."""
        if self.sequence is None:
            return attend(query, key, value, *options)
        heads, num_tokens = self.sequence.heads(query.shape[1]), self.input_ids_1T.shape[1]
        ratio = query.shape[1] // key.shape[1]
        read = [sorted({head // ratio for head in own}) for own in heads]
        own, own_read = heads[self.sequence.rank], read[self.sequence.rank]
        query = self.sequence.to_heads(query, [[*of] for of in heads], num_tokens)
        key, value = (self.sequence.to_heads(x, read, num_tokens) for x in (key, value))
        if [head // ratio for head in own] != [kv for kv in own_read for _ in range(len(own) // len(own_read))]:
            # Where ranks' shares cut through the heads that read one key, a kernel cannot tell which reads which.
            which = torch.tensor([head // ratio - own_read[0] for head in own], device=key.device)
            key, value = key.index_select(1, which), value.index_select(1, which)
        return self.sequence.to_tokens(attend(query, key, value, *options), heads)

    def attend_flash(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, *, kernel: Any = None
    ) -> Tensor:
        """`attend` with one call of flash attention's kernel for rows of many lengths (Dao 2023, arXiv:2307.08691).

        Its causal mask is aligned at the end: the last query sees all keys. So a segment's queries are its own tokens,
        and its keys those on the way from the root.
        """
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self._varlen is None:
            device, ends = q.device, [s.end for s in self.segments]
            sizes = [s.end - s.start for s in self.segments]
            starts_q, starts_k = (_cumulated(lengths, device) for lengths in (sizes, ends))
            shared = any(s.start for s in self.segments)
            ways = [torch.from_numpy(self._place_BT[s.rows[0], : s.end]) for s in self.segments] if shared else []
            self._varlen = (torch.cat(ways).to(device) if shared else None, starts_q, starts_k, max(sizes), max(ends))
        index, starts_q, starts_k, most_q, most_k = self._varlen
        if index is not None:
            k, v = k.index_select(0, index), v.index_select(0, index)
        spans = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": most_q, "max_seqlen_k": most_k}
        return (kernel or _flash_kernel())(q, k, v, **spans, dropout_p=dropout, softmax_scale=scale, causal=True)[None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        """query [1, H, T, D], key and value [1, their heads, T, D] -> [1, T, H, D]."""
        pieces = []
        groups, order_T = self._groups
        for group in groups:
            k_bHKD, v_bHKD = _take(key, group.key), _take(value, group.key)
            flash = group.mask is None and query.dtype != torch.float32
            if not flash and query.device.type in GQA_BY_FLASH_ALONE:
                k_bHKD, v_bHKD = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (k_bHKD, v_bHKD))
            out_bHSD = scaled_dot_product_attention(
                _take(query, group.query),
                k_bHKD,
                v_bHKD,
                attn_mask=group.mask,
                is_causal=group.mask is None,
                dropout_p=dropout,
                scale=scale,
                enable_gqa=query.shape[1] != k_bHKD.shape[1],
            )
            pieces.append(out_bHSD.transpose(1, 2).flatten(0, 1))
        out_THD = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if order_T is not None:
            out_THD = out_THD.index_select(0, order_T)
        return out_THD.unsqueeze(0)


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _flash_kernel() -> Any:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def _take(x_1HTD: Tensor, index: slice | Tensor) -> Tensor:
    """[b, H, S, D]"""
    if isinstance(index, slice):
        return x_1HTD[:, :, index]
    taken = x_1HTD[0].index_select(1, index.flatten())
    return taken.unflatten(1, index.shape).transpose(0, 1)


def _alike(segments: Sequence[Segment]) -> list[list[int]]:
    """Segments in groups that attend together with little padding: like lengths, like ways from the root."""
    groups: list[list[int]] = []
    limits = (-1.0, -1.0, 0)
    sizes = [(s.start > 0, s.end - s.start, s.end) for s in segments]
    for i in sorted(range(len(segments)), key=sizes.__getitem__):
        branch, size, end = sizes[i]
        first = sizes[groups[-1][0]] if groups else None
        full = first is None or first[0] != branch or max(first[1], size) >= _ALONE
        full = full or size > limits[0] or end > limits[1] or end < limits[2]
        if full or (branch and (len(groups[-1]) + 1) * size * end > _MAX_MASK):
            groups.append([])
            limits = (max(size * 1.25, size + 8), max(end * 1.25, end + 8), int(end * 0.75))
        groups[-1].append(i)
    return groups


def _group(
    members: list[Segment], starts: np.ndarray, place_BT: np.ndarray, device: torch.device
) -> tuple[_Group, tuple[list[int], int]]:
    """A group, and where its members' own tokens are in its output: (first of each, row length)."""
    sizes = [s.end - s.start for s in members]
    if len(members) == 1 and members[0].start == 0:
        run = slice(int(starts[0]), int(starts[0]) + sizes[0])
        return _Group(run, run, None), ([0], sizes[0])
    ends = np.array([s.end for s in members])
    key_bK = np.zeros((len(members), ends.max()), dtype=np.int64)
    for number, segment in enumerate(members):
        key_bK[number, : segment.end] = place_BT[segment.rows[0], : segment.end]
    keys = torch.from_numpy(key_bK).to(device)
    from_root = np.array([s.start for s in members])
    # A causal kernel skips half of a square; a mask skips nothing, but leaves out the shared part's queries.
    square = bool((from_root == 0).all()) or max(sizes) > int(from_root.min())
    if square or len(members) * max(sizes) * key_bK.shape[1] > _MAX_MASK:
        return _Group(keys, keys, None), (from_root.tolist(), key_bK.shape[1])
    # Shorter members are filled up with their last token: such a query sees something, so that no softmax is over
    # nothing (its NaN would reach the gradient of all keys). What comes out for it is read by nobody.
    own_bS = np.minimum(from_root[:, None] + np.arange(max(sizes)), ends[:, None] - 1)
    query = torch.from_numpy(np.take_along_axis(key_bK, own_bS, 1)).to(device)
    visible = np.arange(key_bK.shape[1]) <= own_bS[:, :, None]
    return _Group(query, keys, torch.from_numpy(visible).to(device)[:, None]), ([0] * len(members), max(sizes))


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that a model's layers call: over packed rows if there are any, else plain SDPA.

    Raises:
        ValueError: the model's attention has a term that packed rows do not compute.
    """
    rows: PackedRows | None = kwargs.pop("packed_rows", None)
    if rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return rows.exchanged(rows.attend, query, key, value, *checked(module, kwargs)), None


def packed_flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The same with flash attention; needs the package flash-attn and a GPU."""
    rows: PackedRows | None = kwargs.pop("packed_rows", None)
    if rows is None:
        config: Any = module.config
        config._attn_implementation = "flash_attention_2"  # it looks there for the kernel's name
        try:
            return flash_attention_forward(module, query, key, value, attention_mask, **kwargs)
        finally:
            config._attn_implementation = FLASH_NAME
    return rows.exchanged(rows.attend_flash, query, key, value, *checked(module, kwargs)), None


def checked(module: nn.Module, kwargs: dict[str, Any]) -> tuple[float | None, float]:
    """(scale, dropout)"""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} uses {name!r} in its attention. Packed rows have no such term")
    return kwargs.get("scaling"), kwargs.get("dropout") or 0.0


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
AttentionInterface.register(FLASH_NAME, packed_flash_attention)
AttentionMaskInterface.register(FLASH_NAME, flash_attention_mask)
