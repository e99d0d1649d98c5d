"""CI runs every test once, wherever its markers put it."""

from __future__ import annotations

import re
import shlex
import tomllib
from itertools import chain, combinations
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

REPO = Path(__file__).resolve().parents[1]
SERVERS = ("slow", "ray", "sglang")
MARKS = [set(chosen) for chosen in chain.from_iterable(combinations(SERVERS, n) for n in range(4))]


def stages() -> dict[str, Expression]:
    """Name of each stage that runs pytest -> what it selects."""
    options = shlex.split(
        tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    )
    default = options[options.index("-m") + 1]
    found = {}
    script = (REPO / ".ci" / "run").read_text().replace("\\\n", " ")
    for name, words in re.findall(r"^\s*stage (tests-\S+) (.*)$", script, re.MULTILINE):
        words = shlex.split(words)[shlex.split(words).index("pytest") :]
        found[name] = Expression.compile(words[words.index("-m") + 1] if "-m" in words else default)
    return found


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: "+".join(sorted(marks)) or "none")
def test_a_test_runs_in_exactly_one_stage_and_one_for_a_gpu_in_none(marks):
    assert selecting(marks | {"gpu"}) == []
    chosen = selecting(marks)
    assert len(chosen) == 1
    assert (chosen[0] in ("tests-sglang", "tests-both")) is ("sglang" in marks)
    assert (chosen == ["tests-both"]) is ({"ray", "sglang"} <= marks)  # beside no other cluster


def selecting(marks: set[str]) -> list[str]:
    return [name for name, selects in stages().items() if selects.evaluate(lambda mark, **_: mark in marks)]
