"""From a config to its rollout workers: how many, what they do, and what cannot be done with any."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict

from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.config import keys_of
from verl_mt.extensions.cluster.rollout_workers.links import Link, ProcessLink
from verl_mt.extensions.cluster.rollout_workers.pool import RolloutPool
from verl_mt.extensions.cluster.rollout_workers.worker import WorkerSetup, here
from verl_mt.plugins import OBJECT, code_place, load_object, objects_in, plugin_names
from verl_mt.rollout.runner import RolloutRunner

_KEY = "actor_rollout_ref.rollout.num_workers"
_REPLICAS_EACH = 8
_ON_RAY = "verl_mt.rollout_workers.on_ray:RayLink"
"""Named, not imported: a run without Ray does not load it."""


def build_pool(config: Config, runner: RolloutRunner) -> RolloutPool | None:
    """The workers of a run whose own runner is this; None where it wants none.

    Raises:
        ConfigError: another key that cannot be kept over several processes.
    """
    count = num_workers(config, runner)
    if not count:
        return None
    check(config, runner, count)
    engine = runner.context.engine
    setups = [
        WorkerSetup(
            config=_share(config, runner.max_concurrent, number, count),
            plugins=plugin_names(config.external_plugins),
            number=number,
            capabilities=engine.capabilities,
            branch=engine.branch(),
            clock=here(),
            count=count,
        )
        for number in range(count)
    ]
    capacity = None if runner.max_concurrent is None else -(-runner.max_concurrent // count)
    connect: Callable[[], Link] = ProcessLink
    if config.trainer.placement == "ray":
        connect = load_object(_ON_RAY, what="rollout workers on Ray")
    return RolloutPool(runner, setups, connect, capacity)


def num_workers(config: Config, runner: RolloutRunner) -> int:
    """As many as are asked for; else, on Ray, one for every eight replicas of an engine that workers can ask."""
    rollout = config.actor_rollout_ref.rollout
    if (asked := keys_of(rollout).num_workers) is not None:
        return asked
    if config.trainer.placement != "ray" or rollout.mode == "sync" or runner.context.engine.branch() is None:
        return 0
    replicas = int(runner.context.engine.metrics().get("rollout/replicas", 1))
    return max(1, -(-replicas // _REPLICAS_EACH))


def check(config: Config, runner: RolloutRunner, count: int) -> None:
    """Raises:
    ConfigError: what several processes cannot do together.
    """
    rollout, engine = config.actor_rollout_ref.rollout, runner.context.engine
    if here_only := objects_in([asdict(rollout), asdict(config.reward)]):
        name, found = next(iter(here_only.items()))
        name = name.removeprefix(OBJECT)
        raise ConfigError(
            f"{_KEY}={count}: {name} is an object of this Python call ({code_place(found)}). Rollout workers are other "
            f"processes, which find code by its path. Write it into a file and pass 'my_file.py:{name}', or set "
            f"{_KEY}=0"
        )
    if runner.max_concurrent is not None and runner.max_concurrent < count:
        raise ConfigError(
            f"{_KEY}={count}, and at most {runner.max_concurrent} environments may live at once (their `limit`): each "
            f"worker needs one at least. Set {_KEY}={runner.max_concurrent}, or raise the limit"
        )
    if config.trainer.deterministic and engine.branch() is None:
        raise ConfigError(
            f"{_KEY}={count} with trainer.deterministic=True: which requests rollout.name={rollout.name} samples "
            f"together would depend on when they come from several processes. Set {_KEY}=0"
        )


def _share(config: Config, max_concurrent: int | None, number: int, count: int) -> Config:
    """The config of one worker: of the limits of the whole run its share.

    Args:
        max_concurrent: trajectories that live at once in the run, by any of its limits.
    """
    config = copy.deepcopy(config)
    rollout = config.actor_rollout_ref.rollout
    if max_concurrent is not None:
        rollout.max_concurrent = max_concurrent // count + (number < max_concurrent % count)
    rollout.multi_turn.tool_concurrency = -(-rollout.multi_turn.tool_concurrency // count)
    return config
