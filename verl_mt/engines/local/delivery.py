"""From the engine's thread back to the event loops that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Delivery:
    """A future and the event loop it belongs to."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


def deliver(results: Iterable[tuple[Delivery | None, Any]]) -> None:
    """Resolve futures from another thread, with one wake-up per event loop; exceptions are raised where awaited."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for delivery, result in results:
        if delivery is not None:
            by_loop.setdefault(delivery.loop, []).append((delivery.future, result))
    for loop, items in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, items)
        except RuntimeError:
            # The loop was closed meanwhile, and with it everyone who waited.
            continue


def _resolve(items: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in items:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
