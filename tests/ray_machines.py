"""Ray clusters for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def environment() -> dict[str, str]:
    """For a command that knows of no cluster. It keeps CI's niceness of Ray's workers: at Ray's own, 15, they wait for
    minutes beside other tests."""
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_") or k == "RAY_worker_niceness"}


def disconnect() -> None:
    """Leave the cluster that this process is connected to. A test then finds or starts its own, as a new process.

    Ray that was started by `ray.init` here has tokens, and this process asks for them ever after: a cluster without
    them cannot reach it, and ends its actors.
    """
    import ray
    from ray._private.authentication_test_utils import reset_auth_token_state

    ray.shutdown()
    if os.environ.pop("RAY_AUTH_MODE", None) is not None:
        reset_auth_token_state()


@contextmanager
def machines(number: int, cpus: int = 1) -> Iterator[str]:
    """The address of a Ray cluster of `number` nodes, with `cpus` each: processes of this machine."""
    from ray.cluster_utils import Cluster

    disconnect()
    size = {"num_cpus": cpus, "object_store_memory": 100 * 1024 * 1024}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        for _ in range(number - 1):
            cluster.add_node(**size)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        disconnect()
        cluster.shutdown()
