"""What a tools file says about MCP servers: verl's form, checked before anything is started."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from verl_mt.errors import ConfigError, PluginError
from verl_mt.extensions.toolbox.mcp_client.servers import McpEntry, read_servers
from verl_mt.extensions.toolbox.tools.mcp_base_tool import discover, mcp_settings
from verl_mt.extensions.toolbox.tools.mcp_search_tool import MCPSearchTool
from verl_mt.tools.registry import load_tools
from verl_mt.tools.schemas import OpenAIFunctionToolSchema
from verl_mt.tools.settings import parse_settings

FILE = {"mcp_servers_config_path": "servers.json"}


def servers(content, folder, entry=FILE):
    (folder / "servers.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_servers(parse_settings(McpEntry, entry), beside=folder)


@pytest.mark.cap("V2")
def test_the_file_that_mcp_clients_share_is_read_beside_the_tools_file(tmp_path):
    found = servers(
        {
            "mcpServers": {
                "here": {"command": "python", "args": ["-m", "x"], "env": {"A": "b"}, "transport": "stdio"},
                "there": {"url": "http://h/mcp", "auth_token": "t", "headers": {"X": "y"}},
            }
        },
        tmp_path,
    )
    assert found["here"].command == "python" and found["here"].args == ["-m", "x"] and found["here"].url is None
    assert found["there"].all_headers == {"Authorization": "Bearer t", "X": "y"}


def test_a_json_file_may_be_indented_with_tabs(tmp_path):
    assert servers('{\n\t"mcpServers": {\n\t\t"a": {"command": "x"}\n\t}\n}', tmp_path)["a"].command == "x"


def test_secrets_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3")
    inline = {"servers": {"a": {"url": "http://h/mcp", "auth_token": "${MY_TOKEN}"}}}
    assert servers({}, tmp_path, inline)["a"].auth_token == "s3"
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ConfigError, match=r"\$\{MY_TOKEN\}: the environment has no MY_TOKEN"):
        servers({}, tmp_path, inline)


def test_an_error_never_shows_a_secret(tmp_path):
    for spec in ({"auth_token": "hunter2"}, {"url": "http://h", "auth_token": ["hunter2"]}):
        with pytest.raises(ConfigError) as caught:
            servers({"mcpServers": {"a": spec}}, tmp_path)
        assert "hunter2" not in str(caught.value) and "server 'a'" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"mcpServers": {"a": {}}}, "server 'a': .*give either command"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://h"}}}, "give either command"),
        ({"mcpServers": {"a": {"comand": "x"}}}, "unknown key 'comand'; did you mean 'command'"),
        ({"mcpServers": {"a": {"url": "http://h", "transport": "sse"}}}, "config.transport: .*'sse'"),
        ({"mcpServers": {"a": {"url": "http://h", "transport": "stdio"}}}, "transport stdio does not fit url"),
        ({"mcpServers": {"a": "python"}}, "server 'a' must be a mapping"),
        ({"mcpServers": {}}, "no servers"),
        ({"servers": {}}, r"servers.json: expected \{mcpServers.*got keys \['servers'\]"),
        ("{", "servers.json: cannot be read"),
        ("[" * 200_000, "servers.json: cannot be read: nested too deeply"),
        ('{"mcpServers": {"a": {"env": ' + "[" * 300 + "]" * 300 + "}}}", "servers.json: more than 64 levels"),
        (" " * 2_000_001, "servers.json has 2000001 bytes"),
    ],
)
def test_a_wrong_servers_file_is_one_error_that_names_it(content, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        servers(content, tmp_path)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({}, "give either mcp_servers_config_path or servers"),
        ({**FILE, "servers": {}}, "give either mcp_servers_config_path or servers"),
        ({"tool_selected": ["a"]}, "unknown key 'tool_selected'; did you mean 'tool_selected_list'"),
        ({"mcp_servers_config_path": "nowhere.json"}, "no file 'nowhere.json'. Looked at .*nowhere.json, .*nowhere"),
    ],
)
def test_a_wrong_entry_is_refused(entry, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        servers({}, tmp_path, entry)


def test_verls_settings_are_read_and_others_refused():
    settings = mcp_settings({"type": "mcp", "use_mcp": True, "rate_limit": 120, "timeout": 60})
    assert (settings.rate_limit, settings.timeout) == (120.0, 60.0)
    with pytest.raises(ConfigError, match="unknown key 'num_workers'"):
        mcp_settings({"type": "mcp", "num_workers": 3})
    with pytest.raises(ConfigError, match=r"config.rate_limit: Input should be greater than 0"):
        mcp_settings({"rate_limit": 0})
    for wrong in ({"state": "argument"}, {"state_argument": "key"}, {"state": "none", "state_argument": "key"}):
        with pytest.raises(ConfigError, match="state: argument and state_argument: NAME go together"):
            mcp_settings(wrong)


def test_both_versions_of_the_protocols_package_may_be_installed():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (mcp,) = project["optional-dependencies"]["mcp"]
    allowed = Requirement(mcp).specifier
    # openenv needs version 1, verifiers pins 2.0.0.
    assert all(version in allowed for version in ("1.24.0", "1.30.0", "2.0.0", "2.3.0")) and "1.23.0" not in allowed


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("config: {type: mcp}", r"tools\[0\].*write mcp: \{mcp_servers_config_path"),
        ("mcp: {servers: {}}", r"tools\[0\].*config.type is not mcp"),
        ("config: {type: gym}", "config.type is 'gym', expected native or mcp"),
        (
            "config: {type: mcp}\n    tool_schema: {type: function, function: {name: a}}\n    mcp: {}",
            "an MCP server gives the schemas",
        ),
    ],
)
def test_a_wrong_tools_file_names_file_and_entry(entry, says, tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools:\n  - class_name: verl_mt.tools.mcp_base_tool.MCPBaseTool\n    {entry}\n")
    with pytest.raises(ConfigError, match=says):
        load_tools(file)


def test_without_the_mcp_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    for name in ("connection", "sdk"):
        monkeypatch.delitem(sys.modules, f"verl_mt.extensions.toolbox.mcp_client.{name}", raising=False)
    with pytest.raises(PluginError, match=r'pip install "verl_mt\[mcp\]"'):
        discover({"servers": {"a": {"url": "http://127.0.0.1:9/mcp"}}}, {"type": "mcp"}, beside=tmp_path)


def test_verls_search_class_counts_the_parts_of_a_result():
    schema = {"type": "function", "function": {"name": "s", "parameters": {"type": "object", "properties": {}}}}
    tool = MCPSearchTool({"type": "mcp"}, OpenAIFunctionToolSchema.model_validate(schema))
    parts = [SimpleNamespace(type="text", text="one"), SimpleNamespace(type="text", text="two")]
    assert tool._parse_tool_result(parts) == ("one\ntwo", {"query_count": 1, "total_results": 2})
