"""`python -m verl_mt.prompt_log` over whole runs: finished, killed, filtered, changed by hand."""

from __future__ import annotations

import json

import pytest
import torch
from finished_runs import SMALL
from row_formats import as_json_lines

from verl_mt.config.compose import compose
from verl_mt.data.dataset import DataRow
from verl_mt.data.drawn_prompts import FILE, PromptLog, read_prompt_log
from verl_mt.data.row_files import row_files
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.extensions.inspection import prompt_log
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.ppo_trainer import PPOTrainer

QUICK = (
    "data.val_files=null",
    "actor_rollout_ref.rollout.response_length=8",
    "trainer.export_at_end=False",
    "actor_rollout_ref.rollout.n=2",
)


def run(folder, *overrides):
    trainer = build_trainer(compose([*SMALL, *QUICK, f"trainer.default_local_dir={folder}", *overrides]))
    trainer.fit()
    return trainer


def last_line(capsys, folder):
    """(exit status, the command's last line)"""
    status = prompt_log.main([str(folder)])
    return status, capsys.readouterr().out.splitlines()[-1]


@pytest.fixture
def copied(finished):
    """A copy of a finished run, to be changed, with the rollout rows of an earlier version."""
    return as_json_lines(finished("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_finished_run_holds(finished, capsys, format):
    copied = finished("plain")
    if format == "jsonl":
        as_json_lines(copied)
    assert {file.format for file in row_files(copied)} == {format}
    assert last_line(capsys, copied) == (0, "8 drawn, 8 trained, 0 left out, 0 open, 0 missing, 0 double")
    prompts = read_prompt_log(copied).prompts.values()
    assert [p.trained_in for p in prompts] == [[1], [1], [2], [2], [3], [3], [4], [4]]
    assert all(p.starts == p.attempts == 1 for p in prompts)
    assert prompt_log.main([str(copied)]) == 0 and capsys.readouterr().out.count("\n") == 1


@pytest.mark.slow
def test_rows_that_are_gone_are_missing(copied, capsys):
    file = copied / "rollouts/step_000002.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    gone = json.loads(lines[0])["prompt_id"]
    file.write_text("".join(line for line in lines if json.loads(line)["prompt_id"] != gone))
    assert prompt_log.main([str(copied)]) == 1
    out = capsys.readouterr().out
    assert f"({gone}) was trained in step 2 by the log, not by the rollout rows" in out
    assert out.splitlines()[-1].endswith("0 open, 1 missing, 0 double")


@pytest.mark.slow
def test_a_whole_step_that_is_gone_is_missing(copied, capsys):
    (copied / "rollouts/step_000003.jsonl").unlink()
    assert last_line(capsys, copied) == (1, "8 drawn, 8 trained, 0 left out, 0 open, 1 missing, 0 double")


def test_rows_that_were_trained_twice_are_double(copied, capsys):
    second, third = (copied / f"rollouts/step_00000{step}.jsonl" for step in (2, 3))
    third.write_text(third.read_text() + second.read_text())
    status, line = last_line(capsys, copied)
    assert status == 1 and line.endswith("0 missing, 2 double")


def test_rows_of_another_question_are_missing(copied, capsys):
    file = copied / "rollouts/step_000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(r | {"row_index": r["row_index"] + 1}) + "\n" for r in rows))
    status, line = last_line(capsys, copied)
    assert status == 1 and line.endswith("2 missing, 0 double")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "what"),
    [
        ({"event": "trained", "step": 4, "numbers": [0]}, "1 missing, 1 double"),
        ({"event": "left_out", "step": 4, "why": "no reason", "numbers": [0]}, "0 missing, 1 double"),
        ({"event": "trained", "step": 4, "numbers": [77]}, "1 missing, 0 double"),
        ({"event": "drawn", "prompts": [[9, "here", 0, "s000005.00000"]]}, "1 missing, 0 double"),
        ({"event": "begun", "step": 2, "drawn": 4, "trained": 4, "left_out": 0, "rows": True}, "2 missing, 0 double"),
    ],
)
def test_what_the_log_says_wrongly_is_found(copied, capsys, event, what):
    with (copied / FILE).open("a") as file:
        file.write(json.dumps(event) + "\n")
    status, line = last_line(capsys, copied)
    assert status == 1 and line.endswith(what)


@pytest.mark.slow
def test_groups_without_a_signal_are_left_out_with_a_reason(tmp_path, capsys):
    folder = tmp_path / "run"
    run(folder, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_reward",
        "algorithm.filter_groups.max_num_gen_batches=2", "actor_rollout_ref.rollout.response_length=48",
        "trainer.total_training_steps=2")  # fmt: skip
    assert prompt_log.main([str(folder)]) == 0
    out = capsys.readouterr().out
    counts = [int(part.split()[0]) for part in out.splitlines()[-1].split(", ")]
    assert counts[0] == counts[1] + counts[2] and counts[2] > 0 and counts[3:] == [0, 0, 0]
    assert f"left out {counts[2]}: algorithm.filter_groups" in out


@pytest.mark.slow
def test_prompts_whose_conversations_failed_are_left_out_with_a_reason(tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "seen = {}\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if seen.setdefault(extra_info['trajectory_id'][:13], len(seen)) % 2:\n"
        "        raise RuntimeError('no score for this one')\n"
        "    return 1.0 * (len(solution_str) % 2)\n"
    )
    run(tmp_path / "run", f"reward.path={reward}")
    assert prompt_log.main([str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "left out 4: nothing to train: error" in out
    assert out.splitlines()[-1] == "8 drawn, 4 trained, 4 left out, 0 open, 0 missing, 0 double"


@pytest.mark.slow
def test_ctrl_c_in_a_step_leaves_its_prompts_open_and_the_same_command_ends_them(tmp_path, monkeypatch, capsys):
    folder, collect = tmp_path / "run", PPOTrainer._while_waiting

    def interrupted(self):
        if self.step_number == 2:
            self.interrupts.requested.set()
        return collect(self)

    monkeypatch.setattr(PPOTrainer, "_while_waiting", interrupted)
    run(folder)
    assert last_line(capsys, folder) == (0, "6 drawn, 4 trained, 0 left out, 2 open, 0 missing, 0 double")
    monkeypatch.undo()
    run(folder)
    assert last_line(capsys, folder) == (0, "8 drawn, 8 trained, 0 left out, 0 open, 0 missing, 0 double")


@pytest.mark.slow
def test_a_run_from_a_checkpoint_elsewhere_counts_what_was_before(copied, tmp_path, capsys):
    source = copied / "checkpoints/step_000002"
    run(tmp_path / "on", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}")
    assert last_line(capsys, tmp_path / "on") == (0, "8 drawn, 8 trained, 0 left out, 0 open, 0 missing, 0 double")
    assert sorted(read_prompt_log(tmp_path / "on").prompts) == [4, 5, 6, 7]


def test_a_prompt_that_was_trained_and_is_said_to_be_left_out_is_found(copied, capsys):
    log = copied / FILE
    log.write_text(log.read_text().replace('"trained", "step": 3,', '"left_out", "step": 3, "why": "no",'))
    assert last_line(capsys, copied)[0] == 1


def test_a_run_that_an_older_version_began_is_compared_from_where_its_log_begins(copied, capsys):
    """It left no log, and a checkpoint without its counts; the process that goes on counts from 0."""
    events = [json.loads(line) for line in (copied / FILE).read_text().splitlines()]
    third = next(k for k, event in enumerate(events) if event.get("prompts", [[None]])[0][0] == 4)
    begun = {"event": "begun", "step": 2, "drawn": 0, "trained": 0, "left_out": 0, "rows": True}
    for event in events[third:]:
        event |= {"prompts": [[n - 4, *what] for n, *what in event["prompts"]]} if "prompts" in event else {}
        event |= {"numbers": [n - 4 for n in event["numbers"]]} if "numbers" in event else {}
        event |= {"number": event["number"] - 4} if "number" in event else {}
    (copied / FILE).write_text("".join(json.dumps(event) + "\n" for event in [begun, *events[third:]]))
    for folder in (copied / "checkpoints").iterdir():
        state = torch.load(folder / "state.pt", weights_only=True)
        state["prompts"] = {"drawn": 4, "trained": 4, "left_out": 0}
        (folder / "state.pt").unlink()  # other copies have the same file
        torch.save(state, folder / "state.pt")
    status = prompt_log.main([str(copied)])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.splitlines()[-1] == "4 drawn, 4 trained, 0 left out, 0 open, 0 missing, 0 double"


def test_a_damaged_checkpoint_is_one_line_and_status_2(copied, capsys):
    newest = sorted((copied / "checkpoints").iterdir())[-1] / "state.pt"
    content = newest.read_bytes()
    newest.unlink()  # other copies have the same file
    newest.write_bytes(content[:1000])
    assert prompt_log.main([str(copied)]) == 2
    assert f"{newest} cannot be read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("first", ["off", "parquet"])
def test_rows_that_are_written_for_some_steps_only_are_compared_for_those(tmp_path, monkeypatch, capsys, first):
    """`trainer.rollout_rows` may change when a run goes on."""
    folder, step = tmp_path / "run", PPOTrainer.step

    def step_and_stop(self):
        metrics = step(self)
        self.interrupts.requested.set()
        return metrics

    monkeypatch.setattr(PPOTrainer, "step", step_and_stop)
    run(folder, f"trainer.rollout_rows={first}", "trainer.total_training_steps=2")
    monkeypatch.undo()
    run(folder, f"trainer.rollout_rows={'parquet' if first == 'off' else 'off'}", "trainer.total_training_steps=2")
    assert prompt_log.main([str(folder)]) == 0
    assert "steps have no rollout rows to compare with" in capsys.readouterr().out


@pytest.mark.slow
def test_without_rollout_rows_the_log_is_held_against_the_checkpoint(tmp_path, capsys):
    run(tmp_path / "run", "trainer.rollout_rows=off")
    status = prompt_log.main([str(tmp_path / "run")])
    out = capsys.readouterr().out
    assert status == 0 and "no rollout rows to compare with" in out


def test_no_log_is_one_line_and_status_2(tmp_path, capsys):
    assert prompt_log.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_of_many_lines_the_first_are_said_and_the_others_counted(copied, capsys, monkeypatch):
    monkeypatch.setattr(prompt_log, "_SHOWN", 2)
    (copied / "rollouts/step_000002.jsonl").unlink()
    (copied / "rollouts/step_000003.jsonl").unlink()
    assert prompt_log.main([str(copied)]) == 1
    found = prompt_log.examine(copied).missing
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing: ")]
    shown = [f"missing: {line}" for line in found[:2]]
    assert len(found) >= 2 and said == [*shown, *([f"missing: and {len(found) - 2} more"] if len(found) > 2 else [])]


class Lab:
    """A run directory that is written by hand: a log of prompts, rollout rows, and what the newest checkpoint says."""

    def __init__(self, folder, monkeypatch, state=None, step=0):
        self.folder, self.log = folder, PromptLog(folder, step=step, state=state)
        self.saved = None
        (folder / "rollouts").mkdir()
        monkeypatch.setattr(prompt_log, "_newest_checkpoint", lambda run: self.saved)

    def draw(self, step, size=2, left_out=()):
        plan = f"s{step:06d}"
        first = self.log._counts["drawn"]
        rows = [DataRow([], "made", index=first + k, source="here") for k in range(size)]
        self.log.drawn(plan, rows, [(DataRow([], "made", index=99, source="here"), why) for why in left_out])
        self.log.started(plan)
        return [f"{plan}.{k:05d}" for k in range(size)]

    def rows(self, step, names, advantages=(0.5,), indices=None, last=None):
        """A row per prompt and item of `advantages`."""
        made = [
            {"prompt_id": name, "source": "here", "row_index": (indices or {}).get(name, self.number(name)),
             "records": [{"advantages": None}, {"advantages": None if value is None else [value]}]}
            for name in names for value in advantages
        ]  # fmt: skip
        file = self.folder / "rollouts" / f"step_{step:06d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in made))

    def number(self, name):
        return next((p.number for p in read_prompt_log(self.folder).prompts.values() if p.prompt_id == name), -7)

    def train(self, step, names=None, why=None):
        names = self.draw(step) if names is None else names
        self.log.ended(step, {name: (why or {}).get(name) for name in names})
        self.rows(step, names)
        return names

    def examined(self):
        found = prompt_log.examine(self.folder)
        assert found.holds is not bool(found.missing or found.double)
        return found.missing, found.double, found.notes

    def says(self, capsys):
        status = prompt_log.main([str(self.folder)])
        return status, capsys.readouterr().out.splitlines()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    return Lab(tmp_path, monkeypatch)


def test_two_trained_steps_and_one_open_hold(lab, capsys):
    for step in (1, 2):
        lab.train(step)
    lab.draw(3, left_out=["too long", "bad row", "too long"])
    lab.saved = {"step": 2, "prompts": {"drawn": 4, "trained": 4, "left_out": 0, "open": []}}
    assert lab.examined() == ([], [], [])
    status, lines = lab.says(capsys)
    assert status == 0 and lines == [
        "left out 2: too long", "left out 1: bad row",
        "9 drawn, 4 trained, 3 left out, 2 open, 0 missing, 0 double",
    ]  # fmt: skip


def test_steps_after_the_checkpoint_may_lack_their_rows(lab):
    lab.train(1)
    names = lab.train(2)
    (lab.folder / "rollouts" / "step_000002.jsonl").unlink()
    note = "step 2 has no rollout rows: it ended after the newest checkpoint"
    assert lab.examined() == ([], [], [note])
    lab.saved = {"step": 1, "prompts": {"drawn": 2, "trained": 2}}
    assert lab.examined() == ([], [], [note])
    lab.saved = {"step": 2, "prompts": {"drawn": 4, "trained": 4}}
    assert lab.examined() == (["step 2 has trained 2 prompts, and has no rollout rows"], [], [])
    lab.rows(2, names, advantages=(None,))
    missing, _, _ = lab.examined()
    assert missing == [
        f"prompt {k} (s000002.0000{k - 2}) was trained in step 2 by the log, not by the rollout rows" for k in (2, 3)
    ]
    lab.rows(2, names, advantages=(None, 0.5))
    assert lab.examined()[0] == []


def test_rows_that_the_log_does_not_know_or_tells_otherwise_are_missing(lab):
    first, second = lab.draw(1)
    lab.log.ended(1, {first: None})
    lab.rows(1, [first, second, "s000009.00000"], indices={first: 0})
    assert lab.examined()[0] == [
        f"{second} was trained in step 1 by the rollout rows, and not by the log, which says: open",
        "s000009.00000 was trained in step 1 by the rollout rows, and the log does not know it",
    ]
    lab.log.ended(1, {second: "no signal"})
    lab.rows(1, [first, second], indices={first: 1})
    assert lab.examined()[0] == [
        f"{first} is row ('here', 1) by the rollout rows, ('here', 0) by the log",
        f"{second} was trained in step 1 by the rollout rows, and not by the log, which says: ['no signal']",
    ]


def test_what_an_overlong_filter_left_out_has_rows_all_the_same(lab):
    first, second = lab.train(1, why={"s000001.00001": "algorithm.filter_overlong"})
    assert lab.examined() == ([], [], [])
    lab.rows(1, [first, second], indices={second: 5})
    assert lab.examined()[0] == [f"{second} is row ('here', 5) by the rollout rows, ('here', 1) by the log"]


def test_prompts_that_end_twice_are_double(lab):
    (first, _) = lab.train(1)
    lab.train(2, [])
    lab.rows(2, [first])
    with (lab.folder / FILE).open("a") as file:
        file.write(
            '{"event": "trained", "step": 2, "numbers": [0]}\n{"event": "left_out", "why": "x", "numbers": [1]}\n'
        )
    missing, double, _ = lab.examined()
    assert missing == [] and double == [
        "prompt 0 was trained in step 1 and trained in step 2", "prompt 1 was trained in step 1 and left out (x)",
        f"{first} was trained in 2 steps, by the rollout rows",
    ]  # fmt: skip
    assert prompt_log.examine(lab.folder).summary() == "2 drawn, 2 trained, 0 left out, 0 open, 0 missing, 3 double"


def test_numbers_that_are_skipped_were_never_drawn(lab):
    lab.train(1)
    with (lab.folder / FILE).open("a") as file:
        file.write('{"event": "drawn", "prompts": [[4, "here", 4, "s000002.00000"]]}\n')
        file.write('{"event": "finished", "number": 9, "attempts": 1}\n')
    assert lab.examined()[0] == [
        "prompt 9 is finished, and nobody has drawn it", "prompt 2 was never drawn", "prompt 3 was never drawn",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        ({"drawn": 4, "trained": 3, "open": [{"number": 3}]}, []),
        ({"drawn": 4, "trained": 3}, ["prompt 3 is open, though the checkpoint of step 2 was written behind it"]),
        ({"drawn": 3, "trained": 3}, []),
        ({"drawn": 5, "trained": 3, "open": [{"number": 3}]},
         ["up to step 2 4 prompts were drawn by the log, 5 by its checkpoint"]),
        ({"drawn": 4, "trained": 2, "open": [{"number": 3}]},
         ["up to step 2 3 prompts were trained by the log, 2 by its checkpoint"]),
    ],
)  # fmt: skip
def test_the_log_and_the_checkpoint_say_the_same_up_to_its_step(lab, told, missing):
    """Of 4 prompts 3 are trained in steps 1 and 2, and one is open. Then a prompt is trained in step 3."""
    lab.train(1)
    third, _ = lab.draw(2)
    lab.train(2, [third])
    if told["drawn"] < 5:
        lab.train(3, lab.draw(3, size=1))
    lab.saved = {"step": 2, "prompts": told}
    assert lab.examined() == (missing, [], [])
    lab.saved = {"step": 2}
    assert lab.examined() == ([], [], ["the newest checkpoint is of an older version, which kept no prompt log"])


def test_a_run_that_began_elsewhere_counts_what_was_before(tmp_path, monkeypatch):
    state = {"drawn": 6, "trained": 4, "left_out": 1}
    lab = Lab(tmp_path, monkeypatch, state=state, step=2)
    lab.train(3)
    lab.rows(1, ["unknown"])
    lab.rows(2, ["unknown"])
    lab.rows(4, ["s000003.00000"], advantages=(None,))
    assert lab.examined() == ([], [], []), "rows of steps before the log, or without a trained prompt behind it"
    assert prompt_log.examine(tmp_path).summary() == "8 drawn, 6 trained, 1 left out, 0 open, 0 missing, 0 double"
    lab.saved = {"step": 3, "prompts": {"drawn": 8, "trained": 6}}
    assert lab.examined() == ([], [], [])


def test_steps_between_trained_ones_whose_rows_nobody_logged_are_found(lab):
    lab.train(1)
    lab.train(3)
    lab.rows(2, ["other"])
    assert lab.examined()[0] == ["other was trained in step 2 by the rollout rows, and the log does not know it"]


def test_steps_without_rows_are_counted_in_one_note(tmp_path, monkeypatch):
    lab = Lab(tmp_path, monkeypatch)
    lab.log.close()
    lab.log = PromptLog(tmp_path, rows=False)
    for step in (1, 2):
        lab.train(step)
        (tmp_path / "rollouts" / f"step_00000{step}.jsonl").unlink()
    assert lab.examined() == ([], [], ["2 steps have no rollout rows to compare with (trainer.rollout_rows=off)"])


def test_validation_rows_are_no_training(lab):
    lab.train(1)
    (lab.folder / "rollouts" / "val_000001.jsonl").write_text('{"nothing": 1}\n')
    assert lab.examined() == ([], [], [])


def test_what_began_again_is_counted_by_its_cause(lab, capsys):
    first, second = lab.draw(1)
    lab.log.started("s000001", but={second})
    trajectories = [Trajectory(f"{first}.{k}", first, first, "e", counters={"retries": k}) for k in range(2)]
    lab.log.finished(TrajectoryGroup(first, first, trajectories))
    lab.log.finished(TrajectoryGroup(second, second, trajectories[:1]))
    lab.train(1, [first, second])
    status, lines = lab.says(capsys)
    assert status == 0 and lines[:-1] == [
        "1 prompts had conversations that were begun again, because their engine was lost",
        "1 prompts were in flight when the run ended or their weights were abandoned, and were started again",
    ]


@pytest.mark.parametrize("number", [10, 11, 13])
def test_ten_lines_of_a_kind_are_shown(lab, capsys, number):
    lab.draw(1, size=1)
    with (lab.folder / FILE).open("a") as file:
        for k in range(number):
            file.write(json.dumps({"event": "finished", "number": 100 + k, "attempts": 1}) + "\n")
    status, lines = lab.says(capsys)
    shown = [f"missing: prompt {100 + k} is finished, and nobody has drawn it" for k in range(10)]
    more = [f"missing: and {number - 10} more"] if number > 10 else []
    assert status == 1 and lines == [
        *shown,
        *more,
        f"1 drawn, 0 trained, 0 left out, 1 open, {number} missing, 0 double",
    ]
