"""A run in which nothing works from the first rollout on is told so, once, and no other run is."""

from __future__ import annotations

import pytest

from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryGroup
from verl_mt.extensions.inspection.diagnostics.dead_start import FIRST_STEPS, DeadStart

CUT = StopReason.RESPONSE_LENGTH


def rollout(
    score: float | None, reason: StopReason = StopReason.FINISHED, error: str = "", calls: int = 0
) -> Trajectory:
    """A conversation whose calls failed with that error, or, without one, ran."""
    made = Trajectory("t", "p", "g", "t", stop_reason=reason, reward=score)
    made.reward_parts = {} if score is None else {"score": score}
    for k in range(calls):
        failure = "tool" if error else None
        made.tool_calls.append({"name": "lookup", "call_id": f"c{k}", "failure": failure})
        made.messages.append({"role": "tool", "tool_call_id": f"c{k}", "content": error or "42"})
    made.counters = {"tools/lookup/calls": calls, "tools/lookup/errors": calls if error else 0}
    return made


def after(*passes: list[Trajectory]) -> str:
    """What is said after the first steps; the first pass is the validation before training."""
    watch = DeadStart()
    for step, rollouts in enumerate(passes):
        watch.observe(step, [TrajectoryGroup("g", "p", rollouts)])
    assert not any(watch.words(step) for step in (*range(FIRST_STEPS), FIRST_STEPS + 1))
    return watch.words(FIRST_STEPS)


def test_failing_calls_and_no_reward_are_one_sentence_with_the_commonest_error():
    broken = [rollout(0.0, error="no such\ntable: parts", calls=2), rollout(0.0, error="odd", calls=1)]
    said = after(broken, broken, broken, broken)
    assert said == (
        "dead from the start: in the validation before training and the first 3 steps nothing was rewarded (0 of 8 "
        "rollouts; 8 of them ended with finished); each tool call failed (12 of 12; the commonest error, 8 times: "
        "lookup: no such table: parts): there is nothing to learn from. Read rollouts/step_000003.*, and "
        "docs/cold_start.md"
    )


def test_conversations_that_are_all_cut_name_the_limit():
    said = after([rollout(1.0, CUT)], [rollout(1.0, CUT)], [rollout(1.0, CUT)], [rollout(0.0, CUT)])
    assert "a limit cut each conversation (4 of 4, most of them response_length)" in said
    assert "rewarded" not in said and "tool" not in said


def test_trajectories_that_failed_earn_nothing():
    assert "nothing was rewarded (0 of 4 rollouts" in after(*[[rollout(None, StopReason.ERROR)]] * 4)


@pytest.mark.parametrize("alive_in", range(FIRST_STEPS + 1))
def test_one_rollout_that_works_anywhere_is_enough(alive_in):
    dead, alive = [rollout(0.0, CUT, "no", 1)], [rollout(0.0, CUT, "no", 1), rollout(1.0, calls=1)]
    assert after(*[alive if step == alive_in else dead for step in range(FIRST_STEPS + 1)]) == ""


def test_penalties_that_differ_are_something_to_learn_from():
    assert after(*[[rollout(-1.0), rollout(-0.5)]] * 4) == ""
    assert "nothing was rewarded" in after(*[[rollout(-1.0), rollout(-1.0)]] * 4)


def test_a_run_without_validation_is_judged_by_its_steps():
    watch = DeadStart()
    for step in (1, 2, 3):
        watch.observe(step, [TrajectoryGroup("g", "p", [rollout(0.0)])])
    assert watch.words(3).startswith("dead from the start: in the first 3 steps nothing was rewarded (0 of 3 rollouts")


def test_a_resumed_run_says_what_the_whole_run_says():
    whole, first, again = DeadStart(), DeadStart(), DeadStart()
    for step in range(FIRST_STEPS + 1):
        groups = [TrajectoryGroup("g", "p", [rollout(0.0, error="no", calls=1)])]
        whole.observe(step, groups)
        (first if step < 2 else again).observe(step, groups)
        if step == 2:
            again.load_state_dict(first.state_dict())
            again.observe(step, groups)
            again.observe(step, groups)  # a step that was broken off comes again
    assert again.words(FIRST_STEPS) == whole.words(FIRST_STEPS) != ""
