"""The log of prompts, written and read; torn at every seventh byte."""

from __future__ import annotations

import pytest

from verl_mt.data.dataset import DataRow
from verl_mt.data.drawn_prompts import FILE, PromptLog, read_prompt_log
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.errors import CheckpointError, DataError
from verl_mt.prompt_log import examine


def row(index):
    return DataRow([], "made", index=index, source="here")


def group(name, retries=0):
    trajectory = Trajectory(f"{name}.00", name, name, name)
    trajectory.counters["retries"] = retries
    return TrajectoryGroup(name, name, [trajectory])


def a_step(log, step, first, why=None):
    """Two prompts and a row that gives none; the second prompt ends with `why`."""
    plan = f"s{step:06d}"
    log.drawn(plan, [row(first), row(first + 1)], [(row(first + 2), "too long")])
    log.started(plan)
    for place in (1, 0):
        log.finished(group(f"{plan}.{place:05d}", retries=place))
    log.ended(step, {f"{plan}.00000": None, f"{plan}.00001": why})


def ends(history):
    return {n: (p.trained_in, p.left_out) for n, p in history.prompts.items()}


def test_every_prompt_has_one_life(tmp_path):
    log = PromptLog(tmp_path)
    assert not (tmp_path / FILE).exists(), "nothing is written before a prompt is drawn"
    a_step(log, 1, 10)
    a_step(log, 2, 20, why="no signal")
    log.close()
    history = read_prompt_log(tmp_path)
    assert ends(history) == {
        0: ([1], []), 1: ([1], []), 2: ([], ["too long"]), 3: ([2], []), 4: ([], ["no signal"]), 5: ([], ["too long"]),
    }  # fmt: skip
    assert [p.row_index for p in history.prompts.values()] == [10, 11, 12, 20, 21, 22]
    assert [p.attempts for p in history.prompts.values()] == [1, 2, None, 1, 2, None]
    assert [p.prompt_id for p in history.prompts.values()][:3] == ["s000001.00000", "s000001.00001", None]
    assert log.state_dict() == {"drawn": 6, "trained": 3, "left_out": 3, "open": []}


def test_what_is_in_flight_at_a_checkpoint_is_open_again_where_a_run_goes_on(tmp_path):
    """`trainer.max_staleness`: while step 1 ends, those of steps 2 and 3 are drawn, a row without a prompt in each. Of
    step 2 one is trained already (`data.over_sample`)."""
    log = PromptLog(tmp_path)
    for step in (1, 2, 3):
        log.drawn(f"s{step:06d}", [row(0), row(1)], [(row(2), "too long")])
        log.started(f"s{step:06d}")
    log.ended(1, {"s000001.00000": None, "s000001.00001": "no signal", "s000002.00001": None})
    saved = log.state_dict()
    assert {name: saved[name] for name in ("drawn", "trained", "left_out")} == {"drawn": 9, "trained": 2, "left_out": 4}
    in_flight = [(p.number, p.prompt_id, p.plan, p.position) for p in log.open]
    assert in_flight == [
        (3, "s000002.00000", "s000002", 0), (6, "s000003.00000", "s000003", 0), (7, "s000003.00001", "s000003", 1)
    ]  # fmt: skip
    log.ended(2, {"s000002.00000": None, "s000003.00001": None})  # void, as what it draws now is
    log.drawn("s000004", [row(5)])
    log.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder, starts in ((tmp_path, 2), (elsewhere, 1)):
        again = PromptLog(folder, step=1, state=saved)
        assert [p.prompt_id for p in again.open] == [name for _, name, _, _ in in_flight]
        for step in (2, 3):
            again.started(f"s{step:06d}")
        again.drawn("s000004", [row(3)])
        again.ended(2, {"s000003.00000": None, "s000003.00001": None})
        again.ended(3, {"s000002.00000": None, "s000004.00000": None})
        again.close()
        assert again.state_dict() == {"drawn": 10, "trained": 6, "left_out": 4, "open": []}
        history = read_prompt_log(folder)
        lives = {n: (p.trained_in, p.starts) for n, p in history.prompts.items() if n >= 3 and p.trained_in != [1]}
        assert {n: life for n, life in lives.items() if life[0]} == {
            3: ([3], starts), 6: ([2], starts), 7: ([2], starts), 9: ([3], 0)
        }  # fmt: skip
        assert all(len(p.trained_in) + len(p.left_out) == 1 for p in history.prompts.values()) and not history.unknown
        summary = examine(folder).summary()
        assert summary == "10 drawn, 6 trained, 4 left out, 0 open, 0 missing, 0 double"


def test_wherever_a_process_is_killed_the_next_one_goes_on_without_a_gap(tmp_path):
    """Step 1 has a checkpoint. What follows is cut at every seventh byte, and step 2 made again behind it."""
    log = PromptLog(tmp_path)
    a_step(log, 1, 10)
    saved, begun = log.state_dict(), (tmp_path / FILE).stat().st_size
    a_step(log, 2, 20)
    log.close()
    whole, expected = (tmp_path / FILE).read_bytes(), ends(read_prompt_log(tmp_path))
    for cut in [*range(begun, len(whole), 7), len(whole)]:
        (tmp_path / FILE).write_bytes(whole[:cut])
        found = ends(read_prompt_log(tmp_path))
        assert {n: found[n] for n in range(3)} == {n: expected[n] for n in range(3)}
        again = PromptLog(tmp_path, step=1, state=saved)
        a_step(again, 2, 20)
        again.close()
        history = read_prompt_log(tmp_path)
        assert ends(history) == expected and not history.unknown and history.begun_at == 1


def test_a_run_that_goes_on_elsewhere_counts_what_was_before(tmp_path):
    state = {"drawn": 640, "trained": 633, "left_out": 7}
    log = PromptLog(tmp_path, step=40, state=state)
    a_step(log, 41, 5)
    history = read_prompt_log(tmp_path)
    assert history.before == state and sorted(history.prompts) == [640, 641, 642]
    assert log.state_dict() == {"drawn": 643, "trained": 635, "left_out": 8, "open": []}


def test_a_full_disk_is_one_error_and_closing_none(tmp_path):
    (tmp_path / FILE).symlink_to("/dev/full")
    log = PromptLog(tmp_path)
    with pytest.raises(CheckpointError, match=FILE):
        log.drawn("s000001", [row(1)])
    log.close()
    log.close()


def test_prompts_of_nobody_are_not_logged(tmp_path):
    log = PromptLog(tmp_path)
    log.finished(group("other"))
    log.ended(1, {"other": None})
    assert not (tmp_path / FILE).exists() and log.state_dict()["trained"] == 0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"event": "sold"}', "unknown event"),
        (b'{"event": "trained"}', "KeyError"),
        (b"[]", "TypeError"),
        (b'{"event": "tra', "line 2"),
    ],
)
def test_a_line_that_is_no_event_is_named(tmp_path, line, what):
    log = PromptLog(tmp_path)
    a_step(log, 1, 10)
    log.close()
    first, *rest = (tmp_path / FILE).read_bytes().split(b"\n")
    (tmp_path / FILE).write_bytes(b"\n".join([first, line, *rest]))
    with pytest.raises(DataError, match=what) as raised:
        read_prompt_log(tmp_path)
    assert str(tmp_path / FILE) in str(raised.value)


def test_a_directory_without_a_log_is_named(tmp_path):
    with pytest.raises(DataError, match="no directory of a run that has drawn prompts"):
        read_prompt_log(tmp_path)
