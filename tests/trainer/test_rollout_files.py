"""What a run writes of its rollouts is whole or not there, and never in the way."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
import warm_start
from command_lab import (
    FEW,
    NO_VALIDATION,
    VARIED,
    command,
    environment,
    interrupt_after,
    metrics_of,
    rows_of,
    small_trainer,
)
from row_formats import as_json_lines
from test_debug_data import groups

from verl_mt import prompt_log
from verl_mt.config.compose import compose
from verl_mt.data import batch as col
from verl_mt.data.columnar_rows import seal
from verl_mt.data.row_files import read_rows, row_files, rows_of_step
from verl_mt.data.run_files import read_token_texts, trajectory_to_row
from verl_mt.data.temporary_files import sweep
from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.report.collect import collect
from verl_mt.trainer.rollout_files import RolloutFiles


def trained(made):
    """The batch of some groups after an update: a row without old log-probs, a token that was clipped."""
    batch = col.build_batch([t for g in made for t in g.trajectories], pad_token_id=0)
    batch[col.ADVANTAGES] = torch.randn(batch[col.INPUT_IDS].shape) * batch[col.LOSS_MASK]
    batch[col.OLD_LOG_PROBS] = torch.randn(batch[col.INPUT_IDS].shape)
    batch[col.OLD_LOG_PROBS][1] = float("nan")
    batch[col.CLIPPED] = batch[col.LOSS_MASK].float()
    return batch


def written(folder, made, batch):
    files = RolloutFiles(folder, str)
    files.training(3, made, batch)
    files.validation("val_greedy", 3, made)
    files.close()
    assert [(f.split, f.format) for f in row_files(folder)] == [("train", "parquet"), ("val_greedy", "parquet")]
    return [list(read_rows(f.path)) for f in row_files(folder)]


def test_a_file_holds_the_rows_of_its_trajectories_sealed_or_not(tmp_path):
    made = groups()
    batch = trained(made)
    rows = written(tmp_path / "plain", made, batch)
    computed = col.per_record(batch)
    for row, t in zip(rows[0], (t for g in made for t in g.trajectories), strict=True):
        of = [computed.get((t.trajectory_id, k), {}) for k in range(len(t.records))]
        names = ("advantages", "old_log_probs", "clipped")
        assert row == trajectory_to_row(t, step=3, **{name: [one.get(name) for one in of] for name in names})
    assert rows[1] == [trajectory_to_row(t, step=3) for g in made for t in g.trajectories]
    assert any(record.get("clipped") for row in rows[0] for record in row["records"])
    made[0].sealed = seal(made[0].trajectories)
    for t in made[0].trajectories:  # a trainer needs no text of what came from another process
        t.messages, t.tool_calls, t.turn_texts = [{"role": "user", "content": "not what was sealed"}], [{"a": 1}], ["x"]
    assert written(tmp_path / "sealed", made, batch) == rows
    assert read_token_texts(tmp_path / "plain") == {k: str(k) for k in (1, 2, 7, 8)}


def test_equal_rollouts_are_equal_files_and_replace_those_of_an_earlier_version(tmp_path):
    made = groups()
    batch = trained(made)
    for name in "ab":
        written(tmp_path / name, made, batch)
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / name / "rollouts").iterdir()} for name in "ab")
    assert one == other and sorted(one) == ["step_000003.parquet", "val_greedy_000003.parquet"]
    as_json_lines(tmp_path / "a")
    written(tmp_path / "a", made, batch)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a" / "rollouts").iterdir()} == one


def test_what_the_thread_cannot_write_is_said_by_the_next_call(tmp_path):
    (tmp_path / "rollouts" / "step_000001.parquet").mkdir(parents=True)
    files = RolloutFiles(tmp_path, str)
    files.training(1, groups(), None)
    with pytest.raises(CheckpointError, match=r"cannot write .*step_000001\.parquet"):
        files.flush()
    files.training(2, groups(), None)
    files.close()
    assert rows_of_step(tmp_path, 2) is not None
    again = RolloutFiles(tmp_path, str)
    again.training(1, groups(), None)
    with pytest.raises(CheckpointError, match=r"step_000001\.parquet"):
        for step in range(2, 6):  # at most two wait, so that the third asks after the first
            again.training(step, groups(), None)
    again.close()


def test_a_process_that_is_killed_while_it_writes_leaves_no_file_that_counts(tmp_path):
    pid = os.fork()
    if pid == 0:
        os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        files = RolloutFiles(tmp_path, str)
        files.training(1, groups(), None)
        files.flush()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert [p.suffix for p in (tmp_path / "rollouts").iterdir()] == [".tmp"] and row_files(tmp_path) == []
    sweep(tmp_path)
    written(tmp_path, groups(), None)
    assert [p.name for p in sorted((tmp_path / "rollouts").iterdir())] == [
        "step_000003.parquet", "val_greedy_000003.parquet",
    ]  # fmt: skip


def without_times(rows):
    """What the clock says of a call is in its counters and in the call itself."""
    return [{k: v for k, v in row.items() if k not in ("time_spans", "counters", "tool_calls")} for row in rows]


SAME = (
    *NO_VALIDATION, *FEW, VARIED, "actor_rollout_ref.rollout.response_length=64",
    "actor_rollout_ref.rollout.temperature=1", "trainer.deterministic=True", "trainer.total_training_steps=2",
    "trainer.save_freq=1",
)  # fmt: skip
"""With calls of the tool."""


@pytest.mark.slow
def test_equal_runs_write_equal_rows_also_where_one_began_with_an_earlier_version(tmp_path):
    for name in "ab":
        small_trainer(tmp_path / name, *SAME).fit()
    broken = small_trainer(tmp_path / "c", *SAME, "trainer.rollout_rows=True")
    interrupt_after(broken, 1)
    broken.fit()
    as_json_lines(tmp_path / "c")
    small_trainer(tmp_path / "c", *SAME).fit()
    formats = [[f.format for f in row_files(tmp_path / name)] for name in "abc"]
    assert formats == [["parquet"] * 2, ["parquet"] * 2, ["jsonl", "parquet"]]
    for step in (1, 2):
        a, b, c = (without_times(rows_of(tmp_path / name, step)) for name in "abc")
        assert a == b == c and any(any(r["advantages"] or ()) for row in a for r in row["records"])
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == (tmp_path / "b" / "metrics.jsonl").read_bytes()
    assert prompt_log.main([str(tmp_path / "c")]) == 0
    assert [part["step"] for part in collect([str(tmp_path / "c")], max_rollouts=100).runs[0]["parts"]] == [1, 2]


def test_lines_of_json_were_removed_and_the_refusal_names_the_command():
    with pytest.raises(ConfigError, match=r"'jsonl' was removed.*verl_mt\.report\.rows RUN"):
        compose(["trainer.rollout_rows=jsonl"])
    for value in ("auto", "parquet", "True"):
        assert compose([f"trainer.rollout_rows={value}"]).trainer.rollout_rows == "parquet"


@pytest.mark.slow
def test_a_file_that_grows_beyond_the_limit_ends_the_run_with_one_line(tmp_path):
    words = command(
        f"trainer.default_local_dir={tmp_path}/run", *NO_VALIDATION,
        "trainer.save_freq=-1", "trainer.total_training_steps=1", "data.train_batch_size=16",
        "actor_rollout_ref.rollout.n=16", "actor_rollout_ref.rollout.response_length=16",
        f"external_plugins=[{tmp_path}/limit.py]",
    )  # fmt: skip

    limit = tmp_path / "limit.py"
    limit.write_text("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (24_000, 24_000))\n")
    ended = warm_start.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stdout + ended.stderr
    (error,) = (line for line in ended.stderr.splitlines() if line.startswith("error:"))
    assert "step_000001.parquet: File too large" in error
    assert not list((tmp_path / "run" / "rollouts").glob("*"))
    limit.write_text("")
    again = warm_start.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1] and len(row_files(tmp_path / "run")) == 1
    printed = warm_start.run(
        [sys.executable, "-m", "verl_mt", "rows", str(tmp_path / "run"), "--step", "1"],
        capture_output=True,
        env=environment(),
    )
    assert printed.stdout.count(b"\n") == len(rows_of(tmp_path / "run", 1)) == 256
