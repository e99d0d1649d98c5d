"""Scorers under verl's names; the code is in `verl_mt.rewards`."""

from verl_mt.extensions.compat.utils.reward_score import geo3k, gsm8k

__all__ = ["geo3k", "gsm8k"]
