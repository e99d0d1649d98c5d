"""The comparison with TRL runs and says what it promises; every benchmark is in the list."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BENCHMARK = REPO / "benchmarks" / "peers" / "trl_grpo.py"
LAST_LINE = re.compile(r"GRPO step: verl_mt (\d+\.\d\d) s, TRL (\d+\.\d\d) s, ratio (\d+\.\d\d)")
HAS_TRL = importlib.util.find_spec("trl") is not None


def run_benchmark(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARK), *words], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRL, reason='TRL is not installed: pip install "trl==1.16.0" -c constraints.txt')
def test_last_line_gives_both_step_times_and_their_ratio():
    done = run_benchmark("--steps", "2", "--prompts", "4", "--generations", "4", "--threads", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    match = LAST_LINE.fullmatch(lines[-1])
    assert match is not None, lines[-1]
    ours, theirs, ratio = map(float, match.groups())
    assert ours > 0 and theirs / (ours + 0.005) - 0.02 <= ratio <= (theirs + 0.005) / (ours - 0.005) + 0.02
    counted = re.fullmatch(r"trained tokens in all: verl_mt (\d+), TRL (\d+)", lines[-2])
    assert counted is not None, lines[-2]
    assert int(counted[1]) == pytest.approx(int(counted[2]), rel=0.3)  # 32 samples each, drawn independently


@pytest.mark.slow
@pytest.mark.skipif(HAS_TRL, reason="TRL is installed")
def test_without_trl_the_error_says_what_to_install():
    done = run_benchmark()
    assert done.returncode == 1
    assert 'pip install "trl==' in done.stderr and "Traceback" not in done.stderr


def test_every_benchmark_is_in_the_list():
    listed = (REPO / "benchmarks" / "README.md").read_text()
    files = [f for f in (REPO / "benchmarks").rglob("*.py") if "__main__" in f.read_text()]
    scripts = [f.relative_to(REPO).as_posix() for f in files]
    assert [name for name in scripts if f"python {name}" not in listed] == []
