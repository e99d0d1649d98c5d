"""The update: one loss over a whole mini-batch, whatever the split; only sampled tokens matter."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from actor_toys import REWARDS, VOCAB, fill_advantages, make_batch, record, tiny_policy, worker
from tensordict import TensorDict

from verl_mt.config.actor import RefConfig
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.errors import DataError, VerlMTError
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.trainable import _disable_dropout


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def gradient_of(policy, batch: TensorDict, **kwargs) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of one update, seen just before the optimizer's step."""
    actor = worker(policy, **kwargs)
    seen = []

    def keep(*_):
        seen.append(torch.cat([p.grad.flatten() for p in actor.module.parameters() if p.grad is not None]))

    actor.optimizer.register_step_pre_hook(keep)
    metrics = actor.update(batch.clone())
    assert len(seen) == 1
    return seen[0], metrics


def weights(actor: ActorWorker) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in actor.module.parameters()])


@pytest.mark.cap("C33", "C83")
def test_observation_positions_change_no_weight_and_no_metric(policy):
    batch = make_batch(REWARDS)
    junk = batch.clone()
    outside = ~junk[col.LOSS_MASK]
    for name in (col.ADVANTAGES, col.ROLLOUT_LOG_PROBS):
        junk[name] = torch.where(outside, torch.full_like(junk[name], 9.0), junk[name])
    junk[col.POLICY_VERSIONS][outside] = 77
    results = []
    for case in (batch, junk):
        actor = worker(policy)
        metrics = actor.update(case)
        results.append((weights(actor), metrics))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.cap("C33", "C83")
def test_the_text_of_a_last_observation_changes_nothing(policy):
    """Ids behind the last trained token are never conditioned on."""
    batch = make_batch([[1.0, 0.0]])
    changed = batch.clone()
    for row in range(len(changed)):
        last = int(changed[col.LOSS_MASK][row].nonzero().max())
        changed[col.INPUT_IDS][row, last + 1 :] = VOCAB - 1
    a, b = worker(policy), worker(policy)
    assert a.update(batch) == b.update(changed)
    assert torch.equal(weights(a), weights(b))


def test_one_forward_pass_per_on_policy_update(policy):
    actor = worker(policy)
    calls = []
    actor.module.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    actor.update(make_batch([[1.0, 0.0]]))
    calls.clear()
    actor.update(make_batch([[1.0, 0.0]]))
    assert len(calls) == 1


def test_old_log_probs_are_the_samplers_on_request(policy):
    batch = make_batch(REWARDS)
    own = worker(policy).compute_log_probs(batch)
    batch[col.ROLLOUT_LOG_PROBS] = torch.where(batch[col.SAMPLED], own - 0.01, own)
    metrics = worker(policy, use_sampler_log_probs="always").update(batch.clone())
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.01, abs=1e-5)
    assert worker(policy).update(batch.clone())["actor/ppo_kl"] == 0.0
    batch[col.HAS_LOG_PROBS] = torch.zeros_like(batch[col.HAS_LOG_PROBS])
    assert worker(policy, use_sampler_log_probs="always").update(batch.clone())["actor/ppo_kl"] == 0.0


def test_agreement_is_absent_where_it_cannot_be_measured(policy):
    text_only = make_batch(REWARDS)
    text_only[col.HAS_LOG_PROBS] = torch.zeros_like(text_only[col.HAS_LOG_PROBS])
    metrics = worker(policy).update(text_only)
    assert not any(name.startswith("rollout/") for name in metrics)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("kwargs", [{}, {"ppo_mini_batch_size": 1, "ppo_epochs": 2}, {"ppo_micro_batch_size": 2}])
def test_a_batch_that_teaches_nothing_has_the_numbers_of_every_step(policy, kwargs):
    flat = [[1.0, 1.0], [0.0, 0.0, 0.0]]
    batch, actor = make_batch(flat), worker(policy, **kwargs)
    before = weights(actor)
    metrics = actor.update(batch)
    assert torch.equal(weights(actor), before)
    assert not torch.isnan(batch[col.OLD_LOG_PROBS]).any()
    passed = worker(policy, skip_zero_advantage=False, optim={"weight_decay": 0.0}).update(make_batch(flat))
    for name in ("rollout/logprob_diff_max", "rollout/logprob_diff_mean", "actor/entropy"):
        assert metrics[name] == pytest.approx(passed[name], rel=1e-5)
    assert all(metrics[f"actor/{name}"] == 0 for name in ("loss", "clipfrac", "grad_norm", "num_updates"))


@pytest.mark.parametrize("split", [{}, {"ppo_max_token_len": 40}, {"ppo_micro_batch_size": 2}])
def test_the_kl_term_of_a_policy_that_is_its_reference_is_exactly_zero(policy, split):
    batch = make_batch([[1.0] * 4, [0.0] * 3, [1.0] * 2, [0.5] * 5])
    actor = worker(policy, use_kl_loss=True, optim={"weight_decay": 0.0}, **split)
    ref = RefWorker(copy.deepcopy(policy), RefConfig(), actor=actor.config, temperature=1.0)
    batch[col.REF_LOG_PROBS] = ref.compute_log_probs(batch)
    before = weights(actor)
    metrics = actor.update(batch)
    assert metrics["actor/kl_loss"] == metrics["actor/grad_norm"] == 0
    assert torch.equal(weights(actor), before), "rounding, made a step by Adam"


def test_the_share_of_tokens_that_the_numbers_cover_is_told(policy):
    flat = [1.0, 1.0, 1.0]
    batch = make_batch([*REWARDS, flat])
    tokens_B = (batch[col.LOSS_MASK] & batch[col.SAMPLED]).sum(1)
    metrics = worker(policy).update(batch.clone())
    assert metrics["actor/token_share"] == pytest.approx((tokens_B[:-3].sum() / tokens_B.sum()).item())
    assert worker(policy, skip_zero_advantage=False).update(batch.clone())["actor/token_share"] == 1
    # Where nothing has a signal, everything is measured.
    assert worker(policy).update(make_batch([flat]))["actor/token_share"] == 1


def test_when_everything_is_skipped_the_weights_stay_and_the_schedule_goes_on(policy):
    actor = worker(policy, total_steps=4, optim={"lr_scheduler_type": "linear"})
    before = weights(actor)
    first = actor.update(make_batch([[1.0, 1.0]]))
    assert torch.equal(weights(actor), before)
    assert (first["actor/num_updates"], first["actor/lr"]) == (0, 1e-2)
    assert actor.update(make_batch([[1.0, 0.0]]))["actor/lr"] == pytest.approx(0.75e-2)
    assert not torch.equal(weights(actor), before)


def test_a_gradient_that_is_not_finite_is_dropped_and_counted_and_the_third_in_a_row_stops_the_run(policy):
    actor = worker(policy)
    before = weights(actor)
    bad = make_batch(REWARDS)
    bad[col.ADVANTAGES] = bad[col.ADVANTAGES] * math.inf
    bad[col.ADVANTAGES][~bad[col.LOSS_MASK]] = 0.0
    for _ in range(2):
        metrics = actor.update(bad.clone())
        assert metrics["actor/nonfinite_updates"] == 1 and "actor/loss" not in metrics
    actor.update(make_batch([[1.0, 1.0]]))
    assert torch.equal(weights(actor), before)
    with pytest.raises(
        VerlMTError, match=r"not finite in 3 updates in a row .* lower actor_rollout_ref\.actor\.optim\.lr"
    ):
        actor.update(bad.clone())
    good = worker(policy)
    good.update(bad.clone())
    assert good.update(make_batch(REWARDS))["actor/num_updates"] == 1


def test_a_missing_column_is_named(policy):
    batch = make_batch(REWARDS)
    with pytest.raises(DataError, match="no column ref_log_probs"):
        worker(policy, use_kl_loss=True).update(batch)
    with pytest.raises(DataError, match="no column advantages"):
        worker(policy).update(batch.exclude(col.ADVANTAGES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kwargs", [{}, {"ppo_mini_batch_size": 1, "ppo_epochs": 2}])
def test_a_saved_and_loaded_worker_goes_on_bit_for_bit(policy, kwargs, dtype, tmp_path):
    policy = copy.deepcopy(policy).to(dtype)
    batches = [make_batch(REWARDS, seed=s) for s in range(4)]
    straight = worker(policy, total_steps=4, **kwargs)
    metrics = [straight.update(b.clone()) for b in batches]
    first = worker(policy, total_steps=4, **kwargs)
    for b in batches[:2]:
        first.update(b.clone())
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = worker(policy, total_steps=4, **kwargs)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [second.update(b.clone()) for b in batches[2:]] == metrics[2:]
    assert torch.equal(weights(second), weights(straight))
    assert second.num_updates == straight.num_updates


def test_mini_batches_hold_whole_prompts_and_every_row_once_per_epoch(policy):
    actor = worker(policy, ppo_mini_batch_size=2, ppo_epochs=2)
    batch = make_batch(REWARDS, records=2)
    parts = list(actor._mini_batches(batch[col.PROMPT_INDEX]))
    assert len(parts) == 4
    for epoch in (parts[:2], parts[2:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(len(batch)))
        prompts = [set(batch[col.PROMPT_INDEX][rows].tolist()) for rows in epoch]
        assert not prompts[0] & prompts[1] and [len(p) for p in prompts] == [2, 1]


def test_the_reward_goes_up_on_a_task_that_can_be_learned(policy):
    """Token 5 after the prompt is right: its probability must rise."""
    batch = col.build_batch(
        [
            Trajectory(
                f"t{token}", "p", "p", f"t{token}", records=[record([1, 2, 3, token], 3, [1])],
                reward=float(token == 5), stop_reason=StopReason.FINISHED,
            )
            for token in (5, 6, 7, 8)
        ],
        pad_token_id=0,
    )  # fmt: skip
    assert batch is not None
    fill_advantages(batch)
    actor = worker(policy, lr=1e-3)
    before = actor.compute_log_probs(batch)[0, 3]
    for _ in range(5):
        actor.update(batch.clone())
    assert actor.compute_log_probs(batch)[0, 3] > before + 0.05


def test_a_layer_of_dropout_is_turned_off_too():
    module = torch.nn.Sequential(torch.nn.Dropout(0.5)).train()
    _disable_dropout(module)
    assert torch.equal(module(torch.ones(99)), torch.ones(99))


def test_gradient_checkpointing_changes_no_gradient_and_turns_dropout_off(policy):
    model = copy.deepcopy(policy)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    plain, _ = gradient_of(model, make_batch(REWARDS))
    model.gradient_checkpointing_enable()
    checkpointed, _ = gradient_of(model, make_batch(REWARDS))
    torch.testing.assert_close(checkpointed, plain, atol=1e-6, rtol=1e-5)
