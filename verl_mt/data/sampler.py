"""In which order rows are trained on: shuffled, mixed by weights, or by a curriculum.

The built-in samplers are pure functions from a position (how many rows were drawn before) to a row. So a run that is
resumed at any position goes on exactly as it would have, and prompts that were in flight are simply issued again.
"""

from __future__ import annotations

import abc
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

from verl_mt.data.dataset import DataRow, DataSource
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.errors import CheckpointError, DataError
from verl_mt.plugins import Registry, load_object

_GOLDEN = 0.6180339887498949


class SamplerOptions(Protocol):
    """The keys of `data.*` that choose the order."""

    shuffle: bool
    mixing: str
    sampler: str | None
    sampler_kwargs: dict[str, Any]


class RowSampler(abc.ABC):
    """Draws training rows. A curriculum of your own subclasses this and is named by `data.sampler`.

    It is made with `cls(sources, seed=..., shuffle=..., **data.sampler_kwargs)`.
    """

    uses_weights = False
    """A sampler that reads `DataSource.weight` says so; without it weights are refused, not ignored."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """Rows of one epoch."""

    @abc.abstractmethod
    def next_batch(self, n: int) -> list[DataRow]:
        """The next n rows. Never ends; a new epoch follows the last."""

    @abc.abstractmethod
    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        """Plain data from which a new sampler goes on.

        Args:
            in_flight: rows that were drawn last and whose groups were not consumed: they will be drawn again.
        """

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

        A group names its row by `source` (the entry's name, `DataRow.source`) and `row_index` (`DataRow.index`);
        several entries may share a `data_source`.
        """


class PositionSampler(RowSampler):
    """A sampler whose row depends on nothing but the position."""

    names_matter = True
    """The order depends on the entries' names; False: a run goes on though they have other names."""

    def __init__(self, sources: Sequence[DataSource], *, seed: int = 0, shuffle: bool = True):
        empty = [s.name for s in sources if not s.rows]
        if empty or not sources:
            raise DataError(f"no training rows in {', '.join(empty) or 'data.train_files'}")
        self.sources = list(sources)
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._orders: dict[str, tuple[int, list[int]]] = {}

    @property
    def num_rows(self) -> int:
        return sum(len(s.rows) for s in self.sources)

    @abc.abstractmethod
    def row_at(self, position: int) -> DataRow:
        """The row that is drawn as number `position`, from 0."""

    def next_batch(self, n: int) -> list[DataRow]:
        rows = [self.row_at(position) for position in range(self.position, self.position + n)]
        self.position += n
        return rows

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        if not 0 <= in_flight <= self.position:
            raise ValueError(f"in_flight must be between 0 and the {self.position} rows drawn so far, got {in_flight}")
        return {"position": self.position - in_flight, "rows": {s.name: len(s.rows) for s in self.sources}}

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
        self._rows = [row for source in self.sources for row in source.rows]

    def row_at(self, position: int) -> DataRow:
        return self._rows[self.ordered("all", len(self._rows), position)]


class WeightedSampler(PositionSampler):
    """Sources are mixed by their weights; within a source every row comes once before any comes twice.

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

    def row_at(self, position: int) -> DataRow:
        if position < self._counted:
            self._counted, self._counts = 0, [0] * len(self.sources)
        while self._counted < position:
            self._counts[self._source_at(self._counted)] += 1
            self._counted += 1
        which = self._source_at(position)
        source = self.sources[which]
        return source.rows[self.ordered(source.name, len(source.rows), self._counts[which])]

    def _source_at(self, position: int) -> int:
        return bisect_right(self._edges, (self._offset + position * _GOLDEN) % 1.0)


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
        rows = [row for source in self.sources for row in source.rows]
        difficulties = [_difficulty(row, key) for row in rows]
        self._starts: list[int] = []
        self._stages: list[list[DataRow]] = []
        for stage in schedule:
            start, limit = _stage(stage)
            if start <= (self._starts[-1] if self._starts else -1) or (not self._starts and start != 0):
                raise DataError(f"data.sampler_kwargs.schedule: rows must grow from 0 on, got {list(schedule)!r}")
            eligible = [r for r, d in zip(rows, difficulties, strict=True) if limit is None or d <= limit]
            if not eligible:
                raise DataError(
                    f"data.sampler_kwargs.schedule: no row has {key} <= {limit}; the smallest is {min(difficulties)}"
                )
            self._starts.append(start)
            self._stages.append(eligible)
        if not self._stages:
            raise DataError(
                "data.sampler_kwargs.schedule: no stage; write [{rows: 0, max: 1}, {rows: 1000, max: null}]"
            )

    def row_at(self, position: int) -> DataRow:
        number = bisect_right(self._starts, position) - 1
        stage = self._stages[number]
        return stage[self.ordered(f"stage_{number}", len(stage), position - self._starts[number])]


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
                f"data.mixing=weights is given beside data.sampler={options.sampler}, which decides the order alone: "
                "leave one of them out"
            )
        if weighted and not getattr(cls, "uses_weights", False):
            raise DataError(
                f"data.train_files gives weights ({', '.join(weighted)}), which data.sampler={options.sampler} would "
                "ignore: leave the weights out, or say uses_weights = True in a sampler that reads them"
            )
        try:
            sampler = cls(sources, seed=seed, shuffle=options.shuffle, **options.sampler_kwargs)
        except TypeError as error:
            raise DataError(
                f"data.sampler {options.sampler}: {error}; arguments come from data.sampler_kwargs"
            ) from error
        if not isinstance(sampler, RowSampler):
            raise DataError(f"data.sampler: {options.sampler} is no subclass of verl_mt.data.sampler.RowSampler")
        return sampler
    if options.mixing == "weights":
        return WeightedSampler(sources, seed=seed, shuffle=options.shuffle)
    if weighted:
        raise DataError(
            f"data.train_files gives weights ({', '.join(weighted)}), which data.mixing={options.mixing} would ignore: "
            "set data.mixing=weights, or leave the weights out"
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
