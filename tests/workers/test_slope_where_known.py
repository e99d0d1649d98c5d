"""Gradients of a big head are made on the way forward where the policy is the one that sampled."""

from __future__ import annotations

import pytest
import torch
from actor_toys import REWARDS, make_batch
from sharded_jobs import one_update

from verl_mt.config.policy_losses import POLICY_LOSSES
from verl_mt.data import batch as col
from verl_mt.modeling import head_log_probs
from verl_mt.workers.sharding import ALONE


def update_in_tiles(monkeypatch, **kwargs):
    """Gradients, and how many times logits were made again for them."""
    batch, again = make_batch(REWARDS, records=2), []
    batch[col.REF_LOG_PROBS] = torch.where(batch[col.LOSS_MASK], -3.1, 0.0)
    kwargs = {"grad_clip": 0.0, "ppo_micro_batch_size": 4, **kwargs}
    plain = one_update(ALONE, batch.clone(), **kwargs)["gradients"]
    real = head_log_probs._gradients
    with monkeypatch.context() as patch:
        patch.setattr(head_log_probs, "LOGITS_AT_ONCE", 100)
        patch.setattr(head_log_probs, "TILE", {"cpu": 100, "cuda": 100})
        patch.setattr(head_log_probs, "_gradients", lambda *args: again.append(1) or real(*args))
        tiled = one_update(ALONE, batch.clone(), **kwargs)["gradients"]
    return plain, tiled, len(again)


@pytest.mark.slow
@pytest.mark.parametrize("mode", POLICY_LOSSES)
def test_on_policy_no_loss_needs_its_logits_twice(monkeypatch, mode):
    plain, tiled, again = update_in_tiles(monkeypatch, policy_loss={"loss_mode": mode})
    assert again == 0
    torch.testing.assert_close(tiled[0], plain[0], atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"use_kl_loss": True}, {"entropy_coeff": 0.01}, {"ppo_mini_batch_size": 1}],
    ids=["kl", "entropy", "off policy"],
)
def test_where_the_derivative_depends_on_log_probs_logits_are_made_again_for_the_same_gradient(monkeypatch, options):
    plain, tiled, again = update_in_tiles(monkeypatch, **options)
    assert again > 0
    torch.testing.assert_close(tiled[0], plain[0], atol=1e-6, rtol=1e-4)


def test_a_loss_of_the_users_own_sees_log_probs_of_the_policy_only(monkeypatch, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "def loss(log_probs, old, advantages, mask):\n"
        "    assert (log_probs[mask] < 0).all()\n"
        "    return -advantages * log_probs.exp()\n"
    )
    plain, tiled, again = update_in_tiles(monkeypatch, policy_loss={"loss_mode": f"{path}:loss"})
    assert again > 0
    torch.testing.assert_close(tiled[0], plain[0], atol=1e-6, rtol=1e-4)
