"""Keys of `actor_rollout_ref.rollout` that say where engines and rollout workers live, and how weights reach them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from verl_mt.config.declare import Condition, Section, is_set, no_effect, only, option
from verl_mt.config.extended import ConfigSections
from verl_mt.config.rollout import OTHER_ENGINE
from verl_mt.config.schema import Config, TrainerConfig, explicit_keys, value_of
from verl_mt.extensions.cluster.vllm.arguments import problems_of_arguments

ROLLOUT = "actor_rollout_ref.rollout"
_NO_SERVERS = Condition(
    (f"{ROLLOUT}.servers",),
    lambda of: not of(f"{ROLLOUT}.servers"),
    lambda: f"no {ROLLOUT}.servers are set (you set the options of those when you start them)",
)
_STARTED_HERE = OTHER_ENGINE & _NO_SERVERS


@dataclass
class RolloutKeys(Section):
    """What this extension adds to `actor_rollout_ref.rollout`."""

    num_workers: int | None = option(
        None,
        "Processes that drive the conversations (tools, parsing, tokenization, rewards) instead of the trainer's own. "
        "0 = that one does. null = one for every eight replicas of the engine with trainer.placement=ray, else 0.",
        min=0,
    )
    tensor_model_parallel_size: int = option(
        1, "Ranks of one engine. On Ray it divides n_workers_per_node.", min=1, when=_STARTED_HERE
    )
    gpu_memory_utilization: float = option(
        0.5,
        "Share of the GPU's memory for an engine: sglang takes it of what is free at its start, vllm of all.",
        min=0.01,
        max=1,
        when=_STARTED_HERE,
    )
    free_cache_engine: bool = option(True, "Release the KV cache while training.", when=OTHER_ENGINE)
    placement: str | None = option(
        None,
        "Where engines live: colocated = beside the ranks of training, on their devices. separate = on `nnodes` x "
        "`n_workers_per_node` other devices, placed by Ray. servers = those in `servers`. null = servers where you "
        "name some, separate with `nnodes`, else colocated.",
        choices=(None, "colocated", "separate", "servers"),
        when=OTHER_ENGINE,
    )
    python: str | None = option(
        None,
        "Python that runs the engine's process. null = the one that runs the trainer. vLLM usually has a separate "
        "environment (docs/vllm.md).",
        when=only(f"{ROLLOUT}.name", "vllm", own=False) & _NO_SERVERS,
    )
    # verl's configurations give both to every run.
    nnodes: int = option(
        0, "Machines of separate engines. 0 = there are none.", min=0, when=_STARTED_HERE, allow_unused=True
    )
    n_workers_per_node: int = option(
        1, "Devices of separate engines on each machine.", min=1, when=is_set(f"{ROLLOUT}.nnodes"), allow_unused=True
    )
    servers: list[str] = option(
        [], "URLs of servers that are running already. none = the run starts its engines.", when=OTHER_ENGINE
    )
    launch_servers: int = option(
        0,
        "Number of separate engines on one machine: short for nnodes=1 and the devices that they need. Without Ray: "
        "number of engines to start on this machine, of SGLang as HTTP servers. 0 = none.",
        min=0,
        when=OTHER_ENGINE,
    )
    weight_transport: str = option(
        "auto",
        "How new weights travel: tensors = memory shared on one machine (on GPUs their own). copy = the same, always "
        "through main memory. broadcast = over the network (gloo, or NCCL between GPUs). disk = files in "
        "`weight_sync_dir`. auto = tensors to engines beside the ranks and on this machine, broadcast to others.",
        choices=("auto", "tensors", "copy", "broadcast", "disk"),
        when=OTHER_ENGINE,
    )

    lora_updates: str = option(
        "auto",
        "What engines get of a policy with low-rank adapters at each update: adapters = A and B alone, beside base "
        "weights that the engine reads once. merged = all weights, W + s B A. auto = adapters where the engine takes "
        "them.",
        choices=("auto", "adapters", "merged"),
        when=OTHER_ENGINE & is_set("actor_rollout_ref.model.lora_rank"),
    )

    @property
    def placed(self) -> str:
        """`placement`, or what the other keys say where it is null."""
        if self.placement is not None:
            return self.placement
        return "servers" if self.servers else "separate" if self.nnodes or self.launch_servers else "colocated"

    @property
    def devices_apart(self) -> tuple[int, int] | None:
        """(machines, devices on each) of separate engines that Ray places."""
        if self.placed != "separate":
            return None
        if self.launch_servers:
            return 1, self.launch_servers * self.tensor_model_parallel_size
        return self.nnodes, self.n_workers_per_node

    @property
    def started_on(self) -> tuple[int, tuple[int, int] | None] | None:
        """(devices of one engine, `devices_apart`) of engines that a worker group has places for; None = servers."""
        return None if self.placed == "servers" else (self.tensor_model_parallel_size, self.devices_apart)


def keys_of(rollout: Section) -> RolloutKeys:
    """The same section, typed as one that has the keys of this extension."""
    assert isinstance(rollout, RolloutKeys)
    return rollout


def problems(config: Config) -> Iterator[str]:
    """What cannot be, of the keys above."""
    rollout, keys = config.actor_rollout_ref.rollout, keys_of(config.actor_rollout_ref.rollout)
    yield from _problems_of_workers(config)
    if rollout.name in ("sglang", "vllm"):
        yield from _problems_of_engines(config)
    if rollout.name == "vllm":
        yield from problems_of_arguments(rollout.engine_kwargs)
    if rollout.name not in ("local", "scripted"):  # an engine of the user's may live beside ranks, too
        yield from _problems_of_placement(keys, config.trainer)
    if rollout.engine_kwargs and keys.servers and f"{ROLLOUT}.engine_kwargs" in explicit_keys(config):
        yield (
            f"{ROLLOUT}.engine_kwargs is set, and {ROLLOUT}.servers run already: pass these arguments when you start "
            "the servers, and remove them here"
        )


def _problems_of_workers(config: Config) -> Iterator[str]:
    rollout, count = config.actor_rollout_ref.rollout, keys_of(config.actor_rollout_ref.rollout).num_workers
    asked, limit = f"{ROLLOUT}.num_workers={count}", rollout.max_concurrent
    if not count:
        return
    if rollout.mode == "sync":
        yield (
            f"{asked} with {ROLLOUT}.mode=sync: conversations of several processes cannot take their turns in "
            "lock-step. Use mode=async, or num_workers=0"
        )
    if limit is not None and limit < count:
        yield (
            f"{asked} with {ROLLOUT}.max_concurrent={limit}: each worker needs one conversation of them at least. "
            "Raise it, or have fewer workers"
        )


def _problems_of_engines(config: Config) -> Iterator[str]:
    keys = keys_of(config.actor_rollout_ref.rollout)
    for url in keys.servers:
        if not url.startswith(("http://", "https://")):
            yield f"{ROLLOUT}.servers: {url!r} is no URL. Write http://host:port"
    urls = [url.rstrip("/") for url in keys.servers]
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield f"{ROLLOUT}.servers names {url} {urls.count(url)} times: one server is one replica. Name it once"
    way, folder = keys.weight_transport, config.actor_rollout_ref.rollout.weight_sync_dir
    if folder is not None and way != "disk":
        disk = only(f"{ROLLOUT}.weight_transport", "disk")
        yield no_effect({f"{ROLLOUT}.weight_sync_dir": folder}, disk, partial(value_of, config))
    if way == "broadcast" and keys.placed == "colocated":
        yield f"{ROLLOUT}.weight_transport=broadcast needs servers. The colocated engine shares memory: use tensors"
    if way in ("tensors", "copy") and keys.devices_apart and config.trainer.placement == "ray":
        yield f"{ROLLOUT}.weight_transport={way} is for engines beside the ranks. Separate ones get a broadcast"


def _problems_of_placement(rollout: RolloutKeys, trainer: TrainerConfig) -> Iterator[str]:
    """What is wrong with where engines are to live, beside the worker group of `trainer.placement`."""
    placement, ranks = trainer.placement, trainer.n_workers_per_node
    where = f"{ROLLOUT}.placement={rollout.placed}"
    if rollout.placed == "servers" and not rollout.servers:
        yield f"{where}: {ROLLOUT}.servers names none"
    if rollout.placed == "separate" and not (rollout.nnodes or rollout.launch_servers):
        here = f"{ROLLOUT}.nnodes is 0; say on how many machines, and .n_workers_per_node on each"
        yield f"{where}: {here}"
    given = {"servers": ("servers",), "separate": ("nnodes", "launch_servers")}
    for kind, keys in given.items():
        for key in keys:
            if getattr(rollout, key) and rollout.placed != kind:
                yield f"{where} and {ROLLOUT}.{key} contradict each other: leave one out"
    if rollout.nnodes and rollout.launch_servers:
        yield f"{where}: {ROLLOUT}.nnodes and .launch_servers contradict each other: leave one out"
    size = rollout.tensor_model_parallel_size
    if rollout.placed == "colocated" and placement == "ray" and ranks % size:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={size} does not divide trainer.n_workers_per_node={ranks}: each "
            "engine has the devices of as many ranks of one machine. Set a size that divides it, or set rollout.nnodes "
            "for engines on separate devices"
        )
    if rollout.placed == "separate" and rollout.nnodes:
        if placement != "ray":
            yield f"{where} needs trainer.placement=ray, which places them (it is {placement})"
        if rollout.n_workers_per_node % size:
            yield (
                f"{ROLLOUT}.tensor_model_parallel_size={size} does not divide "
                f"{ROLLOUT}.n_workers_per_node={rollout.n_workers_per_node}: an engine has the devices "
                "of one machine"
            )


SECTIONS = ConfigSections({ROLLOUT: RolloutKeys}, problems=problems)
