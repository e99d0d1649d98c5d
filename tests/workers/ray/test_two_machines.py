"""A run over two machines with networks, host names and memory of their own, whose cable is cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machines_in_a_box as box
import pytest
import ray_machines

pytestmark = [
    pytest.mark.ray,
    pytest.mark.release,  # minutes on a busy machine
    pytest.mark.skipif(bool(box.missing()), reason=box.missing() or "there are namespaces"),
]
PORT = 6391
PATIENCE_S = 420.0
RAY = Path(sys.executable).with_name("ray")
STEPS = 4
# A busy machine may start Ray slowly; and a cut cable is noticed a little sooner than by default.
ENVIRONMENT = {
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_worker_niceness": "0",
    "RAY_health_check_failure_threshold": "3",
}
ENVIRONMENT |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-the-box-alone-0123456789abcdef"}
RUN = [
    "trainer.placement=ray", "trainer.nnodes=2", "trainer.n_workers_per_node=1", "trainer.device=cpu",
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.max_restarts=2", "trainer.logger=[]",
    "trainer.worker_timeout_s=200", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.num_threads=1",
    "trainer.export_at_end=False", "data.train_batch_size=4", "data.train_max_samples=64", "data.val_files=null",
    "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.response_length=64",
    "actor_rollout_ref.rollout.num_workers=0",
]  # fmt: skip


def until(condition: Callable[[], object], what: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen; {log.read_text()[-4000:]}"
        time.sleep(0.5)


SIZE = """
from ray._raylet import GcsClient
print(sum(node.state == 0 for node in GcsClient(address="{address}").get_all_node_info().values()))
"""


class Cluster:
    """A Ray cluster over both machines."""

    def __init__(self, machines: tuple[box.Machine, box.Machine], folder: Path):
        self.first, self.second = machines
        self.log = folder / "ray.log"
        self._start(self.first, "--head", f"--port={PORT}", "--include-dashboard=false")
        self.join()

    def join(self) -> None:
        """The second machine joins."""
        self._start(self.second, f"--address={self.first.address}:{PORT}")

    def _start(self, machine: box.Machine, *words: str) -> None:
        """Ray there, in the background. It is tried again: Ray gives parts of a node 15 seconds to start, which may be
        too few on a busy machine, and does not wait for a head."""
        size = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        command = " ".join([str(RAY), "start", f"--node-ip-address={machine.address}", *words, *size])
        machine.start("sh", "-c", f"until {command}; do sleep 1; done", log=self.log, **ENVIRONMENT)

    def size(self) -> int:
        """Machines that are there, as the head says."""
        asked = subprocess.run(
            self.first.words(sys.executable, "-c", SIZE.format(address=f"{self.first.address}:{PORT}")),
            capture_output=True, text=True, env=os.environ | ENVIRONMENT,
        )  # fmt: skip
        return int(asked.stdout.split()[-1]) if asked.returncode == 0 else 0


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    ray_machines.disconnect()
    with box.two_machines(tmp_path) as machines:
        yield Cluster(machines, tmp_path)


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def test_machines_have_names_addresses_and_memory_of_their_own_and_a_cable_between_them(tmp_path):
    with box.two_machines(tmp_path) as (first, second):
        Path("/dev/shm/of_the_host").touch()
        try:
            for machine, other in ((first, second), (second, first)):
                assert machine.run("hostname").strip() == machine.name
                assert machine.run("ls", "/dev/shm") == ""
                reach = ["getent", "hosts", other.name]
                assert machine.run(*reach).split()[0] == other.address
        finally:
            Path("/dev/shm/of_the_host").unlink()
        say = "import socket; socket.create_connection(('boxb', 7000), timeout=2)"
        listen = (
            "import socket; s = socket.create_server(('', 7000)); print(flush=True); [s.accept() for _ in range(9)]"
        )
        with subprocess.Popen(second.words(sys.executable, "-c", listen), stdout=subprocess.PIPE) as listening:
            listening.stdout.readline()
            first.run(sys.executable, "-c", say)
            first.cable("down")
            with pytest.raises(subprocess.CalledProcessError):
                first.run(sys.executable, "-c", say)
            first.cable("up")
            first.run(sys.executable, "-c", say)
            second.end()


@pytest.mark.timeout(1200)
def test_a_run_over_two_machines_goes_on_after_its_cable_was_cut(cluster, tmp_path):
    run, log = tmp_path / "run", tmp_path / "trainer.log"
    address = ENVIRONMENT | {"RAY_ADDRESS": f"{cluster.first.address}:{PORT}"}
    command = [sys.executable, "-m", "verl_mt.trainer", *RUN, f"trainer.default_local_dir={run}"]
    until(lambda: cluster.size() == 2, "the cluster", cluster.log)
    trainer = cluster.first.start(*command, log=log, **address)
    until(lambda: 1 in steps(run) or trainer.poll() is not None, "the first step", log)
    assert trainer.poll() is None, log.read_text()[-4000:]
    cluster.second.cable("down")
    until(lambda: "restart 1 of 2" in log.read_text(), "the restart", log)
    lost = log.read_text()
    assert "boxb" in lost or cluster.second.address in lost, lost
    # Ray has buried that node. Like a machine that was repaired, it joins again.
    cluster.second.cable("up")
    cluster.join()
    until(lambda: trainer.poll() is not None, "the end", log)
    assert trainer.returncode == 0, log.read_text()[-4000:]
    assert steps(run) == list(range(1, STEPS + 1))
