"""The Ray cluster that a worker group runs on: found or started, and large enough."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from verl_mt.errors import ConfigError
from verl_mt.workers.setup import Placement, WorkerSetup

_FORWARDED = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "NCCL_", "GLOO_", "PYTORCH_", "OMP_", "MKL_", "VERL_MT_")
"""Beginnings of the names of environment variables that workers get from the process that starts them."""


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What of this process's environment its workers get: all that torch, transformers and verl_mt read. Others
    come from `ray start` or from the runtime environment of the job."""
    return {name: value for name, value in environment.items() if name.startswith(_FORWARDED)}


def connect(placement: Placement) -> bool:
    """Join the cluster that RAY_ADDRESS names, else one that runs on this machine, else start one here.

    Returns:
        Whether this process made the connection, and so has to end it.

    Raises:
        ConfigError: several machines are wanted and there is no cluster, or the named one does not answer.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "auto")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address != "local":
        try:
            ray.init(address=address, **quiet)
            return True
        except (ConnectionError, ValueError) as error:
            if address != "auto":
                raise ConfigError(f"RAY_ADDRESS is {address!r}, and no Ray cluster answers there: {error}") from error
    if placement.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes is {placement.nnodes}, but no Ray cluster runs here: `ray start --head` on one machine, "
            "`ray start --address=...` on the others, then start the run on the first (docs/scaling.md)"
        )
    # CPUs are what Ray hands out, not cores: a small machine may run more ranks than it has cores.
    num_cpus = max(os.cpu_count() or 1, placement.num_ranks + 1)
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
    return True


def bundle(setup: WorkerSetup) -> dict[str, float]:
    """What one machine must have for its workers."""
    number = float(setup.placement.n_workers_per_node)
    return {"CPU": number} | ({"GPU": number} if setup.device == "cuda" else {})


def resolve_device(setup: WorkerSetup) -> WorkerSetup:
    """`auto` = cuda if the cluster has a GPU for every rank."""
    if setup.device != "auto":
        return setup
    gpus = ray.cluster_resources().get("GPU", 0)
    return replace(setup, device="cuda" if gpus >= setup.placement.num_ranks else "cpu")


def require_room(setup: WorkerSetup) -> None:
    """Whether the cluster could ever hold the group.

    Raises:
        ConfigError: too few machines that are large enough.
    """
    needed, placement = bundle(setup), setup.placement
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [m for m in machines if all(m.get(kind, 0) >= number for kind, number in needed.items())]
    if len(fitting) >= placement.nnodes:
        return
    have = "; ".join(f"{m.get('CPU', 0):g} CPUs, {m.get('GPU', 0):g} GPUs" for m in machines) or "none"
    wanted = " and ".join(f"{number:g} {kind}s" for kind, number in needed.items())
    raise ConfigError(
        f"trainer.nnodes={placement.nnodes} and trainer.n_workers_per_node={placement.n_workers_per_node} on "
        f"{setup.device} need {placement.nnodes} machine(s) with {wanted} each; the Ray cluster has: {have}"
    )
