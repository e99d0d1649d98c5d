"""verl's manager of MCP servers under its name, for tools that call `ClientManager` themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.tools.utils.mcp_clients.utils import mcp2openai
from verl_mt.extensions.toolbox.mcp_client.connection import McpConnection
from verl_mt.extensions.toolbox.mcp_client.sdk import types
from verl_mt.extensions.toolbox.mcp_client.servers import McpEntry, read_servers
from verl_mt.plugins import suggest

__all__ = ["ClientManager", "MCPClientManager"]


class MCPClientManager:
    """The MCP servers of one file, and which of them has a tool."""

    def __init__(self) -> None:
        self.initialized = False
        self.clients: list[McpConnection] = []
        self.tool_client_mapping: dict[str, McpConnection] = {}

    async def initialize(self, config_path: str | Path, rate_limit: float = 10.0) -> None:
        """Read the servers' file; nothing is connected before the first request, and a second file is not read.

        Args:
            config_path: JSON or YAML with `mcpServers`.
            rate_limit: calls per second that each server gets.

        Raises:
            ConfigError: there is no such file, or it has another shape.
        """
        if self.initialized:
            return
        entry = McpEntry(mcp_servers_config_path=str(config_path))
        servers = read_servers(entry, beside=Path.cwd())
        self.clients = [McpConnection(name, server, calls_per_s=rate_limit) for name, server in servers.items()]
        self.initialized = True

    async def fetch_tool_schemas(self, tool_selected_list: Sequence[str] | None) -> list[dict[str, Any]]:
        """OpenAI schemas of the servers' tools; with a list, of those that it names.

        Raises:
            McpServerDown: a server cannot be reached.
            MCPError: it refused.
        """
        schemas = []
        for client in self.clients:
            for tool in await client.list_tools():
                if not tool_selected_list or tool.name in tool_selected_list:
                    self.tool_client_mapping[tool.name] = client
                    schemas.append(mcp2openai(tool))
        return schemas

    async def call_tool(
        self, tool_name: str, parameters: dict[str, Any], timeout: float | None
    ) -> types.CallToolResult:
        """Call a tool of `fetch_tool_schemas`.

        Args:
            timeout: deadline in seconds; None = none.

        Raises:
            ConfigError: no server offered it.
            TimeoutError: it took longer.
            McpServerDown: its server cannot be reached, or the connection broke.
            ToolCallError: the server refuses the arguments.
        """
        async with asyncio.timeout(timeout):
            return await self.get_client_with_tool_name(tool_name).call(tool_name, parameters)

    def get_client_with_tool_name(self, tool_name: str) -> McpConnection:
        """The connection to the server that offered a tool.

        Raises:
            ConfigError: none did.
        """
        if tool_name not in self.tool_client_mapping:
            known = list(self.tool_client_mapping)
            raise ConfigError(f"no MCP server offered a tool {tool_name!r}{suggest(tool_name, known)}")
        return self.tool_client_mapping[tool_name]


ClientManager = MCPClientManager()
"""The one of a process, as there."""
