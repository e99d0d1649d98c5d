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

REPO = Path(__file__).resolve().parents[2]


def test_the_script_of_the_package_is_this_function():
    script = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]["verl-mt"]
    module, _, name = script.partition(":")
    assert getattr(import_module(module), name) is main


def test_every_command_of_the_package_has_a_name():
    package = REPO / "verl_mt"
    modules = {f.parent.name for f in package.glob("*/__main__.py")}
    modules |= {f.stem for f in package.glob("*.py") if 'if __name__ == "__main__":' in f.read_text()} - {"__main__"}
    named = {module for module, _ in COMMANDS.values()}
    assert modules <= named
    assert all(find_spec(f"verl_mt.{module}") for module in named)


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), ([], 2)])
def test_without_a_command_it_lists_them(words, status, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == status
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)


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
    module, _ = COMMANDS[words[0]]
    ours = [sys.executable, "-m", "verl_mt", *words]
    plain = [sys.executable, "-m", f"verl_mt.{module}", *words[1:]]
    done, wanted = (warm_start.run(w, cwd=tmp_path, capture_output=True, text=True) for w in (ours, plain))
    assert (done.returncode, done.stdout, done.stderr) == (wanted.returncode, wanted.stdout, wanted.stderr)
