"""`python -m verl_mt.doctor --ahead RUN`: what sampling ahead would save, from the steps of a synchronous run."""

from __future__ import annotations

import json

import pytest
import yaml

from verl_mt.errors import DataError
from verl_mt.extensions.inspection.doctor.__main__ import main
from verl_mt.extensions.inspection.doctor.ahead import MeasuredStep, measured_steps, seconds_ahead, table
from verl_mt.extensions.inspection.doctor.step_time import StepTime


@pytest.mark.parametrize(
    ("step", "bound", "apart", "one_device"),
    [
        # Half of the step is waiting for tools: two steps beside each other hide it, on one device as well.
        (MeasuredStep(3.0, 1.0, 1.0), 0, 4.0, 4.0),
        (MeasuredStep(3.0, 1.0, 1.0), 1, 2.0, 2.0),
        (MeasuredStep(3.0, 1.0, 1.0), 4, 1.0, 2.0),
        # Nobody waits: only an engine on devices of its own is faster.
        (MeasuredStep(1.0, 1.0, 1.0), 0, 2.0, 2.0),
        (MeasuredStep(1.0, 1.0, 1.0), 2, 1.0, 2.0),
        # Sampling is what takes the time: no bound helps beyond hiding the training.
        (MeasuredStep(3.0, 3.0, 0.5), 1, 3.0, 3.5),
        (MeasuredStep(3.0, 3.0, 0.5), 8, 3.0, 3.5),
    ],
)
def test_what_is_saved_is_waiting(step, bound, apart, one_device):
    steps = [step] * 400
    assert seconds_ahead(steps, bound, one_device=False) == pytest.approx(apart, rel=0.02)
    assert seconds_ahead(steps, bound, one_device=True) == pytest.approx(one_device, rel=0.02)
    # The formula of a step that nobody has measured says the same.
    waiting = step.rollout_s - step.sampling_s
    told = StepTime(step.rollout_s, 0.0, step.training_s, 0.0, 0.0, waiting)
    assert told.ahead_s(bound, one_device=False) == pytest.approx(apart)
    assert told.ahead_s(bound, one_device=True) == pytest.approx(one_device)


def test_one_long_step_in_ten_is_hidden_by_those_beside_it():
    steps = [MeasuredStep(11.0 if k % 10 == 0 else 1.0, 1.0, 1.0) for k in range(400)]
    seconds = [seconds_ahead(steps, bound, one_device=False) for bound in (0, 1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] == pytest.approx(3.0) and seconds[-1] < 1.4


def a_run(folder, **trainer):
    """Three steps of 4 s: 1 s all are outside of the engine, 2 s it samples, 1 s of training."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    spans = [
        ("decode", 0.0, 1.5),
        ("prefill", 0.5, 1.0),
        ("tool", 1.5, 2.5),
        ("decode", 2.5, 3.0),
        ("reward", 3.0, 3.0),
    ]
    for step in (1, 2, 3):
        row = {"time_spans": [{"phase": p, "start_s": a, "end_s": b, "turn": 1} for p, a, b in spans]}
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(row) + "\n")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time/step_s": 4.0, "time/rollout_s": 3.0}) + "\n")
    return folder


def test_a_runs_steps_are_measured_by_its_own_rows_and_times(tmp_path, capsys):
    run = a_run(tmp_path / "run")
    assert measured_steps(run) == [MeasuredStep(3.0, 2.0, 1.0)] * 2  # the first is left out
    assert main(["--ahead", str(run)]) == 0
    first, _, synchronous, *_ = capsys.readouterr().out.splitlines()
    assert "2 synchronous steps of 4.00 s: 2.00 s the engine samples, 1.00 s all wait" in first
    assert first.endswith("outside of it, 1.00 s of training and the rest")
    assert synchronous.split("   ")[0] == "0" and synchronous.count("4.00 s a step") == 2
    assert "less" in table(run)


def test_what_is_no_synchronous_run_is_one_line_and_status_2(tmp_path, capsys):
    assert main(["--ahead", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is no directory of a run")
    assert (
        main(["--ahead", str(tmp_path), "trainer.seed=1"]) == 2
        and "leave trainer.seed=1 out" in capsys.readouterr().err
    )
    with pytest.raises(DataError, match="max_staleness=0"):
        measured_steps(a_run(tmp_path / "ahead", max_staleness=2))
    empty = a_run(tmp_path / "empty")
    for file in (empty / "rollouts").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="0 steps with rollout rows and times"):
        measured_steps(empty)
