"""Saved rollouts: inspected without verl_mt, edited, and trained on again."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from command_lab import FEW, NO_VALIDATION, VARIED, metrics_of, run_command, small_trainer
from row_formats import as_json_lines

from verl_mt.config.checks import check
from verl_mt.config.compose import compose
from verl_mt.data.batch import build_batch
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryGroup, TrajectoryRecord
from verl_mt.errors import ConfigError, DataError
from verl_mt.extensions.compat.debug_data import DebugData
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.trainer.rollout_files import RolloutFiles

QUICK = (
    *FEW,
    "trainer.total_training_steps=2",
    "trainer.deterministic=True",
    "trainer.progress=off",
)


def groups():
    """Two prompts, three trajectories, one of them of two records and one that failed."""
    made = []
    for prompt, names in (("p0", ("a", "b")), ("p1", ("c",))):
        trajectories = []
        for name in names:
            record = TrajectoryRecord()
            record.append_given([1, 2], kind="prompt", turn=0)
            record.append_sampled([7, 8], [-0.123456789, -1e-9], [3, 3], turn=1)
            trajectory = Trajectory(name, prompt, f"{prompt}/solver", name, "toy", 5, reward=1.0 / 3, source="toy")
            trajectory.stop_reason = StopReason.FINISHED
            trajectory.records = [record] if name != "b" else [record, *TrajectoryRecord.split(record, 3)][:2]
            trajectories.append(trajectory)
        made.append(TrajectoryGroup(prompt, prompt, trajectories, "toy", 5, "toy"))
    made[1].trajectories[0].stop_reason = StopReason.ERROR
    made[1].trajectories[0].reward = None
    return made


def data(folder):
    """(writer, reader) of the same files."""
    path = f"{folder}/rollout_{{rollout_id}}.pt"
    made = [DebugData(path, lambda ids: " ".join(map(str, ids)), replays=replays) for replays in (False, True)]
    assert made[1].save(0, groups()) is None
    return made


def batch_of(groups):
    return build_batch([t for g in groups for t in g.trajectories], pad_token_id=0)


@pytest.mark.cap("C80")
def test_a_dump_is_loaded_with_the_documented_keys_and_gives_the_same_batch(tmp_path):
    files, replay = data(tmp_path)
    assert files.save(0, groups()) == tmp_path / "rollout_0.pt"
    files.save("eval_0", groups())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rollout_0.pt", "rollout_eval_0.pt"]
    content = torch.load(tmp_path / "rollout_0.pt")
    assert content["rollout_id"] == 0
    first = content["samples"][0]
    assert (first.prompt, first.response, first.reward, first.loss_mask) == ("1 2", "7 8", 1.0 / 3, [1, 1])
    again = replay.load(0)
    assert [(g.prompt_id, len(g.trajectories), g.row_index) for g in again] == [("p0", 2, 5), ("p1", 1, 5)]
    before, after = batch_of(groups()), batch_of(again)
    for name in before.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        column, other = before[name], after[name]
        same = torch.equal(column, other) if isinstance(column, torch.Tensor) else list(column) == list(other)
        assert same, name


def test_rewards_and_masks_may_be_edited_between_dump_and_replay_and_tokens_may_not(tmp_path):
    files, replay = data(tmp_path)
    path = files.save(0, groups())

    def edit(name, value):
        content = torch.load(path)
        content["samples"][0][name] = value
        torch.save(content, path)

    edit("reward", 0.75)
    edit("loss_mask", [0, 1])
    edited = replay.load(0)[0].trajectories[0]
    assert edited.reward == 0.75 and edited.records[0].loss_mask == [0, 0, 0, 1]
    edit("loss_mask", [1, 1, 1])
    with pytest.raises(DataError, match="sample a: loss_mask may only clear"):
        replay.load(0)
    edit("tokens", [1, 2, 7, 9])
    with pytest.raises(DataError, match="sample a: tokens differ from what was sampled"):
        replay.load(0)


def test_a_missing_file_and_a_foreign_one_are_named(tmp_path):
    _, replay = data(tmp_path)
    with pytest.raises(DataError, match=r"no file .*rollout_3.pt for rollout 3"):
        replay.load(3)
    torch.save({"samples": [Sample().to_dict()]}, tmp_path / "rollout_0.pt")
    with pytest.raises(DataError, match="has no trajectories"):
        replay.load(0)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_run_directory_is_replayed_from_its_rows(tmp_path, form):
    files = RolloutFiles(tmp_path, str)
    files.training(1, groups(), None)
    files.close()
    if form == "jsonl":
        as_json_lines(tmp_path)
    replay = DebugData(str(tmp_path), str, replays=True)
    before, after = batch_of(groups()), batch_of(replay.load(0))
    assert all(torch.equal(before[name], after[name]) for name in ("input_ids", "rollout_log_probs", "rewards"))
    with pytest.raises(DataError, match=r"has no rollout rows of step 2. It is a run of fewer steps"):
        replay.load(1)


def test_paths_and_modes_that_cannot_work_are_refused_and_braces_need_no_quotes():
    config = compose(["trainer.debug_rollout_data=/x/rollout_{rollout_id}.pt"])
    assert config.trainer.debug_rollout_data == "/x/rollout_{rollout_id}.pt"
    for changes, text in (
        ({"debug_rollout_data": "/x/rollout.pt"}, "write {rollout_id} into it"),
        ({"debug_rollout_data": None, "debug_mode": "train_only"}, "it needs trainer.debug_rollout_data"),
        ({"debug_rollout_data": "/x/no_such_run", "debug_mode": "train_only"}, "name a run directory"),
    ):
        wrong = replace(config, trainer=replace(config.trainer, **changes))
        with pytest.raises(ConfigError, match=text):
            check(wrong)


def weights_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.workers.policy_module.parameters()])


@pytest.mark.slow
@pytest.mark.cap("C80")
def test_training_on_saved_rollouts_gives_the_weights_of_the_run_that_saved_them(tmp_path):
    path = f"{tmp_path}/dumps/rollout_{{rollout_id}}.pt"
    first = small_trainer(
        tmp_path / "a",
        *QUICK,
        VARIED,
        "data.val_max_samples=2",
        "trainer.export_at_end=False",
        f"trainer.debug_rollout_data={path}",
    )
    start = weights_of(first)
    first.fit()
    names = {p.name for p in (tmp_path / "dumps").iterdir()}
    assert {"rollout_0.pt", "rollout_1.pt", "rollout_eval_0.pt", "rollout_eval_2.pt"} <= names
    replay = small_trainer(
        tmp_path / "b",
        *QUICK,
        "trainer.export_at_end=False",
        f"trainer.debug_rollout_data={path}",
        "trainer.debug_mode=train_only",
    )
    replay.fit()
    assert torch.equal(weights_of(first), weights_of(replay)) and not torch.equal(start, weights_of(replay))
    rows = small_trainer(
        tmp_path / "c",
        *QUICK,
        *NO_VALIDATION,
        f"trainer.debug_rollout_data={tmp_path / 'a'}",
        "trainer.debug_mode=train_only",
    )
    rows.fit()
    assert torch.equal(weights_of(first), weights_of(rows)), "its rollout rows say the same"
    losses = [[line["actor/pg_loss"] for line in metrics_of(tmp_path / run) if "actor/pg_loss" in line] for run in "ab"]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert not any("val/accuracy" in line for line in metrics_of(tmp_path / "b"))


@pytest.mark.slow
@pytest.mark.cap("C80")
def test_rollout_only_saves_what_another_run_trains_on(tmp_path):
    path = f"{tmp_path}/rollout_{{rollout_id}}.pt"
    only = small_trainer(
        tmp_path / "a",
        *QUICK,
        *NO_VALIDATION,
        VARIED,
        f"trainer.debug_rollout_data={path}",
        "trainer.debug_mode=rollout_only",
    )
    start = weights_of(only)
    only.fit()
    assert torch.equal(start, weights_of(only))
    assert len(list(tmp_path.glob("rollout_*.pt"))) == 2
    replay = small_trainer(
        tmp_path / "b", *QUICK, *NO_VALIDATION, f"trainer.debug_rollout_data={path}", "trainer.debug_mode=train_only"
    )
    replay.fit()
    assert not torch.equal(start, weights_of(replay))


INSPECT = """
import sys, torch
data = torch.load(sys.argv[1])
for sample in data["samples"]:
    print(f"Prompt: {sample.prompt[:100]}...")
    print(f"Response: {sample.response[:200]}...")
    print(f"Reward: {sample.reward}")
    print(f"Loss mask: {sample.loss_mask}")
assert "verl_mt" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.cap("C80")
def test_the_documents_inspection_works_in_a_fresh_process(tmp_path):
    done = run_command(
        tmp_path,
        *QUICK,
        *NO_VALIDATION,
        "trainer.total_training_steps=1",
        f"trainer.debug_rollout_data={tmp_path}/rollout_{{rollout_id}}.pt",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    words = [sys.executable, "-c", INSPECT, str(tmp_path / "rollout_0.pt")]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("Prompt: <|im_start|>") == 4 and "Loss mask: [1," in shown.stdout
