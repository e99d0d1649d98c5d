"""The Ray cluster of a run: found or started, large enough, and with the same versions on all machines.

All of it is found out before anything loads there. Ranks exchange pickled objects and run collectives: with another
version on one machine they fail late, or hang, or compute something else without a word.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
from collections.abc import Callable, Collection, ItemsView, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray._private.services import find_gcs_addresses
from ray._private.utils import read_ray_address
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_mt import engines
from verl_mt.config.rollout import RolloutConfig
from verl_mt.errors import ConfigError, NoRoomError, PluginError, error_text
from verl_mt.extensions.cluster.config import keys_of
from verl_mt.workers.setup import Placement, WorkerSetup

_log = logging.getLogger(__name__)
_KNOCK_S = 10.0
_ASKING_TIMEOUT_S = 120.0
_NAMED = 4
"""Machines that a message names; the others are counted."""


def connect(placement: Placement, devices_apart: int = 0) -> bool:
    """Join the cluster that RAY_ADDRESS names, else the one of `ray start` on this machine, else start one here.

    A cluster that another run started for itself is never joined: it ends with that run.

    Args:
        placement: of the ranks.
        devices_apart: of engines that have their own.

    Returns:
        Whether this process made the connection, and so has to end it.

    Raises:
        ConfigError: several machines are wanted and there is no cluster, or the named one does not answer.
    """
    if ray.is_initialized():
        return False
    address, named = cluster_address(os.environ)
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if (silent := silent_cluster(address)) is not None:
        # Ray would try for minutes, without a word.
        if named:
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, and nobody listens at {silent}: start the cluster, or unset RAY_ADDRESS"
            )
        _log.warning(
            "the Ray cluster at %s, which `ray start` noted here, is gone (`ray stop` clears the note)", silent
        )
        address = "local"
    if address != "local":
        try:
            ray.init(address=address, **quiet)
            return True
        except (ConnectionError, ValueError) as error:
            if named:
                raise ConfigError(f"RAY_ADDRESS is {address!r}, and no Ray cluster answers there: {error}") from error
    if placement.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes is {placement.nnodes}, but `ray start` has started no Ray cluster here: run "
            "`ray start --head` on one machine and `ray start --address=...` on the others, then start the run on the "
            "first, or set RAY_ADDRESS (docs/scaling.md)"
        )
    # CPUs are what Ray hands out, not cores: a small machine may run more ranks than it has cores.
    num_cpus = max(os.cpu_count() or 1, placement.num_ranks + devices_apart + 1)
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
    warn_of_shared_gpus(ray.cluster_resources().get("GPU", 0), find_gcs_addresses(), os.environ)
    return True


def cluster_in_words() -> str:
    """How large the cluster is that this process has joined."""
    has = ray.cluster_resources()
    number = sum(node["Alive"] for node in ray.nodes())
    return f"Ray cluster: {number} machine(s), {has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs"


def cluster_address(environment: Mapping[str, str]) -> tuple[str, bool]:
    """(address for `ray.init`, whether RAY_ADDRESS names it). `local` = a new cluster.

    RAY_ADDRESS=auto is the default. Ray itself would take any cluster that runs on this machine for it, also one that
    another run started for itself.
    """
    named = environment.get("RAY_ADDRESS") or "auto"
    return (named, True) if named != "auto" else (read_ray_address() or "local", False)


def warn_of_shared_gpus(gpus: float, clusters: Collection[str], environment: Mapping[str, str]) -> None:
    """Clusters know nothing of each other, so that two of them hand out the same GPUs.

    Args:
        gpus: of the cluster that this process started.
        clusters: addresses of all that run on this machine, with this one.
    """
    if gpus and len(clusters) > 1 and "CUDA_VISIBLE_DEVICES" not in environment:
        _log.warning(
            "this run started a Ray cluster with all %g GPUs of this machine, where another Ray cluster runs too: set "
            "CUDA_VISIBLE_DEVICES to different GPUs for each run",
            gpus,
        )


def require_travel(objects: Mapping[str, Any]) -> None:
    """Before anything starts: what a Python call gave can be sent to the ranks.

    Args:
        objects: `Placement.objects`.

    Raises:
        PluginError: one that holds a lock, an open file, a connection; says which variable or attribute it is.
    """
    for name, value in objects.items():
        if (why := _stays_here(value)) is None:
            continue
        held = [f"{part} ({type(thing).__name__})" for part, thing in _held(value) if _stays_here(thing) is not None]
        raise PluginError(
            f"trainer.placement=ray: {name} cannot be sent to the ranks: {why}"
            + (f"; it holds {', '.join(held)}" if held else "")
            + ". Make that inside of it when it is called, name it by a path (file.py:name), or train in this process "
            "(trainer.placement=inline)"
        )


def _stays_here(value: Any) -> str | None:
    try:
        ray.cloudpickle.dumps(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the `__reduce__` of foreign code raises
        return error_text(error, named=True)
    return None


def _held(value: Any) -> ItemsView[str, Any]:
    """Variables that a function closes over, or an object's attributes."""
    if inspect.isfunction(value):
        found = inspect.getclosurevars(value)
        return {**found.globals, **found.nonlocals}.items()
    return {**getattr(value, "__dict__", {})}.items()


def silent_cluster(address: str) -> str | None:
    """`host:port` of `cluster_address` where nobody listens. None = somebody does, or there is nothing to ask. Runs in
    the trainer's main thread. Waits for the connection."""
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        return None  # local, or an address that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except OSError:
        return address
    return None


def bundle(setup: WorkerSetup, devices: int | None = None) -> dict[str, float]:
    """What one machine must have for its workers, or for engines on as many devices."""
    number = float(devices or setup.placement.n_workers_per_node)
    return {"CPU": number} | ({"GPU": number} if setup.device == "cuda" else {})


def resolve_device(setup: WorkerSetup) -> WorkerSetup:
    """`auto` = cuda if the cluster has a GPU for every rank."""
    if setup.device != "auto":
        return setup
    gpus = ray.cluster_resources().get("GPU", 0)
    return replace(setup, device="cuda" if gpus >= setup.placement.num_ranks else "cpu")


def apart(setup: WorkerSetup) -> tuple[int, dict[str, float]] | None:
    """(machines, what each must have) for engines on separate devices; None = there are none."""
    rollout = setup.config.rollout
    devices = keys_of(rollout).devices_apart
    if devices is None or not engines.lives_beside_ranks(rollout.name):
        return None
    machines, on_each = devices
    return machines, bundle(setup, on_each)


def packages_on_machines(rollout: RolloutConfig) -> tuple[str, ...]:
    """Distributions that every machine of a worker group needs for its engines, in one version."""
    if keys_of(rollout).placed == "servers" or not engines.lives_beside_ranks(rollout.name):
        return ()
    return engines.packages_of(rollout.name)


def usable(setup: WorkerSetup) -> list[dict[str, Any]]:
    """Of `ray.nodes()` those where a rank, or an engine on separate devices, could be placed."""
    separate = apart(setup)
    needs = [bundle(setup)] + ([separate[1]] if separate else [])
    return [node for node in ray.nodes() if node["Alive"] and any(_fits(node["Resources"], need) for need in needs)]


def require_room(setup: WorkerSetup) -> None:
    """Whether the cluster could ever hold the group, and beside it engines on separate devices.

    Raises:
        NoRoomError: too few machines that are large enough.
    """
    placement, device, needed, separate = setup.placement, setup.device, bundle(setup), apart(setup)
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    have = "; ".join(f"{m.get('CPU', 0):g} CPUs, {m.get('GPU', 0):g} GPUs" for m in machines) or "none"
    if device == "cuda" and not any(m.get("GPU", 0) for m in machines):
        raise NoRoomError(
            f"trainer.device=cuda, but no machine of the Ray cluster has a GPU that Ray knows of (it has: {have}): "
            "start Ray where the GPUs are, with `ray start --num-gpus=N` where it does not find them, or set "
            "trainer.device=cpu"
        )
    training = [number for number, machine in enumerate(machines) if _fits(machine, needed)]
    if len(training) < placement.nnodes:
        raise NoRoomError(
            f"trainer.nnodes={placement.nnodes} and trainer.n_workers_per_node={placement.n_workers_per_node} on "
            f"{device} need {placement.nnodes} machine(s) with {_wanted(needed)} each. The Ray cluster has: {have}"
        )
    if separate is None:
        return
    number, for_engines = separate
    both = {kind: needed[kind] + for_engines[kind] for kind in needed}
    sampling = [k for k, machine in enumerate(machines) if _fits(machine, for_engines)]
    shared = [k for k, machine in enumerate(machines) if _fits(machine, both)]
    # Each machine is one of training's, one of the engines', or, where it is large enough, one of each.
    if len(sampling) < number or len({*training, *sampling}) + len(shared) < placement.nnodes + number:
        on_each = int(for_engines["CPU"])
        raise NoRoomError(
            f"actor_rollout_ref.rollout.nnodes={number} and .n_workers_per_node={on_each} (separate engines) on "
            f"{device} need {number} machine(s) with {_wanted(for_engines)} each, beside the {placement.nnodes} "
            f"with {_wanted(needed)} each that training takes. The Ray cluster has: {have}"
        )


def _fits(machine: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    """Whether a machine, empty, can hold a bundle."""
    return all(machine.get(kind, 0) >= number for kind, number in needed.items())


def _wanted(needed: Mapping[str, float]) -> str:
    return " and ".join(f"{number:g} {kind}s" for kind, number in needed.items())


def require_same_versions(packages: Sequence[str], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Compare this process's Python and packages with those of the cluster's machines.

    Runs in the trainer's main thread. Waits for a task on each machine, at most `_ASKING_TIMEOUT_S`.

    The build of a version (what stands behind its `+`: CPU, CUDA) may differ: a trainer needs no GPU.

    Args:
        packages: distributions, by name.
        nodes: of `ray.nodes()`; each is asked by a task that takes no resources.

    Raises:
        ConfigError: some have other versions, or lack a package.
        NoRoomError: one does not answer: it is gone, though Ray has not noticed yet, or it hangs.
    """
    tell = _teller()
    task = ray.remote(tell)
    asked = {
        task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
        ).remote(tuple(packages)): f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in nodes
    }
    ray.wait(list(asked), num_returns=len(asked), timeout=_ASKING_TIMEOUT_S)
    told: list[tuple[str, dict[str, str | None]]] = []
    for ref, name in asked.items():
        try:
            told.append((name, ray.get(ref, timeout=0)))
        except RayError as error:
            raise NoRoomError(
                f"{name} of the Ray cluster did not tell its versions within {_ASKING_TIMEOUT_S:.0f} s: "
                f"{error_text(error, named=True)}. See `ray status`, and end or repair it"
            ) from error
    if found := differences(tell(tuple(packages)), told):
        raise ConfigError(
            f"machines of the Ray cluster have other versions than this one: {'; '.join(found)}. On all of them "
            "install the same versions into the Python that `ray start` runs with, then start Ray there again"
        )


def _teller() -> Callable[[tuple[str, ...]], dict[str, str | None]]:
    """A function of a function goes to other processes by value: those need none of this library to call it."""

    def tell(packages: tuple[str, ...]) -> dict[str, str | None]:
        import sys
        from importlib.metadata import PackageNotFoundError, version

        versions: dict[str, str | None] = {"Python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
        for package in packages:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                versions[package] = None
        return versions

    return tell


def differences(own: Mapping[str, str | None], told: Sequence[tuple[str, Mapping[str, str | None]]]) -> list[str]:
    """One text for each package and version that is not this machine's: it and where it is, and this machine's.

    Args:
        own: package -> version, None = not installed.
        told: (machine, the same of it).
    """
    where: dict[tuple[str, str | None], list[str]] = {}
    for machine, versions in told:
        for package, version in versions.items():
            if _public(version) != _public(own[package]):
                where.setdefault((package, version), []).append(machine)
    return [
        f"{_words(package, version)} on {_some(machines)}, {_words(package, own[package])} here"
        for (package, version), machines in sorted(where.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    ]


def _public(version: str | None) -> str | None:
    return version and version.partition("+")[0]


def _words(package: str, version: str | None) -> str:
    return f"no {package}" if version is None else f"{package} {version}"


def _some(machines: Sequence[str]) -> str:
    named, more = ", ".join(machines[:_NAMED]), len(machines) - _NAMED
    return f"{named} and {more} more" if more > 0 else named
