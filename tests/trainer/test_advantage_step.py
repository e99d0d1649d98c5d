"""Between rewards and advantages: which token earned what, the KL penalty, estimators that need more than a reward."""

from __future__ import annotations

import math
from statistics import mean, stdev
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.algorithms.advantages import gdpo, grpo, reinforce_plus_plus
from verl_mt.config.schema import AlgorithmConfig
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.errors import DataError
from verl_mt.trainer.advantage_step import advantage_estimator


def record(turns: list[int], first_turn: int = 1) -> TrajectoryRecord:
    """Assistant turns of so many tokens, an observation of two behind each."""
    made = TrajectoryRecord()
    made.append_given([1, 2], kind="prompt", turn=0)
    for turn, length in enumerate(turns, first_turn):
        made.append_sampled([3] * length, [-1.0] * length, [0] * length, turn=turn)
        made.append_given([4, 4], kind="observation", turn=turn)
    return made


def trajectory(name: str, reward: float, records: list[TrajectoryRecord], group: str = "g", **kwargs) -> Trajectory:
    return Trajectory(
        name, group, group, name, records=records, reward=reward, stop_reason=StopReason.FINISHED, **kwargs
    )


def batch_of(*trajectories: Trajectory):
    batch = col.build_batch(trajectories, pad_token_id=0)
    assert batch is not None
    return batch


def on_tokens(batch, name: str, owner: str) -> list[float]:
    """A column on the trained tokens of a trajectory, its records one behind the other."""
    rows = [r for r, o in enumerate(batch[col.TRAJECTORY_ID]) if o == owner]
    return [v for r in rows for v in batch[name][r][batch[col.LOSS_MASK][r]].tolist()]


def with_values(values):
    """Workers whose critic says `values` and whose policy `log_probs`."""
    return SimpleNamespace(add_values=lambda batch: batch.set(col.VALUES, values))


def gae_step(**kwargs):
    return AlgorithmConfig(adv_estimator="gae", **kwargs)


@pytest.mark.parametrize(
    ("gamma", "lam", "returns", "advantages"),
    [
        (1.0, 1.0, [1, 1, 1], [0, 1, -1]),
        (0.9, 0.8, [0.668160, 0.828000, 1.0], [-1.149124, 0.672722, 0.476402]),
    ],
)
def test_pinned_gae_through_the_step_with_an_observation_in_between(gamma, lam, returns, advantages):
    """reference case: r=[0,0,0,0,1] v=[.5,.4,9,-9,.6] m=[1,1,0,0,1]"""
    batch = batch_of(trajectory("t", 1.0, [record([2, 1])]))
    values = torch.tensor([[0, 0, 0.5, 0.4, 9, -9, 0.6, 3, 3]])
    assert advantage_estimator(gae_step(gamma=gamma, lam=lam), with_values(values))(batch) == {}
    assert on_tokens(batch, col.RETURNS, "t") == pytest.approx(returns, abs=1e-6)
    assert on_tokens(batch, col.ADVANTAGES, "t") == pytest.approx(advantages, abs=2e-6)
    assert not batch[col.ADVANTAGES][~batch[col.LOSS_MASK]].any()


def test_the_reward_sits_on_the_last_sampled_token_of_the_last_record():
    batch = batch_of(trajectory("t", 2.0, [record([2]), record([1, 1], first_turn=2)]))
    advantage_estimator(gae_step(), with_values(torch.zeros(2, 8)))(batch)
    assert on_tokens(batch, col.TOKEN_REWARDS, "t") == [0, 0, 0, 2]
    assert on_tokens(batch, col.RETURNS, "t") == [2, 2, 2, 2], "what a first record leads to is its return too"


def test_a_reward_whose_token_is_not_trained_goes_to_the_one_before():
    one = record([2, 1])
    one.clear_mask([6])
    batch = batch_of(trajectory("t", 1.0, [one]))
    advantage_estimator(gae_step(), with_values(torch.zeros(1, 9)))(batch)
    assert on_tokens(batch, col.TOKEN_REWARDS, "t") == [0, 1]


def test_turn_rewards_sit_at_the_ends_of_their_turns_and_the_rest_at_the_end():
    batch = batch_of(
        trajectory("t", 1.75, [record([2, 3]), record([1], first_turn=3)], turn_rewards={1: 0.25, 2: 0.5, 3: -1.0}),
        trajectory("u", 1.0, [record([2])]),
    )
    advantage_estimator(gae_step(gamma=0.5), with_values(torch.zeros(3, 11)))(batch)
    assert on_tokens(batch, col.TOKEN_REWARDS, "t") == [0, 0.25, 0, 0, 0.5, 1.0]
    assert on_tokens(batch, col.TOKEN_REWARDS, "u") == [0, 1]
    assert on_tokens(batch, col.RETURNS, "t") == pytest.approx(discounted([0, 0.25, 0, 0, 0.5, 1.0], 0.5))


def discounted(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def test_a_turn_that_lost_its_tokens_leaves_its_reward_to_the_turn_before():
    one = record([2, 2])
    one.cut(5)
    batch = batch_of(trajectory("t", 1.0, [one], turn_rewards={2: 0.5}))
    advantage_estimator(gae_step(), with_values(torch.zeros(1, 5)))(batch)
    assert on_tokens(batch, col.TOKEN_REWARDS, "t") == [0, 1.0]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=2),
                     min_size=1, max_size=3),
    gamma=st.floats(0, 1), lam=st.floats(0, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_gae_is_the_textbooks_recursion_over_all_sampled_tokens_and_junk_elsewhere_changes_nothing(
    lengths, gamma, lam, seed
):
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of(
        *(trajectory(f"t{i}", float(i + 1), [record(turns) for turns in records]) for i, records in enumerate(lengths))
    )
    mask = batch[col.LOSS_MASK]
    values = torch.randn(mask.shape, generator=generator)
    junk = torch.where(mask, values, math.nan)
    advantage_estimator(gae_step(gamma=gamma, lam=lam), with_values(junk))(batch)
    batch[col.VALUES] = values
    raw: dict[str, list[float]] = {}
    for owner in dict.fromkeys(batch[col.TRAJECTORY_ID]):
        v = on_tokens(batch, col.VALUES, owner)
        rewards = [0.0] * (len(v) - 1) + [batch[col.REWARDS][batch[col.TRAJECTORY_ID].index(owner)].item()]
        deltas = [r + gamma * n - w for r, n, w in zip(rewards, [*v[1:], 0.0], v)]
        raw[owner] = [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(v))]
        assert on_tokens(batch, col.RETURNS, owner) == pytest.approx([a + w for a, w in zip(raw[owner], v)], abs=1e-5)
    flat = [a for own in raw.values() for a in own]
    if len(flat) > 1:
        spread = math.sqrt(stdev(flat) ** 2 + 1e-8)
        for owner, own in raw.items():
            expected = [(a - mean(flat)) / spread for a in own]
            assert on_tokens(batch, col.ADVANTAGES, owner) == pytest.approx(expected, abs=1e-3)


def test_equal_advantages_are_zero_and_not_rounding():
    batch = batch_of(*(trajectory(f"t{i}", 0.1, [record([3])]) for i in range(4)))
    advantage_estimator(AlgorithmConfig(adv_estimator="reinforce_plus_plus"))(batch)
    assert not batch[col.ADVANTAGES].any()


def test_reinforce_plus_plus_without_discount_is_whitening_over_tokens():
    batch = batch_of(*(trajectory(f"t{i}", r, [record([n]), record([1])]) for i, (r, n) in enumerate([(1, 2), (0, 1)])))
    advantage_estimator(AlgorithmConfig(adv_estimator="reinforce_plus_plus"))(batch)
    rewards, groups, tokens = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([3, 2])
    expected = reinforce_plus_plus(rewards, groups, tokens_N=tokens).tolist()
    assert on_tokens(batch, col.ADVANTAGES, "t0") == pytest.approx([expected[0]] * 3, abs=1e-5)
    assert on_tokens(batch, col.ADVANTAGES, "t1") == pytest.approx([expected[1]] * 2, abs=1e-5)


def test_reinforce_plus_plus_with_discount_sees_where_a_reward_was_earned():
    batch = batch_of(trajectory("t", 1.0, [record([2, 1])], turn_rewards={1: 0.5}))
    advantage_estimator(AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.5))(batch)
    assert on_tokens(batch, col.RETURNS, "t") == pytest.approx(discounted([0, 0.5, 0.5], 0.5))


LOG_PROBS = {"policy": [-1.0, -2.0, -0.5], "ref": [-1.5, -1.0, -0.5]}


def penalised(rewards=(1.0, 0.0), **kwargs):
    """Two trajectories, the first with a KL of [.5, -1, 0] (k1), the second with none."""
    batch = batch_of(*(trajectory(f"t{i}", r, [record([2, 1])]) for i, r in enumerate(rewards)))
    mask = batch[col.LOSS_MASK]
    policy, ref = torch.full(mask.shape, math.nan), torch.full(mask.shape, math.nan)
    for row in range(len(mask)):
        policy[row][mask[row]] = torch.tensor(LOG_PROBS["policy"])
        ref[row][mask[row]] = torch.tensor(LOG_PROBS["ref" if row == 0 else "policy"])
    batch[col.REF_LOG_PROBS] = ref
    workers = SimpleNamespace(
        add_values=lambda b: b.set(col.VALUES, torch.zeros(mask.shape)), compute_log_probs=lambda b: policy
    )
    step = advantage_estimator(AlgorithmConfig(use_kl_in_reward=True, **kwargs), workers)
    return batch, step, step(batch)


def test_the_kl_penalty_is_taken_from_each_token_where_tokens_have_rewards():
    batch, _, metrics = penalised(adv_estimator="gae", kl_ctrl={"kl_coef": 0.1})
    assert on_tokens(batch, col.TOKEN_REWARDS, "t0") == pytest.approx([-0.05, 0.1, 1.0])
    assert on_tokens(batch, col.TOKEN_REWARDS, "t1") == pytest.approx([0, 0, 0])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((-0.5 / 3 + 0) / 2)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1


def test_the_kl_penalty_is_summed_into_the_reward_of_a_trajectory():
    batch, _, _ = penalised(adv_estimator="grpo", kl_ctrl={"kl_coef": 0.1}, norm_adv_by_std_in_grpo=False)
    expected = grpo(torch.tensor([1.05, 0.0]), torch.zeros(2, dtype=torch.int64), norm_by_std=False).tolist()
    for owner, value in zip(("t0", "t1"), expected):
        assert on_tokens(batch, col.ADVANTAGES, owner) == pytest.approx([value] * 3)


def test_the_kl_penalty_knows_other_estimators():
    _, _, metrics = penalised(adv_estimator="grpo", kl_penalty="k3")
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.1065307 + 0.7182817) / 3 / 2)


def test_an_adaptive_weight_moves_after_each_batch_and_is_saved():
    kl_ctrl = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.1, "horizon": 100}
    batch, step, metrics = penalised(adv_estimator="grpo", kl_ctrl=kl_ctrl)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    moved = step(batch)["actor/reward_kl_penalty_coeff"]
    assert moved == pytest.approx(0.1 * (1 - 0.2 * 2 / 100))
    _, other, _ = penalised(adv_estimator="grpo", kl_ctrl=kl_ctrl)
    other.load_state_dict(step.state_dict())
    assert other(batch)["actor/reward_kl_penalty_coeff"] == step(batch)["actor/reward_kl_penalty_coeff"]


def test_remax_compares_with_the_greedy_answer_of_the_prompt():
    greedy = {"a": 0.25, "b": 1.0, "c": math.nan}
    batch = batch_of(
        *(
            trajectory(f"{group}{i}", reward, [record([1, 2])], group=group, greedy_reward=greedy[group])
            for group in greedy
            for i, reward in enumerate([1.0, 0.0])
        )
    )
    metrics = advantage_estimator(AlgorithmConfig(adv_estimator="remax"))(batch)
    found = {owner: set(on_tokens(batch, col.ADVANTAGES, owner)) for owner in batch[col.TRAJECTORY_ID]}
    assert found == {"a0": {0.75}, "a1": {-0.25}, "b0": {0.0}, "b1": {-1.0}, "c0": {0.0}, "c1": {0.0}}
    assert metrics == {"rollout/greedy_failed": 2, "reward/greedy_mean": 0.625}
    with pytest.raises(DataError, match="no greedy answer"):
        advantage_estimator(AlgorithmConfig(adv_estimator="remax"))(batch_of(trajectory("t", 1.0, [record([1])])))


def test_gdpo_takes_the_numbers_that_it_was_told():
    parts = [{"right": 1.0, "format": 0.0, "score": 9.0}, {"right": 0.0, "format": 0.5, "score": 9.0}, {"right": 0.0}]
    two = [trajectory(f"t{i}", 1.0, [record([2]), record([1])], reward_parts=p) for i, p in enumerate(parts[:2])]
    config = AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_weights={"right": 1.0, "format": 2.0})
    batch = batch_of(*two)
    advantage_estimator(config)(batch)
    rewards, weights = torch.tensor([[1.0, 0.0], [0.0, 0.5]]), torch.tensor([1.0, 2.0])
    expected = gdpo(rewards, torch.zeros(2, dtype=torch.int64), weights_K=weights).tolist()
    assert on_tokens(batch, col.ADVANTAGES, "t0") == pytest.approx([expected[0]] * 3)
    assert on_tokens(batch, col.ADVANTAGES, "t1") == pytest.approx([expected[1]] * 3)
    lacking = trajectory("t2", 1.0, [record([1])], reward_parts=parts[2])
    with pytest.raises(DataError, match=r"'t2': its reward has no format. It has right"):
        advantage_estimator(config)(batch_of(*two, lacking))
