"""Over several ranks the update is the same: gradients, metrics, old log-probs, weights."""

from __future__ import annotations

import pytest
import torch
from actor_toys import REWARDS, fill_advantages, make_batch, tiny_policy, worker
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sharded_jobs import PACKED, SHARED, log_probs, one_update
from tables import before_release

from verl_mt.algorithms.aggregate import MODES
from verl_mt.data import batch as col
from verl_mt.modeling.passes import PLAIN
from verl_mt.workers.sharding import ALONE

pytestmark = pytest.mark.slow


def a_batch(seed: int, *, masked: bool, few: bool):
    """Ragged rows of several prompts; `few` has less rows with a loss than there are ranks."""
    batch = make_batch([[1.0, 0.0]] if few else [*REWARDS, [1.0, 1.0]], seed=seed, records=1 if few else 2)
    if masked:
        batch[col.LOSS_MASK][len(batch) - 1 if few else 2] = False
    fill_advantages(batch)
    batch[col.REF_LOG_PROBS] = torch.where(batch[col.LOSS_MASK], -3.1, 0.0)
    return batch


@example(3, "token-mean", (1, 4096, PACKED), {}, {"masked": False, "few": True}, 0)  # a rank without rows
@example(2, "seq-mean-token-mean", (None, 40, SHARED), {"skip_zero_advantage": False}, {"masked": True, "few": True}, 1)
@example(2, "seq-mean-token-sum", (3, 4096, PLAIN), {"entropy_coeff": 0.1}, {"masked": True, "few": False}, 2)
@settings(max_examples=1, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from([2, 3]),
    mode=st.sampled_from(MODES),
    split=st.tuples(
        st.one_of(st.none(), st.integers(1, 5)),
        st.sampled_from([1, 16, 40, 4096]),
        st.sampled_from([PLAIN, PACKED, SHARED]),
    ),
    options=st.sampled_from(
        [{}, {"skip_zero_advantage": False}, {"entropy_coeff": 0.1}, {"use_kl_loss": True, "kl_loss_coef": 0.1}]
    ),
    kind=st.fixed_dictionaries({"masked": st.booleans(), "few": st.booleans()}),
    seed=st.integers(0, 5),
)
def test_ranks_micro_batches_and_packing_change_no_gradient(ranks, size, mode, split, options, kind, seed):
    """Uneven lengths, a rank without rows, a row whose mask is empty, any micro-batch size."""
    batch = a_batch(seed, **kind)
    kwargs = {"loss_agg_mode": mode, "grad_clip": 0.5, **options}
    expected = one_update(ALONE, batch.clone(), **kwargs)
    limits = {"ppo_micro_batch_size": split[0], "ppo_max_token_len": split[1]}
    for got in ranks(size)(one_update, batch, **kwargs, **limits, passes=split[2]):
        assert len(got["gradients"]) == 1
        torch.testing.assert_close(got["gradients"], expected["gradients"], atol=1e-5, rtol=1e-5)
        assert got["metrics"] == pytest.approx(expected["metrics"], abs=1e-5, rel=1e-4)
        torch.testing.assert_close(got["old"], expected["old"], atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("size", [before_release(2), 3])
def test_several_mini_batches_and_epochs_end_in_the_same_weights(ranks, size):
    kwargs = {"ppo_mini_batch_size": 1, "ppo_epochs": 2, "ppo_max_token_len": 40, "keep_weights": True}
    batch = make_batch([[1.0, 0.0, 0.5], [0.4, 0.0]], records=2)
    expected = one_update(ALONE, batch.clone(), **kwargs)
    for got in ranks(size)(one_update, batch, **kwargs):
        assert len(got["gradients"]) == len(expected["gradients"]) > 3
        torch.testing.assert_close(got["weights"], expected["weights"], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(got["old"], expected["old"], atol=1e-5, rtol=1e-5, equal_nan=True)
        assert got["metrics"]["actor/ppo_kl"] == pytest.approx(expected["metrics"]["actor/ppo_kl"], abs=1e-4)


def test_activations_may_be_recomputed_on_ranks_too(ranks):
    batch = a_batch(0, masked=False, few=False)
    expected = one_update(ALONE, batch.clone())
    for got in ranks(2)(one_update, batch, checkpointing=True, ppo_micro_batch_size=3):
        torch.testing.assert_close(got["gradients"], expected["gradients"], atol=1e-5, rtol=1e-5)


def test_log_probs_come_back_whole_whoever_computed_them(ranks):
    batch = a_batch(1, masked=True, few=False)
    expected = worker(tiny_policy()).compute_log_probs(batch)
    for got in ranks(3)(log_probs, batch):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_every_rank_holds_its_share_of_weights_and_optimizer_state(ranks):
    batch = a_batch(0, masked=False, few=False)
    whole_bytes, whole_state = one_update(ALONE, batch.clone())["bytes"]
    for got in ranks(2)(one_update, batch):
        assert got["bytes"][0] < 0.55 * whole_bytes
        assert got["bytes"][1] < 0.55 * whole_state
