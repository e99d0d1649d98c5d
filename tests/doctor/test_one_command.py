"""`verl-mt doctor` looks at a configuration, a run, files of rows and chat templates; `--only` names groups of
checks."""

from __future__ import annotations

import io
import json
from collections import Counter

import pytest
import yaml
from parts_project import Project, rows
from rich.console import Console

from verl_mt.config.compose import compose, config_to_yaml
from verl_mt.extensions.inspection import check_template, data_check
from verl_mt.extensions.inspection.doctor.__main__ import main
from verl_mt.extensions.inspection.doctor.checks import CHECKS, GROUPS

ROW = {"prompt": "How many pens?", "data_source": "stock", "ground_truth": 3}


def doctor(*words: str) -> tuple[int, str]:
    text = io.StringIO()
    return main(words, console=Console(file=text, width=200)), text.getvalue()


def test_each_check_is_in_one_group():
    assert Counter(name for names in GROUPS.values() for name in names) == Counter(check.name for check in CHECKS)


def test_files_of_rows_are_read_without_a_run(tmp_path, capsys):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(json.dumps(ROW) + "\n")
    bad.write_text(json.dumps(ROW | {"prompt": []}) + "\n")
    assert main([str(good)]) == 0
    first = capsys.readouterr()
    assert "1 rows, all can be used" in first.out and "user> How many pens?" in first.out
    assert main([str(tmp_path / "absent.jsonl")]) == 2
    assert capsys.readouterr().err.startswith(f"error: rows: no file '{tmp_path}/absent.jsonl'")
    assert main(["--only", "data", str(good), str(bad)]) == 2
    assert "1 cannot be used" in capsys.readouterr().out
    assert main([str(good), "--model", "verl_mt://tiny", "data.prompt_key=prompt"]) == 0
    assert "<|im_start|>user" in capsys.readouterr().out
    assert data_check.main([str(good)]) == 0
    old = capsys.readouterr()
    assert (old.out, old.err) == (first.out, "python -m verl_mt.data_check is deprecated: write verl-mt doctor FILE\n")


def test_what_does_not_fit_to_a_file_is_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    status, said = doctor(str(file), "--only", "reward")
    assert status == 2 and "leave --only reward out" in said and "data.train_files" in said
    status, said = doctor("runs/none")
    assert status == 2 and "runs/none is no run directory" in said and "runs/tiny" in said
    status, said = doctor("--only", "rewards")
    assert status == 2 and "did you mean 'reward'" in said and "configuration, template, data" in said


def test_no_word_is_ignored(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    status, said = doctor(str(file), "reward.path=my.py")
    assert status == 2 and "leave reward.path=my.py out" in said
    status, said = doctor("--only", "data,tools", "--demos", str(file))
    assert status == 2 and "--demos is of the group reward, and --only data,tools leaves it out: add reward" in said
    status, said = doctor("conf/mine.yaml")
    assert status == 2 and "write --config-path conf --config-name mine" in said
    for words in ([str(file)], ["--only", "template", "--model", "M"], ["data.seed=1"]):
        status, said = doctor("--trust", *words)
        assert status == 2 and "name the run, or leave --trust out" in said
    status, said = doctor("--onyl", "data")
    assert status == 2 and "Or is --onyl misspelt?" in said
    for words in (["--only", "template", "--model", "M"], ["--only", "data"], ["--demos", str(file)]):
        assert main(["runs/none", "--ahead", *words]) == 2
        assert f"leave {' '.join(words[::2])} out" in capsys.readouterr().err


def test_a_template_alone(capsys):
    assert main(["--only", "template", "--model", "verl_mt://tiny", "--json"]) == 0
    first = capsys.readouterr()
    assert json.loads(first.out)["shapes"]["prompt"] is None
    assert check_template.main(["--model", "verl_mt://tiny", "--json"]) == 0
    old = capsys.readouterr()
    assert (old.out, old.err) == (
        first.out, "python -m verl_mt.check_template is deprecated: write verl-mt doctor --only template\n"
    )  # fmt: skip


@pytest.mark.slow
def test_a_group_and_a_run(tmp_path, monkeypatch):
    """Of the checks that a group needs, only trouble is shown."""
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path)
    project.rows(rows(0, 1) * 30)
    project.write("run.yaml", yaml.safe_dump(project.run))
    words = ["--config-path", str(tmp_path), "--config-name", "run"]
    status, said = doctor(*words, "--only", "data")
    assert status == 0 and "29 of 30 rows repeat" in said
    assert "rows' contents" in said and "chat template" not in said and "memory" not in said
    status, said = doctor(*words, "--only", "template,configuration")
    assert "hyperparameters" in said and "chat template" in said and "rows' contents" not in said
    run = tmp_path / "runs" / "parts"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config_to_yaml(compose([], config_name="run", config_dir=tmp_path)))
    status, said = doctor(str(run), "--only", "data", "--trust", "data.train_batch_size=2")
    assert status == 0 and "29 of 30 rows repeat" in said
    status, said = doctor(str(run), "--only", "data", "--config-name", "run")
    assert status == 2 and "brings its own config.yaml" in said
