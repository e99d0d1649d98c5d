"""Names and modules of other libraries that are not offered, and what to use instead."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from verl_mt.errors import PluginError


class _NotOffered(ABCMeta):
    """Metaclass of stand-ins: they may be imported, subclassed and written into annotations; using one raises."""

    refusal: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise PluginError(cls.refusal)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        raise AttributeError(cls.refusal)


def not_offered(library: str, name: str, advice: str) -> Any:
    """A stand-in for a name of another library, so that a file which imports it loads. Using it raises a PluginError
    that names it and says `advice`."""
    return _NotOffered(name, (), {"refusal": f"{library}'s {name} is not offered: {advice}"})


_INSTEAD = {
    "verl_mt.experimental": "a custom loop is a scheduler (multi_turn.scheduler), a generate function "
    "(rollout.custom_generate_function_path) or an agent behind an endpoint (rollout.agent_function_path)",
    "verl_mt.utils.dataset": "rows come from parquet or JSONL files, and data.sampler draws them. Take the data set's "
    "class out of the file, and its tools and rewards load",
    "verl_mt.workers.reward_manager": "reward.path names a function, which reward.path=weighted_sum and "
    "reward.overlong_buffer add to",
    "verl_mt.workers.rollout": "a custom engine is rollout.name=my.py:Engine (docs/your_own_engine.md)",
    "verl_mt.trainer": "a custom estimator is algorithm.adv_estimator=my.py:f, a loss "
    "actor.policy_loss.loss_mode=my.py:f (docs/your_own_algorithm.md)",
    "verl_mt.protocol": "there is no DataProto: the pages of rewards, tools and losses say what arguments they get",
}
"""Modules of verl that a file may still import, and that are not offered -> what to use instead."""


def instead_of_module(name: str) -> str:
    """What to use instead of a module of verl, as the end of an error text; "" for other modules.

    Args:
        name: as a file imports it: `verl_mt.experimental.agent_loop`.
    """
    prefix = next((p for p in _INSTEAD if name == p or name.startswith(f"{p}.")), None)
    if prefix is None:
        return ""
    return f". verl's {name.replace('verl_mt', 'verl', 1)} is not offered: {_INSTEAD[prefix]}"
