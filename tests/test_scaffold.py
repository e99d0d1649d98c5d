"""`verl-mt init`: a project of each kind passes its own tests, trains as it is, and learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
import yaml
from notebooks import cells_of

from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.errors import ConfigError
from verl_mt.extensions.scaffold.init import KINDS, TEMPLATES, main, make_project

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
RUNNER = Path(__file__).with_name("notebooks.py")
SMALL = ["data.train_batch_size=2", "data.val_max_samples=2", "actor_rollout_ref.rollout.n=2", "trainer.num_threads=1"]
TRAIN = ["verl_mt.trainer", "--config-path", ".", "--config-name", "config"]
HAS_ROWS = ("tool", "chat", "agent")


def python(folder: Path, *words: str) -> str:
    """A command in a project's folder. Returns what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = warm_start.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_has_its_name_everywhere_and_all_of_its_files(kind, tmp_path):
    made = make_project(tmp_path / "shop-2", kind)
    names = {path.name for path in made}
    assert names == {path.name for path in (tmp_path / "shop-2").iterdir()}
    assert names >= {"README.md", "notebook.ipynb", "config.yaml", "test_project.py"}
    assert ({"rows.py", "reward.py"} <= names) == (kind in HAS_ROWS)
    assert [path.name for path in made if "my_project" in path.read_text()] == []
    config = yaml.safe_load((tmp_path / "shop-2" / "config.yaml").read_text())
    assert config["trainer"]["experiment_name"] == "shop-2"


def test_every_folder_of_templates_is_a_kind():
    assert {path.name for path in TEMPLATES.iterdir()} == {"shared", *KINDS}


def test_a_folder_with_files_is_left_as_it_is(tmp_path, capsys):
    (tmp_path / "rows.py").write_text("mine")
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} exists and is not an empty folder" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("rows.py", "mine")]


@pytest.mark.parametrize("name", ["2shop", "my shop", "shop.py", "..."])
def test_a_name_that_no_run_can_have_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="use letters, digits, _ and -, and begin with a letter"):
        make_project(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["no", "on", "null", "True"])
def test_a_name_that_the_configuration_would_read_as_something_else_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=f"project name '{name}': YAML reads (True|False|None)"):
        make_project(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_is_refused_with_those_that_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"kind 'tol': there is no such template\. Choose one of tool, environment"):
        make_project(tmp_path / "shop", "tol")


def test_the_command_says_how_to_train(tmp_path):
    command = [sys.executable, "-m", "verl_mt", "init", "shop", "--kind", "environment"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"Next: cd shop && python -m {' '.join(TRAIN)}\n" in done.stdout
    assert "environment.py" in done.stdout and (tmp_path / "shop" / "environment.py").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_project_passes_its_tests_and_trains(kind, tmp_path):
    folder = tmp_path / "shop"
    make_project(folder, kind)
    assert " passed" in python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    python(folder, "-m", *TRAIN, *SMALL, "trainer.total_training_steps=2")
    assert (folder / "runs" / "shop" / "FINISHED").exists()


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_project_learns(kind, tmp_path):
    make_project(tmp_path / "shop", kind)
    python(tmp_path / "shop", "-m", *TRAIN)
    lines = read_jsonl_tolerant(tmp_path / "shop" / "runs" / "shop" / "metrics.jsonl")
    first, *_, last = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    assert last > first + 0.3, (first, last)


BOOKS = [*sorted(NOTEBOOKS.glob("*.ipynb")), TEMPLATES / "shared" / "notebook.ipynb"]


@pytest.mark.parametrize("book", BOOKS, ids=lambda path: path.name)
def test_a_notebook_holds_no_output_and_each_cell_has_an_id(book):
    cells = json.loads(book.read_text())["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert {(len(cell["outputs"]), cell["execution_count"]) for cell in code} == {(0, None)}


def test_the_notebook_of_ten_cells_has_ten():
    assert len(cells_of(NOTEBOOKS / "your_own_task.ipynb")) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("book", "steps", "shows"),
    [
        (NOTEBOOKS / "your_own_task.ipynb", "total_training_steps=20", ["0 error(s)", "accuracy 0.", "plotly"]),
        (NOTEBOOKS / "look_at_a_run.ipynb", "total_training_steps=3", ["plotly", "dataframe", "report.html"]),
        (TEMPLATES / "shared" / "notebook.ipynb", None, ["0 error(s)", "Evaluation(", "plotly", "report.html"]),
    ],
    ids=["your_own_task", "look_at_a_run", "project"],
)
def test_a_notebook_runs(book, steps, shows, tmp_path):
    """With one or two steps of training."""
    folder = tmp_path / "shop"
    make_project(folder)
    text = book.read_text()
    assert steps is None or text.count(steps) == 1
    (folder / "notebook.ipynb").write_text(text.replace(steps, "total_training_steps=1") if steps else text)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("total_training_steps: 20", "total_training_steps: 1"))
    said = python(folder, str(RUNNER), "notebook.ipynb")
    assert [word for word in shows if word not in said] == []
