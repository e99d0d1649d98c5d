"""What the terms of the loss do to the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from actor_toys import REWARDS, hand_made, make_batch
from sharded_jobs import one_update

from verl_mt.config.actor import ActorConfig
from verl_mt.config.options import read_rollout_correction
from verl_mt.config.policy_losses import POLICY_LOSSES, read_policy_loss
from verl_mt.data import batch as col
from verl_mt.errors import ConfigError, UserCodeError
from verl_mt.extensions.rare_losses.contrast import group_contrast
from verl_mt.extensions.rare_losses.covariance import tokens_to_hold_back, tokens_to_leave_out
from verl_mt.modeling.log_probs import LogProbs
from verl_mt.workers import actor
from verl_mt.workers.loss import (
    ActorLoss,
    MiniBatch,
    WholeMiniBatch,
    token_loss,
)
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.rollout_correction import RolloutCorrection
from verl_mt.workers.sharding import ALONE


def drifted(shift: float):
    """A sampler whose log-probs are those of the policy, less `shift`."""
    batch = make_batch(REWARDS)
    own = one_update(ALONE, batch.clone(), skip_zero_advantage=False)["old"]
    batch[col.ROLLOUT_LOG_PROBS] = torch.where(batch[col.SAMPLED], torch.nan_to_num(own) - shift, 0.0)
    return batch


ACTOR_OF = {
    "vanilla": {},
    "gspo": {"clip_ratio": 0.5},
    "cispo": {},
    "sapo": {},
    "fipo": {"fipo_half_life": 2.0},
    "real": {},
    "gpg": {},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
}
"""Every loss, with numbers that do something on a batch of a few dozen tokens."""
RARE = ("fipo", "real", "clip_cov", "kl_cov")
"""Losses that the oracle does not compute."""


def off_policy(mode: str, batch=None, **kwargs):
    """One update on a fixed batch that another policy sampled: ratios are taken to its log-probs."""
    clip = {k: v for k, v in ACTOR_OF[mode].items() if k.startswith("clip_ratio")}
    loss = {"loss_mode": mode} | {k: v for k, v in ACTOR_OF[mode].items() if k not in clip}
    given = {"grad_clip": 0.0, "use_sampler_log_probs": "always", "policy_loss": loss, **clip, **kwargs}
    return one_update(ALONE, (drifting(2) if batch is None else batch).clone(), **given)


def drifting(records: int):
    batch = make_batch(REWARDS, records=records)
    own = one_update(ALONE, batch.clone(), skip_zero_advantage=False)["old"]
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(3)) * 0.4
    batch[col.ROLLOUT_LOG_PROBS] = torch.where(batch[col.SAMPLED], torch.nan_to_num(own) + noise, 0.0)
    return batch


def flat(result, step: int = 0) -> torch.Tensor:
    return torch.cat([g.flatten() for g in result["gradients"][step].values()])


@pytest.mark.slow
@pytest.mark.parametrize("mode", RARE)
def test_no_split_into_micro_batches_changes_the_gradient(mode):
    """With trajectories of two records, that then pass through the model one by one."""
    batch = drifting(2)
    whole, single = (off_policy(mode, batch, ppo_micro_batch_size=size) for size in (None, 1))
    torch.testing.assert_close(flat(single), flat(whole), rtol=1e-4, atol=1e-6)
    assert single["metrics"]["actor/pg_loss"] == pytest.approx(whole["metrics"]["actor/pg_loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_the_share_of_chosen_tokens_is_a_metric_and_the_draw_repeats(mode):
    batch = drifting(1)
    first, again = off_policy(mode, batch), off_policy(mode, batch)
    assert first["metrics"]["actor/chosen_frac"] == pytest.approx(0.2, abs=0.03)
    torch.testing.assert_close(flat(first), flat(again), rtol=0, atol=0)
    plain = off_policy("vanilla", batch)
    assert (flat(first) - flat(plain)).norm() > 0.01 * flat(plain).norm()


@pytest.mark.slow
@pytest.mark.parametrize("mode", RARE)
def test_on_policy_every_rare_loss_trains_and_a_batch_of_equal_rewards_changes_nothing(mode):
    kwargs = {"policy_loss": {"loss_mode": mode}, "grad_clip": 0.0}
    assert one_update(ALONE, make_batch(REWARDS), **kwargs)["metrics"]["actor/grad_norm"] > 0
    idle = one_update(ALONE, make_batch([[1.0, 1.0], [0.0, 0.0]]), **kwargs)
    if mode in ("kl_cov", "real"):  # they may move tokens without advantage, which so pass through the model
        assert idle["metrics"]["actor/grad_norm"] == pytest.approx(0.0, abs=1e-6)
    else:
        assert idle["gradients"] == []


def test_how_far_the_sampler_is_from_the_policy_is_measured_in_every_update():
    metrics = one_update(ALONE, drifted(0.5), grad_clip=0.0)["metrics"]
    ratio = 1.6487213
    expected = {"sampler_kl": ratio - 1 - 0.5, "sampler_kl_k1": -0.5, "ratio_ess": 1.0}
    expected |= dict.fromkeys(("ratio_p01", "ratio_p50", "ratio_p99", "ratio_max"), ratio)
    assert {name: metrics[f"rollout/{name}"] for name in expected} == pytest.approx(expected, rel=1e-3)
    same = one_update(ALONE, drifted(0.0), grad_clip=0.0)["metrics"]
    assert same["rollout/sampler_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_a_record_without_advantage_counts_in_gspos_ratio_though_it_moves_nothing():
    batch = make_batch([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]], records=2, seed=3)
    batch[col.ADVANTAGES][0] = 0.0  # of the two records of a trajectory
    found = []
    for skip in (True, False):
        kwargs = {"skip_zero_advantage": skip, "ppo_epochs": 2, "grad_clip": 0.0, "clip_ratio": 0.5}
        found.append(one_update(ALONE, batch.clone(), policy_loss={"loss_mode": "gspo"}, **kwargs))
    assert found[0]["metrics"]["actor/skipped_zero_advantage_sequences"] == 1
    torch.testing.assert_close(flat(found[0], step=1), flat(found[1], step=1), atol=1e-6, rtol=1e-4)


@pytest.mark.slow  # two more processes
@pytest.mark.parametrize("mode", ["gspo", "clip_cov", "kl_cov"])
def test_what_is_taken_over_a_mini_batch_is_the_same_over_ranks(ranks, mode):
    """Records of one trajectory go to different ranks; tokens are chosen among those of all ranks."""
    batch = drifting(2)
    expected = off_policy(mode, batch)
    kwargs = {"grad_clip": 0.0, "use_sampler_log_probs": "always"}
    loss = {"loss_mode": mode} | {k: v for k, v in ACTOR_OF[mode].items() if k != "clip_ratio"}
    clip = {k: v for k, v in ACTOR_OF[mode].items() if k == "clip_ratio"}
    for got in ranks(2)(one_update, batch, policy_loss=loss, **kwargs, **clip):
        torch.testing.assert_close(flat(got), flat(expected), rtol=1e-4, atol=1e-6)
        assert got["metrics"]["actor/pg_loss"] == pytest.approx(expected["metrics"]["actor/pg_loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "loss", "sign"),
    [(0.5, "vanilla", 1), (-0.5, "vanilla", -1), (0.0, "vanilla", 0), (0.5, "gpg", 0), (0.5, "sapo", 0)],
)
def test_tokens_that_the_loss_does_not_move_are_named_in_the_batch(shift, loss, sign):
    """Ratio e^0.5: what should become likelier is likely enough already; ratio e^-0.5: the other way round."""
    batch = drifted(shift)
    metrics = one_update(
        ALONE, batch, use_sampler_log_probs="always", policy_loss={"loss_mode": loss}, skip_zero_advantage=False
    )["metrics"]
    in_loss, gain = batch[col.LOSS_MASK], batch[col.ADVANTAGES]
    wanted = in_loss & (gain * sign > 0)
    assert torch.equal(batch[col.CLIPPED] > 0, wanted)
    assert wanted.any() == (sign != 0)
    if loss == "vanilla":
        assert metrics["actor/clipfrac"] == pytest.approx(wanted.sum().item() / in_loss.sum().item())


def test_a_token_that_a_correction_leaves_out_counts_as_not_moved():
    batch = drifted(2.0)
    one_update(ALONE, batch, correction={"rollout_rs": "token", "rollout_rs_threshold": 2.0})
    assert torch.equal(batch[col.CLIPPED] > 0, batch[col.LOSS_MASK] & (batch[col.ADVANTAGES] != 0))


def test_clip_cov_leaves_out_tokens_that_ppo_moves():
    """One that PPO clips has no gradient anyway: to leave it out would change nothing."""
    batch = drifting(1)
    share = off_policy("vanilla", batch, clip_ratio=0.1, clip_ratio_c=None)["metrics"]["actor/clipfrac"]
    assert 0.1 < share < 0.9
    every = {"loss_mode": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": -99.0, "clip_cov_ub": 99.0}
    metrics = off_policy("clip_cov", batch, clip_ratio=0.1, policy_loss=every)["metrics"]
    assert metrics["actor/clipfrac"] == pytest.approx(share)
    assert metrics["actor/chosen_frac"] == pytest.approx(1 - share), "all of the others"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "never"])
def test_until_the_weights_change_kl_cov_has_no_penalty_whatever_is_rounded(monkeypatch, mode):
    """The penalty |log ratio| has slope 1 or -1 beside 0: a log-prob that is off by a rounding would get all of it."""
    exact, generator = actor.compute_log_probs, torch.Generator().manual_seed(5)

    def rounded(*args, **kwargs):
        found = exact(*args, **kwargs)
        return found + 1e-6 * (torch.rand(found.shape, generator=generator) - 0.5)

    monkeypatch.setattr(actor, "compute_log_probs", rounded)
    kwargs = {"use_sampler_log_probs": mode, "ppo_mini_batch_size": 2, "ppo_epochs": 2, "grad_clip": 0.0}
    every = {"loss_mode": "kl_cov", "kl_cov_ratio": 1.0}
    without, heavy = (
        one_update(ALONE, make_batch(REWARDS), policy_loss=every | {"ppo_kl_coef": c}, **kwargs) for c in (0.0, 9.0)
    )
    torch.testing.assert_close(flat(heavy), flat(without), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(flat(heavy, 1), flat(without, 1), rtol=1e-2), "then the ratios are others"


def test_until_the_weights_change_the_ratios_of_real_are_exactly_one(monkeypatch):
    exact, passes = actor.compute_log_probs, iter(range(9))

    def update():
        every = {"ppo_mini_batch_size": 2, "grad_clip": 0.0, "policy_loss": {"loss_mode": "real"}}
        return flat(one_update(ALONE, make_batch(REWARDS), **every))

    found = update()
    monkeypatch.setattr(
        actor, "compute_log_probs", lambda *args, **kwargs: exact(*args, **kwargs) + 1e-3 * next(passes)
    )
    assert torch.equal(update(), found)


def test_real_moves_a_trajectory_without_advantage_as_one_that_did_worse():
    """Its classes are those above their group and the others, over all records of a trajectory."""
    batch = make_batch([[1.0, 0.0, 0.5]], records=2)  # the third is at the group's mean
    found = off_policy("real", batch)["gradients"][0]
    other = make_batch([[1.0, 0.0, 0.2]], records=2)  # the same signs but for the third, which was 0
    torch.testing.assert_close(off_policy("real", other)["gradients"][0], found)
    whole, by_row = (off_policy("real", batch, ppo_micro_batch_size=size)["gradients"][0] for size in (None, 1))
    for name, gradient in whole.items():
        torch.testing.assert_close(by_row[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", sorted(ACTOR_OF))
def test_the_columns_that_a_loss_reads_are_sent_to_other_processes(mode):
    from verl_mt.extensions.cluster.workers import ray_group

    batch = drifting(2)
    batch[col.REF_LOG_PROBS] = batch[col.ROLLOUT_LOG_PROBS].clone()
    batch[col.EXECUTION_INDEX] = batch[col.TRAJECTORY_INDEX].clone()
    options = {"use_kl_loss": True, "top_entropy_quantile": 0.5, "correction": {"rollout_is": "sequence"}}
    sent = batch.select(*ray_group._SENT, strict=False)
    assert len(sent.keys()) < len(batch.keys())
    torch.testing.assert_close(
        off_policy(mode, sent, **options)["gradients"], off_policy(mode, batch, **options)["gradients"]
    )


def test_every_loss_is_tried():
    assert ACTOR_OF.keys() == POLICY_LOSSES.keys()


def test_nothing_is_computed_over_a_mini_batch_where_nothing_is_decided():
    batch = make_batch(REWARDS, records=2)
    whole = WholeMiniBatch.of(RankBatch.alone(batch), torch.arange(len(batch)), batch[col.ROLLOUT_LOG_PROBS])
    assert whole.torn
    assert ActorLoss(ActorConfig()).over_mini_batch(whole, batch[col.ROLLOUT_LOG_PROBS]).drift_B is None


def shared_executions():
    """Two trajectories of each group share an execution."""
    batch = drifting(2)
    batch[col.EXECUTION_INDEX] = batch[col.TRAJECTORY_INDEX] // 2
    return batch


def test_a_trajectory_of_real_weighs_by_its_share_of_its_executions_tokens():
    """The mean is over executions, so the slopes are scaled by their number and not by that of trajectories."""
    from verl_mt.algorithms.aggregate import token_weights

    batch = shared_executions()
    owner, execution = batch[col.TRAJECTORY_INDEX], batch[col.EXECUTION_INDEX]
    mask, rows = batch[col.LOSS_MASK] & batch[col.SAMPLED], torch.arange(len(batch))
    old = batch[col.ROLLOUT_LOG_PROBS].double()
    shift = 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    new = (old + shift).requires_grad_()
    whole = WholeMiniBatch.of(RankBatch.alone(batch), rows, old, lambda share, rows: new.detach())
    slopes = group_contrast(whole, real_tau=0.5)["slope_B"].double()
    weights = token_weights(mask, execution, mode="seq-mean-token-mean", norm_constant=None)
    (found,) = torch.autograd.grad((weights * slopes[:, None] * torch.where(mask, new - old, 0.0)).sum(), new)

    scores = torch.stack([(new - old)[owner == k][mask[owner == k]].mean() for k in owner.unique()])
    firsts = [int((owner == k).nonzero()[0]) for k in owner.unique()]
    classes = [float(batch[col.ADVANTAGES][r][mask[r]].mean()) for r in firsts]
    groups = batch[col.GROUP_INDEX][firsts]
    total = scores.new_zeros(())
    for group in groups.unique():
        good = [k for k in range(len(scores)) if groups[k] == group and classes[k] > 0]
        bad = [k for k in range(len(scores)) if groups[k] == group and classes[k] <= 0]
        total = total + torch.log1p(sum(torch.exp(scores[k] / 0.5) for k in bad))
        total = total + torch.log1p(sum(torch.exp(-scores[k] / 0.5) for k in good))
    (whole_gradient,) = torch.autograd.grad(total / len(groups.unique()), new)
    share = torch.tensor([mask[owner == o].sum() / mask[execution == e].sum() for o, e in zip(owner, execution)])
    torch.testing.assert_close(found, whole_gradient * share[:, None], rtol=1e-5, atol=1e-8)


# Numbers worked out by hand

NAN = math.nan


def log(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64).log()


def one_row(**given):
    """A prompt, a token that the policy likes more than before, one that it likes less, and one of an observation."""
    batch = hand_made(
        [[0, 1, 1, 1]], [[0, 1, 1, 0]], advantages=torch.tensor([[9.0, 1.0, -1.0, 1.0]]).double(), **given
    )
    current = log(0.9, 0.25, 0.2, 0.5)
    batch[col.REF_LOG_PROBS] = current - torch.tensor([[5.0, 0.2, 0.4, 0.6]])
    return batch, current.requires_grad_(), torch.tensor([[NAN, math.log(0.2), math.log(0.4), NAN]]).double()


CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.5}


@pytest.mark.parametrize("others", [True, False])
def test_the_loss_of_a_micro_batch_in_numbers(others):
    """The ratios are 1.25 and 0.5: the second is held at 0.8."""
    terms = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_type": "k1", "kl_loss_coef": 0.2} if others else {}
    batch, current, old = one_row()
    weights = torch.tensor([[0.0, 0.5, 0.25, 2.0]]).double()
    mini = MiniBatch(weights, share_BT=torch.tensor([[1.0, 0.5, 1.0, 3.0]]).double() if others else None)
    entropy = torch.tensor([[7.0, 1.0, 2.0, 3.0]]).double()
    found = ActorLoss(ActorConfig(**CLIPS, **terms)).of_micro_batch(LogProbs(current, entropy), batch, mini, old)
    pg_loss = 0.5 * -1.25 * (0.5 if others else 1.0) + 0.25 * 0.8 + 2.0 * -1.0
    kl_loss = 0.5 * 0.2 + 0.25 * 0.4 + 2.0 * 0.6
    loss = pg_loss - 0.1 * 7.0 + 0.2 * kl_loss if others else pg_loss
    expected = {"actor/pg_loss": pg_loss, "actor/loss": loss} | ({"actor/kl_loss": kl_loss} if others else {})
    assert {name: value.item() for name, value in found.sums.items()} == pytest.approx(expected)
    assert found.loss.item() == pytest.approx(loss)
    assert found.clipped_BT.tolist() == [[0, 0, 1, 0]] and found.num_tokens.item() == 2
    means = {"clipfrac": 0.5, "clipfrac_lower": 0.0, "ppo_kl": math.log(0.2 * 0.4 / 0.25 / 0.2) / 2, "entropy": 1.5}
    assert {name: value.item() for name, value in found.means.items()} == pytest.approx(means)
    (gradient,) = torch.autograd.grad(found.loss, current)
    slopes = [0.0, -0.3125 + 0.1, 0.05, -2.0 + 0.4] if others else [0.0, -0.625, 0.0, -2.0]
    assert gradient[0].tolist() == pytest.approx(slopes)


def test_without_gradients_nothing_tells_which_tokens_do_not_move():
    batch, current, old = one_row()
    with torch.no_grad():
        found = ActorLoss(ActorConfig()).of_micro_batch(
            LogProbs(current, torch.zeros_like(current)), batch, MiniBatch(torch.ones(1, 4)), old
        )
    assert found.clipped_BT is None and not found.loss.requires_grad


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, True), ({"use_kl_loss": True}, False), ({"entropy_coeff": 0.1}, False),
        ({"policy_loss": {"loss_mode": "sapo"}}, True),
    ],
)  # fmt: skip
def test_the_slope_of_an_on_policy_loss_is_known_in_advance(options, known):
    batch, _, old = one_row()
    mini, unknown = MiniBatch(torch.tensor([[0.0, 0.5, 0.25, 2.0]]).double()), torch.full_like(old, NAN)
    loss = ActorLoss(ActorConfig(**options))
    found = loss.slope_where_known(batch, mini, unknown)
    assert (found is not None) == known
    if known:
        assert found[0].tolist() == pytest.approx([0.0, -0.5, 0.25, -2.0])
        assert loss.slope_where_known(batch, mini, old) is None, "an old log-prob is another one"
        outside = torch.tensor([[-1.0, NAN, NAN, NAN]]).double()
        assert torch.equal(loss.slope_where_known(batch, mini, outside), found), "in the loss"
        loss.policy_loss.slope_known = False
        assert loss.slope_where_known(batch, mini, unknown) is None
        loss.policy_loss.slope_known = True
        loss.correction = RolloutCorrection(read_rollout_correction({"rollout_is": "token"}))
        assert loss.slope_where_known(batch, mini, unknown) is None


def whole_of(batch, old, current=None, rows=None, generator=None):
    """A mini-batch of the rows, whose current log-probs may be asked for once."""
    asked = [] if current is None else [current]

    def compute(share, wanted):
        found = asked.pop()
        return torch.where(torch.isin(torch.arange(len(found)), wanted)[:, None], found, NAN)

    numbers = torch.arange(len(batch)) if rows is None else torch.tensor(rows, dtype=torch.int64)
    return WholeMiniBatch.of(RankBatch.alone(batch), numbers, old, compute, generator)


def split_rows(second_record: list[int]):
    """Four rows; the first and the third are of one trajectory."""
    return hand_made(
        [[1, 1, 0], [1, 1, 1], second_record, [1, 0, 0]],
        trajectory_index=[1, 2, 1, 3],
        advantages=torch.ones(4, 3).double(),
    )


def trajectory_ratios(whole):
    return read_policy_loss({"loss_mode": "gspo"}).over_mini_batch(whole, clip_low=0.2, clip_high=0.2)


OLD = torch.tensor([[-1, NAN, 9], [-5, -5, -5], [9, -2, -3], [-5, 0, 0]])
CURRENT = torch.tensor([[-0.5, -7, 9], [-1, -1, -1], [9, -1, -3.5], [-1, 0, 0]])


def test_the_ratio_of_a_trajectory_of_several_rows_in_numbers():
    """Its differences are 0.5, 0 (where the old log-prob is the current one), 1 and -0.5."""
    batch = split_rows([0, 1, 1])
    whole = whole_of(batch, OLD, CURRENT)
    assert whole.torn and len(whole) == 4
    ((name, found),) = trajectory_ratios(whole).items()
    torch.testing.assert_close(found, torch.tensor([0.25, NAN, 0.25, NAN]), equal_nan=True)
    assert name == "log_ratio_B"
    found = whole_of(batch, OLD * NAN).split_ratios(batch[col.LOSS_MASK], OLD * NAN)
    assert found[[0, 2]].tolist() == [0.0, 0.0] and found[[1, 3]].isnan().all(), "and no pass is needed"


def test_a_trajectory_of_one_row_has_no_ratio_to_collect():
    one_counts = split_rows([0, 0, 0])
    assert whole_of(one_counts, OLD).split_ratios(one_counts[col.LOSS_MASK], OLD) is None
    assert trajectory_ratios(whole_of(one_counts, OLD)) == {}
    alone = whole_of(split_rows([0, 1, 1]), OLD, rows=[0, 1, 3])
    assert not alone.torn and trajectory_ratios(alone) == {}


def test_a_mini_batch_knows_its_own_rows_only():
    whole = whole_of(split_rows([0, 1, 1]), OLD, CURRENT, rows=[1, 2])
    assert whole.batch[col.TRAJECTORY_INDEX].tolist() == [2, 1]
    assert whole.sampled_NT.tolist() == [[True] * 3, [False, True, True]]
    assert torch.equal(whole.old_NT, OLD[[1, 2]])
    assert torch.equal(whole.log_probs(torch.tensor([1])), CURRENT[[2]])
    with pytest.raises(NotImplementedError):
        WholeMiniBatch.of(whole.rank_batch, whole.numbers, OLD).log_probs()


def test_a_part_of_a_mini_batch_has_all_that_is_known_of_its_rows():
    mini = MiniBatch(*torch.arange(6.0).reshape(2, 3), {"x": torch.tensor([1, 2, 3])}, torch.arange(3))
    part = mini.part(torch.tensor([2, 0]))
    assert part.weights_BT.tolist() == [2, 0] and part.drift_B.tolist() == [5, 3]
    assert part.arguments["x"].tolist() == [3, 1] and part.share_BT.tolist() == [2, 0]
    bare = MiniBatch(torch.arange(3.0)).part(torch.tensor([1]))
    assert (bare.drift_B, bare.share_BT, bare.arguments) == (None, None, {})


def test_the_tokens_of_the_largest_covariances_in_numbers():
    """Log-probs -1, -3, -1, -3 and advantages 1, 1, -1, -1: the covariances are 1, -1, -1, 1."""
    batch = hand_made([[1, 1, 1, 1, 0]], advantages=torch.tensor([[1.0, 1.0, -1.0, -1.0, 9.0]]).double())
    current = torch.tensor([[-1.0, -3.0, -1.0, -3.0, 9.0]]).double()
    found = tokens_to_hold_back(whole_of(batch, current, current), kl_cov_ratio=0.5)
    assert found["chosen"].tolist() == [[True, False, False, True, False]]
    limits = {"clip_cov_lb": 0.5, "clip_cov_ub": 1.5, "clip_low": 0.2, "clip_high": 0.2, "clip_cov_ratio": 1.0}
    for old, chosen in (
        (NAN * current, [True, False, False, True, False]),
        (current - torch.tensor([1.0, 0, 0, 0, 0]), [False, False, False, True, False]),  # too likely already
        (current + torch.tensor([0, 0, 0, 1.0, 0]), [True, False, False, False, False]),  # unlikely enough
    ):
        assert tokens_to_leave_out(whole_of(batch, old, current), **limits)["chosen"].tolist() == [chosen]


@pytest.mark.parametrize("decide", ["hold back", "leave out", "contrast"])
def test_over_no_rows_nothing_is_decided(decide):
    whole = whole_of(split_rows([0, 0, 0]), OLD, rows=[])
    found = {
        "hold back": lambda: tokens_to_hold_back(whole, kl_cov_ratio=0.5),
        "leave out": lambda: tokens_to_leave_out(
            whole, clip_cov_ratio=1.0, clip_cov_lb=0.0, clip_cov_ub=1.0, clip_low=0.2, clip_high=0.2
        ),
        "contrast": lambda: group_contrast(whole, real_tau=0.5),
    }[decide]()
    assert {name: [*value.shape] for name, value in found.items()} == (
        {"slope_B": [0]} if decide == "contrast" else {"chosen": [0, 3]}
    )


@pytest.mark.parametrize(("delta", "rows", "drift"), [(0.1, None, True), (None, None, False), (0.1, [0, 1], False)])
def test_the_drift_of_split_trajectories_is_collected_for_sequence_masks(delta, rows, drift):
    batch = split_rows([0, 1, 1])
    batch[col.ROLLOUT_LOG_PROBS] = torch.nan_to_num(OLD, nan=-7.0)
    loss = ActorLoss(ActorConfig())
    loss.correction = RolloutCorrection(read_rollout_correction({"off_policy_sequence_mask_delta": delta}))
    mini = loss.over_mini_batch(whole_of(batch, OLD, CURRENT, rows), torch.ones(4, 3))
    assert (mini.drift_B is not None) == drift and mini.weights_BT.tolist() == [[1.0] * 3] * 4 and not mini.arguments
    if drift:
        torch.testing.assert_close(mini.drift_B, torch.tensor([0.25, NAN, 0.25, NAN]), equal_nan=True)


# A custom loss

CUSTOM = """
import torch

number = 3

def plain(log_probs, old, advantages, mask):
    return -advantages * log_probs + old

def any_number(*tensors):
    return plain(*tensors)

def beside_numbers(log_probs, old, advantages, mask):
    return plain(log_probs, old, advantages, mask), {"seen": 3, "mean": log_probs.mean()}

def by_name(log_probs, old, advantages, mask, clip_high, x):
    return log_probs * 0 + clip_high + 10 * x

def all_names(log_probs, old, advantages, mask, **names):
    return log_probs * 0 + names["clip_low"] + 10 * names["clip_high"] + 100 * names["clip_c"] + 1000 * names["x"]

def three(log_probs, old, advantages):
    pass

def none():
    pass

def one_number(log_probs, old, advantages, mask):
    return log_probs.sum()

def a_list(log_probs, old, advantages, mask):
    return [log_probs, {}]

def without_gradient(log_probs, old, advantages, mask):
    return log_probs.detach(), {}

def raises(log_probs, old, advantages, mask):
    raise SystemExit("no way")

def is_stopped(log_probs, old, advantages, mask):
    raise KeyboardInterrupt
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(CUSTOM)

    def made(name: str, **options):
        loss = {"loss_mode": f"{path}:{name}", **options}
        return token_loss(ActorConfig(policy_loss=loss, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=4.0))

    return made


def four(grad: bool = True):
    new = torch.tensor([[-1.0, -2.0]], requires_grad=grad)
    return new, torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0, -1.0]]), torch.tensor([[True, False]])


@pytest.mark.parametrize("name", ["plain", "any_number"])
def test_a_custom_loss_is_masked(custom, name):
    loss, numbers = custom(name)(*four())
    assert loss.tolist() == [[1.5, 0.0]] and numbers == {}


def test_numbers_of_a_custom_loss_are_logged(custom):
    loss, numbers = custom("beside_numbers")(*four())
    assert loss.tolist() == [[1.5, 0.0]] and {n: v.item() for n, v in numbers.items()} == {"seen": 3, "mean": -1.5}
    assert not numbers["mean"].requires_grad


@pytest.mark.parametrize(("name", "value"), [("by_name", 0.3 + 20), ("all_names", 0.2 + 3.0 + 400 + 2000)])
def test_options_and_clip_ranges_of_a_custom_loss_come_by_name(custom, name, value):
    assert custom(name, x=2)(*four())[0].tolist() == [[pytest.approx(value), 0.0]]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("number", {}, "is a int, expected a function"),
        (
            "three",
            {},
            r"takes log_probs, old, advantages. Expected \(log_probs, old_log_probs, advantages, mask, ...\)",
        ),
        ("none", {}, "takes nothing. Expected"),
        ("plain", {"y": 1}, "takes no argument of that name. It takes log_probs, old, advantages, mask"),
        ("any_number", {"y": 1}, "takes no argument of that name. It takes tensors"),
    ],
)
def test_a_custom_loss_that_cannot_be_one_is_refused_before_it_runs(custom, name, options, text):
    with pytest.raises(ConfigError, match=text):
        custom(name, **options)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one_number", r"returned shape \(\). Expected a loss for each token, \(1, 2\)"),
        ("a_list", "returned a list. Expected"),
        ("without_gradient", "a loss without gradient"),
        ("raises", "raised SystemExit: no way"),
    ],
)
def test_what_a_custom_loss_does_wrong_is_told(custom, name, text):
    with pytest.raises(UserCodeError, match=text):
        custom(name)(*four())


def test_a_custom_loss_may_be_stopped_and_needs_no_gradient_where_there_is_none(custom):
    with pytest.raises(KeyboardInterrupt):
        custom("is_stopped")(*four())
    assert custom("without_gradient")(*four(grad=False))[0].tolist() == [[-1.0, 0.0]]
    with torch.no_grad():
        assert custom("without_gradient")(*four())[0].tolist() == [[-1.0, 0.0]]


def test_tokens_that_nobody_sampled_are_trained_by_ppos_loss_where_the_losss_own_looks_at_others():
    batch, current, old = one_row()
    for mode, expected in (("gpg", -math.log(0.5)), ("gspo", -1.0)):
        loss = ActorLoss(ActorConfig(**CLIPS, policy_loss={"loss_mode": mode}))
        weights = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).double()
        found = loss.of_micro_batch(LogProbs(current, torch.zeros_like(current)), batch, MiniBatch(weights), old)
        assert found.loss.item() == pytest.approx(expected)


def test_the_most_uncertain_tokens_in_numbers():
    """Of five sampled tokens the quantile 0.5 is 3; two of the three of a trajectory are above it."""
    batch = hand_made([[1, 1, 0], [1, 0, 0], [1, 1, 1]], [[1, 1, 1], [1, 0, 0], [1, 1, 0]], trajectory_index=[4, 4, 2])
    entropies = torch.tensor([[5.0, 1.0, 9.0], [3.0, 9.0, 9.0], [2.0, 4.0, 9.0]])
    whole = whole_of(batch, torch.zeros(3, 3))
    found = ActorLoss(ActorConfig(top_entropy_quantile=0.5)).uncertain(whole, entropies)
    assert found.tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0]]
    options = {"top_entropy_quantile": 0.5, "policy_loss": {"loss_mode": "gspo"}}
    found = ActorLoss(ActorConfig(**options)).uncertain(whole, entropies)
    torch.testing.assert_close(found, torch.tensor([[2 / 3] * 3, [2 / 3] * 3, [0.5] * 3]))


def test_a_loss_gets_what_it_decides_over_a_mini_batch_for_its_own_rows():
    batch = split_rows([0, 1, 1])
    gspo = ActorLoss(ActorConfig(policy_loss={"loss_mode": "gspo"}))
    mini = gspo.over_mini_batch(whole_of(batch, OLD, CURRENT), torch.ones(4, 3))
    assert [*mini.arguments] == ["log_ratio_B"] and mini.drift_B is None and mini.share_BT is None
    torch.testing.assert_close(mini.arguments["log_ratio_B"], torch.tensor([0.25, NAN, 0.25, NAN]), equal_nan=True)
    batch = hand_made([[0, 0], [1, 1], [1, 1]], advantages=torch.tensor([[0.0, 0], [1, 1], [-1, -1]]).double())
    current = torch.tensor([[0.0, 0], [-1, -3], [-1, -3]]).double()
    kl_cov = ActorLoss(ActorConfig(policy_loss={"loss_mode": "kl_cov", "kl_cov_ratio": 0.5}))
    mini = kl_cov.over_mini_batch(whole_of(batch, current, current, rows=[1, 2]), torch.ones(3, 2))
    assert mini.arguments["chosen"].tolist() == [[False, False], [True, False], [False, True]]


def test_a_correction_weights_the_losses_of_sampled_tokens_and_tells_of_it():
    """The old ratios to the sampler are 1.6 and 4; by its drift the trajectory unlearns nothing."""
    batch, current, old = one_row(rollout_log_probs=log(0.9, 0.125, 0.1, 0.5))
    loss = ActorLoss(ActorConfig(**CLIPS))
    loss.correction = RolloutCorrection(
        read_rollout_correction({"rollout_is": "token", "off_policy_sequence_mask_delta": 0.5})
    )
    weights, entropy = torch.tensor([[0.0, 0.5, 0.25, 2.0]]).double(), torch.ones(1, 4).double().requires_grad_()
    for drift, unlearns in ((NAN, 1), (-1.0, 0)):
        mini = MiniBatch(weights, drift_B=torch.tensor([drift]))
        found = loss.of_micro_batch(LogProbs(current, entropy), batch, mini, old)
        assert found.loss.item() == pytest.approx(0.5 * -1.25 * 1.6 + unlearns * 0.25 * 0.8 * 2 - 2.0)
        share = found.means["rollout_corr/off_policy_sequence_masked_fraction"].item()
        assert share == (0.0 if unlearns else 0.5)
        assert not any(value.requires_grad for value in found.means.values())


def test_rows_without_sampled_tokens_have_numbers_too():
    batch, current, old = one_row()
    batch[col.SAMPLED][:] = False
    found = ActorLoss(ActorConfig()).of_micro_batch(
        LogProbs(current, torch.ones(1, 4)), batch, MiniBatch(torch.ones(1, 4)), old
    )
    assert found.num_tokens.item() == 0 and {n: v.item() for n, v in found.means.items()} == dict.fromkeys(
        found.means, 0.0
    )
    rows = hand_made([[1, 1], [1, 1]], [[1, 1], [0, 0]], trajectory_index=[3, 8])
    options = {"top_entropy_quantile": 0.5, "policy_loss": {"loss_mode": "gspo"}}
    factor = ActorLoss(ActorConfig(**options)).uncertain(
        whole_of(rows, torch.zeros(2, 2)), torch.tensor([[1.0, 2.0], [9.0, 9.0]])
    )
    assert factor.tolist() == [[0.5, 0.5], [0.0, 0.0]]


def test_the_slopes_of_two_classes_in_numbers():
    """Scores (0.6 + 0 + 0.3) / 3 and -0.2; the first trajectory has two rows, and one token without an old log-prob."""
    old = torch.tensor([[-1.0, NAN, -9.0], [-1.0, -1.0, -1.0], [-2.0, -9.0, -9.0]])
    current = torch.tensor([[-0.4, -7.0, 5.0], [-1.2, -1.4, -1.0], [-1.7, 5.0, 5.0]])
    advantages = torch.tensor([[2.0, 1.0, -9.0], [-1.0, -1.0, -1.0], [-8.0, 0.0, 0.0]])
    batch = hand_made(
        [[1, 1, 0], [1, 1, 1], [1, 0, 0]], trajectory_index=[5, 3, 5], group_index=[1, 1, 1], advantages=advantages
    )

    def slopes(*args):
        return group_contrast(whole_of(batch, *args), real_tau=0.5)["slope_B"].tolist()

    good, bad = (2 * 2 / (1 + math.exp(x / 0.5)) for x in (0.3, 0.2))
    assert slopes(old, current) == pytest.approx([-good, bad, -good])
    assert slopes(NAN * old) == pytest.approx([-2.0, 2.0, -2.0]), "and no pass is needed"
    batch[col.EXECUTION_INDEX] = torch.tensor([4, 4, 4])
    assert slopes(old, current) == pytest.approx([-good / 2, bad / 2, -good / 2]), "one sequence"
