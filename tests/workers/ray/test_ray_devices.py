"""Which GPUs Ray shows to an engine with devices of its own. Ray counts GPUs, so none need to be there."""

from __future__ import annotations

import sys
import tempfile

import pytest
import ray_machines
import warm_start
from tables import before_release

pytestmark = pytest.mark.ray

SCRIPT = """
import asyncio, sys
import ray
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.workers.ray_group import RayWorkerGroup
from verl_mt.workers.setup import Placement, WorkerSetup

ray.init(address="local", num_cpus=4, num_gpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
group = RayWorkerGroup.__new__(RayWorkerGroup)
group._setup = WorkerSetup(ActorRolloutRefConfig(), 1, 1, "cuda", 0, Placement("ray"))
hosts = list(group._hosts_apart(1, 1, 2))

async def look():
    for host in hosts:
        await host.make(sys.argv[1] + ":Looking")
        print("SEES", await host.call("gpus"))
        assert host.on_gpu

asyncio.run(look())
ray.shutdown()
"""


@pytest.mark.parametrize("shown_all", [before_release("0"), "1"])
def test_an_engine_sees_its_own_gpus_alone_even_where_ray_was_told_to_show_all(tmp_path, shown_all):
    (tmp_path / "looking.py").write_text(
        "import os\nclass Looking:\n    async def gpus(self):\n        return os.environ.get('CUDA_VISIBLE_DEVICES')\n"
    )
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = ray_machines.environment()
        environment |= {"RAY_TMPDIR": folder, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": shown_all}
        done = warm_start.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "looking.py")],
            env=environment,
            capture_output=True,
            text=True,
        )
    seen = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("SEES")]
    assert len(set(seen)) == 2 and set(seen) < {"0", "1", "2"}, (seen, done.stderr[-2000:])
