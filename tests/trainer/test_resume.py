"""A run that is killed and resumed ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).with_name("kill_lab.py")


@pytest.mark.slow
def test_twenty_kills_change_neither_weights_nor_optimizer_nor_metrics(tmp_path):
    result = subprocess.run(
        [sys.executable, str(LAB), str(tmp_path), "20", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert sum(report["kills"].values()) == 20
    # t: in the middle of a tool call, c: in the middle of a checkpoint
    assert {"t", "c"} <= set(report["kills"]), report
    assert not any(report["different"].values()), report
