"""What a collapse leads to: a warning, a bundle and an end, or the way back; and what a resumed run knows of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lab import interrupt_after, metrics_of, rows_of, run_command, small_trainer

from verl_mt.config.schema import TrainerConfig
from verl_mt.data.run_files import trajectory_to_row, write_rows
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.errors import CollapseError
from verl_mt.extensions.inspection.collapse_response import CollapseResponse
from verl_mt.trainer import checkpoint
from verl_mt.trainer.checkpoint import CheckpointStore, step_of
from verl_mt.trainer.step_hook import RollBack, Save, StepLine, Stop

GOOD = {"reward/mean": 0.5, "reward/std": 0.5, "tools/use_rate": 0.9}
BAD = GOOD | {"tools/use_rate": 0.1, "reward/mean": 0.8}


class Run:
    """A run directory, and a response that watches made-up steps there; every step saves."""

    def __init__(self, folder: Path, mode: str, *, keep: int = 1, saves: bool = True):
        self.folder, self.saves = folder, saves
        self.store = CheckpointStore(folder / "checkpoints", keep)
        self.response = CollapseResponse(TrainerConfig(collapse_guard=mode), folder, self.store)
        self.restored: list[int] = []
        self.step_number = 0
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text("a: 1\n")
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')

    def step(self, metrics: dict[str, float]) -> dict[str, float]:
        """What the trainer does with a verdict."""
        self.step_number += 1
        line = StepLine(self.step_number, dict(metrics))
        verdict = self.response.after_step(line)
        if isinstance(verdict, Save):
            verdict.before()
            if isinstance(verdict, RollBack):
                self.restored.append(step_of(verdict.folder))
            self.save()
            if isinstance(verdict, Stop):
                raise verdict.after()
            verdict.after()
        elif self.saves:
            self.save()
        return {name: value for name, value in line.metrics.items() if name not in metrics}

    def steps(self, *metrics: dict[str, float]) -> list[dict[str, float]]:
        return [self.step(m) for m in metrics]

    def save(self) -> None:
        self.store.save(self.step_number, {"collapse": self.response.state_dict()}, score=None)


def rollout(name: str, reward: float, calls: int, reason: StopReason = StopReason.FINISHED) -> Trajectory:
    record = TrajectoryRecord()
    record.append_given([1], kind="prompt", turn=0)
    record.append_sampled([2], [-0.1], [0], turn=1)
    made = Trajectory(name, "p", "g", name, stop_reason=reason, reward=reward, num_turns=1, records=[record])
    made.counters = {"tools/calc/calls": calls}
    return made


def finding(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "finding.json").read_text())


def test_a_warning_is_said_once_and_stands_in_the_metrics(tmp_path, caplog):
    run = Run(tmp_path, "warn")
    found = run.steps(*[GOOD] * 6, *[BAD] * 4)
    assert found[5] == {"collapse/signs": 0.0} and found[7] == {"collapse/signs": 1.0, "collapse/tool_use_drop": 1.0}
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1 and said[0].startswith(
        "step 8: tool use fell from 0.90 to 0.37 within 3 steps, while the reward"
    )
    assert not (tmp_path / "collapse").exists()


def test_switched_off_it_says_and_measures_nothing(tmp_path, caplog):
    assert Run(tmp_path, "off").steps(*[GOOD] * 6, *[BAD] * 4) == [{}] * 10
    assert not caplog.records


def test_a_stop_leaves_a_bundle_a_checkpoint_and_words_on_how_to_go_on(tmp_path):
    run = Run(tmp_path, "stop")
    rows = [rollout("worse", 0.2, 0), rollout("hacked", 1.0, 0), rollout("honest", 1.0, 1), *[rollout("x", 0.1, 1)] * 9]
    write_rows(tmp_path / "rollouts" / "step_000008.jsonl", (trajectory_to_row(t, step=8) for t in rows))
    run.steps(*[GOOD] * 6, BAD)
    with pytest.raises(
        CollapseError, match=r"step 8: tool use fell from 0.90.*The run stops here\. To look at"
    ) as error:
        run.step(BAD)
    assert error.value.exit_status == 3
    bundle = tmp_path / "collapse" / "step_000008"
    assert str(bundle) in str(error.value) and "The same command goes on after step 8" in str(error.value)
    assert f"trainer.resume_from_path={tmp_path}/checkpoints/step_000005" in str(error.value)
    assert (bundle / "config.yaml").read_text() == "a: 1\n" and (bundle / "metrics.jsonl").is_file()
    worst = [json.loads(line)["trajectory_id"] for line in (bundle / "worst_rollouts.jsonl").read_text().splitlines()]
    assert worst[:3] == ["hacked", "worse", "honest"] and len(worst) == 8, "without a call and best paid comes first"
    told = finding(bundle)
    assert told["words"] in str(error.value) and told["action"] == "stop" and told["last_good_step"] == 5
    assert told["last_good_checkpoint"].endswith("step_000005") and told["worst_rollouts"] == "8 of step_000008.jsonl"
    assert told["signs"][0]["name"] == "tool_use_drop" and told["thresholds"]["tool_use_drop"] == 0.3
    assert step_of(run.store.latest()) == 8


def test_a_run_that_goes_on_after_a_stop_is_not_stopped_by_the_same_sign(tmp_path):
    run = Run(tmp_path, "stop")
    with pytest.raises(CollapseError):
        run.steps(*[GOOD] * 6, *[BAD] * 2)
    again = Run(tmp_path, "stop")
    again.step_number = 8
    again.response.load_state_dict(checkpoint.load(run.store.latest())["collapse"])
    again.steps(*[BAD] * 3, *[GOOD] * 9, BAD)
    with pytest.raises(CollapseError, match="step 22: tool use fell"):
        again.step(BAD)


def test_a_rollback_takes_the_newest_checkpoint_from_before_and_saves_at_once(tmp_path, caplog):
    run = Run(tmp_path, "rollback")
    found = run.steps(*[GOOD] * 6, *[BAD] * 2)
    assert run.restored == [5] and found[-1]["collapse/rolled_back_to"] == 5.0
    assert step_of(run.store.latest()) == 8, "a resumed run begins with what was restored"
    assert "weights and optimizer are those of step 5 again" in caplog.messages[-1]
    assert "Rollback 1 of 2" in caplog.messages[-1]
    told = finding(tmp_path / "collapse" / "step_000008")
    assert (told["action"], told["rolled_back_to"]) == ("rollback", str(tmp_path / "checkpoints" / "step_000005"))
    assert told["worst_rollouts"] == "not there: trainer.rollout_rows is off"
    assert run.steps(*[GOOD] * 8)[-1] == {"collapse/signs": 0.0}


def test_the_third_collapse_ends_the_run_also_when_it_was_resumed_in_between(tmp_path):
    run = Run(tmp_path, "rollback")
    run.steps(*[GOOD] * 6, *[BAD] * 2, *[GOOD] * 4)
    again = Run(tmp_path, "rollback")
    again.step_number = 12
    again.response.load_state_dict(checkpoint.load(run.store.latest())["collapse"])
    again.steps(*[BAD] * 2, *[GOOD] * 4, BAD)
    assert run.restored == [5] and again.restored == [11]
    with pytest.raises(CollapseError, match=r"The run stops here \(it was rolled back twice\)"):
        again.step(BAD)


def test_without_an_older_checkpoint_a_rollback_is_a_stop(tmp_path):
    run = Run(tmp_path, "rollback", saves=False)
    with pytest.raises(CollapseError, match=r"\(there is no older checkpoint to go back to\)"):
        run.steps(*[GOOD] * 6, *[BAD] * 2)


def test_checkpoints_are_kept_as_far_back_as_a_collapse_may_have_begun(tmp_path):
    def kept(mode: str) -> list[int]:
        run = Run(tmp_path / mode, mode, keep=2)
        run.steps(*[GOOD] * 20)
        return [step_of(path) for path in run.store.all()]

    assert kept("warn") == [19, 20]
    assert kept("rollback") == list(range(8, 21))


# ---------------------------------------------------------------- real runs

COLLAPSING = (
    "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.response_length=48",
    "actor_rollout_ref.actor.optim.lr=0.006", "actor_rollout_ref.actor.optim.lr_warmup_steps=6",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
    "trainer.total_training_steps=16", "trainer.save_freq=1", "trainer.deterministic=True",
    "trainer.collapse_guard_thresholds={window: 2, turns_rise: null}", "trainer.val_before_train=False",
    "trainer.test_freq=-1", "trainer.export_at_end=False", "trainer.logger=[]",
)  # fmt: skip
"""A learning rate twenty times too large, after a few steps of warm-up."""


@pytest.mark.slow
def test_a_learning_rate_that_is_too_large_stops_the_command_with_a_bundle(tmp_path):
    run = tmp_path / "run"
    done = run_command(tmp_path, *COLLAPSING, f"trainer.default_local_dir={run}", "trainer.collapse_guard=stop")
    assert done.returncode == 3, done.stderr[-2000:]
    (bundle,) = (run / "collapse").iterdir()
    step = finding(bundle)["step"]
    assert f"error: step {step}: " in done.stderr and "The run stops here" in done.stderr
    assert metrics_of(run)[-1]["collapse/signs"] >= 1 and metrics_of(run)[-1]["step"] == step < 16
    assert len((bundle / "worst_rollouts.jsonl").read_text().splitlines()) == 8
    assert Path(finding(bundle)["last_good_checkpoint"]).is_dir()


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.load(run / "checkpoints" / f"step_{step:06d}")["workers"]["actor"]["tensors"]


@pytest.mark.slow
def test_a_rollback_gives_the_old_weights_and_new_rows_and_survives_being_killed(tmp_path):
    def collapse(run: Path, stop_after: int | None = None) -> None:
        trainer = small_trainer(run, *COLLAPSING, "data.train_batch_size=2", "trainer.collapse_guard=rollback")
        if stop_after is not None:
            interrupt_after(trainer, stop_after)
        trainer.fit()

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with pytest.raises(CollapseError, match="rolled back twice"):
        collapse(whole)
    lines = {line["step"]: line for line in metrics_of(whole)}
    back = {
        step: int(line["collapse/rolled_back_to"]) for step, line in lines.items() if "collapse/rolled_back_to" in line
    }
    assert len(back) == 2 and list(lines) == list(range(1, len(lines) + 1)), "no step is counted twice"
    (first, target), second = next(iter(back.items())), list(back)[1]
    drawn = [{row["row_index"] for row in rows_of(whole, step)} for step in lines]
    assert sum(map(len, drawn[: first + 1])) == len(set().union(*drawn[: first + 1])), "no row comes again"
    assert all(torch.equal(a, b) for a, b in zip(weights(whole, first).values(), weights(whole, target).values()))
    collapse(broken, stop_after=first)
    with pytest.raises(CollapseError, match="rolled back twice"):
        collapse(broken)
    assert metrics_of(broken) == metrics_of(whole)
    assert (
        finding(broken / "collapse" / f"step_{second:06d}")["signs"]
        == (finding(whole / "collapse" / f"step_{second:06d}")["signs"])
    )
