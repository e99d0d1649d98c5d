"""How many threads a run takes where nobody says it."""

from __future__ import annotations

import os

import pytest

from verl_mt.workers import cores as module
from verl_mt.workers.cores import cores_per_worker, idle_cores
from verl_mt.workers.setup import Placement

BEFORE = [[500, 0, 100, 4000, 50, 3, 2, 0, 7, 0], [900, 5, 100, 4000, 50, 3, 2, 0, 0, 0]]


def _stat(counts: list[list[int]]) -> str:
    lines = [f"cpu{core} {' '.join(map(str, of))}" for core, of in enumerate(counts)]
    return "\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 12 0 7", "ctxt 99", ""])


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Cores that worked for `busy` of 100 ticks each while they were watched; an average load of 7."""

    def watched(*busy: int) -> None:
        stat = tmp_path / "stat"
        base = (BEFORE * 4)[: len(busy)]
        stat.write_text(_stat(base))
        later = [[of[0] + worked, *of[1:3], of[3] + 100 - worked, *of[4:]] for of, worked in zip(base, busy)]
        monkeypatch.setattr(module, "_STAT", stat)
        monkeypatch.setattr(module.time, "sleep", lambda s: stat.write_text(_stat(later)))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(len(busy))), raising=False)
        monkeypatch.setattr(os, "getloadavg", lambda: (7.0, 7.0, 7.0))

    return watched


@pytest.mark.parametrize(
    ("busy", "free"),
    [((2, 1), 2), ((100, 0), 1), ((100, 100), 1), ((60, 60), 1), ((30, 10), 2), ((0,) * 8, 4), ((100, 100, 0, 0), 2)],
)
def test_what_works_now_counts_and_not_what_has_ended(machine, busy, free):
    machine(*busy)
    assert idle_cores() == free


def test_only_cores_that_this_process_may_use_count(machine, monkeypatch):
    machine(0, 0, 0, 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3}, raising=False)
    assert idle_cores() == 1


@pytest.mark.parametrize("text", [None, "intr 12\n"])
def test_without_counts_the_load_average_tells(machine, tmp_path, monkeypatch, text):
    machine(0, 0, 0)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.2, 7.0, 7.0))
    monkeypatch.setattr(module, "_STAT", tmp_path / "other")
    monkeypatch.setattr(module.time, "sleep", lambda s: None)
    if text:
        (tmp_path / "other").write_text(text)
    assert idle_cores() == 2


@pytest.mark.slow
def test_this_machine_counts_its_cores():
    """The real file, where there is one."""
    assert 1 <= idle_cores() <= 4
    if module._STAT.exists():
        assert set(os.sched_getaffinity(0)) <= set(module._spent(module._STAT))


@pytest.mark.parametrize(
    ("placement", "threads"),
    [
        (Placement(num_threads=3, deterministic=True), 3),
        (Placement(deterministic=True), 1),
        (Placement(), 7),
        (Placement(n_workers_per_node=2), 3),
        (Placement(n_workers_per_node=7), 1),
        (Placement(n_workers_per_node=8), 1),
    ],
)
def test_ray_workers_share_the_cores_that_this_process_may_use(monkeypatch, placement, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: set(range(1, 8))}[pid], raising=False)
    assert cores_per_worker(placement) == threads


@pytest.mark.parametrize(("count", "cores"), [(3, [0, 1, 2]), (1, [0]), (None, [0])])
def test_where_no_core_is_forbidden_all_may_be_used(monkeypatch, count, cores):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert module._allowed() == cores


def test_idle_ticks_are_those_of_idle_and_iowait_and_guests_count_once(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9\ncpu2 1 2 4 8 16 32 64 128 256 512\ncpu11 1 2 4 8\nintr 5 5 5 5 5\n")
    assert module._spent(stat) == {2: (24, 255), 11: (8, 15)}
    assert module._spent(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("cores", "load", "free"), [(3, 1.2, 2), (3, 2.4, 1), (3, 7.0, 1), (9, 1.0, 4), (3, None, 3), (2, -0.4, 2)]
)
def test_the_load_average_leaves_between_one_and_four_cores(tmp_path, monkeypatch, cores, load, free):
    """Nothing is counted, so nothing is watched."""
    monkeypatch.setattr(module, "_STAT", tmp_path / "none")
    monkeypatch.setattr(module.time, "sleep", lambda s: pytest.fail("watched"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    if load is None:
        monkeypatch.delattr(os, "getloadavg")
    else:
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert idle_cores() == free


@pytest.mark.parametrize("lacking", ["before", "after", "both", "no tick"])
def test_a_core_without_counts_leaves_it_to_the_load_average(tmp_path, monkeypatch, lacking):
    one, two = _stat(BEFORE[:1]), _stat(BEFORE)
    first = {"before": one, "after": two, "both": one, "no tick": two}[lacking]
    second = {"before": two, "after": one, "both": one, "no tick": two}[lacking]
    later = second.replace("cpu0 500", "cpu0 600")
    stat = tmp_path / "stat"
    stat.write_text(first)
    monkeypatch.setattr(module, "_STAT", stat)
    monkeypatch.setattr(module.time, "sleep", lambda s: stat.write_text(later))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 9.0, 9.0))
    assert idle_cores() == 2
