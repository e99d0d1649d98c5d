"""The order of rows: every row once per epoch, weights exact, resumable at any point."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.data.dataset import DataRow, DataSource
from verl_mt.data.sampler import (
    DifficultySampler,
    Joined,
    PositionSampler,
    RowSampler,
    ShuffledSampler,
    WeightedSampler,
    build_sampler,
    permuted,
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
        ({"key": "level", "schedule": [{"rows": 0, "max": -1}]}, "no row has level <= -1. The smallest is 0"),
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


def drawn(sampler, n):
    return [(row.data_source, row.index) for row in sampler.next_batch(n)]


def shuffled(key, size):
    """The order that `key` names."""
    order = list(range(size))
    random.Random(key).shuffle(order)
    return order


def test_a_computed_order_is_the_same_in_every_version():
    """Six rounds, written out again."""

    def expected(key, size, item):
        side = next(side for side in range(1, size + 1) if side * side >= size)
        secret = hashlib.sha256(key.encode()).digest()
        while True:
            left, right = item // side, item % side
            for number in range(6):
                mixed = hashlib.blake2b(f"{number}/{right}".encode(), digest_size=8, key=secret).digest()
                left, right = right, (left + int.from_bytes(mixed, "little")) % side
            item = left * side + right
            if item < size:
                return item

    for size in (1, 2, 3, 4, 5, 9, 10, 17):
        orders = [[found("0/all/0", size, k) for k in range(size)] for found in (permuted, expected)]
        assert orders[0] == orders[1]
    assert [permuted("0/all/0", 10, k) for k in range(10)] == [7, 1, 9, 3, 0, 8, 4, 6, 2, 5]


def test_the_order_of_a_seed_is_the_same_in_every_version():
    sources = [source("a", 3), source("b", 2)]
    both = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    orders = [[both[k] for k in shuffled(f"3/all/{epoch}", 5)] for epoch in range(3)]
    assert drawn(ShuffledSampler(sources, seed=3), 15) == orders[0] + orders[1] + orders[2]
    assert orders[0] == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1)]
    assert drawn(ShuffledSampler(sources, shuffle=False), 7) == [*both, *both[:2]]
    assert drawn(ShuffledSampler(sources), 5) == [both[k] for k in shuffled("0/all/0", 5)]


def test_weighted_draws_are_the_same_in_every_version():
    sources = [source("a", 3, 1.0), source("b", 2, 3.0)]
    offset, golden = random.Random("3/mixing").random(), 0.6180339887498949
    which = ["ab"[(offset + k * golden) % 1 >= 0.25] for k in range(40)]
    orders = {
        name: [k for epoch in range(20) for k in shuffled(f"3/{name}/{epoch}", size)]
        for name, size in (("a", 3), ("b", 2))
    }
    expected = [(name, orders[name][which[:k].count(name)]) for k, name in enumerate(which)]
    sampler = WeightedSampler(sources, seed=3)
    assert drawn(sampler, 40) == expected and {"a", "b"} == set(which)
    assert [sampler.row_at(k).index for k in (30, 5, 6, 6, 0)] == [expected[k][1] for k in (30, 5, 6, 6, 0)]
    plain = WeightedSampler(sources, seed=3, shuffle=False)
    assert drawn(plain, 40) == [
        (name, which[:k].count(name) % len("aaa" if name == "a" else "bb")) for k, name in enumerate(which)
    ]


def test_a_weighted_draw_counts_on_from_the_last_one():
    sampler = WeightedSampler([source("a", 3, 1.0), source("b", 2, 3.0)])
    looked, look = [], sampler._sources_at
    sampler._sources_at = lambda positions: looked.append(len(positions)) or look(positions)
    for _ in range(50):
        sampler.next_batch(1)
    assert sum(looked) == 99, "each position once for its row, and all but the last once more as one before"
    sampler.row_at(49)
    assert sum(looked) == 100
    assert np.bincount(look(np.arange(49)), minlength=2).tolist() == sampler._counts


def test_a_source_may_weigh_everything():
    sampler = WeightedSampler([source("a", 2, 0.0), source("b", 3, 2.0), source("c", 2, 0.0)], shuffle=False)
    assert drawn(sampler, 4) == [("b", 0), ("b", 1), ("b", 2), ("b", 0)]


def test_a_stage_walks_through_its_own_rows_from_its_start():
    sources = [source("a", 4), source("b", 3)]  # levels 0 1 2 0, 0 1 2
    schedule = [{"rows": 0, "max": 0}, {"rows": 4, "max": 1}, {"rows": 6, "max": None}]
    plain = DifficultySampler(sources, key="level", schedule=schedule, shuffle=False)
    easy, both = [("a", 0), ("a", 3), ("b", 0)], [("a", 0), ("a", 1), ("a", 3), ("b", 0), ("b", 1)]
    every = [("a", k) for k in range(4)] + [("b", k) for k in range(3)]
    assert drawn(plain, 15) == [*easy, easy[0], *both[:2], *every, *every[:2]]
    assert plain.num_rows == 7
    mixed = DifficultySampler(sources, key="level", schedule=schedule, seed=5)
    assert drawn(mixed, 8) == [
        *[easy[k] for k in (*shuffled("5/stage_0/0", 3), shuffled("5/stage_0/1", 3)[0])],
        *[both[k] for k in shuffled("5/stage_1/0", 5)[:2]], *[every[k] for k in shuffled("5/stage_2/0", 7)[:2]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ([{"rows": 0, "max": 1}, {"rows": 0, "max": 2}], "rows must grow from 0 on"),
        ([{"rows": 0, "max": 1}, {"rows": 5, "max": 2}, {"rows": 4, "max": 2}], "rows must grow from 0 on"),
        ([{"rows": -1, "max": 1}], "rows must grow from 0 on"),
        ([{"rows": 0, "max": 1}, {"rows": 1, "max": -1}], "no row has level <= -1. The smallest is 0"),
        ([5], "expected {rows: number, max: number or null}, got 5"),
        ([{"rows": 0, "max": 1, "more": 2}], "expected {rows"),
        ([{"rows": 0.5, "max": 1}], "expected {rows"),
    ],
)
def test_a_schedule_grows_from_the_first_row(schedule, said):
    with pytest.raises(DataError, match=said):
        DifficultySampler([source("a", 4)], key="level", schedule=schedule)
    DifficultySampler([source("a", 4)], key="level", schedule=[{"rows": 0, "max": 0}, {"rows": 1, "max": 0}])


@pytest.mark.parametrize("value", [True, "1", None])
def test_a_difficulty_is_a_number_in_a_column_or_in_extra_info(value):
    rows = [
        DataRow([], "a", raw={"x": 1.5}, extra_info={"x": 9}, index=0),
        DataRow([], "a", extra_info={"x": 2}, index=1),
    ]
    schedule = [{"rows": 0, "max": 1.5}, {"rows": 2, "max": 2}]
    sampler = DifficultySampler([DataSource("a", rows)], key="x", schedule=schedule, shuffle=False)
    assert [row.index for row in sampler.next_batch(4)] == [0, 0, 0, 1]
    rows[1].extra_info["x"] = value
    with pytest.raises(DataError, match=r"row 2: data\.sampler_kwargs\.key names 'x'"):
        DifficultySampler([DataSource("a", rows)], key="x", schedule=schedule)


def test_joined_rows_are_one_sequence():
    joined = Joined([source("a", 2), source("b", 0), source("c", 3)])
    assert len(joined) == 5
    assert [joined.place_of(k) for k in range(5)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    assert names(joined[1:4]) == ["a1", "c0", "c1"] and names([joined[-1], joined[0]]) == ["c2", "a0"]
    with pytest.raises(IndexError):
        joined[5]


def test_a_position_is_kept_and_taken_up():
    sampler = make("shuffled", 0, (5, 6))
    sampler.next_batch(3)
    sampler.next_batch(4)
    assert sampler.state_dict() == {"position": 7, "rows": {"s0": 5, "s1": 6}} and sampler.num_rows == 11
    other = make("shuffled", 0, (2, 2))
    other.go_on_in_other_rows(sampler.state_dict())
    assert other.position == 7
    with pytest.raises(CheckpointError, match="other_data"):
        other.load_state_dict(sampler.state_dict())
    same = make("weighted", 0, (5, 6))
    same.load_state_dict(sampler.state_dict())
    assert same.position == 7


def test_other_rows_are_taken_up_like_any_state_by_a_sampler_that_does_not_say_otherwise():
    class Own(RowSampler):
        num_rows = 1

        def next_batch(self, n):
            return []

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.state = state

    own = Own()
    own.go_on_in_other_rows({"k": 1})
    own.update([])
    assert own.state == {"k": 1}


def test_no_sources_and_empty_ones_are_refused():
    with pytest.raises(DataError, match=r"no training rows in data\.train_files"):
        ShuffledSampler([])
    with pytest.raises(DataError, match="no training rows in b, c"):
        ShuffledSampler([source("a", 1), source("b", 0), source("c", 0)])
    with pytest.raises(NotImplementedError, match="PositionSampler overrides neither row_at nor place_at"):
        PositionSampler([source("a", 1)]).next_batch(1)


def test_orders_of_several_names_and_sizes_are_kept_apart():
    sampler = PositionSampler([source("a", 1)], seed=4)
    for position in (0, 4, 1, 9, 3, 0):
        for name, size in (("x", 4), ("y", 4), ("x", 3)):
            expected = shuffled(f"4/{name}/{position // size}", size)[position % size]
            assert sampler.ordered(name, size, position) == expected


def test_an_order_is_shuffled_once_an_epoch(monkeypatch):
    made, original = [], random.Random
    monkeypatch.setattr("verl_mt.data.sampler.random.Random", lambda key: made.append(key) or original(key))
    sampler = PositionSampler([source("a", 1)], seed=4)
    for position in range(8):
        sampler.ordered("x", 4, position)
    assert made == ["4/x/0", "4/x/1"]


def test_a_chosen_sampler_gets_seed_and_shuffle():
    plain, weighted = [source("a", 9)], [source("a", 9, 1.0)]
    for chosen, sources in ((options(), plain), (options(mixing="weights"), weighted)):
        made = build_sampler(chosen, sources, seed=7)
        assert (made.seed, made.shuffle, made.sources) == (7, True, sources)
    for changed in ({}, {"mixing": "weights"}, {"sampler": f"{__file__}:ByWeight"}):
        made = build_sampler(options(shuffle=False, **changed), weighted if changed else plain, seed=7)
        assert (made.seed, made.shuffle) == (7, False)
