"""Decoding rows that begin alike read the keys and values of that beginning once, not once each.

All samples of a prompt begin with it, and all prompts of a task with its system prompt and tools. Attention over such
a prefix is one product of many queries with one row's keys, where rows by themselves would each read their own copy
from memory, which is what decoding waits for on a CPU. What is left of each row is attended to as ever, and the two
results are joined by their log-sum-exp (Juravsky et al. 2024, "Hydragen", section 3.1): exact, up to rounding.

Shapes: `n` decoding rows, `C` classes of rows that begin alike, `R` rows of the largest class, `K` key-value heads,
`G` query heads of each, `D` head dimension, `P` positions of the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

WORTH_SHARING = 8 << 20
"""Bytes that a layer need not read: below it, they come from the processor's cache sooner than the parts are joined."""
_CUT_MULTIPLE = 16
_MOST_CUTS = 6
_GATHERED = 2
"""What a position of a prefix costs, of which a copy is made, where one that is read in place costs 1."""


@dataclass
class SharedPrefix:
    """The first `length` positions of the decoding rows, and which rows have the same ids there."""

    length: int
    first: np.ndarray
    """[C] a row of each class."""
    members: np.ndarray
    """[C, R] index of its rows among the decoding ones; filled up with the first."""
    place: np.ndarray
    """[n] where in the flattened `members` each decoding row stands."""


def find_shared_prefix(
    ids: np.ndarray, rows: np.ndarray, positions: np.ndarray, position_bytes: int
) -> SharedPrefix | None:
    """The prefix whose sharing saves most of what the rows would read.

    Args:
        ids: [S, M] of every row of the cache.
        rows, positions: [n] the rows that decode, and where in them; what lies before is computed.
        position_bytes: of a position's keys and values in one layer.

    Returns:
        None where it is not worth it.
    """
    longest = int(positions.min()) // _CUT_MULTIPLE * _CUT_MULTIPLE if len(rows) else 0
    worth = WORTH_SHARING / max(1, position_bytes)
    if (len(rows) - _GATHERED) * longest <= worth:
        return None
    same = (ids[rows, :longest] == ids[rows[0], :longest]).all(0)
    common = longest if same.all() else int(same.argmin()) // _CUT_MULTIPLE * _CUT_MULTIPLE
    cuts = np.unique(np.linspace(common, longest, _MOST_CUTS).astype(np.int64) // _CUT_MULTIPLE * _CUT_MULTIPLE)
    best, length, classes = worth, 0, list[list[int]]()
    for cut in cuts.tolist():
        found: dict[bytes, list[int]] = {}
        for index, row in enumerate(rows.tolist()):
            found.setdefault(ids[row, :cut].tobytes(), []).append(index)
        saved = (len(rows) - _GATHERED * len(found)) * cut
        if saved > best:
            best, length, classes = saved, cut, list(found.values())
    if not length:
        return None
    largest = max(map(len, classes))
    members = np.array([c + [c[0]] * (largest - len(c)) for c in classes])
    place = np.empty(len(rows), dtype=np.int64)
    for number, of_class in enumerate(classes):
        place[of_class] = number * largest + np.arange(len(of_class))
    return SharedPrefix(length, rows[members[:, 0]], members, place)


class SharedKeys:
    """A step's shared prefix, and the attention of its decoding rows to it.

    Args:
        prefix: which rows share what.
        device: of the model.
    """

    def __init__(self, prefix: SharedPrefix, device: torch.device):
        self.length = prefix.length
        self._first, self._members, self._place = (
            torch.from_numpy(index).to(device) for index in (prefix.first, prefix.members, prefix.place)
        )

    def join(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        rest: tuple[torch.Tensor, torch.Tensor],
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of `q` [n, K, G, D] to the prefix in keys and values `[S, K, M, D]`, joined with the `rest`.

        Args:
            q: queries.
            kv: of all rows of the cache.
            rest: what `attend` gives for the later positions: [n, K, G, D] and [n, K, G].
            scale: of the scores; None = 1 / sqrt(D).

        Returns:
            [n, K, G, D]
        """
        _, heads, share, dim = q.shape
        key, value = (x[self._first, :, : self.length] for x in kv)
        grouped = q[self._members].transpose(1, 2).reshape(len(key), heads, -1, dim)
        out, log_sum = attend(grouped, key, value, None, scale)
        out = out.unflatten(2, (-1, share)).transpose(1, 2).flatten(0, 1)[self._place]
        log_sum = log_sum.unflatten(2, (-1, share)).transpose(1, 2).flatten(0, 1)[self._place]
        weight = torch.sigmoid(log_sum - rest[1])[..., None]
        return torch.lerp(rest[0].float(), out.float(), weight).to(q.dtype)


def attend(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `scaled_dot_product_attention` gives on a CPU, and the log of the sum of each query's exponentials."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, key, value, attn_mask=mask, scale=scale)
