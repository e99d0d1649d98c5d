"""`verl-mt env check`: planted leaks are found, healthy environments raise no alarm."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import leaks
import pytest

from verl_mt.environments.kinds import build_kind
from verl_mt.extensions.environments import check as checking
from verl_mt.extensions.environments.check import check, main
from verl_mt.extensions.environments.probing import Script, find_actions, in_child, what_stays

FILE = Path(leaks.__file__)
ISOLATION = ("isolation of resets", "isolation of siblings", "isolation of processes")
WITHIN = {
    "ClassAttribute", "ClassCounter", "ModuleGlobal", "MutatedDefault", "SharedDatabase", "DatabaseInMemory",
    "TempFolder", "CachedSession", "CachedFunction", "GlobalRandom", "ProcessEnvironment", "DoneForAll", "Numbers",
    "OneObject", "ScoreOfAll", "SharedState", "SharedBoard", "SharedBuffer", "KeyedByThread", "ContextVariable",
    "SharedLock", "SharedGenerator", "ClosesForAll", "SeedsTorch", "SeedsNumpy", "FixedFile",
}  # fmt: skip
"""Leaks inside one process."""
OUTSIDE = {"WorkingFolder", "SharedServer", "Unseeded"}
"""What a new process does not undo."""
AT_IMPORT = {"DrawnAtImport", "OrderOfASet"}
"""What only a new interpreter shows."""
LEFT = {
    "WorkingDirectory": "the working directory ", "Umask": "the umask ", "SetsVariable": "variables (SHOP_MODE)",
    "WarningFilters": "the filters of warnings", "Locale": "the locale ", "Patches": "time.monotonic_ns, which",
    "LeavesThreads": "4 more threads after 4 closed", "LeavesFiles": "4 more open files or connections after 4",
    "LogHandlers": "4 more handlers of loggers after 4", "SeedsTorch": "the generator of torch",
}  # fmt: skip
"""What an episode leaves in its process -> what is said of it."""
HEALTHY = {
    "Plain", "OwnDatabase", "OwnFolder", "CountsItself", "LoadsOnce", "CopiesTheBoard", "OwnRandom", "Asynchronous",
    "DeepFork", "Raises", "SlowToMake",
}  # fmt: skip


def wrong(name: str) -> dict[str, str]:
    """What -> the text of a line that says wrong."""
    return {line.what: line.text for line in check(f"{FILE}:{name}") if line.verdict == "wrong"}


def some(names: set[str], of_every_commit: set[str]) -> list[object]:
    """The names, most of them for releases only."""
    return [
        pytest.param(n, marks=pytest.mark.slow if n in of_every_commit else pytest.mark.release) for n in sorted(names)
    ]


@pytest.mark.parametrize("name", some(WITHIN, {"SharedDatabase"}))
def test_a_leak_within_a_process_is_found(name, monkeypatch):
    if name == "SharedLock":  # each sibling waits for a whole deadline
        monkeypatch.setattr(checking, "SIBLINGS", 4)
        monkeypatch.setattr(checking, "_DEADLINE_S", 3.0)
    found = wrong(name)
    assert set(found) & set(ISOLATION), found
    assert f"({name})" in next(iter(found.values())) and "leaks.py:" in next(iter(found.values()))


@pytest.mark.parametrize("name", some(OUTSIDE, {"WorkingFolder"}))
def test_a_leak_out_of_the_process_and_unseeded_numbers_are_found(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = wrong(name)
    assert "keeps state outside of the process" in found["determinism"] and f"({name})" in found["determinism"]


@pytest.mark.parametrize("name", some(AT_IMPORT, set()))
def test_what_only_a_new_interpreter_shows_is_found(name, monkeypatch):
    monkeypatch.setattr(checking, "SIBLINGS", 4)
    assert f"({name}): the same actions in a new interpreter gave" in wrong(name)["determinism"]


def left_by(name: str) -> tuple[list[str], list[str]]:
    """What episodes change in their process, and what they use of it."""
    kind = build_kind(f"{FILE}:{name}", {}, timeout_s=8.0)
    actions = in_child(partial(find_actions, kind, {"seed": 1}, 4, 0))
    return in_child(partial(what_stays, kind, [Script({"seed": 1 + number % 2}, actions) for number in range(5)]))


@pytest.mark.parametrize("name", some(LEFT, {"Umask"}))
def test_what_an_episode_leaves_in_its_process_is_found(name):
    changed, used = left_by(name)
    assert len(changed) == 1 and LEFT[name] in changed[0] and used == []


@pytest.mark.release
def test_global_generators_that_only_the_environment_reads_are_a_note():
    assert left_by("SeedsNumpy") == ([], ["the generator of numpy, which all code shares"])
    assert left_by("Plain") == ([], [])


OTHERS = [
    ("gymnasium", "gymnasium", {"env": "Taxi-v4", "render_mode": "ansi"}),
    ("gymnasium", "gymnasium", {"env": "FrozenLake-v1", "render_mode": "ansi"}),
    ("gymnasium", "gymnasium", {"env": "CliffWalking-v1", "render_mode": "ansi"}),
    ("gymnasium", "gymnasium", {"env": "Blackjack-v1"}),
    ("reasoning_gym", "reasoning_gym", {"task": "spell_backward"}),
    ("reasoning_gym", "reasoning_gym", {"task": "basic_arithmetic"}),
    ("reasoning_gym", "reasoning_gym", {"task": "letter_counting"}),
    ("textarena", "textarena", {"game": "FrozenLake-v0"}),
    ("textarena", "textarena", {"game": "GuessTheNumber-v0"}),
    ("textarena", "textarena", {"game": "TowerOfHanoi-v0"}),
]


@pytest.mark.release
@pytest.mark.parametrize(("package", "path", "config"), OTHERS, ids=[str(next(iter(c.values()))) for *_, c in OTHERS])
def test_environments_of_other_projects_raise_no_alarm(package, path, config, monkeypatch):
    pytest.importorskip(package, reason=f"needs the package {package}")
    monkeypatch.setattr(checking, "SIBLINGS", 6)
    assert [str(line) for line in check(path, config) if line.verdict == "wrong"] == []


@pytest.mark.parametrize("name", some(HEALTHY, set()))
def test_a_healthy_environment_raises_no_alarm(name):
    assert wrong(name) == {}


@pytest.mark.release
def test_a_temporary_folder_that_all_use_is_found_between_processes_too():
    assert "isolation of processes" in wrong("TempFolder")


@pytest.mark.release
def test_a_fork_that_shares_state_or_forgets_it_is_found():
    assert "(ShallowFork.fork) shares state" in wrong("ShallowFork")["fork"]
    assert "(EmptyFork.fork): the copy is in another state" in wrong("EmptyFork")["fork"]
    assert any(line.what == "fork" and line.verdict == "ok" for line in check(f"{FILE}:DeepFork"))


@pytest.mark.release
def test_a_close_that_needs_a_reset_which_failed_is_found():
    found = wrong("ClosesWhatIsMissing")
    assert set(found) == {"closed once"} and "(ClosesWhatIsMissing.close): error: " in found["closed once"]
    assert "AttributeError" in found["closed once"]


@pytest.mark.release
def test_the_command_prints_a_line_for_each_look_and_its_status(capsys, monkeypatch):
    monkeypatch.setattr(checking, "SIBLINGS", 6)
    assert main(["check", f"{FILE}:Plain", "--row", '{"seed": 3}']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5].strip() for line in lines] == ["ok"] * 5 + ["note", "ok"] + ["note"] * 3
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
