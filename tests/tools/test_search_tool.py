"""`SearchTool` behind the executor: what the model sees, what is counted, what a row may change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import yaml
from search_service import SearchService, found

from verl_mt.config_paths import configs_root
from verl_mt.data.conversation import ToolCall
from verl_mt.data.trajectory import Trajectory
from verl_mt.diagnostics.step_metrics import tool_metrics
from verl_mt.errors import PluginError
from verl_mt.tools.executor import ToolExecutor, ToolLimits, ToolSession
from verl_mt.tools.registry import load_tools

VERLS_SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the web.",
        "parameters": {
            "type": "object",
            "properties": {"query_list": {"type": "array", "items": {"type": "string"}, "description": "queries"}},
            "required": ["query_list"],
        },
    },
}


def open_tool(tmp_path, config: dict[str, Any], schema: Any = None, kwargs: Any = None, **limits: Any) -> ToolSession:
    entry = {
        "class_name": "verl_mt.tools.search_tool.SearchTool",
        "config": config,
        "tool_schema": schema,
    }
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [entry]}))
    return ToolExecutor(load_tools(file), ToolLimits(**limits), list).open("t", kwargs)


def run(session: ToolSession, *calls: dict[str, Any]):
    """The results of calls that stand in one turn."""

    async def conversation():
        await session.start()
        results = await session.run([ToolCall("search", arguments) for arguments in calls], turn=1)
        await session.close()
        return results

    return asyncio.run(conversation())


@pytest.mark.cap("V12", "C48")
def test_the_model_sees_the_passages(tmp_path):
    with SearchService() as service:
        (result,) = run(open_tool(tmp_path, {"retrieval_service_url": service.url}), {"query": "Paris"})
    assert result.failure is None and result.text == "Doc 1(Title: About Paris) It is Paris.\n"
    assert result.step_reward == 0.0


@pytest.mark.cap("V12", "C53")
def test_verls_yaml_and_its_list_of_queries_work(tmp_path):
    with SearchService() as service:
        config = {"retrieval_service_url": service.url, "num_workers": 120, "rate_limit": 120, "timeout": 30}
        session = open_tool(tmp_path, {**config, "type": "native"}, VERLS_SCHEMA)
        result, none = run(session, {"query_list": ["a", "b"]}, {"query_list": []})
    assert [body["queries"] for body in service.bodies] == [["a", "b"]]
    assert result.text == "Doc 1(Title: About a) It is a.\n---\nDoc 1(Title: About b) It is b.\n"
    assert none.failure == "model" and "needs a query" in none.text


@pytest.mark.cap("C54")
def test_the_cache_hit_rate_is_a_metric_of_the_step(tmp_path):
    with SearchService() as service:
        session = open_tool(tmp_path, {"retrieval_service_url": service.url})
        run(session, {"query": "a"}, {"query": "A"}, {"query": "b"}, {"query": " a"})
    trajectory = Trajectory("t", "p", "g", "e", counters=session.counters)
    metrics = tool_metrics([trajectory], ["search"])
    assert len(service.bodies) == 2 and metrics["tools/search/calls"] == 4
    assert metrics["tools/search/cache_hit_rate"] == 0.5 and metrics["tools/search/num_results"] == 1


@pytest.mark.cap("C46", "C55")
def test_a_service_that_is_down_is_told_to_the_model_and_counted(tmp_path):
    with SearchService() as service:
        url = service.url
    session = open_tool(tmp_path, {"retrieval_service_url": url, "retries": 0})
    (result,) = run(session, {"query": "Paris"})
    assert result.failure == "tool"
    assert result.text == "<error>Tool failed: the search service cannot be reached (ConnectError)</error>"
    assert session.counters["tools/search/errors"] == 1


@pytest.mark.cap("C53")
def test_of_several_queries_one_that_fails_is_marked_in_its_place(tmp_path):
    with SearchService(lambda b: (400, b"no") if "b" in b["queries"] else (200, found("A\na"))) as service:
        session = open_tool(tmp_path, {"retrieval_service_url": service.url}, VERLS_SCHEMA)
        (result,) = run(session, {"query_list": ["b", "a"]})
    failed = "<error>the search service answered 400: no</error>\n"
    assert result.failure is None and result.text == failed + "---\nDoc 1(Title: A) a\n"


@pytest.mark.parametrize("query", ["", "  "])
def test_an_empty_query_is_the_models_mistake(tmp_path, query):
    with SearchService() as service:
        session = open_tool(tmp_path, {"retrieval_service_url": service.url})
        (result,) = run(session, {"query": query})
    assert result.failure == "model" and service.bodies == []


def test_a_row_changes_its_own_searches_and_no_others(tmp_path):
    with SearchService() as service:
        session = open_tool(
            tmp_path,
            {"retrieval_service_url": service.url},
            kwargs={"search": {"execute_kwargs": {"topk": 7}, "create_kwargs": {"question": "?", "ground_truth": "x"}}},
        )
        run(session, {"query": "a"})
        other = session._executor.open("u")
        run(other, {"query": "a"})
    assert [body["topk"] for body in service.bodies] == [7, 3]


def test_a_row_that_changes_what_it_cannot_is_an_error_that_names_what_it_can(tmp_path):
    with SearchService() as service:
        kwargs = {"search": {"execute_kwargs": {"concurrency": 7}}}
        session = open_tool(tmp_path, {"retrieval_service_url": service.url}, kwargs=kwargs)
        (result,) = run(session, {"query": "a"})
    assert result.failure == "tool" and "unknown search setting 'concurrency'" in result.text and "topk" in result.text


def test_an_unknown_key_in_the_yaml_is_refused_at_the_start(tmp_path):
    with pytest.raises(
        PluginError, match=r"config of tool 'search': unknown search setting 'topn'; did you mean 'topk'"
    ):
        open_tool(tmp_path, {"topn": 3})


def test_the_shipped_yaml_loads():
    tools = load_tools(configs_root() / "tools_configs" / "search_tool.yaml")
    assert tools.names == ["search"] and tools["search"].settings.topk == 3
    assert tools.schemas() == [{**tools["search"].get_openai_tool_schema().to_template()}]
