"""Checks of `actor_rollout_ref.rollout.agent_function_path`."""

from __future__ import annotations

from collections.abc import Iterator

from verl_mt.config.declare import conflicts
from verl_mt.config.extended import ConfigSections
from verl_mt.config.options import read_rollout_correction
from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"


def _problems(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.agent_function_path is None:
        return
    agent = f"{_ROLLOUT}.agent_function_path={rollout.agent_function_path}"
    given = {
        "multi_turn.scheduler": rollout.multi_turn.scheduler,
        "custom_generate_function_path": rollout.custom_generate_function_path,
        "interaction_config_file": rollout.interaction_config_file,
        "tool_kwargs.tools_config_file": rollout.tool_kwargs.tools_config_file,
        "multi_turn.enable": "False" if rollout.multi_turn.enable is False else None,
    }
    why = "an agent brings its own tools, and decides what comes next"
    yield from conflicts({f"{_ROLLOUT}.{name}": value for name, value in given.items()}, agent, why)
    if rollout.mode == "sync":
        yield f"{agent} with {_ROLLOUT}.mode=sync: agents ask when they like. Use mode=async"
    try:
        switches = read_rollout_correction(config.algorithm.rollout_correction).switches
    except ConfigError:  # found by the mapping's own check
        return
    if product := [text for text in switches if text.endswith("=sequence") or "=seq_sum" in text]:
        yield (
            f"{' and '.join(product)} with {agent}: an agent may hold several conversations beside each other, which "
            "are records of one trajectory, and a product over all of them is the ratio of none. Use token, or "
            "geometric (the mean over a trajectory's tokens)"
        )


SECTIONS = ConfigSections({}, problems=_problems)
