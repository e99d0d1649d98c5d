"""CI runs every test once, wherever its markers put it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from itertools import chain, combinations
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

REPO = Path(__file__).resolve().parents[1]
SERVERS = ("slow", "ray", "sglang", "vllm")
MARKS = [set(chosen) for chosen in chain.from_iterable(combinations(SERVERS, n) for n in range(5))]


def stages() -> dict[str, Expression]:
    """Name of each stage that runs pytest -> what it selects."""
    options = shlex.split(
        tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    )
    default = options[options.index("-m") + 1]
    found = {}
    script = (REPO / ".ci" / "run").read_text().replace("\\\n", " ")
    for name, words in re.findall(r"^\s*stage (tests\S*) (.*)$", script, re.MULTILINE):
        words = shlex.split(words)[shlex.split(words).index("pytest") :]
        found[name] = Expression.compile(words[words.index("-m") + 1] if "-m" in words else default)
    return found


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: "+".join(sorted(marks)) or "none")
def test_a_test_runs_in_exactly_one_stage_and_one_for_a_gpu_in_none(marks):
    assert selecting(marks | {"gpu"}) == []
    chosen = selecting(marks)
    assert len(chosen) == 1
    assert (chosen == ["tests-sglang"]) is ("sglang" in marks)


def selecting(marks: set[str]) -> list[str]:
    return [name for name, selects in stages().items() if selects.evaluate(lambda mark, **_: mark in marks)]


@pytest.mark.slow
def test_what_belongs_together_runs_in_one_process(tmp_path):
    """A fixture that takes a minute is made once; a release of pytest had pytest-xdist split groups without a word."""
    (tmp_path / "test_groups.py").write_text(
        """
import os, pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("n", range(6))
def test_it(n):
    with open("workers", "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
"""
    )
    words = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 6 and len(set(workers)) == 1
