"""Trains an environment for two steps with the shipped model, and looks at every row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_mt.config.compose import compose
from verl_mt.data.row_files import read_rows, row_files
from verl_mt.trainer.build import build_trainer

RO = "actor_rollout_ref.rollout"
SMALL = (
    "data.train_files=verl_mt.environments.seeds:rows", "data.val_files=null", "data.train_batch_size=2", f"{RO}.n=2",
    f"{RO}.tool_kwargs.tools_config_file=null", "trainer.total_training_steps=2", "trainer.logger=[]",
    "trainer.export_at_end=False", "trainer.save_freq=-1", "trainer.num_threads=1", "data.max_prompt_length=1500",
    f"{RO}.response_length=400", f"{RO}.max_tokens_per_turn=16", f"{RO}.max_model_len=1950",
)  # fmt: skip


def train_two_steps(folder: Path, *words: str, engine: Callable[[Any], Any] | None = None) -> list[dict[str, Any]]:
    """Train with these words behind the usual ones.

    Args:
        folder: for the run directory.
        words: of the command.
        engine: configuration -> an engine in the place of the run's own.

    Returns:
        The rollout rows: none failed, each has a reward, and exactly its sampled ids are trained.
    """
    config = compose([*SMALL, f"trainer.default_local_dir={folder / 'run'}", *words])
    trainer = build_trainer(config, engine=None if engine is None else engine(config))
    try:
        trainer.fit()
    finally:
        trainer.close()
    rows = [row for file in row_files(folder / "run") for row in read_rows(file.path)]
    assert len(rows) == 8 and not [row["error"] for row in rows if row["error"]]
    for row in rows:
        assert row["reward"] is not None and row["records"]
        for record in row["records"]:
            assert record["loss_mask"] == record["sampled"] and sum(record["sampled"]) > 0
            assert record["advantages"] is not None
    return rows
