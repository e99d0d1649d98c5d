"""Weights and masks against a sampler that drifts: the formulas with loops, and what no split may change."""

from __future__ import annotations

import math

import pytest
import torch
from actor_toys import hand_made, tiny_policy
from sharded_jobs import one_update
from test_loss import drifted, drifting, flat
from test_split_records import conversation, split_at

from verl_mt.algorithms.corrections import divergences, within
from verl_mt.config.options import read_rollout_correction
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.workers.micro_batch import compute_log_probs
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.rollout_correction import RolloutCorrection
from verl_mt.workers.sharding import ALONE

OPTIONS = {
    "token weights": {"rollout_is": "token"},
    "token weights between bounds": {"rollout_is": "token", "rollout_is_threshold_lower": 0.8},
    "product": {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
    "geometric mean": {"rollout_is": "geometric"},
    "normalised": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "normalised product": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "icepop": {"rollout_is": "token", "rollout_rs": "token", "rollout_rs_threshold": 1.3},
    "token k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.05},
    "rejected product": {"rollout_rs": "sequence", "rollout_rs_threshold": 2.5},
    "rejected mean": {"rollout_rs": "geometric", "rollout_rs_threshold": "0.9_1.2"},
    "rejected mean k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.95_1.3"},
    "rejected token k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_3.0"},
    "rejected mean k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.08},
    "rejected largest k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.3},
    "veto": {"rollout_token_veto_threshold": 0.5},
    "all of it": {
        "rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "geometric",
        "rollout_rs_threshold": 1.3, "rollout_token_veto_threshold": 0.3,
    },
}  # fmt: skip

SOME = ("token weights", "normalised product", "rejected mean", "all of it")


def correction(name: str) -> RolloutCorrection:
    return RolloutCorrection(read_rollout_correction(OPTIONS[name]))


def own_log_probs(batch, temperature=1.0):
    rows = torch.arange(len(batch))
    return compute_log_probs(tiny_policy(), RankBatch.alone(batch), rows, temperature=temperature, max_tokens=9999)


def slow_factors(given: dict, train, batch) -> list[list[float]]:
    """Straight from the formulas, token by token; a sequence is a trajectory."""
    places = [
        (b, t)
        for b in range(len(batch))
        for t in range(train.shape[1])
        if batch[col.SAMPLED][b, t] and batch[col.LOSS_MASK][b, t] and batch[col.HAS_LOG_PROBS][b]
    ]
    d = {(b, t): (train[b, t] - batch[col.ROLLOUT_LOG_PROBS][b, t]).item() for b, t in places}
    owner = batch[col.TRAJECTORY_INDEX].tolist()
    of = {p: [d[q] for q in places if owner[q[0]] == owner[p[0]]] for p in places}
    weights = {}
    for p in places:
        level = given.get("rollout_is")
        exponent = {"token": d[p], "sequence": sum(of[p]), "geometric": sum(of[p]) / len(of[p])}.get(level, 0.0)
        upper, lower = given.get("rollout_is_threshold", 2.0), given.get("rollout_is_threshold_lower", 0.0)
        weights[p] = max(lower, min(upper, math.exp(exponent))) if level else 1.0
    if given.get("rollout_is_batch_normalize"):
        mean = sum(weights.values()) / len(weights)
        weights = {p: w / mean for p, w in weights.items()}
    for p in places:
        if not _stays(given, d[p], of[p]):
            weights[p] = 0.0
    return [[weights.get((b, t), 1.0) for t in range(train.shape[1])] for b in range(len(batch))]


def _stays(given: dict, own: float, sequence: list[float]) -> bool:
    if any(math.exp(x) < given.get("rollout_token_veto_threshold", 0.0) for x in sequence):
        return False
    kind = given.get("rollout_rs")
    if kind is None:
        return True
    short = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
    over, _, estimator = short.get(kind, kind).rpartition("_")
    measure = {
        "k1": lambda x: x if kind in short else -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - x - 1,
    }[estimator]
    values = [measure(x) for x in sequence]
    value = {"token": measure(own), "seq_sum": sum(values), "seq_mean": sum(values) / len(values)}
    found = max(values) if over == "seq_max" else value[over]
    bound = given.get("rollout_rs_threshold", given.get("rollout_is_threshold", 2.0))
    if estimator != "k1":
        return found <= bound
    lower, upper = map(float, bound.split("_")) if isinstance(bound, str) else (1 / bound, bound)
    return lower <= math.exp(found) <= upper


@pytest.mark.slow  # every option over every split
@pytest.mark.cap("C65")
@pytest.mark.parametrize("name", OPTIONS)
def test_factors_are_those_of_the_formulas_written_out(name):
    batch = drifting(2)
    train = own_log_probs(batch)
    batch[col.HAS_LOG_PROBS][3] = False
    found = correction(name).factors(train, batch)
    expected = slow_factors(OPTIONS[name], train, batch)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    touched = found[batch[col.LOSS_MASK]]
    assert int((touched != 1).sum()) > 0 and bool((touched != 0).any()), "it does something, and not to everything"


@pytest.mark.slow  # every option over every split
@pytest.mark.parametrize("name", SOME)
def test_no_split_into_micro_batches_and_no_order_of_rows_changes_a_decision(name):
    batch = drifting(2)
    kwargs = {"grad_clip": 0.0, "correction": OPTIONS[name]}
    whole = one_update(ALONE, batch.clone(), **kwargs)
    single = one_update(ALONE, batch.clone(), ppo_micro_batch_size=1, **kwargs)
    torch.testing.assert_close(flat(single), flat(whole), rtol=1e-4, atol=1e-6)
    backwards = batch[torch.arange(len(batch) - 1, -1, -1)]
    torch.testing.assert_close(flat(one_update(ALONE, backwards, **kwargs)), flat(whole), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token weights", "normalised product", "all of it"])
def test_ranks_decide_alike(ranks, name):
    batch = drifting(2)
    kwargs = {"grad_clip": 0.0, "correction": OPTIONS[name] | {"off_policy_sequence_mask_delta": 0.05}}
    expected = one_update(ALONE, batch.clone(), **kwargs)
    for got in ranks(2)(one_update, batch, **kwargs):
        torch.testing.assert_close(flat(got), flat(expected), rtol=1e-4, atol=1e-6)
        for key, value in expected["metrics"].items():
            if "rollout_corr" in key:
                assert got["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def conversations(turns: set[int]):
    """Two trajectories, the first of which became several records before the turns named."""
    record = conversation([(3, 2), (2, 1), (4, 2)], prompt=4, seed=1)
    other = conversation([(2, 2), (3, 0)], prompt=4, seed=2)
    generator = torch.Generator().manual_seed(5)
    for made in (record, other):
        for place, sampled in enumerate(made.sampled):
            if sampled:
                made.rollout_log_probs[place] = -3.0 + torch.randn((), generator=generator).item()
    finished = StopReason.FINISHED
    batch = col.build_batch(
        [
            Trajectory("a", "p", "p", "a", records=split_at(record, turns), reward=0.0, stop_reason=finished),
            Trajectory("b", "p", "p", "b", records=[other], reward=1.0, stop_reason=finished),
        ],
        pad_token_id=0,
    )
    batch[col.ADVANTAGES] = col.expand_to_tokens(batch, torch.tensor([-1.0, 1.0]))
    return batch


@pytest.mark.slow  # every option over every split
@pytest.mark.parametrize("name", [*SOME, "veto", "unlearn"])
def test_a_trajectory_is_one_sequence_however_many_records_it_became(name):
    given = OPTIONS.get(name) or {"off_policy_sequence_mask_delta": 0.1}
    found = []
    for turns in (set(), {2}, {2, 3}):
        batch = conversations(turns)
        kwargs = {"grad_clip": 0.0, "correction": given, "ppo_micro_batch_size": 1}
        found.append(one_update(ALONE, batch, **kwargs))
    for split in found[1:]:
        if found[0]["gradients"]:
            torch.testing.assert_close(flat(split), flat(found[0]), rtol=1e-4, atol=1e-6)
        else:
            assert not split["gradients"]
        numbers = {k: v for k, v in found[0]["metrics"].items() if "rollout_corr" in k}
        assert numbers
        assert {k: split["metrics"][k] for k in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6)


def test_a_drifted_trajectory_unlearns_nothing_and_still_learns():
    batch = drifted(-1.0)  # the sampler liked every token more than the policy does, by 1 nat
    kwargs = {"grad_clip": 0.0, "use_sampler_log_probs": "always"}
    plain = one_update(ALONE, batch.clone(), **kwargs)
    same = one_update(ALONE, batch.clone(), correction={"off_policy_sequence_mask_delta": 1.1}, **kwargs)
    torch.testing.assert_close(flat(same), flat(plain))
    positive = batch.clone()
    positive[col.ADVANTAGES] = batch[col.ADVANTAGES].clamp(min=0)
    got = one_update(ALONE, batch.clone(), correction={"off_policy_sequence_mask_delta": 0.9}, **kwargs)
    expected = one_update(ALONE, positive, skip_zero_advantage=False, **kwargs)
    torch.testing.assert_close(flat(got), flat(expected), rtol=1e-4, atol=1e-6)
    sampled = batch[col.LOSS_MASK] & batch[col.SAMPLED]
    share = ((batch[col.ADVANTAGES] < 0) & sampled).sum() / sampled.sum()
    assert got["metrics"]["rollout_corr/off_policy_sequence_masked_fraction"] == pytest.approx(share.item(), rel=1e-5)


def test_what_was_decided_is_in_the_metrics():
    batch = drifted(1.0)
    batch[col.ROLLOUT_LOG_PROBS][0] += 3.0  # one row's ratio is e^-2
    given = {"rollout_is": "token", "rollout_rs": "token", "rollout_token_veto_threshold": 0.2}
    metrics = one_update(ALONE, batch, correction=given)["metrics"]
    first = int(batch[col.SAMPLED][0].sum())
    every = int(batch[col.SAMPLED].sum())
    expected = {
        "rollout_is_mean": (2.0 * (every - first) + math.exp(-2) * first) / every,
        "rollout_is_min": math.exp(-2),
        "rollout_is_max": 2.0,
        "rollout_is_cut_fraction": (every - first) / every,
        "rollout_rs_masked_fraction": 1.0,
        "rollout_rs_seq_masked_fraction": 1.0,
        "rollout_is_veto_fraction": 1 / len(batch),
    }
    assert {k: metrics[f"rollout_corr/{k}"] for k in expected} == pytest.approx(expected, rel=1e-4)
    assert 0 < metrics["rollout_corr/rollout_is_eff_sample_size"] < 1


def test_when_everything_is_rejected_nothing_moves():
    batch = drifted(3.0)
    done = one_update(ALONE, batch, correction={"rollout_rs": "token"}, grad_clip=0.0)
    assert done["metrics"]["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert flat(done).norm() == 0.0 and done["metrics"]["actor/pg_loss"] == 0.0


@pytest.mark.parametrize("given", [None, {"rollout_is": "sequence", "off_policy_sequence_mask_delta": 0.1}])
@pytest.mark.parametrize("minis", [None, 1])
def test_a_batch_without_a_token_in_the_loss_moves_nothing(given, minis):
    batch = drifted(0.5)
    batch[col.LOSS_MASK][:] = False
    done = one_update(ALONE, batch, correction=given, ppo_mini_batch_size=minis)
    assert done["gradients"] == [] and done["metrics"]["actor/num_updates"] == 0
    assert all(math.isfinite(value) for value in done["metrics"].values())


@pytest.mark.parametrize(("kind", "kept"), [("token", [0.6, 1.0, 2.5]), ("token_k1", [0.4, 0.6, 1.0])])
def test_one_pair_of_bounds_is_of_the_ratio_or_of_its_inverse(kind, kept):
    """verl's names with k1 measure log(sampler / trainer), and their bounds are of its exponential."""
    lower, upper = read_rollout_correction({"rollout_rs": kind, "rollout_rs_threshold": "0.5_3.0"}).bounds
    ratios = torch.tensor([[0.2, 0.4, 0.6, 1.0, 2.5, 4.0]])
    mask = torch.ones_like(ratios, dtype=torch.bool)
    found = divergences(ratios.log(), torch.zeros_like(ratios), mask, over="token", estimator="k1")
    chosen = within(found, mask, estimator="k1", lower=lower, upper=upper)
    assert ratios[chosen].tolist() == pytest.approx(kept)


def test_a_ratio_at_a_bound_is_not_cut():
    """All ratios are 1."""
    batch = drifted(0.0)
    own = own_log_probs(batch)
    batch[col.ROLLOUT_LOG_PROBS] = own
    for bound in ({"rollout_is_threshold": 1.0}, {"rollout_is_threshold_lower": 1.0}):
        metrics = RolloutCorrection(read_rollout_correction({"rollout_is": "token", **bound})).metrics(own, batch)
        assert metrics["rollout_corr/rollout_is_cut_fraction"] == 0.0


NAN = math.nan
RATIOS = torch.tensor([[NAN, 4, 0.5], [2, NAN, NAN], [1, 0.25, NAN], [8, 8, NAN], [NAN, 16, NAN]], dtype=torch.float64)
"""Trainer to sampler. The first two rows are one trajectory, the sampler of the fourth gave no log-probs, and the
trainer none of the last: five tokens are known."""
SAMPLER = torch.tensor([[-1, -1, 0], [0, 0, 0], [-1, -1, 0], [-1, -1, 0], [-1, -1, -1]]).double()
"""0 where a ratio is to be exactly 2 or 1/2."""


def by_hand():
    """(the trainer's log-probs, the batch)."""
    batch = hand_made(
        [[0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]],
        [[0, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 0]],
        trajectory_index=[4, 4, 9, 5, 3],
        has_log_probs=[True, True, True, False, True],
        rollout_log_probs=SAMPLER,
        advantages=torch.tensor([[9, -1, 0], [-1, -1, -1], [-1, 1, 9], [-1, -1, 9], [-1, -1, -1]]).double(),
    )
    return RATIOS.log() + SAMPLER, batch


BETWEEN = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_threshold_lower": 0.5}


@pytest.mark.parametrize(
    ("given", "factors"),
    [
        (BETWEEN, [2, 0.5, 2, 1, 0.5]),
        (BETWEEN | {"rollout_is_batch_normalize": True}, [2 / 1.2, 0.5 / 1.2, 2 / 1.2, 1 / 1.2, 0.5 / 1.2]),
        ({"rollout_is": "sequence", "rollout_is_threshold": 3.0}, [3, 3, 3, 0.25, 0.25]),
        ({"rollout_is": "geometric"}, [4 ** (1 / 3)] * 3 + [0.5] * 2),
        ({"rollout_rs": "token", "rollout_rs_threshold": "0.3_3.0"}, [0, 1, 1, 1, 0]),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": "0.3_5.0"}, [1, 1, 1, 0, 0]),
        ({"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.9}, [0, 0, 0, 0, 0]),
        ({"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.965}, [1, 1, 1, 1, 1]),
        ({"rollout_token_veto_threshold": 0.3}, [1, 1, 1, 0, 0]),
        ({"off_policy_sequence_mask_delta": 0.1}, [1, 1, 1, 1, 1]),
        (BETWEEN | {"rollout_rs": "token", "rollout_token_veto_threshold": 0.3}, [0, 0.5, 2, 0, 0]),
    ],
)
def test_the_factor_of_each_token_in_numbers(given, factors):
    log_probs, batch = by_hand()
    found = RolloutCorrection(read_rollout_correction(given)).factors(log_probs, batch)
    expected = torch.ones_like(found)
    expected[[0, 0, 1, 2, 2], [1, 2, 0, 0, 1]] = torch.tensor(factors, dtype=torch.float64)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            BETWEEN,
            {
                "rollout_is_mean": 1.2, "rollout_is_min": 0.5, "rollout_is_max": 2.0, "rollout_is_cut_fraction": 0.4,
                "rollout_is_eff_sample_size": 36 / 47.5,
            },
        ),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": "0.2_3.0"},
            {"rollout_rs_masked_fraction": 0.2, "rollout_rs_seq_masked_fraction": 0.5},
        ),
        ({"rollout_token_veto_threshold": 0.3}, {"rollout_is_veto_fraction": 0.5}),
        ({"rollout_token_veto_threshold": 0.6}, {"rollout_is_veto_fraction": 1.0}),
        ({"off_policy_sequence_mask_delta": 0.1}, {}),
        ({}, {}),
    ],
)  # fmt: skip
def test_the_metrics_in_numbers(given, expected):
    log_probs, batch = by_hand()
    correction = RolloutCorrection(read_rollout_correction(given))
    found = correction.metrics(log_probs, batch)
    assert found == pytest.approx({f"rollout_corr/{name}": value for name, value in expected.items()})
    assert correction.metrics(torch.full_like(log_probs, NAN), batch) == {}, "nothing to compare"


@pytest.mark.parametrize(
    ("given", "needs", "masks"),
    [
        ({"rollout_is": "token"}, False, False),
        ({"rollout_is": "sequence"}, True, False),
        ({"off_policy_sequence_mask_delta": 0.1}, False, True),
    ],
)
def test_what_a_correction_asks_for(given, needs, masks):
    correction = RolloutCorrection(read_rollout_correction(given))
    assert (correction.needs_batch, correction.masks_sequences) == (needs, masks)


@pytest.mark.parametrize("decided", [False, True])
def test_losses_are_multiplied_by_their_factors(decided):
    """Those that were decided over the batch, where there are some."""
    log_probs, batch = by_hand()
    correction = RolloutCorrection(read_rollout_correction(BETWEEN))
    factors = correction.factors(log_probs, batch)
    if decided:
        batch[col.CORRECTION] = factors = torch.full_like(factors, 0.75)
    loss, means = correction.applied(torch.full_like(factors, 3.0), log_probs * NAN, log_probs, batch, None)
    assert torch.equal(loss, 3 * factors) and means == {}


@pytest.mark.parametrize(
    ("delta", "drift", "left_out"),
    [
        (0.69, None, [(2, 0)]),  # the mean of log 1 and log 1/4 is -0.693
        (0.7, None, []),
        (0.69, [-1.0, NAN, NAN, -1.0, NAN], [(0, 1), (2, 0)]),
        (0.69, [NAN, -1.0, 0.0, NAN, NAN], [(1, 0)]),
    ],
)
def test_a_drifted_sequence_loses_its_tokens_of_negative_advantage(delta, drift, left_out):
    """By the current policy. Eight of the tokens in the loss were sampled."""
    log_probs, batch = by_hand()
    log_probs = torch.where(log_probs.isnan(), 0.5, log_probs)
    given = BETWEEN | {"off_policy_sequence_mask_delta": delta}
    correction = RolloutCorrection(read_rollout_correction(given))
    factors = correction.factors(log_probs, batch)
    drift_B = None if drift is None else torch.tensor(drift)
    loss, means = correction.applied(torch.full_like(factors, 3.0), log_probs, log_probs, batch, drift_B)
    for row, place in left_out:
        factors[row, place] = 0.0
    assert torch.equal(loss, 3 * factors)
    (share,) = means.values()
    assert [*means] == ["rollout_corr/off_policy_sequence_masked_fraction"]
    assert share.item() == pytest.approx(len(left_out) / 8)
