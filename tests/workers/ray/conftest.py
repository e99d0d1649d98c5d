"""One small Ray cluster for all tests of this folder, in processes of its own; nobody else's is touched."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[SimpleNamespace]:
    """`address` for drivers, `dashboard` for jobs."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        object_store_memory=200 * 1024 * 1024,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield SimpleNamespace(address=context.address_info["address"], dashboard=f"http://{context.dashboard_url}")
    ray.shutdown()
