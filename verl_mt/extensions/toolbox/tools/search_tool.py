"""`search`: the model looks something up in a retrieval service or with Google."""

from __future__ import annotations

from typing import Any

from verl_mt.errors import ToolCallError
from verl_mt.extensions.toolbox.tools.search_client import SearchClient, SearchError, SearchResult, SearchSettings
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_BETWEEN_QUERIES = "---\n"


class SearchTool(BaseTool):
    """Search, as verl's tool of this name and slime's Search-R1 example do it.

    The entry's `config` holds `SearchSettings` (verl's `retrieval_service_url`, `timeout`, `num_workers` and
    `rate_limit` are understood); `topk`, `backend`, `retrieval_service_url`, `gl` and `hl` may also stand in a row, in
    `extra_info.tools_kwargs.<name>.execute_kwargs`. The argument is whichever the schema has: `query` (text) or verl's
    `query_list` (texts, searched at once, answered in their order).

    Metrics: `tools/<name>/cache_hit_rate`, the share of queries that needed no request, and `num_results` per call.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.settings = SearchSettings.from_mapping(config, f"config of tool {self.name!r}")
        self.client = SearchClient(self.settings)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """One string, `query`."""
        schema = self.__dict__.get("tool_schema")
        if schema is not None:
            return schema
        query = {"type": "string", "description": "What to look for"}
        parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "search",
                    "description": "Search a collection of passages.",
                    "parameters": parameters,
                },
            }
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any = None, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Search; `kwargs` are the row's settings.

        Raises:
            ToolCallError: no query, or an empty one.
            SearchError: every query failed.
            ValueError: the row has a setting that does not exist.
        """
        settings = self.settings.overridden(kwargs, f"execute_kwargs of tool {self.name!r}")
        queries = _queries(parameters)
        results = await self.client.search_all(queries, settings)
        found = [result for result in results if isinstance(result, SearchResult)]
        if not found:
            raise next(result for result in results if isinstance(result, SearchError))
        texts = [_shown(result) for result in results]
        metrics = {
            "cache_hit_rate": sum(result.hit for result in found) / len(results),
            "num_results": sum(len(result.documents) for result in found),
        }
        return ToolResponse(text=_BETWEEN_QUERIES.join(texts)), 0.0, metrics


def _shown(result: SearchResult | SearchError) -> str:
    return f"<error>{result}</error>\n" if isinstance(result, SearchError) else result.text


def _queries(parameters: dict[str, Any]) -> list[str]:
    given = parameters.get("query", parameters.get("query_list"))
    queries = [given] if isinstance(given, str) else given
    if not isinstance(queries, list) or not queries or not all(isinstance(q, str) and q.strip() for q in queries):
        raise ToolCallError("a search needs a query: some words to look for")
    return queries
