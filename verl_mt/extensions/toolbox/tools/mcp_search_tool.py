"""verl's name for a search tool of an MCP server."""

from __future__ import annotations

from typing import Any

from verl_mt.extensions.toolbox.tools.mcp_base_tool import MCPBaseTool


class MCPSearchTool(MCPBaseTool):
    """`MCPBaseTool` that counts: metrics `query_count` and `total_results`, the number of the result's parts.

    Searching leaves nothing behind at the server."""

    state = "none"

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        text, metrics = super()._parse_tool_result(content)
        return text, {**metrics, "query_count": 1, "total_results": len(content)}
