"""Scorers under verl's names; the code is in `verl_mt.rewards`."""

from verl_mt.utils.reward_score import gsm8k

__all__ = ["gsm8k"]
