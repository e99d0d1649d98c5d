"""Asking a search service: settings, cache and client, shared by the search tool and by custom generate functions.

Two services: your server that speaks Search-R1's protocol (`python -m verl_mt.retrieval` does)::

    POST {"queries": [...], "topk": 3, "return_scores": false}
    -> {"result": [[{"contents": "Title\\nText", ...}, ...], ...]}        # or [[{"document": {...}, "score": 1.0}]]

and Google through serper.dev.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import random
import re
import ssl
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import httpx

from verl_mt.bounds import MAX_BODY_BYTES
from verl_mt.plugins import listing, suggest
from verl_mt.tools.limits import ConcurrencyLimit

BACKENDS = ("local", "google")
KEY_VARIABLE = "SERPER_API_KEY"
"""Environment variable of the key for backend `google` (serper.dev)."""

ROW_SETTINGS = ("topk", "backend", "retrieval_service_url", "gl", "hl")
"""What a row may override for its own searches: the others belong to the process."""


@dataclass(frozen=True)
class SearchSettings:
    """How to search.

    Raises:
        ValueError: a value of another type or outside its range, an unknown backend; or no key for `google`.
    """

    backend: str = "local"
    """`local` (a retrieval service) or `google` (through serper.dev; its key comes from the environment)."""
    retrieval_service_url: str = "http://127.0.0.1:8000/retrieve"
    """Where backend `local` posts `{queries, topk, return_scores}`."""
    topk: int = 3
    """Passages per query."""
    concurrency: int = 256
    """Requests under way at once, per tool object."""
    cache_size: int = 10_000
    """Answers that are kept, least recently used ones dropped; 0 = none."""
    timeout_s: float = 20.0
    """Deadline of one search from when it holds a slot, retries included."""
    retries: int = 2
    """How often a search is tried again that could not connect, was late, or was answered with 5xx or 429."""
    serper_url: str = "https://google.serper.dev/search"
    """Where backend `google` posts."""
    gl: str = "us"
    """Country of backend `google`."""
    hl: str = "en"
    """Language of backend `google`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
            if isinstance(value, bool) or not isinstance(value, accepted):
                raise ValueError(f"search setting {field.name} must be {_NAMES[kind]}, got {value!r}")
        for name, least in (("topk", 1), ("concurrency", 1), ("cache_size", 0), ("retries", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"search setting {name} must be at least {least}, got {getattr(self, name)}")
        if not self.timeout_s > 0:
            raise ValueError(f"search setting timeout_s must be above 0, got {self.timeout_s}")
        if self.backend not in BACKENDS:
            raise ValueError(
                f"unknown search backend {self.backend!r}{suggest(self.backend, BACKENDS)}. "
                f"Backends: {', '.join(BACKENDS)}"
            )
        for name in ("retrieval_service_url", "serper_url"):
            if not getattr(self, name).startswith(("http://", "https://")):
                raise ValueError(f"search setting {name} must be an http(s) URL, got {getattr(self, name)!r}")
        if self.backend == "google":
            self.api_key()

    def api_key(self) -> str:
        """The key of backend `google`.

        Raises:
            ValueError: the environment has none.
        """
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ValueError(f"search backend 'google' needs a key from serper.dev in the variable {KEY_VARIABLE}")
        return key

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> SearchSettings:
        """From a YAML entry's `config`; verl's `timeout`, `num_workers` and `rate_limit` are understood.

        Raises:
            ValueError: an unknown key, one setting under two names, or a value that cannot be.
        """
        given = {key: value for key, value in values.items() if key != "type"}
        if "timeout" in given:
            given["timeout_s"] = _only(given, "timeout", "timeout_s", where)
        workers = [given.pop(name) for name in ("num_workers", "rate_limit") if name in given]
        if workers:
            if "concurrency" in given:
                raise ValueError(f"{where}: concurrency is num_workers and rate_limit in one. Give only concurrency")
            given["concurrency"] = min(workers)
        return cls(**_known(given, [field.name for field in dataclasses.fields(cls)], where))

    def overridden(self, values: Mapping[str, Any], where: str) -> SearchSettings:
        """These settings with those of a row.

        Raises:
            ValueError: a setting that a row cannot change, or a value that cannot be.
        """
        given = _known(dict(values), ROW_SETTINGS, where)
        try:
            return dataclasses.replace(self, **given) if given else self
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


_NAMES = {str: "text", int: "a whole number", float: "a number"}


def _only(given: dict[str, Any], alias: str, name: str, where: str) -> Any:
    value = given.pop(alias)
    if name in given:
        raise ValueError(f"{where}: {alias} and {name} are the same setting. Give one of them")
    return value


def _known(given: dict[str, Any], names: Any, where: str) -> dict[str, Any]:
    for key in given:
        if key not in names:
            raise ValueError(f"{where}: unknown search setting {key!r}{suggest(key, names)}. Known: {listing(names)}")
    return given


T = TypeVar("T")


class CoalescingCache(Generic[T]):
    """Least recently used answers by key. Errors are never kept, and reach all who waited for the same answer.

    Args:
        max_entries: answers that are kept; 0 = none (equal questions at the same time are still asked once).
    """

    def __init__(self, max_entries: int):
        if max_entries < 0:
            raise ValueError(f"max_entries must be at least 0, got {max_entries}")
        self.max_entries = max_entries
        self.hits = 0
        """Answers that needed no separate call: kept ones, and those that another caller was waiting for."""
        self.misses = 0
        """Calls that were made, failed ones included."""
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        # A task belongs to its event loop: the key says which.
        self._running: dict[tuple[asyncio.AbstractEventLoop, Hashable], _Call[T]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: Hashable, compute: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The answer, and whether it was a hit.

        A caller that is cancelled takes nothing from the others: the call goes on while anyone waits for it.

        Raises:
            Exception: what `compute` raised.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            self.hits += 1
            return self._kept[key], True
        where = (asyncio.get_running_loop(), key)
        call = self._running.get(where)
        shared = call is not None
        if call is None:
            self.misses += 1
            call = self._running[where] = _Call(asyncio.ensure_future(compute()))
            call.task.add_done_callback(lambda task: self._ended(where, task))
        call.num_waiting += 1
        try:
            answer = await asyncio.shield(call.task)
        finally:
            call.num_waiting -= 1
            if call.num_waiting == 0 and not call.task.done():
                # Nobody may join it any more: who asks from now on makes a call of their own.
                self._running.pop(where, None)
                call.task.cancel()
        self.hits += shared
        return answer, shared

    def _ended(self, where: tuple[asyncio.AbstractEventLoop, Hashable], task: asyncio.Future[T]) -> None:
        if where in self._running and self._running[where].task is task:
            del self._running[where]
        if task.cancelled() or task.exception() is not None:
            return
        self._kept[where[1]] = task.result()
        self._kept.move_to_end(where[1])
        while len(self._kept) > self.max_entries:
            self._kept.popitem(last=False)


@dataclass
class _Call(Generic[T]):
    """A call under way."""

    task: asyncio.Future[T]
    num_waiting: int = 0


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


class RefusedSearch(SearchError):
    """The service is there, and does not take such a request, or answers it in another form."""


@dataclass(frozen=True)
class SearchResult:
    """The answer to one query."""

    documents: tuple[str, ...]
    """Passages, best first; the first line is the title."""
    hit: bool
    """Whether it came without a separate request."""

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
        return await self._look_up(query, now, lambda asked: self._ask_one(asked, now))

    async def search_all(
        self, queries: Sequence[str], settings: SearchSettings | None = None
    ) -> list[SearchResult | SearchError]:
        """Several queries at once, in their order; one that fails does not lose the others.

        Backend `local` gets those that no earlier search has answered in one request; `google` takes one at a time.
        A service that refuses a batch, or does not answer each query of it, is asked one by one.
        """
        now = settings or self.settings
        batch = _Batch(self, now)

        async def one(query: str) -> SearchResult | SearchError:
            try:
                if now.backend == "local":
                    return await self._look_up(query, now, batch.answer_to)
                return await self.search(query, now)
            except SearchError as error:
                return error

        return list(await asyncio.gather(*map(one, queries)))

    async def _look_up(
        self, query: str, now: SearchSettings, ask: Callable[[str], Awaitable[tuple[str, ...]]]
    ) -> SearchResult:
        """From the cache, or by `ask`, which gets the query in its plain form."""
        asked = " ".join(query.split())
        key = (now.backend, _url(now), now.topk, now.gl, now.hl, asked.casefold())
        documents, hit = await self.cache.get(key, lambda: ask(asked))
        return SearchResult(documents, hit)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        http = self._clients.pop(asyncio.get_running_loop(), None)
        if http is not None:
            await http.aclose()

    async def _ask_one(self, query: str, settings: SearchSettings) -> tuple[str, ...]:
        return (await self._ask([query], settings))[0]

    async def _ask(self, queries: Sequence[str], settings: SearchSettings) -> list[tuple[str, ...]]:
        """The passages for each query, by one request; backend `google` takes one query."""
        async with self._limit.slot():
            if settings.backend == "google":
                body: dict[str, Any] = {"q": queries[0], "num": settings.topk, "gl": settings.gl, "hl": settings.hl}
                found = [_google_documents(await self._post(body, settings, {"X-API-KEY": settings.api_key()}))]
            else:
                body = {"queries": list(queries), "topk": settings.topk, "return_scores": False}
                found = _local_documents(await self._post(body, settings, {}), len(queries))
        return [tuple(documents[: settings.topk]) for documents in found]

    async def _post(self, body: dict[str, Any], settings: SearchSettings, headers: dict[str, str]) -> Any:
        """The answer's JSON; tries again what may go better, within one deadline."""
        deadline, problem = time.monotonic() + settings.timeout_s, ""
        for left in range(settings.retries, -1, -1):
            share_s = max((deadline - time.monotonic()) / (left + 1), 1e-3)
            wait_s = 0.0
            try:
                async with asyncio.timeout(share_s):
                    request = self._http(settings).stream("POST", _url(settings), json=body, headers=headers)
                    async with request as response:
                        content = await _content(response)
                if response.status_code == 200:
                    return _json(content)
                problem = f"the search service answered {response.status_code}{_detail(content)}"
                if response.status_code < 500 and response.status_code not in _RETRIED_STATUS:
                    raise RefusedSearch(problem)
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


class _Batch:
    """The queries of one `search_all` that nobody has answered yet, in one request.

    They join before the first of them waits: the searches of a `gather` reach the cache in one round of the loop.
    """

    def __init__(self, client: SearchClient, settings: SearchSettings):
        self._client, self._settings = client, settings
        self._queries: list[str] = []
        self._request: asyncio.Task[list[tuple[str, ...]]] | None = None
        self._num_waiting = 0

    def answer_to(self, query: str) -> Awaitable[tuple[str, ...]]:
        self._queries.append(query)
        return self._answer(len(self._queries) - 1)

    async def _answer(self, place: int) -> tuple[str, ...]:
        if len(self._queries) == 1:
            return await self._client._ask_one(self._queries[0], self._settings)
        if self._request is None:
            self._request = asyncio.ensure_future(self._client._ask(self._queries, self._settings))
        self._num_waiting += 1
        try:
            return (await asyncio.shield(self._request))[place]
        except RefusedSearch:
            return await self._client._ask_one(self._queries[place], self._settings)
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._request.cancel()


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


async def _content(response: httpx.Response) -> bytes:
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise RefusedSearch(f"the search service's answer has more than {MAX_BODY_BYTES} bytes")
    return bytes(content)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RefusedSearch("the search service's answer is not JSON") from error


def _local_documents(answer: Any, count: int) -> list[list[str]]:
    """Both forms of the answer: passages, and `{document, score}`; a list for each of `count` queries."""
    try:
        by_query = answer["result"]
        found = [[str(item.get("document", item)["contents"]) for item in items] for items in by_query]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedSearch("the search service's answer has another form than {result: [[{contents}]]}") from error
    if len(found) != count:
        raise RefusedSearch(
            "the search service's answer has another form than {result: [[{contents}]]} with a list for each query: "
            f"{len(found)} for {count}"
        )
    return found


def _google_documents(answer: Any) -> list[str]:
    """Organic results as title and snippet."""
    organic = answer.get("organic", []) if isinstance(answer, dict) else None
    if not isinstance(organic, list) or not all(isinstance(item, dict) for item in organic):
        raise SearchError("the search service's answer has another form than {organic: [{title, snippet}]}")
    return [f'"{item.get("title", "")}"\n{item.get("snippet", "")}' for item in organic]


def _detail(content: bytes) -> str:
    text = " ".join(content[:2000].decode("utf-8", "replace").split())
    return f": {text[:200]}" if text else ""


def _retry_after_s(response: httpx.Response) -> float:
    given = response.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else 0.0
