"""The guard on streams of metrics: what it says, when, and when it is silent."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from guard_streams import HEALTHY
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.config.compose import compose
from verl_mt.errors import ConfigError
from verl_mt.extensions.inspection.config import GuardThresholds, read_thresholds
from verl_mt.extensions.inspection.diagnostics.collapse_guard import MAX_HISTORY, CollapseGuard, Verdict

GOOD = {
    "reward/mean": 0.5, "reward/std": 0.5, "tools/use_rate": 0.92, "turns/mean": 2.0, "rollout/entropy": 0.1,
    "group/zero_variance": 0.2, "group/solve_all": 0.1, "response/clip_ratio": 0.02, "rollout/sampler_kl": 1e-6,
}  # fmt: skip


def run(*steps: dict[str, float], guard: CollapseGuard | None = None) -> list[Verdict]:
    """Verdicts of steps 1, 2, ...; each step is GOOD with these numbers instead."""
    guard = guard or CollapseGuard()
    return [guard.observe(k, GOOD | numbers) for k, numbers in enumerate(steps, start=1)]


def after(bad: dict[str, float], good: int = 6, steps: int = 3) -> Verdict:
    """The verdict when so many bad steps have followed good ones."""
    return run(*[{}] * good, *[bad] * steps)[-1]


def names(verdict: Verdict) -> list[str]:
    return [sign.name for sign in verdict.signs]


# ---------------------------------------------------------------- words


def test_tool_use_that_falls_while_the_reward_rises_is_told_with_the_suspicion():
    verdicts = run(*[{}] * 4, *({"tools/use_rate": u, "reward/mean": r} for u, r in
                   ((0.9, 0.5), (0.6, 0.6), (0.3, 0.7), (0.03, 0.8), (0.0, 0.9))))  # fmt: skip
    assert [names(v) for v in verdicts] == [[]] * 6 + [["tool_use_drop"]] * 3
    assert verdicts[6].words == (
        "tool use fell from 0.92 to 0.60 within 3 steps, while the reward rose from 0.50 to 0.60: the reward may be "
        "paid without tools (a format reward that is hacked?); compare reward/without_format and val/accuracy, and "
        "read rollouts without a call"
    )
    assert verdicts[6].reward == "rose" and verdicts[6].last_good_step == 4
    assert "from 0.92 to 0.11 within 4 steps" in verdicts[8].words


def test_tool_use_that_falls_with_the_reward_is_told_differently():
    words = after({"tools/use_rate": 0.1, "reward/mean": 0.3}).words
    assert "and the reward fell from 0.50 to 0.30: the model loses its calls" in words
    assert "while the reward stayed at 0.50: the reward may be paid" in after({"tools/use_rate": 0.1}).words


def test_several_signs_are_one_sentence_with_the_cause_of_their_combination():
    verdict = after({"rollout/entropy": 0.5, "response/clip_ratio": 0.9, "reward/mean": 0.0, "reward/std": 0.0})
    assert names(verdict) == ["entropy_rise", "truncation_rise", "reward_drop"]
    assert verdict.words.startswith(
        "entropy rose from 0.10 to 0.50 within 3 steps, conversations cut by a length limit "
    )
    assert " and the reward fell from 0.50 to 0.00 within 3 steps: the policy falls apart" in verdict.words
    assert verdict.words.count("reward fell") == 1


def test_truncation_that_is_paid_for_is_suspected_of_it():
    assert "the reward may be paid for length" in after({"response/clip_ratio": 0.8, "reward/mean": 0.9}).words
    both = {"response/clip_ratio": 0.8, "reward/mean": 0.9, "tools/use_rate": 0.1}
    assert "the reward may be paid for length, and without tools" in after(both).words
    assert "turns no longer end" in after({"response/clip_ratio": 0.8}).words


# ---------------------------------------------------------------- thresholds


@pytest.mark.parametrize(
    "sign, bad, nearly",
    [
        ("tool_use_drop", {"tools/use_rate": 0.61}, {"tools/use_rate": 0.63}),
        ("turns_drop", {"turns/mean": 1.39}, {"turns/mean": 1.41}),
        ("turns_rise", {"turns/mean": 3.01}, {"turns/mean": 2.99}),
        ("entropy_rise", {"rollout/entropy": 0.21}, {"rollout/entropy": 0.19}),
        ("entropy_drop", {"rollout/entropy": 0.019}, {"rollout/entropy": 0.021}),
        ("truncation_rise", {"response/clip_ratio": 0.48}, {"response/clip_ratio": 0.46}),
        ("reward_drop", {"reward/mean": 0.14}, {"reward/mean": 0.16}),
        ("sampler_kl", {"rollout/sampler_kl": 0.021}, {"rollout/sampler_kl": 0.019}),
        ("flat_groups", {"group/zero_variance": 0.91, "reward/mean": 0.4},
         {"group/zero_variance": 0.89, "reward/mean": 0.4}),
    ],
)  # fmt: skip
def test_each_sign_has_its_threshold_and_can_be_switched_off(sign, bad, nearly):
    assert names(after(bad)) == [sign] and names(after(nearly)) == []
    assert after(bad).metrics == {"collapse/signs": 1.0, f"collapse/{sign}": 1.0}
    guard = CollapseGuard(read_thresholds({sign: None}))
    assert names(run(*[{}] * 6, *[bad] * 3, guard=guard)[-1]) == []


@pytest.mark.parametrize(
    "bad", [{"turns/mean": 1.0}, {"turns/mean": 4.0}, {"rollout/entropy": 0.01}], ids=lambda bad: next(iter(bad))
)
def test_with_a_reward_that_rises_these_are_learning(bad):
    assert names(after(bad)) and not names(after(bad | {"reward/mean": 0.6}))


def test_groups_that_are_flat_because_they_are_solved_or_as_good_as_ever_are_no_sign():
    flat = {"group/zero_variance": 0.95, "reward/mean": 0.4}
    assert names(after(flat)) == ["flat_groups"]
    assert names(after(flat | {"group/solve_all": 0.9})) == []
    assert names(after(flat | {"reward/mean": 0.5})) == []
    hard = run(*[flat] * 12)
    assert not any(v.signs for v in hard), "a task that starts out too hard has not collapsed"


def test_twice_next_to_no_entropy_is_no_sign():
    assert names(run(*[{"rollout/entropy": 0.01}] * 6, *[{"rollout/entropy": 0.05}] * 3)[-1]) == []


@given(scale=st.floats(0.01, 1000), shift=st.floats(-100, 100), drop=st.floats(0, 2))
def test_a_fall_of_the_reward_is_measured_in_its_own_spread(scale, shift, drop):
    def stream(size: float, offset: float) -> list[dict[str, float]]:
        before = {"reward/mean": offset, "reward/std": size}
        return [before] * 6 + [{"reward/mean": offset - drop * size, "reward/std": size}] * 3

    seen = "reward_drop" in names(run(*stream(scale, shift))[-1])
    assert seen == (drop >= 0.7) or math.isclose(drop, 0.7, rel_tol=1e-6)


def test_nothing_is_judged_before_there_are_two_windows():
    assert [bool(v.signs) for v in run(*[{}] * 3, *[{"tools/use_rate": 0.0}] * 3)] == [False] * 5 + [True]
    assert not any(v.signs for v in run(*[{"tools/use_rate": 0.0}] * 9))


def test_a_single_bad_step_is_no_collapse():
    assert not any(v.signs for v in run(*[{}] * 6, {"tools/use_rate": 0.2, "rollout/entropy": 0.2}, *[{}] * 6))


# ---------------------------------------------------------------- what is there to see


def test_a_run_that_learned_is_silent():
    guard = CollapseGuard()
    verdicts = [guard.observe(k, numbers) for k, numbers in enumerate(HEALTHY, start=1)]
    assert len(verdicts) == 60 and not any(v.signs or v.words for v in verdicts)
    assert verdicts[-1].metrics == {"collapse/signs": 0.0}


@settings(max_examples=10)
@given(st.integers(10, 50), st.sampled_from([("tools/use_rate", 0.2), ("rollout/entropy", 0.4), ("reward/mean", 0.1)]))
def test_a_collapse_is_seen_within_a_window_wherever_it_begins(begin, change):
    guard = CollapseGuard()
    stream = [n | ({change[0]: change[1]} if k >= begin else {}) for k, n in enumerate(HEALTHY, start=1)]
    seen = [k for k, n in enumerate(stream, start=1) if guard.observe(k, n).signs]
    assert seen and begin <= seen[0] < begin + 3


def test_what_is_trained_of_a_rollout_does_not_move_the_guard():
    # Fewer groups with a signal: the same policy's entropy over the trained tokens alone is five times as high.
    assert not any(v.signs for v in run(*[{"actor/entropy": 0.1}] * 6, *[{"actor/entropy": 0.5}] * 6))


def test_numbers_that_are_missing_or_not_finite_are_not_judged():
    bare = CollapseGuard()
    assert not any(bare.observe(k, {"reward/mean": 1.0 / k, "rollout/entropy": math.nan}).signs for k in range(1, 12))
    verdicts = run(*[{}] * 6, *[{"tools/use_rate": math.nan, "rollout/entropy": math.inf}] * 4)
    assert not any(v.signs for v in verdicts)


def test_a_sign_is_new_once_until_it_was_gone_for_a_window():
    bad = {"tools/use_rate": 0.1}
    verdicts = run(*[{}] * 6, *[bad] * 5, *[{}] * 8, *[bad] * 4)
    assert [k for k, v in enumerate(verdicts, start=1) if v.new] == [8, 21]
    assert [k for k, v in enumerate(verdicts, start=1) if v.signs] == [*range(8, 13), *range(21, 24)]


def test_a_sign_whose_number_is_not_measured_any_more_does_not_become_new_again():
    def without(name: str) -> dict[str, float]:
        return {k: v for k, v in GOOD.items() if k != name}

    guard = CollapseGuard()
    stream = [GOOD] * 6 + [GOOD | {"rollout/entropy": 0.5}] * 3 + [without("rollout/entropy")] * 9
    stream += [GOOD | {"rollout/entropy": 0.5}] * 3
    assert [k for k, n in enumerate(stream, start=1) if guard.observe(k, n).new] == [7]


# ---------------------------------------------------------------- state


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 60), st.integers(1, 60))
def test_a_guard_that_was_saved_and_loaded_judges_the_same(split, begin):
    stream = [n | ({"tools/use_rate": 0.1} if k >= begin else {}) for k, n in enumerate(HEALTHY, start=1)]
    whole, first, second = CollapseGuard(), CollapseGuard(), CollapseGuard()
    expected = [whole.observe(k, n) for k, n in enumerate(stream, start=1)]
    got = [first.observe(k, n) for k, n in enumerate(stream[:split], start=1)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [second.observe(k, n) for k, n in enumerate(stream[split:], start=split + 1)]
    assert got == expected


def test_after_a_rollback_what_came_later_is_forgotten():
    guard = CollapseGuard()
    bad = {"tools/use_rate": 0.1, "reward/mean": 0.9}
    assert run(*[{}] * 8, *[bad] * 3, guard=guard)[-1].signs
    guard.rolled_back(8)
    assert not any(guard.observe(k, GOOD).signs for k in range(12, 20))
    assert [bool(guard.observe(k, GOOD | bad).new) for k in (20, 21)] == [False, True]


def test_the_state_does_not_grow_without_end():
    guard = CollapseGuard()
    guard.load_state_dict({"history": [{"step": float(k)} for k in range(MAX_HISTORY)]})
    guard.observe(MAX_HISTORY, GOOD)
    history = guard.state_dict()["history"]
    assert len(history) == MAX_HISTORY and history[-1]["step"] == MAX_HISTORY


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "given, text",
    [
        ({"tool_use_dorp": 1}, "collapse_guard_thresholds.tool_use_dorp: unknown key.*tool_use_drop"),
        ({"tool_use_drop": 2}, "tool_use_drop: got 2, must be at most 1"),
        ({"reward_drop": "much"}, "reward_drop: got 'much', expected a number, or null"),
        ({"window": None}, "window: got None, expected a whole number"),
        ({"window": 2.5}, "window: got 2.5, expected a whole number"),
        ({"flat_groups": True}, "flat_groups: got True"),
    ],
)
def test_thresholds_that_cannot_be_are_refused_by_name(given: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        read_thresholds(given)


@pytest.mark.slow
def test_the_configuration_takes_them_and_off_under_either_name(tmp_path):
    config = compose(["trainer.collapse_guard_thresholds={window: 5, turns_rise: null}", "trainer.collapse_guard=off"])
    assert read_thresholds(config.trainer.collapse_guard_thresholds) == GuardThresholds(window=5, turns_rise=None)
    (tmp_path / "mine.yaml").write_text("defaults: [tiny, _self_]\ntrainer: {collapse_guard: off}\n")
    assert (
        compose(config_name="mine", config_dir=tmp_path).trainer.collapse_guard
        == config.trainer.collapse_guard
        == "off"
    )
    with pytest.raises(ConfigError, match=r"collapse_guard_thresholds.windw: unknown key.*window"):
        compose(["trainer.collapse_guard_thresholds={windw: 5}"])
