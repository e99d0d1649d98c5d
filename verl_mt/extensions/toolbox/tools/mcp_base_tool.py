"""Tools of MCP servers, declared as verl declares them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from verl_mt.errors import ConfigError, DataError, PluginError, ToolCallError
from verl_mt.extensions.toolbox.mcp_client.servers import McpEntry, McpServer, read_servers
from verl_mt.plugins import listing, suggest
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl_mt.tools.settings import ToolSettings, parse_settings

if TYPE_CHECKING:
    from verl_mt.extensions.toolbox.mcp_client.connection import McpConnection
    from verl_mt.extensions.toolbox.mcp_client.states import TrajectoryStates


Offer = tuple["TrajectoryStates", str, dict[str, Any]]
"""Server, the tool's name there, its OpenAI schema as the model sees it."""
Found = tuple["McpConnection", Any]
"""Connection, tool as the server lists it."""


class McpToolSettings(ToolSettings):
    """The `config` of an MCP entry."""

    timeout: float | None = Field(None, gt=0)
    """Deadline of one call in seconds, where it is shorter than `multi_turn.tool_timeout_s`."""
    rate_limit: float | None = Field(None, gt=0)
    """Calls per second that one server gets; null = no limit."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """For starting or reaching a server and agreeing on the protocol."""
    state: Literal["none", "session", "argument"] | None = None
    """What the servers remember between calls: nothing; something per connection (each trajectory gets one); something
    per value of `state_argument` (each trajectory gets one). Needed where tools are not marked read-only."""
    state_argument: str | None = None
    """Filled with a key per trajectory; the model does not see it."""

    @model_validator(mode="after")
    def _argument_where_needed(self) -> McpToolSettings:
        if (self.state == "argument") != (self.state_argument is not None):
            raise ValueError("state: argument and state_argument: NAME go together")
        return self


class MCPBaseTool(BaseTool):
    """One tool of one MCP server; `load_tools` makes one for each that the server offers.

    A result that the server marks as an error is told to the model like its own mistake: the protocol means it as
    something that the model can correct. A server that is down, breaks the connection or answers too late is the
    tool's failure.

    Subclass it to read results in another way: `_parse_tool_result(content) -> (text, metrics)`.
    """

    runs_inline = True  # every wait is on the connection's own loop
    state: str | None = None
    """`state` of entries that do not say it."""

    _states: TrajectoryStates
    _remote_name: str

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.settings = mcp_settings(config)
        self.call_timeout_s = self.settings.timeout

    def connect(self, states: TrajectoryStates, remote_name: str) -> None:
        """Say which tool of which server this is."""
        self._states, self._remote_name = states, remote_name

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any = None, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call the server's tool, which gets no `agent_data`. The row's `execute_kwargs` are arguments, above those of
        the model.

        Raises:
            DataError: the row names an argument that the tool does not have.
            ToolCallError: the server says that the call was wrong or could not be done.
            McpServerDown: it cannot be reached, or the connection broke.
            MCPError: it refused the request.
        """
        self._check_row(kwargs)
        connection, own = self._states.enter(self._trajectory(instance_id), instance_id)
        result = await connection.call(self._remote_name, {**parameters, **kwargs, **own})
        text, metrics = self._parse_tool_result(result.content)
        structured = _field(result, "structured_content")
        if not text and structured is not None:
            text = json.dumps(structured, ensure_ascii=False)
        if _field(result, "is_error"):
            raise ToolCallError(text or "the tool could not do this")
        images = [_image(part) for part in result.content if part.type == "image"]
        return ToolResponse(text=text, image=images or None), 0.0, metrics

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the trajectory's state at the server."""
        await self._states.leave(self._trajectory(instance_id), instance_id)

    async def close(self) -> None:
        """End the connections to the server."""
        await self._states.close()

    def _check_row(self, kwargs: dict[str, Any]) -> None:
        parameters = self.tool_schema.function.parameters
        known = list(parameters.properties) if parameters is not None else []
        for name in kwargs:
            if name not in known:
                raise DataError(
                    f"extra_info.tools_kwargs.{self.name}.execute_kwargs: the tool has no argument {name!r}"
                    f"{suggest(name, known)}. It has: {listing(known)}"
                )

    def _trajectory(self, instance_id: str) -> str:
        """All tools of a server share a trajectory's state."""
        return instance_id.removesuffix(f"/{self.name}")

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
        from verl_mt.extensions.toolbox.mcp_client.connection import wait_for
    except ImportError as error:
        raise PluginError(f'MCP tools need the mcp package ({error}): pip install "verl_mt[mcp]"') from error
    found = wait_for(_ask_all(servers, settings))
    connections = list({id(c): c for c, _ in found}.values())
    try:
        chosen = _select(found, entry.tool_selected_list)
        offers = _keep_apart(chosen, settings)
    except ConfigError:
        wait_for(_close_all(connections))
        raise
    if settings.state == "session":
        wait_for(_close_all(connections))  # each trajectory makes its own
    return offers


def _select(found: list[Found], wanted: list[str] | None) -> list[Found]:
    names = [tool.name for _, tool in found]
    for name in wanted or []:
        if name not in names:
            raise ConfigError(
                f"mcp.tool_selected_list: no server has a tool {name!r}{suggest(name, names)}. "
                f"There are: {listing(names)}"
            )
    chosen = [(connection, tool) for connection, tool in found if not wanted or tool.name in wanted]
    if not chosen:
        raise ConfigError("the MCP servers offer no tools")
    return chosen


def _keep_apart(chosen: list[Found], settings: McpToolSettings) -> list[Offer]:
    """Raises:
    ConfigError: nobody says how, or no tool has the argument.
    """
    from verl_mt.extensions.toolbox.mcp_client.states import TrajectoryStates

    argument = settings.state_argument
    writing = [tool.name for _, tool in chosen if not _is_read_only(tool)]
    if settings.state is None and writing:
        raise ConfigError(
            f"config.state: the MCP servers may remember what a call did, and all conversations would share it: "
            f"{listing(writing)} are not marked read-only. Set config.state: none (they remember nothing), session (a "
            "connection for each conversation), or argument with config.state_argument: NAME (an argument that tells "
            "conversations apart)"
        )
    keyed = [tool.name for _, tool in chosen if argument in (_field(tool, "input_schema").get("properties") or {})]
    if argument is not None and (lost := [name for name in writing if name not in keyed] or not keyed):
        raise ConfigError(
            f"config.state_argument: {listing(lost) if isinstance(lost, list) else 'the tools'} have no argument "
            f"{argument!r}. Name one that they have, or leave them out with mcp.tool_selected_list"
        )
    own = {id(c): TrajectoryStates(c, settings.state or "none", argument) for c, _ in chosen}
    shared = {id(c): TrajectoryStates(c, "none") for c, _ in chosen}
    return [
        (
            (shared if argument is not None and tool.name not in keyed else own)[id(connection)],
            tool.name,
            _openai_schema(tool, argument),
        )
        for connection, tool in chosen
    ]


def _is_read_only(tool: Any) -> bool:
    return tool.annotations is not None and _field(tool.annotations, "read_only_hint") is True


async def _close_all(connections: list[McpConnection]) -> None:
    await asyncio.gather(*(connection.close() for connection in connections))


async def _ask_all(servers: dict[str, McpServer], settings: McpToolSettings) -> list[Found]:
    from verl_mt.extensions.toolbox.mcp_client.connection import McpConnection

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


async def _ask(connection: McpConnection, timeout_s: float) -> list[Found]:
    try:
        async with asyncio.timeout(2 * timeout_s):
            tools = await connection.list_tools()
    except Exception as error:
        reason = str(error) or f"no list of tools within {2 * timeout_s:g} s"
        raise PluginError(f"MCP server {connection.name!r} cannot be used: {reason}") from error
    return [(connection, tool) for tool in tools]


def _openai_schema(tool: Any, hidden: str | None) -> dict[str, Any]:
    parameters = dict(_field(tool, "input_schema"))
    if hidden is not None and hidden in (parameters.get("properties") or {}):
        parameters["properties"] = {k: v for k, v in parameters["properties"].items() if k != hidden}
        parameters["required"] = [k for k in parameters.get("required") or [] if k != hidden]
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
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
    from verl_mt.extensions.toolbox.mcp_client.sdk import get

    return get(model, name)
