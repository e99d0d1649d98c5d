"""`use_sampler_log_probs=interpolated`: the proximal policy from between the sampler and the policy in its update."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from actor_toys import REWARDS, tiny_policy, worker
from sharded_jobs import one_update
from test_loss import drifted, drifting, flat
from test_slope_where_known import update_in_tiles

from verl_mt.algorithms.corrections import interpolated_log_probs
from verl_mt.config.actor import ActorConfig
from verl_mt.config.options import read_rollout_correction
from verl_mt.data import batch as col
from verl_mt.modeling.log_probs import LogProbs
from verl_mt.workers.loss import ActorLoss, MiniBatch
from verl_mt.workers.rollout_correction import RolloutCorrection
from verl_mt.workers.sharding import ALONE

TOKEN = {"rollout_is": "token"}
SEVERAL = {"use_sampler_log_probs": "interpolated", "ppo_mini_batch_size": 1, "skip_zero_advantage": False}


def aged(batch):
    """Each token 0, 1 or 3 steps old."""
    generator = torch.Generator().manual_seed(7)
    ages = torch.tensor([0, 1, 3])[torch.randint(3, batch[col.SAMPLED].shape, generator=generator)]
    batch[col.AGES] = ages.masked_fill(~batch[col.SAMPLED], 0).to(torch.int32)
    return batch


def in_order(batch) -> list[torch.Tensor]:
    """Rows of each mini-batch of one prompt, as a worker of seed 0 shuffles them."""
    order = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(0))
    return [(batch[col.PROMPT_INDEX] == prompt).nonzero().squeeze(1) for prompt in order]


# The formula


def test_the_formula_in_numbers():
    sampler, current = torch.tensor([[-2.0, -3.0, -5.0]]), torch.tensor([[-1.0, -2.0, -1.0]], requires_grad=True)
    found = interpolated_log_probs(current, sampler, torch.tensor([[0, 1, 3]], dtype=torch.int32))
    assert found.tolist() == [[-2.0, -2.5, -2.0]], "0, 1/2 and 3/4 of the way"
    assert not found.requires_grad


def test_the_loss_of_a_batch_in_numbers():
    """One row: a prompt, four sampled tokens of ages 0, 1, 3, 3, and one that an observation gave. The log-prob before
    the update of the fourth is known."""
    log = [math.log(p) for p in (1.0, 0.22, 0.2, 0.32, 0.45, 0.5)]
    current = torch.tensor([log], requires_grad=True)
    behave = torch.tensor([[0.0, math.log(0.2), math.log(0.1), math.log(0.02), math.log(0.1), 0.0]])
    old = torch.tensor([[math.nan, math.nan, math.nan, math.nan, math.log(0.5), math.nan]])
    in_loss = torch.tensor([[False, True, True, True, True, True]])
    micro = {
        col.ADVANTAGES: torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0, 1.0]]),
        col.LOSS_MASK: in_loss,
        col.SAMPLED: torch.tensor([[False, True, True, True, True, False]]),
        col.HAS_LOG_PROBS: torch.tensor([True]),
        col.ROLLOUT_LOG_PROBS: behave,
        col.TRAJECTORY_INDEX: torch.tensor([0]),
    }
    ages = torch.tensor([[0, 0, 1, 3, 3, 0]], dtype=torch.int32)
    # Proximal: 0.2 (the sampler's); sqrt(0.1 0.2); 0.02^(1/4) 0.32^(3/4) = 0.16; 0.5 (known).
    ratios = [0.22 / 0.2, 2**0.5, 0.32 / 0.16, 0.45 / 0.5]
    weights = [1.0, 2**0.5, 2.0, 2.0]  # 0.16 / 0.02 and 0.5 / 0.1 are cut to 2
    # Clip ranges 0.2 and 0.5: the third ratio, 2, is above 1.5; the given token has ratio 1 and weight 1.
    values = [-weights[0] * ratios[0], -weights[1] * ratios[1], -weights[2] * 1.5, weights[3] * ratios[3], -1.0]
    slopes = [-weights[0] * ratios[0], -weights[1] * ratios[1], 0.0, weights[3] * ratios[3], -1.0]
    loss = ActorLoss(ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.5))
    loss.correction = RolloutCorrection(read_rollout_correction(TOKEN))
    output, mini = LogProbs(current, torch.zeros_like(current)), MiniBatch(in_loss.float(), age_BT=ages)
    found = loss.of_micro_batch(output, micro, mini, old)
    assert found.loss.item() == pytest.approx(sum(values), rel=1e-5)
    (gradient,) = torch.autograd.grad(found.loss, current)
    assert gradient[0].tolist() == pytest.approx([0.0, *slopes], rel=1e-5)
    one_by_one = loss.of_micro_batch(output, micro, mini.part(torch.tensor([0])), old)
    assert one_by_one.loss.item() == found.loss.item()


def test_the_slope_depends_on_log_probs_where_old_ones_do():
    batch = aged(drifting(1))
    unknown, mini = torch.full(batch[col.LOSS_MASK].shape, math.nan), MiniBatch(batch[col.LOSS_MASK].float())
    loss = ActorLoss(ActorConfig())
    assert loss.slope_where_known(batch, mini, unknown) is not None
    assert loss.slope_where_known(batch, replace(mini, age_BT=batch[col.AGES]), unknown) is None


# Steps of several updates


def watched(batch, **kwargs):
    """An update of several mini-batches: before each step of the optimizer the gradient, and the weights that it is
    of; and how many forward passes there were."""
    actor = worker(tiny_policy(), grad_clip=0.0, **kwargs)
    actor.loss.correction = RolloutCorrection(read_rollout_correction(TOKEN))
    actor.compute_log_probs(batch)  # the first call of a model tries out what it can
    seen, passes = [], []

    def keep(*_):
        parameters = [*actor.module.parameters()]
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        seen.append((gradient, [p.detach().clone() for p in parameters]))

    actor.optimizer.register_step_pre_hook(keep)
    actor.module.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    return seen, passes, actor.update(batch)


@pytest.mark.parametrize("options", [{}, {"ppo_epochs": 2}, {"ppo_epochs": 2, "ppo_mini_batch_size": None}])
def test_several_updates_pass_every_row_once_each(options):
    passes = {}
    for mode in ("auto", "interpolated"):
        kwargs = {**SEVERAL, "use_sampler_log_probs": mode, **options}
        _, calls, metrics = watched(aged(drifting(1)), **kwargs)
        passes[mode] = (len(calls), metrics["actor/num_updates"])
    updates = passes["auto"][1]
    assert passes == {"auto": (updates + 1, updates), "interpolated": (updates, updates)} and updates > 1


def test_tokens_of_the_steps_own_weights_have_the_samplers_log_probs():
    """As `always`, behind the first update; of which nothing is left here that moves."""
    still = {**SEVERAL, "lr": 0.0, "grad_clip": 0.0}
    found = one_update(ALONE, drifting(1), **still)
    always = one_update(ALONE, drifting(1), **still | {"use_sampler_log_probs": "always"})
    for step in (1, 2):
        torch.testing.assert_close(flat(found, step), flat(always, step), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(flat(found), flat(always), rtol=1e-2), "ratios of the first are to the policy itself"


def test_what_the_rows_say_was_computed_before_the_update():
    batch = aged(drifted(0.5))
    own = worker(tiny_policy()).compute_log_probs(batch)
    metrics = one_update(ALONE, batch, correction=TOKEN, **SEVERAL)["metrics"]
    first = in_order(batch)[0]
    torch.testing.assert_close(batch[col.OLD_LOG_PROBS][first], own[first])
    others = ~torch.isin(torch.arange(len(batch)), first)
    assert batch[col.OLD_LOG_PROBS][others].isnan().all()
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.5, rel=1e-3)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(math.exp(0.5), rel=1e-3)


def test_no_gradient_is_made_on_the_way_forward_that_depends_on_log_probs(monkeypatch):
    plain, tiled, again = update_in_tiles(monkeypatch, **SEVERAL, lr=0.0)
    assert again > 0 and len(plain) == 3
    for one, other in zip(tiled, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("loss", ["fipo"])
def test_no_split_into_micro_batches_changes_the_gradient(loss):
    kwargs = {**SEVERAL, "lr": 0.0, "grad_clip": 0.0, "policy_loss": {"loss_mode": loss}, "correction": TOKEN}
    whole, single = (one_update(ALONE, aged(drifting(2)), ppo_micro_batch_size=size, **kwargs) for size in (None, 1))
    for step in range(3):
        torch.testing.assert_close(flat(single, step), flat(whole, step), rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # two more processes
def test_ranks_interpolate_alike(ranks):
    kwargs = {**SEVERAL, "lr": 0.0, "grad_clip": 0.0, "correction": TOKEN}
    expected = one_update(ALONE, aged(drifting(2)), **kwargs)
    for got in ranks(2)(one_update, aged(drifting(2)), **kwargs):
        for step in range(3):
            torch.testing.assert_close(flat(got, step), flat(expected, step), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got["old"], expected["old"], equal_nan=True, rtol=1e-4, atol=1e-5)
