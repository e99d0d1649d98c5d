"""Ray clusters for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def disconnect() -> None:
    """Leave the cluster that this process is connected to. A test then finds or starts its own, as a new process."""
    import ray

    ray.shutdown()


@contextmanager
def two_machines() -> Iterator[str]:
    """A Ray cluster of two nodes with one CPU for a rank each; both are processes of this machine."""
    from ray.cluster_utils import Cluster

    disconnect()
    size = {"num_cpus": 1, "object_store_memory": 100 * 1024 * 1024, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=100 * 1024 * 1024)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        disconnect()
        cluster.shutdown()
