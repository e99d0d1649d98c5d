"""From a tools YAML file to tools."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from verl_mt.config.declarations import Declaration, load_declarations
from verl_mt.errors import ConfigError, PluginError
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.function_tool import FunctionTool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, as_tool_schema
from verl_mt.tools.toolset import ToolEntry, ToolSet

__all__ = ["ToolSet", "load_tools"]

_MCP = "verl_mt.tools.mcp_base_tool"
CONFIG_KEY = "actor_rollout_ref.rollout.tool_kwargs.tools_config_file"


def load_tools(path: str | Path | None, *, config_key: str = CONFIG_KEY) -> ToolSet:
    """Make the tools that a YAML file declares, one object per entry::

        tools:
          - class_name: my_package.my_tools.MyTool   # a BaseTool class, or a @function_tool
            config: {}                               # the class's own settings
            tool_schema: null                        # null = the class's own schema
          - class_name: verl_mt.tools.mcp_base_tool.MCPBaseTool
            config: {type: mcp}
            mcp: {mcp_servers_config_path: servers.json}   # one tool for each that the servers offer

    Args:
        path: the file; None = no tools.
        config_key: where the path came from, for the error.

    Raises:
        ConfigError: the file is absent or has another shape, or an entry's schema or tool type is wrong.
        PluginError: a class does not resolve or is no tool, its constructor raised, or two tools have one name.
    """
    if path is None:
        return ToolSet()
    declarations = load_declarations(path, key="tools", config_key=config_key, fields=("tool_schema", "mcp"))
    return ToolSet(entry for declaration in declarations for entry in _make(declaration))


def _make(declaration: Declaration) -> list[ToolEntry]:
    where, config = declaration.where, declaration.config
    is_mcp = config.get("type") == "mcp" or config.get("use_mcp") is True
    if is_mcp:
        return _make_mcp(declaration)
    kind = config.get("type", "native")
    if kind != "native":
        raise ConfigError(f"{where}: config.type is {kind!r}, expected native or mcp. Leave it out, or write one.")
    if "mcp" in declaration.values:
        raise ConfigError(f"{where}: it has an mcp mapping, but config.type is not mcp. Write config: {{type: mcp}}")
    raw, schema = _schema(declaration)
    found = declaration.load()
    if isinstance(found, FunctionTool):
        tool = declaration.build(found.bind, config=config, tool_schema=schema)
    elif isinstance(found, BaseTool):
        if config or raw:
            raise ConfigError(f"{where}: a tool that is made already takes neither config nor tool_schema")
        tool = found
    elif not isinstance(found, type) and callable(found):
        raise PluginError(
            f"{where}: {declaration.class_name!r} is a plain function. Put @function_tool "
            "(from verl_mt.tools.function_tool) above it, or name a BaseTool class"
        )
    else:
        tool = declaration.build(declaration.load_class(BaseTool), config=config, tool_schema=schema)
    # The author's own dict keeps what a model_dump drops (a default of null); a tool may also answer with another one.
    own = raw if schema is not None and declaration.build(tool.get_openai_tool_schema) is schema else None
    return [ToolEntry.of(tool, where=where, schema=own)]


def _make_mcp(declaration: Declaration) -> list[ToolEntry]:
    # Only who declares a server loads the protocol's library.
    mcp: Any = importlib.import_module(_MCP)
    where, config = declaration.where, declaration.config
    kind: Any = declaration.load_class(mcp.MCPBaseTool)
    if declaration.values.get("tool_schema"):
        raise ConfigError(f"{where}: an MCP server gives the schemas of its tools. Leave tool_schema out")
    if kind.state is not None:
        config = {"state": kind.state, **config}
    try:
        found = mcp.discover(declaration.values.get("mcp"), config, beside=declaration.file.parent)
    except (ConfigError, PluginError) as error:
        raise type(error)(f"{where}: {error}") from error
    entries = []
    for states, name, raw in found:
        schema = OpenAIFunctionToolSchema.model_validate(raw)
        tool = declaration.build(kind, config=config, tool_schema=schema)
        tool.connect(states, name)
        named = f"{where} of MCP server {states.shared.name!r}"
        entries.append(ToolEntry.of(tool, where=named, schema=raw, server_checks=True))
    return entries


def _schema(declaration: Declaration) -> tuple[dict[str, Any] | None, OpenAIFunctionToolSchema | None]:
    raw = declaration.values.get("tool_schema")
    if not raw:
        return None, None
    try:
        schema = as_tool_schema(raw, f"{declaration.where}: tool_schema")
    except PluginError as error:
        raise ConfigError(str(error)) from error
    if schema.type != "function" or not schema.function.name.strip():
        raise ConfigError(
            f"{declaration.where}: tool_schema needs type: function and a function.name, "
            f"got type {schema.type!r} and name {schema.function.name!r}"
        )
    return raw, schema
