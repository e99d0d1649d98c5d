"""A run goes on in the rows that it was started with, and in others only if it is told to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_lab import NO_VALIDATION, small_trainer

from verl_mt.errors import CheckpointError
from verl_mt.tiny.problems import rows as problems
from verl_mt.trainer import checkpoint
from verl_mt.trainer.checkpoint import CheckpointStore

pytestmark = pytest.mark.slow  # whole runs


def write(file: Path, rows) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_seed(seed: int, n: int = 16, split: str = "train"):
    return problems(num_rows=n, seed=seed, split=split)


@pytest.fixture
def start(tmp_path):
    """Starts a run of `tmp_path`'s files, or resumes it; makes a checkpoint at first."""
    write(tmp_path / "train.jsonl", of_seed(0))
    write(tmp_path / "val.jsonl", of_seed(0, 4, "val"))

    def start(*overrides, run="run"):
        files = (f"data.train_files={tmp_path}/train.jsonl", f"data.val_files={tmp_path}/val.jsonl")
        trainer = small_trainer(tmp_path / run, *files, "trainer.export_at_end=False", *overrides)
        found = [row.prompt for row in trainer.sampler.next_batch(2)]
        if trainer.step_number == 0:
            trainer.step_number = 1
            trainer._save()
        trainer.close()
        trainer.log.run.close()
        return found

    start.first = start()
    return start


def test_other_rows_of_the_same_number_are_refused_with_the_first_that_differs(start, tmp_path):
    write(tmp_path / "train.jsonl", [*of_seed(0)[:5], *of_seed(1, 11)])
    with pytest.raises(CheckpointError) as error:
        start()
    said = str(error.value)
    assert "step_000001 was written with other rows. data.train_files: train (" in said
    assert "row 6 is the first that differs" in said and "trainer.resume_mode=other_data" in said
    write(tmp_path / "train.jsonl", of_seed(0))
    start()


def test_an_explicit_key_goes_on_in_them_at_the_same_place(start, tmp_path, caplog):
    assert start() == [row["prompt"] for row in _order(tmp_path)[2:4]]
    write(tmp_path / "train.jsonl", of_seed(1, 20))
    with pytest.raises(CheckpointError, match="20 rows, then 16"):
        start()
    assert start("trainer.resume_mode=other_data") != start.first
    assert "goes on in these" in caplog.text and "20 rows, then 16" in caplog.text


def test_the_rows_of_another_file_are_taken_with_the_same_key(start, tmp_path, caplog):
    write(tmp_path / "more.jsonl", of_seed(1, 20))
    other = f"data.train_files={tmp_path}/more.jsonl"
    with pytest.raises(CheckpointError, match=r"trainer\.resume_mode=other_data"):
        start(other)
    assert start(other, "trainer.resume_mode=other_data") != start.first
    assert "goes on in these" in caplog.text and "now it has more" in caplog.text


def test_the_same_key_takes_a_named_checkpoint_into_a_new_directory(start, tmp_path):
    write(tmp_path / "train.jsonl", of_seed(1, 20))
    saved = f"trainer.resume_from_path={tmp_path}/run/checkpoints/step_000001"
    with pytest.raises(CheckpointError, match="20 rows, then 16"):
        start("trainer.resume_mode=resume_path", saved, run="other")
    start("trainer.resume_mode=other_data", saved, run="other")
    assert (tmp_path / "other" / "config.yaml").exists()


def _order(tmp_path):
    from verl_mt.data.dataset import load_rows
    from verl_mt.data.sampler import ShuffledSampler

    sources = load_rows(f"{tmp_path}/train.jsonl", split="train")
    return [row.raw for row in ShuffledSampler(sources).next_batch(4)]


def test_other_rows_to_validate_on_are_refused_in_the_same_directory_only(start, tmp_path):
    write(tmp_path / "val.jsonl", of_seed(1, 4, "val"))
    with pytest.raises(CheckpointError, match=r"data\.val_files: val .*row 1 is the first"):
        start()
    saved = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run/checkpoints/step_000001")
    start(*saved, run="other")


def test_a_checkpoint_of_before_fingerprints_goes_on_and_says_that_nothing_was_compared(start, tmp_path, caplog):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    state = checkpoint.load(store.latest())
    del state["rows"]
    store.save(1, state, score=None)
    write(tmp_path / "train.jsonl", of_seed(1))
    start()
    assert caplog.text.count("does not say which rows it was trained on") == 1


def test_a_generator_that_makes_other_rows_is_refused(tmp_path, monkeypatch):
    generator = (f"data.train_files={__name__}:changing", "data.train_max_samples=8", *NO_VALIDATION)
    trainer = small_trainer(tmp_path / "run", *generator)
    trainer._save()
    trainer.close()
    trainer.log.run.close()
    monkeypatch.setitem(_OFFSET, 0, 5)
    with pytest.raises(CheckpointError, match=f"changing \\({__name__}:changing, 8 rows\\): row 1 is the first"):
        small_trainer(tmp_path / "run", *generator)


_OFFSET = {0: 0}


def changing(num_rows, seed, split):
    return problems(num_rows=num_rows, seed=seed + _OFFSET[0], split=split)


def test_a_damaged_newest_checkpoint_is_refused_with_the_way_to_the_one_before(start, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    CheckpointStore(folder).save(2, checkpoint.load(folder / "step_000001") | {"step": 2}, score=None)
    content = bytearray((folder / "step_000002" / "state.pt").read_bytes())
    content[len(content) // 2] ^= 4
    (folder / "step_000002" / "state.pt").write_bytes(content)
    assert torch.load(folder / "step_000002" / "state.pt", weights_only=True), "torch sees nothing"
    with pytest.raises(CheckpointError, match=rf"000002/state\.pt is damaged.*newest intact .* {folder}/step_000001"):
        start()
    keys = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/step_000001")
    start(*keys, run="beside")


def test_what_a_kill_left_goes_at_the_next_start(start, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    for name in (".hf.abc.tmp", "collapse/.step_000001.tmp", "rollouts/.step_000002.jsonl.abc.tmp"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in (".gone-step_000000", ".partial-step_000002"):
        (folder / name / "actor").mkdir(parents=True)
        (folder / name / "actor" / "__0_0.distcp").write_bytes(b"half")
    start()
    assert [p.name for p in folder.iterdir()] == ["step_000001"]
    assert not list((tmp_path / "run").rglob(".*.tmp"))
