"""Rollout workers: processes that drive conversations, so that tools, parsing, tokenization and rewards leave the
trainer's event loop (`actor_rollout_ref.rollout.num_workers`, docs/scaling.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_mt.extensions.cluster.config import keys_of

if TYPE_CHECKING:
    from verl_mt.config.schema import Config
    from verl_mt.extensions.cluster.rollout_workers.pool import RolloutPool
    from verl_mt.rollout.runner import RolloutRunner


def pool_of(config: Config, runner: RolloutRunner) -> RolloutPool | None:
    """The rollout workers of a run whose own runner is this; None where it wants none. Only then their code is loaded.

    Raises:
        ConfigError: another key that cannot be kept over several processes.
    """
    count = keys_of(config.actor_rollout_ref.rollout).num_workers
    if not (config.trainer.placement == "ray" if count is None else count > 0):
        return None
    from verl_mt.extensions.cluster.rollout_workers.build import build_pool

    return build_pool(config, runner)
