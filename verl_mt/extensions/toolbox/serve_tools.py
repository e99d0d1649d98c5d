"""`python -m verl_mt.serve_tools tools.yaml`: serve the tools of a run to any MCP client.

Speaks the Model Context Protocol over stdin and stdout, so that an agent in production calls the very tools of the run:
the same schemas, argument checks, deadlines and error texts. One trajectory's state per client: `create` runs before a
tool's first call, `release` when the client hangs up.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from verl_mt.data.conversation import ToolCall
from verl_mt.errors import PluginError, VerlMTError
from verl_mt.tools.executor import ToolExecutor, ToolLimits, ToolSession
from verl_mt.tools.registry import load_tools
from verl_mt.tools.toolset import ToolSet


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m verl_mt.serve_tools", description=__doc__.splitlines()[0])
    parser.add_argument("tools", help="tools YAML file, e.g. tools_configs/calculator.yaml")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="deadline of one call in seconds")
    given = parser.parse_args(arguments)
    try:
        tools = load_tools(given.tools, config_key="the file named on the command line")
        asyncio.run(serve(tools, ToolLimits(timeout_s=given.timeout_s, max_response_tokens=sys.maxsize)))
    except VerlMTError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def serve(tools: ToolSet, limits: ToolLimits) -> None:
    """Serve until the client hangs up.

    Raises:
        PluginError: the `mcp` package is missing.
    """
    try:
        from mcp.server.stdio import stdio_server
    except ImportError as error:
        raise PluginError(f'serving tools needs the mcp package ({error}): pip install "verl_mt[mcp]"') from error
    # Whole texts: production has no limit in tokens, and no tokenizer.
    executor = ToolExecutor(tools, limits, lambda text: ())
    session = executor.open("mcp")
    server = _server(tools, session)
    try:
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())
    finally:
        await session.close()
        await executor.close()


def _server(tools: ToolSet, session: ToolSession) -> Any:
    from mcp.server import Server

    from verl_mt.extensions.toolbox.mcp_client.sdk import IS_FIRST, types

    listed = [
        types.Tool.model_validate(
            {
                "name": schema["function"]["name"],
                "description": schema["function"].get("description") or "",
                "inputSchema": schema["function"].get("parameters") or {"type": "object", "properties": {}},
            }
        )
        for schema in tools.schemas()
    ]

    async def call(name: str, arguments: dict[str, Any] | None) -> types.CallToolResult:
        (result,) = await session.run([ToolCall(name, arguments or {}, id="")], turn=0)
        # The protocol has its own mark of an error.
        text = result.text.removeprefix("<error>").removesuffix("</error>") if result.failure else result.text
        content = [{"type": "text", "text": text}]
        return types.CallToolResult.model_validate({"content": content, "isError": result.failure is not None})

    if IS_FIRST:
        server: Any = Server("verl_mt")

        @server.list_tools()
        async def list_first() -> list[types.Tool]:
            return listed

        server.call_tool(validate_input=False)(call)
        return server

    async def list_tools(context: Any, parameters: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed)

    async def call_tool(context: Any, parameters: Any) -> types.CallToolResult:
        return await call(parameters.name, parameters.arguments)

    return Server("verl_mt", on_list_tools=list_tools, on_call_tool=call_tool)


if __name__ == "__main__":
    sys.exit(main())
