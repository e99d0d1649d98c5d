"""`verl-mt COMMAND`: the modules under one name, with their arguments and their exit status."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm_start

from verl_mt.__main__ import COMMANDS, main
from verl_mt.extension_points import own

REPO = Path(__file__).resolve().parents[2]


def test_the_script_of_the_package_is_this_function():
    script = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]["verl-mt"]
    module, _, name = script.partition(":")
    assert getattr(import_module(module), name) is main


def test_every_command_of_the_package_has_a_name():
    package = REPO / "verl_mt"
    folders = [package, *(package / "extensions").glob("*/")]
    modules = {f.parent for folder in folders for f in folder.glob("*/__main__.py")}
    files = {f for folder in folders for f in folder.glob("*.py") if 'if __name__ == "__main__":' in f.read_text()}
    modules |= {f.with_suffix("") for f in files}
    named = {f"verl_mt.{module}" for module, _ in COMMANDS.values()} | set(own("verl_mt.commands").values())
    found = {".".join(f.relative_to(REPO).parts) for f in modules if f.name != "__main__"}
    assert found <= named
    assert all(find_spec(module) for module in named)


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), ([], 2)])
def test_without_a_command_it_lists_them(words, status, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == status
    said = capsys.readouterr().out
    names = [*COMMANDS, *own("verl_mt.commands")]
    lines = said.splitlines()[2:-2]
    assert [line[2:20].strip() for line in lines] == names
    assert all(len(line) <= 80 and line[21:].strip() for line in lines), "one line each, in a terminal of 80 columns"


@pytest.mark.parametrize(
    ("word", "meant"), [("trian", "train"), ("trainer", "train"), ("check_template", "check-template")]
)
def test_an_unknown_command_is_refused_with_what_is_close(word, meant, capsys):
    with pytest.raises(SystemExit) as end:
        main([word])
    assert end.value.code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["train", "trainer.total_training_stps=1"],
        ["train", "--cfg", "job", "trainer.seed=3"],
        ["report", "no/such/run"],
        ["export"],
        ["evaluate", "--n", "0"],
        ["migrate", "--help"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_command_says_and_returns_what_its_module_does(words, tmp_path):
    module = COMMANDS[words[0]][0] if words[0] in COMMANDS else words[0]
    ours = [sys.executable, "-m", "verl_mt", *words]
    plain = [sys.executable, "-m", f"verl_mt.{module}", *words[1:]]
    done, wanted = (warm_start.run(w, cwd=tmp_path, capture_output=True, text=True) for w in (ours, plain))
    assert (done.returncode, done.stdout, done.stderr) == (wanted.returncode, wanted.stdout, wanted.stderr)
