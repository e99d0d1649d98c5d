"""The log of prompts, written and read; torn at every seventh byte."""

from __future__ import annotations

import json
import os

import pytest

from verl_mt.data.dataset import DataRow
from verl_mt.data.drawn_prompts import FILE, DrawnPrompt, OpenPrompt, PromptHistory, PromptLog, read_prompt_log
from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.errors import CheckpointError, DataError
from verl_mt.extensions.inspection.prompt_log import examine


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


def events(folder):
    return [json.loads(line) for line in (folder / FILE).read_bytes().split(b"\n") if line]


def test_every_event_of_a_log_stands_there_in_its_order(tmp_path):
    log = PromptLog(tmp_path, step=4)
    log.drawn("s000005", [row(7), row(8), row(9)], [(row(1), "too long"), (row(2), "bad row"), (row(3), "too long")])
    log.started("s000005", but={"s000005.00001"})
    log.started("s000006")
    record = TrajectoryRecord()
    record.append_sampled([1, 2, 3], [-0.5] * 3, [0] * 3, turn=1)
    found = TrajectoryGroup("g", "s000005.00002", [Trajectory("t", "p", "g", "e", records=[record]) for _ in range(2)])
    found.trajectories[1].counters["retries"] = 2.0
    log.finished(found)
    log.finished(TrajectoryGroup("g", "s000005.00000", []))
    log.ended(5, {"s000005.00002": None, "s000005.00000": None, "other": None, "s000005.00001": "no signal"})
    log.ended(6, {"s000005.00002": None})
    log.close()
    assert events(tmp_path) == [
        {"event": "begun", "step": 4, "drawn": 0, "trained": 0, "left_out": 0, "open": [], "rows": True},
        {"event": "drawn", "prompts": [
            [0, "here", 7, "s000005.00000"], [1, "here", 8, "s000005.00001"], [2, "here", 9, "s000005.00002"],
            [3, "here", 1, None], [4, "here", 2, None], [5, "here", 3, None],
        ]},
        {"event": "left_out", "why": "bad row", "numbers": [4]},
        {"event": "left_out", "why": "too long", "numbers": [3, 5]},
        {"event": "started", "numbers": [0, 2]},
        {"event": "finished", "number": 2, "attempts": 3, "trajectories": 2, "tokens": 6},
        {"event": "finished", "number": 0, "attempts": 1, "trajectories": 0, "tokens": 0},
        {"event": "trained", "step": 5, "numbers": [0, 2]},
        {"event": "left_out", "step": 5, "why": "no signal", "numbers": [1]},
    ]  # fmt: skip
    assert log.state_dict() == {"drawn": 6, "trained": 2, "left_out": 4, "open": []} and log.open == []


def test_a_log_goes_on_behind_a_torn_line_and_says_so_first(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"event": "dra')
    state = {"drawn": 3, "trained": 1, "left_out": 1, "open": [OpenPrompt(2, "s000001.00002", row(5)).state]}
    log = PromptLog.after({"step": 1, "prompts": state}, tmp_path, rows=False)
    log.started("s000001")
    file = log._file
    log.close()
    assert file.closed
    log.started("s000001")
    log.close()
    begun = {"event": "begun", "step": 1, "drawn": 3, "trained": 1, "left_out": 1}
    begun |= {"open": [[2, "here", 5, "s000001.00002"]], "rows": False}
    first, *others = (tmp_path / FILE).read_bytes().split(b"\n")
    assert first == b'{"event": "dra' and [json.loads(line) for line in others if line] == [
        begun, {"event": "started", "numbers": [2]}, begun, {"event": "started", "numbers": [2]},
    ]  # fmt: skip
    assert PromptLog.after(None, tmp_path, rows=True)._begun == {
        "event": "begun", "step": 0, "drawn": 0, "trained": 0, "left_out": 0, "open": [], "rows": True,
    }  # fmt: skip
    assert PromptLog(tmp_path, state={"drawn": 2})._begun["trained"] == 0


def test_a_line_is_handed_on_at_once_and_the_ends_of_draws_and_steps_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    log, sizes = PromptLog(tmp_path), []
    for step in (
        lambda: log.ended(0, {}), lambda: log.drawn("s000001", [row(1)]), lambda: log.started("s000001"),
        lambda: log.finished(group("s000001.00000")), lambda: log.ended(1, {"s000001.00000": None}),
    ):  # fmt: skip
        step()
        sizes.append((tmp_path / FILE).stat().st_size if (tmp_path / FILE).exists() else 0)
    assert sizes[0] == 0 < sizes[1] < sizes[2] < sizes[3] < sizes[4] and synced == [sizes[1], sizes[4]]
    log.close()


def test_a_prompt_in_flight_goes_into_a_checkpoint_with_its_row():
    prompt = OpenPrompt(7, "s000003.002.00012", row(5))
    assert (prompt.plan, prompt.position, prompt.logged) == ("s000003.002", 12, [7, "here", 5, "s000003.002.00012"])
    assert OpenPrompt.of(prompt.state) == prompt and prompt.state["number"] == 7
    bad = OpenPrompt(7, "s000003.00012", DataRow([], "d", raw={"x": object()}, file="a.jsonl", index=3))
    with pytest.raises(DataError, match=r"a\.jsonl, row 4 is in flight .* raw\.x is a builtins\.object\. Make the"):
        bad.state  # noqa: B018


def history(*told) -> PromptHistory:
    made = PromptHistory()
    for event in told:
        made.take(event)
    return made


def begun(step, drawn, opened=(), rows=True):
    return {
        "event": "begun",
        "step": step,
        "drawn": drawn,
        "trained": 0,
        "left_out": 0,
        "open": list(opened),
        "rows": rows,
    }


def drew(*numbers):
    return {"event": "drawn", "prompts": [[n, "here", n + 10, f"p{n}"] for n in numbers]}


STARTED, TRAINED = {"event": "started", "numbers": [0, 1]}, {"event": "trained", "step": 1, "numbers": [0]}


def test_what_was_drawn_after_a_checkpoint_is_void_and_its_starts_count():
    """Of 0 to 3 drawn, the checkpoint of step 1 knows three; 1 is open in it."""
    told = history(
        begun(0, 0), drew(0, 1, 2, 3), STARTED, {**STARTED, "numbers": [1, 3]}, TRAINED,
        {"event": "left_out", "step": 1, "why": "x", "numbers": [2, 1]}, begun(1, 3, [[1, "here", 11, "p1"]]),
    )  # fmt: skip
    assert told.prompts == {
        0: DrawnPrompt(0, "here", 10, "p0", 1, None, [1]), 2: DrawnPrompt(2, "here", 12, "p2", left_out=["x"]),
        1: DrawnPrompt(1, "here", 11, "p1", 2),
    }  # fmt: skip
    assert (told.begun_at, told.first_step, told.first_number, told.unknown) == (1, 0, 0, [])
    assert [prompt.open for prompt in told.prompts.values()] == [False, False, True]
    told.take(drew(3, 4))
    assert [told.prompts[n].starts for n in (3, 4)] == [1, 0]


def test_a_log_that_begins_behind_a_checkpoint_counts_what_is_open_once():
    told = history({**begun(5, 8, [[6, "here", 1, "p6"], [7, "here", 2, "p7"]]), "trained": 4, "left_out": 2})
    assert told.before == {"drawn": 6, "trained": 4, "left_out": 2}
    assert (told.first_step, told.first_number, told.begun_at, list(told.prompts)) == (5, 8, 5, [6, 7])
    old = history({"event": "begun", "step": 5, "drawn": 8, "rows": True})
    assert old.before == {"drawn": 8, "trained": 0, "left_out": 0} and not old.prompts


def test_events_of_prompts_that_nobody_has_drawn_are_told():
    told = history(begun(0, 0), drew(0), {"event": "finished", "number": 4, "attempts": 1}, STARTED, drew(0))
    assert told.unknown == [
        "prompt 4 is finished, and nobody has drawn it", "prompt 1 is started, and nobody has drawn it",
        "prompt 0 is drawn twice",
    ]  # fmt: skip


def test_steps_whose_last_process_wrote_no_rows_are_known():
    told = history(
        begun(0, 0, rows=False), drew(0), TRAINED, {**TRAINED, "step": 2}, begun(1, 1), {**TRAINED, "step": 2}
    )
    assert told.without_rows == {1}
    told.take(begun(1, 1, rows=False))
    told.take({**TRAINED, "step": 2})
    assert told.without_rows == {1, 2}


START = b'{"event": "begun", "step": 0, "drawn": 0, "rows": true}'


@pytest.mark.parametrize(
    ("torn", "fine"),
    [
        ([b'{"event"'], True), ([b'{"event"', b"", b" "], True), ([b"{", START], True),
        ([b"{", b'{"event": "drawn", "prompts": []}'], False), ([b"{", b"{"], False),
    ],
)  # fmt: skip
def test_only_a_line_that_a_kill_can_have_cut_is_left_out(tmp_path, torn, fine):
    (tmp_path / FILE).write_bytes(b"\n".join([START, b"", *torn]))
    if fine:
        assert read_prompt_log(tmp_path).prompts == {}
    else:
        with pytest.raises(DataError, match=r"line 3: b'\{' is no event"):
            read_prompt_log(tmp_path)


def test_prompts_are_read_in_the_order_of_their_numbers(tmp_path):
    lines = [begun(0, 0), drew(0, 1, 2), begun(0, 3, [[0, "here", 10, "p0"]])]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_prompt_log(tmp_path).prompts) == [0, 1, 2]
