"""The closing summary says in words what held the run."""

from __future__ import annotations

import json

import pytest

from verl_mt.data.trajectory import TimeSpan, Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import prefix_cache_by_turn
from verl_mt.extensions.inspection.diagnostics.critical_path import Straggler, closing_words
from verl_mt.trainer.tracking import JsonLines


def group(name: str, tool_s: float, **counters: float) -> TrajectoryGroup:
    edge = 11 + tool_s
    spans = [("decode", 10, 11, 1), ("tool", 11, edge, 1, "search"), ("decode", edge, edge + 1, 2)]
    made = Trajectory(f"{name}.00", name, name, name, time_spans=[TimeSpan(*span) for span in spans])  # type: ignore[arg-type]
    made.counters = {k.replace("__", "/"): v for k, v in counters.items()}
    return TrajectoryGroup(name, name, [made])


@pytest.mark.parametrize("split_timings", [False, True])
def test_the_summary_names_the_tool_the_step_and_what_it_would_have_taken(tmp_path, split_timings):
    lines = JsonLines(tmp_path, resume_step=None, split_timings=split_timings)
    for step, slow_s in enumerate((3.0, 6.0, 0.5), start=1):
        straggler = Straggler()
        timing = {"time/rollout_s": slow_s + 2, "time/update_s": 1.0, "time/step_s": slow_s + 3}
        groups = [group(f"s{step}.a", slow_s), group(f"s{step}.b", 0.5)]
        metrics = straggler.observe(groups, timing, lock_step=False)
        lines.log(step, {**metrics, **timing, **straggler.take_words()})
    words = dict(closing_words(tmp_path))
    assert words["held by"].startswith("[bold]tool search[/], in 2 of 3 steps: ")
    assert words["held by"].endswith(", 8.0 s less than 18.5 s")
    assert words["most in one step"] == (
        "step 2: tool search of s2.a.00, turn 1, 6.00 s; without it 3.50 s instead of 9.00 s"
    )
    shares = words["rollouts spent"].split(", ")
    assert {share.split()[1] for share in shares} == {"decode", "tool"}
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    assert ("critical_path" in (tmp_path / "metrics.jsonl").read_text()) is not split_timings


def test_a_run_that_nothing_held_says_so(tmp_path):
    lines = JsonLines(tmp_path, resume_step=None, split_timings=False)
    straggler = Straggler()
    timing = {"time/rollout_s": 2.5, "time/step_s": 2.5}
    metrics = straggler.observe([group("a", 0.5), group("b", 0.5)], timing, lock_step=False)
    lines.log(1, {**metrics, **timing, **straggler.take_words()})
    assert dict(closing_words(tmp_path))["held by"].startswith("nobody for 5% of the time; ")


def test_a_run_without_steps_has_no_words(tmp_path):
    assert closing_words(tmp_path) == []


def test_the_prefix_cache_is_reported_for_each_turn():
    counted = {"cached_tokens__1": 0, "input_tokens__1": 100, "cached_tokens__2": 90, "input_tokens__2": 120}
    late = {"cached_tokens__9": 10, "input_tokens__9": 40, "cached_tokens__12": 20, "input_tokens__12": 20}
    groups = [group("a", 0.1, **counted, **late), group("b", 0.1, cached_tokens__2=30, input_tokens__2=120)]
    assert prefix_cache_by_turn(t for g in groups for t in g.trajectories) == {
        "rollout/prefix_cache_hit_rate_turn_1": 0.0,
        "rollout/prefix_cache_hit_rate_turn_2": 0.5,
        "rollout/prefix_cache_hit_rate_turn_9_on": 0.5,
    }
