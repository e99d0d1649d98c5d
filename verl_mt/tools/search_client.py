"""Asking a search service: shared by the search tool and by custom generate functions.

Two services: one of one's own that speaks Search-R1's protocol (`python -m verl_mt.retrieval` does)::

    POST {"queries": [...], "topk": 3, "return_scores": false}
    -> {"result": [[{"contents": "Title\\nText", ...}, ...], ...]}        # or [[{"document": {...}, "score": 1.0}]]

and Google through serper.dev.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from verl_mt.tools.coalescing_cache import CoalescingCache
from verl_mt.tools.limiter import ConcurrencyLimit
from verl_mt.tools.search_settings import SearchSettings

NO_RESULTS = "No results."
"""What the model is told where nothing was found: an observation is never empty."""

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 5.0
_RETRIED_STATUS = (408, 425, 429)
"""With 5xx: what another try may mend. Other 4xx say that the request is wrong, and would say so again."""

_jitter = random.Random()
"""Not the global generator: its state belongs to the run."""

# What a document must not contain where results stand between tags in the model's own text.
_TAG = re.compile(r"<(?=\s*/?\s*(?:think|search|information|answer)\s*>)", re.IGNORECASE)


class SearchError(Exception):
    """A search that failed; the text is fit to be shown to the model."""


@dataclass(frozen=True)
class SearchResult:
    """The answer to one query."""

    documents: tuple[str, ...]
    """Passages, best first; the first line is the title."""
    hit: bool
    """Whether it came without a request of its own."""

    @property
    def text(self) -> str:
        """The passages as the model sees them."""
        return format_documents(self.documents) or NO_RESULTS


class SearchClient:
    """Searches with a concurrency limit, a cache, retries and deadlines, all of them this object's own.

    Args:
        settings: the defaults of every search.
    """

    def __init__(self, settings: SearchSettings):
        self.settings = settings
        self.cache: CoalescingCache[tuple[str, ...]] = CoalescingCache(settings.cache_size)
        self._limit = ConcurrencyLimit(settings.concurrency)
        # Connections belong to the event loop that opened them.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def search(self, query: str, settings: SearchSettings | None = None) -> SearchResult:
        """The passages for one query. White space and case do not make another query.

        Args:
            settings: those of the row (`SearchSettings.overridden`); None = the client's.

        Raises:
            SearchError: the service refused, failed, or did not answer in time.
        """
        now = settings or self.settings
        asked = " ".join(query.split())
        key = (now.backend, _url(now), now.topk, now.gl, now.hl, asked.casefold())
        documents, hit = await self.cache.get(key, lambda: self._ask(asked, now))
        return SearchResult(documents, hit)

    async def search_all(
        self, queries: Sequence[str], settings: SearchSettings | None = None
    ) -> list[SearchResult | SearchError]:
        """Several queries at once, in their order; one that fails does not lose the others."""

        async def one(query: str) -> SearchResult | SearchError:
            try:
                return await self.search(query, settings)
            except SearchError as error:
                return error

        return list(await asyncio.gather(*map(one, queries)))

    async def close(self) -> None:
        """Close the connections of this event loop."""
        http = self._clients.pop(asyncio.get_running_loop(), None)
        if http is not None:
            await http.aclose()

    async def _ask(self, query: str, settings: SearchSettings) -> tuple[str, ...]:
        async with self._limit.slot():
            if settings.backend == "google":
                body: dict[str, Any] = {"q": query, "num": settings.topk, "gl": settings.gl, "hl": settings.hl}
                found = _google_documents(await self._post(body, settings, {"X-API-KEY": settings.api_key()}))
            else:
                body = {"queries": [query], "topk": settings.topk, "return_scores": False}
                found = _local_documents(await self._post(body, settings, {}))
        return tuple(found[: settings.topk])

    async def _post(self, body: dict[str, Any], settings: SearchSettings, headers: dict[str, str]) -> Any:
        """The answer's JSON; tries again what may go better, within one deadline."""
        deadline, problem = time.monotonic() + settings.timeout_s, ""
        for left in range(settings.retries, -1, -1):
            share_s = max((deadline - time.monotonic()) / (left + 1), 1e-3)
            wait_s = 0.0
            try:
                async with asyncio.timeout(share_s):
                    response = await self._http(settings).post(_url(settings), json=body, headers=headers)
                if response.status_code == 200:
                    return _json(response)
                problem = f"the search service answered {response.status_code}{_detail(response)}"
                if response.status_code < 500 and response.status_code not in _RETRIED_STATUS:
                    raise SearchError(problem)
                wait_s = _retry_after_s(response)
            except TimeoutError:
                problem = f"the search service did not answer within {settings.timeout_s:g} s"
            except httpx.RequestError as error:
                problem = f"the search service cannot be reached ({type(error).__name__})"
            tried = settings.retries - left
            wait_s = max(wait_s, min(_FIRST_BACKOFF_S * 2**tried, _MAX_BACKOFF_S) * _jitter.uniform(0.5, 1.0))
            if left == 0 or time.monotonic() + wait_s >= deadline:
                break
            await asyncio.sleep(wait_s)
        raise SearchError(problem)

    def _http(self, settings: SearchSettings) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                timeout=None,  # every attempt has its own
                verify=_certificates(),
                limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
                # A retrieval service in the cluster is reached directly, whatever proxy there is for the world outside.
                trust_env=settings.backend != "local",
            )
        return self._clients[loop]


def format_documents(documents: Sequence[str]) -> str:
    """`Doc {i}(Title: {first line}) {rest}` of each passage, a line each, counted from 1; "" without any."""
    lines = []
    for number, contents in enumerate(documents, start=1):
        title, _, text = contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines)


def information_block(text: str) -> str:
    """Results as they stand in the model's own text: between `<information>` tags, which no document can close."""
    return f"\n\n<information>{_TAG.sub('&lt;', text)}</information>\n\n"


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Made once: reading them takes a tenth of a second."""
    return httpx.create_ssl_context()


def _url(settings: SearchSettings) -> str:
    return settings.serper_url if settings.backend == "google" else settings.retrieval_service_url


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise SearchError("the search service's answer is not JSON") from error


def _local_documents(answer: Any) -> list[str]:
    """Both forms of the answer: passages, and `{document, score}`."""
    try:
        (found,) = answer["result"]
        documents = [item.get("document", item)["contents"] for item in found]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SearchError("the search service's answer has another form than {result: [[{contents}]]}") from error
    return [str(contents) for contents in documents]


def _google_documents(answer: Any) -> list[str]:
    """Organic results as title and snippet."""
    organic = answer.get("organic", []) if isinstance(answer, dict) else None
    if not isinstance(organic, list) or not all(isinstance(item, dict) for item in organic):
        raise SearchError("the search service's answer has another form than {organic: [{title, snippet}]}")
    return [f'"{item.get("title", "")}"\n{item.get("snippet", "")}' for item in organic]


def _detail(response: httpx.Response) -> str:
    text = " ".join(response.text.split())
    return f": {text[:200]}" if text else ""


def _retry_after_s(response: httpx.Response) -> float:
    given = response.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else 0.0
