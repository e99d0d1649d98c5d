"""docs/architecture.md is the house: its rooms are the folders, its rings the linter's, its links are true."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "verl_mt"
PAGE = REPO / "docs" / "architecture.md"
RINGS = {"core", "family", "side"}


def rows() -> list[tuple[str, str]]:
    """(room, ring) of the page's table; a row may name several rooms."""
    found = re.findall(r"^\| (?:\d+|-) \| (.+?) \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    return [(room, ring) for names, ring in found for room in re.findall(r"`([\w/]+)`", names)]


def test_the_page_is_short_enough_to_be_read():
    assert len(PAGE.read_text().splitlines()) <= 150


def test_every_room_is_on_the_page_once_and_every_room_of_the_page_exists():
    named = [room for room, _ in rows()]
    assert len(named) == len(set(named))
    here = {
        path.stem
        for path in PACKAGE.iterdir()
        if (path.is_dir() and any(path.rglob("*.py"))) or (path.suffix == ".py" and path.stem != "__init__")
    }
    assert {room for room in named if "/" not in room} == here
    assert [room for room in named if not (PACKAGE / room).exists() and not (PACKAGE / f"{room}.py").exists()] == []


def test_rings_of_the_page_are_those_that_the_linter_holds():
    assert {ring for _, ring in rows()} == RINGS
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rings,) = [c for c in contracts if c["name"].startswith("rings")]
    module = {room: "verl_mt." + room.replace("/", ".") for room, _ in rows()}
    assert {module[room] for room, ring in rows() if ring != "core"} <= set(rings["forbidden_modules"])
    core = {module[room] for room, ring in rows() if ring == "core"}
    forbidden = {m for m in rings["forbidden_modules"] if m in core}
    assert forbidden == set()
    assert {source.split(".")[1] for source in rings["source_modules"]} == {m.split(".")[1] for m in core}


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


def test_the_page_names_functions_for_most_of_the_way():
    assert len(LINK.findall(PAGE.read_text())) >= 10
