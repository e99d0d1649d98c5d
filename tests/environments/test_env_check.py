"""`verl-mt env check`: planted leaks are found, healthy environments raise no alarm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import leaks
import pytest

from verl_mt.extensions.environments.check import check, main

FILE = Path(leaks.__file__)
ISOLATION = ("isolation of resets", "isolation of siblings", "isolation of processes")
WITHIN = {
    "ClassAttribute", "ClassCounter", "ModuleGlobal", "MutatedDefault", "SharedDatabase", "DatabaseInMemory",
    "TempFolder", "CachedSession", "CachedFunction", "GlobalRandom", "ProcessEnvironment", "DoneForAll", "Numbers",
    "OneObject", "ScoreOfAll", "SharedState", "SharedBoard", "SharedBuffer",
}  # fmt: skip
"""Leaks inside one process."""
OUTSIDE = {"WorkingFolder", "SharedServer", "Unseeded"}
"""What a new process does not undo."""
HEALTHY = {
    "Plain", "OwnDatabase", "OwnFolder", "CountsItself", "LoadsOnce", "CopiesTheBoard", "OwnRandom", "Asynchronous",
    "DeepFork", "Raises",
}  # fmt: skip


def wrong(name: str) -> dict[str, str]:
    """What -> the text of a line that says wrong."""
    return {line.what: line.text for line in check(f"{FILE}:{name}") if line.verdict == "wrong"}


def some(names: set[str], of_every_commit: set[str]) -> list[object]:
    """The names, most of them for releases only."""
    return [
        pytest.param(n, marks=pytest.mark.slow if n in of_every_commit else pytest.mark.release) for n in sorted(names)
    ]


@pytest.mark.parametrize("name", some(WITHIN, {"ClassAttribute", "SharedDatabase", "GlobalRandom"}))
def test_a_leak_within_a_process_is_found(name):
    found = wrong(name)
    assert set(found) & set(ISOLATION), found
    assert f"({name})" in next(iter(found.values())) and "leaks.py:" in next(iter(found.values()))


@pytest.mark.parametrize("name", some(OUTSIDE, {"WorkingFolder"}))
def test_a_leak_out_of_the_process_and_unseeded_numbers_are_found(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = wrong(name)
    assert "keeps state outside of the process" in found["determinism"] and f"({name})" in found["determinism"]


@pytest.mark.parametrize("name", some(HEALTHY, {"OwnDatabase", "DeepFork"}))
def test_a_healthy_environment_raises_no_alarm(name):
    assert wrong(name) == {}


@pytest.mark.slow
def test_a_temporary_folder_that_all_use_is_found_between_processes_too():
    assert "isolation of processes" in wrong("TempFolder")


@pytest.mark.slow
def test_a_fork_that_shares_state_or_forgets_it_is_found():
    assert "(ShallowFork.fork) shares state" in wrong("ShallowFork")["fork"]
    assert "(EmptyFork.fork): the copy is in another state" in wrong("EmptyFork")["fork"]
    assert any(line.what == "fork" and line.verdict == "ok" for line in check(f"{FILE}:DeepFork"))


@pytest.mark.slow
def test_a_close_that_needs_a_reset_which_failed_is_found():
    found = wrong("ClosesWhatIsMissing")
    assert set(found) == {"closed once"} and "(ClosesWhatIsMissing.close): error: " in found["closed once"]
    assert "AttributeError" in found["closed once"]


def test_the_command_prints_a_line_for_each_look_and_its_status(capsys):
    assert main(["check", f"{FILE}:Plain", "--row", '{"seed": 3}']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5].strip() for line in lines] == ["ok"] * 5 + ["note"] * 4
    assert "cost of a reset" in lines[-2] and "picklable: yes" in lines[-1]
    assert main(["check", f"{FILE}:Plane"]) == 2 and "has no 'Plane'" in capsys.readouterr().err
    assert main(["check", f"{FILE}:Plain", "--row", "{}"]) == 2
    assert "wants 'seed', which the row has not" in capsys.readouterr().err
    assert main(["check", f"{FILE}:Plain", "--config", "x"]) == 2 and "take JSON" in capsys.readouterr().err


@pytest.mark.slow
def test_the_console_command_finds_it():
    done = subprocess.run(
        [sys.executable, "-m", "verl_mt", "env", "check", f"{FILE}:ClassCounter"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "wrong  isolation of resets" in done.stdout, done.stderr
