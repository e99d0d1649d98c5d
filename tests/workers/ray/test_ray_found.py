"""Ray as it is found on a machine: clusters that are gone, and those of other runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import warm_start

from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.workers import ray_cluster
from verl_mt.workers.setup import Placement

pytestmark = pytest.mark.ray
CONNECT = (
    "import logging; logging.basicConfig();"
    "from verl_mt.workers.ray_cluster import connect; from verl_mt.workers.setup import Placement; import ray;"
    "connect(Placement('ray')); print(len(ray.nodes()), 'node', flush=True);"
    "print(ray.get_runtime_context().gcs_address, flush=True);"
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


def test_a_second_run_on_a_machine_starts_a_cluster_of_its_own(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        first = warm_start.Popen(
            [sys.executable, "-c", CONNECT + "input()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert first.stdout.readline() == "1 node\n"
        address = first.stdout.readline()
        second = warm_start.run([sys.executable, "-c", CONNECT], capture_output=True, text=True)
        _, errors = first.communicate("\n")
    assert (second.returncode, first.returncode) == (0, 0), second.stderr[-2000:] + errors[-2000:]
    assert second.stdout.startswith("1 node\n") and address not in second.stdout


def test_an_address_that_ray_resolves_itself_is_left_to_it():
    for address in ("local", "ray://head:10001", "", "[::1]"):
        assert ray_cluster.silent_cluster(address) is None
