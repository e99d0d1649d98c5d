"""The update: one loss over a whole mini-batch, whatever the split; only sampled tokens matter."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from actor_toys import REWARDS, VOCAB, fill_advantages, make_batch, record, tiny_policy, worker
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl_mt.algorithms.aggregate import MODES
from verl_mt.config.actor import RefConfig
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.errors import DataError, VerlMTError
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.ref import RefWorker


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


def naive_gradient(policy, batch: TensorDict, mode: str) -> torch.Tensor:
    """Policy gradient by full logits, row by row, the definition of each aggregation written out."""
    model = copy.deepcopy(policy)
    tokens_of: dict[int, int] = {}
    for row in range(len(batch)):
        owner = int(batch[col.TRAJECTORY_INDEX][row])
        tokens_of[owner] = tokens_of.get(owner, 0) + int(batch[col.LOSS_MASK][row].sum())
    total, num = sum(tokens_of.values()), len(tokens_of)
    loss = torch.zeros(())
    for row in range(len(batch)):
        length = int(batch[col.ATTENTION_MASK][row].sum())
        ids = batch[col.INPUT_IDS][row, :length]
        lp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        own = tokens_of[int(batch[col.TRAJECTORY_INDEX][row])]
        scale = {
            "token-mean": 1 / total,
            "seq-mean-token-mean": 1 / (num * own),
            "seq-mean-token-sum": 1 / num,
            "seq-mean-token-sum-norm": 1 / (num * 8.0),
        }[mode]
        for t in range(1, length):
            if batch[col.LOSS_MASK][row, t]:
                loss = loss - scale * batch[col.ADVANTAGES][row, t] * lp[t - 1, ids[t]]
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("mode", MODES)
def test_an_on_policy_update_has_the_gradient_of_the_definition(policy, mode):
    batch = make_batch(REWARDS, records=2)
    got, metrics = gradient_of(policy, batch, loss_agg_mode=mode, grad_clip=0.0)
    torch.testing.assert_close(got, naive_gradient(policy, batch, mode), atol=1e-5, rtol=1e-4)
    assert metrics["actor/clipfrac"] == metrics["actor/clipfrac_lower"] == metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/num_updates"] == 1


@settings(max_examples=10, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    micro=st.one_of(st.none(), st.integers(1, 5)),
    max_tokens=st.sampled_from([1, 16, 40, 4096]),
    skip=st.booleans(),
    seed=st.integers(0, 5),
)
@pytest.mark.slow
def test_no_micro_batch_split_changes_the_gradient(policy, mode, micro, max_tokens, skip, seed):
    batch = make_batch([*REWARDS, [1.0, 1.0]], seed=seed, records=2)
    batch[col.LOSS_MASK][2] = False  # a row without a token in the loss may be alone in its micro-batch
    fill_advantages(batch)
    kwargs = {"loss_agg_mode": mode, "grad_clip": 0.0}
    whole, _ = gradient_of(policy, batch, **kwargs, skip_zero_advantage=False)
    split, _ = gradient_of(
        policy, batch, **kwargs, ppo_micro_batch_size=micro, ppo_max_token_len=max_tokens, skip_zero_advantage=skip
    )
    torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-5)


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


def test_several_mini_batches_take_old_log_probs_from_before_the_first_change(policy):
    actor = worker(policy, ppo_mini_batch_size=1, ppo_epochs=2, skip_zero_advantage=False)
    batch = make_batch(REWARDS)
    expected = actor.compute_log_probs(batch)
    metrics = actor.update(batch)
    torch.testing.assert_close(batch[col.OLD_LOG_PROBS], expected)
    assert metrics["actor/num_updates"] == 6
    assert metrics["actor/ppo_kl"] != 0.0


def test_old_log_probs_are_the_samplers_on_request(policy):
    batch = make_batch(REWARDS)
    own = worker(policy).compute_log_probs(batch)
    batch[col.ROLLOUT_LOG_PROBS] = torch.where(batch[col.SAMPLED], own - 0.01, own)
    metrics = worker(policy, use_sampler_log_probs="always").update(batch.clone())
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.01, abs=1e-5)
    assert worker(policy).update(batch.clone())["actor/ppo_kl"] == 0.0
    batch[col.HAS_LOG_PROBS] = torch.zeros_like(batch[col.HAS_LOG_PROBS])
    assert worker(policy, use_sampler_log_probs="always").update(batch.clone())["actor/ppo_kl"] == 0.0


def test_agreement_with_the_sampler_is_measured_and_moves_when_one_weight_does(policy):
    batch = make_batch(REWARDS)
    sampler = worker(policy)
    batch[col.ROLLOUT_LOG_PROBS] = sampler.compute_log_probs(batch)
    assert worker(policy).update(batch.clone())["rollout/logprob_diff_max"] < 1e-5
    with torch.no_grad():
        sampler.module.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    batch[col.ROLLOUT_LOG_PROBS] = sampler.compute_log_probs(batch)
    metrics = worker(policy).update(batch.clone())
    assert metrics["rollout/logprob_diff_max"] > 1e-3
    assert 0 < metrics["rollout/logprob_diff_mean"] <= metrics["rollout/logprob_diff_max"]


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


def test_groups_without_variance_are_skipped_and_still_counted_in_the_denominators(policy):
    batch = make_batch([*REWARDS, [1.0, 1.0, 1.0]])
    full, _ = gradient_of(policy, batch, skip_zero_advantage=False)
    skipped, metrics = gradient_of(policy, batch)
    assert metrics["actor/skipped_zero_advantage_sequences"] == 3
    torch.testing.assert_close(skipped, full, atol=1e-6, rtol=1e-5)


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


@pytest.mark.parametrize("extra", [{"entropy_coeff": 0.1}, {"use_kl_loss": True, "kl_loss_coef": 0.5}])
def test_kl_and_entropy_terms_see_every_row(policy, extra):
    batch = make_batch([*REWARDS, [1.0, 1.0, 1.0]])
    batch[col.REF_LOG_PROBS] = worker(policy).compute_log_probs(batch) - 0.3
    with_term, metrics = gradient_of(policy, batch, grad_clip=0.0, **extra)
    without, _ = gradient_of(policy, batch, grad_clip=0.0)
    assert metrics["actor/skipped_zero_advantage_sequences"] == 0
    assert not torch.allclose(with_term, without, atol=1e-5)
    if "use_kl_loss" in extra:
        assert metrics["actor/kl_loss"] == pytest.approx(math.exp(-0.3) - 1 + 0.3, abs=1e-5)


def test_tokens_that_nobody_sampled_are_trained_on_request_but_stay_out_of_the_metrics(policy):
    batch = make_batch(REWARDS)
    metrics_before = worker(policy).update(batch.clone())
    opted_in = batch.clone()
    row, position = 0, int(batch[col.SAMPLED][0].nonzero().min())
    opted_in[col.LOSS_MASK][row, position - 1] = True
    fill_advantages(opted_in)
    gradient, metrics = gradient_of(policy, opted_in)
    plain, _ = gradient_of(policy, batch)
    assert not torch.allclose(gradient, plain, atol=1e-5)
    for name in ("actor/entropy", "rollout/logprob_diff_max"):
        assert metrics[name] == pytest.approx(metrics_before[name], abs=1e-6)


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


@pytest.mark.slow
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


def test_gradient_checkpointing_changes_no_gradient_and_turns_dropout_off(policy):
    model = copy.deepcopy(policy)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    plain, _ = gradient_of(model, make_batch(REWARDS))
    model.gradient_checkpointing_enable()
    checkpointed, _ = gradient_of(model, make_batch(REWARDS))
    torch.testing.assert_close(checkpointed, plain, atol=1e-6, rtol=1e-5)
