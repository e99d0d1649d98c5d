"""A JSON POST to somebody else's server: bounded in time, and repeated only where repeating can help."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping
from typing import Any

import httpx

from verl_mt.errors import UserCodeError

DEADLINE_S = 120.0
"""Seconds after which a request is given up, its repetitions included."""

_CLIENTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


async def http_post(
    url: str,
    payload: Any,
    *,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Any:
    """The JSON that a server answers, or its text where it is none.

    What the request itself is to blame for (4xx) is not repeated; a server that is down, busy or broken (no answer,
    429, 5xx) is asked again, later each time, until `max_retries` or `deadline_s` is used up.

    Raises:
        UserCodeError: the last answer, and how often it was asked.
    """
    give_up = time.monotonic() + deadline_s
    client, wait_s = _client(), 0.1
    for attempt in range(1, max_retries + 2):
        left = give_up - time.monotonic()
        try:
            response = await client.post(url, json=payload, headers=headers, timeout=max(left, 0.01))
            if response.is_success:
                return _content(response)
            problem = f"HTTP {response.status_code}: {response.text[:300]}"
            if response.status_code < 500 and response.status_code != 429:
                raise UserCodeError(f"POST {url}: {problem}")
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        if attempt > max_retries or time.monotonic() + wait_s >= give_up:
            raise UserCodeError(f"POST {url}: {problem} ({attempt} attempts, {deadline_s:g} s allowed)")
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, 10.0)
    raise AssertionError("unreachable: the last attempt raises")


def _client() -> httpx.AsyncClient:
    """One per event loop: its connections belong to the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _CLIENTS:
        _CLIENTS[loop] = httpx.AsyncClient(limits=httpx.Limits(max_connections=1024))
    return _CLIENTS[loop]


def _content(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
