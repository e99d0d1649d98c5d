"""A run that is killed and resumed ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_lab import command, environment
from kill_lab import DETERMINISTIC, OVERRIDES, PHASES, differences

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kill_lab")]  # one process of the lab for all phases

LAB = Path(__file__).with_name("kill_lab.py")


def lab(*words: str) -> dict:
    done = subprocess.run([sys.executable, str(LAB), *words], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> tuple[Path, dict[str, list[str]]]:
    """The lab's folder, and phase -> what is wrong with the run that ended in it and was resumed."""
    folder = tmp_path_factory.mktemp("phases")
    return folder, lab(str(folder))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", PHASES)
def test_a_process_that_ends_in_a_phase_of_a_run_changes_nothing(ended, phase):
    """Weights, optimizer, generators, metrics and rows, bit for bit; each prompt is trained exactly once."""
    assert ended[1][phase] == []


@pytest.mark.timeout(900)
def test_a_command_that_gets_sigkill_and_is_given_again_changes_nothing(ended, tmp_path):
    """The process stops itself in the middle of an update, so that the kill comes at no other moment."""
    words = command(*OVERRIDES, DETERMINISTIC, f"external_plugins=[{LAB}]", f"trainer.default_local_dir={tmp_path}/run")
    stop = environment() | {"STOP_IN_PHASE": "between two optimizer steps of an update"}
    process = subprocess.Popen(words, env=stop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None and found.si_code == os.CLD_STOPPED
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    again = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    assert differences(ended[0] / "reference", tmp_path / "run") == []


@pytest.mark.release
def test_twenty_random_kills_change_neither_weights_nor_optimizer_nor_metrics(tmp_path):
    report = lab(str(tmp_path), "20", "1")
    assert sum(report["kills"].values()) == 20
    # t: in the middle of a tool call, c: in the middle of a checkpoint
    assert {"t", "c"} <= set(report["kills"]), report
    assert not any(report["different"].values()), report
