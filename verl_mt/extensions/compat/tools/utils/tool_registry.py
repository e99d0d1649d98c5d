"""Tools of a YAML file as a list, under verl's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_mt.plugins import load_object
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.registry import load_tools

__all__ = ["get_tool_class", "initialize_tools_from_config"]


def get_tool_class(cls_name: str) -> Any:
    """The class of a dotted path.

    Raises:
        PluginError: there is none.
    """
    return load_object(cls_name, what="tool")


def initialize_tools_from_config(tools_config_file: str | Path) -> list[BaseTool]:
    """The tools that the file declares, in their order; errors as of `load_tools`."""
    return list(load_tools(tools_config_file))
