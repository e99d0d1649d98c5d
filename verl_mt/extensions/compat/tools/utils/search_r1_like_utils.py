"""One request to a retrieval service for several queries, under verl's names."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import httpx

DEFAULT_TIMEOUT = 30


def call_search_api(
    retrieval_service_url: str,
    query_list: list[str],
    topk: int = 3,
    return_scores: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[dict[str, Any] | None, str | None]:
    """(the service's answer, None), or (None, what went wrong)."""
    body = {"queries": query_list, "topk": topk, "return_scores": return_scores}
    try:
        answer = httpx.post(retrieval_service_url, json=body, timeout=timeout)
        answer.raise_for_status()
        found = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        return None, f"{retrieval_service_url}: {error or type(error).__name__}"
    return (found, None) if isinstance(found, dict) else (None, f"{retrieval_service_url}: not a JSON object")


def perform_single_search_batch(
    retrieval_service_url: str,
    query_list: list[str],
    topk: int = 3,
    concurrent_semaphore: threading.Semaphore | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[str, dict[str, Any]]:
    """All queries in one request.

    Returns:
        A JSON text `{"result": ...}` with the passages of each query, a line `---` between queries; and what is known:
        `query_count`, `queries`, `status` (success, no_results, api_error), `total_results`, `api_request_error`,
        `api_response`, `formatted_result`.
    """
    with concurrent_semaphore or contextlib.nullcontext():
        answer, problem = call_search_api(retrieval_service_url, query_list, topk, timeout=timeout)
    known: dict[str, Any] = {
        "query_count": len(query_list), "queries": query_list, "api_request_error": problem, "api_response": answer,
        "status": "api_error", "total_results": 0, "formatted_result": None,
    }  # fmt: skip
    if answer is None:
        return json.dumps({"result": f"Search error: {problem}"}, ensure_ascii=False), known
    found = answer.get("result") or []
    if not found:
        return json.dumps({"result": "No search results found."}), known | {"status": "no_results"}
    text = "\n---\n".join(_shown(passages) for passages in found)
    known |= {"status": "success", "total_results": sum(map(len, found)), "formatted_result": text}
    return json.dumps({"result": text}, ensure_ascii=False), known


def _shown(passages: list[dict[str, Any]]) -> str:
    parts = []
    for number, passage in enumerate(passages, 1):
        title, _, text = passage["document"]["contents"].partition("\n")
        parts.append(f"Doc {number} (Title: {title})\n{text}")
    return "\n\n".join(parts)
