"""The trainer's loop: which checkpoint is the best, when it validates, what ends it."""

from __future__ import annotations

import pytest
from command_lab import NO_VALIDATION, fit, metrics_of, small_trainer

from verl_mt.trainer import checkpoint, ppo_trainer

TINY_STEPS = (
    "data.train_batch_size=2",
    "data.val_max_samples=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.response_length=16",
    "actor_rollout_ref.rollout.val_kwargs.greedy_too=False",
    "trainer.export_at_end=False",
    "trainer.progress=off",
)
"""Steps that cost next to nothing: what they sample does not matter."""


def test_the_best_checkpoint_is_one_that_was_validated(tmp_path, monkeypatch):
    accuracies = iter([0.1, 0.9, 0.5])  # before training, after steps 3 and 5
    monkeypatch.setattr(ppo_trainer, "validation_metrics", lambda groups, suffix: {"val/accuracy": next(accuracies)})
    run = tmp_path / "run"
    trainer = small_trainer(
        run,
        *TINY_STEPS,
        "trainer.total_training_steps=5",
        "trainer.test_freq=3",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
    )
    trainer.fit()
    kept = {path.name: checkpoint.read_meta(path)["score"] for path in trainer.checkpoints.all()}
    assert kept == {"step_000003": 0.9, "step_000005": 0.5}
    assert trainer.checkpoints.best().name == "step_000003"


def test_val_only_validates_the_checkpoint_it_is_given(tmp_path):
    fit(tmp_path / "run", *TINY_STEPS, "trainer.total_training_steps=2", "data.val_files=null")
    saved = tmp_path / "run" / "checkpoints" / "step_000002"
    lines = fit(
        tmp_path / "validated",
        *TINY_STEPS,
        "trainer.val_only=True",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={saved}",
    )
    assert [line["step"] for line in lines] == [2]
    assert "val/accuracy" in lines[0]
    assert not (tmp_path / "validated" / "checkpoints").exists()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_without_anything_left_to_do_ends_well(tmp_path, steps):
    overrides = (*TINY_STEPS, *NO_VALIDATION, f"trainer.total_training_steps={steps}")
    small_trainer(tmp_path / "run", *overrides).fit()
    if steps:
        assert len(metrics_of(tmp_path / "run")) == steps
        saved = tmp_path / "run" / "checkpoints" / f"step_{steps:06d}"
        again = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
        small_trainer(tmp_path / "again", *overrides, *again).fit()
        assert (tmp_path / "again" / "FINISHED").exists()
        assert not (tmp_path / "again" / "metrics.jsonl").exists()
    assert (tmp_path / "run" / "FINISHED").exists()
