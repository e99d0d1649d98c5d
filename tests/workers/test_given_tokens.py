"""`loss_scale: all` and `train_prompt_assistants` in the update: tokens that nobody sampled."""

from __future__ import annotations

import pytest
import torch
from actor_toys import REWARDS, fill_advantages, make_batch, tiny_policy, worker

from verl_mt.data import batch as col


@pytest.mark.cap("C27", "C31")
@pytest.mark.parametrize("mode", ["always", "never", "auto"])
def test_they_use_the_trainers_own_log_probs_and_stay_out_of_the_metrics(mode):
    """Their column of sampler log-probs is a filler of 0: taken for a log-prob, every ratio would be far off."""
    policy = tiny_policy()
    batch = make_batch(REWARDS)
    own = worker(policy).compute_log_probs(batch)
    batch[col.ROLLOUT_LOG_PROBS] = torch.where(batch[col.SAMPLED], own, torch.zeros_like(own))
    options = {"use_sampler_log_probs": mode, "ppo_mini_batch_size": 3}
    plain = worker(policy, **options).update(batch.clone())

    everything = batch.clone()
    everything[col.LOSS_MASK] = everything[col.ATTENTION_MASK].clone()
    everything[col.LOSS_MASK][:, 0] = False
    fill_advantages(everything)
    given = everything[col.LOSS_MASK] & ~everything[col.SAMPLED]
    assert given.any()
    actor = worker(policy, **options)
    log_probs = actor.compute_log_probs(everything)
    metrics = actor.update(everything)
    for name in ("actor/ppo_kl", "actor/clipfrac", "rollout/logprob_diff_max"):
        if name in plain:
            assert metrics[name] == pytest.approx(plain[name], abs=1e-6), name
    filled = everything[col.OLD_LOG_PROBS]
    known = given & ~torch.isnan(filled)
    assert torch.allclose(filled[known], log_probs[known], atol=1e-5)
    assert metrics["actor/num_updates"] == 1
