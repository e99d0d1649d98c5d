"""Which MCP servers there are: the `mcpServers` mapping that MCP clients share, from a file or inline."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from verl_mt.bounds import MAX_YAML_BYTES, MAX_YAML_VALUES, excess
from verl_mt.errors import ConfigError, DataError
from verl_mt.plugins import suggest
from verl_mt.reading import parse_json, read_bytes, read_yaml
from verl_mt.tools.settings import ToolSettings, parse_settings

_VARIABLE = re.compile(r"\$\{(\w+)\}")


class McpServer(ToolSettings):
    """How to reach one server: a command to start (stdio), or a URL (streamable HTTP)."""

    command: str | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    """On top of the few harmless variables that a started server gets; keys and tokens do not pass by themselves."""
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    auth_token: str | None = None
    """Short for the header `Authorization: Bearer ...`."""
    transport: Literal["stdio", "http", "streamable-http", "streamable_http"] | None = None
    """Not needed: the other keys decide."""

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command (stdio) or url (streamable HTTP)")
        if self.url is not None and not re.match(r"https?://.", self.url):
            raise ValueError(f"url {self.url!r} is not the address of a server: write http://... or https://...")
        if self.transport is not None and (self.transport == "stdio") != (self.url is None):
            raise ValueError(f"transport {self.transport} does not fit {'url' if self.url else 'command'}")
        return self

    @property
    def all_headers(self) -> dict[str, str]:
        """`headers` with the token."""
        token = {"Authorization": f"Bearer {self.auth_token}"} if self.auth_token is not None else {}
        return {**token, **self.headers}


class McpEntry(ToolSettings):
    """The `mcp` mapping of a YAML entry; one of the first two is needed."""

    mcp_servers_config_path: str | None = None
    """JSON or YAML file with `mcpServers`; relative to the working directory, or to the tools file."""
    servers: dict[str, dict[str, Any]] | None = None
    """The same mapping, inline."""
    tool_selected_list: list[str] | None = None
    """The tools to offer; null = all."""

    @model_validator(mode="after")
    def _one_source(self) -> McpEntry:
        if (self.mcp_servers_config_path is None) == (self.servers is None):
            raise ValueError("give either mcp_servers_config_path or servers")
        return self


def read_servers(entry: McpEntry, *, beside: Path) -> dict[str, McpServer]:
    """The servers of an entry. `${NAME}` in a text is the environment's variable, so that files hold no secrets.

    Args:
        beside: folder of the tools file.

    Raises:
        ConfigError: the file is absent or has another shape, a server's keys do not fit, a variable is not set.
    """
    where, servers = "mcp.servers", entry.servers
    if entry.mcp_servers_config_path is not None:
        where = entry.mcp_servers_config_path
        servers = _read_file(Path(where).expanduser(), beside)
    if not servers:
        raise ConfigError(f"{where}: no servers. Write mcpServers: {{name: {{url: ...}}}}")
    found = {}
    for name, spec in servers.items():
        if not isinstance(spec, Mapping):
            raise ConfigError(f"{where}: server {name!r} must be a mapping with command or url, got {spec!r}")
        try:
            found[name] = parse_settings(McpServer, _expand(dict(spec)))
        except ConfigError as error:
            raise ConfigError(f"{where}: server {name!r}: {error}") from error
    return found


def _read_file(path: Path, beside: Path) -> Any:
    candidates = [path] if path.is_absolute() else [Path.cwd() / path, beside / path]
    file = next((c for c in candidates if c.is_file()), None)
    if file is None:
        raise ConfigError(
            f"mcp.mcp_servers_config_path: no file {str(path)!r}. Looked at {', '.join(map(str, candidates))}"
        )
    try:
        content = parse_json(read_bytes(file, MAX_YAML_BYTES)) if file.suffix == ".json" else read_yaml(file)
    except (ValueError, DataError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if too_much := excess(content, max_values=MAX_YAML_VALUES, max_characters=MAX_YAML_BYTES):
        raise ConfigError(f"{file}: {too_much}. Write a shorter file")
    if not isinstance(content, Mapping) or not isinstance(content.get("mcpServers"), Mapping):
        got = f"keys {list(content)}" if isinstance(content, Mapping) else type(content).__name__
        hint = suggest(next(iter(content), ""), ["mcpServers"]) if isinstance(content, Mapping) else ""
        raise ConfigError(f"{file}: expected {{mcpServers: {{name: {{command or url}}}}}}, got {got}{hint}")
    return content["mcpServers"]


def _expand(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item) for item in value]
    return _VARIABLE.sub(_variable, value) if isinstance(value, str) else value


def _variable(match: re.Match[str]) -> str:
    if match[1] not in os.environ:
        raise ConfigError(f"{match[0]}: the environment has no {match[1]}")
    return os.environ[match[1]]
