"""Every command says what it takes without waiting for torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl_mt.extension_points import own

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "verl_mt"


def as_documented(path: str) -> str:
    """`doctor` of `verl_mt.extensions.inspection.doctor`, if it can be started by that name."""
    short = ".".join(path.split(".")[3:])
    return short if find_spec(f"verl_mt.{short}") else path.removeprefix("verl_mt.")


COMMANDS = sorted(
    {f.parent.name for f in PACKAGE.glob("*/__main__.py")}
    | {f.stem for f in PACKAGE.glob("*.py") if 'if __name__ == "__main__":' in f.read_text()}
    | {as_documented(path) for path in own("verl_mt.commands").values()}
)
"""Under the names that the pages give them."""
SAYS_WHAT_WAS_IMPORTED = """
import runpy, sys
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print("imported:", *(name for name in ("torch", "transformers") if name in sys.modules))
"""


def test_the_commands_are_found():
    assert {"trainer", "evaluate", "sft", "export", "doctor", "report", "migrate"} <= set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_comes_without_torch(command):
    words = [sys.executable, "-c", SAYS_WHAT_WAS_IMPORTED, f"verl_mt.{command}", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage:" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "imported:"
