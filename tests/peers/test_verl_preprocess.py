"""verl's scripts that make data sets, after the documented replacement: they write rows that the loader takes.

The `datasets` package is not among the tests' dependencies. Where it is missing, a module of its name with the few
calls that these scripts make reads local parquet files instead of the hub.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import conformance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import warm_start
from tables import newest_first

from verl_mt.data.dataset import load_rows
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.utils.fs import copy_to_local
from verl_mt.extensions.compat.utils.hdfs_io import copy, exists, makedirs
from verl_mt.extensions.compat.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

DATASETS = """
import os
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq

class Dataset:
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, place):
        return self.rows[place]

    def map(self, function, with_indices=False, **_):
        made = [function(dict(row), k) if with_indices else function(dict(row)) for k, row in enumerate(self.rows)]
        return Dataset([{**row, **new} for row, new in zip(self.rows, made)])

    def to_parquet(self, path):
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(self.rows), Path(path).expanduser())

def load_dataset(*names, **options):
    files = sorted(Path(os.environ["ROWS"]).glob("*.parquet"))
    return {file.stem: Dataset(pq.read_table(file).to_pylist()) for file in files}
"""
ROWS = [
    {
        "question": f"What is {k} plus 40?", "answer": f"{k} + 40 is {k + 40}.\n#### {k + 40}",
        "problem": f"What is {k} plus 40?", "solution": rf"It is $\boxed{{{k + 40}}}$, not \frac{{1}}{{2}}.",
    }
    for k in range(2)
]  # fmt: skip
SCRIPTS = ["gsm8k", "gsm8k_multiturn_w_tool", "gsm8k_multiturn_w_interaction", "gsm8k_tool_agent_loop", "math_dataset"]


@pytest.mark.slow
@pytest.mark.parametrize("revision", newest_first(["v0.5.0", "v0.6.1"]))
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_writes_rows_that_the_loader_takes(tmp_path, revision, name):
    source = conformance.peer("verl", revision, f"examples/data_preprocess/{name}.py")
    script = conformance.copy_replaced("verl", source, tmp_path / "script")
    stand_in, rows, out, far = (tmp_path / part for part in ("modules", "rows", "out", "far"))
    for folder in (stand_in, rows, out):
        folder.mkdir()
    if importlib.util.find_spec("datasets") is None:
        (stand_in / "datasets.py").write_text(DATASETS)
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(ROWS), rows / f"{split}.parquet")
    path = f"{stand_in}:{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
    done = warm_start.run(
        [sys.executable, str(script), "--local_dir", str(out), "--hdfs_dir", str(far)],
        text=True,
        capture_output=True,
        env={**os.environ, "ROWS": str(rows), "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert (far / "train.parquet").read_bytes() == (out / "train.parquet").read_bytes()
    loaded = load_rows(str(out / "train.parquet"), split="train")[0].rows
    assert len(loaded) == 2
    assert [str(row.ground_truth) for row in loaded] == ["40", "41"]
    assert all("plus 40" in row.prompt[-1]["content"] for row in loaded)


def test_local_paths_are_copied_and_one_of_hdfs_has_one_clear_error(tmp_path):
    makedirs(str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "b" / "file").write_text("x")
    copy(str(tmp_path / "a"), str(tmp_path / "new"))
    copy(str(tmp_path / "a"), str(tmp_path / "new"))  # a folder that is there is filled
    copy(str(tmp_path / "a" / "b" / "file"), str(tmp_path / "one"))
    assert exists(str(tmp_path / "new" / "b" / "file")) and (tmp_path / "one").read_text() == "x"
    assert copy_to_local(str(tmp_path / "one")) == str(tmp_path / "one")
    for call in (lambda: exists("hdfs://a"), lambda: makedirs("hdfs://a"), lambda: copy("hdfs://a", str(tmp_path))):
        with pytest.raises(ConfigError, match=r"hdfs://a: HDFS is not offered. Give a local folder"):
            call()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        copy_to_local("nowhere")


@pytest.mark.parametrize(
    ("text", "boxed", "inner"),
    [
        (r"so $\boxed{1}$ or \boxed{\frac{1}{2}} it is", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"it is $\boxed 7$ then", r"\boxed 7", "7"),
        ("nothing", None, None),
        (r"\boxed{open", None, None),
    ],
)
def test_the_last_box_of_a_solution(text, boxed, inner):
    assert last_boxed_only_string(text) == boxed
    if boxed is not None:
        assert remove_boxed(boxed) == inner
    else:
        with pytest.raises(ValueError, match="expected"):
            remove_boxed(text)
