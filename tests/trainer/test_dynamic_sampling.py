"""DAPO's parts: which groups are trained on, what overlong responses cost, and whole runs with them."""

from __future__ import annotations

import logging

import pytest
import torch
from command_lab import NO_VALIDATION, fit, metrics_of, rows_of, small_trainer, varied

from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryGroup, TrajectoryRecord
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.trainer.dynamic_sampling import Selection, response_length, trained_ids, why_left_out

FINISHED, CUT, FAILED = StopReason.FINISHED, StopReason.RESPONSE_LENGTH, StopReason.ERROR


def record(prompt: int, sampled: int, observed: int = 0) -> TrajectoryRecord:
    made = TrajectoryRecord()
    made.append_given([5] * prompt, kind="prompt", turn=0)
    made.append_given([6] * observed, kind="observation", turn=1)
    made.append_sampled([7] * sampled, [-1.0] * sampled, [0] * sampled, turn=1)
    return made


def group(name: str, rewards: list[float], *, reasons=None, lengths=None, parts=None, roles=None) -> TrajectoryGroup:
    reasons = reasons or [FINISHED] * len(rewards)
    members = [
        Trajectory(
            f"{name}.{k}",
            name,
            f"{name}{roles[k] if roles else ''}",
            f"{name}.{k}",
            records=[record(3, lengths[k] if lengths else 2)],
            reward=None if reasons[k] is FAILED else reward,
            reward_parts=dict(parts[k]) if parts else {"score": reward},
            stop_reason=reasons[k],
        )
        for k, reward in enumerate(rewards)
    ]
    return TrajectoryGroup(name, name, members)


MIXED, FLAT = [1.0, 0.0], [1.0, 1.0]


class Source:
    """Further groups, mixed or flat as told; remembers what it was asked for."""

    def __init__(self, kinds: str):
        self.kinds = iter(kinds)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, count: int, number: int) -> list[TrajectoryGroup]:
        self.asked.append((count, number))
        return [group(f"{number}.{k}", MIXED if next(self.kinds) == "m" else FLAT) for k in range(count)]


def first(kinds: str) -> list[TrajectoryGroup]:
    return [group(f"1.{k}", MIXED if kind == "m" else FLAT) for k, kind in enumerate(kinds)]


def kept(groups: list[TrajectoryGroup]) -> list[str]:
    return [g.group_id for g in groups if not g.filtered]


def test_groups_without_signal_are_replaced_until_the_batch_is_full():
    source = Source("fmmffm")
    selection = Selection(metric="seq_final_reward")
    groups = selection.fill(first("mfmf"), source, 4)
    assert source.asked == [(4, 2)], "half of the groups had a signal: four prompts for the two that are missing"
    assert kept(groups) == ["1.0", "1.2", "2.1", "2.2"]
    assert selection.metrics() == {"data/filtered_groups": 4, "data/surplus_groups": 0, "rollout/gen_batches": 2}
    assert all(t.counters == {"filtered": 1.0} for g in groups if g.filtered for t in g.trajectories)


def test_a_further_rollout_is_as_large_as_the_rate_says():
    source = Source("fm")
    groups = Selection(metric="score").fill(first("mmmfmm"), source, 6)
    assert source.asked == [(2, 2)], "one is missing at a rate of 5 in 6"
    assert len(kept(groups)) == 6


def test_what_is_more_than_the_batch_is_left_out_and_counted():
    selection = Selection(metric="score")
    groups = selection.fill(first("mf"), Source("mm"), 2)
    assert kept(groups) == ["1.0", "2.0"]
    assert selection.metrics() == {"data/filtered_groups": 1, "data/surplus_groups": 1, "rollout/gen_batches": 2}


def test_at_the_limit_the_step_goes_on_with_what_there_is_and_says_so_once(caplog):
    selection = Selection(metric="score", max_gen_batches=3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            source = Source("f" * 20)
            groups = selection.fill(first("mff"), source, 3)
            assert [number for _, number in source.asked] == [2, 3] and kept(groups) == ["1.0"]
    assert caplog.text.count("only 1 of 3 groups had different rewards after 3 rollouts") == 1


def test_without_a_limit_it_goes_on_until_the_batch_is_full():
    source = Source("f" * 50 + "mm")
    groups = Selection(metric="score", max_gen_batches=0).fill(first("ff"), source, 2)
    assert len(kept(groups)) == 2 and len(source.asked) == 26


def test_a_step_in_which_everything_fails_draws_nothing_more():
    groups = [group("1.0", [0.0, 0.0], reasons=[FAILED, FAILED])]
    assert Selection(metric="score").fill(groups, Source(""), 1) == groups


def test_nothing_is_filtered_unless_asked_for():
    groups = first("ff")
    selection = Selection()
    assert selection.fill(groups, Source(""), 2) is groups and kept(groups) == ["1.0", "1.1"]
    assert selection.metrics() == {}


@pytest.mark.parametrize(
    ("made", "metric", "stays"),
    [
        (group("a", [0.3, 0.3, 0.1 + 0.2]), "seq_final_reward", True),  # differ in the last bit: the estimator sees it
        (group("a", [1.0, 0.0], reasons=[FINISHED, FAILED]), "seq_final_reward", False),
        (group("a", [1.0]), "seq_final_reward", False),
        (group("a", [1.0, 0.5], parts=[{"score": 1.0, "acc": 1.0}] * 2), "acc", False),
        (group("a", [1.0, 0.5], parts=[{"score": 1.0}, {"score": 0.0}]), "acc", True),
        (group("a", [1.0, 1.0, 0.0, 0.0], roles="xxyy"), "seq_reward", False),
        (group("a", [1.0, 1.0, 0.0, 1.0], roles="xxyy"), "seq_reward", True),
    ],
)
def test_a_group_has_a_signal_where_its_trained_members_differ_in_the_metric(made, metric, stays):
    assert kept(Selection(metric=metric, max_gen_batches=1).fill([made], Source(""), 1)) == (["a"] if stays else [])


def test_where_rewards_are_compared_one_by_one_a_group_with_equal_sums_has_a_signal():
    parts = [{"right": 1.0, "format": 0.0}, {"right": 0.0, "format": 1.0}]
    apart, alike = group("a", [1.0, 1.0], parts=parts), group("b", [1.0, 1.0], parts=[parts[0], parts[0]])
    by_sum, one_by_one = Selection("seq_final_reward"), Selection("seq_final_reward", several=("right", "format"))
    assert [by_sum._has_signal(g) for g in (apart, alike)] == [False, False]
    assert [one_by_one._has_signal(g) for g in (apart, alike)] == [True, False]


def test_a_metric_that_the_reward_does_not_return_is_an_error_that_lists_what_it_returns():
    with pytest.raises(ConfigError, match=r"'accuracy', but the reward of 1\.0\.0 has only score: name one of"):
        Selection(metric="accuracy").fill(first("m"), Source(""), 1)


def test_the_penalty_grows_over_the_buffer_and_is_a_part_of_the_reward():
    lengths = [60, 80, 85, 90, 100]
    made = group("a", [1.0] * 5, lengths=lengths)
    made.trajectories.append(group("b", [0.0], reasons=[FAILED]).trajectories[0])
    Selection(overlong_buffer=20, overlong_factor=2.0, max_length=100).shape([made])
    expected = [0.0, 0.0, -0.5, -1.0, -2.0]
    assert [t.reward_parts["overlong"] for t in made.trajectories[:5]] == pytest.approx(expected)
    assert [t.reward for t in made.trajectories[:5]] == pytest.approx([1.0 + p for p in expected])
    assert made.trajectories[5].reward is None, "what failed has no reward to lower"


def test_a_sample_of_a_generate_function_has_the_reward_that_is_trained():
    made = group("a", [1.0, 1.0], lengths=[90, 90])
    for trajectory, own in zip(made.trajectories, (1.0, {"score": 1.0, "acc": 1.0})):
        trajectory.sample = Sample(reward=own)
    Selection(overlong_buffer=20, max_length=100).shape([made])
    assert [t.sample.reward for t in made.trajectories] == [0.5, {"score": 0.5, "acc": 1.0}]


def test_a_length_counts_observations_and_every_record_once():
    trajectory = Trajectory("t", "p", "p", "t", records=[record(3, 4, observed=2), record(9, 5)])
    assert response_length(trajectory) == 11
    assert response_length(Trajectory("t", "p", "p", "t")) == 0


def test_cut_trajectories_leave_the_loss_and_not_their_groups_statistics():
    made = group("a", [1.0, 0.0, 0.0], reasons=[FINISHED, CUT, FINISHED])
    batch = col.build_batch(made.trajectories, pad_token_id=0)
    batch[col.ADVANTAGES] = col.expand_to_tokens(batch, torch.tensor([2.0, -1.0, -1.0]))
    assert Selection().mask_overlong(batch, [made]) == {} and batch[col.LOSS_MASK].any(1).all()
    metrics = Selection(filter_overlong=True).mask_overlong(batch, [made])
    assert metrics == {"data/filtered_overlong": 1}
    assert batch[col.LOSS_MASK].any(1).tolist() == [True, False, True]
    assert batch[col.ADVANTAGES].sum(1).tolist() == [4.0, 0.0, -2.0]


def every_other(data_source, solution_str, ground_truth, extra_info) -> float:
    """Half of the groups have a signal."""
    number = int(extra_info["trajectory_id"].split(".")[-2])
    return varied(data_source, solution_str, ground_truth, extra_info) if number % 2 else 0.0


FILTER = (
    "algorithm.filter_groups.enable=True",
    f"reward.path={__name__}:every_other",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.response_length=16",
    "actor_rollout_ref.rollout.temperature=3",
    "trainer.total_training_steps=2",
)


@pytest.mark.slow
def test_a_run_with_dynamic_sampling_trains_on_full_batches_and_writes_what_it_left_out(tmp_path):
    run = tmp_path / "run"
    lines = fit(run, *NO_VALIDATION, *FILTER, "algorithm.filter_groups.metric=score")
    drawn = 0
    for step, line in enumerate(lines, start=1):
        rows = rows_of(run, step)
        left_out = {r["prompt_id"] for r in rows if "filtered" in r["counters"]}
        trained = {r["prompt_id"] for r in rows} - left_out
        assert len(trained) == 4 or line["rollout/gen_batches"] == 10
        assert len(left_out) == line["data/filtered_groups"] + line["data/surplus_groups"]
        for prompt in trained:
            assert len({r["reward"] for r in rows if r["prompt_id"] == prompt}) > 1
        drawn += len(trained | left_out)
    assert any(line["data/filtered_groups"] for line in lines), "else the test shows nothing"
    assert drawn == small_trainer_position(run)


def small_trainer_position(run) -> int:
    """Rows that the run's last checkpoint counts as consumed."""
    trainer = small_trainer(run.parent / "again", *NO_VALIDATION, *FILTER, "trainer.resume_mode=resume_path",
                            f"trainer.resume_from_path={run / 'checkpoints' / 'step_000002'}")  # fmt: skip
    try:
        return trainer.sampler.state_dict()["position"]
    finally:
        trainer.close()


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_further_prompts(tmp_path):
    options = (*NO_VALIDATION, *FILTER, "trainer.deterministic=True", "trainer.save_freq=1")
    whole = fit(tmp_path / "whole", *options)
    saved = tmp_path / "whole" / "checkpoints" / "step_000001"
    resumed = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    fit(tmp_path / "again", *options, *resumed)
    again = metrics_of(tmp_path / "again")
    assert {k: v for k, v in again[-1].items() if not k.startswith("time/")} == {
        k: v for k, v in whole[-1].items() if not k.startswith("time/")
    }


@pytest.mark.slow
def test_overlong_responses_are_penalised_and_cut_ones_leave_the_loss(tmp_path):
    short = ("actor_rollout_ref.rollout.response_length=12", "trainer.total_training_steps=2")
    buffer = ("reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=6")
    run = tmp_path / "run"
    lines = fit(run, *NO_VALIDATION, *short, *buffer, "algorithm.filter_overlong=True")
    rows = rows_of(run, 1)
    for row in rows:
        length = sum(len(r["token_ids"]) - r["turns"][0]["end"] for r in row["records"])
        assert row["reward_parts"]["overlong"] == pytest.approx(-max(0, length - 6) / 6)
        assert row["reward"] == pytest.approx(row["reward_parts"]["score"] + row["reward_parts"]["overlong"])
    cut = [r for r in rows if r["status"] == "truncated"]
    assert 0 < len(cut) == lines[0]["data/filtered_overlong"]
    assert lines[0]["reward/overlong"] == pytest.approx(sum(r["reward_parts"]["overlong"] for r in rows) / len(rows))


@pytest.mark.slow
def test_a_step_in_which_everything_was_cut_moves_nothing(tmp_path):
    tiny = ("actor_rollout_ref.rollout.response_length=1", "trainer.total_training_steps=1")
    (line,) = fit(tmp_path / "run", *NO_VALIDATION, *tiny, "algorithm.filter_overlong=True")
    assert line["data/filtered_overlong"] == line["rollout/trajectories"]
    assert line["actor/num_updates"] == 0


def test_one_reward_that_differs_is_a_signal_beside_others_that_do_not():
    parts = [{"right": 1.0, "format": 1.0}, {"right": 0.0, "format": 1.0}]
    assert Selection("seq_final_reward", several=("right", "format"))._has_signal(group("a", [2.0, 1.0], parts=parts))


def test_each_prompt_of_which_nothing_was_trained_has_its_reason():
    trained, filtered, overlong = group("a", MIXED), group("b", FLAT), group("c", MIXED)
    lost = group("d", [0.0, 0.0], reasons=[CUT, FAILED])
    for trajectory in lost.trajectories:
        trajectory.records = []
    filtered.leave_out()
    groups = [trained, filtered, overlong, lost]
    batch = col.build_batch(trained.trajectories[:1], pad_token_id=0)
    assert why_left_out(groups, batch) == {
        "a": None,
        "b": "algorithm.filter_groups",
        "c": "algorithm.filter_overlong",
        "d": "nothing to train: error, response_length",
    }
    assert why_left_out(groups[:1], None) == {"a": "algorithm.filter_overlong"}
    half = group("e", MIXED, reasons=[FINISHED, FAILED])
    assert why_left_out([half], None) == {"e": "algorithm.filter_overlong"}
    half.trajectories[0].stop_reason = None
    assert why_left_out([half], None) == {"e": "nothing to train: error"}


def test_further_rollouts_are_at_most_a_batch_and_go_on_from_what_all_had():
    """None of 3, then 1 of 6, 2 of 9: the next rollout has ceil(1 / (2 / 9)) prompts, more than the batch of 3."""
    source = Source("ffm" + "fmf" + "mff")
    selection = Selection(metric="score", max_gen_batches=9)
    groups = selection.fill(first("fff"), source, 3)
    assert source.asked == [(3, 2), (3, 3), (3, 4)]
    assert kept(groups) == ["2.2", "3.1", "4.0"] and len(groups) == 12
    assert selection.metrics() == {"data/filtered_groups": 9, "data/surplus_groups": 0, "rollout/gen_batches": 4}


@pytest.mark.parametrize(
    ("limit", "asked"), [(1, []), (2, [1]), (3, [1, 2]), (4, [1, 2, 2]), (0, [1, 2, 2]), (-1, [1, 2, 2])]
)
def test_the_limit_counts_the_first_rollout(limit, asked):
    source = Source("f" + "ff" + "fm")
    Selection(metric="score", max_gen_batches=limit).fill(first("m"), source, 2)
    assert [size for size, _ in source.asked] == asked


def test_a_full_batch_draws_nothing_and_its_surplus_is_left_out():
    source = Source("")
    selection = Selection(metric="score")
    groups = selection.fill(first("mmfm"), source, 2)
    assert not source.asked and kept(groups) == ["1.0", "1.1"]
    assert selection.metrics() == {"data/filtered_groups": 1, "data/surplus_groups": 1, "rollout/gen_batches": 1}
    counted = selection.metrics()
    counted["x"] = 1.0
    assert "x" not in selection.metrics()
    selection.metric = None
    selection.fill(first("m"), source, 2)
    assert selection.metrics() == {}


def test_a_warning_says_how_many_had_a_signal(caplog):
    with caplog.at_level(logging.WARNING):
        Selection(metric="score").fill(first("mm"), Source(""), 2)
        assert not caplog.text
        Selection(metric="score", max_gen_batches=1).fill(first("mff"), Source(""), 2)
    assert "only 1 of 2 groups had different rewards after 1 rollouts (max_num_gen_batches)" in caplog.text


def test_members_that_are_not_trained_or_have_no_reward_give_no_signal():
    parts = [{"score": 1.0}, {"score": 0.0}, {"score": 1.0}]
    made = group("a", [1.0, 0.0, 1.0], parts=parts)
    selection = Selection(metric="score")
    assert selection._has_signal(made)
    made.trajectories[1].records[0].clear_mask([3, 4])
    assert not selection._has_signal(made)
    made = group("a", [1.0, 0.0, 1.0], parts=parts)
    made.trajectories[1].reward = None
    assert not selection._has_signal(made)
    one_by_one = Selection(metric="score", several=("right",))
    assert one_by_one._has_signal(group("a", [1.0, 0.0], parts=parts[:2])), "of another number than the advantages' own"


@pytest.mark.parametrize(
    ("metric", "parts", "value"),
    [("seq_reward", {"acc": 3.0}, 0.5), ("seq_final_reward", {}, 0.5), ("acc", {"acc": 3.0, "score": 2.0}, 3.0),
     ("acc", {"score": 2.0}, 2.0), ("score", {"score": 2.0}, 2.0), ("x", {"x": 4.0, "score": 2.0}, 4.0)],
)  # fmt: skip
def test_a_metric_names_a_number_of_the_reward(metric, parts, value):
    (trajectory,) = group("a", [0.5], parts=[parts]).trajectories
    trajectory.reward = 0.5
    assert Selection(metric=metric)._value(trajectory, metric) == value


@pytest.mark.parametrize(
    ("metric", "parts", "has"),
    [("acc", {"other": 1.0, "b": 2.0}, "b, other"), ("x", {"score": 1.0}, "score"), ("acc", {}, "no parts")],
)
def test_a_number_that_is_not_there_is_told_with_those_that_are(metric, parts, has):
    (trajectory,) = group("a", [0.5], parts=[parts]).trajectories
    with pytest.raises(ConfigError, match=f"metric is '{metric}', but the reward of a.0 has only {has}: name one"):
        Selection(metric=metric)._value(trajectory, metric)


def test_without_a_buffer_nothing_is_shaped_and_parts_are_not_shared():
    made, shared = group("a", [1.0, 1.0], lengths=[100, 90]), {"score": 1.0}
    Selection(max_length=100).shape([made])
    assert [t.reward for t in made.trajectories] == [1.0, 1.0] and "overlong" not in made.trajectories[0].reward_parts
    for trajectory in made.trajectories:
        trajectory.reward_parts = shared
    Selection(overlong_buffer=20, overlong_factor=0.5, max_length=100).shape([made])
    assert [t.reward_parts for t in made.trajectories] == [
        {"score": 1.0, "overlong": -0.5}, {"score": 1.0, "overlong": -0.25},
    ]  # fmt: skip
    assert shared == {"score": 1.0} and [t.reward for t in made.trajectories] == [0.5, 0.75]


def test_only_cut_trajectories_of_the_batch_are_counted():
    made = group("a", [1.0, 0.0, 0.0], reasons=[FINISHED, CUT, CUT])
    made.trajectories[2].records = []
    other = group("b", [1.0, 0.0])
    batch = col.build_batch([*made.trajectories, *other.trajectories], pad_token_id=0)
    batch[col.ADVANTAGES] = torch.ones(batch[col.LOSS_MASK].shape)
    assert trained_ids(batch) == {"a.0", "a.1", "b.0", "b.1"}
    assert Selection(filter_overlong=True).mask_overlong(batch, [made, other]) == {"data/filtered_overlong": 1.0}
    assert trained_ids(batch) == {"a.0", "b.0", "b.1"}
    assert batch[col.ADVANTAGES].sum(1).tolist() == [5.0, 0.0, 5.0, 5.0]
    assert batch[col.LOSS_MASK][0].tolist() == [False] * 3 + [True] * 2
