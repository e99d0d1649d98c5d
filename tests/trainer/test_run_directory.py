"""Which directory a run uses, and when it resumes."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from verl_mt.config.schema import TrainerConfig
from verl_mt.errors import CheckpointError
from verl_mt.trainer.checkpoint import CheckpointStore
from verl_mt.trainer.run_directory import RunDirectory, other_directory, preview

CONFIG = {"data": {"seed": 0}, "trainer": {"seed": 0, "progress": "auto"}}


def open_run(tmp_path, config=CONFIG, **keys):
    return RunDirectory.open(TrainerConfig(default_local_dir=str(tmp_path / "run"), **keys), config)


def test_a_new_run_starts_in_its_directory(tmp_path):
    run = open_run(tmp_path)
    assert run.path == tmp_path / "run"
    assert run.resume_from is None
    assert (run.path / "config.yaml").exists()


def test_an_unfinished_run_is_resumed_from_its_newest_checkpoint(tmp_path):
    run = open_run(tmp_path)
    CheckpointStore(run.path / "checkpoints").save(4, {}, score=None)
    run.close()
    again = open_run(tmp_path)
    assert again.path == run.path
    assert again.resume_from.name == "step_000004"


def test_an_unfinished_run_whose_config_shows_what_is_hidden_now_goes_on(tmp_path):
    shown = {"reward": {"kwargs": {"grader": "Zx81Qk77vW23pL90", "n": 3}}}
    open_run(tmp_path, CONFIG | shown).close()
    hidden = {"reward": {"kwargs": {"grader": "***hidden***", "n": 3}}}
    assert open_run(tmp_path, CONFIG | hidden).path == tmp_path / "run"


def test_an_unfinished_run_without_a_checkpoint_starts_over_in_place(tmp_path):
    open_run(tmp_path).close()
    again = open_run(tmp_path)
    assert (again.path, again.resume_from) == (tmp_path / "run", None)


def test_after_a_finished_run_the_next_one_gets_a_number(tmp_path):
    run = open_run(tmp_path)
    run.finish()
    run.close()
    assert open_run(tmp_path).path == tmp_path / "run-2"


def test_a_run_that_is_still_training_is_left_alone(tmp_path):
    first = open_run(tmp_path)
    assert open_run(tmp_path).path == tmp_path / "run-2"
    first.close()


def test_a_changed_config_is_refused_with_its_difference(tmp_path):
    open_run(tmp_path).close()
    changed = {"data": {"seed": 7}, "trainer": {"seed": 0, "progress": "auto"}}
    with pytest.raises(CheckpointError, match=r"(?s)-  seed: 0.*\+  seed: 7"):
        open_run(tmp_path, changed)


def test_other_files_of_data_are_taken_where_the_key_asks_for_it_and_nothing_else_is(tmp_path):
    open_run(tmp_path).close()
    rows = {"train_files": "other.jsonl", "val_files": None, "train_max_samples": 5, "val_max_samples": 6}
    other = CONFIG | {"data": {"seed": 0, **rows}}
    with pytest.raises(CheckpointError, match=r"go on in these rows with trainer\.resume_mode=other_data, or start"):
        open_run(tmp_path, other)
    trainer = TrainerConfig(default_local_dir=str(tmp_path / "run"), resume_mode="other_data")
    assert preview(trainer, other).startswith(f"{tmp_path}/run, an unfinished run")
    open_run(tmp_path, other, resume_mode="other_data").close()
    more = other | {"data": {"seed": 7, **rows}}
    with pytest.raises(CheckpointError, match=r"(?s)-  seed: 0.*same command to resume it, or start a new run"):
        open_run(tmp_path, more, resume_mode="other_data")


def test_a_file_system_without_locks_is_named_with_the_key_that_gives_another(tmp_path, monkeypatch):
    open_run(tmp_path).close()

    def refuse(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("verl_mt.trainer.run_directory.fcntl.flock", refuse)
    trainer = TrainerConfig(default_local_dir=str(tmp_path / "run"))
    for look in (lambda: other_directory(trainer), lambda: preview(trainer, CONFIG), lambda: open_run(tmp_path)):
        with pytest.raises(CheckpointError, match=r"/run: .*No locks available. Choose another .*default_local_dir"):
            look()


def test_keys_that_change_nothing_computed_may_change(tmp_path):
    open_run(tmp_path).close()
    shown = {"data": {"seed": 0}, "trainer": {"seed": 0, "progress": "off"}}
    assert open_run(tmp_path, shown).path == tmp_path / "run"


def test_how_ranks_hold_the_policy_may_change_but_not_in_a_deterministic_run(tmp_path):
    def config(deterministic: bool, ranks: int, **actor):
        trainer = {"seed": 0, "deterministic": deterministic, "n_workers_per_node": ranks}
        return CONFIG | {"trainer": trainer, "actor_rollout_ref": {"actor": {"grad_clip": 1.0, **actor}}}

    before = {"fsdp_size": None, "ulysses_sequence_parallel_size": 1, "param_offload": False}
    after = {"fsdp_size": 8, "ulysses_sequence_parallel_size": 4, "param_offload": True}
    open_run(tmp_path / "a", config(False, 2, **before)).close()
    assert open_run(tmp_path / "a", config(False, 1, **after)).path == tmp_path / "a" / "run"
    open_run(tmp_path / "b", config(True, 2, **before)).close()
    with pytest.raises(CheckpointError, match=r"fsdp_size: 8"):
        open_run(tmp_path / "b", config(True, 2, **after))
    with pytest.raises(CheckpointError, match=r"n_workers_per_node: 1"):
        open_run(tmp_path / "b", config(True, 1, **before))


def test_disable_starts_anew_beside_an_unfinished_run(tmp_path):
    open_run(tmp_path).close()
    assert open_run(tmp_path, resume_mode="disable").path == tmp_path / "run-2"


def test_a_foreign_folder_is_not_touched(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not a run directory"):
        open_run(tmp_path)


def test_a_run_of_an_older_version_goes_on_where_the_new_keys_have_their_defaults(tmp_path):
    open_run(tmp_path).close()
    newer = {"data": {"seed": 0, "shuffle": True}, "trainer": {"seed": 0, "progress": "auto"}}
    again = open_run(tmp_path, newer)
    again.close()
    assert again.path == tmp_path / "run"
    newer["data"]["shuffle"] = False
    with pytest.raises(CheckpointError, match=r"-  shuffle: true\n\+  shuffle: false"):
        open_run(tmp_path, newer)


def test_a_run_killed_before_it_wrote_its_config_is_fresh(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("")
    assert open_run(tmp_path).path == tmp_path / "run"


def test_resume_path_loads_a_named_checkpoint_into_a_new_directory(tmp_path):
    path = CheckpointStore(tmp_path / "old" / "checkpoints").save(9, {}, score=None)
    run = open_run(tmp_path, resume_mode="resume_path", resume_from_path=str(path))
    assert run.resume_from == path
    with pytest.raises(CheckpointError, match="resume_from_path"):
        open_run(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "nowhere"))


def taken_instead(tmp_path, **keys):
    return other_directory(TrainerConfig(default_local_dir=str(tmp_path / "run"), **keys))


def test_which_other_directory_is_taken_is_known_before_anything_is_loaded_and_why(tmp_path):
    assert taken_instead(tmp_path) is None
    first = open_run(tmp_path)
    said = taken_instead(tmp_path)
    assert said.startswith(f"{tmp_path}/run is in use by another trainer (process {os.getpid()} on ")
    assert said.endswith(f": this run takes {tmp_path}/run-2")
    first.close()
    assert taken_instead(tmp_path) is None
    said = taken_instead(tmp_path, resume_mode="disable")
    assert said == f"{tmp_path}/run holds another run (trainer.resume_mode=disable): this run takes {tmp_path}/run-2"
    first.finish()
    assert taken_instead(tmp_path) == f"{tmp_path}/run holds a finished run: this run takes {tmp_path}/run-2"


@pytest.mark.parametrize(
    "content", [b"{", b"5", b"- a\n- b\n", b"trainer: 5", b"\xff\xfe\x00", b"a: \x00", b"!!python/object:os.x {}"]
)
def test_a_config_that_cannot_be_read_is_named_not_compared(tmp_path, content):
    open_run(tmp_path).close()
    (tmp_path / "run" / "config.yaml").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"run/config\.yaml of an unfinished run cannot be read .*resume_mode=disable"
    ):
        open_run(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        preview(TrainerConfig(default_local_dir=str(tmp_path / "run")), CONFIG)
    assert open_run(tmp_path, resume_mode="disable").path == tmp_path / "run-2"


def test_a_file_named_checkpoints_is_refused_and_the_lock_given_back(tmp_path):
    open_run(tmp_path).close()
    (tmp_path / "run" / "checkpoints").write_text("mine")
    with pytest.raises(CheckpointError, match="checkpoints is a file"):
        open_run(tmp_path)
    (tmp_path / "run" / "checkpoints").unlink()
    assert open_run(tmp_path).path == tmp_path / "run"


def test_a_disk_too_full_for_the_config_leaves_no_directory(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="No space left"):
        patched.setattr(Path, "write_bytes", refuse)
        open_run(tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ahead", "correction", "goes_on"),
    [(2, {"rollout_is": "token"}, True), (2, {"rollout_rs": "token"}, False), (0, {"rollout_is": "token"}, False)],
)
def test_a_run_of_an_older_version_goes_on_with_the_correction_that_followed_there(
    tmp_path, ahead, correction, goes_on
):
    """It wrote an empty correction, and took one per token where steps were sampled ahead."""
    trainer = {"seed": 0, "progress": "auto", "max_staleness": ahead}
    older, newer = (CONFIG | {"trainer": trainer, "algorithm": {"rollout_correction": c}} for c in ({}, correction))
    open_run(tmp_path, older).close()
    with contextlib.nullcontext() if goes_on else pytest.raises(CheckpointError, match="rollout_correction"):
        open_run(tmp_path, newer).close()


@pytest.mark.timeout(60)
def test_a_fifo_in_place_of_a_file_is_waited_for_by_nobody(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / ".config.yaml")
    with pytest.raises(CheckpointError, match="not a run directory"):
        open_run(tmp_path)
    (run / ".config.yaml").unlink()
    open_run(tmp_path).close()
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    with pytest.raises(CheckpointError, match=r"config\.yaml is a FIFO"):
        open_run(tmp_path)
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    with pytest.raises(CheckpointError, match="cannot make or read the run directory"):
        open_run(tmp_path)
