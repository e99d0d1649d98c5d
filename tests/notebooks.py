"""Runs a notebook as Jupyter does, without Jupyter: `python tests/notebooks.py FILE`.

The code cells run in order, in one namespace and one process. An error ends it. The value of a cell's last expression
is rendered as HTML where it can be, as in Jupyter.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any


def cells_of(path: Path, kind: str = "code") -> list[str]:
    """The texts of a notebook's cells of one kind, in order."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def run(path: Path) -> list[str]:
    """Returns what each code cell shows."""
    space: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(cells_of(path), start=1):
        body = ast.parse(cell, f"{path.name}, code cell {number}").body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"{path.name}, code cell {number}", "exec"), space)
        value = None
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"{path.name}, code cell {number}", "eval"), space)
        render = getattr(value, "_repr_html_", None)
        shown.append("" if value is None else render() if render else repr(value))
    return shown


if __name__ == "__main__":
    for text in run(Path(sys.argv[1])):
        print("--", text)
