"""The house rules that a reader relies on: floors, sizes, lint, YAML that composes, keys that are read."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from verl_mt.config.compose import compose
from verl_mt.config.tree import leaves
from verl_mt.config_paths import configs_root

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "verl_mt"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 7
PYTHON_FILES = sorted(
    file for room in ("verl_mt", "recipes", "examples", "benchmarks", "tests") for file in (REPO / room).rglob("*.py")
)

NOT_READ_YET: set[str] = {
    "trainer.n_workers_per_node",
    "trainer.nnodes",
}
"""Keys that nothing reads yet. They belong to SGLang and Ray workers, and are
refused without them; the list may only shrink."""


def test_rooms_import_only_from_lower_floors():
    words = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def allow_list() -> dict[str, str]:
    """`path: reason` or `path::function: reason` -> reason."""
    lines = (REPO / "tests" / "budget_allowlist.txt").read_text().splitlines()
    entries = [line.rpartition(": ") for line in lines if line.strip() and not line.startswith("#")]
    return {name: reason for name, _, reason in entries}


def over_budget() -> Iterator[tuple[str, str]]:
    for file in PYTHON_FILES:
        name = file.relative_to(REPO).as_posix()
        text = file.read_text()
        lines = text.count("\n")
        if lines > MAX_FILE_LINES and not name.startswith("tests/"):  # tests are lists of cases
            yield name, f"{lines} lines, at most {MAX_FILE_LINES}"
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}::{node.name}", f"{length} lines, at most {MAX_FUNCTION_LINES}"
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            number = sum(a.arg not in ("self", "cls") for a in given)
            if number > MAX_PARAMETERS:
                yield f"{name}::{node.name}", f"{number} parameters, at most {MAX_PARAMETERS}"


def test_files_functions_and_signatures_keep_their_budgets():
    allowed = allow_list()
    found = list(over_budget())
    over = [f"{name}: {what}" for name, what in found if name not in allowed]
    assert not over, "split it, or give a reason in tests/budget_allowlist.txt:\n" + "\n".join(over)
    stale = set(allowed) - {name for name, _ in found}
    assert not stale, f"no longer over budget, remove from tests/budget_allowlist.txt: {sorted(stale)}"
    assert all(reason.strip() for reason in allowed.values())


def test_no_error_is_swallowed():
    silent = []
    for file in PYTHON_FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(s, ast.Pass) for s in node.body):
                broad = node.type is None or (
                    isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
                )
                if broad:
                    silent.append(f"{file.relative_to(REPO)}:{node.lineno}")
    assert not silent


def composable() -> list[Path]:
    """YAML files for `--config-name`: those under config/, and every one in a recipe that has a defaults list."""
    recipes = [f for room in ("recipes", "examples") for f in (REPO / room).rglob("*.yaml")]
    primary = [f for f in recipes if "defaults" in (yaml.safe_load(f.read_text()) or {})]
    return sorted([*(REPO / "config").glob("*.yaml"), *primary])


@pytest.mark.parametrize("file", composable(), ids=lambda f: f.relative_to(REPO).as_posix())
def test_every_yaml_composes_and_names_files_that_exist(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rollout = compose(config_name=file.stem, config_dir=file.parent).actor_rollout_ref.rollout
    for named in (rollout.tool_kwargs.tools_config_file, rollout.interaction_config_file):
        if named is not None and not Path(named).is_absolute() and "$" not in named:
            assert any((root / named).is_file() for root in (configs_root(), REPO, file.parent)), named


SECTION_NAMES = {"config", "_config", "options"}
"""What code calls a section of the config, beside the section's own name."""
OTHER_NAMES = {"val_kwargs": {"validation", "chosen"}}


def attributes_read() -> set[tuple[str, str]]:
    """(name of the object, attribute) of every attribute that is read outside of the config room."""
    read = set()
    for file in PACKAGE.rglob("*.py"):
        if file.is_relative_to(PACKAGE / "config"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add((ast.unparse(node.value).rpartition(".")[2], node.attr))
    return read


def test_every_key_of_the_schema_is_read_by_something():
    read = attributes_read()
    unread = set()
    for key in leaves():
        parent, _, name = key.rpartition(".")
        section = parent.rpartition(".")[2]
        owners = SECTION_NAMES | {section} | OTHER_NAMES.get(section, set())
        if not any((owner, name) in read for owner in owners):
            unread.add(key)
    assert unread <= NOT_READ_YET, f"parsed and ignored: {sorted(unread - NOT_READ_YET)}"
    assert unread >= NOT_READ_YET, f"read by now, take it off the list: {sorted(NOT_READ_YET - unread)}"
