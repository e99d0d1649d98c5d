"""How many threads a run takes where nobody says it."""

from __future__ import annotations

import os

import pytest

from verl_mt.workers import cores as module
from verl_mt.workers.cores import idle_cores

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


def test_this_machine_counts_its_cores():
    """The real file, where there is one."""
    assert 1 <= idle_cores() <= 4
    if module._STAT.exists():
        assert set(os.sched_getaffinity(0)) <= set(module._spent(module._STAT))
