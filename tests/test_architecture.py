"""docs/architecture.md: its packages are the folders, its layers and extensions the linter's, its links are true."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "verl_mt"
PAGE = REPO / "docs" / "architecture.md"
CONTRACTS = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def layers_of_page() -> list[set[str]]:
    """The packages of each layer, from the top."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    found: dict[int, set[str]] = {}
    for number, names in rows:
        found.setdefault(int(number), set()).update(re.findall(r"`(\w+)`", names))
    return [found[number] for number in sorted(found, reverse=True)]


def extensions_of_page() -> dict[str, set[str]]:
    """Extension -> those that it imports."""
    table = PAGE.read_text().partition("\n## Extensions\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \|([^|]*)\|$", table, re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", imports)) for name, imports in rows}


def test_the_page_is_short_enough_to_be_read():
    assert len(PAGE.read_text().splitlines()) <= 150


def test_every_package_is_on_the_page_in_the_layer_that_the_linter_holds():
    (contract,) = [c for c in CONTRACTS if c["type"] == "layers"]
    held = [{name.strip().removeprefix("verl_mt.") for name in layer.split("|")} for layer in contract["layers"]]
    assert layers_of_page() == held
    here = {
        path.stem
        for path in PACKAGE.iterdir()
        if (path.is_dir() and any(path.rglob("*.py"))) or (path.suffix == ".py" and path.stem != "__init__")
    }
    assert set().union(*held) == here


def test_every_extension_is_on_the_page_with_those_that_it_imports():
    (contract,) = [c for c in CONTRACTS if c["type"] == "independence"]
    named = extensions_of_page()
    here = {path.name for path in (PACKAGE / "extensions").iterdir() if (path / "__init__.py").is_file()}
    assert set(named) == here == {module.rpartition(".")[2] for module in contract["modules"]}
    pairs = [
        [part.split(".")[2] for part in line.split(" -> ")]
        for line in contract["ignore_imports"]
        if "extensions" in line.split(" -> ")[0]
    ]
    assert {(a, b) for a, b in pairs} == {(name, other) for name, imports in named.items() for other in imports}


def code_lines(file: Path) -> int:
    """Lines with code: no docstrings, comments, blank lines and imports."""
    tree, lines = ast.parse(text := file.read_text()), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        is_text = isinstance(node, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines - {text.count("\n") + 1})


def test_the_core_does_not_grow_without_a_reason():
    """`core_code_lines.txt`: the ceiling, and why it was raised."""
    ceiling = int((REPO / "tests" / "core_code_lines.txt").read_text().split()[0])
    core = [file for file in PACKAGE.rglob("*.py") if "extensions" not in file.relative_to(PACKAGE).parts]
    found = sum(map(code_lines, core))
    assert found <= ceiling, f"{found} code lines, at most {ceiling}: move a feature to an extension, or say there why"
    assert found > ceiling - 500, f"{found} code lines: lower the ceiling of {ceiling} in tests/core_code_lines.txt"


LINK = re.compile(r"\[[^\]]+\]\(\.\./(verl_mt/[\w/]+\.py)\)\s+`([\w.]+)`")


@pytest.mark.parametrize(("file", "name"), LINK.findall(PAGE.read_text()), ids=lambda x: x)
def test_what_a_link_names_is_in_its_file(file, name):
    scope: list[ast.stmt] = ast.parse((REPO / file).read_text()).body
    for part in name.split("."):
        found = [
            node
            for node in scope
            if part == getattr(node, "name", None)
            or (isinstance(node, ast.Assign | ast.AnnAssign) and part in ast.unparse(node).split("=")[0].split(":")[0])
        ]
        assert found, f"{file} has no {name}"
        scope = getattr(found[0], "body", [])


def test_the_reading_list_can_be_read_in_an_afternoon():
    text = PAGE.read_text().partition("## Reading list")[2].partition("\n## ")[0]
    files = re.findall(r"\]\(\.\./([\w/]+\.py)\)", text)
    assert 15 <= len(files) == len(set(files)) <= 22
    assert sum((REPO / file).read_text().count("\n") for file in files) <= 5000


def test_the_page_names_functions_for_most_of_the_way():
    assert len(LINK.findall(PAGE.read_text())) >= 10


CROSSINGS = {
    "run_coroutine_threadsafe", "call_soon_threadsafe", "to_thread", "run_in_executor", "in_daemon_thread",
    "wrap_future", "Thread", "start_new_thread", "Popen", "dist.all_reduce", "dist.all_gather_object",
    "dist.all_to_all_single", "dist.broadcast", "ray.get", "ray.wait",
}  # fmt: skip
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def crossings(node: ast.AST) -> set[str]:
    """Calls of a function's own code that reach another thread or process."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FUNCTIONS):
            found |= crossings(child)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        found |= {name, name.rpartition(".")[2]} & CROSSINGS
    return found


def test_functions_that_cross_threads_or_processes_say_where_they_run_and_what_they_wait_for():
    said = re.compile(r"\bruns? (in|on)\b|\bwaits? for\b", re.IGNORECASE)
    silent = [
        f"{file.relative_to(REPO)}:{function.lineno} {function.name}: {', '.join(sorted(crossings(function)))}"
        for file in PACKAGE.rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, FUNCTIONS) and function.name != "__init__" and crossings(function)
        if not said.search(ast.get_docstring(function) or "")
    ]
    assert not silent, "say in the docstring: Runs in (a thread) or on (a loop). Waits for ..."


def test_threads_of_the_picture_are_in_the_code(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "docs" / "site"))
    text = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    named = re.findall(r'\b(?:name|thread_name_prefix)=f?"([^"{]+)', text)
    picture = importlib.import_module("concurrency")
    assert set(picture.THREADS) <= set(named)
    shown = picture.draw()
    assert all(name.split(",")[0].strip() in shown for name in picture.THREADS)
