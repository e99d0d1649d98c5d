"""The benchmark of the driver runs whole steps, with a worker and without, and says what they cost and the ratio."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "driver_cost.py"


@pytest.mark.slow
def test_whole_steps_run_with_a_worker_and_without_and_are_compared():
    command = [sys.executable, str(SCRIPT), "--workers", "0", "1", "--tokens", "60000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    pattern = r"driver: (\d+\.\d\d) us/token \(0 workers\); 1 workers: (\d+\.\d\d) us/token, 0 workers / it = (\d+\.\d)"
    found = re.fullmatch(pattern, done.stdout.splitlines()[-1])
    assert found, done.stdout
    alone, with_one, ratio = map(float, found.groups())
    assert alone > 0 and with_one > 0 and ratio == pytest.approx(alone / with_one, abs=0.06)
