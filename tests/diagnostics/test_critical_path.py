"""The straggler is named, and what is predicted without it is what a run without it takes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.data.run_files import trajectory_to_row
from verl_mt.data.trajectory import TimeSpan, Trajectory
from verl_mt.extensions.inspection.diagnostics.critical_path import critical_path, critical_path_of_rows
from verl_mt.extensions.inspection.diagnostics.step_replay import measure, minus, union


def trajectory(name: str, *spans: tuple, prompt: str | None = None) -> Trajectory:
    prompt = prompt or name
    return Trajectory(name, prompt, prompt, name, time_spans=[TimeSpan(*span) for span in spans])


def two_turns(name: str, *, tool_s: float, start: float = 100.0, prompt: str | None = None) -> Trajectory:
    """Decodes 1 s, calls `search`, decodes 1 s."""
    edge = start + 1 + tool_s
    return trajectory(
        name,
        ("decode", start, start + 1, 1),
        ("tool", start + 1, edge, 1, "search"),
        ("decode", edge, edge + 1, 2),
        prompt=prompt,
    )


def test_a_slow_tool_is_named_with_its_trajectory_and_turn_and_saves_up_to_the_next_trajectory():
    found = critical_path([two_turns("a", tool_s=0.5), two_turns("b", tool_s=4.0), two_turns("c", tool_s=1.0)])
    held = found.holder
    assert (held.trajectory_id, held.turn, held.what) == ("b", 1, "tool search")
    assert held.span_s == pytest.approx(4.0)
    # 6 s with it; without it c's 3 s decide.
    assert held.saving_s == pytest.approx(3.0)
    assert held.saving_everywhere_s == pytest.approx(4.0)
    assert found.without_s == pytest.approx(3.0)
    assert [s.phase for s in found.segments] == ["decode", "tool", "decode"]


def test_samples_of_one_prompt_that_wait_for_the_same_tool_are_one_cause():
    found = critical_path(
        [two_turns("a.0", tool_s=4.0, prompt="a"), two_turns("a.1", tool_s=4.1, prompt="a"), two_turns("b", tool_s=0.5)]
    )
    assert found.holder.trajectory_id == "a.1"
    assert found.holder.saving_s == pytest.approx(3.6)
    assert found.holder.saving_alone_s == pytest.approx(0.1)


def test_the_reward_of_the_last_group_ends_the_path_and_the_trainer_follows():
    slow = two_turns("a", tool_s=0.1)
    slow.time_spans.append(TimeSpan("reward", 102.2, 107.2, 2))
    found = critical_path([slow, two_turns("b", tool_s=0.2)], step_s=9.0, trainer_phases={"update": 1.0})
    assert found.holder.phase == "reward"
    assert found.holder.saving_s == pytest.approx(5.0)
    assert found.without_s == pytest.approx(4.0)
    assert [(s.phase, round(s.end_s - s.start_s, 3)) for s in found.segments[-3:]] == [
        ("other", 0.1), ("reward", 5.0), ("update", 1.0),
    ]  # fmt: skip


def test_in_a_lock_step_a_tool_holds_everybody_but_not_while_another_one_runs():
    """Both decode when both are in the engine: b's decode of 3.5 s contains a's tool of 3 s."""
    a = trajectory("a", ("decode", 0, 0.5, 1), ("tool", 0.5, 3.5, 1, "slow"), ("decode", 3.5, 4.0, 2))
    b = trajectory("b", ("decode", 0, 3.8, 1))
    c = trajectory("c", ("decode", 0, 0.5, 1), ("tool", 0.5, 1.5, 1, "quick"), ("decode", 1.5, 4.0, 2))
    found = critical_path([a, b, c], lock_step=True)
    assert (found.holder.trajectory_id, found.holder.what) == ("a", "tool slow")
    assert found.holder.saving_s == pytest.approx(2.0)
    # Were everybody free, b and c would have ended then in any case.
    assert critical_path([a, b, c]).holder.saving_s == pytest.approx(0.0)


def test_in_a_lock_step_the_path_of_a_bystander_shows_whom_it_waited_for():
    a = trajectory("a", ("decode", 0, 1, 1), ("tool", 1, 4, 1, "slow"), ("decode", 4, 4.5, 2))
    b = trajectory("b", ("decode", 0, 5, 1))
    found = critical_path([a, b], lock_step=True)
    assert [(s.trajectory_id, s.phase, s.start_s, s.end_s) for s in found.segments] == [
        ("b", "decode", 0, 1), ("a", "tool", 1, 4), ("b", "decode", 4, 5),
    ]  # fmt: skip


def test_who_waited_for_a_place_leads_to_the_one_that_held_it():
    """One place: b waits for a, so a's tool holds the step although b ends last."""
    a = trajectory("a", ("queue", 0, 0, 0), ("decode", 0, 1, 1), ("tool", 1, 6, 1, "slow"))
    b = trajectory("b", ("queue", 0, 6, 0), ("decode", 6, 8, 1))
    found = critical_path([a, b])
    assert (found.holder.trajectory_id, found.holder.what, found.holder.saving_s) == ("a", "tool slow", 5)
    assert [(s.trajectory_id, s.phase) for s in found.segments] == [("a", "decode"), ("a", "tool"), ("b", "decode")]
    assert found.phase_share == pytest.approx(
        {"queue": 6 / 14, "prefill": 0, "decode": 3 / 14, "tool": 5 / 14, "interaction": 0, "reward": 0, "other": 0}
    )


def test_of_two_calls_at_the_same_time_the_shorter_one_saves_nothing():
    both = trajectory("a", ("decode", 0.8, 1, 1), ("tool", 1, 4, 1, "long"), ("tool", 1, 3.5, 1, "short"))
    found = critical_path([both])
    assert found.holder.name == "long"
    assert found.holder.saving_s == pytest.approx(0.5)


def test_agents_of_one_episode_are_one_chain():
    first = trajectory("e/a", ("decode", 0, 3, 1), prompt="p")
    second = trajectory("e/b", ("decode", 3, 4, 1), prompt="p")
    first.episode_id = second.episode_id = "e"
    found = critical_path([first, second])
    assert [s.trajectory_id for s in found.segments] == ["e/a", "e/b"]
    assert found.holder.trajectory_id == "e/a"
    assert found.holder.saving_alone_s == pytest.approx(3.0)


def test_the_answer_is_plain_json_and_the_same_from_rollout_rows():
    made = [two_turns("a", tool_s=0.5), two_turns("b", tool_s=4.0)]
    made[1].time_spans.append(TimeSpan("reward", 106.0, 106.5, 2))
    from_rows = critical_path_of_rows([trajectory_to_row(t, step=1) for t in made])
    assert from_rows == critical_path(made)
    told = json.loads(json.dumps(from_rows.to_dict()))
    assert told["holder"]["name"] == "search"
    assert told["words"].startswith("tool search of b, turn 1: 4.00 s; without it the step would have taken ")


def test_nothing_rolled_out_holds_nothing():
    found = critical_path([trajectory("a")], step_s=2.0)
    assert found.holder is None
    assert found.without_s == 2.0
    assert found.metrics() == {}


durations = st.floats(0.01, 5.0)


@given(st.lists(st.tuples(durations, durations, durations, st.integers(0, 2)), min_size=1, max_size=8), st.booleans())
def test_shares_sum_to_one_the_path_has_no_holes_and_no_saving_exceeds_the_step(shapes, lock_step):
    made = []
    for number, (first, tool, second, prompt) in enumerate(shapes):
        made.append(
            trajectory(
                f"t{number}",
                ("decode", 0, first, 1),
                ("tool", first, first + tool, 1, "x"),
                ("decode", first + tool, first + tool + second, 2),
                prompt=f"p{prompt}",
            )
        )
    found = critical_path(made, lock_step=lock_step)
    assert sum(found.phase_share.values()) == pytest.approx(1.0)
    assert found.segments[0].start_s == 0
    assert found.segments[-1].end_s == pytest.approx(found.rollout_s)
    for before, after in zip(found.segments, found.segments[1:]):
        assert after.start_s == pytest.approx(before.end_s)
    held = found.holder
    assert 0 <= held.saving_alone_s <= held.saving_s + 1e-9 <= held.saving_everywhere_s + 2e-9
    assert held.saving_s <= found.rollout_s + 1e-9


pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


@given(pairs, pairs)
def test_intervals_are_sets(first, second):
    def points(intervals):
        return {k for a, b in intervals for k in range(a, b)}

    one, other = union(first), union(second)
    assert points(minus(one, other)) == points(first) - points(second)
    assert measure(one) == len(points(first))
    assert measure(one, before=10) == len({k for k in points(first) if k < 10})
