"""docs/tool_parsers.md: the table names every parser and alias, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl_mt.chat.parsers import aliases, get_parser, tool_parsers

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tool_parsers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_table_names_every_parser_with_its_aliases():
    rows = [row.strip("|").split(" | ") for row in re.findall(r"^\| `.*\|$", PAGE, re.MULTILINE)]
    listed = {name: set(names_in(row[-1])) for row in rows for name in names_in(row[0])[:1]}
    assert {name for row in rows for name in names_in(row[0])} == set(tool_parsers)
    for name, others in listed.items():
        assert others == {alias for alias, meant in aliases().items() if meant == name}, name


def test_forms_shown_in_the_table_are_read_by_their_parsers():
    shown = re.findall(r"`([^`]*(?:\"q\"|>q<|=q>)[^`]*)`", PAGE.split("## Rules of all")[0])
    row_of = {
        form: names_in(row)[0] for row in re.findall(r"^\| `.*\|$", PAGE, re.MULTILINE) for form in shown if form in row
    }
    assert len(row_of) >= 6
    for form, name in row_of.items():
        text = f"Action: f\n{form}" if name == "react" else form
        turn = get_parser(name).parse(text)
        assert [(call.name, call.arguments) for call in turn.calls] == [("f", {"q": "x"})], form
        assert turn.malformed == []


def test_the_parser_of_ones_own_is_fifteen_lines_and_works(tmp_path):
    parser, check = BLOCKS
    assert len([line for line in parser.splitlines() if line.strip()]) <= 15
    space: dict[str, Any] = {}
    exec(parser + check, space)
    (bad,) = space["CallParser"]().parse("CALL search").malformed
    assert bad.name == "search" and "colon" in bad.error
    (tmp_path / "my_parser.py").write_text(parser)
    assert get_parser(f"{tmp_path}/my_parser.py:CallParser").parse("CALL a: b").calls[0].name == "a"
