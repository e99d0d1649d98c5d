"""Files of a run directory that are none: directories, FIFOs, devices, and texts that are nested too deeply.

A FIFO that nobody writes to keeps its reader waiting for ever, so each of these tests has a short limit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import yaml

from verl_mt.config.compose import compose
from verl_mt.data.columnar_rows import late_part, read_parquet, seal, table_of
from verl_mt.data.drawn_prompts import FILE, read_prompt_log
from verl_mt.data.row_files import count_rows, read_rows, write_columns
from verl_mt.data.run_files import (
    append_metrics,
    append_token_texts,
    read_jsonl_tolerant,
    read_token_texts,
    truncate_metrics,
)
from verl_mt.data.run_origin import is_own, require_trust
from verl_mt.data.trajectory import Trajectory
from verl_mt.errors import CheckpointError, ConfigError, DataError, VerlMTError
from verl_mt.extensions.inspection.doctor.ahead import measured_steps
from verl_mt.reading import parse_json, parse_yaml, read_bytes, read_yaml, require_file
from verl_mt.trainer.checkpoint import CheckpointStore, read_meta, read_state

pytestmark = pytest.mark.timeout(60)

DEEP = "[" * 200_000 + "]" * 200_000
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "metrics on resume": ("metrics.jsonl", lambda run: truncate_metrics(run / "metrics.jsonl", 1)),
    "timings": ("timings.jsonl", lambda run: read_jsonl_tolerant(run / "timings.jsonl")),
    "one more line of metrics": ("metrics.jsonl", lambda run: append_metrics(run / "metrics.jsonl", {"step": 1})),
    "texts of tokens": ("token_texts.jsonl", read_token_texts),
    "one more text": ("token_texts.jsonl", lambda run: append_token_texts(run, {1: "a"})),
    "prompt log": (FILE, read_prompt_log),
    "rollout rows": ("step_000001.jsonl", lambda run: list(read_rows(run / "step_000001.jsonl"))),
    "number of rows": ("step_000001.jsonl", lambda run: count_rows(run / "step_000001.jsonl")),
    "columns": ("step_000001.parquet", lambda run: list(read_rows(run / "step_000001.parquet"))),
    "number of rows in columns": ("step_000001.parquet", lambda run: count_rows(run / "step_000001.parquet")),
    "trust": ("config.yaml", lambda run: require_trust(run, trust=False)),
    "doctor": ("config.yaml", measured_steps),
}


def plant(path: Path, kind: str) -> Path:
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["directory", "FIFO"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_one_error_that_names_it(tmp_path, reader, kind):
    name, read = READERS[reader]
    path = plant(tmp_path / name, kind)
    with pytest.raises(VerlMTError, match=rf"{re.escape(str(path))} is a {kind}\. A regular file was expected"):
        read(tmp_path)


def test_a_device_without_an_end_is_not_read(tmp_path):
    path = plant(tmp_path / "config.yaml", "device")
    with pytest.raises(DataError, match=r"config\.yaml is a socket or a device"):
        read_yaml(path)
    require_file(path, or_device=True)
    assert not is_own(tmp_path)


@pytest.mark.parametrize("kind", ["directory", "FIFO"])
def test_a_signature_that_is_no_file_is_none(tmp_path, kind):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    plant(tmp_path / ".origin", kind)
    assert not is_own(tmp_path)
    with pytest.raises(ConfigError, match="--trust"):
        require_trust(tmp_path, trust=False)


def test_a_file_that_is_missing_or_too_large_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.yaml cannot be read: No such file"):
        read_yaml(tmp_path / "nothing.yaml")
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(DataError, match="large has 11 bytes, 10 at most"):
        read_bytes(tmp_path / "large", limit=10)
    assert read_bytes(tmp_path / "large", limit=11) == b"x" * 11


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"a: {DEEP}", "more than 64 levels"),
        ("a: " + "[" * 5000, "more than 64 levels"),
        (BOMB, "more than 100000 values"),
        ("a: 2024-13-45", "month must be in"),
        ("a: [", "expected the node content"),
    ],
)
def test_a_config_of_others_is_refused_without_a_traceback(tmp_path, text, says):
    """By all who read one: what a stranger's run names, a run that goes on, and Hydra."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(yaml.YAMLError, match=says):
        parse_yaml(text)
    with pytest.raises(DataError, match=rf"config\.yaml cannot be read as YAML: .*{says}"):
        require_trust(tmp_path, trust=False)
    if "2024" not in text:  # OmegaConf reads no dates
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            compose(config_name=str(file))


def test_json_that_is_nested_too_deeply_is_a_broken_line(tmp_path):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    assert parse_json('{"a": [1]}') == {"a": [1]}
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{{"step": {DEEP}}}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not a JSON object \(nested too deeply\)"):
        read_jsonl_tolerant(file)
    (tmp_path / "token_texts.jsonl").write_text(f'{{"1": "a"}}\n{{"2": {DEEP}}}\n')
    assert read_token_texts(tmp_path) == {1: "a"}
    (tmp_path / FILE).write_text(f'{{"event": {DEEP}}}\n{{"event": "drawn", "prompts": []}}\n')
    with pytest.raises(DataError, match=rf"{FILE}, line 1"):
        read_prompt_log(tmp_path)


def test_columns_whose_details_are_nested_too_deeply_are_damaged(tmp_path):
    trajectory = Trajectory("t", "p", "p", "t")
    table = table_of([seal([trajectory])], [late_part(trajectory, step=1, late=[])])
    place = table.schema.get_field_index("other")
    field = table.schema.field(place)
    table = table.set_column(place, field, pyarrow.array([DEEP], field.type))
    path = write_columns(tmp_path / "step_000001", table)
    with pytest.raises(DataError, match=r"step_000001\.parquet: .*nested too deeply"):
        list(read_parquet(path))


@pytest.mark.parametrize("kind", ["directory", "FIFO"])
def test_a_checkpoint_whose_files_are_none_is_refused(tmp_path, kind):
    folder = CheckpointStore(tmp_path).save(1, {"x": 1}, score=None)
    (folder / "state.pt").unlink()
    plant(folder / "state.pt", kind)
    with pytest.raises(CheckpointError, match=rf"state\.pt is a {kind}"):
        read_state(folder, mmap=True)
    (folder / "meta.json").unlink()
    plant(folder / "meta.json", kind)
    assert CheckpointStore(tmp_path).latest() is None
    with pytest.raises(CheckpointError, match=rf"is not a checkpoint: .*meta\.json is a {kind}"):
        read_meta(folder)


def test_a_checkpoint_whose_description_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"step": 1})[:-1] + f', "a": {DEEP}}}')
    with pytest.raises(CheckpointError, match="is not a checkpoint: nested too deeply"):
        read_meta(tmp_path)
