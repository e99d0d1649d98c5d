"""One small Ray cluster for all tests of this folder, in processes of its own; nobody else's is touched."""

from __future__ import annotations

import importlib.util
import time
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
    if dashboard is not None:
        wait_for_job_agent(dashboard)
    yield SimpleNamespace(address=context.address_info["address"], dashboard=dashboard)
    ray.shutdown()


def wait_for_job_agent(dashboard: str, patience_s: float = 300.0) -> None:
    """Jobs go through an agent that starts after the cluster; Ray itself waits 10 s for it, then fails the job."""
    from ray.job_submission import JobSubmissionClient

    deadline = time.monotonic() + patience_s
    while True:
        try:
            JobSubmissionClient(dashboard).submit_job(entrypoint="true")
            return
        except (RuntimeError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)
