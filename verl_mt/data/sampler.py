"""In which order rows are trained on: shuffled, mixed by weights, or by a curriculum.

The built-in samplers are pure functions from a position (how many rows were drawn before) to a row. So a run that is
resumed at any position goes on exactly as it would have.

An epoch of at most a million rows, or of rows in memory, is a shuffled list of their numbers. Of more the number of
each draw is computed when it is drawn (`permuted`): nothing is kept, and to resume costs nothing.
"""

from __future__ import annotations

import abc
import hashlib
import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import isqrt
from typing import Any, Protocol, overload

import numpy as np

from verl_mt.data.dataset import DataRow, DataSource
from verl_mt.data.large_files import LargeRows
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.errors import CheckpointError, DataError
from verl_mt.plugins import Registry, load_object

_GOLDEN = 0.6180339887498949
_LISTED = 2**20
"""An order of as many numbers takes a second to shuffle, and 40 MB."""
_ROUNDS = 6
_COUNTED_AT_ONCE = 2**20


class SamplerOptions(Protocol):
    """The keys of `data.*` that choose the order."""

    shuffle: bool
    mixing: str
    sampler: str | None
    sampler_kwargs: dict[str, Any]


class RowSampler(abc.ABC):
    """Draws training rows. A custom curriculum subclasses this. Name it in `data.sampler`.

    It is made with `cls(sources, seed=..., shuffle=..., **data.sampler_kwargs)`.
    """

    uses_weights = False
    """A sampler that reads `DataSource.weight` says so. Without it weights are refused, not ignored."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """Rows of one epoch."""

    @abc.abstractmethod
    def next_batch(self, n: int) -> list[DataRow]:
        """The next n rows. Never ends. A new epoch follows the last."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain data from which a new sampler goes on behind the row that was drawn last. Rows of in-flight prompts
        are not its concern: the checkpoint holds them."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`.

        Raises:
            CheckpointError: the state belongs to other data.
        """

    def go_on_in_other_rows(self, state: dict[str, Any]) -> None:
        """Take a state that was saved with other rows (`trainer.resume_mode=other_data`). By default like any other."""
        self.load_state_dict(state)

    def update(self, groups: Sequence[TrajectoryGroup]) -> None:  # noqa: B027 - most samplers learn nothing
        """The groups of a finished step, scored: what an adaptive curriculum learns from.

        A group names its row by `source` (the entry's name, `DataRow.source`) and `row_index` (`DataRow.index`).
        Several entries may share a `data_source`.
        """


def permuted(key: str, size: int, offset: int) -> int:
    """Item `offset` of the order of `range(size)` that `key` names, in constant time and memory.

    A Feistel network over the smallest square that holds the range, walked again where it leads out of the range (Black
    and Rogaway 2002, Ciphers with Arbitrary Finite Domains): a bijection whatever the rounds compute.
    """
    side, secret = isqrt(size - 1) + 1, hashlib.sha256(key.encode()).digest()
    while True:
        left, right = divmod(offset, side)
        for number in range(_ROUNDS):
            mixed = hashlib.blake2b(b"%d/%d" % (number, right), digest_size=8, key=secret).digest()
            left, right = right, (left + int.from_bytes(mixed, "little")) % side
        offset = left * side + right
        if offset < size:
            return offset


class Joined(Sequence[DataRow]):
    """The rows of all sources, one after the other. None is read before it is asked for."""

    def __init__(self, sources: Sequence[DataSource]):
        self._parts = [source.rows for source in sources]
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> DataRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[DataRow]: ...
    def __getitem__(self, index: int | slice) -> DataRow | list[DataRow]:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self[k] for k in found]
        which, place = self.place_of(found)
        return self._parts[which][place]

    def place_of(self, index: int) -> tuple[int, int]:
        """(number of the source, row in it)"""
        which = bisect_right(self._ends, index)
        return which, index - (self._ends[which - 1] if which else 0)


class PositionSampler(RowSampler):
    """A sampler whose row depends on nothing but the position.

    A subclass overrides `row_at`, or `place_at`: then rows of large files are read many at a time.
    """

    names_matter = True
    """The order depends on the entries' names. False: a run goes on though they have other names."""

    def __init__(self, sources: Sequence[DataSource], *, seed: int = 0, shuffle: bool = True):
        empty = [s.name for s in sources if not s.rows]
        if empty or not sources:
            raise DataError(f"no training rows in {', '.join(empty) or 'data.train_files'}")
        self.sources = list(sources)
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._orders: dict[str, tuple[int, list[int]]] = {}
        self._large = [s.rows for s in self.sources if isinstance(s.rows, LargeRows)]
        self._ahead: dict[int, DataRow] = {}

    @property
    def num_rows(self) -> int:
        return sum(len(s.rows) for s in self.sources)

    def row_at(self, position: int) -> DataRow:
        """The row that is drawn as number `position`, from 0."""
        which, place = self.place_at(position)
        return self.sources[which].rows[place]

    def place_at(self, position: int) -> tuple[int, int]:
        """Where that row is: (number of its source, its number there)."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither row_at nor place_at")

    def next_batch(self, n: int) -> list[DataRow]:
        wanted = range(self.position, self.position + n)
        if self._large and type(self).row_at is PositionSampler.row_at:
            rows = self._read(wanted)
        else:
            rows = [self.row_at(position) for position in wanted]
        self.position += n
        return rows

    def _read(self, wanted: range) -> list[DataRow]:
        """The rows of these positions, and with them those that come next, where it saves reading."""
        missing = next((position for position in wanted if position not in self._ahead), None)
        if missing is not None:
            ahead = max(rows.look_ahead for rows in self._large)
            positions = range(missing, max(wanted.stop, missing + ahead))
            places = [self.place_at(position) for position in positions]
            for which, source in enumerate(self.sources):
                of_it = [(position, place[1]) for position, place in zip(positions, places) if place[0] == which]
                indices = [index for _, index in of_it]
                rows = source.rows
                found = rows.take(indices) if isinstance(rows, LargeRows) else [rows[k] for k in indices]
                self._ahead |= zip((position for position, _ in of_it), found)
        return [self._ahead.pop(position) for position in wanted]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "rows": {s.name: len(s.rows) for s in self.sources}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = {s.name: len(s.rows) for s in self.sources}
        then, now = (state["rows"], rows) if self.names_matter else (list(state["rows"].values()), list(rows.values()))
        if then != now:
            raise CheckpointError(
                f"the checkpoint was written with training rows {state['rows']}, now there are {rows}: "
                "give the same data, start a new run (trainer.resume_mode=disable), or go on in these rows with "
                "trainer.resume_mode=other_data"
            )
        self.position = state["position"]

    def go_on_in_other_rows(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def ordered(self, name: str, size: int, position: int) -> int:
        """Item `position` of an endless walk through `size` items: each epoch has every item once, in its own order."""
        epoch, offset = divmod(position, size)
        if not self.shuffle:
            return offset
        if self._large and size > _LISTED:
            return permuted(f"{self.seed}/{name}/{epoch}", size, offset)
        known = self._orders.get(name)
        if known is None or known[0] != epoch or len(known[1]) != size:
            # Seeded by text: the same order in every process and version of Python.
            order = list(range(size))
            random.Random(f"{self.seed}/{name}/{epoch}").shuffle(order)
            self._orders[name] = known = (epoch, order)
        return known[1][offset]


class ShuffledSampler(PositionSampler):
    """All rows of all sources, every row once per epoch: sources are mixed by their size."""

    names_matter = False

    def __init__(self, sources: Sequence[DataSource], *, seed: int = 0, shuffle: bool = True):
        super().__init__(sources, seed=seed, shuffle=shuffle)
        self._rows = Joined(self.sources)

    def place_at(self, position: int) -> tuple[int, int]:
        return self._rows.place_of(self.ordered("all", len(self._rows), position))


class WeightedSampler(PositionSampler):
    """Sources are mixed by their weights. Within a source every row comes once before any comes twice.

    Draw number p comes from the source whose share of [0, 1) holds (u + p * golden ratio) mod 1, u uniform in the seed.
    Each draw has exactly the weights' probabilities, and n draws in a row stay within a few rows of n * weight (the
    sequence has low discrepancy), where independent draws would stray by sqrt(n).
    """

    uses_weights = True

    def __init__(self, sources: Sequence[DataSource], *, seed: int = 0, shuffle: bool = True):
        super().__init__(sources, seed=seed, shuffle=shuffle)
        missing = [s.name for s in sources if s.weight is None]
        if missing:
            raise DataError(
                f"data.mixing=weights, but {', '.join(missing)} has no weight: "
                "write data.train_files as {name: {path: ..., weight: ...}}"
            )
        weights = [s.weight for s in self.sources if s.weight is not None]
        self._edges = [edge / sum(weights) for edge in accumulate(weights)][:-1]
        self._offset = random.Random(f"{seed}/mixing").random()
        self._counted = 0
        self._counts = [0] * len(self.sources)

    def place_at(self, position: int) -> tuple[int, int]:
        if position < self._counted:
            self._counted, self._counts = 0, [0] * len(self.sources)
        while self._counted < position:
            end = min(position, self._counted + _COUNTED_AT_ONCE)
            drawn = self._sources_at(np.arange(self._counted, end))
            self._counts = (np.bincount(drawn, minlength=len(self.sources)) + self._counts).tolist()
            self._counted = end
        which = int(self._sources_at(np.array([position]))[0])
        source = self.sources[which]
        return which, self.ordered(source.name, len(source.rows), self._counts[which])

    def _sources_at(self, positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._edges, (self._offset + positions * _GOLDEN) % 1.0, side="right")


class DifficultySampler(PositionSampler):
    """A curriculum: only rows up to a difficulty, which grows as rows are drawn.

    Args:
        key: a column, or a key of `extra_info`, that holds a number in every row.
        schedule: stages `{rows: r, max: d}` in order, the first with rows 0: once r rows were drawn, those with a
            difficulty of at most d are drawn (null = all), every one once before any comes twice.
    """

    names_matter = False

    def __init__(
        self,
        sources: Sequence[DataSource],
        *,
        key: str,
        schedule: Sequence[dict[str, Any]],
        seed: int = 0,
        shuffle: bool = True,
    ):
        super().__init__(sources, seed=seed, shuffle=shuffle)
        self._rows = Joined(self.sources)
        # Of every row of a large file: it is read once at each start, a part at a time.
        difficulties = array("d", (_difficulty(row, key) for source in self.sources for row in source.rows))
        self._starts: list[int] = []
        self._stages: list[array[int]] = []
        for stage in schedule:
            start, limit = _stage(stage)
            if start <= (self._starts[-1] if self._starts else -1) or (not self._starts and start != 0):
                raise DataError(f"data.sampler_kwargs.schedule: rows must grow from 0 on, got {list(schedule)!r}")
            eligible = array("q", (k for k, d in enumerate(difficulties) if limit is None or d <= limit))
            if not eligible:
                raise DataError(
                    f"data.sampler_kwargs.schedule: no row has {key} <= {limit}. The smallest is {min(difficulties)}"
                )
            self._starts.append(start)
            self._stages.append(eligible)
        if not self._stages:
            raise DataError(
                "data.sampler_kwargs.schedule: no stage. Write [{rows: 0, max: 1}, {rows: 1000, max: null}]"
            )

    def place_at(self, position: int) -> tuple[int, int]:
        number = bisect_right(self._starts, position) - 1
        stage = self._stages[number]
        return self._rows.place_of(stage[self.ordered(f"stage_{number}", len(stage), position - self._starts[number])])


samplers: Registry[type[RowSampler]] = Registry("sampler", {"difficulty": DifficultySampler})
"""Curricula by name; a dotted path names any other."""


def build_sampler(options: SamplerOptions, sources: Sequence[DataSource], *, seed: int) -> RowSampler:
    """The sampler that `data.*` asks for.

    Raises:
        DataError: weights that are missing or would be ignored.
        PluginError: `data.sampler` does not resolve, or is no RowSampler.
    """
    weighted = [s.name for s in sources if s.weight is not None]
    if options.sampler is not None:
        cls = load_object(options.sampler, what="data.sampler", registry=samplers)
        if options.mixing == "weights":
            raise DataError(
                f"data.mixing=weights has no effect beside data.sampler={options.sampler}, which decides the order "
                "alone: remove one of them"
            )
        if weighted and not getattr(cls, "uses_weights", False):
            raise DataError(
                f"data.train_files has weights ({', '.join(weighted)}), which data.sampler={options.sampler} would "
                "ignore: remove the weights, or set uses_weights = True in a sampler that reads them"
            )
        try:
            sampler = cls(sources, seed=seed, shuffle=options.shuffle, **options.sampler_kwargs)
        except TypeError as error:
            raise DataError(
                f"data.sampler {options.sampler}: {error}. Arguments come from data.sampler_kwargs"
            ) from error
        if not isinstance(sampler, RowSampler):
            raise DataError(f"data.sampler: {options.sampler} is no subclass of verl_mt.data.sampler.RowSampler")
        return sampler
    if options.mixing == "weights":
        return WeightedSampler(sources, seed=seed, shuffle=options.shuffle)
    if weighted:
        raise DataError(
            f"data.train_files has weights ({', '.join(weighted)}), which data.mixing={options.mixing} would ignore: "
            "set data.mixing=weights, or remove the weights"
        )
    return ShuffledSampler(sources, seed=seed, shuffle=options.shuffle)


def _difficulty(row: DataRow, key: str) -> float:
    value = row.raw.get(key, row.extra_info.get(key))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{row.place}: data.sampler_kwargs.key names {key!r}, got {value!r}, not a number")
    return value


def _stage(stage: Any) -> tuple[int, float | None]:
    if not isinstance(stage, dict) or set(stage) != {"rows", "max"} or not isinstance(stage["rows"], int):
        raise DataError(f"data.sampler_kwargs.schedule: expected {{rows: number, max: number or null}}, got {stage!r}")
    return stage["rows"], stage["max"]
