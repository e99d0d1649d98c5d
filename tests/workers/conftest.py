"""Groups of ranks that live as long as the test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """All is imported and nothing has run: see `rank_pool`."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        from rank_pool import make_template

        make_template()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable]:
    """`ranks(3)` = three processes joined by gloo; see `RankPool`."""
    from rank_pool import RankPool

    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
