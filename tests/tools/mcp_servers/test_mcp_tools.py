"""MCP tools against real servers, over stdio and streamable HTTP: discovery, calls, failures, reconnecting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

pytest.importorskip("mcp", reason="needs the mcp extra")

from tool_runs import roll_out

from verl_mt.data.conversation import ToolCall
from verl_mt.data.trajectory import StopReason
from verl_mt.errors import ConfigError, PluginError
from verl_mt.extensions.toolbox.mcp_client import connection as connections
from verl_mt.extensions.toolbox.tools.mcp_base_tool import MCPBaseTool
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.registry import load_tools
from verl_mt.tools.toolset import ToolSet

pytestmark = pytest.mark.slow

SERVER = str(Path(__file__).with_name("demo_server.py"))
MCP_TOOL = "verl_mt.tools.mcp_base_tool.MCPBaseTool"
ALL = ["add", "norm", "wait", "find", "look", "secret", "count", "visits", "order", "die"]


class Shouting(MCPBaseTool):
    """Reads results in its own way, as a subclass of verl's class would."""

    def _parse_tool_result(self, content):
        return content[0].text + "!", {"parts": len(content)}


def stdio(**more) -> dict:
    return {"demo": {"command": sys.executable, "args": [SERVER], **more}}


def load(folder: Path, servers: dict, kind: str = MCP_TOOL, selected=None, **config) -> ToolSet:
    """The tools of a YAML entry in verl's form."""
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    config = {"connect_timeout_s": 600.0, "state": "none", **config}
    mcp = {"mcp_servers_config_path": "servers.json", **({"tool_selected_list": selected} if selected else {})}
    entry = {"class_name": kind, "config": {"type": "mcp", **config}, "mcp": mcp}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return load_tools(folder / "tools.yaml")


@contextlib.contextmanager
def http_server(port: int):
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            assert process.poll() is None, "the server did not start"
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def kept_port():
    """A port that nobody but a server gets meanwhile. Nobody listens there, so connections to it are refused."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@pytest.fixture(scope="module", params=["stdio", "http"])
def tools(request, tmp_path_factory):
    with contextlib.ExitStack() as stack:
        servers = stdio()
        if request.param == "http":
            stack.enter_context(http_server(port := stack.enter_context(kept_port())))
            servers = {"demo": {"url": f"http://127.0.0.1:{port}/mcp"}}
        tools = load(tmp_path_factory.mktemp(request.param), servers)
        yield tools
        asyncio.run(ToolExecutor(tools, ToolLimits(), str.split).close())


def run(tools: ToolSet, *calls: tuple[str, dict], **limits):
    """Results of one turn's calls, and the counters."""

    async def go():
        session = ToolExecutor(tools, ToolLimits(**limits), str.split).open("t")
        results = await session.run([ToolCall(n, a, id=str(k)) for k, (n, a) in enumerate(calls)], turn=1)
        await session.close()
        return results, session.counters

    return asyncio.run(go())


def started_servers() -> set[int]:
    """Children of this process that speak over stdio."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").endswith(SERVER):
                    found.add(int(pid))
    return found


def connection(tools: ToolSet):
    return tools[tools.names[0]]._states.shared


@pytest.mark.cap("V2")
def test_every_tool_of_a_server_is_found_with_its_schema(tools):
    assert tools.names == ALL
    schema = {s["function"]["name"]: s["function"] for s in tools.schemas()}
    assert schema["add"]["description"] == "Add two numbers."
    assert schema["add"]["parameters"]["required"] == ["a"]
    assert schema["add"]["parameters"]["properties"]["b"] == {"default": 1, "title": "B", "type": "integer"}
    assert schema["norm"]["parameters"]["$defs"]["Point"]["required"] == ["x"]


@pytest.mark.cap("C53")
def test_calls_run_at_once_and_are_answered_in_order(tools):
    first, *others = [("wait", {"seconds": s, "others": 3}) for s in (0.1, 0, 0, 0)]
    results, counters = run(tools, first, *others, ("add", {"a": 1}))
    assert [r.text for r in results] == ["4 at once"] * 4 + ["2"]
    assert counters["tools/wait/calls"] == 4 and connection(tools).num_connects == 1


def test_wrong_arguments_are_the_models_mistake_and_never_reach_the_server(tools):
    (wrong, nested, right), counters = run(
        tools, ("add", {"a": "one"}), ("norm", {"point": {"y": 1}}), ("norm", {"point": {"x": 3}})
    )
    assert wrong.failure == nested.failure == "model" and "wrong arguments for add" in wrong.text
    assert right.text == "13"
    assert counters["tools/add/model_errors"] == 1 and "tools/add/latency_s" not in counters


def test_an_error_that_the_server_reports_is_told_to_the_model_as_its_own(tools):
    (result,), counters = run(tools, ("find", {"name": "a.txt"}))
    assert result.failure == "model" and "there is no file a.txt" in result.text
    assert counters["tools/find/model_errors"] == 1 and "tools/find/errors" not in counters


def test_a_picture_is_counted_until_rollouts_can_show_it(tools):
    response, _, _ = asyncio.run(tools["look"].execute("i", {}))
    assert response.image == ["data:image/png;base64,iVBORw=="]


@pytest.mark.cap("C55")
def test_a_call_that_takes_too_long_costs_its_deadline_and_the_connection_stays(tools):
    (late,), counters = run(tools, ("wait", {"seconds": 1e6}), timeout_s=0.3)
    assert late.failure == "tool" and late.text == "<error>Tool failed: timed out after 0.3 s</error>"
    assert counters["tools/wait/timeouts"] == 1
    assert run(tools, ("add", {"a": 2}))[0][0].text == "3" and connection(tools).num_connects == 1


def test_a_server_that_dies_in_a_call_fails_that_call_and_is_started_again(tmp_path):
    tools = load(tmp_path, stdio())
    (died,), counters = run(tools, ("die", {}))
    assert died.failure == "tool" and "the connection to MCP server 'demo' broke" in died.text
    assert counters["tools/die/errors"] == 1
    assert run(tools, ("add", {"a": 4}))[0][0].text == "5" and connection(tools).num_connects == 2
    asyncio.run(connection(tools).close())


def test_a_server_killed_between_two_calls_is_started_again_without_a_failed_call(tmp_path):
    before = started_servers()
    tools = load(tmp_path, stdio())
    (pid,) = started_servers() - before
    os.kill(pid, signal.SIGKILL)
    while connection(tools)._client is not None:
        time.sleep(0.01)
    assert run(tools, ("add", {"a": 4}))[0][0].text == "5" and connection(tools).num_connects == 2
    asyncio.run(connection(tools).close())


@pytest.mark.cap("C55")
def test_a_server_that_is_down_costs_little_and_comes_back(tmp_path, monkeypatch):
    now, attempts, opened = [0.0], [], connections.open_transport

    def counted(*args, **kwargs):
        attempts.append(now[0])
        return opened(*args, **kwargs)

    monkeypatch.setattr(connections, "open_transport", counted)
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with kept_port() as port:
        with http_server(port):
            tools = load(tmp_path, {"demo": {"url": f"http://127.0.0.1:{port}/mcp"}})
            assert run(tools, ("add", {"a": 1}))[0][0].text == "2"
        # The first call finds out that the server is gone, and may have tried to reach it again.
        assert run(tools, ("add", {"a": 1}))[0][0].failure == "tool" and connection(tools)._client is None
        connection(tools)._pause_s, now[0] = 0.0, 100.0
        attempts.clear()
        for _ in range(20):
            results, counters = run(tools, *[("add", {"a": 1})] * 8)
            assert all(r.failure == "tool" and "MCP server 'demo'" in r.text for r in results)
            assert counters["tools/add/errors"] == 8
            now[0] += 0.25
        assert attempts == [100.0, 101.0, 103.0], "pauses of 1, 2 and 4 seconds"
        with http_server(port):
            now[0] = 107.0
            assert run(tools, ("add", {"a": 1}))[0][0].text == "2"
    asyncio.run(connection(tools).close())


def test_a_server_that_never_answers_is_refused_at_start_in_bounded_time(tmp_path):
    said = r"tools\[0\].*MCP server 'demo' cannot be used.*no answer within 0.5 s"
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PluginError, match=said):
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        load(tmp_path, {"demo": {"url": url}}, connect_timeout_s=0.5)


def test_a_server_that_does_not_start_is_refused_with_what_it_wrote(tmp_path):
    broken = {"demo": {"command": sys.executable, "args": ["-c", "raise SystemExit('no database')"]}}
    with pytest.raises(PluginError, match=r"MCP server 'demo' cannot be used: .*no database"):
        load(tmp_path, broken)
    with pytest.raises(PluginError, match=r"MCP server 'demo' cannot be used: .*No such file"):
        load(tmp_path, {"demo": {"command": "/no/such/server"}})


def test_tools_are_selected_and_a_wrong_name_lists_what_there_is(tmp_path):
    tools = load(tmp_path, stdio(), selected=["norm", "add"])
    assert tools.names == ["add", "norm"]
    asyncio.run(connection(tools).close())
    with pytest.raises(ConfigError, match=r"no server has a tool 'ad'; did you mean 'add'\?\. There are: add, count"):
        load(tmp_path, stdio(), selected=["ad"])


def test_a_started_server_gets_the_environment_that_the_file_gives_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setenv("DEMO_TOKEN", "t0ken")
    monkeypatch.setenv("OTHER_TOKEN", "hidden")
    tools = load(tmp_path, stdio(env={"TOKEN": "${DEMO_TOKEN}"}))
    results, _ = run(tools, ("secret", {"name": "TOKEN"}), ("secret", {"name": "OTHER_TOKEN"}))
    assert [r.text for r in results] == ["t0ken", "unset"]
    asyncio.run(connection(tools).close())


def test_a_subclass_reads_results_its_own_way_and_settings_hold(tmp_path, monkeypatch):
    tools = load(tmp_path, stdio(), kind=f"{__file__}:Shouting", timeout=0.4, rate_limit=20.0)
    pauses, sleep = [], asyncio.sleep

    async def paused(seconds, *result):
        pauses.append(seconds)
        return await sleep(0, *result)

    assert tools["add"].call_timeout_s == 0.4
    tools["add"].call_timeout_s = None  # these calls have the time that they need
    with monkeypatch.context() as patch:
        patch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: 0.0))
        patch.setattr(asyncio, "sleep", paused)
        results, counters = run(tools, *[("add", {"a": 1})] * 5)
    assert [r.text for r in results] == ["2!"] * 5 and counters["tools/add/parts"] == 5
    assert sorted(s for s in pauses if s) == pytest.approx([1 / 20, 2 / 20, 3 / 20, 4 / 20])
    connection(tools)._next_call_s = 0.0
    (late,), _ = run(tools, ("wait", {"seconds": 1e6}))
    assert late.text == "<error>Tool failed: timed out after 0.4 s</error>"
    asyncio.run(connection(tools).close())


def test_closing_ends_the_server_that_was_started(tmp_path):
    before = started_servers()
    tools = load(tmp_path, stdio())
    assert len(started_servers() - before) == 1
    executor = ToolExecutor(tools, ToolLimits(), str.split)
    asyncio.run(executor.close())
    asyncio.run(executor.close())
    assert started_servers() == before


@pytest.mark.cap("C55")
def test_a_server_that_dies_in_the_middle_of_a_batch_kills_no_trajectory(tmp_path):
    tools = load(tmp_path, stdio())
    calls = [
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        for name, arguments in (("add", '{"a": 1}'), ("die", "{}"), ("add", '{"a": 2}'))
    ]
    done = roll_out([*calls, "the end"], tools, n=3)
    assert [t.stop_reason for t in done] == [StopReason.FINISHED] * 3 and all(t.reward == 1.0 for t in done)
    texts = [[m["content"] for m in t.messages if m["role"] == "tool"] for t in done]
    assert all(len(t) == 3 for t in texts) and all("broke" in t[1] or "is down" in t[1] for t in texts)
    assert not any(t.counters.get("tools/add/model_errors") for t in done)
    asyncio.run(connection(tools).close())


def conversations(tools: ToolSet, *rounds: str, counted: str = "count", **kwargs) -> list[list[str]]:
    """What `count` or `order` answers in two conversations, whose calls take turns as `rounds` says ("a", "b")."""

    async def talk():
        executor = ToolExecutor(tools, ToolLimits(), str.split)
        sessions = {name: executor.open(name, kwargs or None) for name in ("a", "b")}
        said = {"a": [], "b": []}
        for name in rounds:
            (result,) = await sessions[name].run([ToolCall(counted, {}, "0")], turn=1)
            said[name].append(result.text)
        for session in sessions.values():
            await session.close()
        await executor.close()
        return list(said.values())

    return asyncio.run(talk())


def test_a_server_that_may_remember_is_refused_with_what_to_set(tmp_path):
    before = started_servers()
    said = (
        r"config.state: .* all conversations would share it: add, .*Set config.state: none .*, session .*, or argument"
    )
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, stdio(), state=None)
    with pytest.raises(ConfigError, match=r"config.state_argument: add have no argument 'key'"):
        load(tmp_path, stdio(), selected=["add", "order"], state="argument", state_argument="key")
    with pytest.raises(ConfigError, match=r"config.state_argument: the tools have no argument 'key'"):
        load(tmp_path, stdio(), selected=["look"], state="argument", state_argument="key")
    assert started_servers() == before
    tools = load(tmp_path, stdio(), selected=["look"], state=None)  # it is marked read-only
    asyncio.run(connection(tools).close())


def test_conversations_share_what_a_server_remembers_only_where_you_say_so(tmp_path):
    assert conversations(load(tmp_path, stdio()), *"aab") == [["1", "2"], ["3"]]
    assert conversations(load(tmp_path, stdio(), state="session"), *"abab") == [["1", "2"], ["1", "2"]]


def test_an_argument_tells_conversations_apart_and_the_model_does_not_see_it(tmp_path):
    tools = load(tmp_path, stdio(), selected=["order"], state="argument", state_argument="key")
    assert list(tools.schemas()[0]["function"]["parameters"]["properties"]) == ["item"]
    row = {"order": {"execute_kwargs": {"item": "tea"}}}
    assert conversations(tools, *"aabb", counted="order", **row) == [["tea 1", "tea 2"], ["tea 1", "tea 2"]]
    wrong = {"order": {"execute_kwargs": {"itme": "tea"}}}
    tools = load(tmp_path, stdio(), selected=["order"], state="argument", state_argument="key")
    ((text,), _) = conversations(tools, "a", counted="order", **wrong)
    assert "execute_kwargs: the tool has no argument 'itme'; did you mean 'item'?" in text


def test_each_conversation_has_its_session_over_http(tmp_path):
    with kept_port() as port, http_server(port):
        tools = load(tmp_path, {"demo": {"url": f"http://127.0.0.1:{port}/mcp"}}, selected=["visits"], state="session")
        assert conversations(tools, *"abab", counted="visits") == [["1 True", "2 True"]] * 2


def test_a_conversation_that_lost_its_session_gets_no_other_one(tmp_path):
    before = started_servers()
    tools = load(tmp_path, stdio(), state="session")
    assert started_servers() == before, "each conversation starts its own"

    async def talk():
        executor = ToolExecutor(tools, ToolLimits(), str.split)
        a, b = executor.open("a"), executor.open("b")
        calls = [(a, "count"), (b, "count"), (a, "die"), (a, "count"), (b, "count")]
        said = [(await session.run([ToolCall(name, {}, "0")], turn=1))[0].text for session, name in calls]
        await a.close()
        await b.close()
        return said

    said = asyncio.run(talk())
    assert said[:2] == ["1", "1"] and "broke" in said[2] and "with it went its state" in said[3] and said[4] == "2"
    assert started_servers() == before
