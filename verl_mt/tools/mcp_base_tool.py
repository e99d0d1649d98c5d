"""Tools of MCP servers, declared as verl declares them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from verl_mt.errors import ConfigError, PluginError, ToolCallError
from verl_mt.plugins import listing, suggest
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.mcp_client.servers import McpEntry, McpServer, read_servers
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl_mt.tools.settings import ToolSettings, parse_settings

if TYPE_CHECKING:
    from verl_mt.tools.mcp_client.connection import McpConnection


Offer = tuple["McpConnection", str, dict[str, Any]]
"""Connection, the tool's name there, its OpenAI schema."""


class McpToolSettings(ToolSettings):
    """The `config` of an MCP entry."""

    timeout: float | None = Field(None, gt=0)
    """Deadline of one call in seconds, where it is shorter than `multi_turn.tool_timeout_s`."""
    rate_limit: float | None = Field(None, gt=0)
    """Calls per second that one server gets; null = no limit."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """For starting or reaching a server and agreeing on the protocol."""


class MCPBaseTool(BaseTool):
    """One tool of one MCP server; `load_tools` makes one for each that the server offers.

    A result that the server marks as an error is told to the model like its own mistake: the protocol means it as
    something that the model can correct. A server that is down, breaks the connection or answers too late is the
    tool's failure.

    Subclass it to read results in another way: `_parse_tool_result(content) -> (text, metrics)`.
    """

    runs_inline = True  # every wait is on the connection's own loop

    _connection: McpConnection
    _remote_name: str

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.settings = mcp_settings(config)
        self.call_timeout_s = self.settings.timeout

    def connect(self, connection: McpConnection, remote_name: str) -> None:
        """Say which tool of which server this is."""
        self._connection, self._remote_name = connection, remote_name

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call the server's tool.

        Raises:
            ToolCallError: the server says that the call was wrong or could not be done.
            McpServerDown: it cannot be reached, or the connection broke.
            MCPError: it refused the request.
        """
        result = await self._connection.call(self._remote_name, parameters)
        text, metrics = self._parse_tool_result(result.content)
        structured = _field(result, "structured_content")
        if not text and structured is not None:
            text = json.dumps(structured, ensure_ascii=False)
        if _field(result, "is_error"):
            raise ToolCallError(text or "the tool could not do this")
        images = [_image(part) for part in result.content if part.type == "image"]
        return ToolResponse(text=text, image=images or None), 0.0, metrics

    async def close(self) -> None:
        """End the connection to the server."""
        await self._connection.close()

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """Text and metrics from the content parts of a result (`mcp_types`); images are taken separately."""
        return "\n".join(filter(None, map(_text, content))), {}


def mcp_settings(config: dict[str, Any]) -> McpToolSettings:
    """The settings of an MCP entry; `type: mcp` and verl's older `use_mcp: true` say what it is.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    marks = {"type": "mcp", "use_mcp": True}
    return parse_settings(McpToolSettings, {k: v for k, v in config.items() if marks.get(k) != v})


def discover(mcp: Any, config: dict[str, Any], *, beside: Path) -> list[Offer]:
    """Ask the servers of one YAML entry for their tools.

    Args:
        mcp: the entry's `mcp` mapping.
        config: the entry's `config`.
        beside: folder of the tools file.

    Returns:
        In the servers' order.

    Raises:
        ConfigError: the entry or the servers' file is wrong, or a selected tool does not exist.
        PluginError: the `mcp` package is missing, or a server cannot be reached.
    """
    if not isinstance(mcp, dict):
        raise ConfigError(f"config.type is mcp: write mcp: {{mcp_servers_config_path: ...}} beside config, got {mcp!r}")
    entry, settings = parse_settings(McpEntry, mcp), mcp_settings(config)
    servers = read_servers(entry, beside=beside)
    try:
        from verl_mt.tools.mcp_client.connection import wait_for
    except ImportError as error:
        raise PluginError(f'MCP tools need the mcp package ({error}); pip install "verl_mt[mcp]"') from error
    found = wait_for(_ask_all(servers, settings))
    try:
        return _select(found, entry.tool_selected_list)
    except ConfigError:
        wait_for(_close_all(list({id(c): c for c, _, _ in found}.values())))
        raise


def _select(found: list[Offer], wanted: list[str] | None) -> list[Offer]:
    names = [name for _, name, _ in found]
    for name in wanted or []:
        if name not in names:
            raise ConfigError(
                f"mcp.tool_selected_list: no server has a tool {name!r}{suggest(name, names)}. "
                f"There are: {listing(names)}"
            )
    chosen = [offer for offer in found if not wanted or offer[1] in wanted]
    if not chosen:
        raise ConfigError("the MCP servers offer no tools")
    return chosen


async def _close_all(connections: Sequence[McpConnection]) -> None:
    await asyncio.gather(*(connection.close() for connection in connections))


async def _ask_all(servers: dict[str, McpServer], settings: McpToolSettings) -> list[Offer]:
    from verl_mt.tools.mcp_client.connection import McpConnection

    connections = [
        McpConnection(name, server, connect_timeout_s=settings.connect_timeout_s, calls_per_s=settings.rate_limit)
        for name, server in servers.items()
    ]
    answers = await asyncio.gather(*(_ask(c, settings.connect_timeout_s) for c in connections), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            await _close_all(connections)
            raise answer
    return [item for answer in answers if not isinstance(answer, BaseException) for item in answer]


async def _ask(connection: McpConnection, timeout_s: float) -> list[Offer]:
    try:
        async with asyncio.timeout(2 * timeout_s):
            tools = await connection.list_tools()
    except Exception as error:
        reason = str(error) or f"no list of tools within {2 * timeout_s:g} s"
        raise PluginError(f"MCP server {connection.name!r} cannot be used: {reason}") from error
    return [(connection, tool.name, _openai_schema(tool)) for tool in tools]


def _openai_schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": _field(tool, "input_schema")}
    return {"type": "function", "function": function}


def _text(part: Any) -> str:
    if part.type == "text":
        return part.text
    if part.type == "resource":
        return getattr(part.resource, "text", "") or f"[resource {part.resource.uri}]"
    if part.type == "resource_link":
        return f"[resource {part.uri}]"
    return "" if part.type == "image" else f"[{part.type} cannot be shown]"


def _image(part: Any) -> str:
    """A data URL, which image loaders read."""
    return f"data:{_field(part, 'mime_type')};base64,{part.data}"


def _field(model: Any, name: str) -> Any:
    """Of one of the protocol's models, whose package is loaded only where somebody declares a server."""
    from verl_mt.tools.mcp_client.sdk import get

    return get(model, name)
