"""Our tools as an MCP server, called by the client that is ours too: what a model sees is the same either way."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs the mcp extra")

from verl_mt.config_paths import configs_root
from verl_mt.data.conversation import ToolCall
from verl_mt.extensions.toolbox import serve_tools
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.registry import load_tools


@pytest.mark.slow
def test_the_shipped_mcp_file_serves_the_shipped_calculator(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    served = load_tools(configs_root() / "tools_configs" / "mcp.yaml")
    ours = load_tools(configs_root() / "tools_configs" / "calculator.yaml")
    assert served.schemas() == ours.schemas()

    async def ask(tools):
        executor = ToolExecutor(tools, ToolLimits(), str.split)
        session = executor.open("t")
        expressions = ["1/3*3", "1/0", "two"]
        calls = [ToolCall("calculator", {"expression": e}, id=str(k)) for k, e in enumerate(expressions)]
        results = await session.run(calls, turn=1)
        await session.close()
        await executor.close()
        return [(r.failure, r.text) for r in results]

    assert asyncio.run(ask(served)) == asyncio.run(ask(ours))


def test_a_wrong_file_is_one_line_and_an_exit_code(capsys):
    assert serve_tools.main(["no_such.yaml"]) == 1
    said = capsys.readouterr().err
    assert "no file 'no_such.yaml'" in said and "Traceback" not in said
