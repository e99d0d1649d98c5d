"""Runs whose training files are not loaded: the same run, and what is wrong with a row is known when it is drawn."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from command_lab import NO_VALIDATION, fit, metrics_of, small_trainer
from tables import before_release

from verl_mt.config.compose import compose
from verl_mt.data.large_files import LargeRows
from verl_mt.data.sampler import ShuffledSampler
from verl_mt.errors import CheckpointError, DataError
from verl_mt.extensions.inspection.doctor.checks import CHECKS, examine
from verl_mt.tiny.problems import rows as problems
from verl_mt.trainer.build_data import open_train_rows

pytestmark = pytest.mark.slow  # whole runs

STEPS = (
    *NO_VALIDATION,
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.response_length=4",
    "trainer.deterministic=True",
    "trainer.save_freq=100",
    "data.eager_rows=0",
)


def rows(n=16):
    return problems(num_rows=n, seed=0, split="train")


def parquet(path, content) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path, row_group_size=4)
    return f"data.train_files={path}"


def jsonl(path, content) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return f"data.train_files={path}"


def order(file, n) -> list[int]:
    """The numbers of the rows that a run draws first."""
    sources = open_train_rows(compose([file, *STEPS]))
    return [row.index for row in ShuffledSampler(sources).next_batch(n)]


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_it_is_the_run_that_loads_them_bit_for_bit(tmp_path, write):
    file = write(tmp_path / f"a.{write.__name__}", rows())
    large = fit(tmp_path / "large", *STEPS, file)
    assert len(large) == 3 and large == fit(tmp_path / "loaded", *STEPS, file, "data.eager_rows=16")


def test_what_is_too_long_is_skipped_when_drawn_and_counted_in_that_step_and_that_is_said_once(tmp_path, capsys):
    content = rows()
    third = order(jsonl(tmp_path / "a.jsonl", content), 4)[2]
    content[third]["prompt"][-1]["content"] *= 100
    trainer = small_trainer(tmp_path / "run", *STEPS, jsonl(tmp_path / "a.jsonl", content), "trainer.logger=[console]")
    assert trainer.plan.total_steps == 3 and isinstance(trainer.sampler.sources[0].rows, LargeRows)
    trainer.fit()
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("16 training rows lie in files that are not loaded") == 1
    assert [line["data/filtered_prompts"] for line in metrics_of(tmp_path / "run")] == [0, 1, 0]
    assert [line["rollout/trajectories"] for line in metrics_of(tmp_path / "run")] == [4, 4, 4]
    assert trainer.sampler.position == 7


@pytest.mark.parametrize("fault", ["prompt", "reward", before_release("tools")])
def test_a_bad_row_stops_the_run_by_its_name_and_the_run_goes_on_without_it(tmp_path, fault):
    content = [{**row, "agent_name": "tool_agent"} for row in rows(40)]
    # Beyond the first rows, which are looked at before the first step.
    place = next(k for k, index in enumerate(order(jsonl(tmp_path / "a.jsonl", content), 40)) if k > 3 and index >= 16)
    bad = order(jsonl(tmp_path / "a.jsonl", content), 40)[place]
    content[bad] |= {"prompt": {"prompt": 5}, "reward": {"data_source": "who"}, "tools": {"agent_name": "x"}}[fault]
    step = place // 2
    keys = (*STEPS, jsonl(tmp_path / "a.jsonl", content), f"trainer.total_training_steps={step + 2}")
    run = tmp_path / "run"
    with pytest.raises(DataError, match=rf"(?s)a\.jsonl, row {bad + 1}.*data\.on_bad_row=skip: the same command then"):
        fit(run, *keys)
    assert len(metrics_of(run)) == step
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step_{step:06d}"]
    lines = fit(run, *keys, "data.on_bad_row=skip")
    counted = [line.get("data/bad_rows") for line in lines]
    assert counted == [*[None] * step, 1, 0] and [line["rollout/trajectories"] for line in lines] == [4] * (step + 2)
    whole = fit(tmp_path / "whole", *keys, "data.on_bad_row=skip")
    assert [{k: v for k, v in line.items() if k != "data/bad_rows"} for line in whole] == [
        {k: v for k, v in line.items() if k != "data/bad_rows"} for line in lines
    ]


def test_bad_rows_are_left_out_and_counted_also_where_all_are_loaded(tmp_path, caplog):
    content = rows()
    content[3]["prompt"] = 5
    content[4]["data_source"] = "who"
    keys = (*STEPS, jsonl(tmp_path / "a.jsonl", content), "data.eager_rows=100", "trainer.total_training_steps=8")
    with pytest.raises(DataError, match=r"a\.jsonl, row 4, column prompt"):
        fit(tmp_path / "stops", *keys)
    lines = fit(tmp_path / "run", *keys, "data.on_bad_row=skip")
    # Row 4 is known before the first step, row 5 has no reward and is met once in an epoch.
    assert sorted(line["data/bad_rows"] for line in lines) == [1] * (len(lines) - 1) + [2]
    assert "left out (data.on_bad_row=skip)" in caplog.text and "row 4" in caplog.text and "'who'" in caplog.text


def test_rows_that_are_all_bad_are_an_error_at_once(tmp_path):
    content = [{**row, "prompt": 5} for row in rows(20)]
    keys = (*STEPS, jsonl(tmp_path / "a.jsonl", content))
    with pytest.raises(DataError, match=r"row 1, column prompt"):
        fit(tmp_path / "run", *keys)
    with pytest.raises(DataError, match=r"row 1, column prompt.*None of the first 16 rows of .*a\.jsonl has a prompt"):
        fit(tmp_path / "run", *keys, "data.on_bad_row=skip")
    content = [{**row, "prompt": "9" * 3000} for row in rows(20)]
    with pytest.raises(DataError, match=r"data\.train_files gave \d+ rows, of which only 0 have prompts within"):
        fit(tmp_path / "long", *STEPS, jsonl(tmp_path / "a.jsonl", content))


def test_a_file_that_changed_under_a_resume_is_one_clear_error(tmp_path):
    keys = (*STEPS, parquet(tmp_path / "a.parquet", rows()), "trainer.save_freq=1")
    fit(tmp_path / "run", *keys, "trainer.total_training_steps=1")
    saved = (f"trainer.resume_from_path={tmp_path}/run/checkpoints/step_000001", "trainer.resume_mode=resume_path")
    fit(tmp_path / "same", *keys, *saved)
    changed = rows()
    changed[9]["reward_model"] = {**changed[9]["reward_model"], "ground_truth": "another"}
    parquet(tmp_path / "a.parquet", changed)
    with pytest.raises(
        CheckpointError, match=r"other rows\. data\.train_files: a \(.*a\.parquet, 16 rows\) has .*bytes"
    ):
        fit(tmp_path / "other", *keys, *saved)


def test_validation_files_are_loaded_whatever_their_size_and_that_is_said(tmp_path, caplog):
    keys = (*STEPS, jsonl(tmp_path / "a.jsonl", rows()), f"data.val_files={tmp_path}/a.jsonl")
    trainer = small_trainer(tmp_path / "run", *keys, "data.val_max_samples=-1")
    trainer.close()
    assert len(trainer.val_prompts) == 16 and caplog.text.count("data.val_files hold more than data.eager_rows=0") == 1


def test_the_doctor_looks_at_the_first_rows_and_says_so(tmp_path):
    content = rows(40)
    content[30] = {"prompt": 5}
    keys = (jsonl(tmp_path / "a.jsonl", content), "data.eager_rows=30", f"data.val_files={tmp_path}/a.jsonl")
    found = examine(compose([*keys, "data.val_max_samples=-1"]), [c for c in CHECKS if c.name in ("plug-ins", "rows")])
    said = [(f.status, f.text) for f in found if f.check == "rows"]
    assert [status for status, _ in said] == ["ok", "warning"]
    assert "40 training rows of a; of a only the first 16 are looked at" in said[0][1]
    assert "were not looked at" in said[1][1]
