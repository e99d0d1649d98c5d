"""Groups of ranks that live as long as the test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process of pytest-xdist runs all tests over ranks: a second one would start and warm up ranks of its own."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


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
