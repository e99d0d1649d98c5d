"""The numbers of many tokens in few bytes: what the page decodes when a rollout is opened.

Layout, little endian. Tokens of all records of a part stand one after another (N tokens); numbers are kept only for
the M tokens that were sampled or are trained. Every column is *planar*: all lowest bytes first, then all second bytes,
and so on, because equal bytes beside each other compress far better. The whole is gzipped.

==========  =====================  =================================================================================
column      type                   meaning
==========  =====================  =================================================================================
ids         uint24, N              token ids
flags       uint8, N               bit 0 sampled, bit 1 in the loss
sampler     float16, M             the sampler's log-prob; NaN = none
drift       float16, M             trainer's minus sampler's log-prob; the trainer's own where there is no sampler's;
                                   NaN = none
advantage   float16, M             NaN = none
version     int32, M               of the weights that sampled the token, -1 = none
clip        uint8, M               0 not known, 1 inside, 2 clipped
==========  =====================  =================================================================================

float16 keeps 3 significant digits; the difference is stored instead of the second log-prob so that a ratio near 1 keeps
its digits. Header: N and M as uint32.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_KINDS = {"sampler": "<f2", "drift": "<f2", "advantage": "<f2", "version": "<i4", "clip": "u1"}
_COLUMNS = ("token_ids", "sampled", "loss_mask", "rollout_log_probs", "policy_versions")


class TokenColumns:
    """Collects records; `to_bytes` gives the layout above."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_numbered = 0
        self._ids: list[np.ndarray] = []
        self._flags: list[np.ndarray] = []
        self._numbers: dict[str, list[np.ndarray]] = {name: [] for name in _KINDS}

    def add(self, record: Mapping[str, Any]) -> RecordNumbers:
        """Append a record of a rollout row.

        Raises:
            ValueError: its columns are missing or of different lengths.
        """
        numbers = RecordNumbers(record)
        kept = numbers.kept
        self.num_tokens += len(numbers.ids)
        self.num_numbered += int(kept.sum())
        self._ids.append(numbers.ids)
        self._flags.append((numbers.sampled | numbers.trained << 1).astype(np.uint8))
        columns = {
            "sampler": numbers.sampler,
            "drift": np.where(np.isnan(numbers.sampler), numbers.trainer, numbers.trainer - numbers.sampler),
            "advantage": numbers.advantage,
            "version": numbers.version,
            "clip": numbers.clip,
        }
        for name, column in columns.items():
            self._numbers[name].append(column[kept])
        return numbers

    def extend(self, other: TokenColumns) -> None:
        """Append the records of another."""
        self.num_tokens += other.num_tokens
        self.num_numbered += other.num_numbered
        self._ids += other._ids
        self._flags += other._flags
        for name, parts in other._numbers.items():
            self._numbers[name] += parts

    def to_bytes(self) -> bytes:
        """The chunk, not compressed."""

        def joined(parts: list[np.ndarray], kind: str) -> bytes:
            whole = np.concatenate(parts) if parts else np.zeros(0)
            width = np.dtype(kind).itemsize
            return whole.astype(kind).view(np.uint8).reshape(len(whole), width).T.tobytes()

        ids = np.concatenate(self._ids) if self._ids else np.zeros(0, np.int64)
        planes = b"".join((ids >> shift & 255).astype(np.uint8).tobytes() for shift in (0, 8, 16))
        with np.errstate(over="ignore"):
            numbers = b"".join(joined(self._numbers[name], kind) for name, kind in _KINDS.items())
        return struct.pack("<II", self.num_tokens, self.num_numbered) + planes + joined(self._flags, "u1") + numbers


class RecordNumbers:
    """The columns of one record as arrays, shape (T,)."""

    def __init__(self, record: Mapping[str, Any]):
        lengths = {name: len(record.get(name) or []) for name in _COLUMNS}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"columns of one record differ in length: {lengths}")
        size = lengths["token_ids"]
        self.ids = np.array(record["token_ids"], np.int64).reshape(size)
        self.sampled = np.array(record["sampled"], np.int64).reshape(size)
        self.trained = np.array(record["loss_mask"], np.int64).reshape(size)
        self.kept = (self.sampled | self.trained).astype(bool)
        has = bool(record.get("has_log_probs", True))
        self.sampler = _floats(record["rollout_log_probs"] if has else None, size)
        self.sampler[self.sampled == 0] = np.nan
        self.trainer = _floats(record.get("old_log_probs"), size)
        self.trainer[self.trained == 0] = np.nan
        self.advantage = _floats(record.get("advantages"), size)
        self.version = np.array(record["policy_versions"], np.int64).reshape(size)
        self.clip = np.full(size, int(record.get("clipped") is not None), np.int64)
        places = [place for place in record.get("clipped") or [] if 0 <= place < size]
        self.clip[places] = 2

    @property
    def ratio(self) -> np.ndarray:
        """Trainer's to sampler's probability; NaN where one of them is not known."""
        return np.exp(np.clip(self.trainer - self.sampler, -20, 20))


def _floats(values: Sequence[float | None] | None, size: int) -> np.ndarray:
    if values is None or len(values) != size:
        return np.full(size, np.nan)
    return np.array([np.nan if v is None else v for v in values], np.float64).reshape(size)
