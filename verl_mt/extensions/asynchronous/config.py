"""Checks of `trainer.max_staleness` and `data.over_sample`."""

from __future__ import annotations

from collections.abc import Iterator

from verl_mt.config.declare import conflicts
from verl_mt.config.extended import ConfigSections
from verl_mt.config.schema import Config


def _problems(config: Config) -> Iterator[str]:
    """What needs a step's own conversations, or one version of the weights to have sampled all of them."""
    trainer, ahead = config.trainer, config.trainer.steps_ahead
    factor = 1.0 if trainer.val_only or config.data.over_sample <= 1 else config.data.over_sample
    more = {"data.over_sample": f"{factor:g}" if factor > 1 else None}
    given = {"trainer.max_staleness": ahead or None, **more}
    if trainer.deterministic:
        yield from conflicts(given, "trainer.deterministic=True", "a clock decides which weights sample a turn")
    if config.actor_rollout_ref.rollout.mode == "sync":
        why = "turns of two steps would wait for each other (mode=async does not)"
        yield from conflicts(given, "actor_rollout_ref.rollout.mode=sync", why)
    if trainer.debug_mode != "save":
        yield from conflicts(given, f"trainer.debug_mode={trainer.debug_mode}", "it does only one of both")
    if config.algorithm.filter_groups.enable:
        why = "it samples the prompts that a step still needs"
        yield from conflicts(more, "algorithm.filter_groups.enable=True", why)
    if factor > (most := max(1, ahead) + 1):
        yield (
            f"data.over_sample={factor:g}: with trainer.max_staleness={trainer.max_staleness} only up to {most} "
            f"batches in flight can all be trained in time. Set {most} or less"
        )


SECTIONS = ConfigSections({}, problems=_problems)
