"""The update: one loss over a whole mini-batch, whatever the split; only sampled tokens matter."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from actor_toys import REWARDS, VOCAB, fill_advantages, hand_made, make_batch, record, tiny_policy, worker
from tensordict import TensorDict

from verl_mt.config.actor import ActorConfig, RefConfig
from verl_mt.config.options import read_rollout_correction
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.errors import DataError, VerlMTError
from verl_mt.modeling import lora
from verl_mt.modeling.log_probs import LogProbs
from verl_mt.workers import actor as actor_module
from verl_mt.workers import ref as ref_module
from verl_mt.workers.actor import ActorWorker, UpdateMetrics, against_sampler
from verl_mt.workers.loss import MicroBatchLoss
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.rollout_correction import RolloutCorrection
from verl_mt.workers.sharding import ALONE, Ranks
from verl_mt.workers.trainable import UpdatePlan, _disable_dropout


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


@pytest.mark.slow
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
        VerlMTError, match=r"not finite in 3 updates in a row .* Lower actor_rollout_ref\.actor\.optim\.lr"
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


# Which rows pass, and which log-probs ratios are taken to

NAN = math.nan


def four_rows(**given):
    """Prompts 1, 1, 2, 2; the first two rows are one trajectory. The first moves the policy, the second does not, the
    third has tokens that nobody sampled and whose sampler gave no log-probs, the fourth is out of the loss."""
    return hand_made(
        [[0, 1, 1], [0, 1, 1], [0, 1, 1], [0, 0, 0]],
        [[0, 1, 1], [0, 1, 1], [0, 1, 0], [0, 1, 1]],
        prompt_index=[1, 1, 2, 2],
        trajectory_index=[5, 5, 6, 7],
        has_log_probs=[True, True, False, True],
        rollout_log_probs=torch.tensor([[9.0, -1, -2], [9, -3, -4], [9, -5, -6], [9, -7, -8]]),
        advantages=torch.tensor([[9.0, 0, 1], [9, 0, 0], [9, -1, 0], [1, 1, 1]]),
        **given,
    )


def small_actor(**options):
    actor, asked = worker(torch.nn.Linear(2, 1), **options), []

    def compute(share, rows, *, entropy=False):
        asked.append(rows.tolist())
        found = torch.full((len(share.stats), 3), NAN)
        found[rows] = -0.5 * torch.arange(1.0, 4.0)
        return found

    actor._compute_log_probs = compute
    return actor, asked


def prepared(actor, batch):
    share = RankBatch.alone(batch)
    return RankBatch(share.stats, actor._prepare(share.rows), share.number_b)


def test_a_batch_is_prepared_without_changing_it():
    batch = four_rows()
    actor, _ = small_actor()
    here = actor._prepare(batch)
    assert here[col.ADVANTAGES].tolist() == [[0, 0, 1], [0, 0, 0], [0, -1, 0], [0, 0, 0]]
    assert here[col.OLD_LOG_PROBS].isnan().all() and here[col.CLIPPED].isnan().all()
    assert here[col.OLD_LOG_PROBS].shape == here[col.CLIPPED].shape == (4, 3)
    assert batch[col.ADVANTAGES][0, 0] == 9 and col.CLIPPED not in batch.keys()  # noqa: SIM118


@pytest.mark.parametrize(
    ("options", "active", "skipped"),
    [
        ({}, [True, False, True, False], 1),
        ({"skip_zero_advantage": False}, [True, True, True, False], 0),
        ({"use_kl_loss": True}, [True, True, True, False], 0),
        ({"entropy_coeff": 0.1}, [True, True, True, False], 0),
        ({"policy_loss": {"loss_mode": "kl_cov"}}, [True, True, True, False], 0),
        ({"policy_loss": {"loss_mode": "gspo"}}, [True, True, True, False], 0),
    ],
)
def test_rows_that_move_nothing_pass_only_where_something_else_counts(options, active, skipped):
    """With a ratio of trajectories all records of one that moves pass."""
    actor, _ = small_actor(**options)
    metrics = UpdateMetrics()
    stats = RankBatch.alone(four_rows()).stats
    assert actor._active_rows(stats, metrics).tolist() == active and metrics.num_skipped == skipped
    assert metrics.num_skipped == skipped


SAMPLERS = [[NAN, -1, -2], [NAN, -3, -4], [NAN, NAN, NAN], [NAN, -7, -8]]
COMPUTED = [-0.5, -1.0, -1.5]
NOTHING = [NAN] * 3
SEVERAL = {"ppo_mini_batch_size": 1}


@pytest.mark.parametrize(
    ("options", "correction", "asked", "expected"),
    [
        ({}, None, [], [NOTHING] * 4),
        ({"ppo_mini_batch_size": 2}, None, [], [NOTHING] * 4),
        ({"ppo_epochs": 2}, None, [[0, 2]], [COMPUTED, NOTHING, COMPUTED, NOTHING]),
        (SEVERAL, None, [[0, 2]], [COMPUTED, NOTHING, COMPUTED, NOTHING]),
        ({"use_sampler_log_probs": "never"}, None, [[0, 2]], [COMPUTED, NOTHING, COMPUTED, NOTHING]),
        ({"use_sampler_log_probs": "always"}, None, [], SAMPLERS),
        (
            SEVERAL | {"use_sampler_log_probs": "always"}, None, [[2]],
            [*SAMPLERS[:2], COMPUTED, SAMPLERS[3]],
        ),
        ({}, {"rollout_is": "token"}, [], [NOTHING] * 4),
        ({}, {"rollout_is": "sequence"}, [[0, 1, 2]], [NOTHING] * 4),
        (SEVERAL, {"rollout_is": "sequence"}, [[0, 1, 2]], [COMPUTED] * 3 + [NOTHING]),
    ],
)  # fmt: skip
def test_log_probs_that_ratios_are_taken_to(options, correction, asked, expected):
    actor, passes = small_actor(**options)
    if correction:
        actor.loss.correction = RolloutCorrection(read_rollout_correction(correction))
    share = prepared(actor, four_rows())
    old = actor._old_log_probs(share, torch.tensor([True, False, True, False]))
    assert passes == asked
    expected = torch.tensor(expected)
    where = share.rows[col.LOSS_MASK] if correction or asked else torch.ones(4, 3).bool()
    torch.testing.assert_close(old[where], expected[where], equal_nan=True)
    filled = share.rows[col.OLD_LOG_PROBS].isnan().all(1).logical_not().nonzero().squeeze(1).tolist()
    assert filled == [row for rows in asked for row in rows]
    decided = correction is not None and correction["rollout_is"] == "sequence"
    assert (col.CORRECTION in share.rows.keys()) == decided  # noqa: SIM118
    if decided:  # -1 and -1.5 of both rows against -1, -2, -3 and -4: together e^5, which is cut to 2
        assert share.rows[col.CORRECTION].tolist() == [[1, 2, 2], [1, 2, 2], [1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(("device", "moved_to"), [(None, "cpu"), ("meta", torch.device("meta"))])
def test_columns_that_an_update_fills_in_are_on_the_batchs_device(monkeypatch, device, moved_to):
    actor, _ = small_actor()
    gone = []

    class Column:
        def to(self, device):
            gone.append(device)
            return torch.ones(4)

    together = SimpleNamespace(
        together=lambda column, rows: (column, rows.tolist()) == ("made", [0, 1, 2, 3]) and Column()
    )
    monkeypatch.setattr(actor_module, "rank_batch_of", lambda *args: together)
    monkeypatch.setattr(actor_module, "against_sampler", lambda batch, correction: {"rollout/x": 2.0})
    actor.train = lambda share: ({"actor/x": 1.0}, {"filled": "made"})
    batch = TensorDict({"x": torch.zeros(4)}, batch_size=[4], device=device)
    assert actor.update(batch) == {"actor/x": 1.0, "rollout/x": 2.0}
    assert gone == [moved_to] and batch["filled"].shape == (4,)


@pytest.mark.parametrize(
    ("mode", "lacks"),
    [
        ("auto", [True, True, True, False]),
        ("never", [True, True, True, False]),
        ("always", [False, False, True, False]),
    ],
)
def test_rows_that_need_a_pass_for_their_old_log_probs(mode, lacks):
    actor, _ = small_actor(use_sampler_log_probs=mode)
    assert actor._lacks_old(RankBatch.alone(four_rows()).stats).tolist() == lacks


# The numbers of an update


def a_part(tokens: int, sums: dict[str, float], means: dict[str, float]) -> MicroBatchLoss:
    of = {name: torch.tensor(value) for name, value in sums.items()}
    return MicroBatchLoss(
        torch.tensor(0.0), None, of, {name: torch.tensor(value) for name, value in means.items()}, torch.tensor(tokens)
    )


def test_sums_are_means_over_mini_batches_and_means_are_over_tokens():
    metrics = UpdateMetrics(num_skipped=4, lr=0.25, token_share=0.5)
    metrics.add(a_part(3, {"actor/loss": 1.0}, {"entropy": 2.0, "rollout_corr/x": 1.0}))
    metrics.add(a_part(1, {"actor/loss": 5.0}, {"entropy": 6.0}))
    metrics.updated(torch.tensor(3.0))
    metrics.updated(None)
    metrics.updated(torch.tensor(5.0))
    expected = {
        "actor/lr": 0.25, "actor/num_updates": 2, "actor/skipped_zero_advantage_sequences": 4,
        "actor/nonfinite_updates": 1, "actor/token_share": 0.5, "actor/loss": 2.0, "actor/entropy": 3.0,
        "rollout_corr/x": 0.75, "actor/grad_norm": 4.0,
    }  # fmt: skip
    assert metrics.summary() == pytest.approx(expected)


def test_numbers_of_all_ranks_are_added_and_what_is_not_finite_is_absent():
    class Three(Ranks):
        def gather(self, value):
            return [value, ({"actor/loss": 3.0}, {"actor/entropy": 1.0}, 2), ({}, {}, 0)]

    metrics = UpdateMetrics()
    metrics.add(a_part(2, {"actor/loss": 1.0, "actor/pg_loss": math.inf}, {"entropy": 2.5}))
    expected = {
        "actor/lr": 0.0, "actor/num_updates": 0, "actor/skipped_zero_advantage_sequences": 0,
        "actor/nonfinite_updates": 0, "actor/loss": 4.0, "actor/entropy": 1.5,
    }  # fmt: skip
    assert metrics.summary(Three(0, 3)) == pytest.approx(expected)
    without_tokens = UpdateMetrics(num_nonfinite=2)
    without_tokens.add(a_part(0, {"actor/loss": 1.0}, {"entropy": 2.5}))
    found = without_tokens.summary()
    assert (found["actor/entropy"], found["actor/loss"]) == (0.0, 0.5)


def test_the_share_of_tokens_that_pass():
    metrics = UpdateMetrics()
    metrics.covers(RankBatch.alone(four_rows()).stats, torch.tensor([True, False, True, False]))
    assert metrics.token_share == pytest.approx(3 / 5)


def test_agreement_with_the_sampler_in_numbers():
    """201 ratios, from e^-1 to e^1: places 2, 100 and 198 are the quantiles. Outside of the loss, not computed or
    without a sampler's log-prob nothing counts."""
    log_ratio = torch.linspace(-1, 1, 201, dtype=torch.float64)
    order = torch.randperm(201, generator=torch.Generator().manual_seed(0))
    own = torch.full((2, 205), 5.0, dtype=torch.float64)
    own[0, :201] = log_ratio[order] - 2.0
    own[0, 201] = NAN
    mask = torch.ones(2, 205, dtype=torch.int64)
    mask[0, 202:] = 0
    batch = hand_made(
        mask.tolist(), has_log_probs=[True, False], old_log_probs=own, rollout_log_probs=torch.full_like(own, -2.0)
    )
    ratio = log_ratio.exp()
    expected = {
        "logprob_diff_max": 1.0,
        "logprob_diff_mean": 2 * 50.5 / 201,
        "sampler_kl": (ratio - 1 - log_ratio).mean().item(),
        "sampler_kl_k1": 0.0,
        "ratio_p01": math.exp(-0.98),
        "ratio_p50": 1.0,
        "ratio_p99": math.exp(0.98),
        "ratio_max": math.e,
        "ratio_ess": (ratio.sum() ** 2 / 201 / (ratio**2).sum()).item(),
    }
    found = against_sampler(batch, None)
    assert found == pytest.approx({f"rollout/{name}": value for name, value in expected.items()}, rel=1e-5, abs=1e-6)
    correction = RolloutCorrection(read_rollout_correction({"rollout_is": "token", "rollout_is_threshold": 3.0}))
    more = against_sampler(batch, correction)
    assert found.items() <= more.items() and more["rollout_corr/rollout_is_mean"] == pytest.approx(ratio.mean().item())
    shifted = batch.clone()
    shifted[col.ROLLOUT_LOG_PROBS] = shifted[col.ROLLOUT_LOG_PROBS] - 0.5
    assert against_sampler(shifted, None)["rollout/sampler_kl_k1"] == pytest.approx(-0.5)
    shifted[col.ROLLOUT_LOG_PROBS][0, 0] = -math.inf
    assert "rollout/logprob_diff_max" not in against_sampler(shifted, None)
    nothing = batch.clone()
    nothing[col.OLD_LOG_PROBS][:] = NAN
    assert against_sampler(nothing, correction) == {}


def test_differences_of_trainer_and_sampler_are_of_tokens_by_the_weights_that_are_trained():
    """What older weights sampled differs however exact the engine is; the ratios to the sampler know it too."""
    own = torch.tensor([[-1.0, -2.0, -3.0]])
    batch = hand_made([[1, 1, 1]], old_log_probs=own, rollout_log_probs=own - torch.tensor([[0.25, 4.0, 0.5]]))
    names = ("rollout/logprob_diff_max", "rollout/logprob_diff_mean")
    found = against_sampler(batch, None)
    assert [found[name] for name in names] == pytest.approx([4.0, 4.75 / 3])
    batch[col.AGES] = torch.tensor([[0, 2, 0]], dtype=torch.int32)
    aged = against_sampler(batch, None)
    assert [aged.pop(name) for name in names] == pytest.approx([0.5, 0.375])
    assert aged == {name: value for name, value in found.items() if name not in names}
    batch[col.AGES] += 1
    assert against_sampler(batch, None) == aged


# The reference policy


class Moving(torch.nn.Linear):
    """On a device that is no CPU, as it says itself; notes where it goes."""

    def __init__(self):
        super().__init__(2, 1)
        self.gone = []

    def to(self, device):
        self.gone.append(str(device))
        return self


@pytest.mark.parametrize(
    ("offload", "device", "gone"),
    [(True, "meta", ["cpu", "meta", "cpu"]), (False, "meta", []), (True, "cpu", []), (True, None, [])],
)
@pytest.mark.parametrize("fails", [True, False])
def test_an_offloaded_reference_policy_is_on_the_device_for_its_passes_only(monkeypatch, offload, device, gone, fails):
    asked = []

    def compute(module, share, rows, **options):
        asked.append((module, rows.tolist(), options))
        if fails:
            raise KeyError
        return torch.ones(1)

    monkeypatch.setattr(ref_module, "compute_log_probs", compute)
    monkeypatch.setattr(RankBatch, "to", lambda share, device: share)
    module = Moving().train()
    config = ActorConfig(ppo_max_token_len=70, ppo_micro_batch_size=3)
    ref = RefWorker(module, RefConfig(offload=offload), actor=config, temperature=0.5, device=device)
    assert not module.training and not any(p.requires_grad for p in module.parameters())
    assert ref.device.type == (device or "cpu")
    share = RankBatch.alone(four_rows())
    if fails:
        with pytest.raises(KeyError):
            ref.log_probs(share)
    else:
        assert ref.log_probs(share).tolist() == [1.0]
    assert module.gone == gone
    assert asked == [(module, [0, 1, 2, 3], {"temperature": 0.5, "max_tokens": 70, "max_rows": 3})]


def test_a_reference_policy_may_have_a_limit_of_its_own():
    config = ActorConfig(ppo_max_token_len=70, ppo_micro_batch_size=3)
    ref = RefWorker(Moving(), RefConfig(log_prob_max_token_len=90), actor=config, temperature=1.0)
    assert (ref._max_tokens, ref._max_rows) == (90, None)


def test_a_policy_with_adapters_is_its_own_reference_and_stays_where_it_is():
    module = Moving()
    lora.set_lora(module, object())
    ref = RefWorker(module, RefConfig(offload=True), actor=ActorConfig(), temperature=1.0, device="meta")
    assert all(p.requires_grad for p in module.parameters()) and not ref._moves and module.gone == []


@pytest.mark.parametrize("split", [{}, {"ppo_micro_batch_size": 2}])
def test_the_loss_that_has_to_be_finite_is_that_of_the_whole_mini_batch(policy, split):
    actor, seen = worker(policy, entropy_coeff=0.1, **split), []
    step = actor._step
    actor._step = lambda loss: seen.append(math.nan if loss.requires_grad else loss.item()) or step(loss)
    metrics = actor.update(make_batch(REWARDS))
    assert seen == [pytest.approx(metrics["actor/loss"], rel=1e-5)] and abs(seen[0]) > 0.1


def passing(monkeypatch, actor):
    """Log-probs are the ids times a weight of -0.1; returns what each pass was told, and which one was the last."""
    passes, lasts = [], []

    def score(module, ids, real, **options):
        passes.append((ids.tolist(), real.tolist(), options))
        return LogProbs(ids * module.weight[0, 0], torch.ones(ids.shape))

    monkeypatch.setattr(actor_module, "packs", lambda module: False)
    monkeypatch.setattr(actor_module, "score", score)
    monkeypatch.setattr(actor_module, "expect_backward", lambda module, *, last: lasts.append(last))
    with torch.no_grad():
        actor.module.weight.fill_(-0.1)
    return passes, lasts


IDS = torch.tensor([[1, 2, 5], [1, 1, 1], [3, 4, 6], [9, 9, 9]])


@pytest.mark.parametrize("entropy", [0.0, 0.5])
def test_the_passes_of_an_update(monkeypatch, entropy):
    """Six tokens are in the loss. The fifth token of row 0 gains, the fourth of row 2 loses: slopes -5/6 and 4/6."""
    actor, _ = small_actor(ppo_micro_batch_size=1, grad_clip=0.0, entropy_coeff=entropy, use_kl_loss=False)
    passes, lasts = passing(monkeypatch, actor)
    batch, gradients = four_rows(input_ids=IDS), []
    for parameter in actor.module.parameters():
        parameter.grad = torch.full_like(parameter, 9.0)  # left behind
    actor.optimizer.register_step_pre_hook(lambda *_: gradients.append(actor.module.weight.grad[0].tolist()))
    metrics = actor.update(batch)
    rows = [0, 1, 2] if entropy else [0, 2]
    assert sorted(ids for ids, _, _ in passes) == sorted([IDS[row].tolist()] for row in rows)
    assert lasts == [False] * (len(rows) - 1) + [True] and gradients == [pytest.approx([-1 / 6, 0.0])]
    for _, real, options in passes:
        slope = options.pop("expected_slope")()
        assert (slope is None) == bool(entropy) and real == [[1, 1, 1]]
        assert options.pop("wanted_BT").tolist() == [[False, True, True]]
        assert options == {"temperature": 1.0, "with_entropy": True, "entropy_grad": bool(entropy), "media": None}
    expected = {
        "pg_loss": 0.0, "loss": -entropy, "entropy": 1.0, "grad_norm": 1 / 6, "ppo_kl": 0.0, "clipfrac": 0.0,
        "num_updates": 1, "lr": 1e-2, "skipped_zero_advantage_sequences": 0 if entropy else 1, "clipfrac_lower": 0.0,
        "nonfinite_updates": 0, "token_share": 1.0 if entropy else 3 / 5,
    }  # fmt: skip
    assert actor.module.bias not in actor.optimizer.state
    found = {name: value for name, value in metrics.items() if name.startswith("actor/")}
    assert found == pytest.approx({f"actor/{name}": value for name, value in expected.items()}, abs=1e-6)
    old, clipped = batch[col.OLD_LOG_PROBS], batch[col.CLIPPED]
    torch.testing.assert_close(old[rows], IDS[rows] * -0.1)
    assert not clipped[rows].any() and old[3].isnan().all() and clipped[3].isnan().all()
    assert old[1].isnan().all() == clipped[1].isnan().all() == (not entropy)


def test_a_rank_without_rows_passes_dummies_and_counts_nothing(monkeypatch):
    actor, _ = small_actor()
    dummies = []
    monkeypatch.setattr(actor_module, "dummy_pass", lambda module, device: dummies.append((module, device)))
    passes, lasts = passing(monkeypatch, actor)
    monkeypatch.setattr(actor_module, "micro_batches", lambda *args, **options: [None, None])
    share = prepared(actor, four_rows(input_ids=IDS))
    metrics = UpdateMetrics()
    rows = torch.arange(4)
    loss, seen = actor._forward_backward(share, rows, rows, torch.full((4, 3), NAN), metrics)
    assert loss.item() == 0.0 and seen.isnan().all() and not passes
    assert dummies == [(actor.module, torch.device("cpu"))] * 2 and lasts == [False, True]
    assert "actor/loss" not in metrics.summary()


def test_ranks_of_a_sequence_count_their_rows_once(monkeypatch):
    actor, _ = small_actor(skip_zero_advantage=False)
    passing(monkeypatch, actor)
    actor.ranks = Ranks(1, 2, 2)
    share, rows, metrics = prepared(actor, four_rows(input_ids=IDS)), torch.tensor([0, 1]), UpdateMetrics()
    loss, seen = actor._forward_backward(share, rows, rows, torch.full((4, 3), NAN), metrics)
    assert loss.item() == 0.0 and "actor/loss" not in metrics.summary(ALONE)
    assert actor.module.weight.grad is not None and not seen[:2].isnan().any()


def test_what_the_configuration_says_of_updates():
    optim = {"weight_decay": 0.5}
    actor = worker(
        torch.nn.Linear(2, 1), optim=optim, ppo_epochs=2, ppo_mini_batch_size=3, shuffle=False, grad_clip=0.25,
        param_offload=True, optimizer_offload=True, temperature=0.5, total_steps=7,
    )  # fmt: skip
    plan = UpdatePlan(actor.config.optim, 2, 3, False, 0.25, "actor_rollout_ref.actor", True, True)
    assert actor._plan == plan and actor.offloads and (actor._temperature, actor._norm_constant) == (0.5, 8.0)
    assert actor._total_updates == 14 and actor.progress()["lora"] is None
