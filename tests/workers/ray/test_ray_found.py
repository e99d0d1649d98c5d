"""Ray as it is found on a machine: clusters that are gone."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import warm_start

from verl_mt.errors import ConfigError
from verl_mt.workers import ray_cluster
from verl_mt.workers.setup import Placement

pytestmark = pytest.mark.ray
CONNECT = (
    "import logging; logging.basicConfig();"
    "from verl_mt.workers.ray_cluster import connect; from verl_mt.workers.setup import Placement; import ray;"
    "connect(Placement('ray')); print(len(ray.nodes()), 'node')"
)


@pytest.fixture
def closed_port() -> int:
    """Nobody listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_what_a_dead_cluster_left_behind_does_not_keep_a_run_from_starting_its_own(closed_port):
    # A short path: Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{closed_port}")
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment["RAY_TMPDIR"] = folder
        command = [sys.executable, "-c", CONNECT]
        done = warm_start.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 node" in done.stdout
    assert f"127.0.0.1:{closed_port}" in done.stderr and "is gone (`ray stop` clears the note)" in done.stderr


def test_a_named_cluster_where_nobody_listens_is_refused_at_once(closed_port, monkeypatch):
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS is .*nobody listens at 127\.0\.0\.1:{closed_port}"):
        ray_cluster.connect(Placement("ray"))


def test_an_address_that_ray_resolves_itself_is_left_to_it():
    for address in ("local", "ray://head:10001", "", "[::1]"):
        assert ray_cluster.silent_cluster(address) is None
