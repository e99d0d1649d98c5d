"""`benchmarks/kills.py`: sixteen kills for a release, and that it finds what it looks for.

`test_every_benchmark.py` kills a trainer for every commit.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import warm_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"


def kills(*words: str) -> subprocess.CompletedProcess[str]:
    return warm_script.run(SCRIPT, *words)


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("bound", "over_sample"), [("0", "1"), ("1", "1"), ("2", "1.5"), ("4", "1")])
def test_whoever_is_killed_at_whatever_moment_no_prompt_is_lost_or_doubled(tmp_path, bound, over_sample):
    words = ("--kills", "4", "--bounds", bound, "--over-sample", over_sample, "--who", "trainer", "worker")
    done = kills(*words, "--out", str(tmp_path / "kills.jsonl"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    trials = [json.loads(line) for line in (tmp_path / "kills.jsonl").read_text().splitlines()]
    assert sum(trial["kills"] for trial in trials) >= 4 and not any(trial["wrong"] for trial in trials)
    assert done.stdout.splitlines()[-1].endswith(f"{len(trials)} trials, 0 do not hold")
    # What stands there is not run again.
    again = kills(*words, "--out", str(tmp_path / "kills.jsonl"))
    assert again.stdout.splitlines()[-2:] == done.stdout.splitlines()[-2:]


def trials_of(lengths_of_killed: int, wrong: list[str]) -> str:
    """Sixteen trials, as a file."""
    return "".join(
        json.dumps({
            "seed": seed, "bound": 1, "who": "trainer", "over_sample": 1.0, "kills": 1,
            "wrong": wrong if seed == 3 else [],
            "peace": [20 + (seed * k) % 7 for k in range(48)],
            "killed": [20 + (seed * k + 3) % 7 + lengths_of_killed for k in range(48)],
        })
        + "\n"
        for seed in range(16)
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("longer", "wrong", "status"), [(0, [], 0), (-3, [], 1), (0, ["1 missing"], 1)], ids=["holds", "shorter", "missing"]
)
def test_shorter_conversations_and_what_is_missing_are_told(tmp_path, longer, wrong, status):
    (tmp_path / "kills.jsonl").write_text(trials_of(longer, wrong))
    done = kills("--kills", "16", "--bounds", "1", "--who", "trainer", "--out", str(tmp_path / "kills.jsonl"))
    assert done.returncode == status, done.stdout
    assert done.stdout.splitlines()[-1] == f"16 of a trainer; 16 trials, {len(wrong)} do not hold"
