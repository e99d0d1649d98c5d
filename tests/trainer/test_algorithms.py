"""Estimators and losses as the configuration names them, from rewards to new weights."""

from __future__ import annotations

import math

import pytest
from command_lab import NO_VALIDATION, fit
from tables import one_of_each

from verl_mt.algorithms.advantages import by_name
from verl_mt.config.policy_losses import POLICY_LOSSES
from verl_mt.config.schema import AlgorithmConfig
from verl_mt.data import batch as columns
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.trainer.advantage_step import advantage_estimator

STEPS = (
    *NO_VALIDATION,
    "actor_rollout_ref.rollout.response_length=24",
    "trainer.total_training_steps=2",
    "trainer.rollout_rows=False",
    "trainer.progress=off",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=2",
)
"""Four updates per step, so that all but the first are off-policy."""


def letters(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """A reward that differs between samples from the first step on."""
    return sum(map(ord, solution_str)) % 97 / 97


def records(lengths: list[int]) -> list[TrajectoryRecord]:
    made = []
    for length in lengths:
        record = TrajectoryRecord()
        record.append_given([1, 2], kind="prompt", turn=0)
        record.append_sampled([3] * length, [-1.0] * length, [0] * length, turn=1)
        record.append_given([4], kind="observation", turn=1)
        made.append(record)
    return made


def advantages(name: str, trajectories: list[tuple[str, float, list[int]]]) -> dict[str, set[float]]:
    batch = columns.build_batch(
        [
            Trajectory(f"t{i}", group, group, f"t{i}", records=records(lengths), reward=reward,
                       stop_reason=StopReason.FINISHED)
            for i, (group, reward, lengths) in enumerate(trajectories)
        ],
        pad_token_id=0,
    )  # fmt: skip
    assert batch is not None
    advantage_estimator(AlgorithmConfig(adv_estimator=name))(batch)
    values, mask = batch[columns.ADVANTAGES], batch[columns.LOSS_MASK]
    assert not values[~mask].any(), "observations have no advantage"
    return {
        owner: {round(v, 6) for row, o in enumerate(batch[columns.TRAJECTORY_ID]) if o == owner
                for v in values[row][mask[row]].tolist()}
        for owner in dict.fromkeys(batch[columns.TRAJECTORY_ID])
    }  # fmt: skip


@pytest.mark.parametrize("name", by_name)
def test_a_trajectory_counts_once_whatever_number_of_records_it_became(name):
    split = advantages(name, [("a", 1.0, [1, 3, 2]), ("a", 0.0, [2]), ("b", 0.5, [1, 1]), ("a", 0.0, [3, 1])])
    whole = advantages(name, [("a", 1.0, [6]), ("a", 0.0, [2]), ("b", 0.5, [2]), ("a", 0.0, [4])])
    assert split == whole
    assert all(len(values) == 1 for values in split.values()), "all tokens of a trajectory have one advantage"
    assert split["t0"].pop() > 0
    assert all(math.isfinite(v) for values in split.values() for v in values)
    assert split["t2"] == {0.0} or name == "reinforce_plus_plus", "a group of one"


def test_the_length_weighted_baseline_sees_the_tokens_of_all_records():
    found = advantages("opo", [("a", 1.0, [1, 2]), ("a", 0.0, [1])])
    assert found == {"t0": {0.25}, "t1": {-0.75}}


def trained(folder, *overrides: str) -> list[dict[str, float]]:
    lines = fit(folder, *STEPS, f"reward.path={__name__}:letters", *overrides)
    assert len(lines) == 2
    for line in lines:
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))
        assert "actor/pg_loss" in line and line["actor/nonfinite_updates"] == 0
    assert sum(line["actor/num_updates"] for line in lines) >= 6
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_each(by_name, lambda name: "estimator"))
def test_the_default_task_takes_steps_with_every_estimator(tmp_path, name):
    trained(tmp_path / "run", f"algorithm.adv_estimator={name}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", one_of_each(POLICY_LOSSES, lambda mode: "loss"))
def test_the_default_task_takes_steps_with_every_loss(tmp_path, mode):
    lines = trained(tmp_path / "run", f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}")
    numbers = {
        "vanilla": "clipfrac",
        "gspo": "clipfrac",
        "cispo": "clipfrac",
        "sapo": "gate_slope",
        "fipo": "fipo_weight",
        "real": "slope",
    }
    assert f"actor/{numbers.get(mode, 'ppo_kl' if mode == 'gpg' else 'chosen_frac')}" in lines[-1]
