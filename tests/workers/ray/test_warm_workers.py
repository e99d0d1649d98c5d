"""Workers of the clusters of these tests are warm starts, and end as Ray's own do."""

from __future__ import annotations

import os
import select
import signal

import pytest
import warm_start

pytestmark = pytest.mark.ray


def test_a_worker_is_a_fork_whose_status_and_end_ray_sees(cluster):
    import ray

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"ONE": "1"}})
    class Worker:
        def describe(self) -> tuple[int, int, str | None]:
            return os.getpid(), os.getppid(), os.environ.get("ONE")

        def exit(self) -> None:
            os._exit(3)

    workers = [Worker.remote() for _ in range(3)]
    described = ray.get([worker.describe.remote() for worker in workers])
    assert {(parent, one) for _, parent, one in described} == {(warm_start.server().process.pid, "1")}
    ends = [os.pidfd_open(pid) for pid, _, _ in described]

    with pytest.raises(ray.exceptions.RayActorError, match="died"):
        ray.get(workers[0].exit.remote())
    os.kill(described[1][0], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError, match="died"):
        ray.get(workers[1].describe.remote())
    ray.kill(workers[2])
    for end in ends:
        select.select([end], [], [])  # until it has ended
        os.close(end)


def test_a_worker_of_another_python_is_left_to_ray(cluster, tmp_path):
    """Ray's own script starts it. So it does one whose variables were read while the server imported."""
    import ray

    @ray.remote(num_cpus=0)
    def parent() -> int:
        return os.getppid()

    (tmp_path / "sitecustomize.py").touch()
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    other = parent.options(runtime_env={"env_vars": {"PYTHONPATH": path}}).remote()
    assert ray.get(other) != warm_start.server().process.pid
