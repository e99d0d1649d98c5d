"""The order of rows: every row once per epoch, weights exact, resumable at any point."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.data.dataset import DataRow, DataSource
from verl_mt.data.sampler import (
    DifficultySampler,
    PositionSampler,
    RowSampler,
    ShuffledSampler,
    WeightedSampler,
    build_sampler,
)
from verl_mt.errors import CheckpointError, DataError, PluginError


def source(name, size, weight=None):
    rows = [
        DataRow([{"role": "user", "content": f"{name}{i}"}], name, raw={"level": i % 3}, index=i) for i in range(size)
    ]
    return DataSource(name, rows, weight)


def names(rows):
    return [r.prompt[0]["content"] for r in rows]


SCHEDULE = [{"rows": 0, "max": 0}, {"rows": 10, "max": 1}, {"rows": 25, "max": None}]


def make(kind, seed, sizes=(7, 4), shuffle=True) -> RowSampler:
    sources = [source(f"s{k}", size, weight=k + 1.0) for k, size in enumerate(sizes)]
    if kind == "difficulty":
        return DifficultySampler(sources, key="level", schedule=SCHEDULE, seed=seed, shuffle=shuffle)
    return {"shuffled": ShuffledSampler, "weighted": WeightedSampler}[kind](sources, seed=seed, shuffle=shuffle)


kinds = pytest.mark.parametrize("kind", ["shuffled", "weighted", "difficulty"])


@kinds
@given(
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    cut=st.integers(0, 7),
    seed=st.integers(0, 50),
    shuffle=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_a_resumed_sampler_goes_on_exactly_as_the_first_would_have(kind, batches, cut, seed, shuffle):
    first, resumed = make(kind, seed, shuffle=shuffle), make(kind, seed, shuffle=shuffle)
    for n in batches[:cut]:
        first.next_batch(n)
    resumed.load_state_dict(first.state_dict())
    for n in batches[cut:]:
        assert names(resumed.next_batch(n)) == names(first.next_batch(n))
    assert resumed.state_dict() == first.state_dict()


@given(seed=st.integers(0, 99), epochs=st.integers(1, 4), shuffle=st.booleans())
@settings(max_examples=20, deadline=None)
def test_every_row_comes_once_per_epoch(seed, epochs, shuffle):
    sampler = make("shuffled", seed, shuffle=shuffle)
    for _ in range(epochs):
        rows = names(sampler.next_batch(sampler.num_rows))
        assert len(set(rows)) == sampler.num_rows == 11
        if not shuffle:
            assert rows == [f"s0{i}" for i in range(7)] + [f"s1{i}" for i in range(4)]


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = make("shuffled", 0, (50, 50))
    first, second = names(sampler.next_batch(100)), names(sampler.next_batch(100))
    assert sorted(first) == sorted(second)
    assert first != second != names(make("shuffled", 1, (50, 50)).next_batch(100))


@given(
    seed=st.integers(0, 1000),
    weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=4),
    n=st.integers(1, 300),
)
@settings(max_examples=30, deadline=None)
def test_weights_hold_in_every_prefix(seed, weights, n):
    sources = [source(f"s{k}", 5, weight=w) for k, w in enumerate(weights)]
    counts = Counter(r.data_source for r in WeightedSampler(sources, seed=seed).next_batch(n))
    for s in sources:
        # Golden-ratio sequences have a discrepancy of order log(n) / n for any interval.
        assert abs(counts[s.name] - n * s.weight / sum(weights)) < 4


def test_weights_are_exact_in_expectation_over_seeds():
    position = 17
    hits = sum(
        WeightedSampler([source("a", 3, 1), source("b", 3, 3)], seed=s).row_at(position).data_source == "b"
        for s in range(2000)
    )
    assert abs(hits / 2000 - 0.75) < 0.03  # three standard errors


def test_a_weighted_source_shows_every_row_before_any_comes_twice():
    rows = [r for r in make("weighted", 3, (6, 6)).next_batch(60) if r.data_source == "s1"]
    for start in range(0, len(rows) - 5, 6):
        assert len({r.index for r in rows[start : start + 6]}) == 6


def test_difficulty_grows_with_the_rows_drawn():
    sampler = make("difficulty", 0, (30, 30))
    levels = [r.raw["level"] for r in sampler.next_batch(100)]
    assert set(levels[:10]) == {0}
    assert set(levels[10:25]) == {0, 1}
    assert set(levels[25:]) == {0, 1, 2}


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [
        ({"key": "nope", "schedule": SCHEDULE}, "row 1.*'nope'"),
        ({"key": "level", "schedule": []}, "no stage"),
        ({"key": "level", "schedule": [{"rows": 5, "max": 1}]}, "grow from 0"),
        ({"key": "level", "schedule": [{"rows": 0, "max": -1}]}, "no row has level <= -1; the smallest is 0"),
        ({"key": "level", "schedule": [{"rows": 0}]}, "expected"),
    ],
)
def test_a_bad_schedule_is_refused(kwargs, part):
    with pytest.raises(DataError, match=part):
        DifficultySampler([source("a", 4)], **kwargs)


def options(**changed):
    return SimpleNamespace(
        **({"shuffle": True, "mixing": "proportional", "sampler": None, "sampler_kwargs": {}} | changed)
    )


class Reversed(PositionSampler):
    """A user's own."""

    def row_at(self, position):
        rows = self.sources[0].rows
        return rows[-1 - position % len(rows)]


class ByWeight(Reversed):
    """One that reads weights."""

    uses_weights = True


class NoSampler:
    def __init__(self, sources, seed, shuffle):
        pass


def test_the_sampler_is_chosen_by_the_config():
    plain, weighted = [source("a", 3)], [source("a", 3, 1.0)]
    assert isinstance(build_sampler(options(), plain, seed=0), ShuffledSampler)
    assert isinstance(build_sampler(options(mixing="weights"), weighted, seed=0), WeightedSampler)
    by_name = options(sampler="difficulty", sampler_kwargs={"key": "level", "schedule": SCHEDULE})
    assert isinstance(build_sampler(by_name, plain, seed=0), DifficultySampler)
    own = build_sampler(options(sampler=f"{__file__}:Reversed"), plain, seed=0)
    assert names(own.next_batch(4)) == ["a2", "a1", "a0", "a2"]
    assert isinstance(build_sampler(options(sampler=f"{__file__}:ByWeight"), weighted, seed=0), RowSampler)


@pytest.mark.parametrize(
    ("given_options", "sources", "error", "part"),
    [
        (options(mixing="weights"), [source("a", 3)], DataError, "a has no weight"),
        (options(), [source("a", 3, 2.0)], DataError, "would ignore"),
        (options(), [source("a", 0)], DataError, "no training rows in a"),
        (options(sampler="difficulty"), [source("a", 3, 2.0)], DataError, r"weights \(a\).*difficulty would ignore"),
        (options(sampler="difficulty", mixing="weights"), [source("a", 3, 2.0)], DataError, "decides the order alone"),
        (options(sampler="dificulty"), [source("a", 3)], PluginError, "did you mean 'difficulty'"),
        (options(sampler="difficulty", sampler_kwargs={"kee": 1}), [source("a", 3)], DataError, "sampler_kwargs"),
        (options(sampler=f"{__file__}:NoSampler"), [source("a", 3)], DataError, "RowSampler"),
    ],
)
def test_a_sampler_that_cannot_work_is_refused(given_options, sources, error, part):
    with pytest.raises(error, match=part):
        build_sampler(given_options, sources, seed=0)


def test_a_checkpoint_of_other_data_is_refused():
    with pytest.raises(CheckpointError, match="resume_mode=disable"):
        make("shuffled", 0, (5, 5)).load_state_dict(make("shuffled", 0, (5, 6)).state_dict())


def test_entries_of_other_names_are_the_same_data_unless_the_order_depends_on_them():
    def renamed(mixing):
        sampler = make(mixing, 0, (5, 5))
        state = sampler.state_dict()
        return sampler, state | {"rows": {f"old_{name}": n for name, n in state["rows"].items()}}

    sampler, state = renamed("shuffled")
    sampler.load_state_dict(state)
    sampler, state = renamed("weighted")
    with pytest.raises(CheckpointError, match="resume_mode=disable"):
        sampler.load_state_dict(state)
