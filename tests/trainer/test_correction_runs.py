"""Whole runs with corrections: the exact sampler needs none, at any temperature, and another one is corrected."""

from __future__ import annotations

import pytest
from command_lab import NO_VALIDATION, VARIED, fit
from tables import before_release

pytestmark = pytest.mark.slow

KEY = "algorithm.rollout_correction"
SHORT = ("data.train_batch_size=2", "actor_rollout_ref.rollout.response_length=48", VARIED)
EVERYTHING = (
    f"{KEY}.rollout_is=sequence",
    f"{KEY}.rollout_is_batch_normalize=True",
    f"{KEY}.rollout_rs=geometric",
    f"{KEY}.rollout_rs_threshold=1.01",
    f"{KEY}.rollout_token_veto_threshold=0.5",
    f"{KEY}.off_policy_sequence_mask_delta=0.1",
)


@pytest.mark.parametrize(
    ("temperature", "minis"), [(0.6, 1), (1.3, None), before_release(0.6, None), before_release(1.3, 1)]
)
def test_a_sampler_that_is_the_policy_is_never_corrected(tmp_path, temperature, minis):
    run = (*NO_VALIDATION, *SHORT, "trainer.total_training_steps=2")
    run += (f"actor_rollout_ref.rollout.temperature={temperature}",)
    size = () if minis is None else (f"actor_rollout_ref.actor.ppo_mini_batch_size={minis}",)
    for line in fit(tmp_path / "run", *run, *size, *EVERYTHING):
        assert line["rollout/logprob_diff_max"] < 1e-4
        assert line["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-5)
        assert line["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0, abs=1e-5)
        assert line["rollout_corr/rollout_rs_masked_fraction"] == 0.0
        assert line["rollout_corr/rollout_is_veto_fraction"] == 0.0
        assert line["rollout/sampler_kl"] == pytest.approx(0.0, abs=1e-6)


def test_with_an_exact_sampler_a_step_is_the_same_without_and_with_every_correction(tmp_path):
    run = (*NO_VALIDATION, *SHORT, "trainer.deterministic=True", "trainer.total_training_steps=1")
    (plain,), (corrected,) = fit(tmp_path / "plain", *run), fit(tmp_path / "corrected", *run, *EVERYTHING)
    for name in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert corrected[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5), name
