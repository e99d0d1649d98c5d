"""The benchmark of the sanity check runs, and what it costs stays in proportion to the conversation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "sanity_check.py"


@pytest.mark.slow
def test_the_check_costs_no_multiple_of_the_conversation_also_when_every_turn_differs():
    command = [sys.executable, str(SCRIPT), "--turns", "100", "400", "--repeats", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.fullmatch(
        r"sanity check: strict / off at 100 turns (\d+\.\d\d), 400 turns (\d+\.\d\d)", done.stdout.splitlines()[-1]
    )
    assert found, done.stdout
    # 1.4 on a quiet machine, 4 at 400 turns where it compared each turn with all of them.
    assert float(found[1]) > 0.5 and float(found[2]) < 3.5
