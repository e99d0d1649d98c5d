"""Every block of code on the pages is run: Python runs, commands compose, YAML is loaded."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import partial
from types import SimpleNamespace

import code_blocks
import pytest
import warm_start
from code_blocks import PAGES, REPO, Block, blocks_of, run_bash, run_json, run_yaml

BLOCKS = {page: blocks_of(page) for page in PAGES}
ALL = [block for found in BLOCKS.values() for block in found]
NOT_RUN = 18
"""Blocks with a reason not to be run here."""


def run_page(blocks: list[Block]) -> list[str]:
    """Run them in order, as one reader would; returns what went wrong."""
    wrong, names = [], {"__name__": "page"}
    for block in blocks:
        if block.title is not None:
            with open(block.title, "w") as file:
                file.write(block.text)
        if block.not_run is not None:
            continue
        try:
            if block.language == "python":
                exec(compile(block.text, block.place, "exec", dont_inherit=True), names)
            elif block.language == "bash":
                run_bash(block.text)
            elif block.language == "yaml":
                run_yaml(block.text)
            elif block.language == "toml":
                tomllib.loads(block.text)
            elif block.language == "json":
                run_json(block.text)
        except (Exception, SystemExit) as error:
            wrong.append(f"{block.place}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if BLOCKS[p]], ids=lambda p: p.relative_to(REPO).as_posix())
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    # Scripts that print their help; another HOME would be a real start.
    run = partial(warm_start.run, env=warm_start.START_ENVIRONMENT)
    monkeypatch.setattr(code_blocks, "subprocess", SimpleNamespace(run=run))
    try:
        assert run_page(BLOCKS[page]) == []
    finally:
        for block in BLOCKS[page]:
            sys.modules.pop((block.title or "").removesuffix(".py"), None)


def test_every_block_says_what_it_is():
    known = ("python", "bash", "yaml", "json", "toml", "text")
    assert [b.place for b in ALL if b.language not in known] == [], "a picture or an output is ```text"


def test_blocks_that_are_not_run_have_a_reason_and_are_few():
    reasons = {b.place: b.not_run for b in ALL if b.not_run is not None}
    assert len(reasons) == NOT_RUN, reasons
    assert all(len(reason.split()) >= 4 for reason in reasons.values())


@pytest.mark.parametrize(
    ("language", "text", "wrong"),
    [
        ("python", "assert 1 + 1 == 3", "AssertionError"),
        ("bash", "python -m verl_mt.trainer trainer.sed=1", "did you mean trainer.seed"),
        ("bash", "python -m verl_mt.sft --date x", "no such flag"),
        ("bash", "verl-mt doctor --only dta", "did you mean 'data'"),
        ("bash", "verl-mt doctor trainer.sed=1", "did you mean trainer.seed"),
        ("bash", "verl-mt doctor --only template --model PATH --jsn", "no such flag"),
        ("bash", "verl-mt env check a.py:A --rw 1", "no such flag"),
        ("bash", "verl-mt docter", "nobody checks"),
        ("bash", "pip install 'verl_mt[nothing]'", "nothing"),
        ("bash", "python examples/99_absent.py", "No such file"),
        ("bash", "python3 -m verl.trainer.main_ppo trainer.sed=1", "did you mean trainer.seed"),
        ("bash", "rm -rf /", "nobody checks 'rm'"),
        ("yaml", "trainer:\n  sed: 1", "did you mean trainer.seed"),
        ("yaml", "tools:\n  - class_name: verl_mt.tools.absent.Tool\n    config: {}", "absent"),
        ("json", '{"a": }', "JSONDecodeError"),
        ("toml", "a = ", "TOMLDecodeError"),
    ],
)
def test_a_block_that_does_not_work_is_found(language, text, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (found,) = run_page([Block(REPO / "README.md", 1, language, None, text, None)])
    assert re.search(re.escape(wrong), found), found
