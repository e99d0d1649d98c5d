"""One small Ray cluster for all tests of this folder, in processes of its own; nobody else's is touched."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[SimpleNamespace]:
    """`address` for drivers, `dashboard` for jobs (None without `ray[default]`)."""
    import ray

    with_dashboard = importlib.util.find_spec("aiohttp_cors") is not None  # ray[default] brings it
    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=with_dashboard,
        dashboard_host="127.0.0.1",
        object_store_memory=200 * 1024 * 1024,
        log_to_driver=False,
        logging_level="ERROR",
    )
    dashboard = f"http://{context.dashboard_url}" if with_dashboard else None
    yield SimpleNamespace(address=context.address_info["address"], dashboard=dashboard)
    ray.shutdown()
