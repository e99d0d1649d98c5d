"""The cache of slow answers: one call for equal questions, errors never kept, exact statistics."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.extensions.toolbox.tools.search_client import CoalescingCache

pytestmark = pytest.mark.cap("C54")


class Service:
    """Answers when `answers` is set. One turn of the loop is enough for all callers to ask."""

    def __init__(self, errors: int = 0):
        self.calls, self.errors, self.cancelled, self.answers = 0, errors, 0, asyncio.Event()

    async def __call__(self) -> str:
        self.calls += 1
        number = self.calls
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if number <= self.errors:
            raise OSError("down")
        return f"answer {number}"


def test_equal_questions_one_after_the_other_and_at_once_make_one_call():
    async def run():
        cache, service = CoalescingCache(10), Service()
        asked = asyncio.gather(*(cache.get("k", service) for _ in range(5)))
        await asyncio.sleep(0)
        service.answers.set()
        together = await asked
        later = await cache.get("k", service)
        return cache, service, together, later

    cache, service, together, later = asyncio.run(run())
    assert service.calls == 1
    assert [hit for _, hit in together] == [False, True, True, True, True] and later == ("answer 1", True)
    assert (cache.hits, cache.misses, len(cache)) == (5, 1, 1)


def test_an_error_reaches_all_who_waited_and_is_not_kept():
    async def run():
        cache, service = CoalescingCache(10), Service(errors=1)
        asked = asyncio.gather(*(cache.get("k", service) for _ in range(3)), return_exceptions=True)
        await asyncio.sleep(0)
        service.answers.set()
        together = await asked
        return cache, service, together, await cache.get("k", service)

    cache, service, together, later = asyncio.run(run())
    assert [type(outcome) for outcome in together] == [OSError] * 3
    assert later == ("answer 2", False) and service.calls == 2
    assert (cache.hits, cache.misses) == (0, 2)


def test_a_caller_that_gives_up_takes_nothing_from_the_others():
    async def run():
        cache, service = CoalescingCache(10), Service()
        first, second = (asyncio.ensure_future(cache.get("k", service)) for _ in range(2))
        while not service.calls:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        service.answers.set()
        answer = await second
        return cache, service, first, answer

    cache, service, first, answer = asyncio.run(run())
    assert first.cancelled() and answer == ("answer 1", True)
    assert service.calls == 1 and service.cancelled == 0 and len(cache) == 1


def test_a_call_that_nobody_waits_for_is_cancelled_and_not_joined():
    async def run():
        cache, service = CoalescingCache(10), Service()
        only = asyncio.ensure_future(cache.get("k", service))
        while not service.calls:
            await asyncio.sleep(0)
        only.cancel()
        await asyncio.wait([only])
        service.answers.set()
        return service, await cache.get("k", service)

    service, answer = asyncio.run(run())
    assert service.cancelled == 1 and answer == ("answer 2", False)


@pytest.mark.slow
@given(keys=st.lists(st.integers(0, 5), max_size=40), size=st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_it_is_the_least_recently_used_answer_that_goes(keys, size):
    """Held against a list of keys, the last used at its end."""

    async def run():
        cache, kept, hits = CoalescingCache(size), [], 0
        for key in keys:

            async def compute(key=key):
                return key

            answer, hit = await cache.get(key, compute)
            assert answer == key and hit == (key in kept)
            hits += hit
            kept = ([k for k in kept if k != key] + [key])[-size:] if size else []
        assert (cache.hits, cache.misses, len(cache)) == (hits, len(keys) - hits, len(kept))

    asyncio.run(run())


def test_a_size_below_zero_is_refused():
    with pytest.raises(ValueError, match="max_entries must be at least 0, got -1"):
        CoalescingCache(-1)
