"""Counts are exact."""

from __future__ import annotations

import numpy as np
import pytest

from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryGroup, TrajectoryRecord
from verl_mt.diagnostics.step_metrics import (
    first_and_last,
    interval_95,
    pass_at_k,
    rollout_metrics,
    tool_metrics,
    total_failure,
    validation_metrics,
)


def trajectory(reward: float | None, reason: StopReason = StopReason.FINISHED, **counters: float) -> Trajectory:
    record = TrajectoryRecord()
    record.append_given([1, 2, 3], kind="prompt", turn=0)
    record.append_sampled([4, 5], [-0.1, -0.2], [0, 0], turn=1)
    made = Trajectory("t", "p", "g", "t", stop_reason=reason, reward=reward, num_turns=1, records=[record])
    made.reward_parts = {} if reward is None else {"score": reward}
    made.counters = {k.replace("__", "/"): v for k, v in counters.items()}
    return made


def group(*trajectories: Trajectory, source: str = "a") -> TrajectoryGroup:
    return TrajectoryGroup("g", "p", list(trajectories), source)


def test_rewards_are_averaged_over_scored_trajectories_and_failures_are_counted():
    metrics = rollout_metrics([group(trajectory(1.0), trajectory(0.0), trajectory(None, StopReason.ERROR))])
    assert metrics["reward/mean"] == 0.5
    assert metrics["rollout/failed"] == 1
    assert metrics["stop/error"] == 1
    assert metrics["stop/finished"] == 2
    assert metrics["response/tokens_mean"] == 2


def test_tool_latency_is_per_call_and_configured_tools_always_appear():
    metrics = tool_metrics(
        [trajectory(1.0, tools__calc__calls=2, tools__calc__latency_s=1.0), trajectory(1.0, tools__calc__calls=2)],
        ["calc", "search"],
    )
    assert metrics["tools/calc/calls"] == 4
    assert metrics["tools/calc/latency_s"] == 0.25
    assert metrics["tools/search/calls"] == 0
    assert metrics["tools/search/errors"] == 0


def test_what_a_tool_measured_itself_is_a_mean_per_call_and_events_are_counts():
    own = {"tools__search__hits": 6.0, "tools__search__media_dropped": 3.0}
    metrics = tool_metrics(
        [trajectory(1.0, tools__search__calls=3, **own), trajectory(1.0, tools__search__calls=1)], ()
    )
    assert metrics == {"tools/search/calls": 4, "tools/search/hits": 1.5, "tools/search/media_dropped": 3}


def test_groups_whose_rewards_are_all_equal_are_counted():
    metrics = rollout_metrics([group(trajectory(1.0), trajectory(1.0)), group(trajectory(1.0), trajectory(0.0))])
    assert metrics["group/zero_variance"] == 0.5


def test_validation_counts_a_failed_trajectory_as_wrong():
    metrics = validation_metrics([group(trajectory(1.0), trajectory(None, StopReason.ERROR))], "")
    assert metrics["val/accuracy"] == 0.5
    assert metrics["val/failed"] == 1


def test_validation_is_also_reported_by_data_source():
    metrics = validation_metrics([group(trajectory(1.0)), group(trajectory(0.0), source="b/c")], "_greedy")
    assert metrics["val/a/accuracy_greedy"] == 1.0
    assert metrics["val/b/c/accuracy_greedy"] == 0.0


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"), [(4, 2, 2, 0.8333333), (4, 0, 2, 0.0), (4, 4, 1, 1.0), (5, 1, 5, 1.0)]
)
def test_pass_at_k_is_the_unbiased_estimate(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_a_batch_of_which_nothing_survives_is_told_with_its_commonest_error():
    lost, gone = trajectory(None, StopReason.ERROR), trajectory(None, StopReason.ENGINE)
    lost.error = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nKeyError: "x"\nand more\n'
    assert total_failure([group(lost, gone), group(gone)]) == (
        "not one of 3 trajectories survived (1 failed, 2 aborted); 2 of them, first t: no error was recorded"
    )
    assert str(total_failure([group(lost, lost, gone)])).endswith('2 of them, first t: KeyError: "x"\nand more')
    assert total_failure([group(lost, trajectory(0.0))]) is None
    assert total_failure([]) is None


def parts(reward: float, reason: StopReason = StopReason.FINISHED, **values: float) -> Trajectory:
    made = trajectory(reward, reason)
    made.reward_parts = {"score": reward, **values}
    return made


def test_every_number_of_the_reward_is_a_mean_over_the_trajectories_that_have_it():
    metrics = rollout_metrics([group(parts(1.0, acc=1.0, bonus=4.0), parts(0.0, acc=0.0), trajectory(None))])
    assert (metrics["reward/score"], metrics["reward/acc"]) == (0.5, 0.5)
    assert (metrics["reward/bonus"], metrics["reward/bonus_share"]) == (4.0, 0.5)
    assert "reward/acc_share" not in metrics


def test_a_trajectory_of_several_records_counts_once_in_the_means_of_its_reward():
    split = parts(1.0, acc=1.0)
    split.records = [split.records[0]] * 3
    assert rollout_metrics([group(split, parts(0.0, acc=0.0))])["reward/acc"] == 0.5


def test_a_key_of_the_reward_function_does_not_overwrite_the_rewards_own_statistics():
    metrics = rollout_metrics([group(parts(1.0, mean=7.0, std=8.0), parts(0.0, mean=7.0, std=8.0))])
    assert (metrics["reward/mean"], metrics["reward/part_mean"]) == (0.5, 7.0)
    assert (metrics["reward/std"], metrics["reward/part_std"]) == (0.5, 8.0)


def test_what_is_paid_for_the_form_is_also_told_apart_from_the_rest():
    metrics = rollout_metrics([group(parts(1.0, format=0.2), parts(0.2, format=0.2), parts(0.0))])
    assert metrics["reward/mean"] == pytest.approx(0.4)
    assert metrics["reward/without_format"] == pytest.approx(0.8 / 3)
    assert "reward/without_format" not in rollout_metrics([group(parts(1.0))])


def test_tool_use_is_told_per_trajectory_and_per_call():
    calls = {"tools__calc__calls": 3, "tools__calc__errors": 1, "tools__calc__model_errors": 1}
    used, idle = trajectory(1.0, **calls), trajectory(0.0)
    wrong = trajectory(0.0, tools__unknown__calls=1, tools__unknown__model_errors=1)
    metrics = rollout_metrics([group(used, idle, wrong, idle)], ["calc"])
    assert metrics["tools/use_rate"] == 0.25, "of the call that the model got wrong, no tool ran"
    assert metrics["tools/call_frequency"] == 1.0
    assert metrics["tools/failure_frequency"] == pytest.approx(3 / 4)
    assert rollout_metrics([group(idle)], ["calc"])["tools/use_rate"] == 0.0
    assert "tools/use_rate" not in rollout_metrics([group(idle)])


def test_trajectories_that_a_limit_cut_are_told_as_a_share():
    cut = [trajectory(0.0, StopReason.RESPONSE_LENGTH), trajectory(0.0, StopReason.CONTEXT_FULL)]
    assert rollout_metrics([group(*cut, trajectory(1.0), trajectory(1.0))])["response/clip_ratio"] == 0.5


def test_groups_that_solve_all_and_none_are_told_apart():
    groups = [group(trajectory(1.0), trajectory(1.0)), group(trajectory(0.0)), group(trajectory(0.0), trajectory(1.0))]
    metrics = rollout_metrics([*groups, group(trajectory(0.5), trajectory(0.5))])
    assert (metrics["group/zero_variance"], metrics["group/solve_all"], metrics["group/solve_none"]) == (
        0.75,
        0.25,
        0.5,
    )


def test_the_entropy_of_the_rollouts_does_not_depend_on_which_groups_have_a_signal():
    sure = trajectory(1.0)
    sure.records[0].append_given([9], kind="observation", turn=1)
    sure.records[0].append_sampled([6], [-1.5], [0], turn=2)
    sure.records[0].clear_mask([3])
    for rewards in ((1.0, 0.0), (1.0, 1.0), (None, None)):
        sure.reward, other = rewards[0], trajectory(rewards[1])
        # -log p of all five sampled tokens, one of which is not trained; observations and prompts are none.
        assert rollout_metrics([group(sure), group(other)])["rollout/entropy"] == pytest.approx(2.1 / 5)


def test_an_engine_without_log_probs_leaves_the_entropy_out():
    silent = trajectory(1.0)
    silent.records = [TrajectoryRecord()]
    silent.records[0].append_sampled([4, 5], None, [0, 0], turn=1)
    assert "rollout/entropy" not in rollout_metrics([group(silent)])
    assert rollout_metrics([group(silent, trajectory(0.0))])["rollout/entropy"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    "values, expected",
    [
        ([3.0], (3, 3, 1)),
        ([1.0, 2.0, 9.0], (1, 9, 1)),
        (list(range(20)), (2, 17, 5)),
        (list(range(60)), (4.5, 54.5, 10)),
    ],
)
def test_a_run_is_summed_up_by_windows_that_do_not_overlap(values, expected):
    assert first_and_last(values) == expected


@pytest.mark.parametrize(("right", "of"), [(8, 10), (0, 20), (20, 20), (131, 1319)])
def test_the_interval_of_single_answers_is_wilsons(right, of):
    """Its ends are the chances from which the share of right answers is 1.96 standard deviations away."""
    share = right / of
    for end in interval_95([1.0] * right + [0.0] * (of - right)):
        assert end == share in (0, 1) or abs(share - end) == pytest.approx(1.959964 * (end * (1 - end) / of) ** 0.5)


@pytest.mark.parametrize("values", [[], [0.5, 1.2], [-0.1]])
def test_scores_that_are_no_shares_have_no_interval(values):
    assert interval_95(values) is None


@pytest.mark.slow
def test_eight_samples_of_a_prompt_tell_less_than_eight_prompts():
    """Prompts that differ much: the interval holds the truth in about 95 of 100 repetitions; one that takes all samples
    for independent does so in far fewer."""
    rng, truth, held, naive = np.random.default_rng(0), 0.2, 0, 0
    for _ in range(1000):
        chances = rng.beta(0.2, 0.8, size=80)
        values = rng.binomial(8, chances) / 8
        low, high = interval_95(values.tolist())
        held += low <= truth <= high
        low, high = interval_95([1.0] * round(8 * values.sum()) + [0.0] * (640 - round(8 * values.sum())))
        naive += low <= truth <= high
    assert 930 <= held <= 975 and naive < 750
