"""What the terms of the loss do to the gradient."""

from __future__ import annotations

import pytest
import torch
from actor_toys import REWARDS, make_batch
from sharded_jobs import one_update

from verl_mt.data import batch as col
from verl_mt.workers.ranks import ALONE


def drifted(shift: float):
    """A sampler whose log-probs are those of the policy, less `shift`."""
    batch = make_batch(REWARDS)
    own = one_update(ALONE, batch.clone(), skip_zero_advantage=False)["old"]
    batch[col.ROLLOUT_LOG_PROBS] = torch.where(batch[col.SAMPLED], torch.nan_to_num(own) - shift, 0.0)
    return batch


@pytest.mark.cap("C65")
@pytest.mark.parametrize(("shift", "weight"), [(0.0, 1.0), (0.5, 1.6487213), (2.0, 2.0), (-1.0, 0.3678794)])
def test_a_drifting_sampler_scales_the_gradient_by_its_truncated_weight(shift, weight):
    batch = drifted(shift)
    plain = one_update(ALONE, batch.clone(), grad_clip=0.0)
    weighted = one_update(ALONE, batch.clone(), grad_clip=0.0, tis_clip=2.0)
    for name, gradient in plain["gradients"][0].items():
        torch.testing.assert_close(weighted["gradients"][0][name], gradient * weight, rtol=1e-4, atol=1e-6)
    metrics = weighted["metrics"]
    assert metrics["actor/tis_weight"] == pytest.approx(weight, rel=1e-4)
    assert metrics["actor/tis_clipfrac"] == pytest.approx(float(shift == 2.0))
    assert metrics["actor/tis_ess"] == pytest.approx(1.0, rel=1e-4)
    assert "actor/tis_weight" not in plain["metrics"]


def test_rows_without_log_probs_of_a_sampler_have_weight_one():
    batch = drifted(1.0)
    batch[col.HAS_LOG_PROBS][:] = False
    plain = one_update(ALONE, batch.clone(), grad_clip=0.0)
    weighted = one_update(ALONE, batch.clone(), grad_clip=0.0, tis_clip=2.0)
    torch.testing.assert_close(weighted["gradients"], plain["gradients"])
