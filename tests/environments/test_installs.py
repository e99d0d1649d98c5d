"""Each adapter's package can be installed beside `verl_mt[mcp]`, by the command that the page names. Nothing is
installed: the versions are resolved only."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "environments.md"


def commands() -> list[tuple[str, ...]]:
    """What the table of adapters installs, with what it depends on."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    found = [re.findall(r"`pip install (?!--no-deps|\"verl_mt\[)([^`]+)`", row) for row in rows]
    return [tuple(shlex.split(words)) for words in dict.fromkeys(words for row in found for words in row)]


def resolved(*packages: str) -> subprocess.CompletedProcess[str]:
    words = [*packages, f"verl_mt[mcp] @ {REPO.as_uri()}"]
    return subprocess.run(
        ["uv", "pip", "compile", "--quiet", "--constraint", str(REPO / "constraints.txt"), "-"],
        input="\n".join(words), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def index() -> None:
    """Skips where no versions can be had."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv")
    if (found := resolved()).returncode != 0:
        pytest.skip(f"needs a package index: {found.stderr.strip()[-200:]}")


def test_the_page_names_a_command_for_each_adapter_with_a_package():
    assert [words[0] for words in commands()] == [
        "gymnasium", "reasoning-gym", "textarena", "openenv", "verifiers>=0.4", "verifiers<0.2",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("packages", commands(), ids=" ".join)
def test_it_can_be_installed_beside_verl_mt_with_mcp(index, packages):
    found = resolved(*packages)
    assert found.returncode == 0, found.stderr
    name, _, limit = re.match(r"([\w-]+)(>=|<|$)([\d.]*)", packages[0]).groups()
    version = re.search(rf"^{name}==([\d.]+)$", found.stdout, re.MULTILINE)
    assert version is not None, found.stdout
    if limit:
        above = tuple(map(int, version[1].split("."))) >= tuple(map(int, limit.split(".")))
        assert above == (">=" in packages[0])
