"""A run that is killed and resumed ends as if nothing had happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import warm_start
from command_lab import command, environment
from kill_lab import DETERMINISTIC, ELSEWHERE, OVERRIDES, PHASES, differences
from tables import before_release

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kill_lab")]  # one process of the lab for all phases

EVERY_COMMIT = tuple(name for name in PHASES if name not in ELSEWHERE)
LAB = Path(__file__).with_name("kill_lab.py")


def lab(*words: str) -> dict:
    done = warm_start.run([sys.executable, str(LAB), *words], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    """`phases(names)`: the lab's folder, and phase -> what is wrong with the run that ended in it and was resumed."""

    @cache
    def ended(names: tuple[str, ...]) -> tuple[Path, dict[str, list[str]]]:
        folder = tmp_path_factory.mktemp("phases")
        return folder, lab(str(folder), *names)

    return ended


@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", [before_release(name) if name in ELSEWHERE else name for name in PHASES])
def test_a_process_that_ends_in_a_phase_of_a_run_changes_nothing(phases, phase):
    """Weights, optimizer, generators, metrics and rows, bit for bit; each prompt is trained exactly once."""
    assert phases(ELSEWHERE if phase in ELSEWHERE else EVERY_COMMIT)[1][phase] == []


@pytest.mark.timeout(900)
def test_a_command_that_gets_sigkill_and_is_given_again_changes_nothing(phases, tmp_path):
    """The process stops itself in the middle of an update, so that the kill comes at no other moment."""
    reference = phases(EVERY_COMMIT)[0] / "reference"
    words = command(*OVERRIDES, DETERMINISTIC, f"external_plugins=[{LAB}]", f"trainer.default_local_dir={tmp_path}/run")
    stop = environment() | {"STOP_IN_PHASE": "between two optimizer steps of an update"}
    process = warm_start.Popen(words, env=stop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and state_of(process.pid) != "T":
            time.sleep(0.05)
        assert process.returncode is None, "it stops itself"
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    again = warm_start.run(words, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    assert differences(reference, tmp_path / "run") == []


def state_of(pid: int) -> str:
    """T: it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.release
def test_twenty_random_kills_change_neither_weights_nor_optimizer_nor_metrics(tmp_path):
    report = lab(str(tmp_path), "20", "1")
    assert sum(report["kills"].values()) == 20
    # t: in the middle of a tool call, c: in the middle of a checkpoint
    assert {"t", "c"} <= set(report["kills"]), report
    assert not any(report["different"].values()), report
