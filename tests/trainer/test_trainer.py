"""The trainer's loop: which checkpoint is the best, when it validates, what ends it."""

from __future__ import annotations

import json

import pytest
from command_lab import NO_VALIDATION, fit, metrics_of, small_trainer

from verl_mt.data.dataset import DataRow
from verl_mt.data.sampler import ShuffledSampler
from verl_mt.errors import ConfigError, DataError
from verl_mt.tiny.problems import rows as make_rows
from verl_mt.trainer import checkpoint, ppo_trainer

TINY_STEPS = (
    "data.train_batch_size=2",
    "data.val_max_samples=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.response_length=16",
    "actor_rollout_ref.rollout.val_kwargs.greedy_too=False",
    "trainer.export_at_end=False",
    "trainer.progress=off",
)
"""Steps that cost next to nothing: what they sample does not matter."""


def test_the_best_checkpoint_is_one_that_was_validated(tmp_path, monkeypatch):
    accuracies = iter([0.1, 0.9, 0.5])  # before training, after steps 3 and 5
    monkeypatch.setattr(ppo_trainer, "validation_metrics", lambda groups, suffix: {"val/accuracy": next(accuracies)})
    run = tmp_path / "run"
    trainer = small_trainer(
        run,
        *TINY_STEPS,
        "trainer.total_training_steps=5",
        "trainer.test_freq=3",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
    )
    trainer.fit()
    kept = {path.name: checkpoint.read_meta(path)["score"] for path in trainer.checkpoints.all()}
    assert kept == {"step_000003": 0.9, "step_000005": 0.5}
    assert trainer.checkpoints.best().name == "step_000003"


def test_val_only_validates_the_checkpoint_it_is_given(tmp_path):
    fit(tmp_path / "run", *TINY_STEPS, "trainer.total_training_steps=2", "data.val_files=null")
    saved = tmp_path / "run" / "checkpoints" / "step_000002"
    lines = fit(
        tmp_path / "validated",
        *TINY_STEPS,
        "trainer.val_only=True",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={saved}",
    )
    assert [line["step"] for line in lines] == [2]
    assert "val/accuracy" in lines[0]
    assert not (tmp_path / "validated" / "checkpoints").exists()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_without_anything_left_to_do_ends_well(tmp_path, steps):
    overrides = (*TINY_STEPS, *NO_VALIDATION, f"trainer.total_training_steps={steps}")
    small_trainer(tmp_path / "run", *overrides).fit()
    if steps:
        assert len(metrics_of(tmp_path / "run")) == steps
        saved = tmp_path / "run" / "checkpoints" / f"step_{steps:06d}"
        again = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
        small_trainer(tmp_path / "again", *overrides, *again).fit()
        assert (tmp_path / "again" / "FINISHED").exists()
        assert not (tmp_path / "again" / "metrics.jsonl").exists()
    assert (tmp_path / "run" / "FINISHED").exists()


TOOLS = "actor_rollout_ref.rollout.tool_kwargs.tools_config_file"


class Inventive(ShuffledSampler):
    """The first `times` batches begin with a row of its own: `words` words, of `data_source`."""

    def __init__(self, sources, *, words=1000, times=1, data_source="verl_mt/arithmetic", **keys):
        super().__init__(sources, **keys)
        self.made = DataRow([{"role": "user", "content": "long " * words}], data_source, "1", index=0, file="invented")
        self.times = times

    def next_batch(self, n):
        self.times -= 1
        return super().next_batch(n) if self.times < 0 else [self.made, *super().next_batch(n - 1)]


def with_sampler(**kwargs) -> tuple[str, ...]:
    given = ",".join(f"{k}:{v}" for k, v in kwargs.items())
    return (f"data.sampler={__name__}:Inventive", f"data.sampler_kwargs={{{given}}}")


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_left_out_or_cut_are_metrics_of_their_own_split(tmp_path):
    train, val = (make_rows(num_rows=6, seed=0, split=split) for split in ("train", "val"))
    train[1]["prompt"][-1]["content"] *= 100
    val[0]["prompt"][-1]["content"] *= 100
    val[2]["prompt"][-1]["content"] *= 100
    files = (
        f"data.train_files={jsonl(tmp_path / 'train.jsonl', train)}",
        f"data.val_files={jsonl(tmp_path / 'val.jsonl', val)}",
        "data.val_max_samples=-1",
        "trainer.total_training_steps=1",
    )
    before, after = fit(tmp_path / "left_out", *TINY_STEPS, *files)
    assert before["val/filtered_prompts"] == after["val/filtered_prompts"] == 2
    assert "data/filtered_prompts" not in before
    assert (after["data/filtered_prompts"], after["data/truncated_prompts"]) == (1, 0)
    cut = ("data.filter_overlong_prompts=False", "data.truncation=left")
    _, after = fit(tmp_path / "cut", *TINY_STEPS, *files, *cut)
    assert (after["data/filtered_prompts"], after["data/truncated_prompts"]) == (0, 1)
    assert (after["val/filtered_prompts"], after["val/truncated_prompts"]) == (0, 2)


def test_a_row_that_a_sampler_made_too_long_is_counted_and_another_drawn(tmp_path):
    overrides = (*TINY_STEPS, *NO_VALIDATION, "trainer.total_training_steps=1")
    with pytest.raises(DataError, match=r"data\.sampler gave \d+ rows, of which only 1"):
        fit(tmp_path / "endless", *overrides, *with_sampler(times=100))
    (line,) = fit(tmp_path / "run", *overrides, *with_sampler())
    assert (line["rollout/trajectories"], line["data/filtered_prompts"]) == (4, 1)


def test_a_row_that_a_sampler_made_needs_a_reward(tmp_path):
    overrides = (*TINY_STEPS, *NO_VALIDATION, *with_sampler(words=1, data_source="nobody/knows"))
    with pytest.raises(ConfigError, match=r"(?s)invented, row 0.*nobody/knows|nobody/knows.*invented, row 0"):
        fit(tmp_path / "run", *overrides)


def test_a_person_is_told_what_the_rows_carry_in_vain(tmp_path, capsys):
    rows = make_rows(num_rows=4, seed=0, split="train")
    for row in rows[:3]:
        row["extra_info"]["interaction_kwargs"] = {"name": "gsm8k"}
    overrides = (
        *TINY_STEPS,
        *NO_VALIDATION,
        f"data.train_files={jsonl(tmp_path / 'rows.jsonl', rows)}",
        "trainer.logger=[console]",
        f"{TOOLS}=null",
    )
    small_trainer(tmp_path / "run", *overrides).close()
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("3 row(s) name an interaction (interaction_kwargs.name): ignored") == 1
    assert "multi_turn.enable" not in said
    small_trainer(tmp_path / "other", *overrides, "actor_rollout_ref.rollout.multi_turn.enable=True").close()
    said = " ".join(capsys.readouterr().out.split())
    assert "neither tools nor an interaction are configured: every trajectory is one assistant turn" in said
