"""The critic: values of states, and updates that no split of the batch changes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from actor_toys import REWARDS, lora_policy, make_batch, tiny_policy, worker
from critic_toys import batch_with_values, critic, value_head, value_model

from verl_mt.algorithms.value_loss import explained_variance
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryGroup
from verl_mt.errors import DataError, VerlMTError
from verl_mt.modeling.values import ValueModel
from verl_mt.trainer.dynamic_sampling import Selection
from verl_mt.workers.critic import update_policy_and_critic


def gradients(worker, batch) -> list[dict[str, torch.Tensor]]:
    """Before each optimizer step, by name."""
    seen: list[dict[str, torch.Tensor]] = []
    names = {id(p): n for n, p in worker.module.named_parameters()}

    def keep(optimizer, *_):
        seen.append({names[id(p)]: p.grad.clone() for p in optimizer.param_groups[0]["params"]})

    worker.optimizer.register_step_pre_hook(keep)
    worker.update(batch)
    return seen


def test_a_new_critic_says_that_every_state_is_worth_nothing():
    worker = critic(ValueModel(copy.deepcopy(tiny_policy())))
    assert not worker.compute_values(make_batch(REWARDS)).any()


@pytest.mark.parametrize("split", [{"ppo_micro_batch_size": 1}, {"ppo_micro_batch_size": 2}, {"ppo_max_token_len": 40}])
def test_no_split_into_micro_batches_changes_values_or_gradients_of_a_shared_trunk(split):
    policy = tiny_policy()
    whole, parts = critic(policy=policy), critic(policy=policy, **split)
    batch = batch_with_values(whole, records=2)
    torch.testing.assert_close(parts.compute_values(batch), batch[col.VALUES], atol=1e-5, rtol=1e-5)
    (expected,), (got,) = gradients(whole, batch), gradients(parts, batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_padding_changes_nothing():
    worker, wider = critic(), critic()
    batch = batch_with_values(worker)
    padded = batch.clone()
    token_columns = [n for n, column in batch.items() if torch.is_tensor(column) and column.ndim == 2]
    for name in token_columns:
        padded[name] = torch.nn.functional.pad(batch[name], (0, 7), value=5 if name == col.INPUT_IDS else 0)
    (expected,), (got,) = gradients(worker, batch), gradients(wider, padded)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_what_stands_at_observations_never_matters():
    clean, dirty = critic(), critic()
    batch = batch_with_values(clean)
    junk = batch.clone()
    for name in (col.VALUES, col.RETURNS):
        junk[name] = torch.where(batch[col.LOSS_MASK], batch[name], torch.nan)
    expected, got = clean.update(batch), dirty.update(junk)
    assert got == expected
    assert all(map(math.isfinite, got.values()))
    for own, other in zip(clean.module.parameters(), dirty.module.parameters()):
        assert torch.equal(own, other)


def test_the_metrics_of_an_update():
    worker = critic(ppo_mini_batch_size=1, ppo_epochs=2)
    batch = batch_with_values(worker)
    metrics = worker.update(batch)
    mask = batch[col.LOSS_MASK]
    assert metrics["critic/values/mean"] == pytest.approx(batch[col.VALUES][mask].mean().item(), abs=1e-6)
    assert metrics["critic/returns/mean"] == pytest.approx(batch[col.RETURNS][mask].mean().item(), abs=1e-6)
    expected = explained_variance(batch[col.VALUES], batch[col.RETURNS], mask).item()
    assert metrics["critic/explained_variance"] == pytest.approx(expected, abs=1e-6)
    assert worker.num_updates == 6
    assert metrics["critic/vf_loss"] > 0 and metrics["critic/grad_norm"] > 0 and metrics["critic/lr"] == 1e-2
    assert 0 <= metrics["critic/vf_clipfrac"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_the_critic_learns_what_states_are_worth(shared):
    """Returns that are a function of the next-to-last token: no constant explains them."""
    policy = tiny_policy() if shared else None
    worker = critic(policy=policy, lr=1e-2, cliprange_value=None)
    batch = make_batch(REWARDS)
    ids = batch[col.INPUT_IDS]
    target = torch.where(batch[col.LOSS_MASK], (ids.roll(1, 1) % 2).float(), 0.0)
    explained = []
    for _ in range(40):
        batch[col.VALUES], batch[col.RETURNS] = worker.compute_values(batch), target
        explained.append(worker.update(batch)["critic/explained_variance"])
    assert explained[-1] > 0.7 > explained[0]


def test_a_shared_trunk_feels_nothing_of_the_critic():
    policy = copy.deepcopy(tiny_policy())
    before = {n: p.clone() for n, p in policy.named_parameters()}
    worker = critic(value_head(), policy=policy)
    worker.update(batch_with_values(worker))
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in policy.named_parameters())
    assert sum(p.numel() for p in worker.module.parameters()) < 400, "a head, not a second model"


def test_a_head_learns_in_eval_mode_and_keeps_its_dropout():
    """Only a module that recomputes activations goes to training mode, without dropout. A head recomputes none."""
    head = value_head()
    head.layers.append(torch.nn.Dropout(0.5))
    worker, modes = critic(head, policy=tiny_policy()), []
    batch = batch_with_values(worker)
    head.register_forward_hook(lambda module, *_: modes.append(module.training))
    worker.update(batch)
    assert modes and set(modes) == {False}
    assert head.layers[-1].p == 0.5


@pytest.mark.parametrize("adapters", [False, True])
def test_a_shared_trunk_gives_the_values_of_the_policy_as_it_is_now(adapters):
    policy = lora_policy() if adapters else copy.deepcopy(tiny_policy())
    worker, batch = critic(value_head(), policy=policy), make_batch(REWARDS)
    before = worker.compute_values(batch)
    with torch.no_grad():
        next(p for p in policy.parameters() if p.requires_grad).mul_(1.5)
    assert (worker.compute_values(batch) - before).abs().max() > 1e-3


@pytest.mark.parametrize("shared", [False, True])
def test_a_resumed_critic_goes_on_bit_for_bit(shared):
    policy = tiny_policy() if shared else None
    kwargs = {"policy": policy, "ppo_mini_batch_size": 1, "ppo_epochs": 2}
    whole = critic(**kwargs)
    batches = [batch_with_values(critic(**kwargs), seed=s) for s in range(3)]
    for batch in batches[:2]:
        whole.update(batch)
    state = copy.deepcopy(whole.state_dict())
    expected = whole.update(batches[2])
    resumed = critic(value_head(seed=5) if shared else value_model(), **kwargs)
    resumed.load_state_dict(state)
    assert resumed.update(batches[2]) == expected
    for own, other in zip(whole.module.parameters(), resumed.module.parameters()):
        assert torch.equal(own, other)


def test_in_the_warm_up_only_the_critic_learns():
    actor, own = worker(tiny_policy()), critic(warmup=2)
    batch = batch_with_values(own)
    seen = [update_policy_and_critic(actor, own, batch.clone()) for _ in range(3)]
    assert ["actor/pg_loss" in metrics for metrics in seen] == [False, False, True]
    assert all("critic/vf_loss" in metrics for metrics in seen)
    assert (actor.num_updates, own.num_updates) == (1, 3)


def test_a_column_that_is_missing_is_named():
    with pytest.raises(DataError, match="no column values, returns"):
        critic().update(make_batch(REWARDS))


def test_a_loss_that_is_not_finite_three_times_in_a_row_stops_the_run():
    worker = critic()
    batch = batch_with_values(worker)
    batch[col.RETURNS] = torch.where(batch[col.LOSS_MASK], torch.inf, 0.0)
    assert worker.update(batch)["critic/nonfinite_updates"] == 1
    worker.update(batch)
    with pytest.raises(VerlMTError, match=r"lower critic\.optim\.lr"):
        worker.update(batch)
    assert worker.num_updates == 0


def test_trajectories_that_a_limit_cut_teach_the_critic_as_little_as_the_policy():
    cut = Trajectory("g0s1", "g0", "g0", "g0s1", stop_reason=StopReason.RESPONSE_LENGTH)
    found = []
    for earned in (0.0, 1e4):
        batch = batch_with_values(critic())
        batch[col.RETURNS][1] = earned
        Selection(filter_overlong=True).mask_overlong(batch, [TrajectoryGroup("g0", "g0", [cut])])
        learner = critic()
        metrics = learner.update(batch)
        found.append((metrics, [p.detach().clone() for p in learner.module.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
