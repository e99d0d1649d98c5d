"""One small Ray cluster for all tests of this folder, in processes of its own; nobody else's is touched."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray_machines


@pytest.fixture(scope="session")
def cluster_of_session() -> Iterator[SimpleNamespace]:
    """`address` for drivers, `dashboard` for jobs (None without `ray[default]`)."""
    from ray.cluster_utils import Cluster

    ray_machines.disconnect()
    with_dashboard = importlib.util.find_spec("aiohttp_cors") is not None  # ray[default] brings it
    node = {"num_cpus": 4, "object_store_memory": 200 * 1024 * 1024, "dashboard_host": "127.0.0.1"}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": with_dashboard})
    dashboard = f"http://{made.head_node.webui_url}" if with_dashboard else None
    if dashboard is not None:
        wait_for_job_agent(dashboard)
    yield SimpleNamespace(address=made.address, dashboard=dashboard)
    ray_machines.disconnect()
    made.shutdown()


@pytest.fixture(scope="module")
def cluster(cluster_of_session: SimpleNamespace) -> SimpleNamespace:
    """This process is connected to it; it may have been connected to another one since the last file of this folder."""
    import ray

    if not ray.is_initialized() or ray.get_runtime_context().gcs_address != cluster_of_session.address:
        ray_machines.disconnect()
        ray.init(address=cluster_of_session.address, log_to_driver=False, logging_level="ERROR")
    return cluster_of_session


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
