"""`python -m verl_mt.prompt_log` over whole runs: finished, killed, filtered, changed by hand."""

from __future__ import annotations

import json

import pytest
import torch
from finished_runs import SMALL

from verl_mt import prompt_log
from verl_mt.config.compose import compose
from verl_mt.data.drawn_prompts import FILE, read_prompt_log
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
    """A copy of a finished run, to be changed."""
    return finished("plain")


def test_a_finished_run_holds(copied, capsys):
    assert last_line(capsys, copied) == (0, "8 drawn, 8 trained, 0 left out, 0 open, 0 missing, 0 double")
    prompts = read_prompt_log(copied).prompts.values()
    assert [p.trained_in for p in prompts] == [[1], [1], [2], [2], [3], [3], [4], [4]]
    assert all(p.starts == p.attempts == 1 for p in prompts)
    assert prompt_log.main([str(copied)]) == 0 and capsys.readouterr().out.count("\n") == 1


def test_rows_that_are_gone_are_missing(copied, capsys):
    file = copied / "rollouts/step_000002.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    gone = json.loads(lines[0])["prompt_id"]
    file.write_text("".join(line for line in lines if json.loads(line)["prompt_id"] != gone))
    assert prompt_log.main([str(copied)]) == 1
    out = capsys.readouterr().out
    assert f"({gone}) was trained in step 2 by the log, not by the rollout rows" in out
    assert out.splitlines()[-1].endswith("0 open, 1 missing, 0 double")


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
        state = torch.load(folder / "state.pt", weights_only=False)
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
@pytest.mark.parametrize("first", ["off", "jsonl"])
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
    run(folder, f"trainer.rollout_rows={'jsonl' if first == 'off' else 'off'}", "trainer.total_training_steps=2")
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
