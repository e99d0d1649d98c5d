"""The key-value cache of the local engine: one row per sequence, grown in chunks, read without copies.

Shapes: `S` rows (slots), `K` key-value heads, `M` positions, `D` head dimension.
"""

from __future__ import annotations

import numpy as np
import torch

_ROW_CHUNK = 16
_LEN_CHUNK = 64


class KVCache:
    """Keys and values of every layer, `[S, K, M, D]` each.

    A layer's tensors are made at its first write, from the shape of what is written, so no model config is read.
    Memory is zeroed when it is made: a masked position has weight 0, and 0 times an uninitialised NaN is NaN.
    """

    def __init__(self, max_rows: int, max_len: int):
        self.max_rows = max_rows
        self.max_len = _round_up(max_len, _LEN_CHUNK)
        self.num_rows = 0
        self.length = 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def reserve(self, num_rows: int, length: int) -> bool:
        """Make room for `num_rows` rows of `length` positions; keeps what is stored. True if it grew."""
        rows, positions = self.num_rows, self.length
        if num_rows > rows:
            rows = min(self.max_rows, _round_up(max(num_rows, rows * 3 // 2), _ROW_CHUNK))
        if length > positions:
            positions = min(self.max_len, _round_up(max(length, positions * 3 // 2), _LEN_CHUNK))
        if (rows, positions) == (self.num_rows, self.length):
            return False
        self.num_rows, self.length = rows, positions
        for store in (self._keys, self._values):
            for layer, old in store.items():
                new = old.new_zeros(rows, old.shape[1], positions, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                store[layer] = new
        return True

    def write(
        self, layer: int, rows: torch.Tensor, positions: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Store keys and values `[N, K, D]` of N tokens at (`rows[N]`, `positions[N]`)."""
        key, value = kv
        if layer not in self._keys:
            self._keys[layer] = key.new_zeros(self.num_rows, key.shape[1], self.length, key.shape[2])
            self._values[layer] = value.new_zeros(self.num_rows, value.shape[1], self.length, value.shape[2])
        self._keys[layer][rows, :, positions] = key
        self._values[layer][rows, :, positions] = value

    def view(self, layer: int, first: int, last: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[last - first, K, length, D]` of consecutive rows, without a copy."""
        return self._keys[layer][first:last, :, :length], self._values[layer][first:last, :, :length]

    def gather(self, layer: int, rows: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[len(rows), K, length, D]` of any rows (a copy)."""
        return self._keys[layer][:, :, :length][rows], self._values[layer][:, :, :length][rows]

    def copy_prefix(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of one row into others."""
        if length == 0 or not targets:
            return
        for tensor in (*self._keys.values(), *self._values.values()):
            prefix = tensor[source, :, :length]
            for first, last in _runs(targets):
                tensor[first:last, :, :length] = prefix

    def swap(self, rows_a: np.ndarray, rows_b: np.ndarray, length: int) -> None:
        """Exchange rows pairwise, up to `length` positions. No row may appear twice."""
        a, b = torch.from_numpy(np.concatenate([rows_a, rows_b])), torch.from_numpy(np.concatenate([rows_b, rows_a]))
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[a.to(tensor.device), :, :length] = tensor[:, :, :length][b.to(tensor.device)]

    def release(self) -> None:
        """Give the memory back; everything stored is lost."""
        self.num_rows = self.length = 0
        self._keys.clear()
        self._values.clear()

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return sum(t.nbytes for t in (*self._keys.values(), *self._values.values()))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Consecutive runs [first, last) of a set of rows: slices copy faster than index lists."""
    runs: list[tuple[int, int]] = []
    for row in sorted(rows):
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
