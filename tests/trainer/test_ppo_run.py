"""PPO on the default task: whole runs, killed ones that go on bit for bit, and greedy answers that are not trained."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from command_lab import FEW, NO_VALIDATION, VARIED, fit, small_trainer
from tables import before_release

from verl_mt.errors import CheckpointError

GAE = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
QUIET = (*NO_VALIDATION, "trainer.progress=off", "trainer.deterministic=True")


def letters(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """A reward that anyone who reads the answer can tell: a critic learns it in a few steps."""
    return {"score": float("calculator" in solution_str), "length": len(solution_str) / 200}


@pytest.mark.slow
@pytest.mark.release
def test_a_short_run_ends_with_a_critic_of_its_own_that_explains_something(tmp_path):
    lines = fit(
        tmp_path / "run", *GAE, *QUIET, "trainer.total_training_steps=12", "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "critic.ppo_epochs=2", "trainer.save_freq=-1",
    )  # fmt: skip
    assert len(lines) == 12
    for line in lines:
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))
        assert line["critic/vf_loss"] > 0 and line["actor/num_updates"] == 2
    assert fmean(line["critic/explained_variance"] for line in lines[-4:]) > 0
    assert max(line["actor/clipfrac"] for line in lines) > 0


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), before_release(("critic.share_trunk=True",))])
def test_a_run_goes_on_bit_for_bit_with_its_critic_and_its_kl_weight(tmp_path, extra):
    options = (
        *GAE, *QUIET, *FEW, VARIED, "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.01", "algorithm.kl_ctrl.horizon=100", "trainer.critic_warmup=1",
        "trainer.total_training_steps=3", "trainer.save_freq=2", *extra,
    )  # fmt: skip
    expected = fit(tmp_path / "whole", *options)
    saved = f"trainer.resume_from_path={tmp_path}/whole/checkpoints/step_000002"
    got = fit(tmp_path / "resumed", *options, "trainer.resume_mode=resume_path", saved)
    assert got == expected[2:] and {"critic/vf_loss", "critic/explained_variance", "reward/mean"} <= got[0].keys()
    assert "actor/pg_loss" not in expected[0] and "actor/pg_loss" in got[0]
    assert got[0]["actor/reward_kl_penalty_coeff"] != expected[0]["actor/reward_kl_penalty_coeff"]
    saved = [
        torch.load(tmp_path / run / "checkpoints" / "step_000003" / "state.pt", weights_only=True)["workers"]
        for run in ("whole", "resumed")
    ]
    for part in ("actor", "critic"):
        whole, other = (state[part]["tensors"] for state in saved)
        assert all(torch.equal(whole[name], other[name]) for name in whole), part


@pytest.mark.slow
def test_a_checkpoint_without_a_critic_does_not_go_on_with_one(finished_runs, tmp_path):
    checkpoint = finished_runs.original("plain") / "checkpoints" / "step_000002"
    with pytest.raises(CheckpointError, match="no critic, and this run has a"):
        small_trainer(
            tmp_path / "other",
            *QUIET,
            *GAE,
            "data.train_max_samples=32",
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={checkpoint}",
        )


@pytest.mark.slow
def test_remax_trains_all_samples_but_the_greedy_one(tmp_path):
    (line,) = fit(
        tmp_path / "run", *QUIET, *FEW, "algorithm.adv_estimator=remax", "trainer.total_training_steps=1",
        f"reward.path={__name__}:letters",
    )  # fmt: skip
    assert line["rollout/trajectories"] == 4, "two samples of each of two prompts"
    assert line["rollout/greedy_failed"] == 0 and 0 <= line["reward/greedy_mean"] <= 1


@pytest.mark.slow
def test_gdpo_trains_on_the_numbers_that_it_names(tmp_path):
    weights = ("algorithm.gdpo_reward_weights.score=1", "algorithm.gdpo_reward_weights.length=0.5")
    (line,) = fit(
        tmp_path / "run", *QUIET, *FEW, "algorithm.adv_estimator=gdpo", *weights, "trainer.total_training_steps=1",
        f"reward.path={__name__}:letters",
    )  # fmt: skip
    assert line["actor/num_updates"] == 1 and line["actor/grad_norm"] > 0
