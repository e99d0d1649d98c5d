"""Nodes of a Ray cluster with other versions of the library are refused before anything loads."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version

import pytest
import ray_machines
import warm_start

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

# A cluster of its own, in a process of its own: other tests of this folder are connected to theirs. The second node
# is another one each time. Says what the worker group said.
SCRIPT = """
import json, sys
import ray
from ray.cluster_utils import Cluster
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.errors import VerlMTError
from verl_mt.workers.setup import Placement
from verl_mt.workers.worker_group import build_worker_group

node = {"num_cpus": 2, "object_store_memory": 100 * 1024 * 1024}
cluster = Cluster(initialize_head=True, head_node_args=node)
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
said = {}
for name, paths in json.loads(sys.argv[1]).items():
    more = [cluster.add_node(**node, env_vars={"PYTHONPATH": path} if path else None) for path in paths]
    cluster.wait_for_nodes()
    try:
        placement = Placement("ray", 1 + len(paths))
        group = build_worker_group(ActorRolloutRefConfig(), total_steps=1, train_batch_size=1, placement=placement)
        said[name] = group.where
        group.close()
    except VerlMTError as error:
        said[name] = f"{type(error).__name__}: {error}"
    for one in more:
        cluster.remove_node(one, allow_graceful=True)
print("SAID" + json.dumps(said))
ray.shutdown()
cluster.shutdown()
"""

WITHOUT = """
import importlib.machinery as machinery, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "verl_mt":
            raise ModuleNotFoundError(f"No module named {name!r}")
found = machinery.PathFinder.find_distributions
def left(cls, *context):
    return (one for one in found(*context) if one.name != "verl_mt")
machinery.PathFinder.find_distributions = classmethod(left)
sys.meta_path.insert(0, Hidden())
"""
"""Runs at the start of a Python of a node: one on which the library was never installed."""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    other, without = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("without")
    for name, number in (("verl_mt", "9.9"), ("torch", "1.0+cu1")):
        metadata = other / f"{name}-{number}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (without / "sitecustomize.py").write_text(WITHOUT)
    behind = os.pathsep + os.environ.get("PYTHONPATH", "")
    nodes = {"same": [""], "both": [f"{other}{behind}", f"{without}{behind}"]}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = ray_machines.environment()
        done = warm_start.run(
            [sys.executable, "-c", SCRIPT, json.dumps(nodes)],
            env=environment | {"RAY_TMPDIR": folder},
            cwd=tmp_path_factory.mktemp("elsewhere"),
            capture_output=True,
            text=True,
        )
    assert "SAID" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.partition("SAID")[2])


def test_a_node_with_the_same_versions_is_taken(said):
    assert said["same"] == "cpu, 2 Ray worker(s) on 2 machine(s)"


def test_nodes_with_other_versions_or_without_the_library_are_refused_by_name_with_both_in_one_error(said):
    (line,) = said["both"].splitlines()
    assert line.startswith("ConfigError: ") and platform.node() in line
    assert "verl_mt 9.9" in line and f"verl_mt {version('verl_mt')} here" in line and "torch 1.0" in line
    assert "no verl_mt" in line and "install the same versions" in line
